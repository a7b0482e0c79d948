"""A market's own ledger: append-only JSON lines, independent of any customer's records.

Theory. Each line is a moment at which a machine's price per hour changed: it was opened, its price moved, it was
paused (then only storage counts), it woke up, it ended. Between two lines of one machine lies a *segment* with one
price; a bill is the sum over segments of price x time, each rounded up to a micro-dollar. A line is written in one
piece and counts once its newline is there; a torn last line never happened.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter

from spotd_providers.contract.values import MicroUsd, MicroUsdPerHour, cost

_FREE: Final = MicroUsdPerHour(0)


class LedgerError(Exception):
    """A line before the last is no ledger line: another program changed the file."""


class LedgerEvent(StrEnum):
    """The reason of a line."""

    OPEN = "open"
    PRICE = "price"
    PAUSED = "paused"
    RESUMED = "resumed"
    END = "end"


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerLine:
    """One change of what a machine costs.

    Attributes:
        key: the label the machine carries.
        compute: what it costs per hour from now on without its disk; 0 while paused and after the end.
        storage: what its disk costs per hour from now on; 0 after the end.
        note: why, for people.
    """

    at: datetime
    machine_id: str
    key: str
    event: LedgerEvent
    compute: MicroUsdPerHour
    storage: MicroUsdPerHour
    note: str = ""


_LINE: Final = TypeAdapter(LedgerLine)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A span in which one machine had one price. `end` is `None` while it lasts."""

    machine_id: str
    key: str
    start: datetime
    end: datetime | None
    compute: MicroUsdPerHour
    storage: MicroUsdPerHour
    paused: bool

    def amount(self, until: datetime) -> MicroUsd:
        """Compute the cost of this span up to an instant, each part rounded up."""
        end = until if self.end is None else min(self.end, until)
        return MicroUsd(cost(self.compute, end - self.start) + cost(self.storage, end - self.start))


class Ledger:
    """Writer of one market's ledger. One writer per file; readers come and go."""

    def __init__(self, path: Path) -> None:
        """Open the ledger. A torn last line of a writer that was killed is cut off: it was never acknowledged."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._latest: dict[str, LedgerLine] = {}
        for line in read_ledger(path):
            self._latest[line.machine_id] = line
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        _cut_torn_line(self._descriptor)

    def open(
        self,
        machine_id: str,
        key: str,
        *,
        at: datetime,
        compute: MicroUsdPerHour,
        storage: MicroUsdPerHour = _FREE,
    ) -> None:
        """Record the machine's price from `at` on."""
        self._append(
            LedgerLine(at=at, machine_id=machine_id, key=key, event=LedgerEvent.OPEN, compute=compute, storage=storage)
        )

    def price(
        self, machine_id: str, *, at: datetime, compute: MicroUsdPerHour, storage: MicroUsdPerHour | None = None
    ) -> None:
        """Record another price from `at` on, unless it is the same or the machine is paused or ended."""
        last = self._latest[machine_id]
        after = replace(last, event=LedgerEvent.PRICE, at=at, compute=compute, note="")
        if storage is not None:
            after = replace(after, storage=storage)
        same = (last.compute, last.storage) == (after.compute, after.storage)
        if last.event not in (LedgerEvent.PAUSED, LedgerEvent.END) and not same:
            self._append(after)

    def paused(self, machine_id: str, *, at: datetime, note: str = "") -> None:
        """Record that the machine costs its disk only from `at` on."""
        last = self._latest[machine_id]
        self._append(replace(last, event=LedgerEvent.PAUSED, at=at, compute=_FREE, note=note))

    def resumed(self, machine_id: str, *, at: datetime, compute: MicroUsdPerHour) -> None:
        """Record that the machine runs again from `at` on."""
        last = self._latest[machine_id]
        self._append(replace(last, event=LedgerEvent.RESUMED, at=at, compute=compute, note=""))

    def end(self, machine_id: str, *, at: datetime, note: str = "") -> None:
        """Record that the machine costs nothing from `at` on. Ending it again changes nothing."""
        last = self._latest[machine_id]
        if last.event is not LedgerEvent.END:
            self._append(replace(last, event=LedgerEvent.END, at=at, compute=_FREE, storage=_FREE, note=note))

    def is_open(self, machine_id: str) -> bool:
        """Whether the machine still costs money."""
        last = self._latest.get(machine_id)
        return last is not None and last.event is not LedgerEvent.END

    def close(self) -> None:
        """Close the writer; the file stays."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _append(self, line: LedgerLine) -> None:
        last = self._latest.get(line.machine_id)
        if last is not None:
            # The ledger never runs backwards, even if the reader of a file's change time was a little late.
            line = replace(line, at=max(line.at, last.at))
        self._write(_LINE.dump_json(line) + b"\n")
        self._latest[line.machine_id] = line

    def _write(self, text: bytes) -> None:
        """Write the whole text or nothing."""
        before = os.fstat(self._descriptor).st_size
        written = os.write(self._descriptor, text)
        if written != len(text):
            os.ftruncate(self._descriptor, before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))


def read_ledger(path: Path) -> tuple[LedgerLine, ...]:
    """Read every acknowledged line, oldest first; none if there is no file yet.

    Raises:
        LedgerError: a whole line is not one of ours.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return ()
    whole = content[: content.rfind(b"\n") + 1]
    return tuple(_decode(text, number, path) for number, text in enumerate(whole.splitlines(), start=1))


def segments(lines: Iterable[LedgerLine]) -> tuple[Segment, ...]:
    """Return the spans of one price, in the order of their starts."""
    found: list[Segment] = []
    running: dict[str, LedgerLine] = {}
    for line in lines:
        began = running.pop(line.machine_id, None)
        if began is not None:
            found.append(_segment(began, line.at))
        if line.event is not LedgerEvent.END:
            running[line.machine_id] = line
    found.extend(_segment(line, None) for line in running.values())
    return tuple(sorted(found, key=lambda segment: (segment.start, segment.machine_id)))


def _segment(began: LedgerLine, end: datetime | None) -> Segment:
    return Segment(
        machine_id=began.machine_id,
        key=began.key,
        start=began.at,
        end=end,
        compute=began.compute,
        storage=began.storage,
        paused=began.event is LedgerEvent.PAUSED,
    )


def _cut_torn_line(descriptor: int) -> None:
    size = os.fstat(descriptor).st_size
    os.ftruncate(descriptor, os.pread(descriptor, size, 0).rfind(b"\n") + 1)


def _decode(text: bytes, number: int, path: Path) -> LedgerLine:
    try:
        return _LINE.validate_json(text)
    except ValueError as exc:
        raise LedgerError(f"{path}, line {number}: {exc}") from exc
