"""The archive of a folder that a browser sent, as the code of a job.

Theory. An archive is written by anyone, so nothing of it is believed: a name must stay inside, what is no plain file
or folder is refused rather than skipped, since a job without it would fail later, and both the number of files and the
bytes that come out are counted while they are written. What was unpacked is packed again exactly as `spotctl submit`
packs a folder, so that ignore rules, refused keys and hashes are the same. Each temporary folder is private and
removed by the function that made it.
"""

from __future__ import annotations

import gzip
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Any, Final

from spotd.client.daemon import Daemon
from spotd_jobs.pack import PackError, pack_into, require_packable

CODE_BYTES_MAX: Final = 500_000_000
FILES_MAX: Final = 100_000
_READ_BYTES_MAX: Final = 1_000_000
"""No header asks for more at once: a longer one is made to fill the memory."""
_TAR_OVERHEAD: Final = 2_048
_DIRECTORY_BYTES_MAX: Final = 64_000_000
"""Of the list of a zip, which is read whole."""
_END: Final = b"PK\x05\x06"
_END_BYTES: Final = 22
_LARGE_END: Final = b"PK\x06\x07"
_LARGE_END_BYTES: Final = 20
_MODE_TYPE: Final = 0o170000
_PLAIN: Final = frozenset({0, 0o100000, 0o040000})
_HINT: Final = "pack the folder again, as in: tar czf code.tar.gz -C FOLDER ."


def check_code(archive: Path, name: str) -> None:
    """Check that an archive can be the code of a job.

    Raises:
        PackError: it cannot be unpacked safely, or `spotctl submit` would refuse the folder in it.
    """
    with _unpack(archive, name) as folder:
        require_packable(folder, bytes_max=CODE_BYTES_MAX)


def send_code(daemon: Daemon, archive: Path, name: str) -> str:
    """Store the folder in an archive as code; return the hash under which the store holds it.

    Raises:
        ClientError
        PackError: as `check_code` does.
    """
    with _unpack(archive, name) as folder, TemporaryFile(dir=folder.parent) as file:
        sha256 = pack_into(file, folder, bytes_max=CODE_BYTES_MAX)
        if not daemon.has_code(sha256):
            size = file.seek(0, 2)
            file.seek(0)
            daemon.put_code(sha256, file, size)
        return sha256


@contextmanager
def _unpack(archive: Path, name: str) -> Iterator[Path]:
    """Give the folder that the archive holds; every error names the archive instead of the temporary folder."""
    with TemporaryDirectory(prefix="spotd-web-") as own:
        folder = Path(own) / "code"
        folder.mkdir()
        try:
            unpack(archive, folder)
            yield folder
        except PackError as exc:
            raise PackError(str(exc).replace(str(folder), name), hint=exc.hint.replace(str(folder), name)) from exc


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a `.tar.gz` or `.zip` into an empty folder.

    Raises:
        PackError: it is neither, is damaged, holds anything but files and folders, a name that leads out of the
            folder or comes twice, or more than `FILES_MAX` files or `CODE_BYTES_MAX` bytes.
    """
    try:
        with archive.open("rb") as file:
            head = file.read(4)
            file.seek(0)
            if head[:2] == b"\x1f\x8b":
                _unpack_tar(file, _Target(folder))
            elif head[:4] in {b"PK\x03\x04", _END}:
                _unpack_zip(file, _Target(folder))
            else:
                raise PackError("the archive is neither a .tar.gz nor a .zip", hint=_HINT)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError) as exc:
        raise PackError(f"the archive is damaged: {exc}", hint=_HINT) from exc
    except gzip.BadGzipFile as exc:
        raise PackError(f"the archive is damaged: {exc}", hint=_HINT) from exc
    except OSError as exc:
        raise PackError(f"the archive cannot be unpacked: {exc.strerror or exc}", hint=_HINT) from exc


class _Target:
    """The folder that is filled, and what may still come into it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files_left = FILES_MAX
        self._bytes_left = CODE_BYTES_MAX

    def add(self, name: str, content: IO[bytes] | None, *, is_executable: bool = False) -> None:
        """Write a file, or make a folder where there is no content."""
        self._files_left -= 1
        if self._files_left < 0:
            raise PackError(f"the archive holds more than {FILES_MAX} files", hint="leave data and environments out")
        parts = [part for part in name.split("/") if part not in {"", "."}]
        if name.startswith("/") or ".." in parts or "\\" in name:
            raise PackError(f"the archive holds {name!r}, a name that leads out of the folder", hint=_HINT)
        path = self._folder.joinpath(*parts)
        if content is None:
            path.mkdir(parents=True, exist_ok=True)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with path.open("xb") as file:
                while chunk := content.read(65_536):
                    self._bytes_left -= len(chunk)
                    if self._bytes_left < 0:
                        raise PackError(
                            f"the archive holds more than the {CODE_BYTES_MAX / 1e6:.0f} MB that may be unpacked",
                            hint="put data into a dataset: spotctl data put NAME DIR",
                        )
                    file.write(chunk)
        except FileExistsError as exc:
            raise PackError(f"the archive holds {name!r} twice", hint=_HINT) from exc
        if is_executable:
            path.chmod(0o700)


