"""Checkpoints that a list missed: they stand behind the next newer one, and are offered as its fallback."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spotd.core.checkpoints import offered
from spotd.core.domain.attempts import HostStatus
from spotd.core.domain.intents import AttemptId
from spotd.core.domain.jobs import Checkpoint
from spotd.core.domain.plan import applied
from spotd.core.domain.states import AttemptState
from spotd.core.kernel.reconcile import reconcile
from tests.cases import every
from tests.unit.core.builders import MINUTE, NOW, job, world_with

FIRST = AttemptId(job=job().id, number=1)


def saved(step: int, attempt: int = 1) -> Checkpoint:
    at = NOW + step * MINUTE
    return Checkpoint(
        name=f"s{step}", attempt=attempt, step=step, bytes=1, at=at, manifest_key=f"k{attempt}-{step}", sha256="0" * 64
    )


@every(
    ("known", "older", "listed"),
    [
        pytest.param([160, 80], [(120, 160)], [160, 120, 80], id="between two"),
        pytest.param([160, 80], [(100, 160), (120, 160)], [160, 120, 100, 80], id="two of them"),
        pytest.param([160], [(120, 160)], [160, 120], id="behind the only one"),
        pytest.param([160, 120], [(120, 160)], [160, 120], id="known by now"),
        pytest.param([160], [(80, 120)], [160], id="the next newer one has left the list"),
        pytest.param([], [(80, 120)], [], id="nothing is left"),
        pytest.param(range(100, 50, -1), [(40, 51)], range(100, 50, -1), id="more than are remembered"),
    ],
)
def test_it_is_listed_behind_the_next_newer_one(
    known: list[int], older: list[tuple[int, int]], listed: list[int]
) -> None:
    world = world_with(AttemptState.RUNNING)
    owner = replace(world.jobs[FIRST.job], checkpoints=tuple(map(saved, known)))
    world = replace(world, jobs={owner.id: owner})
    late = tuple((saved(step), f"k1-{newer}") for step, newer in older)
    plan = reconcile(world, {}, {FIRST: HostStatus(attempt=FIRST, read_at=NOW, seq=1, phase="run", older=late)}, NOW)
    after = applied(world, plan).jobs[FIRST.job]
    assert [c.step for c in after.checkpoints] == list(listed)
    told = [e.data["step"] for e in plan.events if e.kind == "checkpoint.accepted"]
    assert told == [step for step in listed if step not in known]
    if known:
        assert offered(after)[0] == owner.checkpoints[0], "the first choice stays"
        assert [c.step for c in offered(after)[:2]] == list(listed)[:2]
