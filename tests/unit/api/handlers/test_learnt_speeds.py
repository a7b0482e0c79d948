"""A job that states its work is ranked by what earlier jobs and the markets measured, from its submission on."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from spotd.core.domain.jobs import PaceSample
from spotd_jobs.spec.model import GpuSpeed
from tests.unit.api.handlers.test_handlers import draft, submitted
from tests.unit.core.builders import job as some_job
from tests.unit.daemon.rig import Rig
from tests.unit.store.values import plan

pytestmark = pytest.mark.anyio
WORK = {"time": "2h"}
FOUND = (GpuSpeed(name="H100_SXM", ppm=2_000_000), GpuSpeed(name="RTX_4090", ppm=1_000_000))
WORDS = "the speed of machines is that which earlier jobs and the markets' own benchmarks measured"


def remember_jobs(rig: Rig) -> None:
    """Two jobs of earlier whose steps were twice as fast on an H100."""
    hour = timedelta(hours=1)
    paces = tuple(
        PaceSample(attempt=n, gpu=gpu, gpu_count=1, steps=steps, span=hour)
        for n, gpu, steps in ((1, "H100_SXM", 200), (2, "RTX_4090", 100))
    )
    jobs = [replace(some_job(number), paces=paces) for number in (7, 8)]
    rig.store.tx(lambda tx: tx.commit(plan(*jobs)))


async def test_a_job_with_work_has_what_was_learnt_in_its_plan_and_in_the_state(rig: Rig) -> None:
    async with rig.ready():
        remember_jobs(rig)
        assert WORDS in str((await rig.handlers().submissions.plan(draft(work=WORK)))["costs"])
        found = rig.job(await submitted(rig, work=WORK))
        assert found.learnt == FOUND


@pytest.mark.parametrize("changes", [{}, {"work": WORK, "speed": {"RTX_4090": 1.0}}], ids=["no work", "own speeds"])
async def test_other_jobs_have_nothing_of_it(rig: Rig, changes: dict[str, object]) -> None:
    async with rig.ready():
        remember_jobs(rig)
        assert WORDS not in str((await rig.handlers().submissions.plan(draft(**changes)))["costs"])
        assert rig.job(await submitted(rig, **changes)).learnt is None
