"""Charges as rows: append-only, and never two of one attempt at one instant.

Theory. A charge is known by its attempt and the instant at which it begins. Where the wall clock is set back over an
instant at which a charge began (midnight, above all), the next one begins there again. Both are owed, so the later
row begins a microsecond after the instants that are taken; its day and its amount stay what they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import date
from functools import cache
from typing import Any, Final

from sqlalchemy import Connection, Insert, Table, bindparam, insert, select
from sqlalchemy.dialects.sqlite import insert as upsert_into

from spotd.core.domain.charges import Charge, CostSums, sums_of
from spotd.core.domain.ids import AttemptId
from spotd.store import rows
from spotd.store.conditions import IDS, chunks
from spotd.store.mapping import Columns
from spotd.store.tables import ATTEMPT_COSTS, CHARGES, DAY_COSTS
from spotd_providers.contract.values import ProviderName

_BEGUN: Final = select(CHARGES.c.job_id, CHARGES.c.attempt, CHARGES.c.start).where(
    CHARGES.c.start >= bindparam("earliest"), CHARGES.c.job_id.in_(IDS)
)


def append_charges(connection: Connection, charges: Sequence[Charge]) -> None:
    """Write the charges behind those that are stored."""
    if not charges:
        return
    fresh = [rows.CHARGE.out(charge) for charge in charges]
    earliest = min(int(row["start"]) for row in fresh)
    taken: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
    for some in chunks({str(row["job_id"]) for row in fresh}):
        for job_id, attempt, start in connection.execute(_BEGUN, {"ids": some, "earliest": earliest}):
            taken[job_id, attempt].add(start)
    for row in fresh:
        _begin_apart(row, taken[str(row["job_id"]), int(row["attempt"])])
    connection.execute(insert(CHARGES), fresh)
    _add_up(connection, charges)


def _add_up(connection: Connection, charges: Sequence[Charge]) -> None:
    """Keep the sums that answers are made of, so that no answer reads the charges of years."""
    attempts: defaultdict[AttemptId, CostSums] = defaultdict(CostSums)
    days: defaultdict[tuple[date, ProviderName], CostSums] = defaultdict(CostSums)
    for charge in charges:
        sums = sums_of(charge)
        attempts[charge.attempt] += sums
        days[charge.day, charge.provider] += sums
    of_attempts = [{"job_id": i.job, "attempt": i.number, **rows.COST_SUMS.out(sums)} for i, sums in attempts.items()]
    of_days = [{"day": day, "provider": name, **rows.COST_SUMS.out(sums)} for (day, name), sums in days.items()]
    connection.execute(_adding(ATTEMPT_COSTS), of_attempts)
    connection.execute(_adding(DAY_COSTS), of_days)


@cache
def _adding(table: Table) -> Insert:
    statement = upsert_into(table)
    added: dict[str, Any] = {c.name: c + statement.excluded[c.name] for c in table.c if not c.primary_key}
    return statement.on_conflict_do_update(index_elements=list(table.primary_key), set_=added)


def _begin_apart(row: Columns, taken: set[int]) -> None:
    start = int(row["start"])
    while start in taken:
        start += 1
    taken.add(start)
    row["start"], row["end"] = start, max(start, int(row["end"]))
