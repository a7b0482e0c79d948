"""Every change of the state goes through here: load the world, ask the core, write the answer, check the rules."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from functools import reduce
from typing import Final, TypeVar

import anyio
import anyio.to_thread

from spotd.core.domain.intents import IntentKind, IntentState, JobId
from spotd.core.domain.plan import Plan, applied, broken_rules, combine
from spotd.core.domain.policy import Policy
from spotd.core.domain.states import AttemptState, InvariantBroken
from spotd.core.domain.world import World
from spotd.core.kernel.quarantine import parts, sealing, set_aside, sound
from spotd.store import Reads, Store, Tx
from spotd.store.place import StateError
from spotd_jobs.objects.api import StoreError
from spotd_providers.contract.provider import Clock
from spotd_providers.contract.values import ProviderName

# Named points at which a test may end the daemon as a power cut would.
#
# The list is closed, so that a test can enumerate it and a point that is reached no more is noticed. Production
# passes `never`, which costs a function call.


class CrashPoint(StrEnum):
    """Before and after each kind of commit, each provider call and each write to the object store."""

    BEFORE_COMMIT_SUBMIT = "before_commit_submit"
    AFTER_COMMIT_SUBMIT = "after_commit_submit"
    BEFORE_COMMIT_CANCEL = "before_commit_cancel"
    AFTER_COMMIT_CANCEL = "after_commit_cancel"
    BEFORE_COMMIT_RETRY = "before_commit_retry"
    AFTER_COMMIT_RETRY = "after_commit_retry"
    BEFORE_COMMIT_ADOPT = "before_commit_adopt"
    AFTER_COMMIT_ADOPT = "after_commit_adopt"
    BEFORE_COMMIT_CYCLE_LAUNCH = "before_commit_cycle_launch"
    AFTER_COMMIT_CYCLE_LAUNCH = "after_commit_cycle_launch"
    BEFORE_COMMIT_CYCLE_HANDOVER = "before_commit_cycle_handover"
    AFTER_COMMIT_CYCLE_HANDOVER = "after_commit_cycle_handover"
    BEFORE_COMMIT_CYCLE_TERMINATE = "before_commit_cycle_terminate"
    AFTER_COMMIT_CYCLE_TERMINATE = "after_commit_cycle_terminate"
    BEFORE_COMMIT_CYCLE_ORDER = "before_commit_cycle_order"
    AFTER_COMMIT_CYCLE_ORDER = "after_commit_cycle_order"
    BEFORE_COMMIT_CYCLE_OTHER = "before_commit_cycle_other"
    AFTER_COMMIT_CYCLE_OTHER = "after_commit_cycle_other"
    BEFORE_COMMIT_LAUNCH_SENT = "before_commit_launch_sent"
    AFTER_COMMIT_LAUNCH_SENT = "after_commit_launch_sent"
    BEFORE_COMMIT_LAUNCHED = "before_commit_launched"
    AFTER_COMMIT_LAUNCHED = "after_commit_launched"
    BEFORE_COMMIT_LAUNCH_REFUSED = "before_commit_launch_refused"
    AFTER_COMMIT_LAUNCH_REFUSED = "after_commit_launch_refused"
    BEFORE_COMMIT_LAUNCH_UNKNOWN = "before_commit_launch_unknown"
    AFTER_COMMIT_LAUNCH_UNKNOWN = "after_commit_launch_unknown"
    BEFORE_COMMIT_TERMINATE_ACCEPTED = "before_commit_terminate_accepted"
    AFTER_COMMIT_TERMINATE_ACCEPTED = "after_commit_terminate_accepted"
    BEFORE_COMMIT_TERMINATE_FAILED = "before_commit_terminate_failed"
    AFTER_COMMIT_TERMINATE_FAILED = "after_commit_terminate_failed"
    BEFORE_COMMIT_REPLACE_SENT = "before_commit_replace_sent"
    AFTER_COMMIT_REPLACE_SENT = "after_commit_replace_sent"
    BEFORE_COMMIT_REPLACED = "before_commit_replaced"
    AFTER_COMMIT_REPLACED = "after_commit_replaced"
    BEFORE_OFFERS = "before_offers"
    AFTER_OFFERS = "after_offers"
    BEFORE_INSTANCES = "before_instances"
    AFTER_INSTANCES = "after_instances"
    BEFORE_FIND = "before_find"
    AFTER_FIND = "after_find"
    BEFORE_LAUNCH = "before_launch"
    AFTER_LAUNCH = "after_launch"
    BEFORE_TERMINATE = "before_terminate"
    AFTER_TERMINATE = "after_terminate"
    BEFORE_PUT_RUNNER = "before_put_runner"
    AFTER_PUT_RUNNER = "after_put_runner"
    BEFORE_PUT_SPEC = "before_put_spec"
    AFTER_PUT_SPEC = "after_put_spec"
    BEFORE_PUT_GRANT = "before_put_grant"
    AFTER_PUT_GRANT = "after_put_grant"
    BEFORE_RENEW_GRANT = "before_renew_grant"
    AFTER_RENEW_GRANT = "after_renew_grant"
    BEFORE_PUT_NEXT = "before_put_next"
    AFTER_PUT_NEXT = "after_put_next"
    BEFORE_SUPERSEDE_GRANT = "before_supersede_grant"
    AFTER_SUPERSEDE_GRANT = "after_supersede_grant"
    BEFORE_WRITE_SECRETS = "before_write_secrets"
    AFTER_WRITE_SECRETS = "after_write_secrets"
    BEFORE_PUT_CODE = "before_put_code"
    AFTER_PUT_CODE = "after_put_code"


CrashPoints = Callable[[CrashPoint], None]
"""Called at each point; returns, or never returns."""


def never(point: CrashPoint) -> None:
    """Nothing happens: the crash points of production."""


Decide = Callable[[World, datetime], Plan]
DecideWith = Callable[[Reads, World, datetime], Plan]
"""Decides also about what is over and no part of the world any more."""
Beside = Callable[[Tx], None]
"""Writes what no plan holds, in the transaction of a plan and after it."""
Points = tuple[CrashPoint, CrashPoint]


class PolicyHolder:
    """The policy in force: from the config, plus what the daemon itself knows at the moment."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.paused = ""
        """A sentence while nothing may be launched."""
        self.gates: list[Callable[[], str]] = []
        """What forbids launches, asked each time: a sentence, or nothing."""
        self.owned: Callable[[Policy], Policy] = lambda policy: policy
        """Completes the policy by whose machines are ours, which no config says."""
        self.locked: Callable[[], Mapping[JobId, str]] = dict
        """Jobs whose secrets cannot be read now, and why."""
        self.accounts: dict[ProviderName, str] = {}
        """What names the account of the key in use, where a provider has stated it."""

    @property
    def current(self) -> Policy:
        why = self.why_paused
        policy = self.owned(self._policy)
        if locked := self.locked():
            policy = replace(policy, locked=locked)
        if self.accounts:
            providers = {n: replace(p, account=self.accounts.get(n, "")) for n, p in policy.providers.items()}
            policy = replace(policy, providers=providers)
        return replace(policy, launches_paused=why) if why else policy

    @property
    def why_paused(self) -> str:
        """Why nothing may be launched now, in a sentence; empty while launches are allowed."""
        return self.paused or next((why for why in (gate() for gate in self.gates) if why), "")

    def reload(self, policy: Policy) -> None:
        self._policy = policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A plan that is durable, and the world with it."""

    world: World
    plan: Plan
    at: datetime


class Commits:
    """The one way in which the daemon changes its state."""

    def __init__(self, database: Database, policy: PolicyHolder, clock: Clock, crash: CrashPoints) -> None:
        self._database = database
        self._policy = policy
        self._clock = clock
        self._crash = crash
        self._checked = False

    @property
    def policy(self) -> Policy:
        return self._policy.current

    async def world(self) -> World:
        """Return the newest durable world.

        Raises:
            StoreError: it cannot be read.
        """
        policy, now = self._policy.current, self._clock.now()
        return await self._database.read(lambda reads: reads.world(policy, now))

    async def commit(
        self, decide: Decide, points: Points | Callable[[Plan], Points], *, contain: bool = False
    ) -> Committed:
        """Write what the core decided about the newest world, in one transaction.

        Args:
            contain: a job whose part of the plan cannot be written is quarantined, and the rest is written.

        Raises:
            StoreError: nothing was written.
            InvariantBroken: the plan would break a rule; nothing was written.
        """
        return await self.commit_with(lambda _reads, world, now: decide(world, now), points, contain=contain)

    async def commit_with(
        self,
        decide: DecideWith,
        points: Points | Callable[[Plan], Points],
        *,
        contain: bool = False,
        beside: Beside | None = None,
    ) -> Committed:
        """Do the same for what can be decided only with rows beyond the world.

        Args:
            beside: is called where the plan is not empty.

        Raises:
            StoreError, InvariantBroken: as `commit`.
        """
        refused: dict[JobId, str] = {}
        while True:
            try:
                return await self._commit_once(decide, points, refused, contain=contain, beside=beside)
            except InvariantBroken:
                found = await self._refused_parts(decide, refused) if contain else {}
                if not found:
                    raise
                refused.update(found)

    async def _commit_once(
        self,
        decide: DecideWith,
        points: Points | Callable[[Plan], Points],
        refused: Mapping[JobId, str],
        *,
        contain: bool,
        beside: Beside | None,
    ) -> Committed:
        chosen: list[Points] = []

        def work(tx: Tx) -> Committed:
            committed = self._plan_and_world(tx, decide, refused, contain=contain)
            if committed.plan.is_empty:
                return committed
            pair = points(committed.plan) if callable(points) else points
            chosen.append(pair)
            tx.commit(committed.plan)
            if beside is not None:
                beside(tx)
            self._crash(pair[0])
            return committed

        try:
            committed = await self._database.tx(work)
        except BaseException:
            self._checked = False  # what the check added may not be stored
            raise
        for pair in chosen:
            self._crash(pair[1])
        return committed

    def _plan_and_world(self, tx: Tx, decide: DecideWith, refused: Mapping[JobId, str], *, contain: bool) -> Committed:
        """Return the plan, and the world it leads to, which breaks no rule.

        Raises:
            InvariantBroken: it would, and nothing is to be quarantined for it.
        """
        now = self._clock.now()
        world = tx.world(self._policy.current, now)
        first = sealing(world, now) if world.unreadable else Plan()
        world = applied(world, first)
        plan = decide(tx, world, now)
        if contain:
            plan = set_aside(world, plan, refused, now) if refused else plan
            # What did not change holds as it did; what an older spotd or another program wrote is checked once.
            is_sound = self._checked and plan.is_empty
            plan, after = (plan, world) if is_sound else sound(world, plan, now)
            self._checked = True
            return Committed(world=after, plan=combine(first, plan), at=now)
        after = applied(world, plan)
        found = broken_rules(after)
        self._checked = self._checked and not found
        broken = [one.sentence for one in found if one.job in plan.jobs]
        if broken:
            raise InvariantBroken("; ".join(broken))
        return Committed(world=after, plan=combine(first, plan), at=now)

    async def _refused_parts(self, decide: DecideWith, refused: Mapping[JobId, str]) -> dict[JobId, str]:
        """Jobs whose part of the plan the state refuses, and why, found by trying parts without keeping them."""
        found: dict[JobId, str] = {}

        async def search(jobs: Sequence[JobId]) -> None:
            error = await self._trial(decide, refused, jobs)
            if not error:
                return
            if len(jobs) == 1:
                found[jobs[0]] = error
                return
            await search(jobs[: len(jobs) // 2])
            await search(jobs[len(jobs) // 2 :])

        touched: list[JobId] = []

        def list_jobs(tx: Tx) -> None:
            touched.extend(parts(self._plan_and_world(tx, decide, refused, contain=True).plan))

        try:
            await self._database.tx(list_jobs)
            await search(touched)
        finally:
            self._checked = False  # nothing of what was checked here is kept
        return {job: error for job, error in found.items() if job not in refused}

    async def _trial(self, decide: DecideWith, refused: Mapping[JobId, str], jobs: Sequence[JobId]) -> str:
        """Why the state refuses what the plan holds for these jobs; nothing of it is kept."""

        def work(tx: Tx) -> None:
            pieces = parts(self._plan_and_world(tx, decide, refused, contain=True).plan)
            tx.commit(reduce(combine, (pieces[job] for job in jobs if job in pieces), Plan()))
            raise _TrialOver

        try:
            await self._database.tx(work)
        except _TrialOver:
            return ""
        except InvariantBroken as exc:
            return str(exc)
        return ""


class _TrialOver(Exception):
    """Ends a transaction that nothing is to be kept of."""


def cycle_points(plan: Plan) -> Points:
    """Which pair of crash points a cycle's commit is: named for the most consequential thing in it."""
    fresh = {intent.kind for intent in plan.intents.values() if intent.state is IntentState.OPEN}
    if IntentKind.LAUNCH in fresh:
        return CrashPoint.BEFORE_COMMIT_CYCLE_LAUNCH, CrashPoint.AFTER_COMMIT_CYCLE_LAUNCH
    former = {attempt.key for attempt in plan.attempts.values() if attempt.state is AttemptState.ENDED}
    if any(attempt.former_key in former and attempt.state.counts for attempt in plan.attempts.values()):
        return CrashPoint.BEFORE_COMMIT_CYCLE_HANDOVER, CrashPoint.AFTER_COMMIT_CYCLE_HANDOVER
    if IntentKind.TERMINATE in fresh:
        return CrashPoint.BEFORE_COMMIT_CYCLE_TERMINATE, CrashPoint.AFTER_COMMIT_CYCLE_TERMINATE
    if any(attempt.stop is not None for attempt in plan.attempts.values()):
        return CrashPoint.BEFORE_COMMIT_CYCLE_ORDER, CrashPoint.AFTER_COMMIT_CYCLE_ORDER
    return CrashPoint.BEFORE_COMMIT_CYCLE_OTHER, CrashPoint.AFTER_COMMIT_CYCLE_OTHER


