"""One run of the simulated daemon: the shipped control loop and executor over a simulated world and state.

Simulated at their boundary are the pollers, what hosts write, what grants say, and the providers' answers. A call that
is under way is the provider's: it takes effect whether or not the process that made it still lives.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cache
from types import new_class
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import anyio

from spotd.core.decide import decide
from spotd.core.domain.attempts import Attempt, HostStatus
from spotd.core.domain.intents import AttemptId
from spotd.core.domain.jobs import FailedRestore, Job
from spotd.core.domain.plan import Plan, applied, combine
from spotd.core.domain.world import World
from spotd.core.kernel.outcomes import LaunchFailure
from spotd.core.kernel.reconcile import reconcile
from spotd.daemon.commits import Commits, Committed, CrashPoint, Database
from spotd.daemon.control_loop import ControlLoop
from spotd.daemon.controllers import Pause, WakeEvent
from spotd.daemon.executor import Executor
from spotd.daemon.grants.builder import canary_rules
from spotd.daemon.grants.inputs import SecretsMissing
from spotd.daemon.grants.writer import GrantWriter
from spotd.daemon.hosts.monitor import HostMonitor
from spotd.daemon.market.guarded import guarded
from spotd.daemon.market.late_causes import CauseCheck
from spotd.daemon.market.offer_cache import OfferCache
from spotd.daemon.market.price_recorder import BillCheck
from spotd.store import StateError, Store
from spotd_jobs.objects.api import StoreUnavailable
from spotd_providers.contract import errors
from spotd_providers.contract.provider import Provider
from spotd_providers.contract.values import (
    AttemptKey,
    Capability,
    InstanceRef,
    Launched,
    LaunchRequest,
    Listing,
    MicroUsdPerHour,
    Power,
    ProviderCharge,
    ProviderName,
)
from tests.sim.cloud import Cloud
from tests.sim.loop import ProcessLoop
from tests.sim.machines import AccountDead, CloudDown, LostAnswer, Refused, Task
from tests.sim.state import MemoryStore, MemoryTx

if TYPE_CHECKING:
    from tests.sim.daemon import Daemon

T = TypeVar("T")

DOWN, KEY_REFUSED = "down", "the key is refused"
"""What a provider says that refuses every job."""
DEFECTS: Final = frozenset(
    {
        "cycle.failed",
        "failure.contained",
        "launch.not_prepared",
        "outcome.not_judged",
        "provider.broke_contract",
        "provider.wrong_key",
    }
)
"""What is never logged by a daemon that is right."""
REQUESTS: Final = frozenset(
    {
        CrashPoint.BEFORE_COMMIT_SUBMIT,
        CrashPoint.AFTER_COMMIT_SUBMIT,
        CrashPoint.BEFORE_COMMIT_CANCEL,
        CrashPoint.AFTER_COMMIT_CANCEL,
        CrashPoint.BEFORE_COMMIT_RETRY,
        CrashPoint.AFTER_COMMIT_RETRY,
    }
)
"""A user who is not answered asks again, so that nothing is lost by a crash there."""
CYCLE_GAP_S: Final = 3.0
HOLD_S: Final = 60.0
TERMINATE_TAKES: Final = timedelta(seconds=0.5)


class Died(BaseException):
    """The process was killed at a named point."""


class Process:
    """Dies as a whole, at a crash point or from outside, and does nothing afterwards."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.is_dead = False
        self._is_over = False
        self.loop = ProcessLoop(daemon.agenda, lambda: daemon.asleep_until)
        clock, log = DaemonClock(daemon), DefectLog(daemon)
        self.wake_event = WakeEvent()
        self.offer_cache = DoubtingOfferCache(self) if daemon.decides_twice else OfferCache(self.wake_event)
        clouds = {name: cloud for name, cloud in daemon.clouds.items() if name not in daemon.absent}
        for name in clouds:
            self.offer_cache.open(name)
        grants, self.hosts = Grants(daemon), Hosts(daemon)
        database = Database(cast("Store", MemoryStore(daemon)), inline=True)
        self.commits = Commits(database, daemon.policy, clock, self.crash)
        providers = {name: guarded(calls_of(cloud, grants), clock=clock, log=log) for name, cloud in clouds.items()}
        self.bill_check: BillCheck | None = None
        if any(cloud.manner is not None for cloud in daemon.clouds.values()):
            self.bill_check = BillCheck(providers, commits=self.commits, database=database, clock=clock, log=log)
        self.executor = Executor(
            providers=providers,
            install=daemon.policy.current.install,
            commits=self.commits,
            grants=grants,
            clock=clock,
            log=log,
            loop_wake=self.wake_event,
            list_again=daemon.list_again,
            ask_again=daemon.list_again,
            bought=lambda offer: self.offer_cache.bought(offer, at=daemon.now),
            market=self.offer_cache.snapshot,
            crash=self.crash,
        )
        if daemon.launches_at_once is not None:
            most = daemon.launches_at_once
            self.executor._launch_turns = defaultdict(lambda: anyio.Semaphore(most))
        self.control_loop = PatientControlLoop(
            commits=self.commits,
            offer_cache=self.offer_cache,
            host_monitor=cast("HostMonitor", self.hosts),
            executor=self.executor,
            grant_writer=cast("GrantWriter", grants),
            clock=clock,
            log=log,
            wake_event=self.wake_event,
            list_again=daemon.list_again,
            alive=lambda: None,
            check_owners=self._note_listings,
            asks_store=daemon.records is not None,
        )
        self.control_loop.daemon = daemon
        self.cause_check = CauseCheck(self.offer_cache.listings, commits=self.commits, clock=clock, log=log)
        self.listings: Mapping[ProviderName, Listing] = {}
        """What the newest cycle decides on."""
        self.clocks_behind: dict[AttemptId, timedelta] = {}
        self.first_read: dict[AttemptId, tuple[int, datetime | None]] = {}
        self.words_read: dict[AttemptId, tuple[datetime, datetime | None, datetime | None]] = {}
        """Of each host, what its newest heartbeat shows at least."""

    def begin(self) -> None:
        self._task = self.loop.create_task(self._run())
        self._task.add_done_callback(self._ended)
        self.loop.run()

    async def _run(self) -> None:
        await self.control_loop.adopt()
        async with anyio.create_task_group() as group:
            group.start_soon(self.executor.run)
            group.start_soon(self.control_loop.controller.run)
            if any(cloud.faults.cause_lag for cloud in self.daemon.clouds.values()):
                group.start_soon(self.cause_check.controller.run)
            if self.bill_check is not None:
                group.start_soon(self.bill_check.controller.run)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if self._is_over:
            return
        if not self.is_dead and not isinstance(error, StateError):  # a start without a state that can be written
            self.daemon.told.broken.append(f"the daemon ended with {error!r}")
        self.daemon.kill()

    def end(self) -> None:
        """Nothing of it runs from now on; what it has sent goes on without it."""
        self.is_dead = self._is_over = True
        self._task.cancel()
        self.loop.run(even_asleep=True)
        assert self._task.done() or self.loop.is_running(), "a task of the process outlives it"
        self.loop.close()
        self.daemon.told.broken.extend(self.loop.errors)

    def crash(self, point: CrashPoint) -> None:
        """A dead process does nothing any more, whatever is still on its stack."""
        if self.is_dead:
            raise Died
        if point not in REQUESTS:
            try:
                self.daemon.crash(point)
            except Died:
                self.is_dead = True
                raise

    def _note_listings(self, listings: Mapping[ProviderName, Listing], _world: World | None) -> None:
        self.listings = listings


