"""An object store in a folder: for one machine, for tests, and for hosts that see this computer's files.

Every object is one file whose path is its key. A write goes to a spool folder first, is flushed to disk, and appears
under its name in one step, so that no reader ever sees half an object and an acknowledged one survives a power cut.

Grants are honest but not enforced: their holders can reach the folder anyway. What hosts wrote is therefore read
with care: links are never followed, only plain files are objects.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, Final

from spotd_jobs.objects import api
from spotd_jobs.wire.client.sinks import TEMPORARY
from spotd_jobs.wire.grant import INSTANT_MAX

_SPOOL: Final = f"{TEMPORARY}spool"
_SPOOL_KEPT: Final = timedelta(days=1)
_MODIFIED_MAX_S: Final = INSTANT_MAX.timestamp()
"""A writer chooses the time of change of its file, and no later one fits every calendar."""
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_PASSING: Final = frozenset({errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE, errno.ETIMEDOUT, errno.EAGAIN})


_NOTHING_THERE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG})
"""Deleted meanwhile, or deeper than any key that was ever written here."""


class FolderStore:
    """An `ObjectStore` below one folder, which is made (0700) if it does not exist."""

    def __init__(self, root: Path) -> None:
        self._root = Path(os.path.realpath(root))
        with self._store_errors("open"):
            self._make_folders(self._root)
            self._make_folders(self._root / _SPOOL)
            self._sweep_spool()

    def __repr__(self) -> str:
        return f"FolderStore({str(self._root)!r})"

    @property
    def shared_with_hosts_by(self) -> str:
        """`filesystem`: a grant is a path."""
        return "filesystem"

    def put(self, key: str, data: bytes, *, create_only: bool = False) -> api.ObjectInfo:
        return self._write(key, lambda file: file.write(data), create_only=create_only)

    def put_file(self, key: str, path: Path) -> api.ObjectInfo:
        with api.source_file(path) as source:
            return self._write(key, lambda file: shutil.copyfileobj(source, file, 1 << 20), create_only=False)

    def get(self, key: str, *, bytes_max: int, version: str | None = None) -> bytes:  # noqa: ARG002  # a folder has none
        with self._store_errors("read"), self._open(key) as file:
            data = file.read(bytes_max + 1)
        if len(data) > bytes_max:
            raise api.ObjectTooLarge(f"the object {key} is larger than the {bytes_max} bytes that are accepted here")
        return data

    def head(self, key: str) -> api.ObjectInfo | None:
        path = self._path(key)
        with self._store_errors("read"):
            try:
                found = path.lstat()
            except (FileNotFoundError, NotADirectoryError):
                return None
        return _info(key, found) if stat.S_ISREG(found.st_mode) else None

    def list(self, prefix: str) -> Iterator[api.ObjectInfo]:
        return self.list_after(prefix, "")

    def list_after(self, prefix: str, after: str, *, page: int = 1000) -> Iterator[api.ObjectInfo]:  # noqa: ARG002  # a folder has no pages
        folder, _, _ = prefix.rpartition("/")
        if folder:
            self._path(f"{folder}/-")  # not the folder itself either
        with self._store_errors("list"):
            yield from self._below(f"{folder}/" if folder else "", prefix, os.fsencode(after))

    def stored(self, prefix: str) -> Iterator[api.ObjectInfo]:
        """Every file below the prefix, unfinished writes of hosts too."""
        with self._store_errors("list"):
            for folder, _, names in os.walk(self._path(f"{prefix.rpartition('/')[0]}/-").parent):
                for name in names:
                    path = Path(folder) / name
                    key = str(path.relative_to(self._root))
                    with suppress(FileNotFoundError):
                        if key.startswith(prefix):
                            yield _info(key, path.lstat())

    def delete(self, keys: Sequence[str]) -> None:
        paths = [self._path(key) for key in keys]
        with self._store_errors("delete"):
            for path in paths:
                with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                    path.unlink()

    def delete_listed(self, key: str) -> None:
        path = self._root / api.require_listed_key(key)
        if os.path.realpath(path.parent) != str(path.parent):
            raise api.StoreError(f"the object {key[:100]!r} lies behind a link, which this store never follows")
        with self._store_errors("delete"), suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
            path.unlink()

    def presign_get(
        self,
        key: str,
        *,
        expires: datetime,  # noqa: ARG002  # a path does not expire
        version: str | None = None,  # noqa: ARG002  # and a folder keeps no versions
    ) -> str:
        """Return a `file://` URL; every reader of this file system can read it, at any time."""
        return self._path(key).as_uri()

    def grant_upload(
        self, prefix: str, *, expires: datetime, size_max: int, marker_key: str | None = None
    ) -> api.UploadGrant:
        return api.UploadGrant(
            method="folder",
            prefix=prefix,
            expires=expires,
            size_max=size_max,
            fields=self._writable(self._path(api.require_prefix(prefix))),
            liveness_marker=None if marker_key is None else self._writable(self._path(marker_key).parent),
        )

    def _writable(self, folder: Path) -> dict[str, str]:
        with self._store_errors("write"):
            self._make_folders(folder)
        return {"directory": str(folder)}

    def first_versions(self, prefix: str) -> dict[str, str]:  # noqa: ARG002  # what is written over is gone
        """Nothing: a folder keeps no versions."""
        return {}

    def revoke_upload(self, prefix: str) -> None:
        """Nothing: a path cannot be taken back from who knows it."""

    def advice(self) -> Sequence[api.Advice]:
        """Nothing: a folder has no settings of its own."""
        return ()

    def _path(self, key: str) -> Path:
        """Where the object is or would be, no link on the way there."""
        folder = str(self._root)
        *folders, name = api.require_key(key).split("/")
        for part in folders:
            folder = f"{folder}/{part}"
            if os.path.islink(folder):  # noqa: PTH114  # a Path for each folder costs more than to ask
                raise api.StoreError(f"the object {key} lies behind a link, which this store never follows")
        return Path(folder, name)

    @contextmanager
    def _open(self, key: str) -> Iterator[IO[bytes]]:
        path = self._path(key)
        missing = f"there is no object {key} in {self._root}"
        try:
            # O_NONBLOCK: a pipe put there by a host must not hang the reader; O_NOFOLLOW: nor may a link lead away
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as exc:
            if exc.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO):
                raise api.ObjectMissing(missing) from exc
            raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise api.ObjectMissing(missing)
        with os.fdopen(descriptor, "rb") as file:
            yield file

    def _write(self, key: str, fill: Callable[[IO[bytes]], object], *, create_only: bool) -> api.ObjectInfo:
        path = self._path(key)
        spooled = self._root / _SPOOL / uuid.uuid4().hex
        with self._store_errors("write"):
            try:
                with spooled.open("xb") as file:
                    fill(file)
                    # an etag rests on the time of change, and that of the file system may tick only every few ms
                    os.utime(file.fileno(), ns=(now := time.time_ns(), now))
                    file.flush()
                    os.fsync(file.fileno())
                self._make_folders(path.parent)
                if create_only:
                    try:
                        path.hardlink_to(spooled)  # fails if the name is taken, which a rename would not
                    except FileExistsError as exc:
                        raise api.Conflict(f"the object {key} exists already in {self._root}") from exc
                else:
                    spooled.replace(path)
            finally:
                spooled.unlink(missing_ok=True)
            api.flush_folder(path.parent)
            return _info(key, path.lstat())

    def _below(self, folder: str, prefix: str, after: bytes) -> Iterator[api.ObjectInfo]:
        """Yield what lies below the folder, however deep: without recursion, whose depth a host could exhaust."""
        waiting = [*self._names_in(folder)]
        while waiting:
            key = waiting.pop()
            if key.endswith("/"):
                if key.startswith(prefix) or prefix.startswith(key):
                    waiting += self._names_in(key)
            elif key.startswith(prefix) and os.fsencode(key) > after:
                try:
                    found = (self._root / key).lstat()
                except OSError as exc:
                    if exc.errno not in _NOTHING_THERE:
                        raise
                    continue  # deleted since the folder was read
                if stat.S_ISREG(found.st_mode):
                    yield _info(key, found)

    def _names_in(self, folder: str) -> Sequence[str]:
        """Return the keys of files and, with a `/`, of folders directly in this one, the last first."""
        try:
            with os.scandir(self._root / folder) as scanned:
                names = [
                    entry.name + "/" if entry.is_dir(follow_symlinks=False) else entry.name
                    for entry in scanned
                    if not entry.name.startswith(TEMPORARY)
                ]
        except OSError as exc:
            if exc.errno not in _NOTHING_THERE:
                raise
            return []
        return [folder + name for name in sorted(names, key=os.fsencode, reverse=True)]

    def _make_folders(self, folder: Path) -> None:
        """Make the folder, and its name durable."""
        missing = []
        while not folder.is_dir():
            missing.append(folder)
            folder = folder.parent
        for path in reversed(missing):
            path.mkdir(mode=0o700, exist_ok=True)
            api.flush_folder(path.parent)

    def _sweep_spool(self) -> None:
        """Delete writes that a crash left unfinished; young ones may be another process's and stay."""
        oldest = time.time() - _SPOOL_KEPT.total_seconds()
        for path in (self._root / _SPOOL).iterdir():
            with suppress(FileNotFoundError):
                if path.lstat().st_mtime < oldest:
                    path.unlink()

    @contextmanager
    def _store_errors(self, action: str) -> Iterator[None]:
        """Failures of the system become the store's own, with the place and a way out."""
        try:
            yield
        except OSError as exc:
            place = f"the store folder {self._root}"
            if exc.errno in _FULL:
                raise api.StoreUnavailable(
                    f"cannot {action}: no space left for {place}; free some, or point [store] url elsewhere"
                ) from exc
            if exc.errno in _PASSING:
                raise api.StoreUnavailable(f"cannot {action} in {place} now: {exc.strerror}; check the disk") from exc
            reason = exc.strerror or type(exc).__name__
            raise api.StoreError(f"cannot {action} in {place}: {reason}; check its owner, mode and mount") from exc


def _info(key: str, found: os.stat_result) -> api.ObjectInfo:
    return api.ObjectInfo(
        key=key,
        size=found.st_size,
        etag=f"{found.st_mtime_ns:x}-{found.st_size:x}-{found.st_ino:x}",
        modified=datetime.fromtimestamp(min(max(found.st_mtime, 0.0), _MODIFIED_MAX_S), UTC),
    )
