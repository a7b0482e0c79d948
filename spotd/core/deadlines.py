"""What a policy is asked about one job with a deadline: work and time left, and what spot and on-demand cost now.

Work is counted on the on-demand machine that would be used, since the deadline must be met on that one. Only work in a
checkpoint is safe from a preemption; a job that never saved may lose all of it at any time, and is judged so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from typing import Final

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.copies import replace
from spotd.core.domain.intents import JobId
from spotd.core.domain.jobs import Job, Pacing
from spotd.core.domain.market import Quote
from spotd.core.domain.plan import Plan
from spotd.core.domain.policy import Policy
from spotd.core.domain.world import World
from spotd.core.metering import metered_until
from spotd.core.policies import Action, Observation, Zone, hours_words
from spotd.core.pricing import restore_time, span_words, startup
from spotd.core.ranking.remaining_work import RemainingWork, machine_speed_ppm, remaining_work, time_on, unsaved_work
from spotd.core.schedule import open_spans, zone_of
from spotd.core.starts import careful_start, usual_start
from spotd_jobs.spec.model import GpuAlternative, MarketChoice, Schedule
from spotd_providers.contract.values import Market, MicroUsdPerGpuHour, MicroUsdPerHour, Offer

# When a job is due, how much time it has until then, and how long its command has run.


def due_at(job: Job) -> datetime | None:
    """Return the deadline; `None` without one. A span follows a clock that is set, an instant does not."""
    deadline = job.spec.schedule.deadline
    if deadline is None or deadline.span is None:
        return None if deadline is None else deadline.at
    return (job.pacing.counted_from or job.submitted_at) + deadline.span


def due_words(due: datetime) -> str:
    """`2026-11-24 08:00 UTC`."""
    return f"{due:%Y-%m-%d %H:%M} UTC"


def time_until(due: datetime, schedule: Schedule, now: datetime) -> timedelta:
    """Return the time until then, or what of it is within windows; of the far future no windows are known."""
    if not schedule.windows or due <= now or (zone := zone_of(schedule.timezone)) is None:
        return due - now
    open_ = timedelta(0)
    for span in open_spans(schedule.windows, zone, now):
        until = due if span.closes is None else min(due, span.closes)
        open_ += max(timedelta(0), until - max(now, span.opens))
    return open_


def duration_left(job: Job, item: Attempt | None, now: datetime) -> timedelta | None:
    """Return how much longer its command may run on all machines together; `None` where nothing limits it.

    Args:
        item: the machine that it has now.
    """
    limit = job.spec.schedule.max_duration
    if limit is None:
        return None
    ran = job.totals.ran - job.pacing.ran_before
    if item is not None:
        ran += item.command_time(metered_until(item.meter, now))
    return limit - ran


SAVES_WITHIN: Final = timedelta(minutes=15)
"""How often a job saves that does not say so."""
LOSS_MARGIN: Final = 2
"""Steps until the loss of a machine is known, and the next one asked for."""
LEAST_SHARE: Final = 50
"""A job that goes on has at least such a part of its work left, whatever its estimate says."""
COMPARED_MAX: Final = 20
"""So many on-demand machines are compared for one that is fast enough."""
_SPAN_MAX_S: Final = 10**10
SPOT_ZONE: Final = "spot"

Quotes = Callable[[Job], Iterator[tuple[Quote, MicroUsdPerGpuHour]]]
"""The quotes that a job would be admitted to now, best first, each with its ceiling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """One job with a deadline, as it stands now.

    Attributes:
        seen: what a policy is asked.
        spot, on_demand: the machines that it would get.
    """

    seen: Observation
    due: datetime
    spot: Quote | None = None
    on_demand: Quote | None = None

    def words(self, now: datetime) -> str:
        """`due 2026-11-24 08:00 UTC, in 20.0 h; 14.8 h of work are left`."""
        left = hours_words((self.due - now).total_seconds())
        return f"due {due_words(self.due)}, in {left}; {hours_words(self.seen.work_s)} of work are left"

    @property
    def slack_s(self) -> int:
        """Time that may still be lost: nothing is to be started while a machine is held."""
        seen = self.seen
        start = seen.overhead_s if seen.holds is Action.WAIT else seen.pending_s
        return (seen.left_s or 0) - seen.work_s - start


