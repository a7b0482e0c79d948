"""Where spotd keeps things, decided the same way by the daemon and by the client.

The rule is written here by hand instead of asking platformdirs: the client needs it before every command, and that
import costs a third of the client's whole start. A test holds the two to the same answers. One answer differs on
purpose: where a session has no runtime directory, platformdirs falls back to a name in /tmp that any other user may
create first, and secrets travel over this socket; the fallback here is the user's own state directory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
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


def user_config(environ: Mapping[str, str] = os.environ) -> Path:
    """`config.toml` of this user, whether it exists or not."""
    return _base(environ, "XDG_CONFIG_HOME", _home(environ) / ".config") / APP / "config.toml"


def config_candidates(environ: Mapping[str, str] = os.environ) -> tuple[Path, ...]:
    """Return where a config is searched for without `--config`; one named by `$SPOTD_CONFIG` is the only place."""
    given = environ.get("SPOTD_CONFIG", "")
    return (Path(given),) if given else (user_config(environ), SYSTEM_CONFIG)
