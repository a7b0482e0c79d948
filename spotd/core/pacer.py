"""Which market a job with a deadline uses now, and when it changes from one to the other.

Theory. A job whose market is `auto` follows its policy, inside the shield: it waits, takes spot, or pays for on-demand.
A machine of the other market is ordered to save and stop, and the next decision finds the job without a machine and
asks again: nothing but the policy says what it gets then, so a change needs no plan that could be left half done. A job
with another market, or whose work is not known, is placed as without a deadline, which then can only warn and end it.
Ceilings and budgets hold whatever the deadline needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from functools import cached_property, partial
from itertools import chain
from typing import Final, NamedTuple

from spotd.core.admissible import AdmissibleQuotes
from spotd.core.author import MachineVerdicts, order_stop
from spotd.core.budgets import BudgetGuard
from spotd.core.deadlines import (
    Outlook,
    due_at,
    due_words,
    duration_left,
    on_market,
    outlook,
    time_to_on_demand,
    time_until,
    wait_words,
    waited_for_spot,
    with_spot,
    with_spot_wait,
    without_spot_wait,
)
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.copies import replace
from spotd.core.domain.intents import JobId
from spotd.core.domain.jobs import Job, MachineVerdict, Pacing
from spotd.core.domain.market import Quote
from spotd.core.domain.states import AttemptState, EndReason
from spotd.core.domain.world import World
from spotd.core.kernel.quarantine import contain
from spotd.core.own_first import keeps_own
from spotd.core.plan_builder import PlanBuilder
from spotd.core.policies import WITH_DEADLINE, Action, Choice, choose, hours_words, is_safe, reserve_s, slack_s, wait
from spotd.core.pricing import dollar_words, machine_words, quote_words, span_words, startup
from spotd.core.ranking.remaining_work import remaining_work, time_on
from spotd.core.running import pause_of
from spotd.core.schedule import is_untried
from spotd_jobs.spec.model import MarketChoice
from spotd_providers.contract.values import MicroUsdPerGpuHour, Offer, cost

DWELL: Final = pause_of(MachineVerdict.BACK_TO_SPOT)
"""On-demand that was paid for is used at least so long before spot is tried again."""
UNKNOWN_WORK: Final = (
    "[work] says neither time nor steps, so how much is left is not known, and the deadline can only end the job"
)


class Pacer:
    """The jobs with a deadline, in one decision.

    Attributes:
        reason: why the last job that was asked for waits.
    """

    def __init__(
        self,
        builder: PlanBuilder,
        world: World,
        admissible: AdmissibleQuotes,
        budget_guard: BudgetGuard,
        machine_verdicts: MachineVerdicts,
    ) -> None:
        self._builder = builder
        self._world = world
        self._admissible = admissible
        self._budget_guard = budget_guard
        self._machine_verdicts = machine_verdicts
        self._words: dict[JobId, str] = {}
        self.reason = ""

    def joined(self, sentence: str, job: Job) -> str:
        """Return the sentence with what is to be said of the deadline."""
        words = self.words(job)
        return f"{sentence}; {words}" if words else sentence

    def words(self, job: Job) -> str:
        """Return what is to be said of the job's deadline; empty without one."""
        due = None if job.spec.schedule.deadline is None else due_at(job)
        if due is None:
            return self._words.get(job.id, "") if self._words else ""
        left = hours_words((due - self._builder.now).total_seconds())
        return self._words.get(job.id, f"due {due_words(due)}, in {left}")

    def watch(self, job: Job) -> None:
        """Warn of the deadline of a job that no machine could be had for now, whatever the market offers."""
        if job.spec.schedule.deadline is None:
            return
        ahead = outlook(job, None, self._world, self._builder.now, None)
        if ahead is not None:
            self._note(job, ahead, "")

    def is_pressed(self, job: Job, until: datetime) -> bool:
        """Whether a job that gets no machine before this instant may be late."""
        ahead = outlook(job, None, self._world, until, self._admissible.quotes)
        return ahead is not None and not is_safe(ahead.seen, wait(""))

    def time_to_wait(self, job: Job) -> timedelta | None:
        """Return how long the job may wait for a better machine; `None` without a deadline, 0 where nothing is known.

        Beyond the reserve that slack pacing keeps, and only while a machine that is started now would be in time.
        """
        if job.spec.schedule.deadline is None:
            return None
        ahead = outlook(job, None, self._world, self._builder.now, self._admissible.quotes)
        if ahead is None or not is_safe(ahead.seen, wait("")):
            return timedelta(0)
        return timedelta(seconds=max(0, int(slack_s(ahead.seen) - reserve_s(ahead.seen))))

    def paced(self, job: Job) -> Job | None:
        """Return the job as it is to be placed now, with the market that its policy chose; `None` if it is to wait."""
        if job.spec.schedule.deadline is None:
            limit = job.spec.resources.on_demand_after
            return job if limit is None else self._waiting_for_spot(job, limit)
        ahead = self._outlook(job, None)
        if ahead is None or job.spec.resources.market is not MarketChoice.AUTO:
            return job
        chosen = self._choice(job, ahead)
        if chosen.action is Action.ON_DEMAND and ahead.on_demand is not None:
            return on_market(job, MarketChoice.ON_DEMAND, ahead.on_demand.offer)
        if chosen.action is Action.SPOT and _is_cheaper(ahead):
            return on_market(job, MarketChoice.SPOT)
        if chosen.action is Action.SPOT or ahead.on_demand is None:
            return job
        self.reason = chosen.sentence
        self._words[job.id] = ahead.words(self._builder.now)
        return None

    def _waiting_for_spot(self, job: Job, limit: timedelta) -> Job:
        """Return the job on spot alone while it waits for that; on both markets once it has waited for long enough."""
        builder = self._builder
        left = time_to_on_demand(replace(job, pacing=self._spot_pacing(job)), limit, builder.now)
        self._words[job.id] = wait_words(left, limit)
        if left <= timedelta(0):
            return job
        builder.wake(builder.now + left)
        return on_market(job, MarketChoice.SPOT)

    def note_spot_wait(self, job: Job, *, is_market: bool) -> None:
        """Count the time of a job that may take on-demand later, where the market alone keeps it from a machine."""
        if job.spec.resources.on_demand_after is None or job.spec.schedule.deadline is not None:
            return
        counts = with_spot_wait if is_market else without_spot_wait
        self._put(job, counts(job, self._spot_pacing(job), self._builder.now))

    def _spot_pacing(self, job: Job) -> Pacing:
        """Return the pacing of the job; one of an array that was never tried has waited as long as any other of it."""
        pacing = self._builder.job(job.id).pacing
        if job.array is None or not is_untried(job):
            return pacing
        longest = self._array_waits.get(job.array.id, pacing)
        now = self._builder.now
        return longest if waited_for_spot(job, longest, now) > waited_for_spot(job, pacing, now) else pacing

    @cached_property
    def _array_waits(self) -> dict[JobId, Pacing]:
        """What is remembered by the job of each array that waits for spot longest."""
        found: dict[JobId, Pacing] = {}
        for job in self._world.jobs.values():
            if job.array is None or not job.state.may_be_placed:
                continue
            known, now = found.get(job.array.id, Pacing()), self._builder.now
            if waited_for_spot(job, job.pacing, now) >= waited_for_spot(job, known, now):
                found[job.array.id] = job.pacing
        return found

    def keep_pace(self, job: Job, item: Attempt | None) -> bool:
        """Order the job's machine to stop if the other market is to be used; whether this could be judged."""
        if job.spec.schedule.deadline is None or item is None or job.cancel_requested:
            return True
        return contain(self._builder, job.id, partial(self._keep_pace, job, item), "its pace cannot be judged")

    def _keep_pace(self, job: Job, item: Attempt) -> None:
        item = self._builder.attempt(item.id)
        ahead = self._outlook(job, item)
        if ahead is None or job.spec.resources.market is not MarketChoice.AUTO:
            return
        if item.stop is not None or not item.state.counts or item.state is AttemptState.INTENDED or item.ends_itself:
            return
        if keeps_own(job, item, self._world.policy):
            return
        chosen = self._choice(job, ahead)
        holds = ahead.seen.holds
        if holds is Action.SPOT and chosen.action is Action.ON_DEMAND and ahead.on_demand is not None:
            words = f"to on-demand, since {chosen.sentence}"
            self._leave(job, item, MachineVerdict.GO_ON_DEMAND, words, ahead.on_demand)
        elif holds is Action.ON_DEMAND and chosen.action is Action.SPOT and self._may_return(ahead, item):
            self._leave(job, item, MachineVerdict.BACK_TO_SPOT, f"back to spot: {chosen.sentence}", ahead.spot)

    def _leave(self, job: Job, item: Attempt, verdict: MachineVerdict, words: str, there: Quote | None) -> None:
        budgets, target = self._budget_guard, None if there is None else there.offer
        if there is not None and not budgets.carries_instead(job, there, item):
            return
        if self._machine_verdicts.stop(item, verdict, words, target=target) and there is not None:
            budgets.expect(job, there, item)

    def _may_return(self, ahead: Outlook, item: Attempt) -> bool:
        has_dwelt = item.running_at is not None and self._builder.now - item.running_at >= DWELL
        return has_dwelt and _is_cheaper(ahead)

    def _outlook(self, job: Job, item: Attempt | None) -> Outlook | None:
        """Return how the job stands, note what changed, and warn once if its deadline slips."""
        is_auto = job.spec.resources.market is MarketChoice.AUTO
        now = self._builder.now
        quotes = self._quotes_willing if item is None else self._quotes_free
        ahead = outlook(job, item, self._world, now, quotes if is_auto else None)
        if ahead is None:
            self._words[job.id] = f"{self.words(job)}; {UNKNOWN_WORK}"
            return None
        barred = self._why_no_on_demand(job, ahead)
        if barred and ahead.on_demand is not None:
            ahead = replace(ahead, on_demand=None, seen=replace(ahead.seen, on_demand=None))
        if is_auto:
            is_up = ahead.seen.zones[0].is_up
            self._put(job, with_spot(self._builder.job(job.id).pacing, now, is_up=is_up, recoveries=job.recoveries))
        self._note(job, ahead, barred)
        return ahead

    def _quotes_willing(self, job: Job) -> Iterator[tuple[Quote, MicroUsdPerGpuHour]]:
        """Yield the quotes of machines that do not refuse: to ask the others costs the time that a deadline has.

        Where none is left, those that refuse are asked again; not for on-demand while a spot machine can be had.
        """
        willing = self._quotes_elsewhere(job)
        first = next(willing, None)
        if first is not None:
            return chain((first,), willing)
        is_spot_left = job.spec.resources.market is MarketChoice.ON_DEMAND and (
            next(self._quotes_elsewhere(on_market(job, MarketChoice.SPOT)), None) is not None
        )
        return iter(()) if is_spot_left else self._admissible.quotes(job)

    def _quotes_elsewhere(self, job: Job) -> Iterator[tuple[Quote, MicroUsdPerGpuHour]]:
        """Yield the quotes for which a machine that runs may be left."""
        return (one for one in self._admissible.quotes(job) if not self._machine_verdicts.refuses(one[0].offer))

    def _quotes_free(self, job: Job) -> Iterator[tuple[Quote, MicroUsdPerGpuHour]]:
        """Yield those of machines that no other job is to get."""
        return (one for one in self._quotes_elsewhere(job) if not self._machine_verdicts.is_claimed(one[0].offer, job))

    def _note(self, job: Job, ahead: Outlook, barred: str) -> None:
        slack = f"{hours_words(max(0, slack_s(ahead.seen)))} of slack" if ahead.slack_s >= 0 else _late_words(ahead)
        words = f"{ahead.words(self._builder.now)}, {slack}"
        self._words[job.id] = f"{words}; {barred}" if barred else words
        self._warn(job, ahead, barred)

    def _choice(self, job: Job, ahead: Outlook) -> Choice:
        name = job.spec.schedule.policy
        chosen = choose(WITH_DEADLINE if name is None else name.value, ahead.seen)
        self._words[job.id] = f"{self._words[job.id]}; {chosen.sentence}"
        return chosen

    def _why_no_on_demand(self, job: Job, ahead: Outlook) -> str:
        """Why no on-demand machine may be used, whatever the deadline needs; empty where one may."""
        market = job.spec.resources.market
        if market is not MarketChoice.AUTO:
            if market is MarketChoice.ON_DEMAND:
                return ""
            return 'its market is not "auto", so it never pays for on-demand instead of spot'
        if ahead.on_demand is None:
            cheapest = self._admissible.free_offers(on_market(job, MarketChoice.ON_DEMAND))[1]
            if cheapest is None:
                return "no on-demand machine that fits is offered"
            return f"the ceiling holds over the deadline: on-demand is {quote_words(cheapest)}, above it"
        if ahead.seen.holds is Action.ON_DEMAND:
            return ""
        refusal = self._budget_guard.refusal(job, ahead.on_demand)
        words = "" if refusal is None else refusal[1]
        if not words and _is_cheaper(ahead):
            words = self._words_against_rest(job, ahead, ahead.on_demand)
        return f"the budget holds over the deadline: {words}" if words else ""

    def _words_against_rest(self, job: Job, ahead: Outlook, there: Quote) -> str:
        """Why on-demand would end the job unfinished, and sooner than spot: its money runs out first."""
        rate, work_s = there.price.total, ahead.seen.work_s
        why = self._budget_guard.words_against_rest(job, rate, timedelta(seconds=work_s + ahead.seen.overhead_s))
        needed = dollar_words(cost(rate, timedelta(seconds=work_s)))
        return f"{hours_words(work_s)} of work on-demand cost about {needed}, and {why}" if why else ""

    def _warn(self, job: Job, ahead: Outlook, barred: str) -> None:
        """Write one event when the deadline starts to slip."""
        seen = ahead.seen
        is_late, is_short = ahead.slack_s < 0, bool(barred) and ahead.slack_s < reserve_s(seen)
        if self._builder.job(job.id).pacing.is_slipping or not (is_late or is_short):
            return
        self._put(job, replace(self._builder.job(job.id).pacing, is_slipping=True))
        state = _late_words(ahead) if is_late else f"only {hours_words(ahead.slack_s)} of slack are left"
        why = f"the deadline starts to slip: {ahead.words(self._builder.now)}, {state}"
        why = f"{why}; {barred}" if barred else why
        self._builder.event("job.slipping", why, job=job.id, slack_s=ahead.slack_s, work_left_s=seen.work_s)

    def _put(self, job: Job, pacing: Pacing) -> None:
        current = self._builder.job(job.id)
        if current.pacing is not pacing:
            self._builder.put_job(replace(current, pacing=pacing))


