"""Writes the configuration and the files of its keys: all of them or none, and never over what is there."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from spotd.files import create_whole
from spotd.setup import SetupRefused


def write_setup(config: Path, text: str, keys: Mapping[Path, str], *, others_read: bool) -> None:
    """Write everything.

    Args:
        others_read: whether the configuration, which names keys and holds none, may be read by a service's own user.

    Raises:
        SetupRefused: one of the files is there already, or cannot be written; nothing was left behind.
    """
    made: list[Path] = []
    folders: list[Path] = []
    at = config
    with _uninterrupted():
        try:
            for at in (config, *keys):
                folders += _folders(at.parent, 0o755 if others_read and at is config else 0o700)
            for at, secret in keys.items():
                create_whole(at, f"{secret}\n", mode=0o600)
                made.append(at)
            at = config
            create_whole(config, text, mode=0o644 if others_read else 0o600)
        except OSError as exc:
            for path in made:
                path.unlink(missing_ok=True)
            for folder in reversed(folders):
                folder.rmdir()
            reason = "exists already" if isinstance(exc, FileExistsError) else f"cannot be written: {exc.strerror}"
            raise SetupRefused(f"{at} {reason}; nothing was changed", hint="move it, or name another --config") from exc


def _folders(folder: Path, mode: int) -> list[Path]:
    """Make the folder and those above it that are missing; return them, the outermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=mode)
    return missing[::-1]


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Put off Ctrl-C and SIGTERM until the block is done, which takes milliseconds."""
    signals = {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
