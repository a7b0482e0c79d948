"""What the job prints, brought to the store as bounded numbered objects.

The pipe is emptied at once, always: a job never waits for the store. What may be stored is bounded by an allowance per
hour; beyond it the oldest waiting output is left out, and a line states how much.
"""

from __future__ import annotations

import os
import threading
from typing import Any, Callable

from spotd_jobs.runner.store import GivenUp, RunnerStore
from spotd_jobs.wire.client.sinks import log_line, reason_of
from spotd_jobs.wire.client.web import steady

OBJECT_BYTES_MAX = 256 * 1024
_WAITING_BYTES_MAX = 1024 * 1024
_LAST_WORDS_BYTES = 64 * 1024
_LINE_BYTES_MAX = 16 * 1024
_READ_BYTES = 65536
_SECRET_LENGTH_MIN = 6


class LogShipper:
    """Two threads: one empties the pipe, one stores what came."""

    def __init__(self, store: RunnerStore, secrets: list[str], bytes_per_h: int, every_s: float) -> None:
        self._store = store
        self._secrets = sorted((s.encode() for s in secrets if len(s) >= _SECRET_LENGTH_MIN), key=len, reverse=True)
        self._rate = bytes_per_h / 3600.0
        self._burst = float(max(bytes_per_h, _LAST_WORDS_BYTES))
        self._allowance = self._burst
        self._refilled_at = steady()
        self._every_s = every_s
        self._reader, self.pipe = os.pipe()
        self._waiting = bytearray()
        self._left_out = 0
        self.printed = 0
        """Bytes that the job has printed so far."""
        self._change = threading.Condition()
        self._in_flight = False
        self._at_end = False
        self._eof = threading.Event()
        self._read_thread = threading.Thread(target=self._read, name="log-reader", daemon=True)
        self._send_thread = threading.Thread(target=self._send, name="log-sender", daemon=True)

    def start(self) -> None:
        self._read_thread.start()
        self._send_thread.start()

    def add_line(self, text: str) -> None:
        """Add a line of the runner's own among the job's."""
        self._take(("[spotd] " + text + "\n").encode("utf-8", "replace"))

    def add_output(self, text: str) -> None:
        """Add what another machine of the same attempt printed."""
        block = text.encode("utf-8", "replace")
        self.printed += len(block)
        self._take(block)

    def close(self, timeout_s: float) -> bool:
        """Everything that was printed is stored. Call after the job's processes are gone."""
        give_up_at = steady() + timeout_s
        if self.pipe >= 0:
            os.close(self.pipe)
            self.pipe = -1
        # A process that escaped may hold the other end open for ever.
        self._eof.wait(min(2.0, timeout_s))
        with self._change:
            self._at_end = True
            self._allowance = max(self._allowance, float(_LAST_WORDS_BYTES))
            self._change.notify_all()
            while self._waiting or self._in_flight:
                left_s = give_up_at - steady()
                if left_s <= 0:
                    return False
                self._change.wait(min(left_s, 0.5))
        return True

    def _read(self) -> None:
        while True:
            try:
                block = os.read(self._reader, _READ_BYTES)
            except OSError:
                block = b""
            if not block:
                self._eof.set()
                return
            self.printed += len(block)
            self._take(block)

    def _take(self, block: bytes) -> None:
        with self._change:
            self._waiting += block
            excess = len(self._waiting) - _WAITING_BYTES_MAX
            if excess > 0:
                self._drop(excess)
            self._change.notify_all()

    def _drop(self, count: int) -> None:
        """At least `count` of the oldest waiting bytes are left out, up to the end of a line."""
        end = self._waiting.find(b"\n", count, count + _LINE_BYTES_MAX)
        cut = min(len(self._waiting), end + 1 if end >= 0 else count)
        del self._waiting[:cut]
        self._left_out += cut

    def _send(self) -> None:
        while True:
            with self._change:
                while not self._waiting:
                    self._change.wait()
                if not self._at_end and len(self._waiting) < OBJECT_BYTES_MAX:
                    # A little patience makes one object out of many lines.
                    self._change.wait_for(self._is_worth_sending, self._every_s)
                data = self._next_object()
                self._in_flight = bool(data)
                if not data:
                    if self._at_end:
                        self._waiting.clear()
                    self._change.wait(self._every_s)
            if data:
                self._put(data)
            with self._change:
                self._in_flight = False
                self._change.notify_all()

    def _is_worth_sending(self) -> bool:
        return self._at_end or len(self._waiting) >= OBJECT_BYTES_MAX

    def _next_object(self) -> bytes:
        now = steady()
        self._allowance = min(self._burst, self._allowance + (now - self._refilled_at) * self._rate)
        self._refilled_at = now
        allowed = int(self._allowance)
        if len(self._waiting) > allowed and (self._at_end or len(self._waiting) > _WAITING_BYTES_MAX // 2):
            self._drop(len(self._waiting) - allowed)
        size = min(len(self._waiting), OBJECT_BYTES_MAX, allowed)
        data = self._whole_lines(size)
        self._allowance -= len(data)
        if data and self._left_out:
            note = "[spotd] %d bytes of output were left out\n" % self._left_out
            self._left_out = 0
            data = note.encode() + data
        return data

    def _whole_lines(self, size: int) -> bytes:
        """Up to `size` waiting bytes, ended at a line: a secret must not hide behind a cut."""
        if size <= 0:
            return b""
        end = max(self._waiting.rfind(b"\n", 0, size), self._waiting.rfind(b"\r", 0, size)) + 1
        if end == 0:
            if size < _LINE_BYTES_MAX and not self._at_end:
                return b""
            end = size
        data = bytes(self._waiting[:end])
        del self._waiting[:end]
        for secret in self._secrets:
            data = data.replace(secret, b"***")
        return data

    def _put(self, data: bytes) -> None:
        try:
            self._store.put("log/%016d" % self._store.numbers.take(), data)
        except GivenUp:
            return
        except Exception as error:  # noqa: BLE001 - a log object that can not be stored must not stop the ones after it
            log_line("output was lost: " + reason_of(error))


def patience_s(heartbeat_s: float) -> float:
    """How long output may wait to be stored: stale output beside a fresh heartbeat would mislead."""
    return max(0.05, min(heartbeat_s / 2, 5.0))


# What shows whether the job gets on: its output, writing in its checkpoint folder, and the use of its GPUs over time.
#
# Counters, and not rates: two heartbeats show what lies between them, however far apart they are.


_ENTRIES_MAX = 5000
_GAP_MAX_S = 60.0
"""A figure says nothing about more time than this."""


class ProgressMeter:
    """Counts from one heartbeat to the next.

    Args:
        printed: gives the bytes that the job has printed so far.
        folder: where its checkpoints appear.
    """

    def __init__(self, printed: Callable[[], int], folder: str) -> None:
        self._printed = printed
        self._folder = folder
        self._state: tuple[int, int, int] | None = None
        self._writes = 0
        self._read_at: float | None = None
        self._gpu_s = 0.0
        self._busy_s = 0.0
        self._has_figures = False

    def read(self, gpus: list[dict[str, Any]], *, runs: bool) -> dict[str, Any]:
        """Return the counters now.

        Args:
            gpus: the newest figures.
            runs: the job's command is running.
        """
        state = _state_of(self._folder)
        if self._state is not None and state != self._state:
            self._writes += 1
        self._state = state
        self._count_gpus(gpus if runs else [])
        return {
            "printed": self._printed(),
            "writes": self._writes,
            "gpu_s": round(self._gpu_s, 3) if self._has_figures else None,
            "gpu_busy_s": round(self._busy_s, 3) if self._has_figures else None,
        }

    def _count_gpus(self, gpus: list[dict[str, Any]]) -> None:
        now, before = steady(), self._read_at
        used = [row["util_pct"] for row in gpus if row.get("util_pct") is not None]
        self._read_at = now if used else None
        if not used:
            return
        self._has_figures = True
        if before is not None:
            span = min(max(0.0, now - before), _GAP_MAX_S)
            self._gpu_s += span
            self._busy_s += span * min(max(0.0, max(used)), 100.0) / 100.0


def _state_of(folder: str) -> tuple[int, int, int]:
    """Return what changes when something below the folder is written: entries, bytes, the newest change."""
    entries = size = newest = 0
    for place, folders, files in os.walk(folder):
        for name in files:
            try:
                facts = os.lstat(os.path.join(place, name))
            except OSError:
                continue
            entries += 1
            size += facts.st_size
            newest = max(newest, facts.st_mtime_ns)
            if entries >= _ENTRIES_MAX:
                return entries, size, newest
        entries += len(folders)
        # What is written now is in the newest folder: a job that keeps much more than is read is seen to save, too.
        folders.sort(key=lambda name: _changed_ns(os.path.join(place, name)), reverse=True)
    return entries, size, newest


def _changed_ns(path: str) -> int:
    try:
        return os.lstat(path).st_mtime_ns
    except OSError:
        return 0