def _is_cheaper(ahead: Outlook) -> bool:
    """Whether spot costs less than on-demand now, for the same work."""
    [zone], demand = ahead.seen.zones, ahead.seen.on_demand
    return zone.is_up and (demand is None or zone.price < demand)


def _late_words(ahead: Outlook) -> str:
    return f"{hours_words(-ahead.slack_s)} more than there is time for"


# Whether a job that is submitted now can be done in time at all.


_MINUTE: Final = timedelta(minutes=1)


class Infeasible(NamedTuple):
    """The key that asks too much, why, and the way out."""

    key: str
    why: str
    hint: str


def infeasible(job: Job, offers: Iterable[Offer], now: datetime) -> Infeasible | None:
    """Return what cannot be met; `None` where nothing proves that.

    The fastest machine that fits is taken, whatever it costs and without a single interruption: what that one cannot
    do, none can.

    Args:
        offers: that fit the job; where there is none, a machine of speed 1.0 is assumed.
    """
    schedule, work, due = job.spec.schedule, remaining_work(job), due_at(job)
    if work is None or (due is None and schedule.max_duration is None):
        return None
    times = {(one.gpu, one.gpu_count): (time_on(job, work, one.gpu, one.gpu_count), one) for one in offers}
    fastest, offer = min(times.values(), key=lambda pair: pair[0], default=(work.time, None))
    where = (
        "a machine of speed 1.0"
        if offer is None
        else f"{machine_words(offer.gpu, offer.gpu_count, offer.nodes)}, the fastest that fits"
    )
    needed = f"{span_words(fastest)} of work on {where}"
    if schedule.max_duration is not None and fastest > schedule.max_duration:
        why = f"max_duration is {span_words(schedule.max_duration)}, and there are {needed}"
        return Infeasible("schedule.max_duration", why, "raise it, or leave it out")
    if due is None:
        return None
    total, left = fastest + startup(job, offer), time_until(due, schedule, now)
    if total <= left:
        return None
    inside = " within its windows" if schedule.windows else ""
    why = f"{needed}, take {span_words(total)} with the start, and until then there are {span_words(left)}{inside}"
    hint = "write a later deadline, or wider windows"
    if not schedule.windows:
        hint = f"the earliest deadline that can be met is {due_words(now + total + _MINUTE)}"
    return Infeasible("schedule.deadline", why, hint)


