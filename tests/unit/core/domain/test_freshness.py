"""The alarm for late checkpoints: once for each lapse, with figures, ended by the next checkpoint."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from spotd.core.domain.attempts import Freshness
from spotd.core.domain.intents import AttemptId
from spotd.core.domain.jobs import Checkpoint
from spotd.core.domain.plan import Plan, applied
from spotd.core.domain.states import AttemptState
from spotd.core.domain.world import World
from spotd.core.host_reports import late_words
from spotd.core.kernel.reconcile import reconcile
from spotd_jobs.spec.model import CheckpointPolicy
from spotd_providers.contract.values import InstanceState
from tests.cases import every
from tests.unit.core.builders import MINUTE, NOW, instance, job, listing, report, world_with

FIRST = AttemptId(job=job().id, number=1)
EVERY = CheckpointPolicy(every=15 * MINUTE)
LAST = Freshness(since=NOW - 32 * MINUTE, up=60 * MINUTE, every=15 * MINUTE)
SAVED = Checkpoint(
    name="step-2", attempt=1, step=2, bytes=1, at=NOW, manifest_key="jobs/j1/attempts/1/checkpoints/2", sha256="0" * 64
)


def running(freshness: Freshness | None = LAST, rules: CheckpointPolicy = EVERY, **changes: Any) -> World:
    world = world_with(AttemptState.RUNNING, freshness=freshness, **changes)
    owner = world.jobs[FIRST.job]
    return replace(world, jobs={owner.id: replace(owner, spec=replace(owner.spec, checkpoint=rules))})


def seen(world: World, *, at: timedelta = timedelta(0), **changes: Any) -> Plan:
    """What a read of a host shows that has run for 92 minutes and writes a heartbeat."""
    known = {"seq": 6, "phase": "run", "up": 92 * MINUTE, **changes}
    reports = {i: replace(one, read_at=NOW + at) for i, one in report(**known).items()}
    return reconcile(world, listing(instance(InstanceState.RUNNING), at=NOW + at), reports, NOW + at)


def kinds(plan: Plan) -> list[str]:
    return [event.kind for event in plan.events if event.kind.startswith("checkpoint.")]


def test_the_alarm_is_raised_once_with_figures() -> None:
    plan = seen(running())
    assert [event.message for event in plan.events] == [
        "no new checkpoint for 32 min, [checkpoint] every is 15 min: a preemption would repeat all of it"
    ]
    again = seen(applied(running(), plan), at=5 * MINUTE, seq=7, up=97 * MINUTE)
    assert kinds(again) == []
    known = applied(running(), plan).attempts[FIRST].freshness
    assert late_words(known, "step-1", NOW + 5 * MINUTE).startswith("no new checkpoint since step-1 for 37 min")


def test_the_next_checkpoint_ends_it() -> None:
    plan = seen(running(replace(LAST, late_at=NOW - MINUTE)), checkpoints=(SAVED,))
    assert kinds(plan) == ["checkpoint.accepted", "checkpoint.fresh"]
    assert plan.attempts[FIRST].freshness == Freshness(since=NOW, up=92 * MINUTE, every=15 * MINUTE)


@every(
    ("world", "changes"),
    [
        pytest.param(running(replace(LAST, since=NOW - 31 * MINUTE)), {}, id="not late yet"),
        pytest.param(running(), {"up": 61 * MINUTE}, id="the computer slept, or its clock was stepped"),
        pytest.param(running(), {"seq": 5}, id="no fresh heartbeat"),
        pytest.param(running(), {"phase": "save"}, id="it saves now"),
        pytest.param(running(rules=CheckpointPolicy()), {}, id="no interval is stated"),
        pytest.param(running(), {"checkpoints": (SAVED,)}, id="one is there"),
    ],
)
def test_no_alarm_is_raised(world: World, changes: dict[str, Any]) -> None:
    assert "checkpoint.late" not in kinds(seen(world, **changes))


def test_a_host_of_which_only_the_liveness_is_known_is_read_in_full_first() -> None:
    plan = seen(running(read_at=NOW - 20 * MINUTE), liveness_check=True, seq=5)
    assert kinds(plan) == []
    assert plan.full_reads == {FIRST}
    assert seen(running(read_at=NOW - MINUTE), liveness_check=True, seq=5).full_reads == frozenset()


def test_a_runner_that_was_started_again_counts_from_its_start() -> None:
    assert kinds(seen(running(), up=33 * MINUTE)) == ["checkpoint.late"]
    assert kinds(seen(running(), up=MINUTE)) == []
