"""Where spotd keeps things, decided the same way by the daemon and by the client.

The rule is written here by hand instead of asking platformdirs: the client needs it before every command, and that
import costs a third of the client's whole start. A test holds the two to the same answers. One answer differs on
purpose: where a session has no runtime directory, platformdirs falls back to a name in /tmp that any other user may
create first, and secrets travel over this socket; the fallback here is the user's own state directory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

APP: Final = "spotd"
SOCKET_NAME: Final = "spotd.sock"
SYSTEM_SOCKET: Final = Path("/run/spotd") / SOCKET_NAME
"""Where the unit in systemd/ puts it; named in hints only, never used without being asked for."""
SYSTEM_CONFIG: Final = Path("/etc/spotd/config.toml")
SOCKET_PATH_BYTES_MAX: Final = 103 if sys.platform == "darwin" else 107
"""Longest path the kernel takes for a unix socket."""


def _home(environ: Mapping[str, str]) -> Path:
    home = environ.get("HOME", "")
    return Path(home) if home else Path("~").expanduser()


def _first(value: str) -> str:
    """Return the first of several directories that systemd joins with colons: it is the unit's own."""
    return value.split(":", 1)[0]


def _base(environ: Mapping[str, str], variable: str, fallback: Path) -> Path:
    """Return an XDG base directory; one which is not absolute must be ignored, by the specification."""
    given = environ.get(variable, "").strip()
    return Path(given) if given.startswith("/") else fallback


def state_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """`$STATE_DIRECTORY`, else the platform's state folder of this user."""
    given = _first(environ.get("STATE_DIRECTORY", ""))
    if given:
        return Path(given)
    home = _home(environ)
    if sys.platform == "darwin":
        return _base(environ, "XDG_STATE_HOME", home / "Library" / "Application Support") / APP
    return _base(environ, "XDG_STATE_HOME", home / ".local" / "state") / APP


def runtime_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """`$RUNTIME_DIRECTORY`, else the platform's runtime folder of this user, else `run` below the state folder."""
    given = _first(environ.get("RUNTIME_DIRECTORY", ""))
    if given:
        return Path(given)
    session = environ.get("XDG_RUNTIME_DIR", "").strip()
    if session.startswith("/"):
        return Path(session) / APP
    if sys.platform == "darwin":
        return _home(environ) / "Library" / "Caches" / "TemporaryItems" / APP
    own = Path(f"/run/user/{os.getuid()}")
    if own.is_dir() and os.access(own, os.W_OK):
        return own / APP
    return state_dir(environ) / "run"


def socket_path(environ: Mapping[str, str] = os.environ) -> Path:
    """`$SPOTD_SOCKET`, else `spotd.sock` in the runtime folder."""
    given = environ.get("SPOTD_SOCKET", "")
    return Path(given) if given else runtime_dir(environ) / SOCKET_NAME


@contextmanager
def starting(socket: Path) -> Iterator[None]:
    """State beside the socket that this process is going to listen there, so that a client may wait for it.

    Nothing depends on it but that wait: a place that cannot be written is no reason not to start.
    """
    beside = _starting_path(socket)
    with suppress(OSError):
        before = os.umask(0o077)
        try:
            beside.parent.mkdir(parents=True, exist_ok=True)
            beside.write_text(f"{os.getpid()}\n", encoding="ascii")
        finally:
            os.umask(before)
    try:
        yield
    finally:
        with suppress(OSError):
            beside.unlink()


def is_starting(socket: Path) -> bool:
    """Whether a process that lives has stated that it is going to listen there."""
    try:
        os.kill(max(1, int(_starting_path(socket).read_text(encoding="ascii"))), 0)
    except PermissionError:
        return True
    except (OSError, ValueError, OverflowError):
        return False
    return True


def _starting_path(socket: Path) -> Path:
    return socket.with_name(f"{socket.name}.starting")


def user_config(environ: Mapping[str, str] = os.environ) -> Path:
    """`config.toml` of this user, whether it exists or not."""
    return _base(environ, "XDG_CONFIG_HOME", _home(environ) / ".config") / APP / "config.toml"


def config_candidates(environ: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """Return where a config is searched for without `--config`; one named by `$SPOTD_CONFIG` is the only place."""
    given = environ.get("SPOTD_CONFIG", "")
    return (Path(given),) if given else (user_config(environ), SYSTEM_CONFIG)


# Files of the state folder that are written whole or not at all.


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
    with _draft(path, text, mode) as draft:
        draft.replace(path)


def create_whole(path: Path, text: str, *, mode: int) -> None:
    """Write the text into a file that is not there yet; there is never a part of it.

    Raises:
        FileExistsError: it is there, and stays as it is. OSError
    """
    with _draft(path, text, mode) as draft:
        path.hardlink_to(draft)


@contextmanager
def _draft(path: Path, text: str, mode: int) -> Iterator[Path]:
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
