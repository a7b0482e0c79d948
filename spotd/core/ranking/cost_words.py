"""What finishing a job is expected to cost on the machines that are for sale, in sentences with figures."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Final

from spotd.core.canary import canary_time_of
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.copies import replace
from spotd.core.domain.jobs import GB, Job, bytes_within, sized
from spotd.core.domain.market import NOTHING, MarketSnapshot, Quote
from spotd.core.domain.world import ONE, World
from spotd.core.experience import PPM
from spotd.core.pricing import (
    dollar_words,
    egress_cost,
    machine_words,
    moved_cost,
    restored_bytes,
    span_words,
    transfer_time,
)
from spotd.core.ranking.candidates import CandidateCatalogue, ceiling_for, is_admissible
from spotd.core.ranking.expected_cost import Expectation, RankedOffers
from spotd.core.ranking.remaining_work import (
    Kind,
    RemainingWork,
    WorkSource,
    remaining_work,
    speeds_of,
    time_on,
    unsaved_work,
)
from spotd_providers.contract.values import MicroUsd, as_usd, cost

KINDS_SHOWN: Final = 3
CENT: Final = 10_000
READ_MAX: Final = 500
"""So many offers are read for the best of each kind."""
NOTHING_KNOWN: Final = "cheapest first; add [work] and [speed] to rank by total cost"
_HOUR: Final = timedelta(hours=1)


def cost_words(job: Job, world: World, market: MarketSnapshot, now: datetime) -> tuple[str, ...]:
    """Return what the job is expected to cost on the best of each kind of machine, and what that rests on."""
    item = world.counting_attempt(job.id)
    job = job if item is None else sized(job, item.quote.offer.nodes)
    catalogue = CandidateCatalogue(world, market, now)
    offers = catalogue.list_for(catalogue.key_of(job))
    left = remaining_work(job)
    running = () if item is None else _running_words(job, item, left, now)
    best = list(_best_of_each_kind(job, catalogue, offers, world))
    if not best:
        return tuple(running)
    losses = (
        *_loss_words(best[0], catalogue),
        *_read_words(job, best[0][0]),
        *_canary_words(best[0][0], canary_time_of(best[0][0], world.policy)),
    )
    if left is None and not offers.terms.speeds.is_known:
        return (NOTHING_KNOWN, *losses)
    compared = _compared_words(job, best, left, offers)
    return (*running, compared, *_basis_words(left, offers), *losses)


def _canary_words(quote: Quote, time: timedelta) -> Iterator[str]:
    """Yield what it costs at most to measure the best machine before its job starts, where that is done."""
    if time:
        most = dollar_words(cost(quote.price.total, time))
        yield f"its canary takes {span_words(time)} and {most} at most before the job starts"


def finish(job: Job, total: int, expected: Expectation, left: RemainingWork, kind: Kind) -> tuple[timedelta, MicroUsd]:
    """Return how long so much work takes on this machine, with what losses repeat, and what it costs."""
    command = time_on(job, left, *kind)
    hours = command / _HOUR
    risk = expected.risk_ppm / PPM
    return command * (1 + risk), MicroUsd(round(hours * (total * (1 + risk) + expected.restores)))


def _best_of_each_kind(
    job: Job, catalogue: CandidateCatalogue, offers: RankedOffers, world: World
) -> Iterator[tuple[Quote, Expectation, bool]]:
    """Yield the best free offer of each kind of machine, best first, and whether it is under its ceiling."""
    seen: set[Kind] = set()
    for number, quote in enumerate(catalogue.ranked(offers)):
        kind = (quote.offer.gpu, quote.offer.gpu_count)
        if len(seen) >= KINDS_SHOWN or number >= READ_MAX:
            return
        if kind in seen:
            continue
        seen.add(kind)
        ceiling = ceiling_for(*kind, job.spec.price, world.policy)
        yield quote, offers.expect(quote.offer), is_admissible(quote, ceiling, job.spec.price)


def _compared_words(
    job: Job, best: list[tuple[Quote, Expectation, bool]], left: RemainingWork | None, offers: RankedOffers
) -> str:
    parts: list[str] = []
    for quote, expected, fits in best:
        kind = (quote.offer.gpu, quote.offer.gpu_count)
        words = f"{machine_words(*kind, quote.offer.nodes)} at ${as_usd(quote.price.total):.2f}/h"
        if left is None:
            hour = MicroUsd(_work_hour(quote.price.total, expected))
            words += f" counts as {dollar_words(hour)} for an hour of work" + ("" if parts else " at speed 1.0")
        else:
            span, spent = finish(job, quote.price.total, expected, left, kind)
            words += f"{'' if parts else ' finishes'} in {_hours(span)} for about {_dollars(spent)}"
        if offers.terms.speeds.is_known and not offers.terms.speeds.knows(*kind):
            words += " (its speed is not known: it counts like the slowest that is)"
        parts.append(words + ("" if fits else " (above the ceiling)"))
    return "; ".join(parts)


def _work_hour(total: int, expected: Expectation) -> int:
    return (total + total * expected.risk_ppm // PPM + expected.restores) * PPM // expected.speed_ppm


def _basis_words(left: RemainingWork | None, offers: RankedOffers) -> Iterator[str]:
    """Yield what the figures rest on, and what is not known."""
    speeds = offers.terms.speeds
    if not speeds.is_known:
        yield (
            "the speed of machines is not known for this job, so all count alike:"
            " [speed] states it, or steps in its checkpoints show it once it ran on two kinds"
        )
    elif speeds.measured:
        yield "the speed of machines was learnt from the job's own steps"
    elif speeds.is_learnt:
        yield "the speed of machines is that which earlier jobs and the markets' own benchmarks measured"
    if left is None:
        yield "how much of the job is left is not known: [work] time or steps states it"
    else:
        yield f"left are {_hours(left.time)} of work at speed 1.0, by {_SOURCES[left.source]}"


def _loss_words(best: tuple[Quote, Expectation, bool], catalogue: CandidateCatalogue) -> Iterator[str]:
    """Yield which preemptions are expected, where anything is on record."""
    quote, expected, _ = best
    provider = quote.offer.provider
    count, span = catalogue.costing.hazards.evidence_of(quote.offer)
    if expected.hazard_ppm:
        yield (
            f"a preemption every {_hours(_HOUR * PPM / expected.hazard_ppm)} is expected at {provider}"
            f"{evidence_words(count, span, '')}, each costs {span_words(expected.loss)}"
        )
    elif span >= _HOUR:
        yield f"no preemption at {provider} in {span / _HOUR:.0f} machine hours so far, so none is counted"


def evidence_words(count: int, span: timedelta, noun: str) -> str:
    """` (11.0 preemptions in 212 machine hours on record)`, or nothing where less than an hour is.

    Args:
        count: in millionths.
        span: time of machines.
        noun: what is counted, where the sentence has not just named it.
    """
    named = f" {noun}" if noun else ""
    return f" ({count / ONE:.1f}{named} in {span / _HOUR:.0f} machine hours on record)" if span >= _HOUR else ""


def _read_words(job: Job, best: Quote) -> Iterator[str]:
    """Yield what reading the checkpoint store costs, where that is a cent or more."""
    size = restored_bytes(job)
    whole = egress_cost(replace(best, url_cost=NOTHING), size)
    if whole >= CENT:
        yield (
            f"a restore reads {(size - best.url_bytes) / GB:.1f} GB of the checkpoint store, for which its owner asks"
            f" {dollar_words(whole)} (${as_usd(best.egress_price):.4f}/GB), on top of the price per hour"
        )


def data_words(job: Job, best: Quote | None) -> str:
    """Return what bringing the job's datasets to a machine of this quote takes; empty without datasets."""
    size = bytes_within(job.data_bytes)
    if not size or best is None:
        return ""
    offer = best.offer
    took = span_words(transfer_time(size, offer.download_mbps))
    egress = egress_cost(best, size)
    words = f"download about {took} on each machine at {offer.provider}, {dollar_words(egress)} egress"
    carried = moved_cost(best, 0, size) - egress
    return words + (f" and {dollar_words(MicroUsd(carried))} for the machine's own traffic" if carried else "")


