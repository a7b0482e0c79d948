"""One scraper, many, and those that are slow or hostile: none of them holds anything up."""

from __future__ import annotations

import errno
from typing import Any

import anyio
import anyio.abc
import pytest

from spotd.api.responses import ApiUnavailable
from spotd.service.metrics_listener import (
    ANSWER_WITHIN_S,
    BIND_AGAIN_S,
    CONNECTIONS_MAX,
    KEPT_S,
    MetricsListener,
    MetricsText,
)
from tests.unit.daemon.rig import Log

pytestmark = pytest.mark.anyio
GET = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:9464\r\n\r\n"


class Peer(anyio.abc.ByteStream):
    """The other end of a connection: it sends these pieces, then is silent or gone."""

    def __init__(self, *pieces: bytes, stays: bool = False, reads: bool = True) -> None:
        self.pieces = list(pieces)
        self.stays = stays
        self.reads = reads
        self.got = b""
        self.is_closed = False

    async def receive(self, max_bytes: int = 65536) -> bytes:
        if self.pieces:
            return self.pieces.pop(0)
        if self.stays:
            await anyio.sleep_forever()
        raise anyio.EndOfStream

    async def send(self, item: bytes) -> None:
        if not self.reads:
            await anyio.sleep_forever()
        self.got += item

    async def send_eof(self) -> None:
        pass

    async def aclose(self) -> None:
        self.is_closed = True

    @property
    def extra_attributes(self) -> Any:
        return {}

    @property
    def status(self) -> int:
        return int(self.got.split(b" ")[1]) if self.got else 0


class Source:
    """Counts how often the figures are computed."""

    def __init__(self, *, takes_s: float = 0.0, error: Exception | None = None) -> None:
        self.count = 0
        self.takes_s = takes_s
        self.error = error

    async def __call__(self) -> bytes:
        self.count += 1
        await anyio.sleep(self.takes_s)
        if self.error is not None:
            raise self.error
        return b"spotd_info 1\n"


def listener(source: Source, host: str = "127.0.0.1") -> MetricsListener:
    return MetricsListener(host, 9464, MetricsText(source, log=Log()), log=Log())


async def test_a_scrape_gets_the_figures_and_a_closed_connection() -> None:
    peer = Peer(GET[:20], GET[20:])
    await listener(Source()).answer(peer)
    assert peer.got.endswith(b"Connection: close\r\n\r\nspotd_info 1\n")
    assert b"Content-Length: 13\r\n" in peer.got
    assert peer.is_closed


@pytest.mark.parametrize(
    ("request_text", "status"),
    [
        pytest.param(b"GET /metrics?x=1 HTTP/1.1\r\nhost: localhost\r\n\r\n", 200, id="query"),
        pytest.param(b"GET /metrics HTTP/1.1\r\nHost: [::1]:9464\r\n\r\n", 200, id="IPv6"),
        pytest.param(b"GET / HTTP/1.0\r\n\r\n", 200, id="root"),
        pytest.param(b"GET /metrics HTTP/1.1\r\nHost: evil.example\r\n\r\n", 403, id="a name that leads here"),
        pytest.param(b"POST /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", 405, id="POST"),
        pytest.param(b"GET /v1/jobs HTTP/1.1\r\nHost: localhost\r\n\r\n", 404, id="elsewhere"),
        pytest.param(b"\x16\x03\x01\xff\r\n\r\n", 405, id="TLS"),
        pytest.param(b"G" * 100_000, 0, id="endless"),
        pytest.param(b"", 0, id="nothing"),
    ],
)
async def test_every_request_has_its_answer(request_text: bytes, status: int) -> None:
    peer = Peer(*(request_text[n : n + 4096] for n in range(0, len(request_text), 4096)))
    await listener(Source()).answer(peer)
    assert (peer.status, peer.is_closed) == (status, True)


