"""A state restored from a backup: numbers go on, newer checkpoints are kept, and the healthy machine goes on."""

from __future__ import annotations

import shutil
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

import pytest

from spotd.api.requests import JobQuery
from spotd.core.domain.attempts import Attempt, HostStatus
from spotd.core.domain.intents import AttemptId, JobId
from spotd.core.domain.jobs import Checkpoint, Job
from spotd.core.domain.policy import attempt_key
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.daemon import object_keys, recovery_survey
from spotd.daemon.recovery_survey import NOT_DONE, RecoverySurvey
from spotd.store import Store
from spotd_jobs.objects.api import ObjectStore, StoreUnavailable
from spotd_providers.contract.values import AttemptKey, InstanceState, Loss
from tests.sim.records import Records
from tests.unit.core.builders import INSTALL, NOW, world_with
from tests.unit.daemon.clocks import VirtualClock
from tests.unit.daemon.rig import Rig
from tests.unit.daemon.shop import Shop

pytestmark = pytest.mark.anyio


def surveyor(rig: Rig) -> RecoverySurvey:
    """The rig buys nothing and ends no stray before the store was asked, as the daemon's composition makes it."""
    found = RecoverySurvey(rig.objects, commits=rig.commits, clock=rig.clock, log=rig.log, inline=True)
    rig.policy.gates.append(lambda: found.hold)
    rig.policy.owned = lambda policy: replace(policy, identity_sure=found.done)
    return found


def away(*_: object, **__: object) -> None:
    raise StoreUnavailable("no answer")