class DoubtingOfferCache(OfferCache):
    """Decides before and after each list that wakes nothing: both decisions must be the same, but for proofs of life.

    A decision takes nothing from such a list, so that the loop may leave it to its next beat.
    """

    def __init__(self, process: Process) -> None:
        super().__init__(process.wake_event)
        self._process = process

    def machines_listed(self, provider: ProviderName, listing: Listing) -> None:
        before = None if self.is_news(provider, listing) else self._decision()
        super().machines_listed(provider, listing)
        told = self._process.daemon.told
        if before is not None:
            told.skipped += 1
            if before != self._decision():
                told.broken.append(f"a list of {provider} that woke nothing changes what is decided")

    def _decision(self) -> Plan:
        process, reports = self._process, self._process.hosts.newest
        world = MemoryTx(process.daemon).world(process.commits.policy, process.daemon.now)
        now, fresh = process.daemon.now, process.hosts.fresh(reports, world)
        first = reconcile(world, self.listings(), fresh, now)
        second = decide(applied(world, first), process.control_loop._market(reports), now)
        plan = combine(first, second)
        known = world.attempts
        changed = {i: _unproven(item) for i, item in plan.attempts.items()}
        changed = {i: item for i, item in changed.items() if i not in known or item != _unproven(known[i])}
        return replace(plan, attempts=changed, jobs={i: _unread(job) for i, job in plan.jobs.items()})


