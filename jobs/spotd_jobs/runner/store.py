"""The attempt's place in the store: puts that survive bad hours, numbered reports, and the thread that sends events.

Every put asks the newest grant for its writer, so that a renewed permission is used by the very next try.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from typing import Any, Callable

from spotd_jobs.runner.grants import RunnerGrant
from spotd_jobs.wire.client.clocks import Backoff, now_text, steady
from spotd_jobs.wire.client.console import clean, log_line, reason_of
from spotd_jobs.wire.client.grant_sinks import sink_of
from spotd_jobs.wire.client.sinks import Sink, SinkDenied, SinkError

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