class World:
    """A daemon over a state in a file, and the backup that was made of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = VirtualClock()
        self.shop = Shop(self.clock)
        self.state, self.backup = folder / "state.sqlite", folder / "backup.sqlite"

    def rig(self) -> Rig:
        return Rig(self.folder, clock=self.clock, shops=[self.shop], store=Store.open(self.state))

    def make_backup(self, rig: Rig) -> None:
        rig.store.close()
        shutil.copy(self.state, self.backup)

    def restore(self, rig: Rig) -> Rig:
        rig.store.close()
        for left in self.folder.glob("state.sqlite-*"):
            left.unlink()
        shutil.copy(self.backup, self.state)
        return self.rig()


def outbid(shop: Shop, number: int) -> None:
    shop.set_state(AttemptKey(f"spotd-lab-j1-{number}"), InstanceState.PAUSED, Loss.OUTBID)


async def save(rig: Rig, job: JobId, number: int, name: str) -> None:
    rig.host(job, number).checkpoint(name, name.encode())
    rig.host(job, number).beat("run")
    await rig.until(lambda: any(c.name == name for c in rig.job(job).checkpoints))


async def two_more_attempts(world: World) -> tuple[Rig, JobId]:
    """The backup knows attempt 1 as running; in truth attempt 3 runs, and two newer checkpoints were accepted."""
    rig = world.rig()
    async with rig.running():
        name = await rig.submit()
        await rig.until_running(name, 1)
        await save(rig, name, 1, "u001")
    world.make_backup(rig)
    rig = world.rig()
    async with rig.running():
        for number in (1, 2):
            outbid(world.shop, number)
            await rig.until_running(name, number + 1)
            await save(rig, name, number + 1, f"u00{number + 1}")
    return world.restore(rig), name


async def test_a_restored_state_goes_on_with_the_machine_and_the_checkpoints_that_it_does_not_know(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    rig, name = await two_more_attempts(world)
    assert rig.job(name).attempts_made == 1
    healthy = [m.key for m in world.shop.alive()]
    assert healthy == ["spotd-lab-j1-3"]
    found = surveyor(rig)
    await found.run()
    host = rig.host(name, 3)
    host.objects, host.seq = rig.objects, 50
    async with rig.running():
        for _ in range(40):
            host.beat("run")
            await rig.clock.sleep(timedelta(seconds=15))
        assert [c.name for c in rig.job(name).checkpoints] == ["u003", "u002", "u001"]
        assert rig.job(name).state is JobState.RUNNING
        assert [m.key for m in world.shop.alive()] == healthy
        assert [r.key for r in world.shop.requests] == [f"spotd-lab-j1-{n}" for n in (1, 2, 3)]
        assert rig.attempts(name)[0].end_reason is EndReason.HOST_LOST
        outbid(world.shop, 3)
        await rig.until(lambda: len(world.shop.requests) == 4)
        assert world.shop.requests[-1].key == "spotd-lab-j1-4"
        assert rig.grant(name, 4).restore[0].name == "u003"
    assert world.shop.most_alive["spotd-lab-j1"] == 1
    assert "job.recovered" in rig.kinds(name)


async def test_a_machine_that_a_restored_state_does_not_know_is_kept_while_the_store_is_slow_to_tell(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    rig, name = await two_more_attempts(world)
    healthy = [m.key for m in world.shop.alive()]
    found = surveyor(rig)
    host = rig.host(name, 3)
    host.objects, host.seq = rig.objects, 50
    async with rig.running():
        for look in range(40):
            if look == 20:
                await found.run()
            host.beat("run")
            await rig.clock.sleep(timedelta(seconds=15))
        assert [m.key for m in world.shop.alive()] == healthy
        assert rig.job(name).state is JobState.RUNNING
    assert len(world.shop.requests) == 3


async def test_a_job_that_ended_its_newest_machine_meanwhile_is_placed_anew_under_a_new_number(tmp_path: Path) -> None:
    world = World(tmp_path)
    rig, name = await two_more_attempts(world)
    machine = world.shop.machine_of(AttemptKey("spotd-lab-j1-3"))
    await world.shop.terminate(machine.ref)
    await surveyor(rig).run()
    async with rig.running():
        await rig.until(lambda: len(world.shop.requests) == 4)
    assert world.shop.requests[-1].key == "spotd-lab-j1-4"
    ended = {a.id.number: a.state for a in rig.attempts(name)}
    assert ended[3] is AttemptState.ENDED


async def test_a_number_that_was_used_is_never_bought_again_even_without_a_survey(tmp_path: Path) -> None:
    world = World(tmp_path)
    rig, _ = await two_more_attempts(world)
    for machine in world.shop.not_gone():
        await world.shop.terminate(machine.ref)
    async with rig.running():
        await rig.until(lambda: len(world.shop.requests) == 4, within=timedelta(hours=12))
    keys = [r.key for r in world.shop.requests]
    assert len(set(keys)) == len(keys)
    assert keys[-1] == "spotd-lab-j1-4"


async def test_nothing_is_bought_before_the_store_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tmp_path)
    found = surveyor(rig)
    async with rig.running():
        await rig.submit()
        with monkeypatch.context() as patched:
            patched.setattr(rig.objects, "list", away)
            with pytest.raises(StoreUnavailable):
                await found.reconcile_once()
            await rig.clock.sleep(timedelta(minutes=5))
        assert not rig.shop.requests
        assert found.hold.startswith(NOT_DONE)
        page = await rig.handlers().jobs.page(JobQuery())
        assert page["paused"] == (await rig.handlers().health.status())["paused"] == found.hold
        await found.run()
        await rig.until(lambda: bool(rig.shop.requests))


async def test_a_retry_takes_in_what_a_restored_state_in_which_the_job_was_over_does_not_know(tmp_path: Path) -> None:
    world = World(tmp_path)
    rig = world.rig()
    async with rig.running():
        name = await rig.submit()
        await rig.until_running(name, 1)
        await save(rig, name, 1, "u001")
        await rig.handlers().jobs.cancel(name)
        rig.host(name, 1).exit("stopped")
        await rig.until_state(name, JobState.CANCELLED)
    world.make_backup(rig)
    rig = world.rig()
    async with rig.running():
        await rig.handlers().jobs.retry(name)
        await rig.until_running(name, 2)
        await save(rig, name, 2, "u002")
        outbid(world.shop, 2)
        await rig.until_running(name, 3)
        await save(rig, name, 3, "u003")
        outbid(world.shop, 3)
        await rig.until(lambda: not world.shop.alive() or len(world.shop.requests) == 4)
    rig = world.restore(rig)
    for machine in world.shop.not_gone():
        await world.shop.terminate(machine.ref)
    await surveyor(rig).run()
    async with rig.running():
        await rig.handlers().jobs.retry(name)
        assert rig.job(name).attempts_made >= 3
        assert [c.name for c in rig.job(name).checkpoints] == ["u003", "u002", "u001"]
        used = [r.key for r in world.shop.requests]
        await rig.until(lambda: len(world.shop.requests) > len(used))
    keys = [r.key for r in world.shop.requests]
    assert len(set(keys)) == len(keys)


async def test_checkpoints_are_found_though_many_launches_in_a_row_were_refused_after_them(tmp_path: Path) -> None:
    world = World(tmp_path)
    rig, name = await two_more_attempts(world)
    record = rig.objects.get(object_keys.launch_key(name, 3), bytes_max=100_000)
    for number in range(4, 30):
        fresh = record.replace(b"spotd-lab-j1-3", f"spotd-lab-j1-{number}".encode())
        rig.objects.put(object_keys.launch_key(name, number), fresh)
    await surveyor(rig).run()
    assert rig.job(name).attempts_made == 29
    assert [c.name for c in rig.job(name).checkpoints] == ["u003", "u002", "u001"]


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b"\xff", b'{"key": 1}', b'{"key":"x","quote":{}}'])
async def test_a_record_that_cannot_be_read_still_uses_its_number(tmp_path: Path, raw: bytes) -> None:
    rig = Rig(tmp_path)
    found = surveyor(rig)
    name = await rig.submit()
    rig.objects.put(object_keys.launch_key(name, 7), raw)
    await found.run()
    assert rig.job(name).attempts_made == 7
    assert rig.attempts(name) == ()
    waits_until = rig.job(name).not_before
    assert waits_until is not None, "its machine may compute until its lease is over"
    assert waits_until > rig.clock.now() + rig.policy.current.lease


async def test_a_record_that_names_another_key_is_not_believed(tmp_path: Path) -> None:
    world = World(tmp_path)
    rig, name = await two_more_attempts(world)
    record = rig.objects.get(object_keys.launch_key(name, 3), bytes_max=100_000)
    rig.objects.put(object_keys.launch_key(name, 9), record)
    await surveyor(rig).run()
    assert rig.job(name).attempts_made == 9
    assert AttemptId(job=name, number=9) not in {a.id for a in rig.attempts(name)}


async def test_an_attempt_after_which_a_restored_state_does_not_know_another_is_permitted_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its machine may only be paused: with a grant it would compute beside the newest one."""
    rig, name = await two_more_attempts(World(tmp_path))
    (older,) = rig.attempts(name)
    rig.objects.delete([object_keys.grant_key(older.id)])
    with monkeypatch.context() as patched:
        patched.setattr(rig.objects, "list", away)
        await rig.control_loop.adopt()
        assert (await rig.grant_writer.reconcile_once()).error, "whether it is the newest is not known"
    assert "attempt 3" in (await rig.grant_writer.reconcile_once()).error
    assert rig.objects.head(object_keys.grant_key(older.id)) is None