async def test_an_address_that_others_reach_answers_to_any_name() -> None:
    peer = Peer(b"GET /metrics HTTP/1.1\r\nHost: spotd.example\r\n\r\n")
    await listener(Source(), host="192.0.2.1").answer(peer)
    assert peer.status == 200


async def test_many_scrapers_at_once_cost_one_computation() -> None:
    source = Source(takes_s=1.0)
    served = listener(source)
    peers = [Peer(GET) for _ in range(CONNECTIONS_MAX)]
    async with anyio.create_task_group() as group:
        for peer in peers:
            group.start_soon(served.answer, peer)
    assert {peer.status for peer in peers} == {200}
    assert source.count == 1
    await anyio.sleep(KEPT_S)
    await served.answer(Peer(GET))
    assert source.count == 2


async def test_slow_scrapers_are_dropped_and_those_beyond_the_limit_are_refused() -> None:
    served = listener(Source())
    slow = [Peer(GET, stays=True, reads=False) for _ in range(CONNECTIONS_MAX)]
    async with anyio.create_task_group() as group:
        for peer in slow:
            group.start_soon(served.answer, peer)
        await anyio.sleep(0.1)
        refused, began = Peer(GET, stays=True), anyio.current_time()
        await served.answer(refused)
        assert refused.status == 503
        assert anyio.current_time() == began, "it holds a socket of the daemon no longer than that takes"
        await anyio.sleep(ANSWER_WITHIN_S)
        assert all(peer.is_closed for peer in slow)
        late = Peer(GET)
        await served.answer(late)
        assert late.status == 200


async def test_silent_connections_make_room_oldest_first_and_those_that_are_answered_stay() -> None:
    served = listener(Source(takes_s=1.0))
    asking = [Peer(GET) for _ in range(CONNECTIONS_MAX - 2)]
    silent = [Peer(b"GET /", stays=True), Peer(stays=True)]
    async with anyio.create_task_group() as group:
        for peer in (*asking, *silent):
            group.start_soon(served.answer, peer)
            await anyio.sleep(0.01)
        newest = Peer(GET)
        group.start_soon(served.answer, newest)
        await anyio.sleep(0.1)
        assert [peer.is_closed for peer in silent] == [True, False]
        flood = [Peer(stays=True) for _ in range(10 * CONNECTIONS_MAX)]
        for peer in flood:
            group.start_soon(served.answer, peer)
        await anyio.sleep(0.1)
        assert sum(not peer.is_closed for peer in (*asking, newest, *flood)) <= CONNECTIONS_MAX
        last = Peer(GET)
        group.start_soon(served.answer, last)
    assert {peer.status for peer in (*asking, newest, last)} == {200}


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(Source(error=ApiUnavailable("the disk is full", hint="")), id="the state cannot be read"),
        pytest.param(Source(error=RuntimeError("a bug")), id="a defect"),
        pytest.param(Source(takes_s=1e6), id="never"),
    ],
)
async def test_figures_that_cannot_be_had_are_an_answer(source: Source) -> None:
    peer = Peer(GET)
    await listener(source).answer(peer)
    assert peer.status == 503
    assert b"a bug" not in peer.got


class NoSocketLeft:
    """A listener that gets one connection too many for the process."""

    def __init__(self) -> None:
        self.count = 0

    async def listen(self, **_where: Any) -> NoSocketLeft:
        return self

    async def __aenter__(self) -> None:
        self.count += 1

    async def __aexit__(self, *_error: object) -> None:
        pass

    async def serve(self, _answer: object) -> None:
        async with anyio.create_task_group():
            raise OSError(errno.EMFILE, "Too many open files")


async def test_more_connections_than_the_process_has_files_do_not_end_the_daemon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flooded = NoSocketLeft()
    monkeypatch.setattr(anyio, "create_tcp_listener", flooded.listen)
    served = listener(Source())
    with anyio.move_on_after(BIND_AGAIN_S * 1.5):
        await served.run()
    assert flooded.count == 2
    assert "Too many open files" in served.last_error