def _unproven(item: Attempt) -> Attempt:
    """Return the attempt without what a list proves of its life."""
    return replace(item, listed_at=None, proven_at=None, meter=replace(item.meter, until=None))


def _unread(job: Job) -> Job:
    """Return the job without which lists a proposal to move it rests on."""
    known = job.moves.proposed
    return job if known is None else replace(job, moves=replace(job.moves, proposed=replace(known, readings=())))


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """Return what a coroutine returns that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as exc:
        return cast("T", exc.value)
    raise RuntimeError("it waits")


class PatientControlLoop(ControlLoop):
    """Leaves more time between two passes, since a world lasts for days and a full disk for hours."""

    daemon: Daemon

    def _publish(self, committed: Committed) -> None:
        super()._publish(committed)
        self.daemon.own.note_verdicts(committed.plan.verdicts)

    async def _reconcile_or_hold(self) -> Pause:
        pause = await super()._reconcile_or_hold()
        return replace(pause, gap_s=CYCLE_GAP_S, seconds=max(pause.seconds, HOLD_S) if self.held else pause.seconds)


class DaemonClock:
    """The dates of the daemon, which may differ from the true ones."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    def now(self) -> datetime:
        return self._daemon.now

    async def sleep(self, duration: timedelta) -> None:
        await anyio.sleep(duration.total_seconds())

    def real_seconds(self, duration: timedelta) -> float:
        return duration.total_seconds()


class DefectLog:
    """Keeps nothing but what is a defect, for the oracles."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    def debug(self, event: str, **fields: Any) -> None:
        pass

    def info(self, event: str, **fields: Any) -> None:
        pass

    def warning(self, event: str, **fields: Any) -> None:
        pass

    def error(self, event: str, **fields: Any) -> None:
        if event in DEFECTS or (event == "state.held" and self._daemon.full_since is None):
            self._daemon.told.broken.append(f"{event}: {fields}")


class Hosts:
    """What hosts wrote, in place of the host monitor."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self.newest: Mapping[AttemptId, HostStatus] = {}
        """What was read last."""

    @property
    def last_error(self) -> str:
        return "" if self._daemon.can_read else "it does not answer"

    async def read_hosts(self, _world: World, _closely: frozenset[AttemptId]) -> Mapping[AttemptId, HostStatus]:
        self.newest = self._daemon.look()
        return self.newest

    def fresh(self, reports: Mapping[AttemptId, HostStatus], world: World) -> dict[AttemptId, HostStatus]:
        known = {i: r for i, r in reports.items() if i in world.attempts and i.job in world.jobs}
        return {i: self._daemon.without_known(r, world.jobs[i.job]) if r.checkpoints else r for i, r in known.items()}

    def committed(self, _reports: Mapping[AttemptId, HostStatus]) -> None:
        self._daemon.note_readings()

    def next_listing_s(self) -> float:
        return (self._daemon.pace * 2).total_seconds()