async def test_of_more_launches_than_are_taken_in_the_newest_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery_survey, "RECORDS_MAX", 1)
    rig, name = await two_more_attempts(World(tmp_path))
    await rig.control_loop.adopt()
    error = (await rig.grant_writer.reconcile_once()).error
    assert "attempt 3" in error
    assert f"job {name}" in error
    await surveyor(rig).run()
    assert rig.job(name).attempts_made == 3
    assert [a.id.number for a in rig.attempts(name) if a.state.counts] == [3]


async def test_a_host_whose_writing_cannot_be_read_does_not_keep_the_daemon_from_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: object, **__: object) -> None:
        raise OverflowError("a number that is none")

    rig, name = await two_more_attempts(World(tmp_path))
    monkeypatch.setattr(recovery_survey, "read_host", breaks)
    found = surveyor(rig)
    await found.run()
    assert found.done
    assert [a.id.number for a in rig.attempts(name) if a.state.counts] == [3]
    assert "host.not_readable" in rig.log.events()


async def test_the_newest_attempt_goes_on_once_the_store_shows_that_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    rig = world.rig()
    async with rig.running():
        name = await rig.submit()
        await rig.until_running(name, 1)
    world.make_backup(rig)
    rig = world.restore(rig)
    (newest,) = rig.attempts(name)
    rig.objects.delete([object_keys.grant_key(newest.id)])
    await rig.control_loop.adopt()
    assert not (await rig.grant_writer.reconcile_once()).error
    assert rig.grant(name, 1).orders.stop is None
    monkeypatch.setattr(rig.objects, "list", away)
    await rig.clock.sleep(timedelta(minutes=10))
    assert not (await rig.grant_writer.reconcile_once()).error, "this is asked once"


async def test_an_order_to_stop_does_not_wait_for_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path)
    rig = world.rig()
    async with rig.running():
        name = await rig.submit()
        await rig.until_running(name, 1)
    world.make_backup(rig)
    rig = world.restore(rig)
    monkeypatch.setattr(rig.objects, "list", away)
    await rig.handlers().jobs.cancel(name)
    await rig.control_loop.adopt()
    await rig.grant_writer.reconcile_once()
    assert rig.grant(name, 1).orders.stop is not None


EIGHT: Final = timedelta(hours=8)


