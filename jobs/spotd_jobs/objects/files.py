"""Files of this computer that are stored, or that objects are written to."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from spotd_jobs.objects.api import StoreError
from spotd_jobs.wire.client.files import TEMPORARY


@contextmanager
def source_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that is to be stored.

    Raises:
        StoreError: it cannot be read.
    """
    try:
        source = path.open("rb")
    except OSError as exc:
        raise StoreError(f"{path} cannot be read: {exc.strerror}") from exc
    with source:
        yield source


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Write a file that takes the place of `path` once it is complete and on disk; after a failure nothing is left."""
    spooled = path.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
    try:
        with spooled.open("xb") as file:
            yield file
            flush(file)
        spooled.replace(path)
    finally:
        spooled.unlink(missing_ok=True)


def flush(file: IO[bytes]) -> None:
    """Bring what was written to disk."""
    file.flush()
    os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Bring the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
