"""Sums over a market's ledger, with which tests judge what was rented and what it cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from spotd_providers.contract.values import MicroUsd
from spotd_providers.local.hosts import Segment


def total_by_machine(spans: Sequence[Segment], until: datetime) -> dict[str, MicroUsd]:
    """Sum the cost of each machine up to an instant."""
    totals: dict[str, MicroUsd] = {}
    for span in spans:
        totals[span.machine_id] = MicroUsd(totals.get(span.machine_id, 0) + span.amount(until))
    return totals


def total_by_key(spans: Sequence[Segment], until: datetime) -> dict[str, MicroUsd]:
    """Sum the cost of the machines under each key up to an instant."""
    totals: dict[str, MicroUsd] = {}
    for span in spans:
        totals[span.key] = MicroUsd(totals.get(span.key, 0) + span.amount(until))
    return totals


def most_at_once(spans: Iterable[Segment], *, paused_too: bool = False) -> int:
    """Count the most machines that ran (or existed) at the same instant; ends count before starts."""
    changes: list[tuple[datetime, int]] = []
    for span in spans:
        if span.end == span.start or (span.paused and not paused_too):
            continue
        changes.append((span.start, 1))
        if span.end is not None:
            changes.append((span.end, -1))
    now = most = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most
