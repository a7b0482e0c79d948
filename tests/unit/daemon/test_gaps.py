"""Hours that the daemon did not see: its computer slept, or it was not running."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from spotd.core.domain.intents import JobId
from spotd.core.domain.states import JobState
from spotd.core.metering import job_spent
from spotd_providers.contract.values import InstanceState
from tests.unit.core.builders import job
from tests.unit.daemon.host import text
from tests.unit.daemon.rig import Rig

pytestmark = pytest.mark.anyio
HOUR = timedelta(hours=1)


async def running(rig: Rig) -> JobId:
    """A job with a dollar to spend has run for a minute at $0.40 an hour."""
    job_id = await rig.submit(job(budget=1_000_000))
    host = await rig.until_running(job_id, 1)
    for _ in range(4):
        host.beat("run", at=text(rig.clock.now()))
        await rig.clock.sleep(timedelta(seconds=15))
    return job_id


def ended_itself(rig: Rig, job_id: JobId, after: timedelta) -> None:
    """While nobody watched, its lease ran out and its runner ended the machine."""
    host, at = rig.host(job_id, 1), text(rig.clock.now() + after)
    rest = {"outcome": "lease_expired", "phase": "run", "exit_code": None, "signal": None, "oom": None, "reason": ""}
    host.beat("done", at=at, exit=rest)
    rig.shop.set_state(rig.attempts(job_id)[0].key, InstanceState.GONE)


async def test_a_computer_that_slept_books_what_the_lease_allowed_and_goes_on_with_the_job(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    async with rig.ready():
        job_id = await running(rig)
        ended_itself(rig, job_id, timedelta(minutes=30))
        rig.clock.offset += 8 * HOUR
        await rig.until(lambda: len(rig.attempts(job_id)) == 2 and rig.attempts(job_id)[1].ref is not None)
        assert rig.job(job_id).state is JobState.STARTING
        (first, _) = rig.attempts(job_id)
        assert first.meter.settled in range(200_000, 235_000), "no longer than its lease and the time to save"
    assert "job.expired" not in rig.kinds(job_id)


async def test_a_machine_that_ran_on_while_the_computer_slept_is_paid_for(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    async with rig.ready():
        job_id = await running(rig)
        rig.clock.offset += HOUR
        host = rig.host(job_id, 1)
        for _ in range(8):
            host.beat("run", at=text(rig.clock.now()))
            await rig.clock.sleep(timedelta(seconds=15))
        (item,) = rig.attempts(job_id)
        assert item.state.counts
        world = rig.store.read(lambda reads: reads.world(rig.policy.current, rig.clock.now()))
        assert job_spent(world, world.jobs[job_id], rig.clock.now()) > 400_000


async def test_a_daemon_that_was_not_running_books_no_more_either(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    async with rig.ready():
        job_id = await running(rig)
        ended_itself(rig, job_id, timedelta(minutes=30))
    rig.clock.offset += 8 * HOUR
    later = rig.reborn()
    async with later.ready():
        await later.until(lambda: len(later.attempts(job_id)) == 2)
        assert later.attempts(job_id)[0].meter.settled < 235_000
