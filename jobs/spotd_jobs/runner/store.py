"""The attempt's place in the store: puts that survive bad hours, numbered reports, and the thread that sends events.

Every put asks the newest grant for its writer, so that a renewed permission is used by the very next try.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from typing import Any, Callable

from spotd_jobs.wire.client import web
from spotd_jobs.wire.client.grant_sinks import sink_of
from spotd_jobs.wire.client.sinks import Sink, SinkDenied, SinkError, clean, log_line, reason_of
from spotd_jobs.wire.client.web import CLOCK, Backoff, as_epoch, now_text, steady

# A mark for the machine outside this process: as long as it changes, the lease is being renewed.
#
# A machine that this process can not end by itself any more, because it hangs, is ended by a watchdog of the machine's
# own shell (where a provider's start has one), which knows the lease from this file alone.


MACHINE_LEASE = "machine-lease"
BEYOND_S = 1800.0
"""What a machine may do after its lease: stop the job, save and upload what is left, end itself."""
_LIMIT_MAX_S = 999_999


class LeaseFile:
    """The file that shows how long this machine may go on without another mark."""

    def __init__(self, *, wanted: bool) -> None:
        self._path = os.path.join(os.getcwd(), MACHINE_LEASE) if wanted else ""
        self._marks = 0
        self._failed = False

    def mark(self, lease_s: float, grace_s: float) -> None:
        """Record that the lease was renewed now. Failing is no reason to stop anything."""
        if not self._path:
            return
        self._marks += 1
        limit_s = int(min(max(lease_s, 0.0) + max(grace_s, 0.0) + BEYOND_S, _LIMIT_MAX_S))
        # In place and always as long, so that a full disk does not hinder it.
        text = "%010d %06d\n" % (self._marks, limit_s)
        try:
            place = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                os.write(place, text.encode())
            finally:
                os.close(place)
        except OSError as error:
            if not self._failed:
                log_line("the mark of the lease can not be written: " + reason_of(error))
            self._failed = True


# The grant: leave to act, until when, and what is asked now. Kept fresh by a thread of its own.
#
# The lease is renewed exactly when a grant arrives that was issued later than every one before, so a store that goes on
# serving an old file (its daemon is dead or asleep) renews nothing.


GRANT_BYTES_MAX = 64 * 1024 * 1024
MISSING_MAX = 3
_FIRST_PAUSE_S = 0.2
_GRANT_PAUSE_MAX_S = 10.0
_MISSING_PAUSE_S = 1.0
_FIRST_TRY_S = 900.0


ROUND_VARIABLE = "SPOTD_NODE_ROUND"
"""Of a machine that replaced another one of several: from which round on it takes part."""


class NotCurrent(Exception):
    """No permission to run anything on this machine. The text states why.

    Attributes:
        end: how the machine may end itself, where a grant still named a way.
    """

    def __init__(self, why: str, end: dict[str, Any] | None = None) -> None:
        super().__init__(why)
        self.end = end


class RunnerGrant:
    """One grant.json. `raw` holds secrets and is never shown.

    Attributes:
        asked_at: when it was asked for. The lease counts from then: how long the answer took is not known to be less.
    """

    def __init__(self, raw: dict[str, Any], asked_at: float) -> None:
        if raw.get("schema") != 1:
            raise ValueError("this runner understands grants of schema 1 only")
        self.raw = raw
        self.asked_at = asked_at
        self.job_id = str(raw["job"]["id"])
        self.job_name = str(raw["job"]["name"])
        self.attempt = int(raw["attempt"])
        self.prefix = str(raw["upload"]["prefix"])
        self.issued_at = as_epoch(raw["issued_at"])
        self.issued_at_text = str(raw["issued_at"])
        self.expires = as_epoch(raw["expires"])
        self.lease_s = float(raw["lease_s"])
        self.heartbeat_s = float(raw["heartbeat_s"])
        self.refresh_s = float(raw["refresh_s"])
        self.url = str(raw["grant_url"])
        self.spec = raw["spec"]
        self.checkpoint = raw["spec"]["checkpoint"]
        self.stop_grace_s = float(self.checkpoint.get("stop_grace_s") or 0.0)
        self.transfer = raw.get("transfer") or {}
        watch_s = raw["spec"].get("watch_s")
        self.watch_s = float(watch_s) if watch_s else None
        self.stop = (raw.get("orders") or {}).get("stop")
        self.checkpoint_order = int((raw.get("orders") or {}).get("checkpoint") or 0)

    def is_of(self, other: RunnerGrant) -> bool:
        return (self.job_id, self.attempt) == (other.job_id, other.attempt)


def round_of(grant: RunnerGrant) -> int | None:
    """Return the round of several machines that the grant is for; `None` where it is for one machine."""
    gang = grant.raw.get("gang")
    return None if gang is None else int(gang.get("round") or 0)


def read_grant(url: str) -> RunnerGrant:
    """Return the grant at this URL.

    Raises:
        web.WebError: nothing that is a grant can be read there now.
    """
    asked_at = steady()
    data = web.read(url, GRANT_BYTES_MAX)
    try:
        return RunnerGrant(json.loads(data), asked_at)
    except (ValueError, KeyError, TypeError, AttributeError):
        # Never the content: it holds the job's secrets.
        raise web.WebError("what is there is no grant") from None


def first_grant(url: str, wait: Callable[[float], bool], *, published: bool = False) -> RunnerGrant:
    """Return a grant that permits to run now.

    Args:
        wait: sleeps, and returns whether to give up.
        published: this attempt has stored a checkpoint from this machine before.

    Raises:
        NotCurrent: it is gone, holds a stop order, or did not become current in time.
    """
    pauses, missing = Backoff(_FIRST_PAUSE_S, _GRANT_PAUSE_MAX_S), 0
    expired_since: float | None = None
    give_up_at = steady() + _FIRST_TRY_S
    end: dict[str, Any] | None = None
    while True:
        why = ""
        try:
            grant = read_grant(url)
        except web.Missing:
            missing += 1
            why = "there is no grant for this machine"
            if missing >= MISSING_MAX:
                raise NotCurrent(why, end) from None
        except web.WebError as error:
            why = "the grant can not be read: %s" % error
        else:
            missing = 0
            if grant.stop is not None:
                reason = str(grant.stop.get("reason") or "no reason given")
                raise NotCurrent("ordered to stop: " + reason, grant.raw.get("self_terminate"))
            end = grant.raw.get("self_terminate")
            came = os.environ.get(ROUND_VARIABLE, "")
            if came.isdigit() and int(came) > (round_of(grant) or 0):
                # It may start before its place is written, and what is offered then is for another machine.
                if steady() >= give_up_at or wait(_MISSING_PAUSE_S):
                    raise NotCurrent("its place among several machines was not given to it", end)
                continue
            if (published or grant.raw.get("seen_running")) and not grant.raw.get("restore"):
                # The provider started this machine again. Starting the job over would put it back.
                raise NotCurrent("this attempt has run before, and nothing to resume from is offered", end)
            if grant.expires > CLOCK.now():
                return grant
            why = "the grant has expired"
            expired_since = expired_since or steady()
            give_up_at = min(give_up_at, expired_since + grant.lease_s)
            url = grant.url
        if steady() >= give_up_at or wait(pauses.next_s()):
            raise NotCurrent(why, end)
        log_line(why + ", trying again")


class GrantKeeper:
    """Reads the grant again and again; `wake` is called when there is something new to react to."""

    def __init__(self, grant: RunnerGrant, wake: Callable[[], None]) -> None:
        self._grant = grant
        self._first = grant
        self._wake = wake
        self._missing = 0
        self._foreign = False
        self._closing = threading.Event()
        self._mark = LeaseFile(wanted=(grant.raw.get("self_terminate") or {}).get("method") in ("file", "shutdown"))
        self._thread = threading.Thread(target=self._keep, name="grant", daemon=True)

    def start(self) -> None:
        self._mark_lease()
        self._thread.start()

    def _mark_lease(self) -> None:
        self._mark.mark(self._grant.lease_s, self._grant.stop_grace_s)

    def close(self) -> None:
        self._closing.set()

    @property
    def grant(self) -> RunnerGrant:
        """The newest grant of this attempt."""
        return self._grant

    @property
    def withdrawn(self) -> bool:
        """Whether the place of the grant shows that this attempt is no longer the current one."""
        return self._foreign or self._missing >= MISSING_MAX

    def lease_left_s(self) -> float:
        """How long this attempt may still act; negative when it may not."""
        return self._grant.asked_at + self._grant.lease_s - steady()

    def _keep(self) -> None:
        while not self._closing.wait(min(self._grant.refresh_s, _MISSING_PAUSE_S if self._missing else 1e9)):
            try:
                self.refresh()
            except Exception as error:  # noqa: BLE001 - the lease must end by its own clock, not by a dead thread
                log_line("reading the grant failed: " + reason_of(error))

    def refresh(self) -> None:
        """Ask for the grant once, and take it if it is a newer one of this attempt."""
        try:
            grant = read_grant(self._grant.url)
        except web.Missing:
            self._missing += 1
            if self.withdrawn:
                self._wake()
            return
        except web.WebError:
            return
        self._missing = 0
        if not grant.is_of(self._first):
            self._foreign = True
            self._wake()
            return
        self._foreign = False
        if grant.issued_at > self._grant.issued_at:
            self._grant = grant
            self._mark_lease()
            if grant.stop is not None or grant.checkpoint_order:
                self._wake()


_PAUSE_S = 0.2
_PAUSE_MAX_S = 15.0
_FAILURES_REPORTED = 3
_EVENTS_KEPT_MAX = 1000
SEQ_PER_BOOT = 1_000_000


class GivenUp(Exception):
    """There is no more time to try."""


class Numbers:
    """Sequence numbers that rise over all reports of this machine, also over restarts of the runner.

    A runner may take more than `SEQ_PER_BOOT`: it would have to take as many in each second to reach those of the next,
    whose boot number is a later second.
    """

    def __init__(self, boot: int) -> None:
        self._lock = threading.Lock()
        self._next = boot * SEQ_PER_BOOT

    def take(self) -> int:
        with self._lock:
            self._next += 1
            return self._next


class RunnerStore:
    """Where this attempt writes. Safe to use from every thread.

    Args:
        grant: gives the newest grant.
        hopeless: whether trying on makes no sense any more.
    """

    def __init__(self, grant: Callable[[], RunnerGrant], boot: int, hopeless: Callable[[], bool]) -> None:
        self._grant = grant
        self._hopeless = hopeless
        self._lock = threading.Lock()
        self._sink: Sink | None = None
        self._sink_upload: dict[str, Any] | None = None
        self._closing = threading.Event()
        self.numbers = Numbers(boot)
        self.failing: str | None = None
        self._is_reported = False
        self._marker_refused: dict[str, Any] | None = None
        self.events = Events(self)

    @property
    def prefix(self) -> str:
        return self._grant().prefix

    @property
    def parallel(self) -> int:
        """How many puts at once are worth while here."""
        asked = int(self._grant().transfer.get("connections") or 4)
        return max(1, min(asked, self._writer().parallel))

    def document(self, **fields: Any) -> dict[str, Any]:
        """Return a document of this attempt, as every kind begins."""
        grant = self._grant()
        return dict({"schema": 1, "job": grant.job_id, "attempt": grant.attempt}, **fields)

    @staticmethod
    def seal(document: dict[str, Any]) -> bytes:
        """Return the document as JSON whose last key, `seal`, is the SHA-256 of all bytes before it.

        Until the daemon has pinned a manifest's hash, nothing else would show a rotten bit in a mode or a time.
        """
        body = json.dumps(document, separators=(",", ":")).encode()[:-1]
        return body + b',"seal":"%s"}' % hashlib.sha256(body).hexdigest().encode()

    def put_once(self, name: str, data: bytes) -> None:
        """Store the object.

        Raises:
            SinkError: it is not, now.
        """
        self._writer().put(name, data)

    def put(
        self,
        name: str,
        data: bytes | memoryview,
        sha256: str | None = None,
        give_up: Callable[[], bool] | None = None,
    ) -> None:
        """Store the object, however long the store was away.

        Raises:
            GivenUp: time ran out, or `give_up` was true.
        """
        pauses, failures = Backoff(_PAUSE_S, _PAUSE_MAX_S), 0
        while True:
            try:
                self._writer().put(name, data, sha256)
            except SinkError as error:
                failures += 1
                self._note_failure(str(error), failures)
                if self._hopeless() or (give_up is not None and give_up()):
                    raise GivenUp(str(error)) from None
                # Spread out, so that a store that comes back is not hit by all at once.
                spread = 0.5 + os.urandom(1)[0] / 256.0
                longer = 4 if isinstance(error, SinkDenied) else 1
                self._closing.wait(min(pauses.next_s() * longer, _PAUSE_MAX_S) * spread)
            else:
                self.failing, self._is_reported = None, False
                return

    def put_liveness_marker(self, data: bytes) -> None:
        """Write the attempt's liveness marker. Without permission for one, or where it was refused, nothing happens.

        Raises:
            SinkError: it does not, now.
        """
        marker = self._grant().raw.get("liveness_marker")
        if marker is None or marker == self._marker_refused:
            return
        try:
            sink_of(marker, fleeting=True).put(marker["name"], data)
        except SinkDenied:
            self._marker_refused = marker  # a renewed grant may be another
            raise

    def hurry(self) -> None:
        """Pauses between tries are over: there is little time left."""
        self._closing.set()
        self._closing = threading.Event()

    def _note_failure(self, reason: str, failures: int) -> None:
        self.failing = clean(reason)
        # Every store fails now and then; what does not work three times in a row is worth a word, once.
        if failures >= _FAILURES_REPORTED and not self._is_reported:
            self._is_reported = True
            log_line("storing failed and is tried again: " + clean(reason))
            self.events.add("upload_failing", reason=reason)

    def _writer(self) -> Sink:
        upload = self._grant().raw["upload"]
        with self._lock:
            if self._sink is None or self._sink_upload != upload:
                self._sink, self._sink_upload = sink_of(upload), upload
            return self._sink


class Events:
    """Sends events in order, from a thread of its own; nothing waits for them but `flush`."""

    def __init__(self, store: RunnerStore) -> None:
        self._store = store
        self._waiting: list[tuple[int, bytes]] = []
        self._is_over = False
        self.stored = 0
        self.on_stored: Callable[[], None] = lambda: None
        self._change = threading.Condition()
        self._thread = threading.Thread(target=self._send, name="events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, kind: str, **data: str | int | float | bool | None) -> None:
        """Queue the event until the store takes it. Nothing comes after the exit event."""
        tidy = {name: clean(value) if isinstance(value, str) else value for name, value in data.items()}
        with self._change:
            if self._is_over:
                return
            self._is_over = kind == "exit"
            # Numbered and queued under one lock: a reader that saw a number never expects a lower one.
            seq = self._store.numbers.take()
            document = self._store.document(seq=seq, at=now_text(), kind=kind, data=tidy)
            # When the store is away for days the oldest are the least interesting, except that order must hold.
            if len(self._waiting) >= _EVENTS_KEPT_MAX:
                del self._waiting[1]
            self._waiting.append((seq, json.dumps(document).encode()))
            self._change.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Whether every event is stored now."""
        give_up_at = steady() + timeout_s
        with self._change:
            while self._waiting:
                left_s = give_up_at - steady()
                if left_s <= 0 or not self._thread.is_alive():
                    return False
                self._change.wait(min(left_s, 0.5))
        return True

    def _send(self) -> None:
        while True:
            with self._change:
                while not self._waiting:
                    self._change.wait()
                seq, data = self._waiting[0]
            try:
                self._store.put("events/%016d.json" % seq, data)
                self.stored += 1
                self.on_stored()
            except GivenUp:
                pass
            except Exception as error:  # noqa: BLE001 - one event that can not be sent must not hold back the exit event
                log_line("an event was lost: " + reason_of(error))
            with self._change:
                self._waiting.pop(0)
                self._change.notify_all()
