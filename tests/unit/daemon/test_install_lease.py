"""Two daemons with one label: one of them refuses or waits, and neither ever ends a machine of the other."""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import anyio
import pytest

from spotd.core.domain.intents import JobId
from spotd.core.domain.policy import attempt_key, is_own_key, key_belongs_to, key_parts
from spotd.daemon.install import FRESH, Holder, InstallTaken, claim, find_lease, lease_key
from spotd.daemon.lease_controller import DOUBT_S, IDENTITIES, LeaseController
from spotd_jobs.objects.api import Conflict, ObjectInfo, ObjectStore, StoreError, StoreUnavailable
from spotd_jobs.objects.folder import FolderStore
from spotd_providers.contract.values import InstallId
from spotd_providers.kit.text import key_of
from tests.unit.core.builders import INSTALL, job, shop_policy
from tests.unit.daemon.clocks import VirtualClock
from tests.unit.daemon.rig import Rig
from tests.unit.daemon.shop import Shop

pytestmark = pytest.mark.anyio


def leasing(
    rig: Rig,
    name: str,
    *,
    place: str = "",
    take_over: str = "",
    objects: ObjectStore | None = None,
    seconds: Callable[[], float] = anyio.current_time,
) -> LeaseController:
    """A daemon's hold on the label, over the rig's state and store."""
    me = Holder(words=f"process {name}", places=frozenset({place or name}), nonce=name)
    return LeaseController(
        objects or rig.objects,
        install=INSTALL,
        me=me,
        fresh=f"fresh{name}",
        take_over=frozenset(take_over.split()),
        database=rig.database,
        log=rig.log,
        inline=True,
        seconds=seconds,
    )


def own(rig: Rig, lease: LeaseController) -> None:
    """The rig acts under this lease, as the daemon's composition makes it."""
    rig.policy.gates.append(lambda: lease.hold)
    rig.policy.owned = lease.owned
    rig.control_loop._check_owners = lease.check_owners
    rig.grant_writer._forbidden = lambda: lease.lost
    rig.host_monitor._may_delete = lambda: lease.may_write


@asynccontextmanager
async def held(rig: Rig, lease: LeaseController) -> AsyncIterator[None]:
    own(rig, lease)
    await lease.start()
    async with rig.running(), anyio.create_task_group() as group:
        group.start_soon(lease.controller.run)
        yield
        group.cancel_scope.cancel()


def age(objects: ObjectStore, span: timedelta) -> None:
    """The lease was renewed so long ago, by the store's clock."""
    assert isinstance(objects, FolderStore)
    found = find_lease(objects, INSTALL)
    assert found is not None
    at = time.time() - span.total_seconds()
    os.utime(objects._path(found.info.key), (at, at))


# --- keys ---


def test_a_key_is_read_in_one_way_only() -> None:
    key = attempt_key(InstallId("lab"), JobId("j1"), 12, "k3f9x2")
    assert key == "spotd-lab.k3f9x2-j1-12"
    parts = key_parts(InstallId("lab"), key)
    assert parts is not None
    assert (parts.identity, parts.job, parts.number) == ("k3f9x2", "j1", 12)
    for other in ("la", "lab.k3f9x2", "lab-k3f9x2", "lab2"):
        assert not key_belongs_to(InstallId(other), key)
    for bad in ("spotd-lab.-j1-1", "spotd-lab.a.b-j1", "spotd-lab-j.1-1", "spotd-lab-j1-x", "spotd-lab-j1-²"):
        assert not key_belongs_to(InstallId("lab"), bad)


def test_the_longest_key_fits_every_provider() -> None:
    key = attempt_key(InstallId("a" * 24), JobId("0123456789"), 99_999, "k3f9x2")
    assert len(key) <= 64
    assert key_of(key, InstallId("a" * 24)) == key


def test_a_machine_is_ours_by_its_identity() -> None:
    policy = replace(shop_policy(), identity="mine00", identities=frozenset({"lost00"}))
    assert is_own_key(policy, "spotd-lab.mine00-j1-1")
    assert is_own_key(policy, "spotd-lab.lost00-j1-1")
    assert not is_own_key(policy, "spotd-lab.other0-j1-1")
    assert not is_own_key(policy, "spotd-lab-j1-1")
    assert is_own_key(shop_policy(), "spotd-lab-j1-1")


# --- one store ---


def test_a_claim_replaces_no_lease_that_was_written_since_it_was_sought(rig: Rig) -> None:
    """By the condition alone: the holder that was faster has read its lease back and acts."""
    faster, slower = (Holder(words=name, places=frozenset(), nonce=name) for name in ("faster", "slower"))
    assert claim(rig.objects, INSTALL, faster, None, own_identity="", fresh="one").epoch == 1
    with pytest.raises(Conflict):
        claim(rig.objects, INSTALL, slower, None, own_identity="", fresh="two")
    found = find_lease(rig.objects, INSTALL)
    assert found is not None
    assert found.is_held_by(faster)
    assert claim(rig.objects, INSTALL, slower, found, own_identity="", fresh="two").epoch == 2
    assert [info.key for info in rig.objects.list("installs/")] == [lease_key(INSTALL, 2)]


