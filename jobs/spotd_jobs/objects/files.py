"""Files of this computer that are stored or hold objects."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from spotd_jobs.objects.api import StoreError


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


def flush_folder(folder: Path) -> None:
    """Bring the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
