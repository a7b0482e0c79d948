"""What a test process inherits from its caller, made the same for all: signals, umask and environment.

`make test` is started from terminals, from scripts in the background (whose SIGINT is ignored, and so in every process
that a test starts), by CI, and by people whose shells export what spotd reads. What is set here is passed on to every
process that a test starts.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from typing import Final

UMASK: Final = 0o022
SIGNALS: Final[Mapping[signal.Signals, object]] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGCHLD: signal.SIG_DFL,
    signal.SIGUSR1: signal.SIG_DFL,
    signal.SIGUSR2: signal.SIG_DFL,
}
"""What a program that was started in the foreground begins with."""
SET: Final[Mapping[str, str]] = {"LANG": "C.UTF-8", "TZ": "UTC"}
FORGET: Final = frozenset(
    {
        "CLICOLOR", "CLICOLOR_FORCE", "COLUMNS", "CREDENTIALS_DIRECTORY", "FORCE_COLOR", "LANGUAGE", "LINES",
        "NOTIFY_SOCKET", "NO_COLOR", "RUNPOD_API_KEY", "RUNTIME_DIRECTORY", "STATE_DIRECTORY", "TERM", "VAST_API_KEY",
        "WATCHDOG_PID", "WATCHDOG_USEC", "XDG_CONFIG_DIRS", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR",
        "XDG_STATE_HOME",
    }
)  # fmt: skip
FORGET_BEGINNINGS: Final = ("SPOTD_", "AWS_", "LC_", "OPENBLAS_", "OMP_", "MKL_", "NPY_", "BLIS_", "GOTO_", "VECLIB_")
"""Those of libraries for numbers change the last bit of a product: no machine has them, so no run beside it may."""
KEEP_BEGINNINGS: Final = ("SPOTD_TEST", "SPOTD_SHARED_DATA", "SPOTD_FRAMEWORKS")
"""Said to the tests, not to spotd."""


def is_forgotten(name: str) -> bool:
    """Whether a variable of the caller must not reach a test."""
    if name.lower().endswith("_proxy"):
        return True
    begins = name.startswith(FORGET_BEGINNINGS) and not name.startswith(KEEP_BEGINNINGS)
    return begins or name in FORGET


def settle() -> None:
    """Make it the same for this process, and for those that it starts."""
    for name in [name for name in os.environ if is_forgotten(name)]:
        del os.environ[name]
    os.environ.update(SET)
    time.tzset()
    os.umask(UMASK)
    if threading.current_thread() is threading.main_thread():
        for number, handler in SIGNALS.items():
            signal.signal(number, handler)  # type: ignore[arg-type] # a handler of the table
