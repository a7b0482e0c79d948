"""`spotd run`: reads the config, runs the daemon, and ends with a code and a sentence instead of a traceback."""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import anyio

from spotd.core.domain.states import InvariantBroken
from spotd.daemon import log as logs
from spotd.daemon.clock import ClockFileBroken
from spotd.daemon.crash import CrashPoints, never
from spotd.daemon.errors import BadConfig
from spotd.daemon.log import Redactor
from spotd.service import memory
from spotd.service.composition import App, DaemonEnded
from spotd.service.configuration import DISK_FULL, load_settings
from spotd.service.sockets import SocketRefused
from spotd.store import StateError as StateError
from spotd_jobs.objects.api import StoreError as ObjectsError

OK: Final = 0
CANNOT_START: Final = 1
BAD_CONFIG: Final = 2
BROKEN: Final = 70


def run(config_path: str | Path | None, overrides: Mapping[str, str], *, crash: CrashPoints = never) -> int:
    """Run the daemon until a signal ends it; return the exit code.

    `overrides` are variables laid over the environment, in force on every reload too: `STATE_DIRECTORY`,
    `SPOTD_SOCKET`, and any key of the config (`SPOTD_DAEMON__POLL_EVERY`).
    """
    if not faulthandler.is_enabled():
        faulthandler.enable(2)  # a crash of the interpreter leaves its stacks in the log of the service
    memory.share_one_pool()
    redactor = Redactor()
    logs.configure(redactor)
    load = partial(load_settings, config_path, overrides)
    try:
        settings = load()
        redactor.register(settings.secrets)
        app = App(settings, load=load, redactor=redactor, crash=crash)
        while anyio.run(app.run) is DaemonEnded.CLOCK_SET:
            app = App(app.reloaded, load=load, redactor=redactor, crash=crash)
    except BadConfig as exc:
        return _fail(str(exc), BAD_CONFIG)
    except KeyboardInterrupt:
        return OK
    except BaseException as exc:
        known = [_words(one) for one in _leaves(exc)]
        if any(words is None for words in known):
            logs.get("daemon").critical("daemon.crashed", exc_info=exc)
            raise
        return _fail("\n".join(dict.fromkeys(words for words in known if words)), _code(exc))
    return OK


def _code(error: BaseException) -> int:
    """Return the exit code of a known failure: the gravest of several."""
    leaves = tuple(_leaves(error))
    if any(isinstance(one, InvariantBroken) for one in leaves):
        return BROKEN
    return BAD_CONFIG if any(isinstance(one, BadConfig) for one in leaves) else CANNOT_START


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """Return what really went wrong, below the groups that task groups wrap it in."""
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from _leaves(one)
    else:
        yield error


def _words(error: BaseException) -> str | None:
    """Return the message for the user, or `None` for an unexpected error."""
    match error:
        case SocketRefused() | StateError():
            return f"{error.message}\n\nhint: {error.hint}"
        case ClockFileBroken() | ObjectsError():
            return str(error)
        case BadConfig():
            return str(error)
        case OSError() if error.filename is not None:
            # The disk of the state folder is full, or a folder cannot be written: nothing that is wrong with spotd.
            full = error.errno in DISK_FULL
            hint = "free some space there" if full else "check its owner, its mode and its disk"
            return f"{error.filename}: {error.strerror}\n\nhint: {hint}"
        case InvariantBroken():
            return f"spotd stopped to be safe: {error}\n\nhint: nothing was written; report this with the log"
        case _:
            return None


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"error: {message}\n")
    return code
