"""All reasons from outside to end an attempt, polled in one place by one thread.

The first stop that is seen decides how the attempt ends; later ones can only shorten the time it has for that.
"""

from __future__ import annotations

import os
import select
import signal
from typing import Any, NamedTuple

from spotd_jobs.runner import notices
from spotd_jobs.runner.grants import GrantKeeper
from spotd_jobs.runner.heartbeat import Status, notice_row
from spotd_jobs.runner.store import RunnerStore
from spotd_jobs.wire.client.clocks import CLOCK, as_text, steady
from spotd_jobs.wire.client.console import clean, log_line

TICK_S = 0.1
_RESERVE_SHARE = 0.25
_RESERVE_MAX_S = 30.0


class Stop(NamedTuple):
    """Why and how fast the attempt must end.

    Attributes:
        outcome: as it will be reported.
        at: when the machine goes away, seconds since 1970.
        grace_s: for the job to save; `None` is the job's own.
        flush: what is complete is still uploaded.
    """

    outcome: str
    reason: str
    at: float | None = None
    grace_s: float | None = None
    flush: bool = True


class Wakeups:
    """Signals, and other threads, end the main thread's sleep."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        self.terminated = False
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for name in ("SIGTERM", "SIGINT"):
            signal.signal(getattr(signal, name), self._note)
        signal.signal(signal.SIGCHLD, _ignore)  # a handler, so that it wakes; ignoring would lose exit codes
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the session that started this may end

    def _note(self, number: int, frame: Any) -> None:
        del number, frame
        self.terminated = True

    def wake(self) -> None:
        try:
            os.write(self._writer, b"w")
        except (BlockingIOError, OSError):
            return  # it is full of reasons to wake already

    def sleep(self, seconds: float) -> None:
        """At most so long; shorter when something happened."""
        try:
            if select.select([self._reader], [], [], max(0.0, seconds))[0]:
                while len(os.read(self._reader, 4096)) == 4096:
                    continue
        except (BlockingIOError, InterruptedError):
            return


def _ignore(number: int, frame: Any) -> None:
    del number, frame


class ShutdownWatch:
    """A watch for reasons to stop; `poll` is called every tick by the main thread alone."""

    def __init__(
        self,
        keeper: GrantKeeper,
        wakeups: Wakeups,
        store: RunnerStore,
        status: Status,
        job_file: notices.JobFile,
        home: str,
    ) -> None:
        self._keeper = keeper
        self._wakeups = wakeups
        self._store = store
        self._status = status
        self._job_file = job_file
        self._notice_path = os.path.join(home, "notice")
        self._imds_notice: notices.Notice | None = None
        self._latest_kills: dict[float, float] = {}
        self._imds_rebalance: str | None = None
        self._orders_seen = keeper.grant.checkpoint_order
        self._status.order_checkpoint = self._orders_seen
        self.stop: Stop | None = None
        self.wants_checkpoint = False
        """Set when the job was asked for a checkpoint; the attempt clears it."""
        settings = keeper.grant.raw.get("notice") or {}
        self._watch_file = bool(settings.get("file", True))
        base = notices.imds_url(settings.get("imds"))
        if base:
            notices.ImdsWatch(base, self._on_imds, self._on_rebalance).start()

    def poll(self) -> Stop | None:
        """Return the reason to stop, if there is one by now."""
        if self.stop is None:
            self._pass_on_requests()
            self.stop = self._find_stop()
            if self.stop is not None:
                self._announce(self.stop)
        return self.stop

    def kill_at(self, began: float, job_grace_s: float) -> float:
        """When the job's time to save is over; asked again and again, since news may shorten it."""
        stop = self.stop
        if stop is None:
            return float("inf")
        grace_s = job_grace_s if stop.grace_s is None else stop.grace_s
        order = self._keeper.grant.stop
        if order is not None and order.get("grace_s") is not None:
            grace_s = min(grace_s, float(order["grace_s"]))
        if self._keeper.withdrawn:
            grace_s = 0.0
        kill_at = began + grace_s
        notice = self._notice()
        for at in (stop.at, notice.at if notice else None):
            if at is not None:
                kill_at = min(kill_at, self._latest_kill(at))
        return kill_at

    def _latest_kill(self, at: float) -> float:
        """When the job must be gone if the machine goes at `at`: fixed when that is first known.

        An end that should have come already shows a wrong clock, not a dead machine.
        """
        if at not in self._latest_kills:
            left_s = at - CLOCK.now()
            reserve_s = min(_RESERVE_MAX_S, left_s * _RESERVE_SHARE)
            self._latest_kills[at] = steady() + left_s - reserve_s if left_s > 0 else float("inf")
        return self._latest_kills[at]

    def _find_stop(self) -> Stop | None:
        notice = self._notice()
        if notice is not None:
            self._status.notice = notice_row(notice.source, notice.reason, notice.at_text)
            return Stop("preempted", notice.reason, notice.at)
        order = self._keeper.grant.stop
        if order is not None:
            grace_s = order.get("grace_s")
            reason = clean(str(order.get("reason") or "no reason given"))
            return Stop(
                "stopped", reason, None, None if grace_s is None else float(grace_s), bool(order.get("flush", True))
            )
        if self._keeper.withdrawn:
            return Stop("not_current", "the grant is no longer this attempt's", None, 0.0, flush=False)
        if self._keeper.lease_left_s() < 0:
            return Stop("lease_expired", "no newer grant within %g s" % self._keeper.grant.lease_s)
        return None

    def _notice(self) -> notices.Notice | None:
        if self._imds_notice is not None:
            return self._imds_notice
        found = notices.from_file(self._notice_path) if self._watch_file else None
        if found is None and self._wakeups.terminated:
            found = notices.Notice("signal", "the machine is shutting down (SIGTERM)", None)
        return found

    def _pass_on_requests(self) -> None:
        order = self._keeper.grant.checkpoint_order
        if order > self._orders_seen:
            self._orders_seen = self._status.order_checkpoint = order
            self._job_file.write("checkpoint", "a checkpoint is requested", None)
            self._store.events.add("checkpoint_order", seq=order)
            self.wants_checkpoint = True
        if self._imds_rebalance is not None:
            reason, self._imds_rebalance = self._imds_rebalance, None
            self._job_file.write("rebalance", reason, None)
            self._store.events.add("rebalance", source="imds", reason=reason, at=None)
            self.wants_checkpoint = True

    def _announce(self, stop: Stop) -> None:
        log_line("stopping: " + stop.reason)
        at = None if stop.at is None else as_text(stop.at)
        if stop.outcome == "preempted":
            source = (self._status.notice or {}).get("source")
            self._store.events.add("preempt_notice", source=source, reason=stop.reason, at=at)
        elif stop.outcome == "lease_expired":
            self._store.events.add("lease_expired", lease_s=self._keeper.grant.lease_s)
        else:
            self._store.events.add("stop_order", source="grant", reason=stop.reason, at=at)
        self._job_file.write("preempt" if stop.outcome == "preempted" else "stop", stop.reason, stop.at)

    def _on_imds(self, notice: notices.Notice) -> None:
        self._imds_notice = notice
        self._wakeups.wake()

    def _on_rebalance(self, reason: str) -> None:
        self._imds_rebalance = reason
        self._wakeups.wake()
