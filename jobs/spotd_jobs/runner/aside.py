"""The checkpoint folder at a start of the runner: empty, and what was in it put aside."""

from __future__ import annotations

import os

from spotd_jobs.wire.client.files import TEMPORARY, remove

_ASIDE = TEMPORARY + "before-"


def clear_aside(folder: str, boot: int) -> None:
    """Make the folder, empty: a checkpoint of unknown state is never resumed from.

    What was there is not deleted but moved beside the folder, until the next start of the runner. (Some training
    scripts refuse a folder that holds anything, so it stays inside, hidden, only where there is no other way.)

    Raises:
        OSError: the folder can not be made or written.
    """
    os.makedirs(folder, exist_ok=True)
    remove_aside(folder)
    names = os.listdir(folder)
    for name in names:
        if name.startswith(TEMPORARY):
            remove(os.path.join(folder, name))
    rest = [name for name in names if not name.startswith(TEMPORARY)]
    if not rest:
        return
    try:
        _move(folder, rest, "%s%s%d" % (folder, _ASIDE, boot))
    except OSError:
        left = [name for name in rest if os.path.lexists(os.path.join(folder, name))]
        _move(folder, left, os.path.join(folder, "%s%d" % (_ASIDE, boot)))


def remove_aside(folder: str) -> None:
    """Nothing is left of what earlier starts of the runner put beside the folder, or hidden inside it."""
    parent, own_name = os.path.split(folder)
    for place, beginning in ((parent, own_name + _ASIDE), (folder, _ASIDE)):
        for name in os.listdir(place):
            if name.startswith(beginning):
                remove(os.path.join(place, name))


def _move(folder: str, names: list[str], into: str) -> None:
    os.mkdir(into, 0o700)
    for name in names:
        os.rename(os.path.join(folder, name), os.path.join(into, name))
