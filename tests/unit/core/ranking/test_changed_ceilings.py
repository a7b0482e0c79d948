"""What a job may cost per hour is changed by its owner, while it waits and while its machine runs."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from spotd.core.bids import bid_limit
from spotd.core.decide import decide
from spotd.core.domain import plan as invariants
from spotd.core.domain.intents import AttemptId, JobId
from spotd.core.domain.plan import applied
from spotd.core.domain.states import AttemptState, EndReason
from spotd.core.domain.world import VerdictKind, World
from spotd.core.kernel.reconcile import reconcile
from spotd.core.requests import set_ceiling
from spotd_jobs.spec.model import PriceLimit
from spotd_providers.contract.values import InstanceState, Market, MicroUsdPerGpuHour, MicroUsdPerHour
from tests.cases import every
from tests.unit.core.builders import NOW, instance, job, listing, market, offer, report, shop_policy, world_with
from tests.unit.core.kernel.test_raised_bids import bid_world

JOB = JobId("j1")
FIRST = AttemptId(job=JOB, number=1)
SOON = NOW + timedelta(seconds=30)


def per_gpu(microusd: int) -> PriceLimit:
    return PriceLimit(per_gpu_hour=microusd)


def changed(world: World, limit: PriceLimit | None) -> World:
    """The world after the owner's change, in which every rule holds."""
    plan = set_ceiling(world, [world.jobs[JOB]], limit, NOW)
    assert [event.kind for event in plan.events] == ["job.ceiling"]
    after = applied(world, plan)
    assert invariants.broken_rules(after) == ()
    return after


def waiting(*, ceiling: int = 500_000) -> World:
    return World(policy=shop_policy(), jobs={JOB: job(ceiling=ceiling)}, attempts={}, intents={})


def listed(world: World, price: int) -> World:
    """The world after a later listing of the machine at this price."""
    seen = replace(instance(InstanceState.RUNNING), price=MicroUsdPerHour(price))
    return applied(world, reconcile(world, listing(seen, at=SOON), report(seq=6), SOON))


def running(**sold: Any) -> World:
    """A machine that was agreed at $0.40 under a ceiling of $0.50."""
    world = world_with(AttemptState.RUNNING)
    (item,) = world.attempts.values()
    agreed = replace(item.quote, offer=replace(item.quote.offer, **sold))
    return replace(world, attempts={FIRST: replace(item, quote=agreed)})


def test_a_job_that_waits_buys_at_the_next_decision_once_its_ceiling_is_raised() -> None:
    world = waiting(ceiling=300_000)
    assert decide(world, market(offer()), NOW).verdicts[JOB].kind is VerdictKind.ABOVE_CEILING
    plan = decide(changed(world, per_gpu(450_000)), market(offer()), NOW)
    assert plan.verdicts[JOB].kind is VerdictKind.PLACED
    assert [item.ceiling for item in plan.attempts.values()] == [450_000]


def test_a_lowered_ceiling_holds_for_the_next_machine() -> None:
    world = changed(waiting(), per_gpu(399_999))
    assert decide(world, market(offer()), NOW).verdicts[JOB].kind is VerdictKind.ABOVE_CEILING


def test_the_ceiling_of_the_config_holds_again_where_that_is_asked_for() -> None:
    policy = shop_policy(ceilings={"RTX_4090": MicroUsdPerGpuHour(390_000)})
    world = changed(replace(waiting(), policy=policy), None)
    verdict = decide(world, market(offer()), NOW).verdicts[JOB]
    assert (verdict.kind, verdict.ceiling) == (VerdictKind.ABOVE_CEILING, 390_000)


def test_the_event_states_both_ceilings_in_their_units() -> None:
    world = waiting()
    (event,) = set_ceiling(world, [world.jobs[JOB]], PriceLimit(machine_hour=19_200_000), NOW).events
    assert event.message == ("the job's ceiling was changed from $0.5000/GPU-h to $19.2000/h for the machine")
    world = changed(world, None)
    (event,) = set_ceiling(world, [world.jobs[JOB]], per_gpu(1), NOW).events
    assert event.message.endswith("from that of the config to $0.0000/GPU-h")


def test_the_same_ceiling_again_changes_nothing() -> None:
    world = running()
    assert set_ceiling(world, [world.jobs[JOB]], per_gpu(500_000), NOW).is_empty


@every(
    ("ceiling", "stops", "why"),
    [
        pytest.param(400_000, False, "it costs as much as is accepted", id="at-its-price"),
        pytest.param(385_000, False, "so little is borne for a while", id="a-little-below"),
        pytest.param(200_000, True, "it costs twice what is accepted", id="half"),
        pytest.param(900_000, False, "more is accepted than before", id="raised"),
    ],
)
@every("sold", [{}, {"pays_bid": True}, {"market": Market.ON_DEMAND}], ids=["spot", "bid", "fixed"])
def test_a_machine_that_runs_is_judged_as_one_whose_price_rose(
    sold: dict[str, Any], ceiling: int, *, stops: bool, why: str
) -> None:
    world = listed(changed(running(**sold), per_gpu(ceiling)), 400_000)
    plan = decide(world, market(), SOON)
    stopped = [item.stop.reason for item in plan.attempts.values() if item.stop is not None]
    assert stopped == ([EndReason.PRICE_ROSE] if stops else []), why
    assert plan.verdicts[JOB].ceiling == ceiling


def test_a_price_that_rises_below_a_raised_ceiling_stops_nothing() -> None:
    assert not decide(listed(changed(running(), per_gpu(900_000)), 800_000), market(), SOON).attempts
    assert decide(listed(running(), 800_000), market(), SOON).attempts, "without the change it does"


def test_a_bid_is_limited_by_the_ceiling_of_now() -> None:
    world = bid_world()
    (item,) = world.attempts.values()
    before = bid_limit(item, world.jobs[JOB], world.policy)
    for limit in (600_000, 450_000):
        after = changed(world, per_gpu(limit))
        found = bid_limit(after.attempts[FIRST], after.jobs[JOB], after.policy)
        assert (found > before) == (limit > 500_000)


def test_a_ceiling_that_was_raised_and_lowered_again_leaves_no_rule_broken() -> None:
    world = changed(changed(bid_world(bid=0.44), per_gpu(900_000)), per_gpu(100_000))
    item = world.attempts[FIRST]
    assert (item.ceiling, item.ceiling_now) == (900_000, 100_000)
    assert item.over_ceiling_at == NOW
