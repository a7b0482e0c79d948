"""The one runner of all loops: interval, wake-up, deadline, back-off, one log line per outage, and figures.

Theory. A controller has a body that compares what is with what should be, does a bounded piece of work, and returns.
The runner decides when it runs next. Pauses are measured by the event loop, never by the wall clock, so that setting a
clock neither hurries nor stops a controller. A wake-up is remembered while the body runs and shortens the next pause;
it says nothing about its cause. An error that the controller expects is an outage: logged when it begins and when it
ends. Every other error ends the daemon, because a defect that is hidden costs more than a restart.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import anyio

from spotd_providers.contract.provider import Logger

# A wake-up without a message: the waiting loop reads the world again, whatever the reason was.


class WakeEvent:
    """A wake-up that is remembered until it is awaited; many count once."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def notify(self) -> None:
        self._event.set()

    async def wait(self, *, seconds: float) -> bool:
        """Wait for the first wake-up or so many real seconds; return whether it was a wake-up."""
        with anyio.move_on_after(max(0.0, seconds)):
            await self._event.wait()
        # Read and replaced without an await between: a wake-up is either seen now or by the next wait.
        was_woken = self._event.is_set()
        if was_woken:
            self._event = anyio.Event()
        return was_woken


DOUBLINGS_MAX: Final = 16
INTERVAL_MIN_S: Final = 0.2
"""However short its interval: what one run could not settle, the next will not a moment later."""


def backoff_s(first_s: float, failures: int, *, max_s: float) -> float:
    """Return the pause after so many failures in a row: doubled with each, up to a limit."""
    return min(first_s * 2.0 ** min(max(failures - 1, 0), DOUBLINGS_MAX), max_s)


class Outage:
    """Something that does not work at the moment: one log line when it begins and one when it is over.

    Attributes:
        error: why it does not work, empty while it does.
    """

    def __init__(
        self, log: Logger, began: str, ended: str, *, each_error: bool = False, is_severe: bool = False
    ) -> None:
        """Name the two log events; with `each_error`, another error during the outage is logged as well."""
        self._log_began = log.error if is_severe else log.warning
        self._log_ended = log.info
        self._began = began
        self._ended = ended
        self._each_error = each_error
        self.error = ""

    def update(self, error: str, **fields: Any) -> None:
        """Begin, continue or end the outage; an empty error ends it."""
        if error and (not self.error or (self._each_error and error != self.error)):
            self._log_began(self._began, error=error, **fields)
        elif self.error and not error:
            self._log_ended(self._ended)
        self.error = error


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Time until the next run, in seconds of the event loop.

    Attributes:
        gap_s: passes first, whatever wakes the controller.
        seconds: passes after the gap; a wake-up ends it.
        is_over: also ends it, asked every `asked_every_s`.
        error: why the run failed, where the body has handled the error itself.
    """

    seconds: float
    gap_s: float = 0.0
    is_over: Callable[[], bool] | None = None
    asked_every_s: float = math.inf
    error: str = ""


@dataclass(slots=True, kw_only=True)
class Metrics:
    """Figures of one controller since the start."""

    runs: int = 0
    errors: int = 0
    last_duration_s: float = 0.0
    total_duration_s: float = 0.0
    last_error: str = ""


class Controller:
    """One loop: its body, and when it runs."""

    def __init__(
        self,
        name: str,
        body: Callable[[], Awaitable[Pause | None]],
        *,
        interval_s: float,
        expected: tuple[type[Exception], ...] = (),
        outage: Outage | None = None,
        retry_s: float | None = None,
        retry_max_s: float | None = None,
        deadline_s: float = math.inf,
        wake_event: WakeEvent | None = None,
        is_first_run_late: bool = False,
    ) -> None:
        """Describe the loop.

        Args:
            body: one run. The pause that it returns replaces the interval and the back-off.
            expected: errors that are an outage; any other one ends the loop.
            retry_s: the pause after a first failure, instead of the interval; doubled up to `retry_max_s`.
            deadline_s: ends a run. Only for a body that may be cancelled at any point.
            is_first_run_late: the first run comes after one interval, not at once.
        """
        self.name = name
        self.wake_event = wake_event or WakeEvent()
        self.metrics = Metrics()
        self._body = body
        self._interval_s = max(INTERVAL_MIN_S, interval_s)
        self._expected = expected
        self._outage = outage
        self._retry_s = interval_s if retry_s is None else retry_s
        self._retry_max_s = self._retry_s if retry_max_s is None else retry_max_s
        self._deadline_s = deadline_s
        self._is_first_run_late = is_first_run_late
        self.failures = 0
        """How many runs in a row have failed."""

    async def run(self) -> None:
        """Repeat the body until this is cancelled."""
        if self._is_first_run_late:
            await self._rest(Pause(seconds=self._interval_s))
        while True:
            await self._rest(await self.run_once())

    async def run_until_success(self) -> None:
        """Repeat the body until one run has succeeded."""
        pause = await self.run_once()
        while self.failures:
            await self._rest(pause)
            pause = await self.run_once()

    async def run_once(self) -> Pause:
        """Run the body, note what became of it, and return the pause until the next run."""
        began_s, pause, error = anyio.current_time(), None, ""
        with anyio.move_on_after(self._deadline_s) as limit:
            try:
                pause = await self._body()
            except self._expected as exc:
                error = str(exc) or type(exc).__name__
        if limit.cancelled_caught:
            error = f"not done within {self._deadline_s:.0f} s"
        error = error or (pause.error if pause is not None else "")
        self._note(error, anyio.current_time() - began_s)
        if pause is not None:
            return pause
        retry_s = backoff_s(self._retry_s, self.failures, max_s=self._retry_max_s)
        return Pause(seconds=retry_s if error else self._interval_s)

    def _note(self, error: str, duration_s: float) -> None:
        self.failures = self.failures + 1 if error else 0
        self.metrics.runs += 1
        self.metrics.errors += bool(error)
        self.metrics.last_duration_s = duration_s
        self.metrics.total_duration_s += duration_s
        self.metrics.last_error = error or self.metrics.last_error
        if self._outage is not None:
            self._outage.update(error)

    async def _rest(self, pause: Pause) -> None:
        await anyio.sleep(pause.gap_s)
        left_s = pause.seconds
        while True:
            step_s = left_s if pause.is_over is None else min(left_s, pause.asked_every_s)
            if await self.wake_event.wait(seconds=step_s):
                return
            left_s -= step_s
            if left_s <= 0 or (pause.is_over is not None and pause.is_over()):
                return
