"""Files of the state folder that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def write_once(path: Path, text: str) -> str:
    """Write the text, unless the file is there already; return what the file holds.

    Of several processes that do this at once, all get the text of one.

    Raises:
        OSError
    """
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        with suppress(FileExistsError):
            path.hardlink_to(draft)
    finally:
        draft.unlink(missing_ok=True)
    return path.read_text(encoding="utf-8")


def replace_whole(path: Path, text: str, *, mode: int) -> None:
    """Write the text in place of whatever the file held; a reader gets the one or the other.

    Raises:
        OSError
    """
    with _drafted(path, text, mode) as draft:
        draft.replace(path)


def create_whole(path: Path, text: str, *, mode: int) -> None:
    """Write the text into a file that is not there yet; there is never a part of it.

    Raises:
        FileExistsError: it is there, and stays as it is. OSError
    """
    with _drafted(path, text, mode) as draft:
        path.hardlink_to(draft)


@contextmanager
def _drafted(path: Path, text: str, mode: int) -> Iterator[Path]:
    """Yield a file beside the path with the text in it, on the disk, and with its mode from the first moment on."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), mode)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        yield draft
    finally:
        draft.unlink(missing_ok=True)
