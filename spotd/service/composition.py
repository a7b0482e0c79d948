"""Puts the daemon together and keeps it running: one task group, every task with a name.

Order of the start: socket (a second daemon is refused before it touches anything), state (migrations), what a former
process left (adopted), API, providers. Launches stay paused until every provider has listed its machines once or has
had its time for it, so that nothing is bought before it is known what runs.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio
import anyio.abc
import anyio.to_thread

from spotd.api.handlers import HandlerContext, Handlers
from spotd.core.domain.policy import Policy
from spotd.core.domain.states import InvariantBroken
from spotd.daemon import log as logs
from spotd.daemon.clock import Computer, SystemClock, begin_timeline
from spotd.daemon.commits import CrashPoints, Database
from spotd.daemon.install import (
    BadConfig,
    Holder,
    new_identity,
    require_same_install,
    this_holder,
)
from spotd.daemon.lease_controller import LeaseController
from spotd.daemon.log import Redactor
from spotd.daemon.policy import Settings, changes, may_be_own
from spotd.service import lifecycle as sockets
from spotd.service import memory
from spotd.service.accelerated import open_clock
from spotd.service.lifecycle import Reload, load_in_time, signals
from spotd.service.parts import TAKING_STOCK, DaemonParts, ProcessParts, program_version
from spotd.store import POSTGRES, StateError, StateUnavailable, Store, StoreInUse

if TYPE_CHECKING:
    from starlette.applications import Starlette


STOCK_DEADLINE_S: Final = 10.0
API_CLOSE_S: Final = 3.0
LEAD_CHECK_S: Final = 0.5
IN_USE: Final = ("install", "state_dir", "state_url", "socket", "api_address", "clock_scale", "clock_start")
"""Settings that hold from the start of the process on, also while another one leads."""


class DaemonEnded(Enum):
    """Why a run of the daemon is over."""

    BY_SIGNAL = "by_signal"
    CLOCK_SET = "clock_set"
    """The next run gives the timeline its new date."""
    LEAD_LOST = "lead_lost"
    """Another process may lead the state: the next run waits until this one may again, and reads everything anew."""


class App(ProcessParts):
    """One daemon over one state folder, for one run."""

    def __init__(
        self,
        settings: Settings,
        *,
        load: Reload,
        redactor: Redactor,
        crash: CrashPoints,
        computer: Computer | None = None,
        has_led: bool = False,
    ) -> None:
        """Make it. `has_led`: this process led until a moment ago, so a state that is away is waited for."""
        super().__init__(settings, redactor=redactor, crash=crash, computer=computer or Computer())
        self._waits_for = (StoreInUse, StateUnavailable) if has_led else (StoreInUse,)
        self._load = load

    async def run(self) -> DaemonEnded:
        """Run until a signal ends it, or until the computer's clock was set.

        Raises:
            SocketRefused, StateError, StoreError, ClockFileBroken: it could not start.
            InvariantBroken: it had to stop.
        """
        settings = self.settings  # what is in use from here on: `_reload` changes none of it
        settings.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        clock = open_clock(settings.state_dir, scale=settings.clock_scale, begin=settings.clock_start)
        bound = sockets.bind(settings.socket)
        try:
            async with signals() as received, self._listening(), self._state(bound.socket, received) as store:
                if store is None:
                    return DaemonEnded.BY_SIGNAL
                require_same_install(settings.install, store.read(lambda reads: reads.open_machines()))
                settings = self.settings
                objects = await anyio.to_thread.run_sync(settings.open_objects)
                database = Database(store)
                leasing = LeaseController(
                    objects,
                    install=settings.install,
                    me=await this_holder(database, settings.state_dir, settings.state_url),
                    fresh=new_identity(),
                    take_over=settings.take_over,
                    database=database,
                    log=logs.get("install"),
                    seconds=self.computer.uptime_s,
                )
                await leasing.start()
                timeline = None
                if isinstance(clock, SystemClock):
                    world_policy = Policy(install=settings.install, providers={})
                    timeline = begin_timeline(store, world_policy, self.computer, self.log)
                daemon = DaemonParts(self, database, objects, clock, leasing, timeline)
                names = sorted(daemon.hosting.entries)
                self.log.info("daemon.starting", version=program_version(), install=settings.install, providers=names)
                for warning in settings.warnings:
                    self.log.warning("config.warning", warning=warning)
                return await self._serve(daemon, bound.socket, received)
        finally:
            bound.close()

    @asynccontextmanager
    async def _state(self, sock: socket.socket, received: AsyncIterator[signal.Signals]) -> AsyncIterator[Store | None]:
        url, has_waited = self.settings.state_url, False
        store: Store | None
        try:
            store = await anyio.to_thread.run_sync(Store.open, url)
        except self._waits_for as error:
            if isinstance(url, Path) or not url.startswith(f"{POSTGRES}://"):
                raise
            store = await self._wait(url, error, sock, received)
            has_waited = True
        try:
            if has_waited and store is not None:
                await self._reload()  # what came meanwhile, or while the signal for it was lost in the wait's end
            yield store
        finally:
            if store is not None:
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(store.close)

    @asynccontextmanager
    async def _listening(self) -> AsyncIterator[None]:
        """Take connections of users, where the config says so, also while another process leads."""
        if self.settings.api_address is None:
            yield
            return
        from spotd.service.team import TeamListener

        self.team = TeamListener(self.settings, self.settings.api_address, log=logs.get("team"))
        async with anyio.create_task_group() as group:
            group.start_soon(self.team.run, name="team")
            yield
            group.cancel_scope.cancel()

    @asynccontextmanager
    async def _serve_team(self, daemon: DaemonParts, api: Starlette, closing: anyio.Event) -> AsyncIterator[None]:
        """Answer users, and let their requests end before what answers them does."""
        if self.team is not None:
            daemon.serve_team(self.team, api)
            self.team.lead(daemon.context.database)
        try:
            yield
        finally:
            closing.set()
            if self.team is not None:
                with anyio.CancelScope(shield=True):
                    await self.team.end_requests()

    async def _wait(
        self, url: str, error: StateError, sock: socket.socket, received: AsyncIterator[signal.Signals]
    ) -> Store | None:
        """Return the state once this process leads it, `None` where a signal came before; answer requests till then."""
        from spotd.service.http_server import wait_to_lead
        from spotd.service.waiting import DatabaseReads, WaitingApp

        reads = DatabaseReads(url, self._only_reading, why=lambda: app.reason.message, on_failure=self._api_failed)
        app = WaitingApp(error, keys=lambda: self.settings.secrets_keys, reads=reads, log=self.log)

        async def reload() -> None:
            await self._reload()
            await reads.close()

        if self.team is not None:
            self.team.gate.app = app
        try:
            async with self._metrics_while_waiting():
                return await wait_to_lead(url, app, sock, received, notify=self.notify, log=self.log, reload=reload)
        finally:
            if self.team is not None:
                self.team.gate.reset()
            with anyio.CancelScope(shield=True):
                await reads.close()

    @asynccontextmanager
    async def _metrics_while_waiting(self) -> AsyncIterator[None]:
        """Serve the figures of this very process where the config says so, or a waiting daemon would seem down."""
        address = self.settings.metrics_address
        if (address is None and self.team is None) or find_spec("prometheus_client") is None:
            yield
            return
        from spotd.service.metrics_listener import MetricsListener, text_of_waiting

        log = logs.get("metrics")
        text = text_of_waiting(program_version(), log=log)
        if self.team is not None:
            self.team.gate.metrics = text.get
        async with anyio.create_task_group() as group:
            if address is not None:
                group.start_soon(MetricsListener(*address, text, log=log).run, name="metrics")
            yield
            group.cancel_scope.cancel()

    async def _only_reading(self, store: Store) -> HandlerContext:
        """Return the parts of a daemon of which nothing runs."""
        settings, database = self.settings, Database(store)
        objects = await anyio.to_thread.run_sync(settings.open_objects)
        leasing = LeaseController(
            objects,
            install=settings.install,
            me=Holder(words="", places=frozenset(), nonce=""),
            fresh="",
            take_over=settings.take_over,
            database=database,
            log=logs.get("install"),
            seconds=self.computer.uptime_s,
        )
        clock = open_clock(settings.state_dir, scale=settings.clock_scale, begin=settings.clock_start)
        return DaemonParts(self, database, objects, clock, leasing).context

    async def _reload(self) -> None:
        """Read the config again while another process leads, and once this one does: what is in use already stays."""
        try:
            fresh = await load_in_time(self._load)
        except BadConfig as exc:
            self.log.error("config.refused", error=str(exc), kept="the config that was in force")  # noqa: TRY400 - no traceback
            return
        was = self.settings
        kept = {name: getattr(was, name) for name in IN_USE}
        self.settings = self.reloaded = replace(fresh, **kept)
        self.redactor.register(fresh.secrets)
        if self.team is not None:
            self.team.reload(fresh)
        at_once, later = changes(was, self.settings)
        self.log.info("config.reloaded", changed=[*at_once, *later], needs_restart=changes(self.settings, fresh)[1])

    async def _serve(
        self, daemon: DaemonParts, sock: socket.socket, received: AsyncIterator[signal.Signals]
    ) -> DaemonEnded:
        from spotd.api.app import make_app

        closing, started, closed = anyio.Event(), anyio.Event(), anyio.Event()
        try:
            await daemon.control_loop.adopt()
        except InvariantBroken as exc:
            # The loop tries again, and holds until it works: to end would end no machine, at each start again.
            self.log.warning("state.not_adopted", error=str(exc))
        await daemon.forget_secrets_of_no_job()
        api = make_app(Handlers(daemon.context), on_failure=self._api_failed, closing=closing)
        async with self._serve_team(daemon, api, closing), anyio.create_task_group() as group:
            group.start_soon(_serving, api, sock, started, closing, closed, name="api")
            group.start_soon(daemon.executor.run, name="executor")
            group.start_soon(daemon.surveyor.run, name="recovery-survey")
            group.start_soon(daemon.price_recorder.run, name="price-recorder")
            for controller in daemon.controllers:
                group.start_soon(controller.run, name=controller.name)
            daemon.hosting.start(group)
            if address := self.settings.metrics_address:
                group.start_soon(_serve_metrics, daemon, *address, name="metrics")
            group.start_soon(self._take_stock, daemon, name="stock")
            group.start_soon(_give_back_memory, name="memory")
            await started.wait()
            self.notify.ready()
            memory.begin_gc()
            self.log.info("daemon.ready", socket=str(self.settings.socket), state=str(self.settings.state_dir))
            lifecycle = daemon.lifecycle(self._load, group)
            if daemon.timeline is not None:
                group.start_soon(lifecycle.end_when, daemon.date_wanted, name="clock")
            group.start_soon(self._end_when_lost, daemon.context.database, group.cancel_scope, name="lead")
            await lifecycle.run(received)
            closing.set()
            with anyio.move_on_after(API_CLOSE_S):
                await closed.wait()
            group.cancel_scope.cancel()
        for controller in daemon.controllers:
            self.log.info("controller.metrics", controller=controller.name, **asdict(controller.metrics))
        if daemon.context.database.is_lost:
            return DaemonEnded.LEAD_LOST
        if lifecycle.begins_anew:
            self.log.info("daemon.begins_anew", reason="the computer's clock was set")
            return DaemonEnded.CLOCK_SET
        self.log.info("daemon.stopped")
        return DaemonEnded.BY_SIGNAL

    async def _take_stock(self, daemon: DaemonParts) -> None:
        """Allow launches once it is known what runs; a provider that is away delays them only so long."""
        own = may_be_own(daemon.policy.current, daemon.hosting.traits)
        await daemon.price_recorder.recall(own, daemon.offer_cache.evidence.note_kinds)
        await daemon.control_loop.whole_cycle(seconds=STOCK_DEADLINE_S)  # only the state knows where machines may be
        late = await daemon.hosting.stock_taken(seconds=STOCK_DEADLINE_S)
        if late:
            self.log.warning("daemon.stock_incomplete", providers=late)
        await daemon.control_loop.whole_cycle(seconds=STOCK_DEADLINE_S)
        if daemon.policy.paused == TAKING_STOCK:
            daemon.policy.paused = ""
            daemon.control_loop.only_reconciles = False
            daemon.wake_event.notify()

    async def _end_when_lost(self, database: Database, scope: anyio.CancelScope) -> None:
        """End everything at once when another process may lead: what this one still did would be the other's to do."""
        while not database.is_lost:  # noqa: ASYNC110 - a thread of the state's finds it out
            await anyio.sleep(LEAD_CHECK_S)
        # Before the end, which a transaction that gets no answer may put off.
        self.log.error("daemon.lead_lost", reason="another spotd may lead this state; machines are left running")
        scope.cancel()

    def _api_failed(self, route: str, error: Exception) -> None:
        self.log.error("api.failed", route=route, exc_info=error)


async def _give_back_memory() -> None:
    while True:
        for _ in range(memory.SEARCH_EVERY):
            await anyio.sleep(memory.GIVE_BACK_EVERY_S)
            memory.give_back()
        memory.search()


async def _serving(
    api: Starlette, sock: socket.socket, started: anyio.Event, closing: anyio.Event, closed: anyio.Event
) -> None:
    from spotd.service.http_server import serve

    try:
        await serve(api, sock, started=started, closing=closing)
    finally:
        closed.set()


async def _serve_metrics(daemon: DaemonParts, host: str, port: int) -> None:
    from spotd.service.metrics_listener import make_listener

    controllers = (*daemon.controllers, daemon.price_recorder.controller)
    await make_listener(host, port, daemon.context, controllers, log=logs.get("metrics")).run()