def deadline_warnings(job: Job) -> list[str]:
    """Return what weakens the deadline of a job that is submitted."""
    if job.spec.schedule.deadline is None:
        return []
    if remaining_work(job) is None:
        return [f'{UNKNOWN_WORK}; write [work] time = "24h" or steps = 100000']
    if job.spec.resources.market in {MarketChoice.AUTO, MarketChoice.ON_DEMAND}:
        return []
    return ['its market is not "auto": when the deadline slips, spotd warns and pays for no on-demand machine']


# When a job is over, done or not: its deadline has passed, or its command ran for as long as it may.
#
# Its machine is ordered to save and stop at that instant, and the job has expired once it has. What it saved is kept,
# and `spotctl retry` goes on from there. A machine whose command has ended and that only uploads is left to finish,
# for no longer than any save.


def words_of_expiry(job: Job, now: datetime) -> str:
    """Why a job without a machine is over; empty while it is not."""
    if not _is_limited(job):
        return ""
    over = _over(job, due_at(job), duration_left(job, None, now), now)
    return "" if over is None else over[0].sentence(over[1])


def enforce_deadlines(builder: PlanBuilder, world: World) -> None:
    """Order each machine to save and stop whose job is over."""
    bound = (a for a in world.attempts.values() if a.state.counts and _is_limited(world.jobs[a.id.job]))
    for item in sorted(bound, key=lambda a: (a.id.job, a.id.number)):
        contain(builder, item.id.job, partial(_enforce, builder, item), "its deadline cannot be judged")


