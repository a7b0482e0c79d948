"""Files between the store and this machine: those of a job fetched, folders stored as datasets.

What is fetched arrives whole or not at all, and never outside the folder that was asked for. Files come one behind the
other in few answers. One whose name this disk can not hold, or not beside another of them, is left out and named; the
others come all the same.

What a manifest lists was written by a rented host. The daemon checked it, and it is checked here again, because here is
where a path that climbs, or a link laid as a trap for the next file, would do its harm.
"""

from __future__ import annotations

import errno
import filecmp
import io
import os
import secrets
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from spotd.cli import stderr
from spotd.cli.entry import CommandFailed, ExitCode
from spotd.client.daemon import Daemon
from spotd.words import count, size_text
from spotd_jobs.wire.client.sinks import raw_of

if TYPE_CHECKING:
    from spotd.api.schemas.bodies import FolderBody
    from spotd.api.schemas.jobs import DatasetAnswer, DatasetResponse, FileResponse
    from spotd_jobs.spec.model import JobSpec


_PART_PREFIX: Final = ".spotd-part-"
_OF_THE_NAME: Final = frozenset({errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL})
_MODE_FILE: Final = 0o600
_MODE_MASK: Final = 0o755
"""The mode bits that a host's file may bring along: being executable, never set-user-id or writable by everyone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """How many entries were written, and how many were there already with the same content.

    Attributes:
        failed: path and reason of each that this disk cannot hold.
    """

    written: int
    kept: int
    failed: tuple[tuple[str, str], ...] = ()


def choose(files: Sequence[FileResponse], patterns: Sequence[str]) -> list[int]:
    """Return the places of those in the list that match a pattern or lie below a folder of that name; all without any.

    Raises:
        CommandFailed: a pattern matches nothing.
    """
    if not patterns:
        return list(range(len(files)))
    chosen: set[int] = set()
    for pattern in patterns:
        found = [place for place, entry in enumerate(files) if _matches(entry["path"], pattern)]
        if not found:
            raise CommandFailed(f"no file matches {pattern!r}", code=ExitCode.NOT_FOUND, hint="spotctl pull JOB --list")
        chosen.update(found)
    return sorted(chosen)


def _matches(path: str, pattern: str) -> bool:
    folder = pattern.rstrip("/")
    return fnmatchcase(path, pattern) or path.startswith(f"{folder}/")


def pull_into(
    folder: Path,
    listed: Sequence[FileResponse],
    places: Sequence[int],
    read: Callable[[Sequence[tuple[int, int]]], Iterator[bytes]],
    *,
    force: bool,
    on_bytes: Callable[[int], None],
) -> Pulled:
    """Fetch each chosen file into the folder, complete, or name it among those that failed.

    Args:
        places: of the chosen ones in the list, rising.
        read: gives the content of spans of the list, file behind file.

    Raises:
        CommandFailed: a path leads outside, something else is there already, or the disk refuses. Files that were
            complete by then stay.
    """
    chosen = [listed[place] for place in places]
    for entry in chosen:
        _refuse_escape(entry)
    pulling = _Pulling(folder, force=force)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        content = _Content(read(spans_of(listed, places)), on_bytes)
        try:
            for entry in chosen:
                if entry["kind"] == "file":
                    pulling.place(entry, content.of(entry))
                    content.skip_rest()
        finally:
            content.close()
        # Links come last: nothing is ever written through one of them.
        for entry in sorted((one for one in chosen if one["kind"] != "file"), key=lambda one: one["kind"]):
            pulling.place(entry, iter(()))
    except OSError as exc:
        raise CommandFailed(
            f"cannot write to {exc.filename or folder}: {exc.strerror}",
            code=ExitCode.LOCAL_IO,
            hint="--to DIR pulls into another folder; what is complete there is not fetched again",
        ) from exc
    return Pulled(written=pulling.written, kept=pulling.kept, failed=tuple(pulling.failed))


def spans_of(listed: Sequence[FileResponse], places: Sequence[int]) -> list[tuple[int, int]]:
    """Return the places of files with any content, as first and last of each span, with what has none in between."""
    spans: list[tuple[int, int]] = []
    for place in places:
        if spans and spans[-1][1] == place - 1:
            spans[-1] = (spans[-1][0], place)
        elif listed[place]["kind"] == "file" and listed[place]["bytes"]:
            spans.append((place, place))
    return spans


class _Content:
    """The bytes of all files, cut where each ends."""

    def __init__(self, chunks: Iterator[bytes], on_bytes: Callable[[int], None]) -> None:
        self._chunks = chunks
        self._on_bytes = on_bytes
        self._rest = b""
        self._left = 0

    def of(self, entry: FileResponse) -> Iterator[bytes]:
        """Yield the next file's bytes.

        Raises:
            CommandFailed: there are fewer.
        """
        self._left = entry["bytes"]
        while self._left:
            data = self._rest or next(self._chunks, b"")
            if not data:
                got = entry["bytes"] - self._left
                raise CommandFailed(
                    f"{entry['path']} has {got} bytes instead of {entry['bytes']}",
                    code=ExitCode.UNREACHABLE,
                    hint="pull again; files that were complete are kept",
                )
            piece, self._rest = data[: self._left], data[self._left :]
            self._left -= len(piece)
            self._on_bytes(len(piece))
            yield piece

    def skip_rest(self) -> None:
        """Read and forget what is left of a file that was given up before its end."""
        while self._left:
            data = self._rest or next(self._chunks, b"")
            if not data:
                return
            self._rest = data[self._left :]
            taken = min(self._left, len(data))
            self._left -= taken
            self._on_bytes(taken)

    def close(self) -> None:
        if isinstance(self._chunks, Generator):
            self._chunks.close()


class _Pulling:
    """One pull into one folder."""

    def __init__(self, folder: Path, *, force: bool) -> None:
        self._folder = folder
        self._force = force
        self._mine: dict[tuple[int, int], str] = {}
        """What of this pull is on the disk: a name that leads to it again is one that this disk cannot distinguish."""
        self.written = 0
        self.kept = 0
        self.failed: list[tuple[str, str]] = []

    def place(self, entry: FileResponse, chunks: Iterator[bytes]) -> None:
        """Put the entry in its place, or among the failed.

        Raises:
            OSError, CommandFailed
        """
        try:
            self._place(entry, chunks)
        except OSError as exc:
            if exc.errno not in _OF_THE_NAME:
                raise
            self.failed.append((entry["path"], exc.strerror or "this disk cannot hold such a name"))

    def _place(self, entry: FileResponse, chunks: Iterator[bytes]) -> None:
        target = _place(self._folder, _local(entry["path"]))
        other = self._mine.get(_identity(target) or (-1, -1))
        if other is not None:
            self.failed.append((entry["path"], f"this disk does not tell its name from that of {other}"))
            return
        if entry["kind"] == "dir":
            target.mkdir(exist_ok=True)
            return
        _refuse_folder(target)
        # A name of its own: the file's may be as long as names can be.
        temporary = target.with_name(f"{_PART_PREFIX}{secrets.token_hex(8)}")
        try:
            if entry["kind"] == "link":
                temporary.symlink_to(_local(entry["target"] or ""))
            else:
                _write(temporary, entry, chunks)
            if _same(temporary, target):
                self.kept += 1
            else:
                _refuse_loss(target, force=self._force)
                temporary.replace(target)
                self.written += 1
        finally:
            with suppress(FileNotFoundError):
                temporary.unlink()
        identity = _identity(target)
        if identity is not None:
            self._mine[identity] = entry["path"]


def _local(text: str) -> str:
    """Return the name or path as this system's calls take it."""
    return os.fsdecode(raw_of(text))


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _refuse_escape(entry: FileResponse) -> None:
    path = entry["path"]
    local = _local(path)
    harmless = path.isprintable() and "\\" not in path and "\0" not in local
    harmless = harmless and not any(part in {"", ".", ".."} for part in local.split("/"))
    if harmless and entry["kind"] == "link":
        harmless = _stays_inside(PurePosixPath(local), _local(entry["target"] or ""))
    if not harmless:
        raise CommandFailed(
            f"the job's files hold a path that leads outside: {path!r}",
            code=ExitCode.LOCAL_IO,
            hint="nothing was written; the machine that wrote it should not be trusted",
        )