async def test_a_second_daemon_with_the_label_and_the_store_refuses_to_start(rig: Rig, tmp_path: Path) -> None:
    await leasing(rig, "a").start()
    second = Rig(tmp_path / "second", clock=rig.clock, shops=rig.shops)
    with pytest.raises(InstallTaken, match=r"process a .*identity fresha.*lease 1.*\n\nhint: stop that one"):
        await leasing(second, "b", objects=rig.objects).start()


async def test_a_restart_in_the_same_state_folder_goes_on_at_once_with_its_identity(rig: Rig) -> None:
    await leasing(rig, "a", place="here").start()
    again = leasing(rig, "b", place="here")
    await again.start()
    assert again.hold == ""
    assert again.owned(shop_policy()).identity == "fresha"
    assert [info.key for info in rig.objects.list("installs/")] == [lease_key(INSTALL, 2)]


async def test_a_lost_state_in_the_same_folder_takes_its_identity_from_the_store(rig: Rig, tmp_path: Path) -> None:
    await leasing(rig, "a", place="here").start()
    lost = Rig(tmp_path / "lost", clock=rig.clock, shops=rig.shops)
    again = leasing(lost, "b", place="here", objects=rig.objects)
    await again.start()
    assert again.owned(shop_policy()).identity == "fresha"
    assert lost.store.read(lambda reads: reads.meta(IDENTITIES)) == '["fresha"]'


async def test_a_silent_lease_is_watched_before_it_is_taken_over(rig: Rig, tmp_path: Path) -> None:
    await leasing(rig, "a").start()
    age(rig.objects, FRESH * 2)
    second = Rig(tmp_path / "second", clock=rig.clock, shops=rig.shops)
    heir = leasing(second, "b", objects=rig.objects)
    async with held(second, heir):
        assert "watches whether that one lives" in heir.hold
        assert not heir.may_write
        second.shop.put_machine(attempt_key(INSTALL, JobId("jx"), 9, "fresha"))
        await second.submit()
        await second.clock.sleep(timedelta(minutes=5))
        assert not second.shop.requests
        assert len(second.shop.alive()) == 1
        await second.clock.sleep(timedelta(minutes=3))
        assert heir.hold == ""
        await second.until(lambda: "spotd-lab.fresha-jx-9" not in {m.key for m in second.shop.alive()})
        await second.until(lambda: bool(second.shop.requests))
    assert second.shop.requests[0].key == "spotd-lab.fresha-j1-1"


async def test_a_clock_that_was_set_wrong_takes_no_lease_from_a_daemon_that_lives(rig: Rig, tmp_path: Path) -> None:
    first = leasing(rig, "a")
    await first.start()
    age(rig.objects, timedelta(hours=8))
    heir = leasing(Rig(tmp_path / "second", clock=rig.clock, shops=rig.shops), "b", objects=rig.objects)
    await heir.start()
    await first.controller.run_once()
    with pytest.raises(InstallTaken, match="renewed while it was watched"):
        await heir.controller.run_once()


async def test_a_user_can_say_that_an_install_is_lost(rig: Rig, tmp_path: Path) -> None:
    await leasing(rig, "a").start()
    second = Rig(tmp_path / "second", clock=rig.clock, shops=rig.shops)
    heir = leasing(second, "b", take_over="fresha", objects=rig.objects)
    await heir.start()
    assert heir.hold == ""
    assert heir.owned(shop_policy()).identity == "fresha"


async def test_a_daemon_whose_lease_was_taken_buys_nothing_writes_no_grant_and_ends_no_machine(
    rig: Rig, tmp_path: Path
) -> None:
    first = leasing(rig, "a")
    async with held(rig, first):
        name = await rig.submit()
        await rig.until_running(name, 1)
        other = leasing(
            Rig(tmp_path / "x", clock=rig.clock, shops=rig.shops), "b", take_over="fresha", objects=rig.objects
        )
        await other.start()
        while not first.lost:
            rig.host(name, 1).beat("run")
            await rig.clock.sleep(timedelta(seconds=20))
        assert "process b" in first.hold
        before = rig.grant(name, 1)
        rig.shop.put_machine(attempt_key(INSTALL, JobId("jx"), 9, "fresha"))
        await rig.submit(job(2))
        for _ in range(30):
            rig.host(name, 1).beat("run")
            await rig.clock.sleep(timedelta(seconds=20))
        assert rig.grant(name, 1) == before
        assert len(rig.shop.requests) == 1
        assert len(rig.shop.alive()) == 2
        assert rig.policy.why_paused.startswith("another spotd acts")
    assert rig.log.events().count("install.lost") == 1


