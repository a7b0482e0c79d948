"""Ends and reloads: nothing under way is dropped, machines stay, and a bad config keeps the old one."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import anyio
import pytest

from spotd.core.domain.states import AttemptState
from spotd.daemon.install import BadConfig, require_same_install
from spotd.daemon.policy import Settings
from spotd.service.lifecycle import SHUTTING_DOWN, Lifecycle, SystemdNotifier
from spotd_providers.contract.values import InstallId, MicroUsd
from tests.unit.core.builders import job
from tests.unit.daemon.rig import Rig
from tests.unit.daemon.shop import Hang

pytestmark = pytest.mark.anyio


class Told(SystemdNotifier):
    """A service manager that keeps what it hears."""

    def __init__(self) -> None:
        super().__init__({})
        self.heard: list[str] = []

    def _send(self, message: str) -> None:
        self.heard.append(message.partition("\n")[0])


def settings(folder: Path) -> Settings:
    def no_store() -> None:
        raise NotImplementedError

    return Settings(
        install=InstallId("lab"),
        state_dir=folder,
        state_url=":memory:",
        socket=folder / "s",
        store_place="here",
        open_objects=no_store,  # type: ignore[arg-type]  # never opened in these tests
        providers=(),
    )


class Desk:
    def __init__(self, rig: Rig) -> None:
        self.told = Told()
        self.applied: list[Settings] = []
        self.next: Settings | BadConfig = settings(rig.folder)
        self.lifecycle = Lifecycle(
            settings=settings(rig.folder),
            load=self._load,
            apply=self.applied.append,
            policy=rig.policy,
            control_loop=rig.control_loop,
            executor=rig.executor,
            notify=self.told,
            log=rig.log,
        )

    async def _load(self) -> Settings:
        if isinstance(self.next, BadConfig):
            raise self.next
        return self.next


class numbers:  # noqa: N801 - read as a call at its uses
    """These signals, and then none for ever."""

    def __init__(self, *given: signal.Signals) -> None:
        self._left = list(given)

    def __aiter__(self) -> AsyncIterator[signal.Signals]:
        return self

    async def __anext__(self) -> signal.Signals:
        if not self._left:
            await anyio.sleep_forever()
        return self._left.pop(0)


async def test_on_sigterm_nothing_new_is_bought_and_machines_stay(rig: Rig) -> None:
    desk = Desk(rig)
    async with rig.running():
        name = await rig.submit()
        await rig.until_running(name, 1)
        await desk.lifecycle.run(numbers(signal.SIGTERM))
        await rig.submit(job(2))
        await rig.clock.sleep(timedelta(minutes=1))
        assert rig.policy.current.launches_paused == SHUTTING_DOWN
    assert len(rig.shop.requests) == 1
    assert [m.key for m in rig.shop.alive()] == ["spotd-lab-j1-1"]
    assert desk.told.heard == ["STOPPING=1"]


async def test_the_next_start_adopts_what_was_left(rig: Rig) -> None:
    desk = Desk(rig)
    async with rig.running():
        name = await rig.submit()
        await rig.until_running(name, 1)
        await desk.lifecycle.run(numbers(signal.SIGTERM))
    reborn = rig.reborn()
    reborn.policy.paused = ""
    async with reborn.running():
        reborn.host(name, 1).beat("run")
        await reborn.clock.sleep(timedelta(seconds=40))
        assert [a.state for a in reborn.attempts(name)] == [AttemptState.RUNNING]
    assert len(reborn.shop.requests) == 1


async def test_a_call_under_way_is_finished_and_committed_before_the_end(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(rig)
    real = rig.shop.launch

    async def slow(request: object) -> object:
        await anyio.sleep(10)
        return await real(request)  # type: ignore[arg-type]  # handed through unchanged

    monkeypatch.setattr(rig.shop, "launch", slow)
    async with rig.running():
        name = await rig.submit()
        await rig.until(lambda: rig.executor.busy == 1)
        await desk.lifecycle.run(numbers(signal.SIGTERM))
        assert rig.attempts(name)[0].ref is not None


async def test_a_call_that_never_answers_delays_the_end_only_so_long(rig: Rig) -> None:
    rig.shop.faults["launch"].append(Hang())
    desk = Desk(rig)
    async with rig.running():
        await rig.submit()
        await rig.until(lambda: rig.executor.busy == 1)
        began = rig.clock.now()
        await desk.lifecycle.run(numbers(signal.SIGTERM))
        assert rig.clock.now() - began <= timedelta(seconds=35)


async def test_a_second_signal_ends_the_waiting(rig: Rig) -> None:
    rig.shop.faults["launch"].append(Hang())
    desk = Desk(rig)
    async with rig.running():
        await rig.submit()
        await rig.until(lambda: rig.executor.busy == 1)
        began = rig.clock.now()
        await desk.lifecycle.run(numbers(signal.SIGTERM, signal.SIGTERM))
        assert rig.clock.now() - began <= timedelta(seconds=1)


async def test_a_reloaded_config_is_applied_and_its_changes_are_told(rig: Rig) -> None:
    desk = Desk(rig)
    desk.next = replace(settings(rig.folder), budget_day=MicroUsd(5_000_000), store_place="elsewhere")
    await desk.lifecycle.reload()
    assert desk.applied == [desk.next]
    (line,) = rig.log.lines
    assert (line["event"], line["changed"], line["needs_restart"]) == (
        "config.reloaded",
        ["[budget] day"],
        ["[store]"],
    )
    assert desk.told.heard == ["RELOADING=1", "READY=1"]


async def test_a_bad_config_keeps_the_old_one_and_says_why(rig: Rig) -> None:
    desk = Desk(rig)
    desk.next = BadConfig("config.toml:3: budget.day: must be above 0")
    await desk.lifecycle.reload()
    assert desk.applied == []
    (line,) = rig.log.lines
    assert line["event"] == "config.refused"
    assert "must be above 0" in line["error"]
    assert desk.told.heard == ["RELOADING=1", "READY=1"]


async def test_on_a_reload_the_label_of_the_machines_stays_with_a_warning(rig: Rig) -> None:
    desk = Desk(rig)
    desk.next = replace(settings(rig.folder), install=InstallId("other"), budget_day=MicroUsd(5_000_000))
    for _ in range(2):
        await desk.lifecycle.reload()
        assert desk.applied[-1].install == "lab"
        warning, told = rig.log.lines[-2:]
        assert (warning["event"], warning["kept"], warning["configured"]) == ("config.install_kept", "lab", "other")
        assert "[daemon] install" in told["needs_restart"]
    assert desk.applied[-1].budget_day == 5_000_000


async def test_a_renamed_install_is_refused_while_machines_run_and_names_them(rig: Rig) -> None:
    async with rig.running():
        name = await rig.submit()
        await rig.until_running(name, 1)
    machines = rig.store.read(lambda reads: reads.open_machines())
    require_same_install(InstallId("lab"), machines)
    for other in ("la", "lab-2", "mine"):
        with pytest.raises(BadConfig, match=r"m1 at shop \(spotd-lab-j1-1\)") as caught:
            require_same_install(InstallId(other), machines)
        assert 'write install = "lab" again' in str(caught.value)


async def test_an_install_may_be_renamed_once_no_machine_is_left(rig: Rig) -> None:
    async with rig.running():
        name = await rig.submit()
        host = await rig.until_running(name, 1)
        host.exit("succeeded")
        await rig.until(lambda: not rig.shop.not_gone() and not rig.store.read(lambda reads: reads.open_machines()))
    require_same_install(InstallId("mine"), rig.store.read(lambda reads: reads.open_machines()))
