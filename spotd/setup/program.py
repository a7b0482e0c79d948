"""Where the installed program is, and whether a service can reach it."""

from __future__ import annotations

import stat
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from spotd.setup import SetupRefused

_HIDDEN_FROM_ALL: Final = (Path("/tmp"), Path("/var/tmp"))  # noqa: S108 - places that are refused, not used
_HIDDEN_FROM_SYSTEM: Final = (Path("/home"), Path("/root"), Path("/run/user"))


def installed_command() -> tuple[str, ...]:
    """Return the command that starts this very installation: in a venv, of pipx, of uv, or of the user's site."""
    beside = Path(sys.executable).parent
    folders = [beside, Path(sysconfig.get_path("scripts")), Path(sysconfig.get_path("scripts", "posix_user"))]
    for folder in folders:
        if (folder / "spotd").is_file():
            return (str(folder / "spotd"),)
    # -P: a file called spotd.py in the folder that the service starts in is not this program.
    return (sys.executable, "-P", "-m", "spotd")


def folders_in_use(command: Sequence[str]) -> tuple[Path, ...]:
    """Return every folder that the program is read from, its interpreter's own included."""
    found = (Path(command[0]).parent, Path(sys.prefix), Path(sys.base_prefix), Path(__file__).parents[2])
    return tuple(dict.fromkeys(path for one in found for path in (one, one.resolve())))


def require_reachable(folders: Sequence[Path], *, system: bool) -> None:
    """Raise `SetupRefused` if the unit could not see the program, which its sandbox or a mode hides."""
    hidden = (*_HIDDEN_FROM_ALL, *(_HIDDEN_FROM_SYSTEM if system else ()))
    for folder in folders:
        if any(folder.is_relative_to(place) for place in hidden):
            way_out = "for one user, leave out --system; for all: pipx install --global spotd, or a venv in /opt"
            raise SetupRefused(
                f"the service could not see its own program: {folder} is hidden from it",
                hint=way_out if system else "install spotd somewhere else, for instance with pipx",
            )
        if system and (closed := _closed_to_others(folder)) is not None:
            raise SetupRefused(
                f"the service runs as a user of its own, which may not enter {closed}", hint=f"chmod o+rx {closed}"
            )
        if system and (loose := changeable_by_others(folder)) is not None:
            raise SetupRefused(
                f"the service is given root's keys, and others than root may change its program by {loose}",
                hint=f"chown -R root: {loose}; chmod -R go-w {loose}",
            )


def _closed_to_others(folder: Path) -> Path | None:
    for path in (*reversed(folder.parents), folder):
        try:
            if not path.stat().st_mode & stat.S_IXOTH:
                return path
        except OSError:
            return path
    return None


def changeable_by_others(folder: Path) -> Path | None:
    """Return the folder, or the one above it, that others than root may write to; None where only root may."""
    for path in (folder, *folder.parents):
        found = path.stat()
        if found.st_uid != 0 or (found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX):
            return path
    return None