def _is_limited(job: Job) -> bool:
    return job.spec.schedule.deadline is not None or job.spec.schedule.max_duration is not None


def _enforce(builder: PlanBuilder, item: Attempt) -> None:
    job, now = builder.job(item.id.job), builder.now
    if builder.attempt(item.id).stop is not None or not builder.attempt(item.id).state.counts:
        return
    due, left = due_at(job), duration_left(job, item, now)
    patience = builder.policy.save_limit if item.ends_itself else timedelta(0)
    over = _over(job, due, left, now, patience)
    if over is not None:
        order_stop(builder, item, *over)
        return
    if due is not None:
        builder.wake(due + patience)
    if left is not None and item.running_at is not None:
        builder.wake(now + left + patience)


def _over(
    job: Job, due: datetime | None, left: timedelta | None, now: datetime, patience: timedelta = timedelta(0)
) -> tuple[EndReason, str] | None:
    """Return why the job is over, with details; `None` while it is not, or is waited for."""
    if due is not None and due + patience <= now:
        reason, why = EndReason.DEADLINE_PASSED, f"it was due {due_words(due)}"
    elif left is not None and left + patience <= timedelta(0):
        limit = job.spec.schedule.max_duration or timedelta(0)
        reason, why = EndReason.MAX_DURATION, f"max_duration is {span_words(limit)}"
    else:
        return None
    return reason, f"{why}; its checkpoints are kept, and spotctl retry {job.name} goes on from the newest"
