"""What a provider's rows say of one machine, added up: nothing is taken twice, and what cannot be added is named."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Final

from spotd_providers.contract.money import MicroUsd
from spotd_providers.contract.values import InstanceId, ProviderCharge

CURRENCY: Final = "USD"
TOTAL: Final = "total"
ROUNDED: Final = timedelta(minutes=1)
"""Spans that overlap by less than this were rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """The rows of one machine.

    Attributes:
        since: begin of the first row that costs something.
        until: up to where the machine itself is billed; rows of its disk or its traffic alone may go further.
        gap: the longest time between them that no row covers.
        is_certain: no row was repeated, so that the sum is all that the rows say and not only the least.
        problem: why the rows cannot be added up, in words that follow "the bill"; empty where they can.
    """

    amount: MicroUsd
    since: datetime
    until: datetime
    gap: timedelta = timedelta(0)
    is_certain: bool = True
    problem: str = ""


def bill_of(machine: InstanceId, charges: Iterable[ProviderCharge]) -> Bill | None:
    """Add up the rows of this machine; `None` where no row names it."""
    own = [row for row in charges if row.instance_id == machine]
    if not own:
        return None
    rows = sorted(set(own), key=lambda row: (row.start, row.end, row.kind, row.amount))
    paid = [row for row in rows if row.amount > 0]
    return Bill(
        amount=MicroUsd(sum(row.amount for row in rows)),
        since=min(row.start for row in paid or rows),
        until=_machine_until(paid or rows),
        gap=_longest_gap(paid),
        is_certain=len(rows) == len(own),
        problem=_problem(rows, paid),
    )


def _problem(rows: Sequence[ProviderCharge], paid: Sequence[ProviderCharge]) -> str:
    foreign = sorted({row.currency for row in rows} - {CURRENCY})
    if foreign:
        return f"is in {', '.join(foreign)}, and only {CURRENCY} is understood"
    by_kind: defaultdict[str, list[ProviderCharge]] = defaultdict(list)
    for row in paid:
        by_kind[row.kind].append(row)
    for kind, own in by_kind.items():
        if any(before.end - after.start >= ROUNDED for before, after in pairwise(own)):
            return f"has different rows for the same time ({kind})"
    return ""


def _machine_until(rows: Sequence[ProviderCharge]) -> datetime:
    """Return the end of what is billed of the machine itself: in total, or of the kind that costs most."""
    sums: defaultdict[str, int] = defaultdict(int)
    for row in rows:
        sums[row.kind] += row.amount
    main = {TOTAL, max(sums, key=lambda kind: (sums[kind], kind))}
    return max(row.end for row in rows if row.kind in main)


def _longest_gap(rows: Sequence[ProviderCharge]) -> timedelta:
    """Return the longest time between the rows, which are sorted by their begin, that none of them covers."""
    longest, reached = timedelta(0), None
    for row in rows:
        if reached is not None:
            longest = max(longest, row.start - reached)
        reached = row.end if reached is None else max(reached, row.end)
    return longest