@pytest.mark.parametrize("off_now", [timedelta(0), -EIGHT, EIGHT], ids=["right now", "behind now", "ahead now"])
@pytest.mark.parametrize("off_then", [timedelta(0), -EIGHT, EIGHT], ids=["right then", "behind then", "ahead then"])
@pytest.mark.parametrize("saves", [True, False])
def test_a_record_of_a_clock_that_was_set_since_is_as_old_as_the_store_shows(
    off_then: timedelta, off_now: timedelta, *, saves: bool
) -> None:
    """World 97016: a machine of 13 minutes was booked for 8 hours before it."""
    records, age = Records(), 3 * EIGHT + timedelta(minutes=1)
    world = world_with(AttemptState.RUNNING)
    [item] = world.attempts.values()
    second = replace(item, id=AttemptId(job=item.id.job, number=2), key=attempt_key(INSTALL, item.id.job, 2))
    records.now = lambda: NOW - age
    recovery_survey.use_number(records.store, replace(second, intended_at=NOW - age + off_then))
    records.now = lambda: NOW
    saved_at = NOW - age + timedelta(minutes=20)
    saved = Checkpoint(name="s", attempt=2, step=1, bytes=1, at=saved_at, manifest_key="k", sha256="0" * 64)

    def read(_store: ObjectStore, attempt: Attempt, _job: Job, _now: datetime) -> HostStatus | None:
        lifted = replace(saved, at=max(saved_at, attempt.intended_at))  # as manifests are read
        is_there = saves and attempt.id == second.id
        return HostStatus(attempt=second.id, read_at=NOW, checkpoints=(lifted,)) if is_there else None

    [found] = recovery_survey.survey_all(records.store, world, NOW + off_now, read)
    [one] = found.unknown
    assert one.record is not None
    assert one.record.intended_at == NOW + off_now - age


@pytest.mark.parametrize("copied", [True, False])
def test_a_record_that_was_copied_after_its_machine_had_saved_keeps_its_date(*, copied: bool) -> None:
    """Else nine hours of a machine that runs would never be booked."""
    records = Records()
    world = world_with(AttemptState.RUNNING)
    [item] = world.attempts.values()
    second = AttemptId(job=item.id.job, number=2)
    launched, written = NOW - timedelta(hours=10), NOW - timedelta(hours=1)
    records.now = lambda: written
    key = attempt_key(INSTALL, second.job, 2)
    recovery_survey.use_number(records.store, replace(item, id=second, key=key, intended_at=launched))
    records.now = lambda: NOW
    saved_at = launched + timedelta(minutes=20) if copied else written + timedelta(minutes=5)
    saved = Checkpoint(name="s", attempt=2, step=1, bytes=1, at=saved_at, manifest_key="k", sha256="0" * 64)

    def read(_store: ObjectStore, attempt: Attempt, _job: Job, _now: datetime) -> HostStatus | None:
        return HostStatus(attempt=second, read_at=NOW, checkpoints=(saved,)) if attempt.id == second else None

    [found] = recovery_survey.survey_all(records.store, world, NOW, read)
    [one] = found.unknown
    assert one.record is not None
    assert one.record.intended_at == (launched if copied else written)


@pytest.mark.parametrize("minutes", [-9, 0, 9])
def test_a_record_that_waited_for_its_turn_keeps_its_date_and_none_is_in_the_future(minutes: int) -> None:
    records = Records()
    world = world_with(AttemptState.RUNNING)
    [item] = world.attempts.values()
    second = replace(item, id=AttemptId(job=item.id.job, number=2), key=attempt_key(INSTALL, item.id.job, 2))
    records.now = lambda: NOW
    recovery_survey.use_number(records.store, replace(second, intended_at=NOW + timedelta(minutes=minutes)))
    [found] = recovery_survey.survey_all(records.store, world, NOW, lambda *_: None)
    assert found.unknown[0].record is not None
    assert found.unknown[0].record.intended_at == NOW + timedelta(minutes=min(0, minutes))


def test_where_the_store_takes_no_writes_a_record_is_as_old_as_by_the_clock_of_now() -> None:
    records = Records()
    world = world_with(AttemptState.RUNNING)
    [item] = world.attempts.values()
    second = replace(item, id=AttemptId(job=item.id.job, number=2), key=attempt_key(INSTALL, item.id.job, 2))
    records.now = lambda: NOW - EIGHT
    recovery_survey.use_number(records.store, replace(second, intended_at=NOW - 2 * EIGHT))
    records.can_write = lambda: False
    [found] = recovery_survey.survey_all(records.store, world, NOW, lambda *_: None)
    assert found.unknown[0].record is not None
    assert found.unknown[0].record.intended_at == NOW - EIGHT