async def test_a_store_that_is_away_pauses_purchases_and_nothing_else(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object, **__: object) -> None:
        raise StoreUnavailable("no answer")

    lease = leasing(rig, "a")
    async with held(rig, lease):
        name = await rig.submit()
        await rig.until_running(name, 1)
        with monkeypatch.context() as patched:
            patched.setattr(rig.objects, "list", away)
            await rig.clock.sleep(timedelta(minutes=15))
            assert "was renewed last" in lease.hold
            assert len(rig.shop.alive()) == 1
        await rig.until(lambda: lease.hold == "")


async def test_a_lease_is_in_doubt_by_the_time_since_it_was_asked_to_be_renewed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, real = [0.0], rig.objects.list
    lease = leasing(rig, "a", seconds=lambda: now[0])
    await lease.start()

    def slow(prefix: str) -> Iterator[ObjectInfo]:
        now[0] += 100
        return real(prefix)

    monkeypatch.setattr(rig.objects, "list", slow)
    await lease.controller.run_once()
    now[0] = DOUBT_S + 1
    assert "was renewed last" in lease.hold


async def test_a_daemon_that_cannot_ask_for_its_lease_ends_no_orphan_before_it_holds_it_for_sure(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one may have taken a lease that was silent, with the identity, and buy machines that this one lists."""

    def away(*_: object, **__: object) -> None:
        raise StoreUnavailable("no answer")

    lease = leasing(rig, "a")
    async with held(rig, lease):
        with monkeypatch.context() as patched:
            patched.setattr(rig.objects, "list", away)
            await rig.until(lambda: "was renewed last" in lease.hold)
            rig.shop.put_machine(attempt_key(INSTALL, JobId("jx"), 9, "fresha"))
            await rig.clock.sleep(timedelta(minutes=30))
            assert len(rig.shop.alive()) == 1
        await rig.until(lambda: not rig.shop.alive())


async def test_a_first_start_without_the_store_goes_on_once_it_is_back(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object, **__: object) -> None:
        raise StoreUnavailable("no answer")

    lease = leasing(rig, "a")
    with monkeypatch.context() as patched:
        patched.setattr(rig.objects, "list", away)
        await lease.start()
        assert "is not known: no answer" in lease.hold
    await lease.controller.run_once()
    assert lease.hold == ""


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"schema": 9}', b"\xff", b'{"schema":1,"identity":"a b"}'])
async def test_a_lease_that_cannot_be_understood_is_nobody_elses_to_take(rig: Rig, raw: bytes) -> None:
    rig.objects.put(lease_key(INSTALL, 3), raw)
    with pytest.raises(StoreError, match="cannot be understood"):
        find_lease(rig.objects, INSTALL)
    lease = leasing(rig, "a")
    await lease.start()
    assert "cannot be understood" in lease.hold


async def test_of_two_that_claim_at_once_one_wins(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = leasing(rig, "a")
    second = leasing(Rig(tmp_path / "x", clock=rig.clock, shops=rig.shops), "b", objects=rig.objects)
    real = rig.objects.put
    racing = [True]

    def slow(key: str, data: bytes, *, create_only: bool = False) -> object:
        if create_only and racing.pop():
            racing.append(False)
            rig.objects.put(
                key, json.dumps({**json.loads(data), "holder": "process b", "nonce": "b", "places": []}).encode()
            )
            return real(key, data, create_only=True)
        return real(key, data, create_only=create_only)

    monkeypatch.setattr(rig.objects, "put", slow)
    await first.start()
    assert not first.may_write
    with pytest.raises(InstallTaken, match="process b"):
        await first.controller.run_once()
    del second


# --- two stores, one account ---


@pytest.mark.lengthy
async def test_two_installs_of_one_label_in_one_account_stop_buying_and_name_each_other(tmp_path: Path) -> None:
    clock = VirtualClock()
    shop = Shop(clock)
    a, b = (Rig(tmp_path / name, clock=clock, shops=[shop], read_every_s=20.0, list_every_s=20.0) for name in "ab")
    one, two = leasing(a, "a"), leasing(b, "b")
    async with held(a, one), held(b, two):
        for rig in (a, b):
            for number in range(1, 4):
                await rig.submit(job(number))
        for _ in range(90):
            await clock.sleep(timedelta(seconds=20))
            for rig in (a, b):
                for number in range(1, 4):
                    for attempt in rig.attempts(JobId(f"j{number}")):
                        rig.host(attempt.id.job, attempt.id.number).beat("run")
        assert len(shop.requests) <= 8
        assert not shop.ended_at
        assert "identity freshb; this one is fresha" in one.hold
        assert "identity fresha; this one is freshb" in two.hold
        assert "spotd-lab.freshb-" in a.policy.why_paused
    assert a.log.events().count("install.strange_machines") == 1
