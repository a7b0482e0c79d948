"""The daemon's own parts, connected as production connects them, over virtual time and without threads."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Hashable, MutableSequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import anyio

from spotd.api.handlers import HandlerContext, Handlers
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.intents import AttemptId, JobId
from spotd.core.domain.jobs import Job
from spotd.core.domain.policy import Policy
from spotd.core.domain.states import JobState
from spotd.core.requests import cancel, submit
from spotd.daemon import object_keys
from spotd.daemon.commits import Commits, CrashPoint, Database, PolicyHolder
from spotd.daemon.control_loop import ControlLoop
from spotd.daemon.controllers import WakeEvent
from spotd.daemon.datasets import Datasets
from spotd.daemon.executor import Executor
from spotd.daemon.grants.builder import GrantBuilder, RunnerBundle
from spotd.daemon.grants.inputs import JobSecrets, SecretFiles
from spotd.daemon.grants.secret_rows import SecretRows
from spotd.daemon.grants.writer import GrantWriter
from spotd.daemon.hosts.monitor import HostMonitor
from spotd.daemon.install import JobIds
from spotd.daemon.job_records import JobRecords
from spotd.daemon.log import Redactor
from spotd.daemon.market.guarded import GuardedProvider, guarded
from spotd.daemon.market.offer_cache import OfferCache
from spotd.daemon.market.pollers import Poller, PollPace, ProviderEntry
from spotd.daemon.market.price_recorder import PriceRecorder
from spotd.daemon.recovery_survey import RecoverySurvey
from spotd.history import History
from spotd.store import Reads, SecretsKeys, Store
from spotd_jobs.objects.api import ObjectStore
from spotd_jobs.objects.folder import FolderStore
from spotd_jobs.wire.grant import Grant
from spotd_providers.contract.provider import ProviderTraits
from spotd_providers.contract.values import OfferQuery, ProviderName
from tests.unit.core.builders import SHOP, job, offer, shop_policy
from tests.unit.daemon.clocks import VirtualClock
from tests.unit.daemon.host import Host
from tests.unit.daemon.shop import Shop

T = TypeVar("T")
SUBMIT = (CrashPoint.BEFORE_COMMIT_SUBMIT, CrashPoint.AFTER_COMMIT_SUBMIT)
CANCEL = (CrashPoint.BEFORE_COMMIT_CANCEL, CrashPoint.AFTER_COMMIT_CANCEL)


class Log:
    """A logger that keeps what it is told."""

    def __init__(self) -> None:
        self.lines: MutableSequence[dict[str, Any]] = []

    def events(self) -> list[str]:
        return [line["event"] for line in self.lines]

    def _keep(self, level: str, event: str, fields: dict[str, Any]) -> None:
        self.lines.append({"level": level, "event": event, **fields})

    def debug(self, event: str, **fields: Any) -> None:
        self._keep("debug", event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._keep("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._keep("warning", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._keep("error", event, fields)


class Killed(BaseException):
    """What a crash point raises instead of ending the test's process."""