class Grants:
    """What hosts are told to do, in place of the grants in the store."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.prepared: dict[AttemptKey, tuple[Attempt, Task]] = {}

    @property
    def store_error(self) -> str:
        return "" if self.daemon.can_write else "it takes no writes"

    @property
    def stored_at(self) -> datetime | None:
        """Each decision follows a write of all that is due."""
        return self.daemon.now if self.daemon.can_write else None

    async def prepare(self, attempt: Attempt, job: Job) -> str:
        await anyio.sleep(self.daemon.rng.uniform(0, 1))
        if not self.daemon.can_write:
            raise StoreUnavailable("it takes no writes")
        self.daemon.use_number(attempt)
        if self.daemon.work[job.id].no_secrets:
            raise SecretsMissing("a secret of the job is lost")
        rules = canary_rules(attempt, job, self.daemon.policy.current, timedelta.total_seconds)
        self.prepared[attempt.key] = attempt, replace(self.daemon.first_grant(job), canary=rules)
        return "a script"

    async def prepare_another(self, attempt: Attempt, job: Job) -> str:
        await anyio.sleep(self.daemon.rng.uniform(0, 1))
        if not self.daemon.can_write:
            raise StoreUnavailable("it takes no writes")
        return "a script"

    def passed_over(self, _attempt: AttemptId) -> tuple[FailedRestore, ...]:
        return ()

    def update(self, world: World) -> None:
        self.daemon.write_grants(world)


class CloudCalls:
    """The paid calls of one provider's plugin: they take time, and effect at the cloud, which may not answer."""

    def __init__(self, cloud: Cloud, grants: Grants) -> None:
        self.name = cloud.name
        self.nodes_max = 64
        self.capabilities: Mapping[Power, Capability] = {Power.GANG: Capability(available=cloud.trade.gangs)}
        self._cloud = cloud
        self._grants = grants
        self._daemon = grants.daemon

    async def launch(self, request: LaunchRequest) -> Launched:
        daemon, cloud = self._daemon, self._cloud
        attempt, task = self._grants.prepared[request.key]
        daemon.orders.note_call(request.key, request.offer, request.price_max, request.disk_gb)
        daemon.told.sent[attempt.id] = daemon.true
        lease, fee = daemon.policy.current.lease, cloud.fee_ppm
        lag = timedelta(seconds=daemon.rng.uniform(0.2, 3))
        if daemon.rng.random() < cloud.faults.slow_launch:
            lag = timedelta(seconds=daemon.rng.uniform(15, 95))

        def effect() -> Launched:
            if cloud.down:
                raise CloudDown
            cloud.advance(daemon.true)
            wanted = replace(task, disk_gb=request.disk_gb)
            made = cloud.launch(request.key, request.offer, request.price_max, wanted, lease, fee)
            return Launched(instance=made)

        try:
            return await self._called(effect, lag)
        except LostAnswer as exc:
            raise errors.OutcomeUnknown("the answer was lost", key=request.key) from exc
        except Refused as exc:
            raise refusal(exc.failure) from exc
        except AccountDead as exc:
            raise errors.AuthFailed(KEY_REFUSED) from exc
        except CloudDown as exc:
            raise errors.Unavailable(DOWN) from exc

    async def terminate(self, ref: InstanceRef) -> None:
        try:
            await self._called(lambda: self._daemon.end(ref), TERMINATE_TAKES)
        except CloudDown as exc:
            wait = self._cloud.faults.end_retry_after
            raise errors.RateLimited(DOWN, retry_after=wait) if wait else errors.Unavailable(DOWN) from exc

    async def _called(self, effect: Callable[[], T], lag: timedelta) -> T:
        """Return what the effect returns: it happens after the lag, and is answered by half as late again."""
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        found: list[T | Exception] = []

        def act() -> None:
            try:
                found.append(effect())
            except (LostAnswer, Refused, CloudDown) as exc:
                found.append(exc)

        def answer() -> None:
            if not answered.done():
                answered.set_result(None)

        self._daemon.agenda.after(lag, act)
        self._daemon.agenda.after(lag * 1.5, answer)
        await answered
        result = found[0]
        if isinstance(result, Exception):
            raise result
        return result