def _stays_inside(link: PurePosixPath, target: str) -> bool:
    """Whether a link climbs no higher than the top, and only at its beginning."""
    parts = target.split("/")
    climbs = 0
    while parts and parts[0] == "..":
        parts.pop(0)
        climbs += 1
    return target != "" and climbs < len(link.parts) and not any(part in {"", "..", "."} for part in parts)


def _place(folder: Path, path: str) -> Path:
    """Return where the file goes; make the folders above it, none of which may be a link.

    Raises:
        CommandFailed: a link or a file stands where a folder is needed.
    """
    target = folder / path
    for above in reversed(target.relative_to(folder).parents):
        place = folder / above
        if place != folder and place.is_symlink():
            raise CommandFailed(
                f"{place} is a link, and may lead elsewhere",
                code=ExitCode.LOCAL_IO,
                hint="remove it, or pull into another folder with --to",
            )
        place.mkdir(exist_ok=True)
    return target


def _refuse_folder(target: Path) -> None:
    if target.is_dir() and not target.is_symlink():
        raise CommandFailed(
            f"{target} is a folder, and the job has a file of that name",
            code=ExitCode.LOCAL_IO,
            hint="pull into another folder with --to",
        )


def _refuse_loss(target: Path, *, force: bool) -> None:
    if os.path.lexists(target) and not force:
        raise CommandFailed(
            f"{target} is there already with other content",
            code=ExitCode.LOCAL_IO,
            hint="--force replaces it, --to DIR pulls into another folder",
        )


