"""When a machine begins to cost."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from spotd.core.domain.states import AttemptState
from spotd.core.kernel.outcomes import launched
from spotd.core.kernel.reconcile import reconcile
from spotd_providers.contract.values import InstanceState
from tests.unit.core.builders import NOW, instance, listing, world_with

ASKED = NOW - timedelta(minutes=10)


@pytest.mark.parametrize(
    ("made_at", "billed_from"),
    [
        pytest.param(NOW - timedelta(minutes=2), NOW - timedelta(minutes=2), id="from-when-it-was-made"),
        pytest.param(None, NOW, id="from-the-answer-when-nobody-says"),
        pytest.param(ASKED - timedelta(days=1), ASKED, id="never-before-it-was-asked-for"),
        pytest.param(NOW + timedelta(hours=1), NOW, id="never-from-the-future"),
    ],
)
def test_a_machine_costs_from_when_it_was_made_and_not_from_when_we_heard_of_it(
    made_at: datetime | None, billed_from: datetime
) -> None:
    world = world_with(AttemptState.INTENDED)
    (attempt,) = world.attempts
    machine = replace(instance(InstanceState.RUNNING), created_at=made_at)
    plan = launched(world, attempt, machine, NOW)
    assert plan.attempts[attempt].meter.since == billed_from


@pytest.mark.parametrize(
    ("made_at", "billed_from"),
    [
        pytest.param(NOW + timedelta(hours=6), ASKED, id="our-clock-was-set-back"),
        pytest.param(NOW + timedelta(seconds=61), ASKED, id="by-another-clock"),
        pytest.param(NOW + timedelta(seconds=59), NOW, id="by-a-clock-that-is-a-little-ahead"),
        pytest.param(NOW - timedelta(minutes=2), NOW - timedelta(minutes=2), id="from-when-it-was-made"),
    ],
)
def test_a_machine_that_a_list_shows_first_costs_from_its_launch_where_its_birth_is_by_another_clock(
    made_at: datetime, billed_from: datetime
) -> None:
    world = world_with(AttemptState.INTENDED, ref=None, outcome_unknown=True)
    (item,) = world.attempts.values()
    assert item.intended_at == ASKED
    machine = replace(instance(InstanceState.RUNNING), created_at=made_at)
    plan = reconcile(world, listing(machine), {}, NOW)
    assert plan.attempts[item.id].meter.since == billed_from
