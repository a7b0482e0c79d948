"""A host that was stopped may finish its upload: as long as it advances, up to a limit, and while there is money."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from spotd.core.author import order_stop
from spotd.core.decide import decide
from spotd.core.domain.attempts import StopOrder
from spotd.core.domain.intents import AttemptId, JobId
from spotd.core.domain.plan import applied
from spotd.core.domain.states import AttemptState, EndReason
from spotd.core.domain.world import World
from spotd.core.host_reports import absorb
from spotd.core.kernel.reconcile import reconcile
from spotd.core.plan_builder import PlanBuilder
from spotd.core.requests import cancel
from spotd.store.values import from_json
from spotd_providers.contract.values import InstanceState, MicroUsd
from tests.cases import every
from tests.unit.core.builders import MINUTE, NOW, instance, listing, market, report, world_with

FIRST = AttemptId(job=JobId("j1"), number=1)
BASE = timedelta(seconds=90) + 2 * MINUTE


def stopped() -> World:
    world = world_with(AttemptState.RUNNING)
    return applied(world, cancel(world, FIRST.job, NOW))


def uploads(world: World, *, until: datetime, advances: bool = True) -> tuple[World, datetime]:
    """The host beats and uploads; the instant at which its attempt was ended, or `until`."""
    at, seq = NOW, 10
    while at < until:
        at, seq = at + timedelta(seconds=10), seq + 1
        told = report(seq=seq, phase="upload", upload_progress=f"c:{seq if advances else 0}:0")
        seen = {i: replace(r, read_at=at) for i, r in told.items()}
        world = applied(world, reconcile(world, listing(instance(InstanceState.RUNNING), at=at), seen, at))
        world = applied(world, decide(world, market(at=at), at))
        if not world.attempts[FIRST].state.counts:
            break
    return world, at


def test_an_upload_that_advances_is_not_broken_off_before_the_limit() -> None:
    world, at = uploads(stopped(), until=NOW + timedelta(minutes=50))
    assert world.attempts[FIRST].state is AttemptState.STOPPING
    assert at >= NOW + timedelta(minutes=50)
    world, at = uploads(stopped(), until=NOW + timedelta(hours=3))
    assert world.attempts[FIRST].end_reason is EndReason.CANCELLED
    assert at <= NOW + timedelta(seconds=90) + world.policy.save_limit + MINUTE


def test_an_upload_that_does_not_advance_ends_soon() -> None:
    _, at = uploads(stopped(), until=NOW + timedelta(hours=1), advances=False)
    assert at <= NOW + BASE + 2 * MINUTE


def test_a_stop_for_money_is_not_prolonged() -> None:
    world = world_with(AttemptState.RUNNING)
    owner = world.jobs[FIRST.job]
    world = replace(world, jobs={owner.id: replace(owner, spec=replace(owner.spec, job_budget=70_000))})
    world = applied(world, decide(world, market(), NOW))
    assert world.attempts[FIRST].stop is not None
    _, at = uploads(world, until=NOW + timedelta(hours=1))
    assert at <= NOW + BASE + timedelta(seconds=10)


@every("reason", [EndReason.OVER_BUDGET, EndReason.BUDGET_PAUSED, EndReason.PRICE_ROSE])
def test_only_an_order_that_is_not_for_money_may_be_prolonged_by_an_upload(reason: EndReason) -> None:
    """By the order alone: that each cycle ends a save which a budget does not carry is a rule of its own."""
    world = world_with(AttemptState.RUNNING)
    builder = PlanBuilder(world, NOW)
    order_stop(builder, builder.attempt(FIRST), reason, "why")
    stop = builder.attempt(FIRST).stop
    assert stop is not None
    told = report(seq=10, phase="upload", upload_progress="c:1:0")[FIRST]
    later = PlanBuilder(applied(world, builder.plan()), NOW + 3 * MINUTE)
    absorb(later, FIRST, told)
    prolonged = later.attempt(FIRST).stop
    assert prolonged is not None
    is_for_money = reason is not EndReason.PRICE_ROSE
    assert stop.limit == (None if is_for_money else NOW + timedelta(seconds=90) + world.policy.save_limit)
    assert (prolonged.deadline == stop.deadline) is is_for_money


def test_an_upload_is_broken_off_when_the_money_for_it_runs_out() -> None:
    world = stopped()
    world = replace(world, policy=replace(world.policy, budget_day=MicroUsd(160_000)))
    world, at = uploads(world, until=NOW + timedelta(hours=1))
    assert NOW + BASE < at < NOW + timedelta(minutes=20)
    assert world.attempts[FIRST].meter.settled + 0 <= 160_000


def test_a_stop_order_of_an_older_state_is_read_as_one_that_is_not_prolonged() -> None:
    order = from_json(StopOrder, '{"reason":"cancelled","detail":"","ordered_at":0,"deadline":1}')
    assert (order.limit, order.progress) == (None, "")
