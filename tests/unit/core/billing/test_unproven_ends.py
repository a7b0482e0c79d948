"""Money for machines whose end is not proved: it counts in every budget until it is, mostly a day of it at most."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest

from spotd.core.budgets import BudgetGuard, committed, still_to_run
from spotd.core.decide import decide
from spotd.core.domain.attempts import MachineState
from spotd.core.domain.intents import AttemptId, Intent, IntentId, IntentKind, IntentState, Meter
from spotd.core.domain.jobs import Checkpoint, Job
from spotd.core.domain.plan import applied
from spotd.core.domain.states import AttemptState, EndReason
from spotd.core.domain.world import VerdictKind, World
from spotd.core.kernel.outcomes import terminate_accepted
from spotd.core.metering import FORGOTTEN_MAX, UNSEEN_MAX, job_spent, machines_in_use
from spotd.core.plan_builder import PlanBuilder
from spotd.core.pricing import needs_of, quote
from spotd_providers.contract.values import (
    AttemptKey,
    InstanceId,
    InstanceRef,
    MicroUsd,
    MicroUsdPerGb,
    MicroUsdPerHour,
    cost,
)
from tests.cases import every
from tests.unit.core.builders import NOW, SHOP, job, market, offer, shop_policy, world_with

FIRST: Final = AttemptId(job=job().id, number=1)
HOUR: Final = timedelta(hours=1)


def given_up(ago: timedelta) -> World:
    """A launch that was sent so long ago, and given up without an answer."""
    return world_with(
        AttemptState.ENDING,
        ref=None,
        outcome_unknown=True,
        machine=MachineState.EXPECTED,
        meter=Meter(),
        end_reason=EndReason.LAUNCH_UNKNOWN,
        intended_at=NOW - ago,
    )


def accepted(ago: timedelta) -> World:
    """A machine whose end was accepted so long ago, and that no list shows as gone."""
    world = world_with(AttemptState.ENDING, machine=MachineState.HALTED, meter=Meter(settled=MicroUsd(70_000)))
    intents = {i: replace(t, accepted_at=NOW - ago) for i, t in world.intents.items()}
    return replace(world, intents=intents)


def beyond_its_lease(ago: timedelta) -> World:
    """A machine that is to be ended, whose lease was over so long ago, and that nothing has shown since."""
    world = world_with(AttemptState.ENDING)
    [item] = world.attempts.values()
    meter = replace(item.meter, since=min(NOW - 2 * HOUR, NOW - ago), until=NOW - ago)
    intents = {i: replace(t, state=IntentState.OPEN, accepted_at=None) for i, t in world.intents.items()}
    return replace(world, attempts={FIRST: replace(item, meter=meter)}, intents=intents)


def unanswered(ago: timedelta) -> World:
    """A launch that was sent so long ago, whose machine is still searched for."""
    return world_with(AttemptState.INTENDED, intended_at=NOW - ago)


Unproven = Callable[[timedelta], World]
unproven = every("unproven", [given_up, accepted, beyond_its_lease])


def owed(world: World, span: timedelta) -> int:
    [item] = world.attempts.values()
    return cost(item.quote.price.total, span)


def to_end(world: World) -> int:
    [item] = world.attempts.values()
    return owed(world, world.policy.commit_horizon + world.jobs[item.id.job].spec.checkpoint.stop_grace)


@every("unproven", [given_up, accepted, beyond_its_lease, unanswered])
@every("hours", [0.1, 1, 5, 23.9])
def test_the_time_that_is_booked_nowhere_is_kept_beside_what_its_end_takes(unproven: Unproven, hours: float) -> None:
    world = unproven(hours * HOUR)
    [item] = world.attempts.values()
    assert committed(world, item, NOW) == pytest.approx(owed(world, hours * HOUR) + to_end(world), abs=2)


@unproven
def test_a_machine_that_ends_itself_counts_for_a_day_beyond_the_last_proof(unproven: Unproven) -> None:
    for ago, is_counted in (
        (timedelta(days=1), True),
        (timedelta(days=1, seconds=1), False),
        (400 * UNSEEN_MAX, False),
    ):
        world = unproven(ago)
        [item] = world.attempts.values()
        kept = committed(world, item, NOW)
        assert kept == (pytest.approx(owed(world, UNSEEN_MAX) + to_end(world), abs=2) if is_counted else 0)


def by_order_alone(world: World, *, sold: bool) -> World:
    """The same where nothing but an order ends the machine: none of its provider, or not this one, as a cluster."""
    [item] = world.attempts.values()
    if sold:
        item = replace(item, quote=replace(item.quote, offer=replace(item.quote.offer, ends_itself=False)))
        return replace(world, attempts={item.id: item})
    rules = {name: replace(one, ends_itself=False) for name, one in world.policy.providers.items()}
    return replace(world, policy=replace(world.policy, providers=rules))


@every("sold", [True, False], ids=["this machine", "its provider"])
@every("ago", [timedelta(hours=1), timedelta(days=1), timedelta(days=3), timedelta(days=400)])
def test_a_launch_that_was_given_up_counts_for_all_its_time_where_nothing_but_an_order_ends_it(
    ago: timedelta, *, sold: bool
) -> None:
    world = by_order_alone(given_up(ago), sold=sold)
    [item] = world.attempts.values()
    assert committed(world, item, NOW) == pytest.approx(owed(world, ago) + to_end(world), abs=2)
    assert machines_in_use(world, NOW) == 1, "it holds its place among [budget] machines as well"
    other, day = job(2), owed(world, min(ago, SINCE_MIDNIGHT))
    world = replace(world, jobs={**world.jobs, other.id: other})
    assert refusal(limited(world, day=day), other) is VerdictKind.BUDGET_DAY, "today's money, not that of its launch"
    proved = replace(world, attempts={FIRST: replace(item, machine=MachineState.GONE)})
    assert (committed(proved, proved.attempts[FIRST], NOW), machines_in_use(proved, NOW)) == (0, 0)


@every("sold", [True, False], ids=["this machine", "its provider"])
def test_one_of_an_account_that_no_key_lists_counts_for_a_day_until_it_is_given_up_by_hand(*, sold: bool) -> None:
    world = by_order_alone(given_up(timedelta(days=3)), sold=sold)
    rules = {name: replace(one, account="b") for name, one in world.policy.providers.items()}
    item = replace(world.attempts[FIRST], account="a")
    world = replace(world, policy=replace(world.policy, providers=rules), attempts={FIRST: item})
    assert committed(world, item, NOW) == pytest.approx(owed(world, UNSEEN_MAX) + to_end(world), abs=2)


@every("sold", [True, False], ids=["this machine", "its provider"])
@every("ago", [timedelta(days=1), timedelta(days=3), timedelta(days=400)])
def test_what_was_ordered_to_end_counts_until_that_is_proved_and_for_no_more_than_a_day(
    ago: timedelta, *, sold: bool
) -> None:
    world = by_order_alone(accepted(ago), sold=sold)
    [item] = world.attempts.values()
    assert committed(world, item, NOW) == pytest.approx(owed(world, UNSEEN_MAX) + to_end(world), abs=2)


def test_what_counts_is_looked_for_first_after_hours_that_nobody_watched() -> None:
    world = world_with(AttemptState.RUNNING, intended_at=NOW - 8 * HOUR)
    [item] = world.attempts.values()
    meter = replace(item.meter, until=NOW - 7 * HOUR)
    assert committed(world, replace(item, meter=meter), NOW) == pytest.approx(to_end(world), abs=2)


@every("days", [1, 2, 400])
def test_a_launch_that_counts_and_has_no_answer_keeps_a_day_and_its_end_at_most(days: int) -> None:
    world = unanswered(days * UNSEEN_MAX)
    [item] = world.attempts.values()
    assert committed(world, item, NOW) == pytest.approx(owed(world, UNSEEN_MAX) + to_end(world), abs=2)


@every("provider", ["answers no more", "left the config"])
def test_what_a_launch_without_an_answer_leaves_of_a_budget_only_falls_while_it_is_searched_for(provider: str) -> None:
    other = job(2)

    def lacking(minutes: int) -> int:
        world = limited(unanswered(timedelta(minutes=minutes)), day=10**9)
        agreed = world.attempts[FIRST].quote
        providers = {} if provider == "left the config" else world.policy.providers
        world = replace(world, policy=replace(world.policy, providers=providers))
        found = BudgetGuard(world, NOW).lacking(other, agreed)
        assert found is not None
        return found

    kept = [lacking(minutes) for minutes in range(0, 40, 5)]
    assert kept == sorted(kept)
    alone = unanswered(timedelta(0))
    assert kept[-1] - kept[0] == pytest.approx(owed(alone, timedelta(minutes=35)) - kept_to_run(alone), abs=2)


def kept_to_run(world: World) -> int:
    """What the rest of a useful run costs of a machine that was bought a moment ago."""
    return still_to_run(world, world.attempts[FIRST], NOW)


@every("budget", ["day", "month"])
def test_a_launch_without_an_answer_stops_no_machine_of_another_job(budget: str) -> None:
    world = beside(unanswered(8 * HOUR))
    spent = sum(job_spent(world, owner, NOW) for owner in world.jobs.values())
    [_, item] = world.attempts.values()
    enough = spent + 2 * (to_end(unanswered(HOUR)) + cost(item.quote.price.total, HOUR))
    assert not stops(limited(world, **{budget: enough}))
    assert stops(limited(world, **{budget: spent})) == [EndReason.BUDGET_PAUSED] * 2


def test_no_machine_without_an_answer_is_worth_more_to_stop_than_what_it_holds_to_end_and_to_run() -> None:
    fresh, old = unanswered(timedelta(0)), unanswered(HOUR)
    gains = [BudgetGuard(w, NOW).freed_by(w.attempts[FIRST]) for w in (fresh, old)]
    assert gains[1] == gains[0] - kept_to_run(fresh)


@unproven
@every("ahead", [timedelta(seconds=1), timedelta(hours=8), datetime(9999, 1, 1, tzinfo=UTC) - NOW])
def test_a_date_in_the_future_makes_no_time(unproven: Unproven, ahead: timedelta) -> None:
    world = unproven(-ahead)
    [item] = world.attempts.values()
    kept = committed(world, item, NOW)
    assert kept == 0 or kept == pytest.approx(to_end(world), abs=2)


@unproven
def test_nothing_is_kept_once_its_end_is_proved(unproven: Unproven) -> None:
    world = unproven(5 * HOUR)
    [item] = world.attempts.values()
    assert committed(world, replace(item, machine=MachineState.GONE), NOW) == 0


def limited(world: World, *, day: int | None = None, month: int | None = None, own: int | None = None) -> World:
    policy = replace(
        world.policy,
        budget_day=None if day is None else MicroUsd(day),
        budget_month=None if month is None else MicroUsd(month),
    )
    jobs = {i: replace(one, budget_set=None if own is None else MicroUsd(own)) for i, one in world.jobs.items()}
    return replace(world, policy=policy, jobs=jobs)


def refusal(world: World, owner: Job) -> VerdictKind | None:
    found = BudgetGuard(world, NOW).refusal(owner, world.attempts[FIRST].quote)
    return None if found is None else found[0]


@unproven
def test_no_budget_carries_a_launch_beside_what_is_kept_until_that_is_proved(unproven: Unproven) -> None:
    world = unproven(5 * HOUR)
    other = job(2)
    world = replace(world, jobs={**world.jobs, other.id: other})
    gone = replace(world, attempts={FIRST: replace(world.attempts[FIRST], machine=MachineState.GONE)})
    enough = owed(world, 4 * HOUR)
    for limits, kind in (({"day": enough}, VerdictKind.BUDGET_DAY), ({"month": enough}, VerdictKind.BUDGET_MONTH)):
        assert refusal(limited(world, **limits), other) is kind
        settled = limited(gone, **limits)
        spent = settled.attempts[FIRST].meter
        assert spent.settled <= 70_000
        assert refusal(replace(settled, attempts={FIRST: replace(gone.attempts[FIRST], meter=Meter())}), other) is None


@every("unproven", [given_up, accepted, beyond_its_lease])
def test_the_budget_of_its_own_job_carries_no_other_launch_beside_it(unproven: Unproven) -> None:
    world = unproven(5 * HOUR)
    world = limited(world, own=job_spent(world, world.jobs[FIRST.job], NOW) + owed(world, 5 * HOUR))
    owner = world.jobs[FIRST.job]
    assert refusal(world, owner) is VerdictKind.BUDGET_JOB
    words = BudgetGuard(world, NOW).refusal(owner, world.attempts[FIRST].quote)
    assert words is not None
    assert "is kept for machines whose end is not proved" in words[1]
    proved = replace(world, attempts={})
    assert BudgetGuard(proved, NOW).refusal(owner, world.attempts[FIRST].quote) is None


def beside(lost: World, *, same_job: bool = False, **changes: Any) -> World:
    """The same world with a machine of another job that runs, or with the next one of the same job."""
    running = world_with(AttemptState.RUNNING, **changes)
    [item], [owner] = running.attempts.values(), running.jobs.values()
    other = owner if same_job else replace(job(2, attempts_made=1), state=owner.state, checkpoints=owner.checkpoints)
    item = replace(
        item,
        id=AttemptId(job=other.id, number=2 if same_job else 1),
        key=AttemptKey(f"spotd-lab-{other.id}-{2 if same_job else 1}"),
        ref=InstanceRef(provider=SHOP, instance_id=InstanceId("m2")),
    )
    return replace(
        lost, jobs={**lost.jobs, other.id: replace(other, attempts_made=2)}, attempts={**lost.attempts, item.id: item}
    )


def stops(world: World) -> list[EndReason]:
    return [a.stop.reason for a in decide(world, market(offer(), at=NOW), NOW).attempts.values() if a.stop is not None]


@unproven
@every("budget", ["day", "month", "own"])
def test_what_is_not_proved_stops_no_machine_and_holds_no_budget(unproven: Unproven, budget: str) -> None:
    """As after hours of sleep: the first list may prove that all of them are gone."""
    world = beside(unproven(8 * HOUR), same_job=budget == "own")
    spent = sum(job_spent(world, owner, NOW) for owner in world.jobs.values())
    [lost, item] = world.attempts.values()
    enough = spent + 2 * (to_end(unproven(HOUR)) + cost(item.quote.price.total, HOUR))
    short = limited(world, **{budget: enough})
    assert spent + committed(short, lost, NOW) + committed(short, item, NOW) > enough
    plan = decide(short, market(offer(), at=NOW), NOW)
    assert not stops(short)
    assert not plan.cooldowns
    assert stops(limited(world, **{budget: spent})) == [
        EndReason.OVER_BUDGET if budget == "own" else EndReason.BUDGET_PAUSED
    ]


SAVED: Final = Checkpoint(
    name="step-1",
    attempt=1,
    step=1,
    bytes=20_000_000_000,
    at=NOW - HOUR,
    manifest_key="manifest-1",
    sha256="0" * 64,
)


@every("rate", [1, 2_000_000_000, 10**12])
def test_what_a_machine_without_an_attempt_may_cost_stops_nothing_and_forbids_no_save(rate: int) -> None:
    dear = replace(offer(), upload_price=MicroUsdPerGb(10_000))
    agreed = quote(dear, needs_of(job(), shop_policy()), 1_000_000, NOW)
    world = beside(orphan(NOW - 5 * HOUR, stray_rate=MicroUsdPerHour(rate)), quote=agreed, ceiling=10**10)
    world = replace(world, jobs={i: replace(one, checkpoints=(SAVED,)) for i, one in world.jobs.items()})
    assert not stops(limited(world, day=50_000_000))
    [item] = world.attempts.values()
    spent = job_spent(world, world.jobs[item.id.job], NOW)
    plan = decide(limited(world, day=spent + 400_000), market(offer(), at=NOW), NOW)
    stop = plan.attempts[item.id].stop
    assert stop is not None
    assert stop.reason is EndReason.BUDGET_PAUSED
    assert stop.flush


def test_no_machine_is_stopped_for_a_launch_that_waits_for_the_proof_of_an_end() -> None:
    world, owner = orphan(NOW - 5 * HOUR), job(2)
    agreed = world_with(AttemptState.RUNNING).attempts[FIRST].quote
    assert BudgetGuard(limited(world, day=10_000_000), NOW).lacking(owner, agreed) == pytest.approx(
        -4_900_000, abs=90_000
    )
    world = beside(orphan(NOW - 5 * HOUR, stray_rate=MicroUsdPerHour(10_000)))
    needed = BudgetGuard(limited(replace(world, intents={}), day=10**9), NOW).lacking(owner, agreed)
    assert needed is not None
    short = limited(world, day=10**9 + needed)
    assert BudgetGuard(short, NOW).refusal(owner, agreed) is not None
    assert BudgetGuard(short, NOW).lacking(owner, agreed) is None


def orphan(since: datetime | None, **changes: Any) -> World:
    world = replace(world_with(AttemptState.RUNNING), attempts={})
    stray = Intent(
        id=IntentId("end-a-stray"),
        kind=IntentKind.TERMINATE,
        provider=SHOP,
        key=AttemptKey("spotd-lab-j9-1"),
        state=IntentState.OPEN,
        created_at=NOW,
        attempt=None,
        stray_since=since,
        stray_rate=MicroUsdPerHour(1_000_000),
    )
    return replace(world, intents={stray.id: replace(stray, **changes)})


SINCE_MIDNIGHT: Final = NOW - NOW.replace(hour=0, minute=0, second=0, microsecond=0)


@every(
    ("since", "day", "month"),
    [
        pytest.param(NOW - HOUR, 1.0, 1.0, id="an hour ago"),
        pytest.param(NOW - timedelta(days=2), SINCE_MIDNIGHT / HOUR, 36.0, id="two days ago, in the month before"),
        pytest.param(datetime(1970, 1, 1, tzinfo=UTC), SINCE_MIDNIGHT / HOUR, 36.0, id="1970"),
        pytest.param(NOW + 8 * HOUR, 0.0, 0.0, id="in the future"),
        pytest.param(None, 0.0, 0.0, id="not known"),
    ],
)
def test_a_machine_that_no_attempt_owns_counts_in_day_and_month_until_it_is_gone(
    since: datetime | None, day: float, month: float
) -> None:
    owner, agreed = job(2), world_with(AttemptState.RUNNING).attempts[FIRST].quote
    horizon = orphan(NOW).policy.commit_horizon / HOUR
    plenty = 10**12

    def kept(**limits: int) -> float:
        """How much more than without it is needed, by the words against a launch."""
        world, free = limited(orphan(since), **limits), limited(replace(orphan(since), intents={}), **limits)
        needed = BudgetGuard(world, NOW).lacking(owner, agreed)
        alone = BudgetGuard(free, NOW).lacking(owner, agreed)
        assert needed is not None
        assert alone is not None
        return (needed - alone) / 1_000_000

    is_known = since is not None and since < NOW + timedelta(hours=1)
    assert kept(day=plenty) == pytest.approx(day + (horizon if is_known else 0), abs=0.001)
    assert kept(month=plenty) == pytest.approx(month + (horizon if is_known else 0), abs=0.001)
    done = orphan(since, state=IntentState.DONE)
    assert BudgetGuard(limited(done, day=plenty), NOW).lacking(owner, agreed) == BudgetGuard(
        limited(replace(done, intents={}), day=plenty), NOW
    ).lacking(owner, agreed)


@every("days", [0, 1, 2, 30, 400])
def test_one_that_no_list_can_prove_to_be_gone_counts_for_a_day_at_most(days: int) -> None:
    found = NOW - days * timedelta(days=1)
    seen = orphan(found - HOUR, created_at=found, account="a")
    owner, agreed = job(2), world_with(AttemptState.RUNNING).attempts[FIRST].quote

    def elsewhere(account: str) -> World:
        rules = {n: replace(one, account=account) for n, one in seen.policy.providers.items()}
        return replace(seen, policy=replace(seen.policy, providers=rules))

    def kept(world: World) -> tuple[float, str]:
        guard = BudgetGuard(limited(world, month=1), NOW)
        why = guard.refusal(owner, agreed)
        assert why is not None
        plenty = 10**12
        more = BudgetGuard(limited(world, month=plenty), NOW).lacking(owner, agreed)
        alone = BudgetGuard(limited(replace(world, intents={}), month=plenty), NOW).lacking(owner, agreed)
        assert more is not None
        assert alone is not None
        return (more - alone) / 1_000_000, why[1]

    horizon = seen.policy.commit_horizon / HOUR
    hours = 1.0 + min(24.0, 24.0 * days + horizon)
    bounded = hours if days < 2 else max(0.0, 36.0 - 24.0 * (days - 1))
    [stray] = seen.intents.values()
    accepted_then = replace(seen, intents={stray.id: replace(stray, state=IntentState.ACCEPTED, accepted_at=found)})
    for world in (replace(seen, policy=replace(seen.policy, providers={})), elsewhere("b")):
        amount, words = kept(world)
        assert amount == pytest.approx(bounded, abs=0.01)
        assert ("spotctl forget spotd-lab-j9-1" in words) is (amount > 0)
    assert kept(accepted_then)[0] == pytest.approx(bounded, abs=0.01)
    listable, words = kept(elsewhere("a"))
    assert listable == pytest.approx(min(24.0 * days + 1, 36.0) + horizon, abs=0.01)
    assert "spotctl forget" not in words


@every("stays", [True, False], ids=["its provider stays", "its provider left the config"])
def test_a_machine_whose_end_was_accepted_and_not_confirmed_is_counted_whatever_is_configured(*, stays: bool) -> None:
    begun = NOW - 40 * HOUR
    world = world_with(AttemptState.RUNNING, heartbeat_seen_at=begun, launched_at=begun, intended_at=begun)
    [item] = world.attempts.values()
    rules = replace(world.policy.providers[item.provider], ends_itself=False)
    item = replace(item, meter=replace(item.meter, since=begun, until=None))
    world = replace(world, policy=replace(world.policy, providers={item.provider: rules}), attempts={item.id: item})
    builder = PlanBuilder(world, NOW - 30 * HOUR)
    builder.end_attempt(item.id, EndReason.HOST_LOST, "silent")
    world = applied(world, builder.plan())
    [order] = world.intents.values()
    world = applied(world, terminate_accepted(world, order.id, NOW - 30 * HOUR))
    found = world.attempts[item.id]
    assert found.meter.since is None
    if not stays:
        world = replace(world, policy=replace(world.policy, providers={}))
    assert committed(world, found, NOW) >= cost(item.meter.rate, UNSEEN_MAX)
    late = NOW + FORGOTTEN_MAX
    assert (committed(world, found, late) > 0) is stays, "for ever only where it is known that it does not end itself"


@every(("until", "hours"), [(None, 30.0), (NOW - 29 * HOUR, 0.0)], ids=["by order", "by itself"])
def test_a_machine_that_only_an_order_ends_is_counted_when_its_provider_left_the_config(
    until: datetime | None, hours: float
) -> None:
    begun = NOW - 30 * HOUR
    world = world_with(AttemptState.RUNNING, heartbeat_seen_at=begun, launched_at=begun, intended_at=begun)
    [item] = world.attempts.values()
    item = replace(item, meter=replace(item.meter, since=begun, until=until))
    world = replace(world, policy=replace(world.policy, providers={}), attempts={item.id: item})
    builder = PlanBuilder(world, NOW)
    builder.end_attempt(item.id, EndReason.HOST_LOST, "silent")
    builder.set_rate(item.id, item.meter.rate, None)
    found = builder.attempt(item.id)
    assert found.meter.until == until
    booked = cost(item.meter.rate, (until or NOW) - begun)
    assert found.meter.settled == booked
    aside = committed(applied(world, builder.plan()), found, NOW)
    assert (aside > 0) is (hours > 0)
