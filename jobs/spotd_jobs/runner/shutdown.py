"""All reasons from outside to end an attempt, polled in one place by one thread.

The first stop that is seen decides how the attempt ends; later ones can only shorten the time it has for that.
"""

from __future__ import annotations

import json
import os
import select
import signal
import threading
import time
from typing import Any, Callable, NamedTuple

from spotd_jobs.runner.heartbeat import Status, notice_row
from spotd_jobs.runner.store import GrantKeeper, RunnerStore
from spotd_jobs.wire.client import web
from spotd_jobs.wire.client.sinks import clean, log_line, read_text, reason_of, write_whole
from spotd_jobs.wire.client.web import CLOCK, as_epoch, as_text, steady

# Early warnings: where they come from, and how the job learns of them.
#
# Sources: SIGTERM to the runner, an order in the grant, `$SPOTD_HOME/notice` (written by the machine's owner), and
# the metadata service of the cloud. A *rebalance* recommendation only asks for a checkpoint; all others end the
# attempt.


_IMDS_EVERY_S = 5.0
_IMDS_TIMEOUT_S = 2.0
_IMDS_TOKEN_S = 21600
_STALE_S = 600.0
_NOTICE_S = 120.0
_SOFT_OFF_S = 30.0
_GOOGLE = "/computeMetadata/v1"


class Notice(NamedTuple):
    """The machine goes away, at `at` where that is known (seconds since 1970, the store's clock)."""

    source: str
    reason: str
    at: float | None

    @property
    def at_text(self) -> str | None:
        return None if self.at is None else as_text(self.at)


class JobFile:
    """`SPOTD_NOTICE_FILE`: what the job itself may read of all this."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._seq = 0

    def write(self, kind: str, reason: str, at: float | None) -> None:
        self._seq += 1
        content = {
            "schema": 1,
            "kind": kind,
            "at": None if at is None else as_text(at),
            "reason": reason,
            "seq": self._seq,
        }
        try:
            write_whole(self.path, json.dumps(content).encode(), mode=0o644)
        except OSError as error:
            log_line("the notice file could not be written: " + reason_of(error))


def from_file(path: str) -> Notice | None:
    """Return the notice that the machine's owner left at this path. Half a file is no notice yet."""
    text = read_text(path, 65536)
    if text is None:
        return None
    try:
        content = json.loads(text)
        at = content.get("at")
        return Notice("file", clean(str(content.get("reason") or "preempted")), as_epoch(at) if at else None)
    except (ValueError, TypeError, AttributeError):
        return None


class ImdsWatch:
    """Asks the metadata service of an AWS machine (IMDSv2) until it announces an interruption.

    Args:
        on_notice, on_rebalance: called from this watch's thread, each once.
    """

    def __init__(self, base_url: str, on_notice: Callable[[Notice], None], on_rebalance: Callable[[str], None]) -> None:
        self._base = base_url.rstrip("/")
        self._on_notice = on_notice
        self._on_rebalance = on_rebalance
        self._token: str | None = None
        self._rebalance_seen = False

    def start(self) -> None:
        threading.Thread(target=self._watch, name="imds", daemon=True).start()

    def _watch(self) -> None:
        try:
            self._ask_on()
        finally:
            web.drop_connections()

    def _ask_on(self) -> None:
        while True:
            try:
                if self._ask_both():
                    return
            except web.WebError:
                pass  # it is not always there, and asking again is all that can be done
            except Exception as error:  # noqa: BLE001 - one odd answer must not end the watch for warnings
                log_line("the metadata service gave an odd answer: " + reason_of(error))
            time.sleep(_IMDS_EVERY_S)

    def _ask_both(self) -> bool:
        action = self._get("/latest/meta-data/spot/instance-action")
        if action is not None:
            at = _time_of(action)
            # After a termination that failed, the old announcement stays.
            if at > CLOCK.now() - _STALE_S:
                self._on_notice(Notice("imds", "spot " + clean(str(action.get("action") or "interruption")), at))
                return True
        if not self._rebalance_seen:
            advice = self._get("/latest/meta-data/events/recommendations/rebalance")
            if advice is not None:
                self._rebalance_seen = True
                self._on_rebalance("spot rebalance recommendation")
        return False

    def _get(self, path: str) -> dict[str, Any] | None:
        status, body = self._get_once(path)
        if status == 401:
            self._token = None
            status, body = self._get_once(path)
        if status == 404:
            return None
        if status != 200:
            raise web.error_of(status)
        content = json.loads(body)
        return content if isinstance(content, dict) else None

    def _get_once(self, path: str) -> tuple[int, bytes]:
        if self._token is None:
            life = {"X-aws-ec2-metadata-token-ttl-seconds": str(_IMDS_TOKEN_S)}
            status, _, body = web.request("PUT", self._base + "/latest/api/token", life, [b""], _IMDS_TIMEOUT_S)
            if status != 200:
                raise web.error_of(status)
            self._token = body.decode("ascii", "replace").strip()
        headers = {"X-aws-ec2-metadata-token": self._token}
        status, _, body = web.request("GET", self._base + path, headers, None, _IMDS_TIMEOUT_S)
        return status, body


