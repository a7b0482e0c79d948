"""What protects machines and money is connected: the promises of the parts, seen through the whole daemon."""

from __future__ import annotations

import os
import signal
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest

from spotd.client.asynchronous import AsyncDaemon
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.plan import Event, Plan
from spotd.core.domain.states import AttemptState
from spotd.daemon import object_keys, recovery_survey
from spotd.daemon.clock import Computer
from spotd.daemon.commits import never
from spotd.daemon.hosts.limits import FloodLimits
from spotd.daemon.install import BadConfig, InstallTaken
from spotd.daemon.log import Redactor
from spotd.daemon.policy import ProviderSettings, Settings
from spotd.service import lifecycle
from spotd.service.composition import App
from spotd.service.lifecycle import load_in_time
from spotd.store import SecretsKeys, Store
from spotd_jobs.objects.api import ObjectInfo, StoreUnavailable
from spotd_jobs.objects.folder import FolderStore
from spotd_providers.contract.provider import Provider, ProviderTraits
from spotd_providers.contract.values import InstallId
from tests.unit.core.builders import NOW, SHOP, job, world_with
from tests.unit.daemon.clocks import VirtualClock
from tests.unit.daemon.rig import Log, Rig
from tests.unit.daemon.shop import Shop
from tests.unit.daemon.test_install_lease import leasing

pytestmark = pytest.mark.anyio

SCALE = 60.0
"""Seconds of the daemon in one of the test's."""
PATIENCE_S = 60.0
FLOOD = FloodLimits(objects_day=7)


@pytest.fixture
def anyio_backend() -> str:
    """The daemon that is put together runs on asyncio, with the computer's own clock."""
    return "asyncio"


class Accounts(Shop):
    """A marketplace whose key belongs to the account `second`."""

    async def account(self) -> str:
        return "second"


class Plugin:
    """A plugin that opens a provider of the test."""

    name = SHOP
    title = "the shop"
    settings_model = dict
    needs_credential = False

    def __init__(self, provider: Provider) -> None:
        self._provider = provider
        self.services: object = None

    def traits(self, settings: object) -> ProviderTraits:
        return ProviderTraits(start_script_bytes_max=10_000, hosts_share_filesystem=True)

    @asynccontextmanager
    async def open(self, settings: object, services: object) -> AsyncIterator[Provider]:
        self.services = services
        yield self._provider


class SlowStore(FolderStore):
    """A store that lists no launches for a while."""

    away = True

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        if self.away and "/launches/" in prefix:
            raise StoreUnavailable("no answer")
        return super().list(prefix)


def settings_in(folder: Path, objects: FolderStore, shop: Shop | None = None) -> Settings:
    plugin: Any = None if shop is None else Plugin(shop)
    provider = ProviderSettings(
        name=SHOP, title="the shop", enabled=True, fee_ppm=1_000_000, poll_every=timedelta(minutes=1), plugin=plugin
    )
    return Settings(
        install=InstallId("lab"),
        state_dir=folder,
        state_url=folder / "state.sqlite",
        socket=folder / "s.sock",
        store_place="a folder",
        open_objects=lambda: objects,
        providers=() if shop is None else (provider,),
        clock_scale=SCALE,
    )


@asynccontextmanager
async def running(settings: Settings, computer: Computer | None = None) -> AsyncIterator[Log]:
    """Run the daemon until it is ready, and end it by a signal afterwards."""
    app = App(settings, load=lambda: settings, redactor=Redactor(), crash=never, computer=computer)
    app.log = log = Log()
    async with anyio.create_task_group() as group:
        group.start_soon(app.run)
        await until(lambda: "daemon.ready" in log.events(), "the daemon is ready")
        try:
            yield log
        finally:
            os.kill(os.getpid(), signal.SIGTERM)


async def until(holds: Callable[[], bool], what: str) -> None:
    with anyio.move_on_after(PATIENCE_S):
        while not holds():  # noqa: ASYNC110 - a log tells no event
            await anyio.sleep(0.02)
        return
    pytest.fail(f"waited {PATIENCE_S:.0f} s until {what}")


def stored(folder: Path, plan: Plan) -> None:
    folder.mkdir(exist_ok=True)
    events = [Event(at=NOW, kind="test", message="", job=each, attempt=None) for each in plan.jobs]
    events += [Event(at=NOW, kind="test", message="", job=each.job, attempt=each.number) for each in plan.attempts]
    plan = replace(plan, events=tuple(events))
    with Store.open(folder / "state.sqlite") as store:
        store.tx(lambda tx: tx.commit(plan))


def with_a_machine(folder: Path, **changes: Any) -> Attempt:
    """Fill the state with a job whose machine runs."""
    world = world_with(AttemptState.RUNNING)
    (item,) = world.attempts.values()
    item = replace(item, **changes)
    stored(folder, Plan(jobs=world.jobs, attempts={item.id: item}, intents=world.intents))
    return item


def attempts_made(folder: Path) -> int:
    """Return the number of the job's newest attempt, while the daemon holds its state."""
    with closing(sqlite3.connect(f"file:{folder / 'state.sqlite'}?mode=ro", uri=True)) as state:
        (found,) = state.execute("SELECT attempts_made FROM jobs").fetchone()
    return int(found)


