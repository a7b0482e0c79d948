"""Puts the daemon together and keeps it running: one task group, every task with a name.

Order of the start: socket (a second daemon is refused before it touches anything), state (migrations), what a former
process left (adopted), API, providers. Launches stay paused until every provider has listed its machines once or has
had its time for it, so that nothing is bought before it is known what runs.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from enum import Enum
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from random import SystemRandom
from typing import TYPE_CHECKING, Final

import anyio
import anyio.abc
import anyio.to_thread

from spotd.api.handlers import HandlerContext, Handlers
from spotd.core.domain.intents import AttemptId
from spotd.core.domain.policy import Policy, registry_server
from spotd.core.domain.states import InvariantBroken
from spotd.daemon import log as logs
from spotd.daemon.clock import Computer, SteadyClock, SystemClock, Timeline, begin_timeline
from spotd.daemon.commits import Commits, CrashPoints, Database, PolicyHolder
from spotd.daemon.control_loop import ControlLoop, Housekeeping, read_pace_s
from spotd.daemon.controllers import WakeEvent
from spotd.daemon.datasets import DatasetGarbage, Datasets
from spotd.daemon.executor import Executor
from spotd.daemon.garbage import EndedGarbage
from spotd.daemon.grants.builder import GrantBuilder, RunnerBundle
from spotd.daemon.grants.inputs import JobSecrets, SecretFiles
from spotd.daemon.grants.secret_rows import SecretRows
from spotd.daemon.grants.writer import GrantWriter
from spotd.daemon.hosts.monitor import HostMonitor, use_of
from spotd.daemon.hosts.reader import last_lines
from spotd.daemon.install import (
    BadConfig,
    Holder,
    JobIds,
    folder_hash,
    new_identity,
    other_account_words,
    require_same_install,
    this_holder,
)
from spotd.daemon.job_records import JobRecords
from spotd.daemon.lease_controller import LeaseController
from spotd.daemon.log import Redactor
from spotd.daemon.market.late_causes import CauseCheck
from spotd.daemon.market.offer_cache import OfferCache
from spotd.daemon.market.price_recorder import BillCheck, PriceRecorder
from spotd.daemon.market.shared_prices import SharedPrices
from spotd.daemon.market.supervisor import ProviderSupervisor
from spotd.daemon.policy import ChannelSettings, Settings, build_policy, changes, may_be_own
from spotd.daemon.recovery_survey import RecoverySurvey
from spotd.daemon.remote_data import RemoteData
from spotd.history import HISTORY_FILE, IMPORTED_FILE, History
from spotd.service import lifecycle as code_spool
from spotd.service import lifecycle as sockets
from spotd.service import memory
from spotd.service.accelerated import open_clock, paced, seconds_on_host
from spotd.service.lifecycle import Lifecycle, Reload, SystemdNotifier, load_in_time, signals
from spotd.service.state import SECRETS_FOLDER
from spotd.store import POSTGRES, StateError, StateUnavailable, Store, StoreInUse, parse_place
from spotd_jobs.objects.api import ObjectStore, StoreError
from spotd_jobs.start import SCRIPT_BYTES_MAX, build_runner, start_script
from spotd_providers.contract.provider import Clock
from spotd_providers.contract.values import ProviderName, RegistryLogin

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from spotd.service.metrics_listener import MetricsText
    from spotd.service.team import TeamListener

TAKING_STOCK: Final = "spotd has just started and first asks every provider which machines run"
STOCK_DEADLINE_S: Final = 10.0
OUTPUT_S: Final = 15.0
API_CLOSE_S: Final = 3.0
LEAD_CHECK_S: Final = 0.5
WRITABLE_CHECK: Final = timedelta(seconds=10)
IN_USE: Final = ("install", "state_dir", "state_url", "socket", "api_address", "clock_scale", "clock_start")
"""Settings that hold from the start of the process on, also while another one leads."""


class DaemonEnded(Enum):
    """Why a run of the daemon is over."""

    BY_SIGNAL = "by_signal"
    CLOCK_SET = "clock_set"
    """The next run gives the timeline its new date."""
    LEAD_LOST = "lead_lost"
    """Another process may lead the state: the next run waits until this one may again, and reads everything anew."""


class App:
    """One daemon over one state folder, for one run.

    Attributes:
        reloaded: the settings with which a next run begins.
    """

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
        self._waits_for = (StoreInUse, StateUnavailable) if has_led else (StoreInUse,)
        self.settings = settings
        self.reloaded = settings
        self.computer = computer or Computer()
        self.redactor = redactor
        self.crash = crash
        self.notify = SystemdNotifier()
        self.log = logs.get("daemon")
        self._load = load
        self.team: TeamListener | None = None

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
                daemon = _Daemon(self, database, objects, clock, leasing, timeline)
                names = sorted(daemon.hosting.entries)
                self.log.info("daemon.starting", version=_version(), install=settings.install, providers=names)
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
    async def _serve_team(self, daemon: _Daemon, api: Starlette, closing: anyio.Event) -> AsyncIterator[None]:
        """Answer users, and let their requests end before what answers them does."""
        if self.team is not None:
            daemon.serve_team(self.team, api)
            self.team.lead(daemon.parts.database)
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
        from spotd.service.reads import DatabaseReads
        from spotd.service.waiting import WaitingApp

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
        text = text_of_waiting(_version(), log=log)
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
        return _Daemon(self, database, objects, clock, leasing).parts

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
        self, daemon: _Daemon, sock: socket.socket, received: AsyncIterator[signal.Signals]
    ) -> DaemonEnded:
        from spotd.api.app import make_app

        closing, started, closed = anyio.Event(), anyio.Event(), anyio.Event()
        try:
            await daemon.control_loop.adopt()
        except InvariantBroken as exc:
            # The loop tries again, and holds until it works: to end would end no machine, at each start again.
            self.log.warning("state.not_adopted", error=str(exc))
        await daemon.forget_secrets_of_no_job()
        api = make_app(Handlers(daemon.parts), on_failure=self._api_failed, closing=closing)
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
            group.start_soon(self._end_when_lost, daemon.parts.database, group.cancel_scope, name="lead")
            await lifecycle.run(received)
            closing.set()
            with anyio.move_on_after(API_CLOSE_S):
                await closed.wait()
            group.cancel_scope.cancel()
        for controller in daemon.controllers:
            self.log.info("controller.metrics", controller=controller.name, **asdict(controller.metrics))
        if daemon.parts.database.is_lost:
            return DaemonEnded.LEAD_LOST
        if lifecycle.begins_anew:
            self.log.info("daemon.begins_anew", reason="the computer's clock was set")
            return DaemonEnded.CLOCK_SET
        self.log.info("daemon.stopped")
        return DaemonEnded.BY_SIGNAL

    async def _take_stock(self, daemon: _Daemon) -> None:
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
        await anyio.sleep(memory.GIVE_BACK_EVERY_S)
        memory.give_back()


async def _serving(
    api: Starlette, sock: socket.socket, started: anyio.Event, closing: anyio.Event, closed: anyio.Event
) -> None:
    from spotd.service.http_server import serve

    try:
        await serve(api, sock, started=started, closing=closing)
    finally:
        closed.set()


async def _serve_metrics(daemon: _Daemon, host: str, port: int) -> None:
    from spotd.service.metrics_listener import make_listener

    controllers = (*daemon.controllers, daemon.price_recorder.controller)
    await make_listener(host, port, daemon.parts, controllers, log=logs.get("metrics")).run()


class _Daemon:
    """Every part, connected."""

    def __init__(
        self,
        app: App,
        database: Database,
        objects: ObjectStore,
        clock: Clock,
        leasing: LeaseController,
        timeline: Timeline | None = None,
    ) -> None:
        settings, crash = app.settings, app.crash
        self.timeline = timeline
        self._metrics: MetricsText | None = None
        clock = clock if timeline is None else timeline.clock
        self._app = app
        self._clock = clock
        self._objects = objects
        wall = SystemClock()
        steady = SteadyClock(app.computer.wall(), uptime_s=app.computer.uptime_s)
        chance = SystemRandom()
        self.wake_event = WakeEvent()
        self.price_recorder = PriceRecorder(
            History(settings.state_dir / HISTORY_FILE, imports=settings.state_dir / IMPORTED_FILE),
            clock=clock,
            log=logs.get("history"),
            note=lambda kind, message, at: self.offer_cache.note(kind, message, {}, at=at),
        )
        self.offer_cache = OfferCache(self.wake_event, keep=self.price_recorder.seen)
        self.hosting = ProviderSupervisor(
            settings,
            offer_cache=self.offer_cache,
            clock=clock,
            seed=chance.getrandbits(64),
            log=logs.get("poller"),
            crash=crash,
            world=lambda: None if self.control_loop.state is None else self.control_loop.state.world,
            account_known=self._account_known,
            hide=app.redactor.clean,
            logins=lambda: tuple(app.reloaded.logins.values()),
        )
        self.policy = PolicyHolder(self._policy(settings))
        self.policy.paused = TAKING_STOCK
        self.leasing = leasing
        commits = Commits(database, self.policy, clock, crash)
        app.redactor.register(settings.secrets)
        self.secret_files = SecretFiles(settings.state_dir / SECRETS_FOLDER, app.redactor, crash)
        self.secret_rows: SecretRows | None = None
        secrets: JobSecrets = self.secret_files
        if database.is_shared:
            place = str(parse_place(settings.state_url))
            secrets = self.secret_rows = rows = SecretRows(database, settings.secrets_keys, app.redactor, place)
            self.policy.locked = lambda: rows.locked
        remote = RemoteData(lambda: app.reloaded.remote)
        self.job_records = JobRecords(
            objects,
            world=lambda: None if self.control_loop.state is None else self.control_loop.state.world,
            database=database,
            policy=self.policy,
            clock=clock,
            log=logs.get("job-records"),
            may_write=lambda: leasing.may_write,
        )
        grants = GrantBuilder(
            objects,
            clock=clock,
            wall=wall,
            secrets=secrets,
            bundle=RunnerBundle(data=build_runner()),
            traits=self.hosting.traits,
            crash=crash,
            issued=None if timeline is None else timeline.issued,
            on_host=seconds_on_host(clock),
            remote=remote,
            require_job_record=self.job_records.require,
        )
        self.grant_writer = GrantWriter(
            grants,
            policy=lambda: self.policy.current,
            start_script=self._start_script,
            clock=clock,
            wall=steady,
            log=logs.get("grants"),
            forbidden=lambda: leasing.lost,
        )
        self.surveyor = RecoverySurvey(
            objects, commits=commits, clock=clock, log=logs.get("survey"), count_lost=self.job_records.count_lost
        )
        self.policy.gates += [lambda: leasing.hold, lambda: self.surveyor.hold]
        self.policy.owned = self._with_identity
        shared_by = objects.shared_with_hosts_by
        read_every_s = read_pace_s(clock, shared_by)
        host_monitor = HostMonitor(
            objects,
            clock=clock,
            wall=steady,
            log=logs.get("host-monitor"),
            list_every_s=0.0 if shared_by == "filesystem" else read_every_s,
            limits=settings.flood,
            may_delete=lambda: leasing.may_write,
        )
        self.executor = Executor(
            providers=self.hosting.live,
            install=settings.install,
            commits=commits,
            grants=self.grant_writer,
            clock=clock,
            log=logs.get("executor"),
            loop_wake=self.wake_event,
            list_again=self.hosting.list_again,
            ask_again=self.hosting.ask_again,
            bought=lambda offer: self.offer_cache.bought(offer, at=clock.now()),
            market=self.offer_cache.snapshot,
            crash=crash,
            login=self._login,
        )
        self.control_loop = ControlLoop(
            commits=commits,
            offer_cache=self.offer_cache,
            host_monitor=host_monitor,
            executor=self.executor,
            grant_writer=self.grant_writer,
            clock=clock,
            log=logs.get("control-loop"),
            wake_event=self.wake_event,
            list_again=self.hosting.list_again,
            alive=app.notify.alive,
            watchdog_s=app.notify.watchdog_s,
            read_every_s=read_every_s,
            succeeded=secrets.remove,
            check_owners=leasing.check_owners,
            asks_store=True,
        )
        self.control_loop.only_reconciles = True
        self.housekeeping = Housekeeping(database, clock=clock, log=logs.get("housekeeping"))
        self.retention = EndedGarbage(
            objects,
            commits=commits,
            database=database,
            clock=clock,
            log=logs.get("retention"),
            may_delete=lambda: leasing.may_write,
        )
        self.datasets = Datasets(objects, remote=remote)
        dataset_garbage = DatasetGarbage(
            self.datasets,
            world=lambda: None if self.control_loop.state is None else self.control_loop.state.world,
            wall=wall,
            log=logs.get("retention"),
            may_delete=lambda: leasing.may_write and self.surveyor.done and not self.control_loop.only_reconciles,
        )
        self.bills = BillCheck(
            self.hosting.live, commits=commits, database=database, clock=clock, log=logs.get("bills")
        )
        causes = CauseCheck(self.offer_cache.listings, commits=commits, clock=clock, log=logs.get("late-causes"))
        parts = (self.control_loop, self.grant_writer, leasing, self.retention, self.housekeeping, self.bills)
        others = (dataset_garbage.controller, self.job_records.controller, causes.controller)
        self.controllers = [*(part.controller for part in parts), *others]
        if database.is_shared:
            # Without another daemon there is none to read them.
            shared = SharedPrices(
                objects,
                recorder=self.price_recorder,
                install=settings.install,
                writer=folder_hash(settings.state_dir)[:16],
                clock=clock,
                log=logs.get("history"),
            )
            self.controllers.append(shared.controller)
        spool = settings.state_dir / "spool"
        spool.mkdir(mode=0o700, exist_ok=True)
        code_spool.clear(spool)
        self.parts = HandlerContext(
            clock=clock,
            wall=wall,
            database=database,
            commits=commits,
            policy=self.policy,
            offer_cache=self.offer_cache,
            price_recorder=self.price_recorder,
            control_loop=self.control_loop,
            wake_event=self.wake_event,
            host_monitor=host_monitor,
            objects=objects,
            datasets=self.datasets,
            secrets=secrets,
            surveyor=self.surveyor,
            job_records=self.job_records,
            ids=JobIds(clock, chance),
            providers=self.hosting.entries,
            crash=crash,
            log=logs.get("api"),
            started_at=clock.now(),
            users=lambda: {one.caller.name: one.caller for one in app.reloaded.users},
            spool=spool,
            facts={"version": _version(), "config": settings.config_path, "state_dir": settings.state_dir},
        )
        if settings.channels:
            self._add_notifications(settings.channels)

    async def _output_of(self, attempt: AttemptId) -> list[str]:
        """Return the last lines of an attempt without any secret; none where the store does not give them soon."""
        lines: list[str] = []
        with anyio.move_on_after(OUTPUT_S), suppress(StoreError):
            lines = await anyio.to_thread.run_sync(partial(last_lines, self._objects, attempt), abandon_on_cancel=True)
        return [self._app.redactor.clean(line) for line in lines]

    def _add_notifications(self, channels: Sequence[ChannelSettings]) -> None:
        from spotd.daemon.notifications.channels import sender_of
        from spotd.daemon.notifications.notifier import Channel, Notifier

        hosts, loop = self.parts.host_monitor, self.control_loop
        notifier = self.parts.notifier = Notifier(
            [Channel(rules=c.rules, sender=sender_of(c.url) if c.url else None, error=c.error) for c in channels],
            database=self.parts.database,
            clock=self._clock,
            log=logs.get("notify"),
            world=lambda: None if loop.state is None else loop.state.world,
            market=self.offer_cache.snapshot,
            use_of=lambda attempt: use_of(hosts, attempt, self._clock.now()).gpu,
            output_of=self._output_of,
        )
        self.controllers += notifier.controllers

    def serve_team(self, team: TeamListener, api: Starlette) -> None:
        """Answer users with the application of the socket, and with the metrics where they can be made."""
        self.parts.findings.append(team.findings)
        team.gate.app = api
        if find_spec("prometheus_client") is not None:
            team.gate.metrics = self._metrics_text

    async def _metrics_text(self) -> bytes | None:
        if self._metrics is None:
            from spotd.service.metrics_listener import make_text  # for those who ask only

            controllers = (*self.controllers, self.price_recorder.controller)
            self._metrics = make_text(self.parts, controllers, log=logs.get("metrics"))
        return await self._metrics.get()

    async def date_wanted(self) -> None:
        """Return when the clock was set and the state can be written: without that no run could begin."""
        if self.timeline is None:
            await anyio.sleep_forever()
        else:
            await self.timeline.set_anew()
        while self.parts.database.last_error:
            await self._clock.sleep(WRITABLE_CHECK)

    async def forget_secrets_of_no_job(self) -> None:
        """Delete the values of a job that a crash kept from being queued. To be called before any is queued."""
        if self.secret_rows is None:
            await self.secret_files.remove_of_no_job(self.parts.database)
        else:
            await self.secret_rows.begin(self.secret_files)

    async def _encrypt_anew(self, rows: SecretRows) -> None:
        try:
            await rows.begin(self.secret_files)
        except StateError as exc:
            self._app.log.warning("secrets.not_encrypted_anew", error=exc.message, hint=exc.hint)

    def lifecycle(self, load: Reload, group: anyio.abc.TaskGroup) -> Lifecycle:
        return Lifecycle(
            settings=self._app.settings,
            load=partial(load_in_time, load),
            apply=lambda fresh: self._apply(fresh, group),
            policy=self.policy,
            control_loop=self.control_loop,
            executor=self.executor,
            notify=self._app.notify,
            log=self._app.log,
        )

    def _policy(self, settings: Settings) -> Policy:
        shared_by = self._objects.shared_with_hosts_by
        return paced(build_policy(settings, self.hosting.traits, store_shared_by=shared_by), self._clock)

    def _apply(self, fresh: Settings, group: anyio.abc.TaskGroup) -> None:
        """Put a reloaded config in force, as far as it can be without a restart."""
        known = {one.name for one in self._app.settings.providers}
        for one in fresh.providers:
            if one.name in known:
                self.hosting.set_enabled(one)
                self.hosting.start_one(group, one)
        self._app.reloaded = fresh
        self._app.redactor.register(fresh.secrets)
        if self.secret_rows is not None:
            self.secret_rows.use(fresh.secrets_keys)
            group.start_soon(self._encrypt_anew, self.secret_rows, name="secrets")
        if self._app.team is not None:
            self._app.team.reload(fresh)
        self.policy.reload(self._policy(fresh))
        self.wake_event.notify()

    def _login(self, provider: ProviderName, image: str) -> RegistryLogin | None:
        """Return what the image's registry asks for, where the provider's machines pull images and take a login."""
        rules = self.policy.current.providers.get(provider)
        if rules is None or not rules.runs_images or rules.no_login:
            return None
        return self._app.reloaded.logins.get(registry_server(image))

    def _account_known(self, provider: ProviderName, account: str) -> None:
        """Warn of a key of another account than that of running machines: it can neither see nor end them."""
        self.policy.accounts[provider] = account
        world = None if self.control_loop.state is None else self.control_loop.state.world
        words = "" if world is None else other_account_words(world, self.policy.current, provider)
        if words:
            self._app.log.error("provider.other_account", provider=provider, error=words)
        self.wake_event.notify()

    def _with_identity(self, policy: Policy) -> Policy:
        """Call no machine a stray before it is known that the state is no older than the store."""
        mine = self.leasing.owned(policy)
        return mine if self.surveyor.done else replace(mine, identity_sure=False)

    def _start_script(self, provider: ProviderName, grant_url: str) -> str:
        traits = self.hosting.traits.get(provider)
        limit = SCRIPT_BYTES_MAX if traits is None else traits.start_script_bytes_max
        return start_script(grant_url, limit_bytes=limit)


def _version() -> str:
    try:
        return version("spotd")
    except PackageNotFoundError:
        return "unpackaged"