class Rig:
    """One life of the daemon; `reborn` is the next, over the same state, store and market."""

    def __init__(
        self,
        folder: Path,
        *,
        clock: VirtualClock | None = None,
        shops: list[Shop] | None = None,
        policy: Policy | None = None,
        crash_at: CrashPoint | None = None,
        store: Store | None = None,
        objects: ObjectStore | None = None,
        read_every_s: float = 10.0,
        list_every_s: float = 0.0,
        keys: SecretsKeys | None = None,
    ) -> None:
        """With `list_every_s`, machines are listed no more often, whoever asks: for tests that last for hours.

        With `keys`, secrets are where several computers share the state; `begin` of `secret_rows` is the caller's.
        """
        self.folder = folder
        self._list_every = timedelta(seconds=list_every_s)
        self.clock = clock or VirtualClock()
        self.shops = shops or [Shop(self.clock)]
        self.shop = self.shops[0]
        self.log = Log()
        self.crash_at = crash_at
        self.passed: MutableSequence[CrashPoint] = []
        self.dead = False
        # In memory, and handed from life to life: what a transaction left undone is rolled back all the same.
        self.store = store or Store.open(":memory:")
        self.objects = objects or FolderStore(folder / "objects")
        self.wake_event = WakeEvent()
        self.history = History(
            folder / "prices.sqlite", free_bytes=lambda _: 10**12, imports=folder / "prices-imported.sqlite"
        )
        self.price_recorder = PriceRecorder(
            self.history,
            clock=self.clock,
            log=self.log,
            note=lambda kind, message, at: self.offer_cache.note(kind, message, {}, at=at),
            inline=True,
        )
        self.offer_cache = OfferCache(self.wake_event, keep=self.price_recorder.seen)
        self.policy = PolicyHolder(policy or shop_policy())
        self.database = Database(self.store, inline=True)
        self.commits = Commits(self.database, self.policy, self.clock, self.crash)
        self.redactor = Redactor()
        self.secrets = SecretFiles(folder / "secrets", self.redactor, self.crash)
        self.secret_rows = SecretRows(self.database, keys or SecretsKeys(), self.redactor, "postgresql://db/spotd")
        self.job_secrets: JobSecrets = self.secrets
        if keys is not None:
            self.job_secrets = self.secret_rows
            self.policy.locked = lambda: self.secret_rows.locked
        self.traits = {shop.name: _TRAITS for shop in self.shops}
        self.job_records = JobRecords(
            self.objects,
            world=lambda: None if self.control_loop.state is None else self.control_loop.state.world,
            database=self.database,
            policy=self.policy,
            clock=self.clock,
            log=self.log,
            may_write=lambda: True,
            inline=True,
        )
        self.surveyor = RecoverySurvey(
            self.objects,
            commits=self.commits,
            clock=self.clock,
            log=self.log,
            inline=True,
            count_lost=self.job_records.count_lost,
        )
        self.surveyor.done = True  # a test that wants it asks for it
        self.grants = GrantBuilder(
            self.objects,
            clock=self.clock,
            wall=self.clock,
            secrets=self.job_secrets,
            bundle=RunnerBundle(data=b"a runner"),
            traits=self.traits,
            crash=self.crash,
            require_job_record=self.job_records.require,
        )
        self.grant_writer = GrantWriter(
            self.grants,
            policy=lambda: self.policy.current,
            start_script=lambda _provider, url: f"start {url}",
            clock=self.clock,
            wall=self.clock,
            log=self.log,
            inline=True,
        )
        self.host_monitor = HostMonitor(
            self.objects, clock=self.clock, wall=self.clock, log=self.log, inline=True, ticks=lambda: 0.0
        )
        providers = {shop.name: guarded(shop, clock=self.clock, log=self.log) for shop in self.shops}
        self.pollers = {name: self._poller(provider) for name, provider in providers.items()}
        self.executor = Executor(
            providers=providers,
            install=self.policy.current.install,
            commits=self.commits,
            grants=self.grant_writer,
            clock=self.clock,
            log=self.log,
            loop_wake=self.wake_event,
            list_again=self.list_again,
            ask_again=lambda name: self.pollers[name].ask_again(),
            bought=lambda offer: self.offer_cache.bought(offer, at=self.clock.now()),
            market=self.offer_cache.snapshot,
            crash=self.crash,
        )
        self.alive = 0
        self.control_loop = ControlLoop(
            commits=self.commits,
            offer_cache=self.offer_cache,
            host_monitor=self.host_monitor,
            executor=self.executor,
            grant_writer=self.grant_writer,
            clock=self.clock,
            log=self.log,
            wake_event=self.wake_event,
            list_again=self.list_again,
            alive=self._note_alive,
            read_every_s=read_every_s,
            succeeded=self.job_secrets.remove,
        )
        self.hosts: dict[AttemptId, Host] = {}
        self._read: dict[Hashable, tuple[int, Any]] = {}
        """What was read, and how many rows had been written until then."""

    def _poller(self, provider: GuardedProvider) -> Poller:
        self.offer_cache.open(provider.name)
        return Poller(
            provider,
            offer_cache=self.offer_cache,
            clock=self.clock,
            rng=Random(1),
            log=self.log,
            pace=PollPace(poll_every=timedelta(seconds=30), machines_every_min=self._list_every),
            query=OfferQuery,
            crash=self.crash,
        )

    def _note_alive(self) -> None:
        self.alive += 1

    def crash(self, point: CrashPoint) -> None:
        """A dead process does nothing any more, whatever is still on its stack."""
        if self.dead:
            raise Killed
        self.passed.append(point)
        if point is self.crash_at:
            self.dead = True
            raise Killed

    def list_again(self, provider: ProviderName) -> None:
        if provider in self.pollers:  # a machine's provider may be in the config no more
            self.pollers[provider].list_again()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Rig]:
        """The whole daemon runs while the block does."""
        await self.control_loop.adopt()
        async with anyio.create_task_group() as group:
            for poller in self.pollers.values():
                for controller in poller.controllers:
                    group.start_soon(controller.run, name=controller.name)
            group.start_soon(self.executor.run, name="executor")
            group.start_soon(self.grant_writer.controller.run, name="granter")
            group.start_soon(self.control_loop.controller.run, name="control-loop")
            try:
                yield self
            finally:
                group.cancel_scope.cancel()

    @asynccontextmanager
    async def ready(self) -> AsyncIterator[Rig]:
        """The daemon runs and knows prices."""
        async with self.running():
            await self.until(lambda: self.offer_cache.page(self.shop.name) is not None)
            yield self

    def reborn(self, *, crash_at: CrashPoint | None = None) -> Rig:
        """The next process over everything that outlives one."""
        next_life = Rig(
            self.folder,
            clock=self.clock,
            shops=self.shops,
            policy=self.policy.current,
            crash_at=crash_at,
            store=self.store,
        )
        next_life.hosts = self.hosts
        for host in self.hosts.values():
            host.objects = next_life.objects
        return next_life

    async def submit(self, item: Job | None = None) -> JobId:
        item = item or job()
        await self.commits.commit(lambda world, now: submit(world, item, now), SUBMIT)
        self.wake_event.notify()
        return item.id

    async def cancel(self, job_id: JobId) -> None:
        await self.commits.commit(lambda world, now: cancel(world, job_id, now), CANCEL)
        self.wake_event.notify()

    def job(self, job_id: JobId) -> Job:
        """The job as it is stored."""
        found = self._stored("job", job_id, lambda reads: reads.job(job_id))
        if found is None:
            raise LookupError(job_id)
        return found

    def attempts(self, job_id: JobId) -> tuple[Attempt, ...]:
        return self._stored("attempts", job_id, lambda reads: reads.attempts_of(job_id))

    def kinds(self, job_id: JobId | None = None) -> list[str]:
        events = self._stored("events", job_id, lambda reads: reads.events(job_id=job_id))
        return [e.event.kind for e in events]

    def _stored(self, what: str, job_id: JobId | None, read: Callable[[Reads], T]) -> T:
        """What the state holds; `until` asks every second, so it is read only if anything was written since."""
        with self.store._engine.connect() as connection:
            written = connection.connection.total_changes
        before, found = self._read.get((what, job_id), (-1, None))
        if before != written:
            found = self.store.read(read)
            self._read[what, job_id] = (written, found)
        return found  # type: ignore[no-any-return]  # what this key was read as

    def grant(self, job_id: JobId, number: int) -> Grant:
        """What the attempt's host would read now."""
        key = object_keys.grant_key(AttemptId(job=job_id, number=number))
        return Grant.model_validate_json(self.objects.get(key, bytes_max=1_000_000))

    def host(self, job_id: JobId, number: int) -> Host:
        identity = AttemptId(job=job_id, number=number)
        return self.hosts.setdefault(identity, Host(self.objects, identity))

    async def until(self, holds: Callable[[], bool], *, within: timedelta = timedelta(hours=2)) -> None:
        """Virtual time passes until this holds; a test that waits for ever fails instead."""
        deadline = self.clock.now() + within
        while not holds():
            if self.clock.now() >= deadline:
                raise AssertionError(f"it did not happen within {within}; events: {self.kinds()}")
            await self.clock.sleep(timedelta(seconds=1))

    async def until_state(self, job_id: JobId, state: JobState) -> None:
        await self.until(lambda: self.job(job_id).state is state)

    async def until_running(self, job_id: JobId, number: int) -> Host:
        """The attempt was launched and its runner said that the command runs; it goes on beating until it is killed."""
        await self.until(lambda: any(a.id.number == number and a.ref is not None for a in self.attempts(job_id)))
        host = self.host(job_id, number)
        host.beat("run")
        await self.until(lambda: self.attempts(job_id)[-1].running_at is not None)
        return host

    def handlers(self) -> Handlers:
        return Handlers(self.context())

    def context(self) -> HandlerContext:
        spool = self.folder / "spool"
        spool.mkdir(exist_ok=True)
        return HandlerContext(
            clock=self.clock,
            wall=self.clock,
            database=self.database,
            commits=self.commits,
            policy=self.policy,
            offer_cache=self.offer_cache,
            price_recorder=self.price_recorder,
            control_loop=self.control_loop,
            wake_event=self.wake_event,
            host_monitor=self.host_monitor,
            objects=self.objects,
            datasets=Datasets(self.objects),
            secrets=self.job_secrets,
            surveyor=self.surveyor,
            job_records=self.job_records,
            ids=JobIds(self.clock, Random(7)),
            providers={
                shop.name: ProviderEntry(
                    name=shop.name,
                    title="the shop",
                    enabled=True,
                    fee_ppm=1_000_000,
                    provider=shop,
                    poller=self.pollers[shop.name],
                    traits=_TRAITS,
                )
                for shop in self.shops
            },
            crash=self.crash,
            log=self.log,
            started_at=self.clock.now(),
            spool=spool,
            facts={"version": "1"},
            inline=True,
        )


def two_shops(folder: Path, clock: VirtualClock) -> Rig:
    """A daemon with a second provider named `second`, which sells the same more cheaply."""
    other = ProviderName("second")
    cheap = replace(offer("s1", price=300_000), provider=other)
    policy = shop_policy()
    rules = replace(policy.providers[SHOP], name=other)
    return Rig(
        folder,
        clock=clock,
        shops=[Shop(clock), Shop(clock, name=other, offers=[cheap])],
        policy=replace(policy, providers={SHOP: policy.providers[SHOP], other: rules}),
    )


_TRAITS = ProviderTraits(start_script_bytes_max=4096, hosts_share_filesystem=True, ends_itself_by="file")
__all__ = ["SHOP", "Killed", "Log", "Rig"]