async def test_an_install_that_was_renamed_while_a_machine_runs_is_refused(tmp_path: Path) -> None:
    item = with_a_machine(tmp_path)
    renamed = replace(settings_in(tmp_path, FolderStore(tmp_path / "objects")), install=InstallId("other"))
    app = App(renamed, load=lambda: renamed, redactor=Redactor(), crash=never)
    with pytest.raises(BadConfig, match=str(item.key)):
        await app.run()


async def test_a_config_that_is_read_while_another_leads_holds_but_for_what_is_in_use(tmp_path: Path) -> None:
    settings = settings_in(tmp_path, FolderStore(tmp_path / "objects"))
    keys = SecretsKeys(error="new")
    fresh = replace(settings, secrets_keys=keys, install=InstallId("other"), socket=tmp_path / "other", flood=FLOOD)
    app = App(settings, load=lambda: fresh, redactor=Redactor(), crash=never)
    app.log = log = Log()
    await app._reload()
    assert app.settings == app.reloaded == replace(fresh, install=settings.install, socket=settings.socket)
    (line,) = log.lines
    assert line["changed"] == ["[daemon] secrets_key", "[store] flood limits"]
    assert line["needs_restart"] == ["[daemon] install", "the socket's path"]


async def test_a_config_that_does_not_come_in_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()

    def load() -> Settings:
        answers.wait(PATIENCE_S)
        raise AssertionError("it was waited for")

    monkeypatch.setattr(lifecycle, "LOAD_S", 0.05)
    try:
        with pytest.raises(BadConfig, match="could not be read within"):
            await load_in_time(load)
    finally:
        answers.set()


async def test_a_second_daemon_over_the_same_store_is_refused(tmp_path: Path) -> None:
    first = Rig(tmp_path / "first")
    await leasing(first, "a").start()
    (tmp_path / "second").mkdir(mode=0o700)
    settings = settings_in(tmp_path / "second", FolderStore(tmp_path / "first" / "objects"))
    app = App(settings, load=lambda: settings, redactor=Redactor(), crash=never)
    with anyio.fail_after(PATIENCE_S), pytest.raises(InstallTaken):
        await app.run()


async def test_what_a_killed_upload_left_is_gone_after_a_start(tmp_path: Path) -> None:
    left = tmp_path / "spool" / "half.tar.gz"
    left.parent.mkdir()
    left.write_bytes(b"half")

    async with running(settings_in(tmp_path, FolderStore(tmp_path / "objects"))):
        assert not left.exists()


async def test_nothing_is_bought_before_the_store_was_asked_and_used_numbers_are_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery_survey, "RETRY_S", 0.2)
    objects = SlowStore(tmp_path / "objects")
    shop = Shop(VirtualClock())
    stored(tmp_path, Plan(jobs={job().id: job()}))
    objects.put(object_keys.launch_key(job().id, 7), b"unreadable")

    async with running(settings_in(tmp_path, objects, shop)):
        await until(lambda: shop.counts["offers"] > 2, "offers were listed again")
        assert not shop.requests
        objects.away = False
        await until(lambda: attempts_made(tmp_path) == 7, "the number of the launch record is known")
    assert not shop.requests


class Dated(FolderStore):
    """A store whose answers have dates."""

    date_shown: Callable[[datetime], None]


async def test_a_clock_that_a_provider_and_the_store_show_to_be_wrong_is_an_event_and_a_line_of_doctor(
    tmp_path: Path,
) -> None:
    shop, objects = Shop(VirtualClock()), Dated(tmp_path / "objects")
    objects.date_shown = print
    settings = settings_in(tmp_path, objects, shop)
    plugin: Any = settings.providers[0].plugin

    async with running(settings, Computer(compare_every_s=0.02)):
        await until(lambda: plugin.services is not None, "the provider is open")
        assert await of_clock(settings.socket) == []
        for show in (plugin.services.date_shown, objects.date_shown):
            show(datetime.now(UTC) + timedelta(hours=5))
        await until(lambda: "clock.wrong" in events(tmp_path), "the clock was compared")
        [(is_right, words)] = await of_clock(settings.socket)
        assert (is_right, "behind those of shop and the checkpoint store" in words) == (False, True), words


async def of_clock(socket: Path) -> list[tuple[bool, str]]:
    rows = (await AsyncDaemon(socket).doctor())["checks"]
    return [(row["ok"], row["detail"]) for row in rows if (row["area"], row["name"]) == ("daemon", "clock")]


def events(folder: Path) -> list[str]:
    with closing(sqlite3.connect(f"file:{folder / 'state.sqlite'}?mode=ro", uri=True)) as state:
        return [str(kind) for (kind,) in state.execute("SELECT kind FROM events")]


async def test_a_key_of_another_account_than_the_machines_is_named_and_ends_nothing(tmp_path: Path) -> None:
    shop = Accounts(VirtualClock())
    with_a_machine(tmp_path, account="first")

    async with running(settings_in(tmp_path, FolderStore(tmp_path / "objects"), shop)) as log:
        await until(lambda: "provider.other_account" in log.events(), "the other account is named")
        await until(lambda: shop.counts["instances"] > 2, "machines were listed again")
    assert shop.counts["terminate"] == 0