class GoogleWatch(ImdsWatch):
    """The same for a Google machine, whose base URL ends in `/computeMetadata/v1`.

    A preemption has no time of its own. It comes two minutes ahead, or thirty seconds: these count.
    """

    def _ask_both(self) -> bool:
        if self._word("/instance/preempted") == "TRUE":
            self._on_notice(Notice("imds", "spot preemption", CLOCK.now() + _SOFT_OFF_S))
            return True
        if not self._rebalance_seen and self._word("/instance/maintenance-event") == "TERMINATE_ON_HOST_MAINTENANCE":
            self._rebalance_seen = True
            self._on_rebalance("maintenance of the host in about an hour")
        return False

    def _word(self, path: str) -> str:
        headers = {"Metadata-Flavor": "Google"}
        status, _, body = web.request("GET", self._base + path, headers, None, _IMDS_TIMEOUT_S)
        if status == 404:
            return ""
        if status != 200:
            raise web.error_of(status)
        return body.decode("ascii", "replace").strip()


def metadata_watch(
    base_url: str, on_notice: Callable[[Notice], None], on_rebalance: Callable[[str], None]
) -> ImdsWatch:
    """Return the watch for the cloud that this base URL is of."""
    kind = GoogleWatch if base_url.rstrip("/").endswith(_GOOGLE) else ImdsWatch
    return kind(base_url, on_notice, on_rebalance)


def _time_of(action: dict[str, Any]) -> float:
    """When the machine is taken; as soon as AWS ever takes one where the announcement does not state it legibly."""
    try:
        return as_epoch(str(action["time"]))
    except (KeyError, ValueError, OverflowError) as error:
        log_line(
            "the announced interruption has no time that can be read, so it is two minutes from now: "
            + reason_of(error)
        )
        return CLOCK.now() + _NOTICE_S


def imds_url(wanted: str | None) -> str | None:
    """Where to ask: as the grant states, or the setting that AWS's own tools read."""
    return wanted or os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or None


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


def time_to_save(at: float) -> float:
    """Return for how many seconds from now a job may go on that has to be stored when its machine goes at `at`."""
    left_s = at - CLOCK.now()
    return left_s - min(_RESERVE_MAX_S, left_s * _RESERVE_SHARE) if left_s > 0 else float("inf")


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
        job_file: JobFile,
        home: str,
        gang: Any = None,
    ) -> None:
        self._keeper = keeper
        self._gang = gang
        self._wakeups = wakeups
        self._store = store
        self._status = status
        self._job_file = job_file
        self._notice_path = os.path.join(home, "notice")
        self._imds_notice: Notice | None = None
        self._latest_kills: dict[float, float] = {}
        self._imds_rebalance: str | None = None
        self._orders_seen = keeper.grant.checkpoint_order
        self._status.order_checkpoint = self._orders_seen
        self.stop: Stop | None = None
        self.wants_checkpoint = False
        """Set when the job was asked for a checkpoint; the attempt clears it."""
        settings = keeper.grant.raw.get("notice") or {}
        self._watch_file = bool(settings.get("file", True))
        base = imds_url(settings.get("imds"))
        if base:
            metadata_watch(base, self._on_imds, self._on_rebalance).start()

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
            self._latest_kills[at] = steady() + time_to_save(at)
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
        # The grant of an attempt that is over is removed, after it is known where the next one's is.
        if self._keeper.withdrawn and not (self._gang is not None and self._gang.is_without_first):
            return Stop("not_current", "the grant is no longer this attempt's", None, 0.0, flush=False)
        if self._keeper.lease_left_s() < 0:
            return Stop("lease_expired", "no newer grant within %g s" % self._keeper.grant.lease_s)
        return None if self._gang is None else self._gang.stop()

    def _notice(self) -> Notice | None:
        if self._imds_notice is not None:
            return self._imds_notice
        found = from_file(self._notice_path) if self._watch_file else None
        if found is None and self._wakeups.terminated:
            found = Notice("signal", "the machine is shutting down (SIGTERM)", None)
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
            source = "gang" if stop.outcome == "member_lost" else "grant"
            self._store.events.add("stop_order", source=source, reason=stop.reason, at=at)
        self._job_file.write("preempt" if stop.outcome == "preempted" else "stop", stop.reason, stop.at)

    def _on_imds(self, notice: Notice) -> None:
        self._imds_notice = notice
        self._wakeups.wake()

    def _on_rebalance(self, reason: str) -> None:
        self._imds_rebalance = reason
        self._wakeups.wake()


# Work beside the main thread, which goes on waiting for reasons to stop meanwhile.


class Background:
    """Work in a thread, whose result or error the main thread picks up."""

    def __init__(self, work: Callable[[], Any], wakeups: Wakeups, name: str) -> None:
        self._work = work
        self._wakeups = wakeups
        self.done = False
        self._result: Any = None
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:  # noqa: BLE001 - carried to the main thread, which raises it
            self._error = error
        self.done = True
        self._wakeups.wake()
