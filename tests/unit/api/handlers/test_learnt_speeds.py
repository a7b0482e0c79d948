"""A job that states its work is ranked by what earlier jobs and the markets measured, from its submission on."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from spotd.api.requests import Submission
from spotd.core.domain.intents import JobId
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
        both = {"work": WORK, "resources": {"gpu": ["RTX_4090:1", "H100:1"]}}
        assert WORDS in str((await rig.handlers().submissions.plan(draft(**both)))["costs"])
        found = rig.job(await submitted(rig, **both))
        assert found.learnt == FOUND


@pytest.mark.parametrize("changes", [{}, {"work": WORK, "speed": {"RTX_4090": 1.0}}], ids=["no work", "own speeds"])
async def test_other_jobs_have_nothing_of_it(rig: Rig, changes: dict[str, object]) -> None:
    async with rig.ready():
        remember_jobs(rig)
        assert WORDS not in str((await rig.handlers().submissions.plan(draft(**changes)))["costs"])
        assert rig.job(await submitted(rig, **changes)).learnt is None


async def test_a_job_that_goes_on_with_anothers_checkpoints_has_its_speeds(rig: Rig) -> None:
    both = {"work": WORK, "resources": {"gpu": ["RTX_4090:1", "H100:1"]}}
    async with rig.ready():
        job = await submitted(rig, **both, checkpoint={"path": "ckpt"})
        host = await rig.until_running(job, 1)
        host.checkpoint("w1")
        await rig.until(lambda: bool(rig.job(job).checkpoints))
        remember_jobs(rig)
        request = Submission(draft=draft(**both, name="again"), resume_from=job)
        detail = await rig.handlers().submissions.submit(request)
        assert not rig.job(JobId(detail["job"]["id"])).learnt, "the source's own, whose work is in that unit"
        assert rig.job(await submitted(rig, **both, name="anew")).learnt == FOUND
