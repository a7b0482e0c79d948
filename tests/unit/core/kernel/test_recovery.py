"""What a state that is older than the store books for a machine that it knows by its heartbeats alone."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.intents import JobId, Meter
from spotd.core.domain.plan import applied
from spotd.core.domain.policy import attempt_key
from spotd.core.domain.states import AttemptState, EndReason
from spotd.core.metering import job_spent, lease_and_save
from spotd.core.recovery import Survey, Unknown, record_of, recover
from spotd_providers.contract.values import MicroUsdPerGpuHour
from tests.cases import every
from tests.unit.core.builders import INSTALL, MINUTE, NOW, world_with


def launched_later(item: Attempt, after: timedelta, alive_at: datetime | None = None) -> Survey:
    """Return what the store says where the next attempt of the job was launched so long after this one."""
    record = replace(record_of(item), key=attempt_key(INSTALL, item.id.job, 9), intended_at=item.intended_at + after)
    return Survey(job=item.id.job, unknown=[Unknown(number=9, record=record)], alive_at=alive_at)


def test_a_machine_that_was_heard_and_never_listed_is_booked_up_to_the_next_launch() -> None:
    heard = NOW - 3 * MINUTE
    world = world_with(
        AttemptState.INTENDED, ref=None, outcome_unknown=True, heartbeat_seen_at=heard, meter=Meter(), heartbeat_seq=3
    )
    (item,) = world.attempts.values()
    plan = recover(world, [launched_later(item, timedelta(minutes=6))], NOW)
    ended = next(a for a in plan.attempts.values() if a.id == item.id)
    assert ended.end_reason is EndReason.HOST_LOST
    assert sum(charge.amount for charge in plan.charges) == ended.meter.settled
    owed = item.quote.price.total * timedelta(minutes=6) // timedelta(hours=1)
    assert owed <= ended.meter.settled <= owed + item.quote.price.total // 60 + 1
    assert applied(world, plan).jobs[item.id.job].attempts_made == 9


def test_a_machine_whose_host_fell_silent_long_before_the_next_launch_is_booked_up_to_its_last_sign_of_life() -> None:
    world = world_with(
        AttemptState.INTENDED, ref=None, outcome_unknown=True, heartbeat_seen_at=NOW, meter=Meter(), heartbeat_seq=3
    )
    (item,) = world.attempts.values()
    survey = launched_later(item, NOW - item.intended_at, alive_at=item.intended_at + timedelta(minutes=2))
    plan = recover(world, [survey], NOW)
    (charge,) = plan.charges
    assert charge.start == item.intended_at
    assert timedelta(minutes=2) <= charge.end - charge.start <= timedelta(minutes=3)


@every(
    ("alive", "booked"),
    [
        pytest.param(None, 40, id="it wrote nothing: as long as its lease"),
        pytest.param(0, 10, id="no more than this state knows"),
        pytest.param(120, 131, id="for two hours more than this state knows"),
        pytest.param(600, 180, id="it states more than can be"),
    ],
)
def test_a_machine_that_an_old_copy_of_the_state_knows_is_booked_up_to_what_its_host_wrote_since(
    alive: int | None, booked: int
) -> None:
    """The copy is as old as the machine was after ten minutes; the next attempt was launched after three hours."""
    back, hour = NOW + timedelta(hours=8), timedelta(hours=1)
    world = world_with(AttemptState.RUNNING)
    (item,) = world.attempts.values()
    meter = replace(item.meter, until=NOW + 30 * MINUTE)
    world = replace(world, attempts={item.id: replace(item, proven_at=NOW, meter=meter)})
    survey = launched_later(item, 3 * hour, None if alive is None else NOW + alive * MINUTE)
    world = applied(world, recover(world, [survey], back))
    booked_until_now = job_spent(world, world.jobs[item.id.job], back)
    owed = item.quote.price.total * (booked * MINUTE) // hour
    assert abs(booked_until_now - owed) <= item.quote.price.total // 60 + 2


@every(
    "changes",
    [
        pytest.param(None, id="not known"),
        pytest.param({"ceiling": MicroUsdPerGpuHour(1)}, id="above its ceiling"),
        pytest.param({"key": attempt_key(INSTALL, JobId("j1"), 9, "other0")}, id="of another install"),
    ],
)
def test_a_launch_that_the_store_does_not_prove_to_be_ours_and_payable_is_waited_for_and_not_taken_in(
    changes: dict[str, Any] | None,
) -> None:
    """Its machine may compute until no lease keeps it alive."""
    world = world_with(AttemptState.RUNNING)
    (item,) = world.attempts.values()
    record = replace(record_of(item), key=attempt_key(INSTALL, item.id.job, 9))
    unknown = Unknown(number=9, record=None if changes is None else replace(record, **changes))
    after = applied(world, recover(world, [Survey(job=item.id.job, unknown=[unknown])], NOW))
    owner = after.jobs[item.id.job]
    assert {one.number for one in after.attempts} == {1}
    assert owner.not_before == NOW + lease_and_save(owner, world.policy)
