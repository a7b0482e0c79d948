"""Time under a test's control: a clock that never waits, and an event loop whose timers can be made due at once.

Two kinds of time pass in a provider. *Pauses* (pace, back-off) go through the contract's `Clock` and cost nothing with
`FakeClock`. *Deadlines* (an HTTP time-out) are timers of the event loop: `JumpLoop` makes them due without waiting, so
that a sixty-second time-out is tested as it is, in a millisecond.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
from collections.abc import Awaitable, Callable, Coroutine
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any, Final, TypeVar

import anyio
import anyio.lowlevel

T = TypeVar("T")

_POLL_S: Final = 0.02
START: Final = datetime(2026, 3, 2, 12, 0, tzinfo=UTC)


class FakeClock:
    """A contract `Clock` without waiting: each sleeper wakes as soon as no other has to wake earlier.

    Reading and advancing is safe from other threads, so that a fake cloud served in a thread keeps the same time.

    Attributes:
        slept: every pause that was asked for, in order; behaviours assert on them.
    """

    def __init__(self, start: datetime = START) -> None:
        self._now = start
        self._lock = threading.Lock()
        self._wakes: list[tuple[datetime, int]] = []
        self._order = count()
        self.slept: list[timedelta] = []

    def now(self) -> datetime:
        with self._lock:
            return self._now

    async def sleep(self, duration: timedelta) -> None:
        """Sleep until now + duration; other sleepers that are due earlier return earlier."""
        with self._lock:
            self.slept.append(duration)
            wake = (self._now + max(duration, timedelta(0)), next(self._order))
            heapq.heappush(self._wakes, wake)
        try:
            await anyio.lowlevel.checkpoint()
            while self.now() < wake[0]:
                with self._lock:
                    self._now = max(self._now, self._wakes[0][0])
                await anyio.lowlevel.checkpoint()
        finally:
            with self._lock:
                self._wakes.remove(wake)
                heapq.heapify(self._wakes)

    def real_seconds(self, duration: timedelta) -> float:
        return duration.total_seconds()

    def advance(self, duration: timedelta) -> None:
        with self._lock:
            self._now += duration


class JumpLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock can be moved ahead: timers that become due fire at once."""

    _ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self._ahead_s

    def jump(self, seconds: float) -> None:
        self._ahead_s += seconds


def run_virtually(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run an async function on a `JumpLoop`."""
    return anyio.run(main, backend="asyncio", backend_options={"loop_factory": JumpLoop})


class NoDeadline(AssertionError):
    """A call that still waits for an answer after every reasonable deadline."""


async def outlast(
    call: Callable[[], Awaitable[T]],
    hanging: Callable[[], bool],
    *,
    limit: timedelta = timedelta(minutes=10),
) -> tuple[T | Exception, timedelta]:
    """Await a call, and measure how long it was willing to wait for answers that never came.

    While `hanging()` says that a request is being held, loop time jumps a second at a time. Runs on a `JumpLoop` only.

    Raises:
        NoDeadline: the call waited longer than `limit`.
    """
    loop = asyncio.get_running_loop()
    if not isinstance(loop, JumpLoop):
        raise TypeError("outlast() needs run_virtually()")
    outcome: list[T | Exception] = []
    waited_s = 0
    done = anyio.Event()

    async with anyio.create_task_group() as group:

        async def caller() -> None:
            try:
                outcome.append(await call())
            except Exception as exc:  # noqa: BLE001 - whatever it raised is the result to be judged
                outcome.append(exc)
            done.set()

        group.start_soon(caller, name="outlasted call")
        while not outcome:
            if not hanging():
                with anyio.move_on_after(_POLL_S):
                    await done.wait()
                continue
            loop.jump(1.0)
            waited_s += 1
            if waited_s > limit.total_seconds():
                group.cancel_scope.cancel()
                break
            for _ in range(3):
                await anyio.lowlevel.checkpoint()
    if not outcome:
        raise NoDeadline(f"still waiting for an answer after {limit}")
    return outcome[0], timedelta(seconds=waited_s)


async def until(condition: Callable[[], bool], *, tries: int = 500) -> None:
    """Wait until the condition holds, for what happens in another thread or process and needs real time.

    Raises:
        TimeoutError: it still does not after ten seconds.
    """
    for _ in range(tries):
        if condition():
            return
        await _real_pause()
    raise TimeoutError("the condition never came true")


async def _real_pause() -> None:
    # A request on its way through a socket needs real time; nothing virtual can stand in for it.
    await asyncio.sleep(_POLL_S)
