"""A machine whose price moves while it runs is given up when it costs more than its job accepted."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from spotd.core.decide import decide
from spotd.core.domain.intents import JobId
from spotd.core.domain.plan import applied
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.domain.world import VerdictKind, World
from spotd.core.kernel.reconcile import reconcile
from spotd.core.pricing import DWELL_MAX, borne_until
from spotd_providers.contract.values import InstanceState, Market, MicroUsdPerGpuHour, MicroUsdPerHour
from tests.cases import every
from tests.unit.core.builders import NOW, instance, listing, market, offer, report, world_with

JOB = JobId("j1")


def priced(usd: int, state: AttemptState = AttemptState.RUNNING, **sold: Any) -> World:
    """A machine that was agreed at $0.40, of a job that accepts $0.50, is listed at another price."""
    world = world_with(state)
    (item,) = world.attempts.values()
    if sold:
        agreed = replace(item.quote, offer=replace(item.quote.offer, **sold))
        world = replace(world, attempts={item.id: replace(item, quote=agreed)})
    seen = replace(instance(InstanceState.RUNNING), price=MicroUsdPerHour(usd), market=sold.get("market"))
    return applied(world, reconcile(world, listing(seen), report(seq=6), NOW))


def test_a_price_well_above_the_ceiling_stops_the_machine_in_order() -> None:
    world = priced(525_001)
    plan = decide(world, market(offer("o2", price=300_000)), NOW)
    (item,) = plan.attempts.values()
    assert item.state is AttemptState.STOPPING
    assert item.stop is not None
    assert item.stop.reason is EndReason.PRICE_ROSE
    assert item.stop.deadline > NOW
    assert [event.kind for event in plan.events] == ["attempt.stopping"]
    assert "rose above the ceiling" in plan.events[0].message
    assert not decide(applied(world, plan), market(), NOW).attempts, "it is told so once"


@every(
    ("world", "why"),
    [
        pytest.param(priced(500_000), "it costs what was accepted", id="at-the-ceiling"),
        pytest.param(priced(900_000, pays_bid=True), "what was bid does not move", id="pays-its-bid"),
        pytest.param(priced(900_000, market=Market.ON_DEMAND), "a list price does not move", id="on-demand"),
    ],
)
def test_every_other_machine_runs_on(world: World, why: str) -> None:
    assert not decide(world, market(), NOW).attempts, why


def test_a_machine_that_does_not_run_the_command_yet_is_ended_at_once() -> None:
    plan = decide(priced(600_000, AttemptState.STARTING), market(), NOW)
    (item,) = plan.attempts.values()
    assert (item.state, item.end_reason) == (AttemptState.ENDING, EndReason.PRICE_ROSE)


def test_the_job_goes_on_once_it_has_saved_and_waits_for_a_price_it_accepts() -> None:
    world = priced(600_000)
    world = applied(world, decide(world, market(), NOW))
    heard = report(seq=7, phase="done", exit_reason=EndReason.PREEMPTED, exit_answers_stop=True, exit_code=143)
    world = applied(world, reconcile(world, listing(instance(InstanceState.RUNNING)), heard, NOW))
    (item,) = world.attempts.values()
    assert (item.state, item.end_reason) == (AttemptState.ENDING, EndReason.PRICE_ROSE)
    assert world.jobs[JOB].state is JobState.RECOVERING
    for at in (NOW, NOW + timedelta(microseconds=1)):
        world = applied(world, reconcile(world, listing(instance(InstanceState.GONE), at=at), {}, at))
    is_expensive, plan = market(offer(price=600_000)), decide(world, market(offer(price=600_000)), NOW)
    assert plan.verdicts[JOB].kind is VerdictKind.ABOVE_CEILING
    assert plan.jobs[JOB].state is JobState.WAITING_PRICE
    assert not decide(applied(world, plan), is_expensive, NOW).attempts
    assert decide(applied(world, plan), market(offer("o2", price=500_000)), NOW).attempts


def later(world: World, usd: int, after: timedelta) -> World:
    """A listing some time later states this price."""
    at = NOW + after
    seen = replace(instance(InstanceState.RUNNING), price=MicroUsdPerHour(usd))
    told = {i: replace(r, read_at=at) for i, r in report(seq=7 + int(after.total_seconds())).items()}
    return applied(world, reconcile(world, listing(seen, at=at), told, at))


def stops(world: World, after: timedelta) -> bool:
    at = NOW + after
    return bool(decide(world, market(at=at), at).attempts)


def test_a_price_a_little_above_the_ceiling_is_borne_for_a_while_and_no_longer() -> None:
    world = priced(525_000)
    assert not stops(world, timedelta(0))
    plan = decide(world, market(), NOW)
    assert plan.wake_at is not None
    assert plan.wake_at <= NOW + DWELL_MAX
    for minutes in range(1, 10):
        world = later(world, 525_000, timedelta(minutes=minutes))
        assert not stops(world, timedelta(minutes=minutes))
    assert stops(later(world, 525_000, DWELL_MAX), DWELL_MAX)


def test_a_price_that_moves_around_the_ceiling_restarts_nothing() -> None:
    world = priced(510_000)
    for minutes in range(1, 120):
        world = later(world, 510_000 if minutes % 8 else 490_000, timedelta(minutes=minutes))
        assert not stops(world, timedelta(minutes=minutes))


def test_a_price_that_rises_past_the_margin_is_not_borne_any_more() -> None:
    world = later(priced(510_000), 530_000, timedelta(minutes=1))
    assert stops(world, timedelta(minutes=1))


@every("gpus", [1, 8])
@every("excess", [1, 25_000])
def test_what_is_paid_above_the_ceiling_is_bounded_for_machines_of_any_size(gpus: int, excess: int) -> None:
    (item,) = world_with(AttemptState.RUNNING, over_ceiling_at=NOW).attempts.values()
    agreed = replace(item.quote, offer=replace(item.quote.offer, gpu_count=gpus))
    item = replace(item, quote=agreed)
    price = MicroUsdPerGpuHour(item.ceiling + excess)
    owner = world_with(AttemptState.RUNNING).jobs[JOB]
    assert borne_until(item, owner, price, NOW + DWELL_MAX - timedelta(seconds=1)) == NOW + DWELL_MAX
    assert borne_until(item, owner, price, NOW + DWELL_MAX) is None
    assert borne_until(item, owner, price, NOW - timedelta(hours=1)) is None, "the clock was set back"
    assert borne_until(replace(item, over_ceiling_at=None), owner, price, NOW) is None
