"""The event loop of one simulated process: its timers are actions of the agenda, so that virtual time drives it."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from datetime import datetime, timedelta
from typing import Any, Final, TypeVarTuple

from tests.sim.agenda import Agenda

STEPS_MAX: Final = 1_000_000
"""Within one instant; more is a loop without end."""
SLEEP_CHECKED_EVERY: Final = timedelta(minutes=1)
MICROSECOND: Final = timedelta(microseconds=1)

Args = TypeVarTuple("Args")


class ProcessLoop(asyncio.BaseEventLoop):
    """Runs callbacks until none is ready; while the computer sleeps none runs."""

    def __init__(self, agenda: Agenda, asleep_until: Callable[[], datetime | None]) -> None:
        self._agenda = agenda
        self._asleep_until = asleep_until
        self._begun_at = agenda.now
        self._ready: deque[asyncio.Handle] = deque()
        self._is_running = self._is_closed = self._is_due = False
        super().__init__()
        self.errors: list[str] = []
        """What was raised in a callback."""

    # --- what asyncio and anyio call ---

    def time(self) -> float:
        return (self._agenda.now - self._begun_at).total_seconds()

    def call_soon(
        self, callback: Callable[[*Args], object], *args: *Args, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        if not self._is_running and not self._is_due:
            self._is_due = True
            self._agenda.at(self._agenda.now, self.run)
        return handle

    def call_later(
        self, delay: float, callback: Callable[[*Args], object], *args: *Args, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Args], object], *args: *Args, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        if math.isinf(when):
            return handle
        # Rounded up: a timer that runs a moment early is set again, by anyio, for the same instant.
        due = self._begun_at + timedelta(microseconds=int(when * 1e6)) + MICROSECOND

        def fire() -> None:
            if not self._is_closed and not handle.cancelled():
                self._ready.append(handle)
                self.run()

        self._agenda.at(due, fire)
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:  # type: ignore[override]  # typeshed names each option
        return asyncio.Task(coro, loop=self, name=options.get("name"))

    def get_task_factory(self) -> None:
        return None

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.errors.append(f"{context.get('message')}: {context.get('exception')!r}")

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._is_running

    def is_closed(self) -> bool:
        return self._is_closed

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Leave it to the agenda: a cancelled timer does nothing when it is due."""

    # --- what the simulator calls ---

    def run(self, *, even_asleep: bool = False) -> None:
        """Run what is ready, and what that makes ready, without any time passing."""
        if self._is_running or self._is_closed:
            return
        self._is_due = False
        until = self._asleep_until()
        if until is not None and self._agenda.now < until and not even_asleep:
            self._is_due = True
            self._agenda.at(min(until, self._agenda.now + SLEEP_CHECKED_EVERY), self.run)  # the calm wakes it
            return
        self._is_running = True
        asyncio._set_running_loop(self)
        try:
            self._run_ready()
        finally:
            asyncio._set_running_loop(None)
            self._is_running = False

    def _run_ready(self) -> None:
        for _ in range(STEPS_MAX):
            if not self._ready:
                return
            handle = self._ready.popleft()
            if not handle.cancelled():
                handle._run()
        raise RuntimeError("the process runs on without any time passing")

    def close(self) -> None:
        """Nothing of the process runs any more."""
        self._is_closed = True

    def __del__(self) -> None:
        """Leave it: a process that was killed closes nothing, and this loop holds nothing of the system."""
