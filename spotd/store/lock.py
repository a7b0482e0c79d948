"""One writer per state: an exclusive lock on a small file beside it, which names the process that holds it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Final

from spotd.store.errors import StateUnavailable, StoreInUse

_PID_LENGTH_MAX: Final = 20


class WriterLock:
    """Held from construction until `release`, and never longer than its process lives."""

    def __init__(self, state: Path) -> None:
        """Make this process the one writer of the state.

        Raises:
            StoreInUse: another one is.
            StateUnavailable: the lock file cannot be made.
        """
        path = state.with_name(state.name + ".lock")
        try:
            self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise StateUnavailable(
                f"cannot lock the state {state}: {exc.strerror}",
                hint="check that its folder exists and that this user may write there",
            ) from exc
        try:
            self._take(state, self._file)
        except BaseException:
            self.release()
            raise

    def _take(self, state: Path, file: int) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            pid = os.pread(file, _PID_LENGTH_MAX, 0).decode("ascii", "replace").strip()
            who = f"process {pid}" if pid.isdecimal() else "another process"
            raise StoreInUse(
                f"the state {state} is in use by {who}",
                hint="stop that spotd first, or give this one a state directory of its own",
            ) from exc
        except OSError as exc:
            raise StateUnavailable(
                f"cannot lock the state {state}: {exc.strerror}",
                hint="keep the state on a local file system that supports locks",
            ) from exc
        os.ftruncate(file, 0)
        os.pwrite(file, f"{os.getpid()}\n".encode("ascii"), 0)

    def release(self) -> None:
        """Let another process write the state. The file stays: removing it would let two lock different files."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
