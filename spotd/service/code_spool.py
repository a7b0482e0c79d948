"""The folder of archives that are on their way into the object store."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def clear(folder: Path) -> int:
    """Delete what a process that was killed in the middle of an upload has left; return how many files it was.

    To be called before anything is uploaded: the writer's lock on the state ensures that no other process spools here.
    """
    count = 0
    for path in folder.iterdir():
        if path.is_file() and not path.is_symlink():
            with suppress(FileNotFoundError):
                path.unlink()
                count += 1
    return count