class _Plain:
    """The content of a `.gz`, bounded in what one header and all of it may ask for."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = gzip.GzipFile(fileobj=file, mode="rb")

    def read(self, size: int = -1) -> bytes:
        if size < 0 or size > _READ_BYTES_MAX:
            raise PackError("the archive holds a header that is too long", hint=_HINT)
        return self._file.read(size)

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence or offset > CODE_BYTES_MAX + FILES_MAX * _TAR_OVERHEAD:
            raise PackError("the archive holds more than may be unpacked", hint=_HINT)
        return self._file.seek(offset)


def _unpack_tar(file: IO[bytes], target: _Target) -> None:
    plain: Any = _Plain(file)
    with tarfile.open(fileobj=plain, mode="r:") as archive:
        for member in archive:
            is_file = member.type in {tarfile.REGTYPE, tarfile.AREGTYPE} and member.sparse is None
            if not is_file and not member.isdir():
                raise _no_file(member.name)
            with archive.extractfile(member) or _nothing() as content:  # a folder has no content
                target.add(member.name, content if is_file else None, is_executable=bool(member.mode & 0o100))


@contextmanager
def _nothing() -> Iterator[None]:
    yield None


def _unpack_zip(file: IO[bytes], target: _Target) -> None:
    _require_short_list(file)
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            mode = info.external_attr >> 16
            if mode & _MODE_TYPE not in _PLAIN:
                raise _no_file(info.filename)
            if info.flag_bits & 1:
                raise PackError("the archive is encrypted", hint="pack the folder without a password")
            if info.is_dir():
                target.add(info.filename, None)
                continue
            with archive.open(info) as content:
                target.add(info.filename, content, is_executable=bool(mode & 0o100))


def _require_short_list(file: IO[bytes]) -> None:
    """Refuse a list of files that would fill the memory; one of the large format is longer than may be unpacked."""
    size = file.seek(0, 2)
    file.seek(max(0, size - 65_536 - _END_BYTES - _LARGE_END_BYTES))
    tail = file.read()
    at = len(tail) - _END_BYTES
    if at < 0 or tail[at : at + 4] != _END or tail[-2:] != b"\0\0":
        at = tail.rfind(_END)  # a comment follows it
    if at < 0 or len(tail) - at < _END_BYTES:
        raise PackError("the archive is damaged: it ends too early", hint=_HINT)
    (length,) = struct.unpack_from("<L", tail, at + 12)
    is_large = tail[max(0, at - _LARGE_END_BYTES) :].startswith(_LARGE_END)
    if is_large or length > _DIRECTORY_BYTES_MAX:
        raise PackError(f"the archive holds more than {FILES_MAX} files", hint="leave data and environments out")
    file.seek(0)


def _no_file(name: str) -> PackError:
    return PackError(
        f"the archive holds {name!r}, which is a link or a device",
        hint="leave it out, or put the file itself in its place: tar czhf code.tar.gz -C FOLDER .",
    )
