"""What other jobs left for this one: each in a folder of its own, every chunk verified, all of it or nothing."""

from __future__ import annotations

import os
from typing import Any, Callable

from spotd_jobs.runner.restore import RestoreRun
from spotd_jobs.wire.client.files import remove, write_whole
from spotd_jobs.wire.client.paths import is_plain

_DONE = ".done-"


class InputUnusable(Exception):
    """Outputs of another job that can not be brought here as that job left them. The text states which and why."""


def fetch_inputs(
    inputs: Callable[[], list[dict[str, Any]]],
    folder: str,
    connections: int,
    pause: Callable[[float], bool],
    stopped: Callable[[], bool],
    permitted: Callable[[], bool],
) -> None:
    """Bring all inputs below the folder, one after the other; what a former start brought is kept as the job left it.

    Args:
        inputs: those of the newest grant.

    Raises:
        InputUnusable
        restore.Cancelled, DiskFull, OSError: as of a restore.
    """
    os.makedirs(folder, exist_ok=True)
    for one in inputs():
        name, sha256 = str(one["folder"]), str(one["restore"]["manifest"]["sha256"])
        if "/" in name or name.startswith(".") or not is_plain(name):
            raise InputUnusable("the grant names an input that leads outside")
        place, mark = os.path.join(folder, name), os.path.join(folder, _DONE + name)
        if _is_done(mark, sha256):
            continue
        remove(place)
        os.makedirs(place)
        run = RestoreRun(
            lambda name=name: [one["restore"] for one in inputs() if one["folder"] == name],  # type: ignore[misc]  # a lambda's default
            place,
            connections,
            pause,
            stopped,
            permitted,
        )
        if run.run() is None:
            why = run.fallbacks[0].reason if run.fallbacks else "the grant does not offer it any more"
            raise InputUnusable("%s: %s" % (name, why))
        write_whole(mark, sha256.encode())


def _is_done(mark: str, sha256: str) -> bool:
    try:
        with open(mark, encoding="ascii") as stream:
            return stream.read() == sha256
    except (OSError, ValueError):
        return False