class MemberCalls(CloudCalls):
    """The same of a provider that replaces lost ones of several machines."""

    async def replace_members(
        self, request: LaunchRequest, ref: InstanceRef, ranks: Sequence[int], number: int
    ) -> None:
        await self._changed(lambda: self._cloud.replace_members(ref, ranks, number), ref, ranks, number)

    async def drop_members(self, ref: InstanceRef, ranks: Sequence[int]) -> None:
        await self._changed(lambda: self._cloud.drop_members(ref, ranks), ref, ranks, None)

    async def _changed(
        self, change: Callable[[], None], ref: InstanceRef, ranks: Sequence[int], number: int | None
    ) -> None:
        self._cloud.advance(self._daemon.true)
        self._cloud.note_call(ref, ranks, number)
        lag = timedelta(seconds=self._daemon.rng.uniform(0.2, 20))
        if self._daemon.rng.random() < self._cloud.faults.slow_launch:
            lag *= 15  # it takes effect long after nobody waits for its answer any more

        def effect() -> None:
            if self._cloud.down:
                raise CloudDown
            self._cloud.advance(self._daemon.true)
            change()

        try:
            await self._called(effect, lag)
        except Refused as exc:
            raise refusal(exc.failure) from exc
        except (LostAnswer, CloudDown) as exc:
            raise errors.Unavailable(DOWN) from exc


class BidCalls(CloudCalls):
    """The same of a provider at which bids can be changed."""

    async def change_bid(self, ref: InstanceRef, price: MicroUsdPerHour) -> None:
        cloud, fee = self._cloud, self._cloud.fee_ppm
        m = cloud.machines.get(ref.instance_id)
        if m is not None:
            self._daemon.orders.note_call(m.key, m.offer, price, m.task.disk_gb // m.offer.nodes, former=m.bid)

        def effect() -> None:
            if cloud.down:
                raise CloudDown
            cloud.advance(self._daemon.true)
            cloud.change_bid(ref, price, fee)

        try:
            await self._called(effect, TERMINATE_TAKES)
        except Refused as exc:
            raise refusal(exc.failure) from exc
        except (LostAnswer, CloudDown) as exc:
            raise errors.Unavailable(DOWN) from exc


class Billing(CloudCalls):
    """The same of a provider that can be asked for what it has billed."""

    def __init__(self, cloud: Cloud, grants: Grants) -> None:
        super().__init__(cloud, grants)
        self.capabilities = {**self.capabilities, Power.BILLING: Capability(available=True)}

    async def charges(self, since: datetime, until: datetime) -> Sequence[ProviderCharge]:
        try:
            return self._cloud.charges(since, until)
        except CloudDown as exc:
            raise errors.Unavailable(DOWN) from exc


@cache
def _kind(*has: bool) -> type[CloudCalls]:
    parts = tuple(part for part, there in zip((BidCalls, Billing, MemberCalls), has, strict=True) if there)
    return cast("type[CloudCalls]", new_class("Calls", parts)) if parts else CloudCalls


def calls_of(cloud: Cloud, grants: Grants) -> Provider:
    kind = _kind(cloud.trade.states_floor, cloud.manner is not None, cloud.trade.replaces)
    return cast("Provider", kind(cloud, grants))


def refusal(failure: LaunchFailure) -> errors.ProviderError:
    """Return how the contract says this."""
    why = failure.value
    match failure:
        case LaunchFailure.QUOTA:
            return errors.QuotaExceeded(why)
        case LaunchFailure.REJECTED:
            return errors.RequestRejected(why, field="image", reason=why)
        case LaunchFailure.RATE_LIMITED:
            return errors.RateLimited(why, retry_after=timedelta(minutes=1))
        case _:
            return SIMPLE[failure](why)


SIMPLE: Final[Mapping[LaunchFailure, type[errors.ProviderError]]] = {
    LaunchFailure.NO_CAPACITY: errors.NoCapacity,
    LaunchFailure.OFFER_GONE: errors.OfferGone,
    LaunchFailure.PRICE_MOVED: errors.PriceMoved,
    LaunchFailure.NO_BALANCE: errors.NoBalance,
    LaunchFailure.NOT_SUPPORTED: errors.NotSupported,
}
