"""Money that may still be promised.

Theory. Every machine that may compute has money set aside: what it costs until it can be noticed, ordered to save, and
ended (`commit_horizon` plus the job's stop_grace), and what it may move meanwhile. That is the rest of its restore, a
checkpoint that is under way at that moment, and the one that it saves at the stop; each is taken to be as large as the
largest that is kept, and nothing is known of the first. As long as spent plus set aside stays within a budget, stopping
everything at that moment keeps the budget; when it no longer does, that moment has come. A stop uploads once more only
where that fits: it does not if the first checkpoint was larger than the budget bears.

What is set aside stops with the proof of the end, and with nothing less. So a launch without an answer counts, given up
or not, a machine whose end was accepted until a list lacks it, one that is out of reach beyond its lease, and a machine
of ours that no attempt owns. Its time that is booked nowhere is *unproven*, mostly of a day at most: it refuses
launches beside what is set aside, and stops nothing, since the next list may prove that there was none. One that ends
itself when its lease is over counts no longer than a day beyond the last proof; one that nothing but an order ends,
until its end is proved, its place among the machines, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from spotd.core.domain.attempts import Attempt, MachineState, StopOrder
from spotd.core.domain.cooldowns import EVERYWHERE, Cooldown, CooldownScope
from spotd.core.domain.intents import AttemptId, IntentKind, JobId, terminate_intent_id
from spotd.core.domain.jobs import Job
from spotd.core.domain.market import Quote
from spotd.core.domain.policy import Policy
from spotd.core.domain.world import VerdictKind, World
from spotd.core.metering import (
    FORGOTTEN_MAX,
    UNSEEN_MAX,
    day_start,
    is_ended_by_order_alone,
    is_past_lease,
    job_spent,
    metered_until,
    outlives,
    spent_in_month,
    spent_on_day,
    stray_cost,
)
from spotd.core.plan_builder import PlanBuilder
from spotd.core.pricing import (
    dollar_words,
    moved_cost,
    restore_cost,
    save_cost,
    useful_run,
)
from spotd_providers.contract.values import MicroUsd, MicroUsdPerHour, ProviderName, as_usd, cost

MINUTE: Final = timedelta(minutes=1)
DAY: Final = timedelta(days=1)
MONTH: Final = timedelta(days=32)
SAVES: Final = 2
"""Uploads that are promised for each machine: one may be under way when it is stopped, and it saves at the stop."""
BUDGET_NOISE: Final = 100
"""A budget that grew by no more than one part in so many is taken for the same."""


def committed(world: World, item: Attempt, now: datetime) -> MicroUsd:
    """Return what is set aside for this machine; nothing once its end is proved."""
    return MicroUsd(_aside_to_end(world, item, now) + _unproven(world, item, now))


def _aside_to_end(world: World, item: Attempt, now: datetime) -> MicroUsd:
    """Return what it takes to end the machine safely, be it that it is found only then."""
    if not item.machine.may_compute and _unbooked_since(world, item, now) is None:
        return MicroUsd(0)
    if _is_given_up(world, item, now):
        return MicroUsd(0)
    job = world.jobs[item.id.job]
    return MicroUsd(cost(_rate(item), _billed_to_end(world, item, now)) + _traffic_to_end(job, item))


def _unproven(world: World, item: Attempt, now: datetime, start: datetime | None = None) -> MicroUsd:
    """Return what the machine may have cost that is booked nowhere, optionally since `start`.

    Of a day at most, but for one that nothing but an order ends and that was never given one: it may run still.
    """
    since = _unbooked_since(world, item, now)
    if since is None or _is_given_up(world, item, now):
        return MicroUsd(0)
    runs_on = item.ref is None and is_ended_by_order_alone(item, world.policy)
    runs_on = runs_on and not world.policy.providers[item.provider].is_other_account(item.account)
    until = now if runs_on or now - since < UNSEEN_MAX else since + UNSEEN_MAX
    return cost(_rate(item), max(timedelta(0), until - max(since, start or since)))


def _is_given_up(world: World, item: Attempt, now: datetime) -> bool:
    """Whether the machine must have ended itself a day ago or more, so that it is not counted on."""
    if item.state.counts:
        return False
    since = _unbooked_since(world, item, now)
    if since is None or item.meter.since is not None:
        return is_past_lease(item, world.policy, now)
    if is_ended_by_order_alone(item, world.policy):
        return False
    is_known = outlives(item, world.jobs[item.id.job], world.policy) is not None
    return now - since > (UNSEEN_MAX if is_known else FORGOTTEN_MAX)  # whether it ends itself


def _unbooked_since(world: World, item: Attempt, now: datetime) -> datetime | None:
    """Since when the machine may have been billed and is not booked; `None` where it is.

    Of an attempt that counts that is a launch without an answer. Of any other such one a list decides first, as after
    hours of sleep: its time is booked once it is seen.
    """
    if item.machine is MachineState.GONE or (item.state.counts and (item.ref is not None or not item.outcome_unknown)):
        return None
    if item.meter.since is not None:
        until = metered_until(item.meter, now)
        return until if until < now else None
    if item.outcome_unknown and item.ref is None:
        return item.intended_at if item.ended_at is None or not item.meter.settled else item.ended_at
    order = None if item.ref is None else world.intents.get(terminate_intent_id(item.ref))
    return None if order is None or not order.is_open else order.accepted_at


def _strays(world: World, now: datetime, start: datetime) -> tuple[int, str]:
    """Return what machines of ours without an attempt have cost since then and may cost until they are ended.

    With it the key of one that no list can prove to be gone, so that it counts no more than a day after it was found.
    """
    total, lost = 0, ""
    for stray in world.intents.values():
        if stray.kind is IntentKind.TERMINATE and stray.attempt is None and stray.is_open:
            rules, until = world.policy.providers.get(stray.provider), now + world.policy.commit_horizon
            is_lost = rules is None or rules.is_other_account(stray.account)
            proven = stray.accepted_at or (stray.created_at if is_lost else until)
            amount = stray_cost(stray, until if until - proven < UNSEEN_MAX else proven + UNSEEN_MAX, start)
            total += amount
            lost = stray.key if is_lost and amount else lost
    return total, lost


def _billed_to_end(world: World, item: Attempt, now: datetime) -> timedelta:
    """Return the time that is still billed if the machine is ended now: its provider may bill more than it runs."""
    horizon = _horizon(world, world.jobs[item.id.job])
    ran = max(timedelta(0), now - (item.full_since or now))
    return billed_time(world.policy, item.provider, ran + horizon) - ran


def _rate(item: Attempt) -> MicroUsdPerHour:
    return MicroUsdPerHour(max(item.meter.rate, item.quote.price.total))


def _saving_time(world: World, item: Attempt) -> timedelta:
    """How long a machine that is ordered to save and stop now may take."""
    return world.jobs[item.id.job].spec.checkpoint.stop_grace + world.policy.save_allowance


def _traffic_to_end(job: Job, item: Attempt) -> MicroUsd:
    """Return what the machine may still move until it has ended."""
    if not item.state.counts:
        return MicroUsd(0)
    if item.stop is not None:
        return _last_save(job, item, item.stop)
    restore = 0
    if item.running_at is None:
        restore = max(0, restore_cost(job, item.quote) - moved_cost(item.quote, 0, item.restored_bytes))
    return MicroUsd(restore + SAVES * save_cost(job, item.quote.offer))


def _last_save(job: Job, item: Attempt, stop: StopOrder) -> MicroUsd:
    """Return what the save at the stop costs, until it has come."""
    has_saved = any(c.attempt == item.id.number and c.at >= stop.ordered_at for c in job.checkpoints)
    return MicroUsd(0) if has_saved or not stop.flush else save_cost(job, item.quote.offer)


def _horizon(world: World, job: Job) -> timedelta:
    return world.policy.commit_horizon + job.spec.checkpoint.stop_grace


class _BudgetOfAll(NamedTuple):
    """A budget of all jobs together; `until` states in words when it begins anew."""

    kind: VerdictKind
    period: str
    limit: MicroUsd
    spent: MicroUsd
    unproven: int
    """What machines may have cost besides whose end is not proved."""
    until: str
    lost: str
    """The key of a machine without an attempt that no list can prove to be gone; mostly empty."""

    @property
    def used(self) -> int:
        return self.spent + self.unproven

    @property
    def words(self) -> str:
        words = _spending_words(self.period, self.limit, self.spent, self.unproven)
        return f"{words} (spotctl forget {self.lost} gives one up that cannot be listed)" if self.lost else words


def _budgets_of_all(world: World, now: datetime) -> Iterator[_BudgetOfAll]:
    day, month = world.policy.budget_day, world.policy.budget_month
    today = now.astimezone(UTC).date()

    def of_all(kind: VerdictKind, limit: MicroUsd, spent: MicroUsd, start: datetime, until: str) -> _BudgetOfAll:
        strays, lost = _strays(world, now, start)
        besides = strays + sum(_unproven(world, i, now, start) for i in world.attempts.values())
        period = "day" if kind is VerdictKind.BUDGET_DAY else "month"
        return _BudgetOfAll(kind, period, limit, spent, besides, until, lost)

    if day is not None:
        yield of_all(VerdictKind.BUDGET_DAY, day, spent_on_day(world, now), day_start(today), "midnight UTC")
    if month is not None:
        first = day_start(today.replace(day=1))
        yield of_all(VerdictKind.BUDGET_MONTH, month, spent_in_month(world, now), first, "the 1st")


class BudgetGuard:
    """The budgets during one decision; `commit` is called for each launch.

    What is set aside has two sizes. To end a machine safely is the smaller one, and running out of it stops machines.
    A launch is admitted only beside the larger one, in which every machine has a useful run besides: else the last
    money of a day would buy many machines, none of which gets anywhere.
    """

    def __init__(self, world: World, now: datetime) -> None:
        self._world = world
        self._now = now
        self._budgets = tuple(_budgets_of_all(world, now))
        self._committed = 0
        self._promised = 0
        self._committed_by_job: defaultdict[JobId, int] = defaultdict(int)
        self._ending_by_job: defaultdict[JobId, int] = defaultdict(int)
        """Of the former, what is of machines that are over and whose end is not proved."""
        self._unproven_by_job: defaultdict[JobId, int] = defaultdict(int)
        # Without any budget nothing is held against what is set aside, which would be most of a decision's cost.
        is_limited = bool(self._budgets) or any(job.budget is not None for job in world.jobs.values())
        for item in world.attempts.values() if is_limited else ():
            aside = _aside_to_end(world, item, now)
            self._committed += aside
            self._committed_by_job[item.id.job] += aside
            self._unproven_by_job[item.id.job] += _unproven(world, item, now)
            self._ending_by_job[item.id.job] += 0 if item.state.counts else aside
            self._promised += aside + still_to_run(world, item, now)
        self._to_save: dict[AttemptId, int] = {}
        """What each save at a stop costs that may still come."""
        self._held = {c.subject for c in world.cooldowns if c.scope is CooldownScope.BUDGET and c.until > now}

    def shortage(self) -> tuple[VerdictKind, str] | None:
        """Return the budget that would be broken unless every machine is stopped now."""
        for one in self._budgets:
            if one.spent + self._committed > one.limit:
                return one.kind, _spending_words(one.period, one.limit, one.spent)
        return None

    def job_shortage(self, job: Job) -> str:
        """Why the job's own budget would be broken unless its machine is stopped now; empty if it is not."""
        budget = job.budget
        if budget is None:
            return ""
        total = job_spent(self._world, job, self._now)
        if total + self._committed_by_job[job.id] <= budget:
            return ""
        return _spending_words("job", budget, total)

    def carries_save(self, item: Attempt) -> bool:
        """Whether every budget carries the save of this machine, which is stopped in this decision.

        Then it is set aside. All machines are stopped where a budget of all jobs is short; else what the others have
        set aside is within it. No work is lost for what a minute of the machine costs.
        """
        job = self._world.jobs[item.id.job]
        save = save_cost(job, item.quote.offer)
        if save <= cost(_rate(item), MINUTE):
            return True
        rooms = [one.limit - one.spent - self._to_end() for one in self._budgets] if self.shortage() else []
        if job.budget is not None:
            rooms.append(job.budget - job_spent(self._world, job, self._now) - self._to_end(job.id))
        if any(save > room for room in rooms):
            return False
        self._to_save[item.id] = save
        return True

    def _to_end(self, job: JobId | None = None) -> int:
        """Return what it takes to end all machines, or those of the job, with the saves that are promised."""
        total = 0
        for item in self._world.attempts.values():
            if job in {None, item.id.job} and _aside_to_end(self._world, item, self._now):
                total += cost(_rate(item), _saving_time(self._world, item))
                is_former = item.stop is not None and item.stop.ordered_at < self._now
                total += _traffic_to_end(self._world.jobs[item.id.job], item) if is_former else 0
        return total + sum(save for i, save in self._to_save.items() if job in {None, i.job})

    def refusal(self, job: Job, quote: Quote) -> tuple[VerdictKind, str, datetime | None] | None:
        """Why this launch may not be made now, and when its budget begins anew where that is enough."""
        needed = self._needed(job, quote, quote.price.total)
        budget = job.budget
        if budget is not None:
            total = job_spent(self._world, job, self._now)
            ending = self._ending_by_job[job.id] + self._unproven_by_job[job.id]
            if total + ending + needed > budget:
                why = f"{_spending_words('job', budget, total, ending)}; a launch needs ${as_usd(needed):.4f} more"
                why += f" to be of use{_traffic_words(job, quote)}; waits for a lower price"
                return VerdictKind.BUDGET_JOB, f"{why}, or for spotctl budget {job.name} +USD", None
        for one in self._budgets:
            why = one.words
            begins = _begins_anew(_subject(one.kind, one.limit), self._now)
            if self.is_held(one.kind, one.limit):
                why += f", and machines were stopped for it; waits for {one.until}, or for a larger budget"
                return one.kind, why, begins if needed <= one.limit else None
            if one.used + self._promised + needed > one.limit:
                why = f"{why}, ${as_usd(self._promised):.4f} promised"
                if words := _traffic_words(job, quote):
                    why = f"{why}; a launch needs ${as_usd(needed):.4f}{words}"
                if needed > one.limit:
                    return one.kind, f"{why}; waits for a larger budget, or less traffic", None
                return one.kind, f"{why}; waits for {one.until}", begins
        return None

    def left_for(self, job: Job) -> MicroUsd | None:
        """Return what may be spent before a budget stops the job's machine; `None` where none does."""
        rooms = [one.limit - one.spent - self._committed for one in self._budgets]
        if job.budget is not None:
            total = job_spent(self._world, job, self._now)
            rooms.append(job.budget - total - self._committed_by_job[job.id])
        return MicroUsd(max(0, min(rooms))) if rooms else None

    def words_against_rest(self, job: Job, rate: MicroUsdPerHour, span: timedelta) -> str:
        """Why no budget carries the job at this price for so long, be it over several days; empty where all do."""
        total = job_spent(self._world, job, self._now)
        if job.budget is not None and total + cost(rate, span) > job.budget:
            return _spending_words("job", job.budget, total)
        for one in self._budgets:
            soon = min(span, _begins_anew(_subject(one.kind, one.limit), self._now) - self._now)
            later = min(span - soon, DAY if one.kind is VerdictKind.BUDGET_DAY else MONTH)
            if one.used + cost(rate, soon) > one.limit or cost(rate, later) > one.limit:
                return one.words
        return ""

    def carries_raise(self, job: Job, item: Attempt, rate: MicroUsdPerHour) -> bool:
        """Whether every budget carries this machine at so much per hour; then what it needs more is set aside."""
        span = _horizon(self._world, job) + useful_run(job, item.quote.offer, self._world.policy)
        more = cost(MicroUsdPerHour(max(0, rate - _rate(item))), span)
        if job.budget is not None:
            aside = self._committed_by_job[job.id] + self._unproven_by_job[job.id]
            if job_spent(self._world, job, self._now) + aside + more > job.budget:
                return False
        for one in self._budgets:
            if self.is_held(one.kind, one.limit) or one.used + self._promised + more > one.limit:
                return False
        self._committed += more
        self._promised += more
        self._committed_by_job[job.id] += more
        return True

    def lacking(self, job: Job, quote: Quote) -> int | None:
        """Return how much must be freed for this launch; `None` where nothing that is freed would admit it.

        A launch that the proof of an end may admit waits for that instead.
        """
        needed = self._needed(job, quote, quote.price.total)
        lacking = [(one, one.used + self._promised + needed - one.limit) for one in self._budgets]
        for one, more in lacking:
            is_short = self.is_held(one.kind, one.limit) or one.used + needed > one.limit
            if is_short or (one.unproven and more > 0):
                return None
        return max((more for _, more in lacking), default=0)

    def carries_instead(self, job: Job, quote: Quote, item: Attempt) -> bool:
        """Whether every budget carries this launch once the machine that the job has now was stopped for it."""
        refusal = self.refusal(job, quote)
        if refusal is None or refusal[0] is VerdictKind.BUDGET_JOB:
            return refusal is None
        lacking = self.lacking(job, quote)
        return lacking is not None and lacking <= self.freed_by(item)

    def expect(self, job: Job, quote: Quote, *stopped: Attempt) -> None:
        """Promise the money of the launch for which these machines are stopped in this decision."""
        self._promised += self._needed(job, quote, quote.price.total) - sum(map(self.freed_by, stopped))

    def freed_by(self, item: Attempt) -> int:
        """Return what is promised for this machine and not spent when it saves and stops now."""
        stop = cost(_rate(item), _saving_time(self._world, item)) + save_cost(
            self._world.jobs[item.id.job], item.quote.offer
        )
        return _aside_to_end(self._world, item, self._now) + still_to_run(self._world, item, self._now) - stop

    def held_now(self, kind: VerdictKind, limit: MicroUsd) -> None:
        """Machines are being stopped for this budget in this decision."""
        self._held.add(_subject(kind, limit))

    def is_held(self, kind: VerdictKind, limit: MicroUsd) -> bool:
        """Whether machines were stopped for this budget, which has hardly grown since."""
        what = _subject(kind, limit).partition(":")[0]
        amounts = [amount for held, _, amount in (s.partition(":") for s in self._held) if held == what]
        return any(a.isdecimal() and limit <= int(a) + int(a) // BUDGET_NOISE for a in amounts)

    def is_hopeless(self, job: Job, rates: Iterable[int], *, unspent: bool = False) -> str:
        """Why no machine at any of these prices could do useful work for what is left; empty if one could.

        A queued job that has spent nothing waits: what it is too poor for may be the price of this moment.
        """
        budget = job.budget
        if budget is None:
            return ""
        total = job_spent(self._world, job, self._now)
        if total == 0 and not unspent:
            return ""
        lowest = min(rates, default=None)
        if lowest is None and total < budget:
            return ""
        needed = self._needed(job, None, MicroUsdPerHour(lowest or 0))
        if total < budget and total + needed <= budget:
            return ""
        return f"{_spending_words('job', budget, total)}; a useful run needs ${as_usd(needed):.4f} even at a low price"

    def _needed(self, job: Job, quote: Quote | None, rate: MicroUsdPerHour) -> MicroUsd:
        offer = None if quote is None else quote.offer
        span = _horizon(self._world, job) + useful_run(job, offer, self._world.policy)
        if quote is None:
            return cost(rate, span)
        time = cost(rate, billed_time(self._world.policy, quote.offer.provider, span))
        return MicroUsd(time + traffic_of_a_run(job, quote))

    def commit(self, job: Job, quote: Quote) -> None:
        """Promise the money of a launch that was admitted."""
        horizon = billed_time(self._world.policy, quote.offer.provider, _horizon(self._world, job))
        aside = cost(quote.price.total, horizon) + traffic_of_a_run(job, quote)
        self._committed += aside
        self._committed_by_job[job.id] += aside
        self._promised += self._needed(job, quote, quote.price.total)


def billed_time(policy: Policy, provider: ProviderName, span: timedelta) -> timedelta:
    """Return for how long a machine of this provider is billed that runs for so long."""
    rules = policy.providers.get(provider)
    return span if rules is None else rules.billed_time(span)


def traffic_of_a_run(job: Job, quote: Quote) -> MicroUsd:
    """Return what a machine moves at the least: its restore, and the checkpoints that are promised."""
    return MicroUsd(restore_cost(job, quote) + SAVES * save_cost(job, quote.offer))


def _traffic_words(job: Job, quote: Quote) -> str:
    traffic = traffic_of_a_run(job, quote)
    return f", ${as_usd(traffic):.4f} of it for its restore and uploads" if traffic else ""


def still_to_run(world: World, item: Attempt, now: datetime) -> MicroUsd:
    """Return what the rest of a useful run of this machine costs; nothing once it has had one, or is to stop."""
    if not item.state.counts or item.stop is not None or not item.machine.may_compute:
        return MicroUsd(0)
    offer = item.quote.offer
    left = useful_run(world.jobs[item.id.job], offer, world.policy) - (now - item.intended_at)
    return cost(MicroUsdPerHour(max(item.meter.rate, item.quote.price.total)), max(timedelta(0), left))


def hold(builder: PlanBuilder, kind: VerdictKind, limit: MicroUsd, why: str) -> None:
    """Nothing more is bought on this budget before it begins anew, since machines were stopped for it."""
    subject = _subject(kind, limit)
    builder.cool(
        EVERYWHERE, CooldownScope.BUDGET, subject, _begins_anew(subject, builder.now) - builder.now, why, most=MONTH
    )


def redated_hold(held: Cooldown, now: datetime) -> datetime:
    """When a hold on a budget ends by a clock that was set to `now`: with its day or month, however long that lasts."""
    return min(held.until, _begins_anew(held.subject, now))


def _begins_anew(subject: str, now: datetime) -> datetime:
    today = now.astimezone(UTC).date()
    if subject.startswith("month:"):
        return day_start((today.replace(day=1) + MONTH).replace(day=1))
    return day_start(today + timedelta(days=1))


def _subject(kind: VerdictKind, limit: MicroUsd) -> str:
    return f"{'day' if kind is VerdictKind.BUDGET_DAY else 'month'}:{limit}"


def _spending_words(what: str, budget: MicroUsd, total: MicroUsd, besides: int = 0) -> str:
    words = f"${as_usd(total):.4f} of the {what}'s {dollar_words(budget)} is spent"
    return f"{words}, ${as_usd(besides):.4f} is kept for machines whose end is not proved" if besides else words
