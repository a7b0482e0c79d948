"""A host that writes more than it may is noticed, ended with a reason of its own, and gets no leave to write again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from spotd.core.domain.attempts import HostStatus, MachineState
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.kernel.reconcile import reconcile
from spotd.daemon import object_keys
from spotd.daemon.hosts.limits import FloodLimits
from spotd.daemon.hosts.monitor import HostMonitor
from spotd_jobs.objects.api import ObjectInfo
from spotd_jobs.objects.folder import FolderStore
from tests.unit.core.builders import NOW, world_with
from tests.unit.daemon.grants.test_builder import Desk
from tests.unit.daemon.host import Host
from tests.unit.daemon.rig import Log
from tests.unit.daemon.test_ids import Still

WORLD = world_with(AttemptState.RUNNING)
(ATTEMPT,) = WORLD.attempts
ALWAYS = timedelta(0)
pytestmark = pytest.mark.anyio


class Counted(FolderStore):
    """Counts what a listing gave."""

    listed = 0

    def list_after(self, prefix: str, after: str, *, page: int = 1000) -> Iterator[ObjectInfo]:
        for info in super().list_after(prefix, after, page=page):
            type(self).listed += 1
            yield info


def host_monitor(folder: Path, limits: FloodLimits) -> tuple[HostMonitor, Host]:
    objects = Counted(folder / "objects")
    Counted.listed = 0
    host = Host(objects, ATTEMPT)
    host.beat("run")
    return HostMonitor(
        objects, clock=Still(), wall=Still(), log=Log(), inline=True, ticks=lambda: 0.0, limits=limits
    ), host


async def flood(one: HostMonitor) -> str:
    return (await one.read_hosts(WORLD))[ATTEMPT].flood


async def test_a_host_within_its_limits_is_left_alone(tmp_path: Path) -> None:
    one, host = host_monitor(tmp_path, FloodLimits(audit_every=ALWAYS))
    host.checkpoint("a", b"weights")
    host.log("a line")
    assert await flood(one) == ""


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (FloodLimits(objects_day=20, audit_every=ALWAYS), "more than 20 objects in 1 day"),
        (FloodLimits(bytes_day=20_000, audit_every=ALWAYS), "more than 20000 bytes in 1 day"),
        (FloodLimits(log_bytes_day=20_000, audit_every=ALWAYS), "more than 20000 bytes of logs in 1 day"),
    ],
    ids=["objects", "bytes", "logs"],
)
async def test_a_host_above_a_limit_is_told_of_and_no_more_is_listed_than_shows_it(
    tmp_path: Path, limits: FloodLimits, words: str
) -> None:
    one, host = host_monitor(tmp_path, limits)
    for _ in range(100):
        host.log(b"x" * 1000)
    assert await flood(one) == words
    listed = Counted.listed
    assert listed < 100
    assert await flood(one) == words
    assert Counted.listed == listed, "what is known is not counted again"


async def test_an_attempt_that_lasts_longer_may_write_more(tmp_path: Path) -> None:
    one, host = host_monitor(tmp_path, FloodLimits(objects_day=20, audit_every=ALWAYS))
    for _ in range(30):
        host.log(b"x")
    ((key, attempt),) = WORLD.attempts.items()
    older = replace(WORLD, attempts={key: replace(attempt, intended_at=NOW - timedelta(hours=30))})
    assert (await one.read_hosts(older))[ATTEMPT].flood == ""


async def test_everything_is_counted_seldom(tmp_path: Path) -> None:
    one, host = host_monitor(tmp_path, FloodLimits(objects_day=20, audit_every=timedelta(minutes=10)))
    for _ in range(30):
        host.log(b"x")
    assert await flood(one) == "", "not at once after a start, when everybody's turn would come"


async def test_a_flooding_attempt_is_ended_and_uses_up_a_retry() -> None:
    report = HostStatus(attempt=ATTEMPT, read_at=NOW, seq=5, phase="run", flood="more than 20 objects in 1 day")
    plan = reconcile(WORLD, {}, {ATTEMPT: report}, NOW)
    assert plan.attempts[ATTEMPT].end_reason is EndReason.FLOODED
    assert plan.attempts[ATTEMPT].state is AttemptState.ENDING
    (intent,) = plan.intents.values()
    assert intent.kind.value == "terminate"
    (event,) = [event for event in plan.events if event.kind == "attempt.flooded"]
    assert "more than 20 objects in 1 day" in event.message
    job = plan.jobs[ATTEMPT.job]
    assert job.errors == 1
    job_before = WORLD.jobs[ATTEMPT.job]
    spent = replace(WORLD, jobs={ATTEMPT.job: replace(job_before, errors=job_before.spec.retry_errors)})
    assert reconcile(spent, {}, {ATTEMPT: report}, NOW).jobs[ATTEMPT.job].state is JobState.FAILED


async def test_a_flooding_attempts_grant_is_withdrawn_and_not_renewed(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    grant_writer = desk.grant_writer()
    grant_writer.update(desk.world)
    await grant_writer.controller.run_once()
    assert desk.objects.head(object_keys.grant_key(desk.identity)) is not None
    ended = replace(desk.attempt, state=AttemptState.ENDING, end_reason=EndReason.FLOODED)
    grant_writer.update(replace(desk.world, attempts={desk.identity: ended}))
    await grant_writer.controller.run_once()
    assert desk.objects.head(object_keys.grant_key(desk.identity)) is None
    await grant_writer.controller.run_once()
    assert desk.objects.head(object_keys.grant_key(desk.identity)) is None


async def test_a_count_says_how_many_bytes_the_host_has_uploaded(tmp_path: Path) -> None:
    one, host = host_monitor(tmp_path, FloodLimits(audit_every=ALWAYS))
    host.raw("data/half-a-checkpoint", b"x" * 5_000)
    await one.read_hosts(WORLD)
    assert (await one.read_hosts(WORLD))[ATTEMPT].stored_bytes > 5_000


async def test_what_a_machine_uploads_after_its_attempt_is_over_is_counted_until_the_machine_is_gone(
    tmp_path: Path,
) -> None:
    one, host = host_monitor(tmp_path, FloodLimits(audit_every=ALWAYS))
    host.raw("data/half-a-checkpoint", b"x" * 5_000)
    over = replace(WORLD.attempts[ATTEMPT], state=AttemptState.ENDING, end_reason=EndReason.PRICE_ROSE)
    told = (await one.read_hosts(replace(WORLD, attempts={ATTEMPT: over})))[ATTEMPT]
    assert told.stored_bytes > 5_000
    assert (told.liveness_check, told.seq, told.checkpoints) == (True, -1, ())
    gone = replace(over, state=AttemptState.ENDED, machine=MachineState.GONE)
    assert await one.read_hosts(replace(WORLD, attempts={ATTEMPT: gone})) == {}


async def test_a_store_that_does_not_count_what_an_ended_attempt_wrote_costs_no_report(tmp_path: Path) -> None:
    one, _host = host_monitor(tmp_path, FloodLimits(audit_every=ALWAYS))
    ended = replace(WORLD.attempts[ATTEMPT], state=AttemptState.ENDING, end_reason=EndReason.PRICE_ROSE)
    other = replace(ended, id=replace(ended.id, number=2))
    world = replace(WORLD, attempts={**WORLD.attempts, other.id: other})
    assert set(await one.read_hosts(world)) == {ATTEMPT}
    assert one.last_error == ""
