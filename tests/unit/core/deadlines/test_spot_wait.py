"""A job that waited for spot for as long as its owner states may take on-demand, and looks for spot first again."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from spotd.core.checkpoints import unprotected_words
from spotd.core.decide import decide
from spotd.core.domain.intents import AttemptId, JobId
from spotd.core.domain.jobs import ArrayTask, Job, Pacing
from spotd.core.domain.plan import Plan, applied
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.domain.world import VerdictKind, World
from spotd.core.plan_builder import PlanBuilder
from spotd.core.requests import retry
from spotd.core.timeline import redated
from spotd_jobs.spec.model import GpuAlternative, MarketChoice, Resources, Schedule, Window, Work
from spotd_providers.contract.values import HostId, Interruption, Market, MicroUsdPerHour, Offer, OfferId
from tests.cases import every
from tests.unit.core.builders import MINUTE, NOW, job, market, offer, shop_policy, world_with
from tests.unit.core.ranking.test_remaining_work import saved

HOUR = timedelta(hours=1)
FIRST = AttemptId(job=job().id, number=1)
SPOT = offer("spot", price=300_000)
DEAR_SPOT = offer("spot", price=600_000)


def on_demand(price: int = 450_000) -> Offer:
    return replace(
        offer("fixed", price=price), market=Market.ON_DEMAND, interruption=Interruption.NEVER,
        on_demand_price=MicroUsdPerHour(price),
    )  # fmt: skip


def patient(hours: float | None = 2, **changes: Any) -> Job:
    after = None if hours is None else hours * HOUR
    wanted = Resources(gpu=(GpuAlternative(name="RTX_4090", count=1),), market=MarketChoice.AUTO, on_demand_after=after)
    return job(resources=wanted, state=JobState.WAITING_PRICE, **changes)


def alone(owner: Job) -> World:
    return World(policy=shop_policy(), jobs={owner.id: owner}, attempts={}, intents={})


def decided(world: World, *offers: Offer, after: timedelta = timedelta(0)) -> tuple[World, Plan]:
    plan = decide(world, market(*offers, at=NOW + after), NOW + after)
    return applied(world, plan), plan


def placed(plan: Plan) -> Market | None:
    found = [item.quote.offer.market for item in plan.attempts.values() if item.state is AttemptState.INTENDED]
    return found[0] if found else None


def test_on_demand_is_used_once_the_job_has_waited_for_so_long_and_not_a_moment_sooner() -> None:
    world, plan = decided(alone(patient()), DEAR_SPOT, on_demand())
    assert placed(plan) is None
    assert world.jobs[FIRST.job].pacing.spot_wanted_since == NOW
    assert "on-demand may be used after 2 h 0 min without spot, in 2 h 0 min" in plan.verdicts[FIRST.job].sentence
    assert plan.verdicts[FIRST.job].kind is VerdictKind.ABOVE_CEILING
    world, plan = decided(world, DEAR_SPOT, on_demand(), after=2 * HOUR - timedelta(seconds=1))
    assert placed(plan) is None
    world, plan = decided(world, DEAR_SPOT, on_demand(), after=2 * HOUR)
    assert placed(plan) is Market.ON_DEMAND
    assert plan.verdicts[FIRST.job].sentence.endswith(
        "it waited 2 h 0 min for spot, so on-demand may be used under its ceiling"
    )


def test_a_decision_comes_when_the_wait_is_over() -> None:
    _, plan = decided(alone(patient(0.005)), DEAR_SPOT, on_demand())
    assert plan.wake_at == NOW + 0.005 * HOUR


def test_without_the_key_auto_takes_what_is_cheapest_at_once() -> None:
    world, plan = decided(alone(patient(None)), DEAR_SPOT, on_demand())
    assert placed(plan) is Market.ON_DEMAND
    assert world.jobs[FIRST.job].pacing == Pacing()


def test_a_wait_of_nothing_is_no_wait() -> None:
    assert placed(decided(alone(patient(0)), DEAR_SPOT, on_demand())[1]) is Market.ON_DEMAND


def test_spot_is_used_at_once_and_also_after_the_wait_where_it_is_cheaper() -> None:
    assert placed(decided(alone(patient()), SPOT, on_demand(100_000))[1]) is Market.SPOT
    world, _ = decided(alone(patient()), DEAR_SPOT)
    assert placed(decided(world, SPOT, on_demand(), after=3 * HOUR)[1]) is Market.SPOT


def test_the_ceiling_holds_after_the_wait() -> None:
    world, _ = decided(alone(patient()), DEAR_SPOT)
    assert placed(decided(world, DEAR_SPOT, on_demand(500_001), after=9 * HOUR)[1]) is None


def test_the_wait_is_counted_from_the_first_decision_that_could_place_the_job() -> None:
    world = alone(patient(not_before=NOW + 5 * MINUTE, attempts_made=1))
    world, _ = decided(world, DEAR_SPOT)
    assert world.jobs[FIRST.job].pacing.spot_wanted_since is None
    world, _ = decided(world, DEAR_SPOT, after=9 * MINUTE)
    assert world.jobs[FIRST.job].pacing.spot_wanted_since == NOW + 9 * MINUTE


def test_only_time_in_windows_counts() -> None:
    """It opens for forty minutes each day."""
    daily = Schedule(windows=(Window(days=tuple(range(7)), start_min=720, end_min=760),), timezone="UTC")
    owner = patient(0.75, spec={"schedule": daily})
    world, _ = decided(alone(owner), DEAR_SPOT, on_demand())
    next_day = 24 * HOUR
    assert placed(decided(world, DEAR_SPOT, on_demand(), after=next_day + 4 * MINUTE)[1]) is None
    assert placed(decided(world, DEAR_SPOT, on_demand(), after=next_day + 5 * MINUTE)[1]) is Market.ON_DEMAND


def ended(reason: EndReason, *, hours: float = 0.1, has_saved: bool = False, spot: bool = True) -> Pacing:
    """What is remembered after the end of a machine that ran for so long."""
    base = world_with(AttemptState.RUNNING)
    [item] = base.attempts.values()
    began = NOW - hours * HOUR
    points = (saved(1, at=NOW - MINUTE),) if has_saved else ()
    pacing = Pacing(spot_wanted_since=NOW - 5 * HOUR)
    owner = replace(patient(), state=JobState.RUNNING, attempts_made=1, pacing=pacing, checkpoints=points)
    sold = replace(item.quote, offer=SPOT if spot else on_demand())
    item = replace(item, quote=sold, launched_at=began, running_at=began)
    world = replace(base, jobs={owner.id: owner}, attempts={item.id: item})
    builder = PlanBuilder(world, NOW)
    builder.end_attempt(item.id, reason)
    return builder.plan().jobs[owner.id].pacing


@every("spot", [True, False])
@every(
    ("run", "is_over"),
    [
        pytest.param({"hours": 0.6}, True, id="it ran for half an hour"),
        pytest.param({"has_saved": True}, True, id="it saved"),
        pytest.param({"hours": 0.1}, False, id="it came to nothing"),
    ],
)
def test_the_wait_counts_anew_after_a_machine_that_got_the_job_further(
    run: dict[str, Any], is_over: bool, spot: bool
) -> None:
    assert (ended(EndReason.PREEMPTED, spot=spot, **run).spot_wanted_since is None) is is_over
    assert (ended(EndReason.OUTBID, spot=spot, **run).spot_wanted_since is None) is is_over


def test_a_launch_that_is_refused_does_not_begin_the_wait_anew() -> None:
    assert ended(EndReason.LAUNCH_FAILED, hours=0).spot_wanted_since == NOW - 5 * HOUR


def test_a_job_that_is_tried_again_waits_anew() -> None:
    owner = replace(patient(), state=JobState.FAILED, ended_at=NOW, pacing=Pacing(spot_wanted_since=NOW - 9 * HOUR))
    found = retry(alone(owner), owner, NOW)
    assert isinstance(found, Plan)
    assert found.jobs[owner.id].pacing.spot_wanted_since is None


def test_a_clock_that_was_set_changes_no_wait() -> None:
    world, _ = decided(alone(patient()), DEAR_SPOT)
    for step in (-400 * timedelta(days=1), 8 * HOUR):
        moved = applied(world, redated(world, step, NOW + HOUR))
        assert placed(decided(moved, DEAR_SPOT, on_demand(), after=step + 1.9 * HOUR)[1]) is None
        assert placed(decided(moved, DEAR_SPOT, on_demand(), after=step + 2 * HOUR)[1]) is Market.ON_DEMAND


def test_a_wait_that_began_in_the_future_begins_now() -> None:
    owner = patient(pacing=Pacing(spot_wanted_since=NOW + 7000 * timedelta(days=365)))
    world, plan = decided(alone(owner), DEAR_SPOT, on_demand())
    assert placed(plan) is None
    assert world.jobs[owner.id].pacing.spot_wanted_since == NOW


def test_the_jobs_of_an_array_wait_together() -> None:
    """Those that come after the first one that waits did not get a machine either."""
    tasks = [
        replace(patient(), id=JobId(f"j{n}"), name=f"a-{n}", array=ArrayTask(id=JobId("a"), name="a", index=n, count=3))
        for n in range(3)
    ]
    world = World(policy=shop_policy(), jobs={one.id: one for one in tasks}, attempts={}, intents={})
    sold = [replace(on_demand(), offer_id=OfferId(f"f{n}"), host_id=HostId(f"h{n}")) for n in range(3)]
    world, _ = decided(world, DEAR_SPOT, *sold)
    assert [one.pacing.spot_wanted_since for one in world.jobs.values()] == [NOW, None, None]
    world, plan = decided(world, DEAR_SPOT, *sold, after=2 * HOUR)
    assert len(plan.attempts) == 3


def test_a_task_whose_turn_comes_later_waits_for_itself() -> None:
    place = ArrayTask(id=JobId("a"), name="a", index=0, count=2, at_once=1)
    first = replace(patient(), array=place)
    base = world_with(AttemptState.RUNNING)
    running = replace(first, state=JobState.RUNNING, attempts_made=1, pacing=Pacing(spot_wanted_since=NOW - 9 * HOUR))
    second = replace(first, id=JobId("j2"), array=replace(place, index=1, at_once=2))
    world = replace(base, jobs={running.id: running, second.id: second})
    world, plan = decided(world, DEAR_SPOT, on_demand())
    assert placed(plan) is None
    assert world.jobs[second.id].pacing.spot_wanted_since == NOW


def test_a_job_that_would_lose_everything_on_spot_is_judged_by_spot() -> None:
    owner = patient(spec={"work": Work(time=70 * HOUR)})
    cheap = on_demand(100_000)
    assert "nothing in the job says that it saves" in unprotected_words(owner, alone(owner), market(SPOT, cheap), NOW)
    eager = patient(None, spec={"work": Work(time=70 * HOUR)})
    assert unprotected_words(eager, alone(eager), market(SPOT, cheap), NOW) == ""
