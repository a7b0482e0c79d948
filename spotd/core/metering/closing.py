"""The one line that sums a finished job up: how long it ran, where, and what it cost against on-demand."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.jobs import HOSTS_MAX, RunTotals
from spotd.core.domain.states import EndKind, EndReason, JobState
from spotd.core.metering.metering import metered_until
from spotd.core.pricing.words import dollar_words
from spotd_providers.contract.money import MicroUsd

_HOUR: Final = timedelta(hours=1)
_MINUTE: Final = timedelta(minutes=1)
_SECOND: Final = timedelta(seconds=1)


def with_run(totals: RunTotals, item: Attempt, reason: EndReason, now: datetime) -> RunTotals:
    """Return the totals with an attempt that ends now for this reason. What nothing proves of its time is left out."""
    ran, hosts = totals.ran, totals.hosts
    if item.running_at is not None:
        ran += max(timedelta(0), metered_until(item.meter, now) - item.running_at)
        host = _host_name(item)
        if host not in hosts and len(hosts) < HOSTS_MAX:
            hosts = (*hosts, host)
    taken = reason.traits.kind is EndKind.TAKEN and item.launched_at is not None
    return replace(totals, ran=ran, hosts=hosts, preemptions=totals.preemptions + (1 if taken else 0))


def with_paid(totals: RunTotals, item: Attempt, paid: int) -> RunTotals:
    """Return the totals with what more was paid for an attempt, which may be negative."""
    if item.quote.on_demand is not None:
        return totals
    return replace(totals, uncompared=MicroUsd(totals.uncompared + paid))


def with_estimates(totals: RunTotals, more: int) -> RunTotals:
    """Return the totals with so many more attempts whose cost is an estimate, or fewer."""
    return replace(totals, estimated=max(0, totals.estimated + more))


def is_estimate(item: Attempt, spent: MicroUsd) -> bool:
    """Whether so much for this attempt follows from what was observed: its provider's own bill is not known."""
    return item.billed is None and spent != 0


def compared_cost(state: JobState, on_demand: MicroUsd, uncompared: MicroUsd) -> MicroUsd:
    """Return what the sum of a job is compared with: a failure is worth nothing, so nothing was saved by its price."""
    return uncompared if state is JobState.FAILED else on_demand


def saved(state: JobState, spent: MicroUsd, on_demand: MicroUsd) -> MicroUsd:
    """Return what a job saved against on-demand, negative where it cost more; nothing where it failed."""
    return MicroUsd(0 if state is JobState.FAILED else on_demand - spent)


def _host_name(item: Attempt) -> str:
    """Return what names the host; a machine of a provider that shows no hosts is one of its own."""
    machine = item.ref.instance_id if item.ref is not None else str(item.id.number)
    return f"{item.provider}/{item.quote.offer.host_id or machine}"


def closing_words(totals: RunTotals, spent: MicroUsd, on_demand: MicroUsd, recoveries: int, lost: timedelta) -> str:
    """Return `ran 31.4 h on 4 hosts, $41.20 instead of $118.60 on demand: saved 65 %, 3 preemptions, ...`.

    Empty where nothing ran and nothing was spent. Money without a known on-demand price is compared with nothing.
    """
    if not totals.hosts and not spent:
        return ""
    parts = [_ran_words(totals), _money_words(spent, on_demand, totals)]
    if recoveries:
        parts.append(_count(recoveries, "preemption"))
    if lost > timedelta(0):
        parts.append(f"{_span(lost)} repeated")
    return ", ".join(parts)


def _ran_words(totals: RunTotals) -> str:
    number = len(totals.hosts)
    if not number:
        return "its command never ran"
    hosts = f"{number} or more hosts" if number >= HOSTS_MAX else _count(number, "host")
    return f"ran {_span(totals.ran)} on {hosts}"


def _money_words(spent: MicroUsd, on_demand: MicroUsd, totals: RunTotals) -> str:
    """Return what was spent; compared with on-demand as far as that price was known at each launch."""
    uncompared = totals.uncompared
    paid, other = spent - uncompared, on_demand - uncompared
    words = dollar_words(spent) + (" (estimated)" if totals.estimated and spent else "")
    if other <= 0:
        return words
    if uncompared:
        words += f", {dollar_words(MicroUsd(paid))} of it"
    if paid == other:
        return f"{words} as on demand"
    # The machines of an on-demand market would have started and repeated less: these are the hours that were paid for.
    percent = (100 * abs(other - paid) + other // 2) // other
    saved = f"saved {percent} %" if other > paid else f"{percent} % more"
    return f"{words} instead of {dollar_words(MicroUsd(other))} on demand for the same machine hours: {saved}"


def _span(span: timedelta) -> str:
    """Return `31.4 h`, `14 min` or `40 s`; what is not nothing is never shown as that."""
    if span >= 2 * _HOUR:
        return f"{span / _HOUR:.1f} h"
    if span >= 2 * _MINUTE:
        return f"{round(span / _MINUTE)} min"
    if timedelta(0) < span < _SECOND:
        return "less than 1 s"
    return f"{round(span.total_seconds())} s"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
