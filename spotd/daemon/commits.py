"""Every change of the state goes through here: load the world, ask the core, write the answer, check the rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime

from spotd.core.invariants import check
from spotd.core.model import IntentKind, IntentState, Plan, Policy, World
from spotd.core.plans import applied
from spotd.core.states import InvariantBroken
from spotd.daemon.crash import CrashPoint, CrashPoints
from spotd.daemon.database import Database
from spotd.store import Reads, Tx
from spotd_providers.contract.provider import Clock

Decide = Callable[[World, datetime], Plan]
DecideWith = Callable[[Reads, World, datetime], Plan]
"""Decides also about what is over and no part of the world any more."""
Points = tuple[CrashPoint, CrashPoint]


class PolicyBox:
    """The policy in force: from the config, plus what the daemon itself knows at the moment."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.paused = ""
        """A sentence while nothing may be launched."""
        self.gates: list[Callable[[], str]] = []
        """What forbids launches, asked each time: a sentence, or nothing."""
        self.owned: Callable[[Policy], Policy] = lambda policy: policy
        """Completes the policy by whose machines are ours, which no config says."""

    @property
    def current(self) -> Policy:
        why = self.why_paused
        policy = self.owned(self._policy)
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

    def __init__(self, database: Database, policy: PolicyBox, clock: Clock, crash: CrashPoints) -> None:
        self._database = database
        self._policy = policy
        self._clock = clock
        self._crash = crash

    async def world(self) -> World:
        """The newest durable world.

        Raises:
            StoreError: it cannot be read.
        """
        policy, now = self._policy.current, self._clock.now()
        return await self._database.read(lambda reads: reads.world(policy, now))

    async def commit(self, decide: Decide, points: Points | Callable[[Plan], Points]) -> Committed:
        """What the core decided about the newest world is written, in one transaction.

        Raises:
            StoreError: nothing was written.
            InvariantBroken: the plan would break a rule; nothing was written, and the daemon must stop.
        """
        return await self.commit_with(lambda _reads, world, now: decide(world, now), points)

    async def commit_with(self, decide: DecideWith, points: Points | Callable[[Plan], Points]) -> Committed:
        """The same, for what can be decided only with a look at rows beyond the world.

        Raises:
            StoreError, InvariantBroken: as `commit`.
        """
        policy = self._policy.current
        chosen: list[Points] = []

        def work(tx: Tx) -> Committed:
            now = self._clock.now()
            world = tx.world(policy, now)
            plan = decide(tx, world, now)
            after = applied(world, plan)
            if plan.is_empty:
                return Committed(world=after, plan=plan, at=now)
            broken = check(after)
            if broken:
                raise InvariantBroken("; ".join(broken))
            pair = points(plan) if callable(points) else points
            chosen.append(pair)
            tx.commit(plan)
            self._crash(pair[0])
            return Committed(world=after, plan=plan, at=now)

        committed = await self._database.tx(work)
        for pair in chosen:
            self._crash(pair[1])
        return committed


def cycle_points(plan: Plan) -> Points:
    """Which pair of crash points a brain cycle's commit is: named for the most consequential thing in it."""
    fresh = {intent.kind for intent in plan.intents.values() if intent.state is IntentState.OPEN}
    if IntentKind.LAUNCH in fresh:
        return CrashPoint.BEFORE_COMMIT_CYCLE_LAUNCH, CrashPoint.AFTER_COMMIT_CYCLE_LAUNCH
    if IntentKind.TERMINATE in fresh:
        return CrashPoint.BEFORE_COMMIT_CYCLE_TERMINATE, CrashPoint.AFTER_COMMIT_CYCLE_TERMINATE
    if any(attempt.stop is not None for attempt in plan.attempts.values()):
        return CrashPoint.BEFORE_COMMIT_CYCLE_ORDER, CrashPoint.AFTER_COMMIT_CYCLE_ORDER
    return CrashPoint.BEFORE_COMMIT_CYCLE_OTHER, CrashPoint.AFTER_COMMIT_CYCLE_OTHER