def _write(temporary: Path, entry: FileResponse, chunks: Iterator[bytes]) -> None:
    """Write the whole content to the temporary file."""
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, _MODE_FILE)
    with os.fdopen(descriptor, "wb") as file:
        for chunk in chunks:
            file.write(chunk)
        os.fchmod(descriptor, entry["mode"] & _MODE_MASK | _MODE_FILE)


def _same(temporary: Path, target: Path) -> bool:
    if temporary.is_symlink() or target.is_symlink():
        return temporary.is_symlink() and target.is_symlink() and temporary.readlink() == target.readlink()
    return target.is_file() and filecmp.cmp(temporary, target, shallow=False)


TRIES: Final = 3
"""What the store had at the beginning of an upload can be gone at its end; then it is sent again."""


def measure_folders(spec: JobSpec) -> dict[str, FolderBody]:
    """Return how large each folder is that the job names as a source of data.

    Raises:
        CommandFailed: one cannot be a dataset.
    """
    from spotd_jobs.dataset_pack import DatasetError, measure_dataset

    found: dict[str, FolderBody] = {}
    for one in spec.data:
        if one.is_folder:
            try:
                size, files = measure_dataset(Path(one.source))
            except DatasetError as exc:
                raise CommandFailed(str(exc), hint=exc.hint) from exc
            found[one.source] = {"bytes": size, "files": files}
    return found


def store_folders(daemon: Daemon, measured: dict[str, FolderBody]) -> dict[str, FolderBody]:
    """Store each of these folders; return them with the hashes of what they hold.

    Raises:
        CommandFailed: one changes while it is read, or cannot be stored.
    """
    stored: dict[str, FolderBody] = {}
    for folder in measured:
        made, sent = store_folder(Path(folder), daemon, daemon.store_dataset)
        stderr.note(f"stored {count(made['files'], 'file')}, {size_text(made['bytes'])}; sent {size_text(sent)} of it")
        stored[folder] = {"bytes": made["bytes"], "files": made["files"], "sha256": made["sha256"]}
    return stored


def store_folder(
    folder: Path, daemon: Daemon, keep: Callable[[str], DatasetAnswer], *, follow: bool = False
) -> tuple[DatasetResponse, int]:
    """Send what the store lacks of the folder; return the dataset, and how many bytes were sent.

    Args:
        keep: called with the text of its root, once all else is stored.

    Raises:
        CommandFailed: it cannot be a dataset, or does not stay in the store.
    """
    from spotd_jobs.dataset_pack import DatasetError, measure_dataset, pack_dataset

    for _ in range(TRIES):
        sink = _Uploading(daemon)
        try:
            total = measure_dataset(folder, follow=follow)[0] if stderr.is_terminal() else None
            with stderr.ProgressLine("store", total) as progress:
                root = pack_dataset(folder, sink, follow=follow, progress=progress.add)
        except DatasetError as exc:
            raise CommandFailed(str(exc), hint=exc.hint) from exc
        answer = keep(root.decode("ascii"))
        if "dataset" in answer:
            return answer["dataset"], sink.sent
    raise CommandFailed("what was sent did not stay in the store", hint="spotctl doctor")


class _Uploading:
    """Sends what the store lacks, and counts it. Called from several threads."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._counting = threading.Lock()
        self.sent = 0

    def put_chunk(self, sha256: str, data: bytes | bytearray) -> None:
        size = len(data)
        if not self._daemon.has_data_chunk(sha256):
            self._daemon.put_data_chunk(sha256, io.BytesIO(data), size)
            with self._counting:
                self.sent += size

    def put_part(self, sha256: str, text: bytes) -> None:
        self._daemon.put_data_part(sha256, io.BytesIO(text), len(text))
