"""A machine whose price moves while it runs is given up when it costs more than its job accepted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from spotd.core.decide import decide
from spotd.core.model import ExitCause, JobId, VerdictKind, World
from spotd.core.plans import applied
from spotd.core.reconcile import reconcile
from spotd.core.states import AttemptState, EndReason, JobState
from spotd_providers.contract.money import MicroUsdPerHour
from spotd_providers.contract.values import InstanceState, Market
from tests.core.builders import NOW, instance, listing, market, offer, report, world_with

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


def test_a_price_above_the_ceiling_stops_the_machine_in_order() -> None:
    world = priced(500_001)
    plan = decide(world, market(offer("o2", price=300_000)), NOW)
    (item,) = plan.attempts.values()
    assert item.state is AttemptState.STOPPING
    assert item.stop is not None
    assert item.stop.reason is EndReason.PRICE_ROSE
    assert item.stop.deadline > NOW
    assert [event.kind for event in plan.events] == ["attempt.stopping"]
    assert "rose above the ceiling" in plan.events[0].message
    assert not decide(applied(world, plan), market(), NOW).attempts, "it is told so once"


@pytest.mark.parametrize(
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
    heard = report(seq=7, phase="done", exit_cause=ExitCause.STOPPED, exit_code=143)
    world = applied(world, reconcile(world, listing(instance(InstanceState.RUNNING)), heard, NOW))
    (item,) = world.attempts.values()
    assert (item.state, item.end_reason) == (AttemptState.ENDING, EndReason.PRICE_ROSE)
    assert world.jobs[JOB].state is JobState.RECOVERING
    world = applied(world, reconcile(world, listing(instance(InstanceState.GONE)), {}, NOW))
    dear, plan = market(offer(price=600_000)), decide(world, market(offer(price=600_000)), NOW)
    assert plan.verdicts[JOB].kind is VerdictKind.ABOVE_CEILING
    assert plan.jobs[JOB].state is JobState.WAITING_PRICE
    assert not decide(applied(world, plan), dear, NOW).attempts
    assert decide(applied(world, plan), market(offer("o2", price=500_000)), NOW).attempts
