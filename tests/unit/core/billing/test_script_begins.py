"""A later begin that a host states is believed before its machine is known to run, and at its full rate alone."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from spotd.core.billing import start_billing_later
from spotd.core.domain.intents import Meter
from spotd.core.domain.states import AttemptState
from spotd.core.plan_builder import PlanBuilder
from spotd_providers.contract.values import MicroUsdPerHour
from tests.cases import every
from tests.unit.core.builders import MINUTE, NOW, SHOP, world_with

LISTED = NOW - 10 * MINUTE


@every(
    ("running_at", "rate", "is_moved"),
    [
        pytest.param(None, 400_000, True, id="it starts"),
        pytest.param(NOW - 5 * MINUTE, 400_000, False, id="it runs"),
        pytest.param(None, 0, False, id="its disk alone is billed"),
    ],
)
def test_a_later_begin_is_believed_of_a_machine_that_starts(
    running_at: datetime | None, rate: int, is_moved: bool
) -> None:
    world = world_with(AttemptState.STARTING, running_at=running_at)
    rules = replace(world.policy.providers[SHOP], bills_from_script=True)
    (item,) = world.attempts.values()
    meter = Meter(rate=MicroUsdPerHour(rate), on_demand_rate=None, since=LISTED)
    world = replace(
        world,
        policy=replace(world.policy, providers={SHOP: rules}),
        attempts={item.id: replace(item, meter=meter)},
    )
    builder = PlanBuilder(world, NOW)
    start_billing_later(builder, item.id, LISTED + timedelta(hours=1))
    after = builder.attempt(item.id).meter
    assert (after.since != LISTED or after.settled != meter.settled) is is_moved
    assert after.rate == rate
