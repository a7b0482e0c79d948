"""heartbeat.json: the attempt's state in one small object, written at a steady beat and at every change of phase."""

from __future__ import annotations

import json
import threading
import time
from typing import Any, Callable

from spotd_jobs.runner import VERSION
from spotd_jobs.runner.clocks import now_text, steady
from spotd_jobs.runner.figures import Gpus, host_figures
from spotd_jobs.runner.say import clean, reason_of, say
from spotd_jobs.runner.sinks import SinkError
from spotd_jobs.runner.store import Store

NAME = "heartbeat.json"
_DISK_LOW_MB = 1000
_SOON_S = 1.0


class Status:
    """What the heartbeat tells; written by the attempt, read by the beat. Single assignments, so no lock."""

    def __init__(self, boot: int) -> None:
        self.boot = boot
        self.phase = "boot"
        self.pid: int | None = None
        self.order_checkpoint = 0
        self.notice: dict[str, Any] | None = None
        self.exit: dict[str, Any] | None = None
        self.saver: Any = None
        self.restore: Any = None
        self.grant_issued_at = ""
        self.began = steady()


class Heartbeat:
    """The thread that beats."""

    def __init__(self, store: Store, status: Status, home: str, every_s: Callable[[], float]) -> None:
        self._store = store
        self._status = status
        self._home = home
        self._every_s = every_s
        self._gpus = Gpus()
        self._now = threading.Event()
        self._closed = False
        self._disk_was_low = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def soon(self) -> None:
        """Something changed that is worth telling before the next beat."""
        self._now.set()

    def last(self) -> None:
        """The final state is stored, and no older one will be written over it.

        Raises:
            store.GivenUp
        """
        self._closed = True
        self._now.set()
        with self._lock:
            self._store.put(NAME, self._document())

    def _beat(self) -> None:
        while not self._closed:
            self._now.clear()
            began = steady()
            with self._lock:
                if self._closed:
                    return
                try:
                    self._store.put_once(NAME, self._document())
                except SinkError:
                    pass  # the next beat says more than this one would have
                except Exception as error:  # noqa: BLE001 - a beat that fails must not be the last
                    say("a heartbeat failed: " + reason_of(error))
            every_s = self._every_s()
            # At least a little apart: some stores take one write a second to one name.
            self._now.wait(every_s)
            apart_s = min(_SOON_S, every_s / 4)
            left_s = apart_s - (steady() - began)
            if left_s > 0 and not self._closed:
                time.sleep(left_s)

    def _document(self) -> bytes:
        status = self._status
        host = host_figures(self._home)
        self._watch_disk(host["disk_free_mb"])
        restore = status.restore
        document = self._store.document(
            seq=self._store.numbers.take(),
            boot=status.boot,
            at=now_text(),
            phase=status.phase,
            pid=status.pid,
            up_s=round(steady() - status.began, 3),
            runner=VERSION,
            grant_issued_at=status.grant_issued_at,
            order_checkpoint=status.order_checkpoint,
            seen=_seen(status.saver, "seen"),
            stored=_seen(status.saver, "stored"),
            upload=self._upload(status.saver),
            restore=None
            if restore is None or restore.name is None
            else {"name": restore.name, "bytes_done": restore.done, "bytes_total": restore.total},
            gpus=self._gpus.look(),
            host=host,
            notice=status.notice,
            exit=status.exit,
        )
        return json.dumps(document).encode()

    def _upload(self, saver: Any) -> dict[str, Any]:
        progress = saver.progress if saver is not None else None
        name = progress.name if progress is not None else None
        return {
            "name": name,
            "bytes_done": progress.done if progress is not None and name else 0,
            "bytes_total": progress.total if progress is not None and name else 0,
            "bytes_per_s": progress.rate if progress is not None else 0,
            "queued": saver.queued if saver is not None else 0,
            "failing": self._store.failing,
        }

    def _watch_disk(self, free_mb: int | None) -> None:
        low = free_mb is not None and free_mb < _DISK_LOW_MB
        if low and not self._disk_was_low:
            self._store.events.add("disk_low", free_mb=free_mb)
        self._disk_was_low = low


def _seen(saver: Any, which: str) -> dict[str, Any] | None:
    seen = getattr(saver, which) if saver is not None else None
    if seen is None:
        return None
    row = {"name": seen.name, "step": seen.step, "at": seen.at}
    if which == "stored":
        row.update(bytes=seen.bytes, key=seen.key)
    return row


def notice_row(source: str, reason: str, at: str | None) -> dict[str, Any]:
    """A notice as the heartbeat shows it."""
    return {"source": clean(source), "reason": clean(reason), "at": at}
