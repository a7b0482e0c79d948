"""What a disk may hold after a power cut, drawn from a record of what SQLite wrote and when it waited for the disk.

Theory. A write is certain to be on the disk once a sync of its file has returned. Until then the operating system may
have written it, a part of it, or nothing, and later writes before earlier ones. So an image is a place in the record,
and for each write and truncation after its file's newest sync a choice: all of it, none, or some of its sectors. A file
that was never synced may be missing; a deletion may not have happened until the folder is synced, which SQLite does
together with the first sync of each log or journal that it makes.

The state is written by spotd's own store. Its driver is replaced by the SQLite of the package apsw, whose files can be
recorded; what apsw cannot record is memory that processes share, so the recorded connection has the file alone
(`locking_mode = EXCLUSIVE`), which changes nothing of what is written, or of the order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

import apsw

SECTOR: Final = 512
SYNCED_WITH_FOLDER: Final = ("-wal", "-journal")
"""How the names end of files whose first sync SQLite follows with one of their folder."""
VFS_NAME: Final = "spotd-recorded"


@dataclass(frozen=True, slots=True)
class Written:
    """Bytes at a place of a file."""

    file: str
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Truncated:
    """A file made shorter or longer."""

    file: str
    size: int


@dataclass(frozen=True, slots=True)
class Synced:
    """The disk has all of the file."""

    file: str


@dataclass(frozen=True, slots=True)
class Deleted:
    """A file that is gone; `certain` where its folder was synced."""

    file: str
    certain: bool


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """A commit has returned: whoever waited for it goes on."""

    number: int


Step = Written | Truncated | Synced | Deleted | Acknowledged


@dataclass(slots=True)
class Record:
    """What was done to the files, in order."""

    steps: list[Step] = field(default_factory=list)

    def acknowledged(self, until: int) -> int:
        """Return the number of the newest commit that had returned before this step, 0 for none."""
        return max((one.number for one in self.steps[:until] if isinstance(one, Acknowledged)), default=0)


class _File(apsw.VFSFile):
    def __init__(self, record: Record, name: str, filename: str | apsw.URIFilename | None, flags: list[int]) -> None:
        super().__init__("", filename, flags)
        self._record = record
        self._name = name

    def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802 - SQLite's name
        super().xWrite(data, offset)
        self._record.steps.append(Written(self._name, offset, bytes(data)))

    def xTruncate(self, newsize: int) -> None:  # noqa: N802 - SQLite's name
        super().xTruncate(newsize)
        self._record.steps.append(Truncated(self._name, newsize))

    def xSync(self, flags: int) -> None:  # noqa: N802 - SQLite's name
        # The disk of the test is never asked to wait: only the record says what it would hold.
        self._record.steps.append(Synced(self._name))


class RecordedFiles(apsw.VFS):
    """SQLite's own files, whose writes are recorded."""

    def __init__(self, record: Record) -> None:
        super().__init__(VFS_NAME, base="")
        self._record = record

    def xOpen(  # noqa: N802 - SQLite's name
        self, name: str | apsw.URIFilename | None, flags: list[int]
    ) -> apsw.VFSFile:
        text = name.filename() if isinstance(name, apsw.URIFilename) else name
        if text is None:
            return apsw.VFSFile("", name, flags)  # a temporary file, which nothing outlives
        return _File(self._record, Path(text).name, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:  # noqa: N802 - SQLite's signature
        super().xDelete(filename, syncdir)
        self._record.steps.append(Deleted(Path(filename).name, syncdir))


class Cursor:
    """As `sqlite3.Cursor`, as far as SQLAlchemy uses one."""

    arraysize = 1

    def __init__(self, connection: apsw.Connection) -> None:
        self._connection = connection
        self._rows: list[Any] = []
        self.description: Sequence[Any] | None = None
        self.rowcount = -1
        self.lastrowid: int | None = None

    def execute(self, sql: str, values: Sequence[Any] = ()) -> Cursor:
        cursor = self._connection.cursor()
        self.description = None
        cursor.exec_trace = self._describe
        self._rows = list(cursor.execute(sql, tuple(values)))
        self.rowcount = -1 if self._rows else self._connection.changes()
        self.lastrowid = self._connection.last_insert_rowid()
        return self

    def executemany(self, sql: str, rows: Sequence[Sequence[Any]]) -> Cursor:
        total = 0
        for one in rows:
            total += max(0, self.execute(sql, one).rowcount)
        self.rowcount = total
        return self

    def _describe(self, cursor: apsw.Cursor, _sql: str, _values: object) -> bool:
        columns: Sequence[Any] = cursor.get_description()
        self.description = [(one[0], None, None, None, None, None, None) for one in columns] or None
        return True

    def fetchone(self) -> Any:
        return self._rows.pop(0) if self._rows else None

    def fetchmany(self, size: int = 1) -> list[Any]:
        taken, self._rows = self._rows[:size], self._rows[size:]
        return taken

    def fetchall(self) -> list[Any]:
        taken, self._rows = self._rows, []
        return taken

    def __iter__(self) -> Iterator[Any]:
        return iter(self.fetchall())

    def close(self) -> None:
        self._rows = []


class Connection:
    """As `sqlite3.Connection`, as far as SQLAlchemy uses one, over recorded files.

    Args:
        synchronous: replaces what spotd sets, for a control; empty leaves it.
        checkpoint_pages: how long the log grows before it is moved into the file; short, so that images have all of it.
    """

    isolation_level: str | None = None

    def __init__(self, path: str, *, synchronous: str, checkpoint_pages: int) -> None:
        self._synchronous = synchronous
        self._connection = apsw.Connection(path, vfs=VFS_NAME)
        self.execute("PRAGMA locking_mode = EXCLUSIVE")
        self.execute(f"PRAGMA wal_autocheckpoint = {checkpoint_pages}")

    def execute(self, sql: str, values: Sequence[Any] = ()) -> Cursor:
        if self._synchronous and sql.startswith("PRAGMA synchronous"):
            sql = f"PRAGMA synchronous = {self._synchronous}"
        return self.cursor().execute(sql, values)

    def cursor(self) -> Cursor:
        return Cursor(self._connection)

    def commit(self) -> None:
        if self._connection.in_transaction:
            self.execute("COMMIT")

    def rollback(self) -> None:
        if self._connection.in_transaction:
            self.execute("ROLLBACK")

    def create_function(self, *_: Any, **__: Any) -> None:
        """Do without functions of Python, of which spotd's statements use none."""

    def close(self) -> None:
        self._connection.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """What one power cut left.

    Attributes:
        cut: how many steps had been done.
    """

    cut: int
    files: Mapping[str, bytes]

    def write(self, folder: Path) -> None:
        """Make it the content of the folder."""
        for old in folder.iterdir():
            old.unlink()
        for name, data in self.files.items():
            (folder / name).write_bytes(data)


@dataclass(slots=True)
class _Disk:
    """What is certain to be on the disk, and what is not yet.

    Attributes:
        certain: files whose names are in a synced folder.
        pending: what was done to each file since its newest sync.
        fading: files that were deleted, in a folder that was not synced since.
    """

    files: dict[str, bytearray] = field(default_factory=dict)
    certain: set[str] = field(default_factory=set)
    pending: dict[str, list[Written | Truncated]] = field(default_factory=dict)
    fading: set[str] = field(default_factory=set)

    def do(self, step: Step) -> None:
        match step:
            case Written() | Truncated():
                self._forget({step.file} & self.fading)  # a new file of that name
                self.pending.setdefault(step.file, []).append(step)
            case Synced():
                content = self.files.setdefault(step.file, bytearray())
                for one in self.pending.pop(step.file, []):
                    _apply(content, one)
                if step.file not in self.certain and step.file.endswith(SYNCED_WITH_FOLDER):
                    self._forget(self.fading)
                    self.certain.update(self.files)
            case Deleted():
                self.fading.add(step.file)
                if step.certain:
                    self._forget(self.fading)
            case Acknowledged():
                pass

    def _forget(self, names: Collection[str]) -> None:
        for name in [*names]:
            self.files.pop(name, None)
            self.pending.pop(name, None)
            self.certain.discard(name)
            self.fading.discard(name)


def draw_images(record: Record, count: int, rng: Random) -> Iterator[Image]:
    """Return so many images that are possible, by the rules of this module's theory; earlier cuts first."""
    cuts = sorted(rng.randrange(len(record.steps) + 1) for _ in range(count))
    disk, done = _Disk(), 0
    for cut in cuts:
        for step in record.steps[done:cut]:
            disk.do(step)
        done = cut
        yield Image(cut=cut, files=_left(disk, rng))


def _left(disk: _Disk, rng: Random) -> dict[str, bytes]:
    """Return the files after one power cut."""
    gone = {name for name in sorted(disk.fading) if rng.random() < 0.5}
    found = {name: bytes(content) for name, content in disk.files.items() if name not in gone}
    for name, steps in disk.pending.items():
        if name in gone:
            continue
        chance = rng.choice((0.0, 1.0, rng.random()))
        survived = [part for one in steps for part in _survivors(one, chance, rng)]
        content = bytearray(found.get(name, b""))
        for one in survived:
            _apply(content, one)
        if survived or name in disk.certain:
            found[name] = bytes(content)
        else:
            found.pop(name, None)
    return found


def _survivors(step: Written | Truncated, chance: float, rng: Random) -> list[Written | Truncated]:
    """Return what of a step reached the disk."""
    if chance in {0.0, 1.0} or isinstance(step, Truncated) or rng.random() < 0.5:
        return [step] if rng.random() < chance else []
    if rng.random() < 0.5:
        return [Written(step.file, step.offset, step.data[: rng.randrange(len(step.data) + 1)])]
    kept: list[Written | Truncated] = []
    start = 0
    while start < len(step.data):
        end = min(len(step.data), start + SECTOR - (step.offset + start) % SECTOR)
        if rng.random() < chance:
            kept.append(Written(step.file, step.offset + start, step.data[start:end]))
        start = end
    return kept


def _apply(content: bytearray, step: Written | Truncated) -> None:
    if isinstance(step, Truncated):
        if step.size < len(content):
            del content[step.size :]
        else:
            content.extend(bytes(step.size - len(content)))
        return
    if step.offset > len(content):
        content.extend(bytes(step.offset - len(content)))
    content[step.offset : step.offset + len(step.data)] = step.data
