"""A machine that stops before the answer to a raise of its bid is known: the bid that it may have had is booked."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from spotd.core import bids
from spotd.core.domain.plan import applied
from spotd.core.domain.world import World
from spotd.core.kernel.reconcile import reconcile
from spotd.core.plan_builder import PlanBuilder
from spotd.core.pricing import halted_rate, metered_rate, repriced
from spotd_providers.contract.values import InstanceState
from tests.cases import every
from tests.unit.core.builders import MINUTE, NOW, instance, listing
from tests.unit.core.kernel.test_raised_bids import FIRST, owed, sent, usd

HOUR = timedelta(hours=1)


def unanswered(state: str) -> World:
    """A machine that was billed for an hour at its bid of $0.44, until a raise to $0.473 that has this state."""
    world = owed() if state == "open" else sent()
    if state == "unknown":
        world = applied(world, bids.bid_unknown(world, FIRST, "no answer", NOW))
    item = world.attempts[FIRST]
    meter = replace(item.meter, rate=metered_rate(repriced(item.quote, usd(0.44))), since=NOW - HOUR, until=None)
    return replace(world, attempts={FIRST: replace(item, meter=meter, full_since=meter.since)})


def owed_for(world: World, bid: float, span: timedelta) -> float:
    disk = halted_rate(world.attempts[FIRST].quote)
    return usd(0.44) + disk + (usd(bid) + disk) * (span / HOUR)


STATES = every(("state", "bid"), [("open", 0.44), ("sent", 0.473), ("unknown", 0.473)])


@STATES
def test_what_ends_meanwhile_is_booked_at_the_bid_that_it_may_have_from_when_it_was_decided(
    state: str, bid: float
) -> None:
    world, span = unanswered(state), 30 * MINUTE
    builder = PlanBuilder(world, NOW + span)
    builder.machine_gone(FIRST)
    plan = builder.plan()
    paid = applied(world, plan).attempts[FIRST].meter.settled
    assert paid == pytest.approx(owed_for(world, bid, span), abs=5)
    assert sum(charge.amount for charge in plan.charges) == paid
    builder.machine_gone(FIRST)
    assert builder.attempt(FIRST).meter.settled == paid, "and once only"


@STATES
@every("listed", [InstanceState.GONE, InstanceState.PAUSED], ids=str)
def test_so_is_what_a_list_shows_to_have_stopped(state: str, bid: float, listed: InstanceState) -> None:
    world = unanswered(state)
    for seconds in (20, 40, 60):
        at = NOW + timedelta(seconds=seconds)
        world = applied(world, reconcile(world, listing(instance(listed), at=at), {}, at))
    paid, disk = world.attempts[FIRST].meter.settled, halted_rate(world.attempts[FIRST].quote)
    assert paid == pytest.approx(owed_for(world, bid, timedelta(seconds=20)), abs=5 + disk * 60 / 3600)
