"""Silence of hosts, seen through the whole shell: whose it is, and what it ends."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from spotd.core.domain.states import EndReason, JobState
from spotd_jobs.objects.api import StoreUnavailable
from spotd_providers.contract.values import AttemptKey, InstanceId
from tests.unit.core.builders import job, offer
from tests.unit.daemon.rig import Rig

pytestmark = pytest.mark.anyio


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    """Read seldom, since these tests last for hours."""
    return Rig(tmp_path, read_every_s=20.0)


@pytest.fixture
def slow_rig(tmp_path: Path) -> Rig:
    """Its machines are listed seldom, too."""
    return Rig(tmp_path, read_every_s=30.0, list_every_s=60.0)


async def test_a_store_that_takes_no_writes_ends_no_machine_and_is_told_once(
    slow_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object, **_kwargs: object) -> None:
        raise StoreUnavailable("503")

    async with slow_rig.running():
        name = await slow_rig.submit()
        host = await slow_rig.until_running(name, 1)
        with monkeypatch.context() as patched:
            patched.setattr(slow_rig.objects, "put", full)
            await slow_rig.clock.sleep(timedelta(minutes=50))
            assert slow_rig.job(name).state is JobState.RUNNING
            assert any(row["name"] == "silent hosts" for row in (await slow_rig.handlers().doctor.report())["checks"])
        host.beat("run")
        await slow_rig.until(lambda: not slow_rig.control_loop.shared_silence)
        host.exit("succeeded")
        await slow_rig.until_state(name, JobState.SUCCEEDED)
    assert slow_rig.kinds().count("silence.doubted") == 1
    assert slow_rig.kinds().count("silence.trusted") == 1


@pytest.mark.lengthy
async def test_a_host_has_time_to_be_heard_once_the_store_takes_writes_again(
    slow_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object, **_kwargs: object) -> None:
        raise StoreUnavailable("503")

    async with slow_rig.running():
        name = await slow_rig.submit()
        host = await slow_rig.until_running(name, 1)
        with monkeypatch.context() as patched:
            patched.setattr(slow_rig.objects, "put", full)
            await slow_rig.clock.sleep(timedelta(minutes=50))
        await slow_rig.clock.sleep(timedelta(seconds=20))
        host.beat("run")
        await slow_rig.until(lambda: not slow_rig.control_loop.shared_silence)
        assert [a.end_reason for a in slow_rig.attempts(name)] == [None]
        await slow_rig.clock.sleep(timedelta(minutes=40))
        assert slow_rig.attempts(name)[0].end_reason is EndReason.HOST_LOST, "a silence of its own ends it"


async def test_a_machine_that_starts_while_the_store_takes_no_writes_is_not_given_up(
    slow_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: object, **_kwargs: object) -> None:
        raise StoreUnavailable("503")

    async with slow_rig.running():
        name = await slow_rig.submit()
        await slow_rig.until(lambda: any(a.ref is not None for a in slow_rig.attempts(name)))
        with monkeypatch.context() as patched:
            patched.setattr(slow_rig.objects, "put", full)
            await slow_rig.clock.sleep(timedelta(minutes=25))  # the shop gives a start twenty
        assert len(slow_rig.attempts(name)) == 1
        host = await slow_rig.until_running(name, 1)
        host.exit("succeeded")
        await slow_rig.until_state(name, JobState.SUCCEEDED)
    assert slow_rig.kinds().count("attempt.unheard") == 1


async def test_two_empty_lists_end_no_machine_that_beats(rig: Rig) -> None:
    rig.shop.offer_index = [offer(f"o{n}", price=400_000 + n) for n in range(4)]
    async with rig.running():
        names = [await rig.submit(job(number)) for number in (1, 2, 3)]
        hosts = [await rig.until_running(name, 1) for name in names]
        machines, rig.shop.machines = rig.shop.machines, {}
        for _ in range(24):
            for host in hosts:
                host.beat("run")
            rig.list_again(rig.shop.name)
            await rig.clock.sleep(timedelta(seconds=5))
        rig.shop.machines = machines
        for host in hosts:
            host.exit("succeeded")
        for name in names:
            await rig.until_state(name, JobState.SUCCEEDED)
    assert [len(rig.attempts(name)) for name in names] == [1, 1, 1]
    assert rig.kinds().count("machine.missing") == 3


async def test_a_machine_that_vanished_is_replaced_within_two_minutes(rig: Rig) -> None:
    async with rig.running():
        name = await rig.submit()
        await rig.until_running(name, 1)
        del rig.shop.machines[InstanceId("m1")]
        since = rig.clock.now()
        await rig.until(lambda: len(rig.attempts(name)) == 2)
        assert rig.clock.now() - since < timedelta(minutes=2)
    assert rig.attempts(name)[0].end_reason is EndReason.HOST_LOST


async def test_why_says_of_a_silent_machine_that_it_is_kept_and_for_how_long(slow_rig: Rig) -> None:
    async with slow_rig.running():
        name = await slow_rig.submit()
        await slow_rig.until_running(name, 1)
        await slow_rig.clock.sleep(timedelta(minutes=10))
        assert slow_rig.control_loop.state is not None
        sentence = slow_rig.control_loop.state.verdicts[name].sentence
        assert "no sign of life for 9 min" in sentence
        assert "35 min" in sentence
        await slow_rig.until(lambda: bool(slow_rig.attempts(name)[0].end_reason))
        assert slow_rig.shop.machine_of(AttemptKey("spotd-lab-j1-1")) is not None
