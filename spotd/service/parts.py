"""The parts of a daemon, made of its settings and connected."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from random import SystemRandom
from typing import TYPE_CHECKING, Final

import anyio
import anyio.abc
import anyio.to_thread

from spotd.api.handlers import HandlerContext
from spotd.api.handlers.doctor import row_of
from spotd.api.schemas.answers import CheckResponse
from spotd.core.domain.intents import AttemptId
from spotd.core.domain.policy import Policy, registry_server
from spotd.daemon import log as logs
from spotd.daemon.clock import Computer, SteadyClock, SystemClock, Timeline
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
    JobIds,
    folder_hash,
    other_account_words,
)
from spotd.daemon.job_records import JobRecords
from spotd.daemon.lease_controller import LeaseController
from spotd.daemon.log import Redactor
from spotd.daemon.market.late_causes import CauseCheck
from spotd.daemon.market.offer_cache import OfferCache
from spotd.daemon.market.price_recorder import BillCheck, PriceRecorder, SharedPrices
from spotd.daemon.market.supervisor import ProviderSupervisor
from spotd.daemon.policy import ChannelSettings, Settings, build_policy
from spotd.daemon.recovery_survey import RecoverySurvey
from spotd.daemon.remote_data import RemoteData
from spotd.daemon.shown_clocks import ShownClocks
from spotd.history import HISTORY_FILE, IMPORTED_FILE, History
from spotd.service import lifecycle as code_spool
from spotd.service.accelerated import paced, seconds_on_host
from spotd.service.lifecycle import Lifecycle, Reload, SystemdNotifier, load_in_time
from spotd.service.state import SECRETS_FOLDER
from spotd.store import StateError, parse_place
from spotd_jobs.objects.api import ObjectStore, ShowsDates, StoreError
from spotd_jobs.start import SCRIPT_BYTES_MAX, build_runner, start_script
from spotd_providers.contract.provider import Clock
from spotd_providers.contract.values import ProviderName, RegistryLogin

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from spotd.service.metrics_listener import MetricsText
    from spotd.service.team import TeamListener

TAKING_STOCK: Final = "spotd has just started and first asks every provider which machines run"
OUTPUT_S: Final = 15.0
WRITABLE_CHECK: Final = timedelta(seconds=10)


class ProcessParts:
    """What a process has whether it leads or waits.

    Attributes:
        settings: those that it runs with.
        reloaded: the settings with which a next run begins.
    """

    def __init__(self, settings: Settings, *, redactor: Redactor, crash: CrashPoints, computer: Computer) -> None:
        self.settings = settings
        self.reloaded = settings
        self.computer = computer
        self.redactor = redactor
        self.crash = crash
        self.notify = SystemdNotifier()
        self.log = logs.get("daemon")
        self.team: TeamListener | None = None


class DaemonParts:
    """Every part, connected."""

    def __init__(
        self,
        process: ProcessParts,
        database: Database,
        objects: ObjectStore,
        clock: Clock,
        leasing: LeaseController,
        timeline: Timeline | None = None,
    ) -> None:
        settings, crash = process.settings, process.crash
        self.timeline = timeline
        self._metrics: MetricsText | None = None
        clock = clock if timeline is None else timeline.clock
        self._process = process
        self._clock = clock
        self._objects = objects
        wall = SystemClock()
        steady = SteadyClock(process.computer.wall(), uptime_s=process.computer.uptime_s)
        chance = SystemRandom()
        self.wake_event = WakeEvent()
        self.price_recorder = PriceRecorder(
            History(settings.state_dir / HISTORY_FILE, imports=settings.state_dir / IMPORTED_FILE),
            clock=clock,
            log=logs.get("history"),
            note=lambda kind, message, at: self.offer_cache.note(kind, message, {}, at=at),
        )
        self.offer_cache = OfferCache(self.wake_event, keep=self.price_recorder.seen)
        self.shown_clocks = ShownClocks(
            process.computer,
            note=lambda kind, message: self.offer_cache.note(kind, message, {}, at=clock.now()),
            log=logs.get("clock"),
        )
        if isinstance(objects, ShowsDates):
            objects.date_shown = partial(self.shown_clocks.note, "the checkpoint store")
        self.hosting = ProviderSupervisor(
            settings,
            offer_cache=self.offer_cache,
            clock=clock,
            seed=chance.getrandbits(64),
            log=logs.get("poller"),
            crash=crash,
            world=lambda: None if self.control_loop.state is None else self.control_loop.state.world,
            account_known=self._account_known,
            hide=process.redactor.clean,
            logins=lambda: tuple(process.reloaded.logins.values()),
            date_shown=self.shown_clocks.note,
        )
        self.policy = PolicyHolder(self._policy(settings))
        self.policy.paused = TAKING_STOCK
        self.leasing = leasing
        commits = Commits(database, self.policy, clock, crash)
        process.redactor.register(settings.secrets)
        self.secret_files = SecretFiles(settings.state_dir / SECRETS_FOLDER, process.redactor, crash)
        self.secret_rows: SecretRows | None = None
        secrets: JobSecrets = self.secret_files
        if database.is_shared:
            place = str(parse_place(settings.state_url))
            secrets = self.secret_rows = rows = SecretRows(database, settings.secrets_keys, process.redactor, place)
            self.policy.locked = lambda: rows.locked
        remote = RemoteData(lambda: process.reloaded.remote)
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
            alive=process.notify.alive,
            watchdog_s=process.notify.watchdog_s,
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
        others = (
            dataset_garbage.controller,
            self.job_records.controller,
            causes.controller,
            self.shown_clocks.controller,
        )
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
        self.context = HandlerContext(
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
            users=lambda: {one.caller.name: one.caller for one in process.reloaded.users},
            spool=spool,
            facts={"version": program_version(), "config": settings.config_path, "state_dir": settings.state_dir},
        )
        self.context.findings.append(self._clock_findings)
        if settings.channels:
            self._add_notifications(settings.channels)

    def _clock_findings(self) -> list[CheckResponse]:
        found = self.shown_clocks.difference()
        if found is None:
            return []
        hint = "set it, and keep it synchronised; spotd follows" if found.is_wrong else ""
        return [row_of("daemon", "clock", f"this computer's clock {found.words}", ok=not found.is_wrong, hint=hint)]

    async def _output_of(self, attempt: AttemptId) -> list[str]:
        """Return the last lines of an attempt without any secret; none where the store does not give them soon."""
        lines: list[str] = []
        with anyio.move_on_after(OUTPUT_S), suppress(StoreError):
            lines = await anyio.to_thread.run_sync(partial(last_lines, self._objects, attempt), abandon_on_cancel=True)
        return [self._process.redactor.clean(line) for line in lines]

    def _add_notifications(self, channels: Sequence[ChannelSettings]) -> None:
        from spotd.daemon.notifications.channels import sender_of
        from spotd.daemon.notifications.notifier import Channel, Notifier

        hosts, loop = self.context.host_monitor, self.control_loop
        notifier = self.context.notifier = Notifier(
            [Channel(rules=c.rules, sender=sender_of(c.url) if c.url else None, error=c.error) for c in channels],
            database=self.context.database,
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
        self.context.findings.append(team.findings)
        team.gate.app = api
        if find_spec("prometheus_client") is not None:
            team.gate.metrics = self._metrics_text

    async def _metrics_text(self) -> bytes | None:
        if self._metrics is None:
            from spotd.service.metrics_listener import make_text  # for those who ask only

            controllers = (*self.controllers, self.price_recorder.controller)
            self._metrics = make_text(self.context, controllers, log=logs.get("metrics"))
        return await self._metrics.get()

    async def date_wanted(self) -> None:
        """Return when the clock was set and the state can be written: without that no run could begin."""
        if self.timeline is None:
            await anyio.sleep_forever()
        else:
            await self.timeline.set_anew()
        while self.context.database.last_error:
            await self._clock.sleep(WRITABLE_CHECK)

    async def forget_secrets_of_no_job(self) -> None:
        """Delete the values of a job that a crash kept from being queued. To be called before any is queued."""
        if self.secret_rows is None:
            await self.secret_files.remove_of_no_job(self.context.database)
        else:
            await self.secret_rows.begin(self.secret_files)

    async def _encrypt_anew(self, rows: SecretRows) -> None:
        try:
            await rows.begin(self.secret_files)
        except StateError as exc:
            self._process.log.warning("secrets.not_encrypted_anew", error=exc.message, hint=exc.hint)

    def lifecycle(self, load: Reload, group: anyio.abc.TaskGroup) -> Lifecycle:
        return Lifecycle(
            settings=self._process.settings,
            load=partial(load_in_time, load),
            apply=lambda fresh: self._apply(fresh, group),
            policy=self.policy,
            control_loop=self.control_loop,
            executor=self.executor,
            notify=self._process.notify,
            log=self._process.log,
        )

    def _policy(self, settings: Settings) -> Policy:
        shared_by = self._objects.shared_with_hosts_by
        return paced(build_policy(settings, self.hosting.traits, store_shared_by=shared_by), self._clock)

    def _apply(self, fresh: Settings, group: anyio.abc.TaskGroup) -> None:
        """Put a reloaded config in force, as far as it can be without a restart."""
        known = {one.name for one in self._process.settings.providers}
        for one in fresh.providers:
            if one.name in known:
                self.hosting.set_enabled(one)
                self.hosting.start_one(group, one)
        self._process.reloaded = fresh
        self._process.redactor.register(fresh.secrets)
        if self.secret_rows is not None:
            self.secret_rows.use(fresh.secrets_keys)
            group.start_soon(self._encrypt_anew, self.secret_rows, name="secrets")
        if self._process.team is not None:
            self._process.team.reload(fresh)
        self.policy.reload(self._policy(fresh))
        self.wake_event.notify()

    def _login(self, provider: ProviderName, image: str) -> RegistryLogin | None:
        """Return what the image's registry asks for, where the provider's machines pull images and take a login."""
        rules = self.policy.current.providers.get(provider)
        if rules is None or not rules.runs_images or rules.no_login:
            return None
        return self._process.reloaded.logins.get(registry_server(image))

    def _account_known(self, provider: ProviderName, account: str) -> None:
        """Warn of a key of another account than that of running machines: it can neither see nor end them."""
        self.policy.accounts[provider] = account
        world = None if self.control_loop.state is None else self.control_loop.state.world
        words = "" if world is None else other_account_words(world, self.policy.current, provider)
        if words:
            self._process.log.error("provider.other_account", provider=provider, error=words)
        self.wake_event.notify()

    def _with_identity(self, policy: Policy) -> Policy:
        """Call no machine a stray before it is known that the state is no older than the store."""
        mine = self.leasing.owned(policy)
        return mine if self.surveyor.done else replace(mine, identity_sure=False)

    def _start_script(self, provider: ProviderName, grant_url: str) -> str:
        traits = self.hosting.traits.get(provider)
        limit = SCRIPT_BYTES_MAX if traits is None else traits.start_script_bytes_max
        return start_script(grant_url, limit_bytes=limit)


def program_version() -> str:
    try:
        return version("spotd")
    except PackageNotFoundError:
        return "unpackaged"
