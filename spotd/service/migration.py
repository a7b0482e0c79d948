"""`spotd migrate`: bring the state database to this version without starting the daemon."""

from __future__ import annotations

import os
from pathlib import Path

from spotd import paths
from spotd.config.model import SQLITE_DEFAULT
from spotd.service.configuration import STATE_FILE
from spotd.store import StateError as StateError
from spotd.store import Store


def migrate_state(state: str | Path) -> str | Path:
    """Bring the state that `[daemon] state` names to this version, and return its place.

    Raises:
        StateError: it is in use, newer than this version, of another schema, or cannot be written.
    """
    place = paths.state_dir(os.environ) / STATE_FILE if state == SQLITE_DEFAULT else state
    if isinstance(place, Path):
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with Store.open(place):
        pass
    return place