# The state store as the daemon reaches it: one transaction at a time, off the event loop.
#
# Transactions run in one worker thread and reads in another.


# The one door through which the daemon runs blocking calls: few threads, each call with a deadline.
#
# In a simulation there are no threads: the same calls run inline, so that a test's order of events is the program's and
# nothing else's.


T = TypeVar("T")


LEFT_BEHIND_MAX: Final = 16
"""So many threads may hang in calls whose callers have given them up; the next call waits for one of them."""
_ROOM_ASKED_EVERY_S: Final = 1.0


class Threads:
    """At most `count` blocking calls at a time, beside those that were given up."""

    def __init__(self, count: int = 1, *, inline: bool = False) -> None:
        self._count = count
        self._inline = inline
        self._limiter: anyio.CapacityLimiter | None = None
        self._under_way: set[object] = set()

    async def run(self, work: Callable[[], T], *, deadline_s: float = math.inf) -> T:
        """Return what the call returned. A thread cannot be stopped: a caller that is cancelled leaves it behind.

        Raises:
            TimeoutError: nothing within the deadline; the call may still take effect.
        """
        if self._inline:
            return work()
        call = object()

        def noted() -> T:
            self._under_way.add(call)
            try:
                return work()
            finally:
                self._under_way.discard(call)

        with anyio.fail_after(deadline_s):
            while len(self._under_way) >= self._count + LEFT_BEHIND_MAX:  # noqa: ASYNC110 - a thread sets no event here
                await anyio.sleep(_ROOM_ASKED_EVERY_S)
            return await anyio.to_thread.run_sync(noted, abandon_on_cancel=True, limiter=self._limit())

    async def run_to_end(self, work: Callable[[], T]) -> T:
        """Return what the call returned; a caller that is cancelled waits for its end."""
        return work() if self._inline else await anyio.to_thread.run_sync(work, limiter=self._limit())

    def _limit(self) -> anyio.CapacityLimiter:
        # Not earlier: it belongs to the event loop that runs by now.
        self._limiter = self._limiter or anyio.CapacityLimiter(self._count)
        return self._limiter