_SOURCES: Final = {
    WorkSource.STATED_TIME: "[work] time less what its checkpoints hold",
    WorkSource.STEPS: "[work] steps and the pace of its checkpoints",
    WorkSource.STATED_PACE: "[work] steps and time",
}


def _running_words(job: Job, item: Attempt, left: RemainingWork | None, now: datetime) -> Iterator[str]:
    """Yield what is left on the machine that the job has."""
    if left is None:
        return
    offer, total = item.quote.offer, item.quote.price.total
    unsaved = min(unsaved_work(job, item, now), left.time)
    going_on = time_on(job, RemainingWork(time=left.time - unsaved, source=left.source), offer.gpu, offer.gpu_count)
    cost = MicroUsd(round(total * (going_on / _HOUR)))
    knows = speeds_of(job).is_known
    unknown = "" if knows else "; its speed is not known, so that it counts as one of speed 1.0"
    yield (
        f"on its {machine_words(offer.gpu, offer.gpu_count, offer.nodes)} at ${as_usd(total):.2f}/h"
        f" the rest takes {_hours(going_on)} and about {_dollars(cost)}{unknown}"
    )


def _hours(span: timedelta) -> str:
    hours = span / _HOUR
    if hours < 2:
        return span_words(span) if span else "no time"
    return f"{hours:.0f} h" if hours >= 20 else f"{hours:.1f} h"


def _dollars(cost: MicroUsd) -> str:
    return f"${as_usd(cost):,.0f}" if cost >= 20 * ONE else dollar_words(cost)