def on_market(job: Job, market: MarketChoice, kind: Offer | None = None) -> Job:
    """Return the job as if it accepted this market only, and this kind of machine where one is given."""
    wanted = replace(job.spec.resources, market=market)
    if kind is not None and kind.gpu_count:
        wanted = replace(wanted, gpu=(GpuAlternative(name=kind.gpu, count=kind.gpu_count // kind.nodes),))
    return replace(job, spec=replace(job.spec, resources=wanted))


def outlook(job: Job, item: Attempt | None, world: World, now: datetime, quotes: Quotes | None) -> Outlook | None:
    """Return what is known of the job now; `None` where it has no deadline or its work is not known.

    Args:
        item: the machine that it has.
        quotes: of the market; without them neither spot nor on-demand can be had.
    """
    due, work, policy = due_at(job), remaining_work(job), world.policy
    if due is None or work is None:
        return None
    left = time_until(due, job.spec.schedule, now)
    spot = None if quotes is None else next((q for q, _ in quotes(on_market(job, MarketChoice.SPOT))), None)
    demand = None if quotes is None else _fast_enough(job, work, quotes, left, world, now)
    held = None if item is None else item.quote
    if held is not None and held.offer.market is Market.ON_DEMAND:
        demand = held
    machine = demand or held or spot
    offer = None if machine is None else machine.offer
    is_paused = item is not None and item.bidding.held_since is not None
    # What an outbid machine had not saved is lost already, and it works no more until it wakes.
    unsaved = timedelta(0) if item is None or is_paused else unsaved_work(job, item, now)
    kept = replace(work, time=max(timedelta(0), work.time - unsaved))
    whole = max(work.time, job.spec.work.time or work.time)
    task_s = _seconds(_on(job, replace(work, time=whole), offer))
    holds, pending = _market_in_use(job, item, world, now)
    used = held if holds is Action.SPOT else None
    up = _zone(job, None if is_paused else used or spot, offer, policy, now)
    seen = Observation(
        task_s=task_s,
        work_s=max(_seconds(_on(job, kept, offer)), task_s // LEAST_SHARE),
        elapsed_s=_seconds(now - (job.pacing.counted_from or job.submitted_at)),
        left_s=math.floor(max(-_SPAN_MAX_S, min(_SPAN_MAX_S, left.total_seconds()))),
        step_s=max(1, _seconds(policy.recheck_every)),
        overhead_s=_seconds(usual_overhead(job, offer, world)),
        overhead_max_s=_seconds(careful_overhead(job, offer, world, now)),
        zones=(up,),
        on_demand=None if demand is None else demand.price.total,
        holds=holds,
        held_zone=SPOT_ZONE if holds is Action.SPOT else "",
        pending_s=pending,
        unsaved_s=_seconds(_on(job, replace(work, time=unsaved), offer)),
        keeps_work=False,
        save_every_s=_seconds(job.spec.checkpoint.every or SAVES_WITHIN),
        margin_steps=LOSS_MARGIN,
    )
    return Outlook(seen=seen, due=due, spot=spot, on_demand=demand)


def usual_overhead(job: Job, offer: Offer | None, world: World) -> timedelta:
    """Return what a restart usually costs: the start, and half of the time between two checkpoints."""
    return start_time(job, offer, world) + (job.spec.checkpoint.every or SAVES_WITHIN) / 2


def careful_overhead(job: Job, offer: Offer | None, world: World, now: datetime) -> timedelta:
    """Return what a change to an on-demand machine may cost: a save, and a start at worst, with those that fail."""
    save, usual = job.spec.checkpoint.stop_grace + world.policy.save_allowance, start_time(job, offer, world)
    rules = None if offer is None else world.policy.providers.get(offer.provider)
    if offer is None or rules is None:
        return save + 2 * usual
    known, image, limit = world.experience, job.spec.image, rules.provision_timeout
    return save + careful_start(known, offer.provider, Market.ON_DEMAND, image, usual, limit, now)


def start_time(job: Job, offer: Offer | None, world: World) -> timedelta:
    """Return how long a start takes: as those of the same image at this provider did, or a careful prior."""
    if offer is None:
        return startup(job, offer)
    return max(usual_start(world.experience, offer.provider, job.spec.image), restore_time(job, offer))


def _fast_enough(
    job: Job, work: RemainingWork, quotes: Quotes, left: timedelta, world: World, now: datetime
) -> Quote | None:
    """Return the best on-demand machine on which the job is in time, else the fastest."""
    fastest: tuple[timedelta, Quote] | None = None
    for quote, _ in islice(quotes(on_market(job, MarketChoice.ON_DEMAND)), COMPARED_MAX):
        needed = _on(job, work, quote.offer) + careful_overhead(job, quote.offer, world, now)
        if needed <= left:
            return quote
        if fastest is None or needed < fastest[0]:
            fastest = needed, quote
    return None if fastest is None else fastest[1]


def _zone(job: Job, quote: Quote | None, machine: Offer | None, policy: Policy, now: datetime) -> Zone:
    """Return the spot market as one zone: a job takes the best machine of it, wherever that is.

    Its price is that of as much work as the machine does in an hour on which the deadline is to be met.
    """
    if quote is None:
        return Zone(name=SPOT_ZONE, is_up=False, price=MicroUsdPerHour(0), **_past(job))
    since = job.pacing.up_since
    age = timedelta(0) if since is None else max(timedelta(0), now - since)
    up = _seconds(age + policy.recheck_every)
    price = quote.price.total
    if machine is not None:
        here = machine_speed_ppm(job, quote.offer.gpu, quote.offer.gpu_count)
        price = MicroUsdPerHour(price * machine_speed_ppm(job, machine.gpu, machine.gpu_count) // here)
    return Zone(name=SPOT_ZONE, is_up=True, price=price, up_s=up, **_past(job))


def _past(job: Job) -> dict[str, int]:
    return {"past_up_s": _seconds(job.pacing.past_up), "past_runs": job.pacing.past_runs}


def _market_in_use(job: Job, item: Attempt | None, world: World, now: datetime) -> tuple[Action, int]:
    if item is None:
        return Action.WAIT, 0
    action = Action.SPOT if item.quote.offer.market is Market.SPOT else Action.ON_DEMAND
    if item.running_at is not None:
        return action, 0
    began = item.launched_at or item.intended_at
    return action, _seconds(start_time(job, item.quote.offer, world) - (now - began))


def _on(job: Job, work: RemainingWork, offer: Offer | None) -> timedelta:
    return work.time if offer is None else time_on(job, work, offer.gpu, offer.gpu_count)


def _seconds(span: timedelta) -> int:
    return math.ceil(max(0.0, min(_SPAN_MAX_S, span.total_seconds())))


# For how long spot has been up for one job, and how long it usually stays so.
#
# A run begins when a spot machine can be had, or is held, and ends when none can, or when one is lost. Policies judge
# by it whether spot seems to last.


RUNS_MAX = 10**6


def with_spot(pacing: Pacing, now: datetime, *, is_up: bool, recoveries: int) -> Pacing:
    """Return the pacing after one more reading; the same value where nothing changed."""
    lost = recoveries > pacing.losses
    since = pacing.up_since
    if since is not None and (lost or not is_up):
        ran = max(timedelta(0), now - since)
        runs = min(RUNS_MAX, pacing.past_runs + 1)
        pacing = replace(pacing, up_since=None, past_up=pacing.past_up + ran, past_runs=runs)
    if is_up and pacing.up_since is None:
        pacing = replace(pacing, up_since=now)
    return replace(pacing, losses=recoveries) if lost else pacing


# How long a job waits for spot before it may take on-demand, where its owner states it.
#
# Theory. With `market = "auto"` and `on_demand_after = "2h"` a job is placed on spot alone at first. Time counts from a
# decision in which nothing but the market kept it from a machine, within its windows, until one in which something else
# does (its turn, a budget, a balance), and it goes on over launches that come to nothing. Time in which nothing was
# decided does not count: a daemon that was dead, a computer that slept. So what was waited is added up every few
# minutes, and what is added up is all that a new process goes on from. Once it has reached the limit the job takes what
# costs least of both markets, under its ceiling as ever. It counts anew once a machine got the job further (a
# checkpoint, or half an hour of its command): after a preemption the job tries spot first again. A machine that runs
# on-demand is not left for spot by this rule.


ADDED_UP: Final = timedelta(minutes=10)
"""A wait is added up so often, which is what the end of a process may take from it."""


def with_spot_wait(job: Job, pacing: Pacing, now: datetime) -> Pacing:
    """Return what is remembered of a job that nothing but the market keeps from a spot machine now."""
    since = pacing.spot_wanted_since
    if since is not None and since <= now < since + ADDED_UP:
        return pacing
    return replace(without_spot_wait(job, pacing, now), spot_wanted_since=now)


def without_spot_wait(job: Job, pacing: Pacing, now: datetime) -> Pacing:
    """Return the same of a job that something else keeps from a machine."""
    if pacing.spot_wanted_since is None:
        return pacing
    return replace(pacing, spot_wanted_since=None, spot_waited=waited_for_spot(job, pacing, now))


def without_unwatched_waits(world: World) -> Plan:
    """Let no time count as waited for spot that passed since a wait was added up: nothing was decided in it."""
    waiting = [job for job in world.jobs.values() if job.pacing.spot_wanted_since is not None]
    return Plan(jobs={job.id: replace(job, pacing=replace(job.pacing, spot_wanted_since=None)) for job in waiting})


def waited_for_spot(job: Job, pacing: Pacing, now: datetime) -> timedelta:
    """Return for how long the job has waited for spot."""
    return (pacing.spot_waited or timedelta(0)) + waiting_time(job, pacing.spot_wanted_since, now)


def time_to_on_demand(job: Job, limit: timedelta, now: datetime) -> timedelta:
    """Return how much longer the job waits for spot alone; 0 or less once it may take on-demand."""
    return limit - waited_for_spot(job, job.pacing, now)


def waiting_time(job: Job, since: datetime | None, now: datetime) -> timedelta:
    """Return how much of the time since then lies within the job's windows."""
    return timedelta(0) if since is None or since >= now else time_until(now, job.spec.schedule, since)


def array_waits(jobs: Iterable[Job], since: Callable[[Pacing], datetime | None]) -> dict[JobId, datetime]:
    """Since when the first job of each array waits: those that come after it wait as long."""
    found: dict[JobId, datetime] = {}
    for job in jobs:
        began = since(job.pacing)
        if job.array is not None and job.state.may_be_placed and began is not None:
            found[job.array.id] = min(began, found.get(job.array.id, began))
    return found


def wait_words(left: timedelta, limit: timedelta) -> str:
    """Return what the rule means for the job now."""
    if left > timedelta(0):
        return f"on-demand may be used after {span_words(limit)} without spot, in {span_words(left)}"
    return f"it waited {span_words(limit - left)} for spot, so on-demand may be used under its ceiling"
