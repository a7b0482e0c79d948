"""A job that waits says what for, and does not change that as machines come and go."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pytest

from spotd.core.decide import decide
from spotd.core.domain.cooldowns import Cooldown, CooldownScope
from spotd.core.domain.intents import JobId
from spotd.core.domain.jobs import Job
from spotd.core.domain.plan import Event, applied
from spotd.core.domain.states import JobState
from spotd.core.domain.world import VerdictKind, World
from spotd_jobs.spec.model import Schedule, Window
from spotd_providers.contract.values import MicroUsd, MicroUsdPerHour, Offer
from tests.cases import every
from tests.unit.core.builders import MINUTE, NOW, SHOP, job, market, offer, shop_policy
from tests.unit.core.schedule.test_preemption import running

HOUR: Final = 60 * MINUTE
WAITS: Final = JobId("j9")
DEAR: Final = (offer("a", price=900_000),)


def cycle(world: World, minutes: float, **policy: Any) -> tuple[World, VerdictKind, list[str]]:
    """Return the world after a decision, what the job waits for, and the events of its state."""
    now = NOW + minutes * MINUTE
    world = replace(world, policy=replace(world.policy, **policy))
    plan = decide(world, market(*DEAR, at=now), now)
    changed = [event.kind for event in plan.events if event.job == WAITS and event.kind.startswith("job.")]
    return applied(world, plan), plan.verdicts[WAITS].kind, changed


def waiting(**changes: Any) -> World:
    owner, item = running(1)
    late: Job = replace(job(9, name="late"), **changes)
    return World(policy=shop_policy(), jobs={owner.id: owner, late.id: late}, attempts={item.id: item}, intents={})


def test_a_job_that_waits_for_a_price_does_so_while_all_machines_are_in_use() -> None:
    world, kinds, events = waiting(), [], []
    for n in range(80):
        world, kind, changed = cycle(world, n, machines_max=1 + n % 2)
        kinds.append(kind)
        events += changed
    assert kinds == [VerdictKind.MACHINES, VerdictKind.ABOVE_CEILING] * 40, "why says what it is at the moment"
    assert events == ["job.waiting_price"]
    assert world.jobs[WAITS].state is JobState.WAITING_PRICE


@every(
    ("policy", "changes"),
    [
        pytest.param({"launches_paused": "the state cannot be written"}, {}, id="nothing may be launched"),
        pytest.param({"launches_per_cycle_max": 0}, {}, id="enough launches"),
        pytest.param({}, {"not_before": NOW + MINUTE}, id="it backs off"),
    ],
)
def test_a_pause_of_launches_changes_no_waiting_state(policy: dict[str, Any], changes: dict[str, Any]) -> None:
    world = waiting(state=JobState.WAITING_PRICE, **changes)
    after, kind, events = cycle(world, 0, **policy)
    assert kind is not VerdictKind.ABOVE_CEILING
    assert (after.jobs[WAITS].state, events) == (JobState.WAITING_PRICE, [])


def test_a_job_whose_offers_cool_down_goes_on_waiting_for_a_price() -> None:
    known = Cooldown(
        provider=SHOP, scope=CooldownScope.PROVIDER, subject="", until=NOW + 5 * MINUTE, reason="x", since=NOW
    )
    world = replace(waiting(state=JobState.WAITING_PRICE), cooldowns=(known,))
    after, kind, events = cycle(world, 0)
    assert (kind, after.jobs[WAITS].state, events) == (VerdictKind.COOLING, JobState.WAITING_PRICE, [])


def test_a_window_that_closes_makes_a_job_wait_for_its_turn() -> None:
    shut = Schedule(windows=(Window(days=(6,), start_min=0, end_min=60),), timezone="UTC")
    world = waiting(state=JobState.WAITING_PRICE)
    owner = world.jobs[WAITS]
    owner = replace(owner, spec=replace(owner.spec, schedule=shut))
    after, kind, events = cycle(replace(world, jobs={**world.jobs, WAITS: owner}), 0)
    assert (kind, after.jobs[WAITS].state, events) == (VerdictKind.WINDOW, JobState.QUEUED, ["job.queued"])


def test_a_used_up_budget_and_a_blind_market_in_turn_change_the_state_a_few_times_an_hour() -> None:
    """A daemon that starts again and again sees no prices first, and then that the day's budget is used up."""
    world = waiting()
    world = replace(world, policy=replace(world.policy, budget_day=MicroUsd(1)), attempts={})
    world = replace(world, jobs={WAITS: world.jobs[WAITS]})
    kinds, events = set(), []
    for n in range(120):
        now = NOW + n * MINUTE / 2
        shown = market(at=now - HOUR) if n % 4 == 0 else market(offer("a"), at=now)
        plan = decide(world, shown, now)
        kinds.add(plan.verdicts[WAITS].kind)
        events += [event.kind for event in plan.events if event.job == WAITS and event.kind.startswith("job.")]
        world = applied(world, plan)
    assert kinds == {VerdictKind.NO_OFFERS, VerdictKind.BUDGET_DAY}
    assert len(events) <= 4


