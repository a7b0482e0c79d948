"""A machine that runs on although its provider accepted its end is booked for all of that time."""

from __future__ import annotations

from datetime import timedelta

import pytest

from spotd.core.domain.attempts import MachineState
from spotd.core.domain.intents import Meter
from spotd.core.domain.plan import applied
from spotd.core.domain.states import AttemptState
from spotd.core.domain.world import World
from spotd.core.kernel.outcomes import after_restart
from spotd.core.kernel.reconcile import reconcile
from spotd.core.metering import accrued
from spotd_providers.contract.values import InstanceState
from tests.cases import every
from tests.unit.core.builders import NOW, instance, listing, world_with

ACCEPTED_AT = NOW - timedelta(seconds=30)
AWAY = [timedelta(minutes=6), timedelta(hours=1), timedelta(days=10)]


def accepted(away: timedelta, *, restarted: bool) -> World:
    """Return the state in which the list is read again; no list could be read while spotd or the provider was away."""
    world = world_with(AttemptState.ENDING, machine=MachineState.HALTED, meter=Meter())
    return applied(world, after_restart(world, ACCEPTED_AT + away)) if restarted else world


@every("restarted", [False, True])
@every("away", AWAY)
def test_a_machine_whose_accepted_end_was_forgotten_is_booked_since_then(away: timedelta, restarted: bool) -> None:
    world, at = accepted(away, restarted=restarted), ACCEPTED_AT + away
    world = applied(world, reconcile(world, listing(instance(InstanceState.RUNNING), at=at), {}, at))
    (item,) = world.attempts.values()
    booked = item.meter.settled + accrued(item.meter, at)
    owed = item.quote.price.total * (away / timedelta(hours=1))
    assert booked == pytest.approx(owed, abs=item.quote.price.total / 60)


@every("restarted", [False, True])
@every("state", [InstanceState.ENDING, InstanceState.GONE])
def test_one_whose_accepted_end_was_carried_out_is_booked_no_further(state: InstanceState, restarted: bool) -> None:
    world, at = accepted(AWAY[1], restarted=restarted), ACCEPTED_AT + AWAY[1]
    plan = reconcile(world, listing(instance(state), at=at), {}, at)
    assert plan.charges == ()