class StoreThreads(Threads):
    """Threads for calls of the object store; its silence is one of its errors."""

    async def run(self, work: Callable[[], T], *, deadline_s: float = math.inf) -> T:
        """Return what the call returned.

        Raises:
            StoreError: the store refused, or did not answer within the deadline.
        """
        try:
            return await super().run(work, deadline_s=deadline_s)
        except TimeoutError as exc:
            raise StoreError(f"the checkpoint store did not answer within {deadline_s:.0f} s") from exc


PROOF: Final = "written"
"""A fact in the state that says nothing: writing it shows that the state can be written again."""


class Database:
    """The state store off the event loop. `last_error`: why it cannot be written or read, empty when it can."""

    def __init__(self, store: Store, *, inline: bool = False) -> None:
        self._store = store
        self._writer = Threads(inline=inline)
        self._reader = Threads(inline=inline)
        self._writing = ""
        self._reading = ""

    @property
    def last_error(self) -> str:
        return self._writing or self._reading

    @property
    def is_shared(self) -> bool:
        """Whether a daemon on another computer may go on with this state."""
        return self._store.is_shared

    @property
    def term(self) -> str:
        """What names the lead of this process; empty where no other can lead."""
        return self._store.term

    def state_api(self, url: str, certificate: str, proofs: Sequence[str]) -> None:
        """State to those that wait where this process serves its API; nowhere where the URL is empty."""
        self._store.state_api(url, certificate, proofs)

    @property
    def is_lost(self) -> bool:
        """Whether another process may write this state: this one is to end at once."""
        return self._store.is_lost

    async def tx(self, work: Callable[[Tx], T]) -> T:
        """Return what the work returned, durably committed.

        A transaction that has begun is never abandoned: a cancelled caller waits for its end, because "maybe
        committed" is what the intents exist to avoid. After a failure the next one must write something, since one
        that has nothing to write succeeds on a full disk, too.

        Raises:
            StoreError: nothing of it was written.
        """

        def proven(tx: Tx) -> T:
            result = work(tx)
            tx.set_meta(PROOF, "1")
            return result

        try:
            result = await self._writer.run_to_end(lambda: self._store.tx(proven if self._writing else work))
        except StateError as exc:
            self._writing = exc.message
            raise
        self._writing = ""
        return result

    async def read(self, work: Callable[[Reads], T]) -> T:
        """Return what the work read, from one consistent state."""
        try:
            result = await self._reader.run_to_end(lambda: self._store.read(work))
        except StateError as exc:
            self._reading = exc.message
            raise
        self._reading = ""
        return result

    def read_here(self, work: Callable[[Reads], T]) -> T:
        """Do the same in a thread of the caller's own, which may wait."""
        return self._store.read(work)
