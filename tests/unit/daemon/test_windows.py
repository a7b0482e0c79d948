"""A job with windows through the whole daemon: it runs in one, saves at its end, and goes on in the next."""

from __future__ import annotations

from datetime import timedelta

import pytest

from spotd.core.domain.states import EndReason, JobState
from spotd_jobs.spec.fields import parse_window
from spotd_jobs.spec.model import Schedule
from tests.unit.core.builders import NOW, job
from tests.unit.daemon.rig import Rig

pytestmark = pytest.mark.anyio


async def test_a_job_runs_in_its_window_and_goes_on_from_its_checkpoint_in_the_next(rig: Rig) -> None:
    schedule = Schedule(windows=(parse_window("12:10-12:30"), parse_window("13:10-13:30")), timezone="UTC")
    async with rig.running():
        name = await rig.submit(job(spec={"schedule": schedule}))
        host = await rig.until_running(name, 1)
        assert rig.clock.now() >= NOW + timedelta(minutes=10)
        assert rig.job(name).state is JobState.RUNNING
        host.checkpoint("step-1")
        await rig.until(lambda: rig.attempts(name)[0].stop is not None)
        assert NOW + timedelta(minutes=25) < rig.clock.now() < NOW + timedelta(minutes=28)
        order = rig.grant(name, 1).orders.stop
        assert order is not None
        assert order.flush
        host.checkpoint("step-2")
        host.exit("stopped", code=None)
        await rig.until(lambda: not rig.shop.not_gone())
        assert rig.clock.now() < NOW + timedelta(minutes=30)
        assert rig.job(name).state is JobState.QUEUED
        await rig.until(lambda: len(rig.attempts(name)) == 2 and rig.attempts(name)[1].ref is not None)
        assert [restore.name for restore in rig.grant(name, 2).restore] == ["step-2", "step-1"]
        await rig.until_running(name, 2)
        assert rig.clock.now() >= NOW + timedelta(minutes=70)
        after = rig.job(name)
    first = rig.attempts(name)[0]
    assert first.end_reason is EndReason.WINDOW_CLOSED
    assert (after.recoveries, after.errors, after.idle_launches, after.failed_starts) == (0, 0, 0, 0)
    assert [saved.name for saved in after.checkpoints] == ["step-2", "step-1"]
