"""Requests that never arrive whole: begun and left, a byte at a time, or after a good one on the same connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest
import uvicorn
from starlette.responses import PlainTextResponse
from uvicorn.server import ServerState

from spotd.slow_requests import BYTES_MIN, WINDOW_S, TimedH11Protocol
from tests.cases import every

BODY = b"POST /login HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
WHOLE = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


class Timer:
    def __init__(self, due_s: float, call: Callable[[], None]) -> None:
        self.due_s, self.call, self.is_cancelled = due_s, call, False

    def cancel(self) -> None:
        self.is_cancelled = True


class Loop:
    """Time that passes when the test says so; what is to be answered is put aside."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.timers: list[Timer] = []

    def call_later(self, after_s: float, call: Callable[[], None]) -> Timer:
        self.timers.append(Timer(self.now_s + after_s, call))
        return self.timers[-1]

    def create_task(self, work: Coroutine[Any, Any, None], **_: Any) -> asyncio.Future[None]:
        work.close()
        return asyncio.Future(loop=cast("asyncio.AbstractEventLoop", self))

    def get_debug(self) -> bool:
        return False

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds
        due = [one for one in self.timers if one.due_s <= self.now_s and not one.is_cancelled]
        self.timers = [one for one in self.timers if one not in due]
        for timer in due:
            timer.call()


class Transport:
    def __init__(self) -> None:
        self.is_ended = False

    def get_extra_info(self, _name: str) -> None:
        return None

    def is_closing(self) -> bool:
        return self.is_ended

    def abort(self) -> None:
        self.is_ended = True

    def write(self, _data: bytes) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    close = abort


class Peer:
    """One connection, and what happens to it."""

    def __init__(self) -> None:
        config = uvicorn.Config(PlainTextResponse("inside"), http=TimedH11Protocol, lifespan="off", log_config=None)
        config.load()
        self.loop, self.transport = Loop(), Transport()
        self.protocol = TimedH11Protocol(config, ServerState(), {}, _loop=cast("asyncio.AbstractEventLoop", self.loop))
        self.protocol.connection_made(cast("asyncio.Transport", self.transport))

    def send(self, data: bytes, *, every_s: float = 0.0) -> Peer:
        if not self.transport.is_ended:
            self.protocol.data_received(data)
            self.protocol.flow.resume_reading()  # the application takes what comes
        self.loop.pass_s(every_s)
        return self

    @property
    def is_ended(self) -> bool:
        return self.transport.is_ended


def answered(peer: Peer) -> Peer:
    """Return the connection after a request that was answered in full."""
    peer.send(WHOLE)
    conn = peer.protocol.conn
    import h11

    conn.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
    conn.send(h11.EndOfMessage())
    peer.protocol.cycle.response_complete = True
    peer.protocol.on_response_complete()
    return peer


@every(
    "begin",
    [
        pytest.param(lambda: Peer(), id="nothing"),
        pytest.param(lambda: Peer().send(b"GET / HT"), id="part of a head"),
        pytest.param(lambda: Peer().send(BODY), id="no body"),
        pytest.param(lambda: Peer().send(BODY + b"x" * 5), id="part of a body"),
        pytest.param(lambda: answered(Peer()).send(b"G"), id="part of a second request"),
        pytest.param(lambda: answered(Peer()).send(BODY), id="no body of a second request"),
    ],
)
def test_a_request_that_comes_a_byte_at_a_time_is_ended(begin: Callable[[], Peer]) -> None:
    peer = begin()
    assert not peer.is_ended
    for _ in range(int(WINDOW_S) + 1):
        peer.send(b"x", every_s=1.0)
    assert peer.is_ended


def test_a_large_body_that_comes_steadily_and_a_whole_request_are_not_ended() -> None:
    steady = Peer().send(BODY)
    for _ in range(40):
        steady.send(b"x" * (BYTES_MIN // 2), every_s=10.0)
        assert not steady.is_ended
    for _ in range(12):
        steady.send(b"x", every_s=10.0)
    assert steady.is_ended, "it stopped in the middle"
    served = Peer().send(WHOLE)
    served.loop.pass_s(10 * WINDOW_S)
    assert not served.is_ended, "its answer takes as long as it takes"


def test_the_time_in_which_the_application_does_not_read_is_not_the_peers() -> None:
    peer = Peer().send(BODY)
    peer.protocol.flow.pause_reading()
    peer.loop.pass_s(3 * WINDOW_S)
    assert not peer.is_ended
    peer.protocol.flow.resume_reading()
    peer.loop.pass_s(WINDOW_S)
    assert peer.is_ended


def test_a_timer_ends_with_its_connection() -> None:
    peer = Peer().send(BODY)
    peer.protocol.connection_lost(None)
    assert all(timer.is_cancelled for timer in peer.loop.timers)
