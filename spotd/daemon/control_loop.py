"""The loop: read the world as it is, decide, write it down, hand over what is owed, sleep until something changes.

Theory. Nothing is remembered between cycles that the state does not hold, apart from caches: each cycle loads the world
again. What woke the loop does not matter. The order inside a cycle does: the machine listings are taken *before* the
read of what the hosts wrote, so a host that a listing shows as dead has had its last report read; and paid calls are
handed over only after the commit that owes them has returned.

When the state cannot be written the loop holds: it launches nothing, says so once, and goes on trying. What the core
would have decided meanwhile is kept in memory (`_unsaved`), and only that of it is acted on which needs no row to be
safe: stop orders go out through the grants, and machines that it would end are ended, since ending one twice does no
harm. So a lease is never renewed beyond what the budgets allow, and a cancelled machine ends in time. Which of these
ends were accepted is recorded as soon as the state can be written, so that nothing is booked beyond them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final

import anyio

from spotd.core.deadlines import without_unwatched_waits
from spotd.core.decide import decide
from spotd.core.domain.attempts import Attempt, HostStatus, MachineState
from spotd.core.domain.intents import AttemptId, IntentKind, IntentState, JobId
from spotd.core.domain.market import MarketSnapshot
from spotd.core.domain.plan import Contained, Plan, applied, combine
from spotd.core.domain.states import AttemptState, InvariantBroken, JobState
from spotd.core.domain.world import Verdict, World
from spotd.core.kernel.outcomes import after_restart, record_unsaved_ends
from spotd.core.kernel.reconcile import reconcile
from spotd.daemon.commits import Commits, Committed, CrashPoint, Database, Decide, cycle_points
from spotd.daemon.controllers import INTERVAL_MIN_S, Controller, Outage, Pause, WakeEvent
from spotd.daemon.executor import Executor
from spotd.daemon.grants.writer import GrantWriter
from spotd.daemon.hosts.monitor import HostMonitor
from spotd.daemon.market.offer_cache import OfferCache, WatchedProviders
from spotd.store import Folding, StateError
from spotd_providers.contract.provider import Clock, Logger
from spotd_providers.contract.values import AttemptKey, InstanceState, Listing, ProviderName

CYCLE_GAP_S: Final = 0.05
"""However often it is woken, the loop leaves the computer to others in between."""
HOLD_S: Final = 2.0
UNWATCHED_S: Final = 300.0
"""A cycle that comes so long after the one before it was held up, as by a computer that slept."""
NOT_WRITABLE: Final = "the state cannot be written"
READ_SHARED_S: Final = 1.0
READ_NETWORK: Final = timedelta(seconds=10)
WATCHDOG_SHARE: Final = 3
CHANGES_LOGGED_MAX: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopState:
    """What the API may know of the newest cycle."""

    world: World
    verdicts: Mapping[JobId, Verdict]
    at: datetime


def _taken_on(world: World, now: datetime, *, asks_store: bool) -> Plan:
    """Go on with what a former process left."""
    plan = without_unwatched_waits(world)
    return combine(plan, after_restart(applied(world, plan), now, asks_store=asks_store))


class ControlLoop:
    """Decides and has done what follows; `reconcile_once` is one pass."""

    def __init__(
        self,
        *,
        commits: Commits,
        offer_cache: OfferCache,
        host_monitor: HostMonitor,
        executor: Executor,
        grant_writer: GrantWriter,
        clock: Clock,
        log: Logger,
        wake_event: WakeEvent,
        list_again: Callable[[ProviderName], None],
        alive: Callable[[], None],
        watchdog_s: float | None = None,
        read_every_s: float = READ_SHARED_S,
        succeeded: Callable[[JobId], None] = lambda _job: None,
        check_owners: Callable[[Mapping[ProviderName, Listing], World | None], None] = lambda _listings, _world: None,
        asks_store: bool = False,
    ) -> None:
        self._asks_store = asks_store
        self._commits = commits
        self._succeeded = succeeded
        self._check_owners = check_owners
        self._offer_cache = offer_cache
        offer_cache.awaits_list = self._awaits_list
        self._host_monitor = host_monitor
        self._executor = executor
        self._grant_writer = grant_writer
        self._clock = clock
        self._log = log
        self._wake_event = wake_event
        self._list_again = list_again
        self._alive = alive
        self._watchdog_s = watchdog_s
        self._read_every_s = read_every_s
        self._watched = WatchedProviders()
        self._listed_again: frozenset[ProviderName] = frozenset()
        """Of which the newest cycle asked for another list."""
        self._closely: frozenset[AttemptId] = frozenset()
        """Whose hosts the next cycle reads in full, since something about them cannot be decided otherwise."""
        self._outage = Outage(log, "state.held", "state.back", each_error=True, is_severe=True)
        # No deadline: a commit must not be cut off from the calls that it owes. The watchdog ends a pass that hangs.
        self.controller = Controller("control-loop", self._reconcile_or_hold, interval_s=HOLD_S, wake_event=wake_event)
        self._adopted = False
        self.contained: frozenset[Contained] = frozenset()
        """What the newest cycle left out, for `doctor`."""
        self.shared_silence: tuple[str, ...] = ()
        """Why silent hosts are not taken for lost at the moment."""
        self._durable: World | None = None
        """What was read from the state since it could be written last."""
        self._unsaved: World | None = None
        """What the world would be, had the decisions since the state was written last been written, too."""
        self.state: LoopState | None = None
        self.cycles = 0
        self.only_reconciles = False
        """While it begins and ends, the daemon keeps what runs and decides nothing: to explain to each waiting
        job that it must wait for that would rewrite all of them twice."""

    async def adopt(self) -> None:
        """Mark launches that a former process owed as unknown; everything it left is known and being kept.

        Raises:
            StoreError: the state cannot be written, so nothing may begin.
        """
        committed = await self._commits.commit(
            partial(_taken_on, asks_store=self._asks_store),
            (CrashPoint.BEFORE_COMMIT_ADOPT, CrashPoint.AFTER_COMMIT_ADOPT),
            contain=True,
        )
        self._adopted = True
        self._publish(committed)
        machines = len(committed.world.attempts)
        if machines:
            self._log.info("daemon.adopted", attempts=machines, intents=len(committed.world.intents))

    @property
    def held(self) -> str:
        """Why nothing is decided, empty while decisions are made."""
        return self._outage.error

    async def _reconcile_or_hold(self) -> Pause:
        """Reconcile; a pass that raises is held like one that cannot be written, and what runs is kept by the next."""
        try:
            pause_s = max(INTERVAL_MIN_S, await self.reconcile_once())
        except Exception as exc:  # noqa: BLE001 - the outermost loop: to end would leave every machine alone
            self._log.error("cycle.failed", exc_info=exc)
            self._outage.update(f"a cycle failed with {type(exc).__name__}: {exc}", hint="report this with the log")
            pause_s = HOLD_S
        self._alive()
        return Pause(gap_s=CYCLE_GAP_S, seconds=pause_s, error=self.held)

    async def whole_cycle(self, *, seconds: float) -> bool:
        """Return whether a pass that began after this call has ended within so many seconds."""
        target = self.cycles + 2
        with anyio.move_on_after(seconds):
            while self.cycles < target:
                self._wake_event.notify()
                await anyio.sleep(CYCLE_GAP_S)
        return self.cycles >= target

    async def reconcile_once(self) -> float:
        """Observe, decide, write it down and hand over what is owed; return the seconds until the next pass."""
        if not self._adopted:
            await self.adopt()
        listings = self._offer_cache.listings()
        self._check_owners(listings, None if self.state is None else self.state.world)
        notes = self._offer_cache.notes()
        unsaved_ends = self._executor.unsaved_ends
        closely, self._closely = self._closely, frozenset()
        reports = await self._host_monitor.read_hosts(self.state.world, closely) if self.state is not None else {}

        before: World | None = None

        def think(world: World, now: datetime) -> Plan:
            nonlocal before
            before = world
            fresh = self._host_monitor.fresh(reports, world)
            ended = record_unsaved_ends(world, unsaved_ends, now) if unsaved_ends else Plan()
            if self.state is not None and self._clock.real_seconds(now - self.state.at) > UNWATCHED_S:
                ended = combine(ended, without_unwatched_waits(applied(world, ended)))
            first = combine(ended, reconcile(applied(world, ended), listings, fresh, now))
            if self.only_reconciles:
                return replace(first, events=first.events + notes)
            second = decide(applied(world, first), self._market(reports), now)
            both = combine(first, second)
            return replace(both, events=both.events + notes) if notes else both

        try:
            committed = await self._commits.commit(think, cycle_points, contain=True)
        except StateError as exc:
            self._outage.update(exc.message, hint=exc.hint)
            await self._act_unsaved(think)
            return HOLD_S
        except InvariantBroken as exc:
            # Not even a quarantine can be written. To end would leave every machine alone, at each start again.
            self._outage.update(
                str(exc), hint="nothing is launched; spotctl doctor says more; report this with the log"
            )
            await self._act_unsaved(think)
            return HOLD_S
        self._outage.update("")
        self._unsaved = self._durable = None
        self._offer_cache.notes_committed(notes)
        self._executor.unsaved_ends_committed(unsaved_ends, before or committed.world)
        self._host_monitor.committed(reports)
        self._tell(committed, listings, reports)
        self._tell_contained(committed.plan.contained)
        self._log_shared_silence(committed.plan.shared_silence, committed.at)
        self._publish(committed)
        for job in committed.plan.jobs.values():
            if job.state is JobState.SUCCEEDED:
                self._succeeded(job.id)
        self._executor.take(committed.plan, committed.world)
        self._executor.end(committed.world)
        self._closely = committed.plan.full_reads
        self._listed_again = committed.plan.list_again
        for provider in sorted(self._listed_again):
            self._list_again(provider)
        self.cycles += 1
        return self._pause_s(committed)

    def _market(self, reports: Mapping[AttemptId, HostStatus]) -> MarketSnapshot:
        """Return the market with all that cannot be reached at the moment."""
        market = self._offer_cache.snapshot()
        away = self._host_monitor.last_error or self._grant_writer.store_error
        if not away and any(report.store_takes_no_writes for report in reports.values()):
            away = "it takes no writes"
        if market.readings is None:
            return market
        known = replace(market.readings, store_away=away, stored_at=self._grant_writer.stored_at)
        return replace(market, readings=known)

    def _tell_contained(self, contained: Iterable[Contained]) -> None:
        """Log each failure that was kept from everything else, when it begins."""
        now = frozenset(contained)
        for one in sorted(now - self.contained, key=lambda one: one.subject):
            self._log.error("failure.contained", subject=one.subject, error=one.error)
        self.contained = now

    def _log_shared_silence(self, shared_silence: tuple[str, ...], at: datetime) -> None:
        """Record when silence begins to be no evidence of a loss, and when it is again."""
        if shared_silence and not self.shared_silence:
            self._log.warning("silence.doubted", why=shared_silence[0])
            self._offer_cache.note("silence.doubted", shared_silence[0], {}, at=at)
        elif self.shared_silence and not shared_silence:
            self._log.info("silence.trusted")
            self._offer_cache.note("silence.trusted", "hosts give signs of life again", {}, at=at)
        self.shared_silence = shared_silence

    def _publish(self, committed: Committed) -> None:
        """Pollers, grants and the API work with this world from now on."""
        world = committed.world
        verdicts = committed.plan.verdicts
        if not verdicts and self.state is not None:
            verdicts = {job: v for job, v in self.state.verdicts.items() if job in world.jobs}
        self.state = LoopState(world=world, verdicts=verdicts, at=committed.at)
        wanted: dict[ProviderName, set[AttemptKey]] = {}
        for intent in world.intents.values():
            if intent.kind is IntentKind.LAUNCH and intent.state is IntentState.UNKNOWN:
                item = None if intent.attempt is None else world.attempts.get(intent.attempt)
                wanted.setdefault(intent.provider, set()).add(intent.key if item is None else item.carried_key)
        self._offer_cache.evidence.update(world, committed.at, verdicts.values())
        self._offer_cache.wanted = {provider: frozenset(keys) for provider, keys in wanted.items()}
        before = self._offer_cache.watched
        self._offer_cache.watched = self._watched.update(world, self._offer_cache.listings(), committed.at)
        for provider in sorted(self._offer_cache.watched - before):
            self._list_again(provider)
        self._grant_writer.update(world)

    def _awaits_list(self, provider: ProviderName) -> bool:
        newest = self._offer_cache.machines(provider).listing
        if self.state is None or newest is None or provider in self._listed_again:
            return True
        return awaits_list(self.state.world, provider, newest)

    def _pause_s(self, committed: Committed) -> float:
        if committed.plan.full_reads:
            return 0.0
        world, now = committed.world, committed.at
        dues = [now + world.policy.recheck_every]
        if committed.plan.wake_at is not None:
            dues.append(committed.plan.wake_at)
        owed = (i for i in world.intents.values() if _is_new(i.kind, i.state, IntentKind.TERMINATE))
        # One that is due already is under way; its outcome wakes the loop.
        dues.extend(intent.not_before for intent in owed if intent.not_before is not None and intent.not_before > now)
        pause_s = max(0.0, self._clock.real_seconds(min(dues) - self._clock.now()))
        if any(attempt.state.counts for attempt in world.attempts.values()):
            pause_s = min(pause_s, self._host_monitor.next_listing_s() or self._read_every_s)
        if self._watchdog_s is not None:
            pause_s = min(pause_s, self._watchdog_s / WATCHDOG_SHARE)
        return pause_s

    async def _act_unsaved(self, think: Decide) -> None:
        """Stop and end what the core would, without a row for it; launch nothing."""
        if self.state is None:
            return
        try:
            durable = await self._commits.world()
        except StateError:
            durable = self._durable or self.state.world
        if self._unsaved is None or self._durable is None or not _same_rows(durable, self._durable):
            self._unsaved = durable
        self._durable = durable
        world = self._unsaved
        held = replace(world.policy, launches_paused=NOT_WRITABLE)
        plan = think(replace(world, policy=held), self._clock.now())
        self._unsaved = applied(world, plan)
        self._closely = plan.full_reads
        for provider in sorted(plan.list_again):
            self._list_again(provider)
        self._grant_writer.update(self._unsaved)
        self._executor.end_unsaved(self._unsaved)

    def _tell(
        self, committed: Committed, listings: Mapping[ProviderName, Listing], reports: Mapping[AttemptId, HostStatus]
    ) -> None:
        """Log a decision that changed something, in one wide line."""
        plan = committed.plan
        if not (plan.events or plan.intents or plan.jobs):
            return  # a heartbeat moved, which is no decision
        fields: dict[str, Any] = {
            "jobs": len(committed.world.jobs),
            "attempts": len(committed.world.attempts),
            "listings": len(listings),
            "reports": len(reports),
            "launches": sorted(i.key for i in plan.intents.values() if _is_new(i.kind, i.state, IntentKind.LAUNCH)),
            "endings": sorted(i.key for i in plan.intents.values() if _is_new(i.kind, i.state, IntentKind.TERMINATE)),
            "changed": {str(job): item.state.value for job, item in sorted(plan.jobs.items())[:CHANGES_LOGGED_MAX]},
            "events": dict(Counter(event.kind for event in plan.events)),
            "took_ms": round(self._clock.real_seconds(self._clock.now() - committed.at) * 1000, 1),
        }
        self._log.info("cycle.decided", **{name: value for name, value in fields.items() if value not in ([], {})})


def _same_rows(one: World, other: World) -> bool:
    return (one.jobs, one.attempts, one.intents) == (other.jobs, other.attempts, other.intents)


def _is_new(kind: IntentKind, state: IntentState, wanted: IntentKind) -> bool:
    return kind is wanted and state is IntentState.OPEN


def read_pace_s(clock: Clock, shared_by: str) -> float:
    """Return how often hosts are read: cheaply on a folder, seldom enough on a network store to cost nothing."""
    real = max(INTERVAL_MIN_S, clock.real_seconds(READ_NETWORK))
    return min(real, READ_SHARED_S) if shared_by == "filesystem" else real


# Folds what is too old or too much in the state, a piece at a time.


PACE: Final = timedelta(minutes=5)
PIECES_PER_ROUND: Final = 4


class Housekeeping:
    """Bounds the size of the state. `reconcile_once` is one pass."""

    def __init__(self, database: Database, *, clock: Clock, log: Logger, rules: Folding | None = None) -> None:
        self._database = database
        self._clock = clock
        self._log = log
        self._rules = rules or Folding()
        self.controller = Controller(
            "housekeeping",
            self.reconcile_once,
            interval_s=clock.real_seconds(PACE),
            expected=(StateError,),
            outage=Outage(log, "housekeeping.held", "housekeeping.back"),
            is_first_run_late=True,
        )

    async def reconcile_once(self) -> None:
        await self.fold()

    async def fold(self) -> int:
        """Fold some pieces, each in a transaction of its own; return how many rows are gone.

        Raises:
            StateError: the state cannot be written.
        """
        gone = 0
        for _ in range(PIECES_PER_ROUND):
            count = await self._database.tx(lambda tx: tx.fold(self._clock.now(), self._rules))
            gone += count
            if count == 0:
                break
        if gone:
            self._log.info("housekeeping.folded", rows=gone)
        return gone


def awaits_list(world: World, provider: ProviderName, newest: Listing) -> bool:
    """Whether a list that is like this newest one, but for its instant, may change what is decided.

    It does not where no row of the state concerns the provider: it repeats what is not ours. Nor for a machine that
    runs, of which it repeats that it runs as agreed: the next decision, which its host is read for, comes soon enough.
    """
    if any(intent.provider == provider for intent in world.intents.values()):
        return True
    if any(job.moves.proposed is not None for job in world.jobs.values()):
        return True  # it waits for a second list of a machine, which may be another job's
    rows = newest.instances if newest.complete else ()
    runs = {(row.ref, row.key) for row in rows if row.state is InstanceState.RUNNING}
    items = (item for item in world.attempts.values() if item.provider == provider)
    return any((item.ref, item.carried_key) not in runs or not _only_runs(item) for item in items)


def _only_runs(item: Attempt) -> bool:
    """Whether its machine runs, and nothing about it waits for a second list."""
    if item.state is not AttemptState.RUNNING or item.machine is not MachineState.LIVE or not item.ever_listed:
        return False
    first_lists = (item.missing_since, item.over_since, item.over_ceiling_at, item.bidding.seen, item.bidding.leapt_at)
    under_way = (item.stop, item.notice_at, item.bidding.held_since)
    return not item.awaits_handover and all(one is None for one in (*first_lists, *under_way))
