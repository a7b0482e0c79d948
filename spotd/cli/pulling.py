"""Files of a job onto this machine: whole or not at all, and never outside the folder that was asked for.

What a manifest lists was written by a rented host. The daemon checked it, and it is checked here again, because here is
where a path that climbs, or a link laid as a trap for the next file, would do its harm.
"""

from __future__ import annotations

import filecmp
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from spotd.cli.codes import ExitCode
from spotd.cli.failures import CommandFailed

if TYPE_CHECKING:
    from spotd.api.shapes.files import FileShape

_PART_SUFFIX: Final = ".spotd-part"
_MODE_FILE: Final = 0o600
_MODE_MASK: Final = 0o755
"""What a stranger's file may bring along: being executable, never set-user-id or writable by everyone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """How many entries were written, and how many were there already with the same content."""

    written: int
    kept: int


def choose(files: Sequence[FileShape], patterns: Sequence[str]) -> list[FileShape]:
    """Those that match a pattern or lie below a folder of that name; all without patterns.

    Raises:
        CommandFailed: a pattern matches nothing.
    """
    if not patterns:
        return list(files)
    for pattern in patterns:
        if not any(_matches(entry["path"], pattern) for entry in files):
            raise CommandFailed(f"no file matches {pattern!r}", code=ExitCode.NOT_FOUND, hint="spotctl pull JOB --list")
    return [entry for entry in files if any(_matches(entry["path"], pattern) for pattern in patterns)]


def _matches(path: str, pattern: str) -> bool:
    folder = pattern.rstrip("/")
    return fnmatchcase(path, pattern) or path.startswith(f"{folder}/")


def pull_into(
    folder: Path,
    files: Sequence[FileShape],
    read: Callable[[str], Iterator[bytes]],
    *,
    force: bool,
    on_bytes: Callable[[int], None],
) -> Pulled:
    """Every file is below the folder, complete.

    Raises:
        CommandFailed: a path leads outside, something else is there already, or the disk refuses. Files that were
            complete by then stay.
    """
    for entry in files:
        _refuse_escape(entry)
    written = kept = 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Links come last: nothing is ever written through one of them.
        for entry in sorted(files, key=lambda entry: entry["kind"] == "link"):
            target = _place(folder, entry["path"])
            if entry["kind"] == "dir":
                target.mkdir(exist_ok=True)
                continue
            _refuse_folder(target)
            temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}{_PART_SUFFIX}")
            try:
                if entry["kind"] == "link":
                    temporary.symlink_to(entry["target"] or "")
                else:
                    _write(temporary, entry, read(entry["path"]), on_bytes)
                if _same(temporary, target):
                    kept += 1
                else:
                    _refuse_loss(target, force=force)
                    temporary.replace(target)
                    written += 1
            finally:
                with suppress(FileNotFoundError):
                    temporary.unlink()
    except OSError as exc:
        raise CommandFailed(
            f"cannot write to {exc.filename or folder}: {exc.strerror}", code=ExitCode.LOCAL_IO
        ) from exc
    return Pulled(written=written, kept=kept)


def _refuse_escape(entry: FileShape) -> None:
    path = entry["path"]
    parts = path.split("/")
    harmless = path.isprintable() and not any(part in {"", ".", ".."} for part in parts) and "\\" not in path
    if harmless and entry["kind"] == "link":
        harmless = _stays_inside(PurePosixPath(path), entry["target"] or "")
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
    """Where the file goes, the folders above it being made and none of them a link.

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


def _write(temporary: Path, entry: FileShape, chunks: Iterator[bytes], on_bytes: Callable[[int], None]) -> None:
    """The temporary file holds the whole content.

    Raises:
        CommandFailed: it came short or long.
    """
    size = 0
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, _MODE_FILE)
    with os.fdopen(descriptor, "wb") as file:
        for chunk in chunks:
            file.write(chunk)
            size += len(chunk)
            on_bytes(len(chunk))
        os.fchmod(descriptor, entry["mode"] & _MODE_MASK | _MODE_FILE)
    if size != entry["bytes"]:
        raise CommandFailed(
            f"{entry['path']} has {size} bytes instead of {entry['bytes']}",
            code=ExitCode.UNREACHABLE,
            hint="pull again; files that were complete are kept",
        )


def _same(temporary: Path, target: Path) -> bool:
    if temporary.is_symlink() or target.is_symlink():
        return temporary.is_symlink() and target.is_symlink() and temporary.readlink() == target.readlink()
    return target.is_file() and filecmp.cmp(temporary, target, shallow=False)
