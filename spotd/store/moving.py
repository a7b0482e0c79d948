"""Moves a state into another database, so that exactly one of the two can be used afterwards.

Theory. The old state is sealed first: it names the new one, and opening it is refused from then on. Then all rows are
copied in one transaction of the new state. A move that was broken off between the two is ended by the same command: the
new state is empty, and the seal names it. The new state remembers what the lease on the install knew the old one by;
since that cannot be opened any more, its daemon is proved to have ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, func, insert, select

from spotd.store.encryption import EncryptedSecrets, write_secrets
from spotd.store.place import StateError, parse_place
from spotd.store.queries import Reads
from spotd.store.store import MOVED_TO, Store
from spotd.store.tables import EVENTS, FOLDING_KEY, JOB_SECRETS, JOBS, META, METADATA

FORMER_PLACES: Final = "former_places"
"""Fact of a state that was moved: what its former place is known by in the lease on the install, parted by spaces."""
ROWS_AT_ONCE: Final = 1_000
_STAYS: Final = frozenset({FOLDING_KEY, MOVED_TO, FORMER_PLACES})
"""Facts that are of one place alone."""


def move_state(
    source: str | Path,
    target: str | Path,
    *,
    known_by: frozenset[str],
    secrets: Sequence[EncryptedSecrets] | None = None,
    beside: AbstractContextManager[None] | None = None,
) -> int:
    """Move everything; return how many rows there are now. Both are to be used by no other process.

    Args:
        known_by: what the lease on the install knows the source by.
        secrets: what the new state is to hold in place of what the old one does; `None`: the same.
        beside: entered once the move may begin; left by an exception where nothing was moved.

    Raises:
        StateError: one of the two is in use, cannot be opened, is sealed for another place, or the new one is not
            empty. Nothing was copied, and the same call ends what was begun.
    """
    to = str(parse_place(target))
    if str(parse_place(source)) == to:
        raise StateError(f"the state {to} is there already", hint="name the place that it is to be moved to")
    with Store.open(source, for_move_to=to) as old, Store.open(target) as new:
        new.tx(lambda tx: _require_empty(tx.connection, to))
        moved: list[int] = []

        def copy(reads: Reads) -> None:
            moved.append(new.tx(lambda tx: _copy(reads.connection, tx.connection, known_by, secrets)))

        with nullcontext() if beside is None else beside:
            old.tx(lambda tx: tx.set_meta(MOVED_TO, to))
            try:
                old.read(copy)
            except StateError:
                if not moved:  # else the rows are there, and only the old state went away after the last of them
                    raise
        return moved[0]


def _require_empty(connection: Connection, place: str) -> None:
    found = sum(int(connection.execute(select(func.count()).select_from(t)).scalar_one()) for t in (JOBS, EVENTS))
    if found:
        raise StateError(f"the state {place} is not empty", hint="name an empty database or a file that is not there")


def _copy(
    old: Connection, new: Connection, known_by: frozenset[str], secrets: Sequence[EncryptedSecrets] | None
) -> int:
    total = 0
    for table in METADATA.sorted_tables:
        rows: list[dict[str, Any]] = []
        new.execute(table.delete())
        if table is JOB_SECRETS and secrets is not None:
            continue
        # A stream: charges and events of years need not fit into memory.
        for row in old.execute(select(table).execution_options(yield_per=ROWS_AT_ONCE)).mappings():
            if table is META and row["key"] in _STAYS:
                continue
            rows.append(dict(row))
            if len(rows) == ROWS_AT_ONCE:
                new.execute(insert(table), rows)
                rows = []
            total += 1
        if rows:
            new.execute(insert(table), rows)
    if secrets is not None:
        write_secrets(new, secrets)
    new.execute(insert(META).values(key=FORMER_PLACES, value=" ".join(sorted(known_by))))
    return total