def recovering(world: World, **changes: Any) -> World:
    """Return the world with the late job alone, which was launched before and looks for its next machine."""
    known: dict[str, Any] = {"state": JobState.RECOVERING, "state_since": NOW, "attempts_made": 3, "reason": "lost"}
    return replace(world, jobs={WAITS: replace(world.jobs[WAITS], **known | changes)}, attempts={})


CHEAP: Final = (offer("a"),)
NEARLY_SPENT: Final = {
    "spent": MicroUsd(119_960_000),
    "budget_set": MicroUsd(120_000_000),
    "rate_low": MicroUsdPerHour(100_000),
}
"""What is left carries a run at the price that was paid once, and none at what is offered."""
PER_MONTH: Final = {"budget_month": MicroUsd(1)}


@every(
    ("offers", "policy", "changes", "kind", "state"),
    [
        pytest.param(
            (offer("a", price=400_000),), {}, NEARLY_SPENT, VerdictKind.BUDGET_JOB, JobState.QUEUED, id="own budget"
        ),
        pytest.param(CHEAP, {"budget_day": MicroUsd(1)}, {}, VerdictKind.BUDGET_DAY, JobState.QUEUED, id="day"),
        pytest.param(CHEAP, PER_MONTH, {}, VerdictKind.BUDGET_MONTH, JobState.QUEUED, id="month"),
        pytest.param((), {}, {}, VerdictKind.NO_OFFERS, JobState.WAITING_PRICE, id="nothing is sold"),
        pytest.param(
            (offer("a", gpu="H100"),), {}, {}, VerdictKind.NO_MATCH, JobState.WAITING_PRICE, id="nothing fits"
        ),
    ],
)
def test_a_job_that_recovers_in_vain_for_an_hour_waits_like_any_other(
    offers: tuple[Offer, ...], policy: dict[str, Any], changes: dict[str, Any], kind: VerdictKind, state: JobState
) -> None:
    """Else `ls` says for ever that it looks for its next machine, which its owner alone can bring about."""
    world = recovering(waiting(**changes))
    world = replace(world, policy=replace(world.policy, **policy))
    events: list[Event] = []
    sentence = ""
    for minute in range(0, 24 * 60, 5):
        now = NOW + minute * MINUTE
        if minute == 60:
            assert (world.jobs[WAITS].state, events) == (JobState.RECOVERING, []), "an hour may pass"
        plan = decide(world, market(*offers, at=now), now)
        assert plan.verdicts[WAITS].kind is kind
        sentence = plan.verdicts[WAITS].sentence
        events += [event for event in plan.events if event.job == WAITS]
        world = applied(world, plan)
    assert world.jobs[WAITS].state is state
    assert [(event.kind, event.at) for event in events] == [(f"job.{state.value.lower()}", NOW + HOUR)]
    assert events[0].message == sentence, "with what is to be done about it"


@every("hours", [-9, 10_000])
def test_a_recovery_that_began_at_no_plausible_time_does_not_last_for_ever(hours: int) -> None:
    world = recovering(waiting(), state_since=NOW - hours * HOUR)
    after = applied(world, decide(world, market(), NOW))
    assert after.jobs[WAITS].state is JobState.WAITING_PRICE


@every("changes", [{"not_before": NOW + 3 * HOUR}, {}])
def test_what_passes_by_itself_ends_no_recovery(changes: dict[str, Any]) -> None:
    """It is served before jobs that had no machine yet, so its place is not lost to a pause or to full machines."""
    world = recovering(waiting(), **changes)
    world = replace(world, policy=replace(world.policy, machines_max=0))
    now = NOW + 2 * HOUR
    after = applied(world, decide(world, market(*CHEAP, at=now), now))
    assert after.jobs[WAITS].state is JobState.RECOVERING
