"""Every change of the state goes through here: load the world, ask the core, write the answer, check the rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import reduce

from spotd.core.domain.ids import JobId
from spotd.core.domain.intents import IntentKind, IntentState
from spotd.core.domain.policy import Policy
from spotd.core.domain.states import InvariantBroken
from spotd.core.domain.world import World
from spotd.core.plans.applied import applied, combine
from spotd.core.plans.invariants import broken_rules
from spotd.core.plans.plan import Plan
from spotd.core.quarantine import parts, sealing, set_aside, sound
from spotd.daemon.crash import CrashPoint, CrashPoints
from spotd.daemon.database import Database
from spotd.store import Reads, Tx
from spotd_providers.contract.provider import Clock
from spotd_providers.contract.values import ProviderName

Decide = Callable[[World, datetime], Plan]
DecideWith = Callable[[Reads, World, datetime], Plan]
"""Decides also about what is over and no part of the world any more."""
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
        self.accounts: dict[ProviderName, str] = {}
        """What names the account of the key in use, where a provider has stated it."""

    @property
    def current(self) -> Policy:
        why = self.why_paused
        policy = self.owned(self._policy)
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
        self, decide: DecideWith, points: Points | Callable[[Plan], Points], *, contain: bool = False
    ) -> Committed:
        """Do the same for what can be decided only with rows beyond the world.

        Raises:
            StoreError, InvariantBroken: as `commit`.
        """
        refused: dict[JobId, str] = {}
        while True:
            try:
                return await self._commit_once(decide, points, refused, contain=contain)
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
    ) -> Committed:
        chosen: list[Points] = []

        def work(tx: Tx) -> Committed:
            committed = self._planned(tx, decide, refused, contain=contain)
            if committed.plan.is_empty:
                return committed
            pair = points(committed.plan) if callable(points) else points
            chosen.append(pair)
            tx.commit(committed.plan)
            self._crash(pair[0])
            return committed

        committed = await self._database.tx(work)
        for pair in chosen:
            self._crash(pair[1])
        return committed

    def _planned(self, tx: Tx, decide: DecideWith, refused: Mapping[JobId, str], *, contain: bool) -> Committed:
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
            plan = sound(world, plan, now) if not (plan.is_empty and self._checked) else plan
            self._checked = True
        after = applied(world, plan)
        broken = [] if contain else [one.sentence for one in broken_rules(after) if one.job in plan.jobs]
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
            touched.extend(parts(self._planned(tx, decide, refused, contain=True).plan))

        await self._database.tx(list_jobs)
        await search(touched)
        return {job: error for job, error in found.items() if job not in refused}

    async def _trial(self, decide: DecideWith, refused: Mapping[JobId, str], jobs: Sequence[JobId]) -> str:
        """Why the state refuses what the plan holds for these jobs; nothing of it is kept."""

        def work(tx: Tx) -> None:
            pieces = parts(self._planned(tx, decide, refused, contain=True).plan)
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
    if IntentKind.TERMINATE in fresh:
        return CrashPoint.BEFORE_COMMIT_CYCLE_TERMINATE, CrashPoint.AFTER_COMMIT_CYCLE_TERMINATE
    if any(attempt.stop is not None for attempt in plan.attempts.values()):
        return CrashPoint.BEFORE_COMMIT_CYCLE_ORDER, CrashPoint.AFTER_COMMIT_CYCLE_ORDER
    return CrashPoint.BEFORE_COMMIT_CYCLE_OTHER, CrashPoint.AFTER_COMMIT_CYCLE_OTHER
