"""What a simulated provider bills: whole at once, by day, late, with credits, nothing at first, or twice in a list."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from itertools import accumulate

from spotd_providers.contract.values import MicroUsd, ProviderCharge
from tests.sim.machines import OWED_UNIT, Machine
from tests.sim.nature import Nature

HOUR = timedelta(hours=1)
YEN_PER_DOLLAR = 150
DAY = timedelta(days=1)
ALL_STATED_AFTER = DAY + 4 * HOUR
"""From the end of a machine to its whole bill, in the slowest of the manners."""
BILLS_READ_WITHIN = timedelta(hours=4)
"""From when a bill is stated to when it has been read twice."""


class Manner(StrEnum):
    """How a provider bills."""

    WHOLE = "whole"
    DAILY = "daily"
    """A row for each day, once the day is over."""
    NOTHING_FIRST = "nothing_first"
    """A row of nothing for hours, then the bill."""
    CREDIT = "credit"
    """The bill, and a credit of as much beside it."""
    LATE = "late"
    TWICE = "twice"
    """Each row stands in the list twice."""
    YEN = "yen"


def charges(cloud: Nature, manner: Manner, since: datetime, until: datetime) -> Sequence[ProviderCharge]:
    """What the provider answers now."""
    found: list[ProviderCharge] = []
    for m in cloud.machines.values():
        # The provider knows of no handover: it bills all parts of a machine once the last of them is over.
        ended_at = cloud.machines[m.ref.instance_id].died
        if m.died is not None and ended_at is not None and m.born < until and m.died > since:
            found.extend(rows_of(m, manner, cloud.now, ended_at))
    return found


def rows_of(m: Machine, manner: Manner, now: datetime, ended_at: datetime) -> Iterator[ProviderCharge]:
    assert m.died is not None
    age = now - ended_at
    match manner:
        case Manner.WHOLE:
            yield _row(m, m.born, m.died, m.billed)
        case Manner.DAILY:
            yield from (row for row in by_day(m) if now >= _midnight_after(row.start) + HOUR)
        case Manner.NOTHING_FIRST if age < 4 * HOUR:
            yield _row(m, m.born, m.died, 0)
        case Manner.NOTHING_FIRST:
            yield _row(m, m.born, m.died, m.billed)
        case Manner.CREDIT:
            yield _row(m, m.born, m.died, m.billed)
            if zlib.crc32((m.label or m.key).encode()) % 2:  # of all parts of a machine, or of none
                yield _row(m, m.born, m.died, -m.billed)
        case Manner.LATE if age < 4 * HOUR:
            return
        case Manner.LATE:
            yield _row(m, m.born, m.died, m.billed)
        case Manner.TWICE:
            yield from (_row(m, m.born, m.died, m.billed) for _ in range(2))
        case Manner.YEN:
            yield replace(_row(m, m.born, m.died, m.billed * YEN_PER_DOLLAR), currency="JPY")


def by_day(m: Machine) -> list[ProviderCharge]:
    """One row for each day on which it cost anything; together they are its bill."""
    assert m.died is not None
    days = sorted(day for day, amount in m.owed_by_day.items() if amount)
    sums = [-(-owed // OWED_UNIT) for owed in accumulate(m.owed_by_day[day] for day in days)]
    amounts = [later - earlier for earlier, later in zip([0, *sums], sums, strict=False)]
    if amounts:
        amounts[-1] += m.billed - sum(amounts)
    rows = []
    for day, amount in zip(days, amounts, strict=True):
        begun = datetime(day.year, day.month, day.day, tzinfo=UTC)
        rows.append(_row(m, max(m.born, begun), min(m.died, begun + DAY), amount))
    return rows


def _midnight_after(at: datetime) -> datetime:
    return at.replace(hour=0, minute=0, second=0, microsecond=0) + DAY


def _row(m: Machine, start: datetime, end: datetime, amount: int) -> ProviderCharge:
    return ProviderCharge(
        key=m.label or m.key, instance_id=m.ref.instance_id, start=start, end=max(start, end), amount=MicroUsd(amount)
    )
