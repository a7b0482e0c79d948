"""The watchdog over the daemon's own parts: a hung job saves and moves, and no restart forgets what is known."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from spotd.core.domain.states import EndReason, JobState
from spotd_jobs.spec.model import CheckpointPolicy, StallAction, WatchdogPolicy
from tests.unit.core.builders import MINUTE, job, offer
from tests.unit.daemon.host import Host
from tests.unit.daemon.rig import Rig

pytestmark = pytest.mark.anyio
HUNG = {"printed": 5, "writes": 0, "gpu_s": None, "gpu_busy_s": None}


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    """Asked seldom, since these tests last for hours."""
    return Rig(tmp_path, read_every_s=30.0, list_every_s=30.0)


def watched_job(**rules: object) -> object:
    return job(spec={"watchdog": WatchdogPolicy(no_progress=10 * MINUTE, **rules)})  # type: ignore[arg-type]  # by name


async def hang(rig: Rig, host: Host, *, minutes: int, seen: bool = True) -> None:
    """The host writes heartbeats in which nothing moves, for so long."""
    began = rig.clock.now()
    checkpoint = {"name": "step-1", "step": 1, "at": "2026-03-02T12:00:00Z"} if seen else None
    for minute in range(minutes):
        up = 60.0 + (rig.clock.now() - began).total_seconds()
        host.beat("run", up_s=up, progress=HUNG, seen=checkpoint if minute else None)
        await rig.clock.sleep(MINUTE)


async def test_a_hung_job_saves_and_moves_and_fails_where_it_hangs_everywhere(rig: Rig) -> None:
    rig.shop.offer_index = [offer(f"o{n}", price=400_000 + n) for n in range(5)]
    async with rig.running():
        name = await rig.submit(watched_job())  # type: ignore[arg-type]  # a job
        for number in (1, 2, 3):
            host = await rig.until_running(name, number)
            assert rig.grant(name, number).spec.watch_s == 60.0
            await hang(rig, host, minutes=14)
            order = rig.grant(name, number).orders.stop
            assert order is not None
            assert order.reason.startswith("the job made no progress: no new output")
            host.exit("stopped", code=None)
            await rig.until(lambda number=number: not rig.attempts(name)[number - 1].state.counts)  # type: ignore[misc]  # bound now
        await rig.until_state(name, JobState.FAILED)
        await rig.until(lambda: not rig.shop.not_gone())
    found = rig.attempts(name)
    assert [a.end_reason for a in found] == [EndReason.STALLED] * 3
    assert len({a.quote.offer.host_id for a in found}) == 3
    assert "it stalled on 3 machines in a row; spotctl retry job1" in rig.job(name).reason


async def test_what_is_known_of_a_stall_outlives_the_process(rig: Rig) -> None:
    async with rig.running():
        name = await rig.submit(watched_job(action=StallAction.STOP))  # type: ignore[arg-type]  # a job
        host = await rig.until_running(name, 1)
        await hang(rig, host, minutes=8)
    second = rig.reborn()
    async with second.running():
        before = second.attempts(name)[0].watch
        assert before is not None
        assert before.quiet >= 5 * MINUTE
        host.objects = second.objects
        began = before.sample.up.total_seconds()
        for minute in range(7):
            host.beat("run", up_s=began + 60.0 * (minute + 1), progress=HUNG, seen=None)
            await second.clock.sleep(MINUTE)
        assert second.attempts(name)[0].stop is not None


async def test_a_silent_host_is_not_taken_for_an_idle_one(rig: Rig) -> None:
    async with rig.running():
        name = await rig.submit(watched_job())  # type: ignore[arg-type]  # a job
        host = await rig.until_running(name, 1)
        await hang(rig, host, minutes=3)
        await rig.clock.sleep(timedelta(minutes=20))
        assert rig.attempts(name)[0].stop is None


async def test_late_checkpoints_raise_one_alarm(rig: Rig) -> None:
    async with rig.running():
        name = await rig.submit(job(spec={"checkpoint": CheckpointPolicy(every=5 * MINUTE)}))
        host = await rig.until_running(name, 1)
        for minute in range(20):
            host.beat("run", up_s=60.0 * (minute + 1))
            await rig.clock.sleep(MINUTE)
        assert rig.kinds(name).count("checkpoint.late") == 1
        host.checkpoint("step-1")
        host.beat("run", up_s=60.0 * 22)
        await rig.clock.sleep(MINUTE)
        assert rig.kinds(name).count("checkpoint.fresh") == 1
