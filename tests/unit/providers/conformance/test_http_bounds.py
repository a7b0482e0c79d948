"""What an answer may cost: bytes on the line, bytes unpacked, values parsed, and time."""

from __future__ import annotations

import gzip
import json
import socket
import subprocess
import sys
import textwrap
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio
import pytest

from spotd_providers.contract.errors import Unavailable
from spotd_providers.kit import http as door
from spotd_providers.kit import shapes
from spotd_providers.kit.http import AnswerLost, HttpAnswer, open_http
from spotd_providers.kit.shapes import VALUES_MAX, BodyTooLarge, Inflate
from tests.cases import every

MIB = 1024 * 1024


@contextmanager
def answering(talk: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server on loopback whose every connection is one call of `talk`, after the request's head."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                line, _ = listener.accept()
            except OSError:
                return
            with line:
                line.recv(65_536)
                try:
                    talk(line)
                except OSError:
                    continue

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()


def whole(body: bytes, *headers: str) -> Callable[[socket.socket], None]:
    head = "\r\n".join(["HTTP/1.1 200 OK", f"content-length: {len(body)}", "connection: close", *headers, "", ""])
    return lambda line: line.sendall(head.encode() + body)


def bomb() -> bytes:
    return gzip.compress(bytes(100 * MIB))


def got(url: str, *, timeout_s: float = 5.0) -> HttpAnswer:
    async def main() -> HttpAnswer:
        async with open_http(url, timeout_s=timeout_s) as http:
            return await http.send("GET", "/")

    return anyio.run(main)


@pytest.fixture(autouse=True)
def _sockets(socket_enabled: None) -> None:
    """The server is on loopback."""


@every("pack", [gzip.compress, zlib.compress], ids=["gzip", "deflate"])
def test_a_packed_answer_is_unpacked(pack: Callable[[bytes], bytes]) -> None:
    body = json.dumps({"offers": list(range(100_000))}).encode()
    word = "gzip" if pack is gzip.compress else "deflate"
    with answering(whole(pack(body), f"content-encoding: {word}")) as url:
        assert got(url).body == body


def test_an_answer_of_several_gzip_members_is_one_body() -> None:
    with answering(whole(gzip.compress(b"[1,") + gzip.compress(b"2]"), "content-encoding: gzip")) as url:
        assert got(url).json() == [1, 2]


@every(
    ("body", "headers"),
    [
        pytest.param(bomb, ["content-encoding: gzip"], id="a-bomb"),
        pytest.param(lambda: gzip.compress(bomb()), ["content-encoding: gzip, gzip"], id="a-bomb-twice"),
        pytest.param(lambda: b"[]", ["content-encoding: br"], id="a-packing-not-asked-for"),
        pytest.param(lambda: b"not gzip at all", ["content-encoding: gzip"], id="not-packed"),
        pytest.param(lambda: gzip.compress(b"[1]")[:-12] + b"garbage-garbage", ["content-encoding: gzip"], id="torn"),
    ],
)
def test_an_answer_that_would_fill_the_memory_is_lost(body: Callable[[], bytes], headers: list[str]) -> None:
    with answering(whole(body(), *headers)) as url, pytest.raises(AnswerLost):
        got(url)


def test_a_body_without_an_end_is_given_up_at_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "BODY_BYTES_MAX", MIB)

    def talk(line: socket.socket) -> None:
        line.sendall(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
        while True:
            line.sendall(bytes(65_536))

    with answering(talk) as url, pytest.raises(AnswerLost, match="larger than"):
        got(url)


def test_an_answer_of_a_byte_now_and_then_is_given_up_at_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "DEADLINE_EXTRA_S", 0.1)

    def talk(line: socket.socket) -> None:
        line.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
        for _ in range(1000):
            time.sleep(0.02)
            line.sendall(b" ")

    began = time.monotonic()
    with answering(talk) as url, pytest.raises(AnswerLost, match="within"):
        got(url, timeout_s=0.2)
    assert time.monotonic() - began < 3


def test_a_small_packed_answer_is_never_unpacked_in_one_piece() -> None:
    inflate = Inflate("gzip", bytes_max=4 * MIB)
    pieces: list[int] = []
    with pytest.raises(BodyTooLarge):
        pieces.extend(len(piece) for piece in inflate(gzip.compress(bytes(64 * MIB))))
    assert 0 < max(pieces) <= 256 * 1024


@every("body", [b"[" + b"[]," * VALUES_MAX + b"[]]", b"[" * (VALUES_MAX + 1), b"[" * 100_000])
def test_a_body_of_too_many_or_too_deep_values_is_not_parsed(body: bytes) -> None:
    with pytest.raises(Unavailable):
        shapes.decode(body, who="it")
    with pytest.raises(Unavailable):
        HttpAnswer(status=200, headers={}, body=body).json()


def test_sixty_kilobytes_on_the_line_cost_no_more_than_the_bound() -> None:
    """In a process of its own, since what it once used is never given back."""
    script = """
        import gzip, resource, sys, anyio
        from tests.unit.providers.conformance.test_http_bounds import answering, whole, got
        from spotd_providers.kit.http import AnswerLost
        from spotd_providers.kit import shapes
        from spotd_providers.contract.errors import Unavailable
        bombs = [gzip.compress(bytes(58 * 1024 * 1024)), gzip.compress(b"[" + b"[]," * 9_000_000 + b"[]]")]
        assert all(len(bomb) < 80_000 for bomb in bombs)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for bomb in bombs:
            with answering(whole(bomb, "content-encoding: gzip")) as url:
                try:
                    shapes.decode(got(url).body, who="it")
                except (AnswerLost, Unavailable):
                    pass
                else:
                    raise SystemExit("it was taken")
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) < 120, "MiB"
