"""Charges as rows: append-only, and never two of one attempt at one instant.

Theory. A charge is known by its attempt and the instant at which it begins. Where the wall clock is set back over an
instant at which a charge began (midnight, above all), the next one begins there again. Both are owed, so the later
row begins a microsecond after the instants that are taken; its day and its amount stay what they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from sqlalchemy import Connection, insert, select

from spotd.core.model import Charge
from spotd.store import rows
from spotd.store.tables import CHARGES
from spotd.store.world import chunks


def append_charges(connection: Connection, charges: Sequence[Charge]) -> None:
    """Write the charges behind those that are stored."""
    if not charges:
        return
    fresh = [rows.charge_out(charge) for charge in charges]
    earliest = min(int(row["start"]) for row in fresh)
    taken: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
    columns = select(CHARGES.c.job_id, CHARGES.c.attempt, CHARGES.c.start).where(CHARGES.c.start >= earliest)
    for some in chunks({str(row["job_id"]) for row in fresh}):
        for job_id, attempt, start in connection.execute(columns.where(CHARGES.c.job_id.in_(some))):
            taken[job_id, attempt].add(start)
    for row in fresh:
        _begin_apart(row, taken[str(row["job_id"]), int(row["attempt"])])
    connection.execute(insert(CHARGES), fresh)


def _begin_apart(row: rows.Columns, taken: set[int]) -> None:
    start = int(row["start"])
    while start in taken:
        start += 1
    taken.add(start)
    row["start"], row["end"] = start, max(start, int(row["end"]))
