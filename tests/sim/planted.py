"""Daemons with a known bug each, to prove that the oracles see what they claim to see."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import pytest

from spotd.core import budgets, requests
from spotd.core.domain.attempts import Attempt, HostStatus, MachineState
from spotd.core.domain.intents import AttemptId, Intent, JobId
from spotd.core.domain.jobs import Job
from spotd.core.domain.plan import Plan
from spotd.core.domain.world import World
from spotd.core.kernel import launch_calls, listed, reconcile
from spotd.core.kernel.loss_evidence import LossEvidence
from spotd.core.kernel.outcomes import LaunchFailure
from spotd.core.placement import JobPlacement
from spotd.core.plan_builder import PlanBuilder
from spotd.core.ranking import candidates
from spotd.daemon import control_loop
from spotd.daemon.calls import LaunchRefusal
from spotd.daemon.executor import Executor
from spotd_providers.contract.values import (
    Instance,
    InstanceRef,
    InstanceState,
    Listing,
    MicroUsd,
    MicroUsdPerHour,
    Offer,
)
from tests.sim.daemon import CANCEL, Daemon
from tests.sim.hazards import Hazard
from tests.sim.machines import LostAnswer, Refused, Row, Save, Task
from tests.sim.worlds import Shape

ROUGH = Shape(jobs=8, hosts=6, storm=timedelta(hours=8))


@dataclass(frozen=True, kw_only=True)
class Bug:
    """A daemon that is wrong in one way, and the rule that must notice."""

    daemon: type[Daemon] = Daemon
    patch: Callable[[], AbstractContextManager[None]] = nullcontext
    rule: tuple[str, ...] = ()
    shape: Shape = ROUGH
    seed: int = 0
    """A world that is known to give it away; the others are tried when it does no more."""
    limit: timedelta | None = None
    """A bug that buys without end is watched for the first hours only."""
    until: timedelta | None = None
    """By then a rule of `AT_ONCE` has noticed it. What comes later in the world neither gives the bug away nor shows
    that the real daemon is free of it, so neither run goes on. A bug whose rule judges the end of a world has none."""


def small(shape: Shape, **changes: Any) -> Shape:
    """The same world with half the jobs and machines, and less work, for a bug that shows there as well."""
    return replace(shape, **{"jobs": 4, "hosts": 4, "need": (20, 150), **changes})


class NoIntent(Daemon):
    """Buys first and writes down afterwards."""

    def before_commit(self, plan: Plan) -> None:
        for item in plan.attempts.values():
            if item.id not in self.world.attempts:
                owner = plan.jobs.get(item.id.job) or self.world.jobs[item.id.job]
                cloud = self.clouds[item.provider]
                with suppress(LostAnswer, Refused):
                    cloud.launch(item.key, item.quote.offer, item.price_max, self.task(owner), timedelta(hours=1))


class NoWindow(Daemon):
    """Looks once after a lost answer and believes that nothing is there."""

    def boot(self) -> None:
        rules = self.world.policy.providers
        hasty = {n: replace(r, reconcile_window=timedelta(0)) for n, r in rules.items()}
        self.policy.reload(replace(self.world.policy, providers=hasty))
        super().boot()


class TrustsAnyPrice(Daemon):
    """Takes a missing price for a free machine."""

    def translated(self, rows: list[Row]) -> tuple[Offer, ...]:
        return tuple(replace(r.offer, gpu_price=MicroUsdPerHour(r.price if type(r.price) is int else 0)) for r in rows)


class CancelsInMemory(Daemon):
    """Says yes to a cancel and keeps it in memory until the next poll."""

    def cancel(self, job: JobId) -> None:
        held = self.world.jobs.get(job)
        if held is not None and not held.state.is_final:
            self.told.cancels[job] = self.now

            def later() -> None:
                if job in self.world.jobs:
                    self.request(lambda world, now: requests.cancel(world, job, now), CANCEL)

            self.soon(timedelta(hours=1), later)


class BelievesEveryListing(Daemon):
    """Takes a page for the whole list."""

    def understood(self, listing: Listing) -> Listing:
        return replace(listing, complete=True)


class ResumesFromTheOldest(Daemon):
    """Hands out the wrong end of the list of checkpoints."""

    def task(self, owner: Job) -> Task:
        task = super().task(owner)
        if not owner.checkpoints:
            return task
        return replace(task, resume_at=timedelta(seconds=owner.checkpoints[-1].step or 0))


class ReadsTheDead(Daemon):
    """Goes on taking in what the hosts of ended attempts write."""

    def look(self) -> dict[AttemptId, HostStatus]:
        for item in self.world.attempts.values():
            if item.state.counts:
                continue
            owner = self.world.jobs[item.id.job]
            late = self.report(item).checkpoints
            if late:
                fresh = replace(owner, checkpoints=tuple(reversed(late)) + owner.checkpoints)
                self.world = replace(self.world, jobs={**self.world.jobs, owner.id: fresh})
        return super().look()


class AcceptsUnseen(Daemon):
    """Takes a manifest for a checkpoint."""

    def acceptable(self, save: Save) -> bool:
        return True


class BlindIsSilent(Daemon):
    """Takes a store that does not answer for hosts that do not speak."""

    def look(self) -> dict[AttemptId, HostStatus]:
        blank = {i: HostStatus(attempt=i, read_at=self.now) for i, a in self.world.attempts.items() if a.state.counts}
        return {**blank, **super().look()}


@contextmanager
def patched(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for target, name, value in changes:
            patch.setattr(target, name, value)
        yield


# --- wrong in the control loop and the executor ---


def relaunches_after_a_timeout() -> AbstractContextManager[None]:
    """Takes a time-out for a no."""
    settle = Executor._settle_launch

    async def wrong(self: Executor, attempt: Attempt, answer: Any) -> None:
        lost = isinstance(answer, str)
        await settle(self, attempt, LaunchRefusal(failure=LaunchFailure.UNAVAILABLE, detail=answer) if lost else answer)

    return patched((Executor, "_settle_launch", wrong))


def asks_again_in_the_same_words() -> AbstractContextManager[None]:
    """Answers a time-out by a second call under the same key."""
    buy = Executor._buy

    async def wrong(self: Executor, attempt: Attempt, job: Job, script: str) -> Any:
        answer = await buy(self, attempt, job, script)
        return await buy(self, attempt, job, script) if isinstance(answer, str) else answer

    return patched((Executor, "_buy", wrong))


def ends_once() -> AbstractContextManager[None]:
    """Gives the order to end a machine once and hopes."""
    call = Executor._call_terminate

    async def wrong(self: Executor, intent: Intent, ref: InstanceRef) -> tuple[str, None]:
        await call(self, intent, ref)
        return "", None

    return patched((Executor, "_call_terminate", wrong))


def forgets_what_it_owed() -> AbstractContextManager[None]:
    """Starts as if its former run had finished everything."""
    return patched((control_loop, "after_restart", lambda *_args, **_kwargs: Plan()))


def launches_twice() -> AbstractContextManager[None]:
    """Forgets which launches of its own are under way."""
    take = Executor.take

    def wrong(self: Executor, plan: Plan, world: World) -> None:
        self._launched.clear()
        take(self, replace(plan, intents=world.intents), world)

    return patched((Executor, "take", wrong))


# --- wrong in the core ---


def everything_is_ours() -> AbstractContextManager[None]:
    return patched((listed, "is_own_key", lambda _policy, _key: True))


def paused_is_gone() -> AbstractContextManager[None]:
    def wrong(builder: PlanBuilder, item: Attempt, mine: Instance) -> None:
        listed.record_paused(builder, item, mine)
        builder.put_attempt(replace(builder.attempt(item.id), machine=MachineState.HALTED))

    return patched((listed, "RECORDS", {**listed.RECORDS, InstanceState.PAUSED: wrong}))


def nothing_is_promised() -> AbstractContextManager[None]:
    return patched((budgets, "_aside_to_end", lambda _world, _item, _now: MicroUsd(0)))


def bids_without_limit() -> AbstractContextManager[None]:
    def wrong(_quote: object, _ceiling: object) -> MicroUsdPerHour:
        return MicroUsdPerHour(10_000_000)

    return patched(
        (candidates, "gpu_price_limit", wrong), (launch_calls, "gpu_price_limit", wrong), not_asked_again_at_the_call()
    )


def not_asked_again_at_the_call() -> tuple[Any, str, Any]:
    """What a decision got wrong is else given up when its call is to be made."""
    return launch_calls, "words_against_launch", lambda *_: ""


def no_waiting_for_the_old_machine() -> AbstractContextManager[None]:
    gate = JobPlacement._gate

    def wrong(self: Any, job: Job) -> Any:
        held = self.attempts_by_job.pop(job.id, [])
        try:
            return gate(self, job)
        finally:
            self.attempts_by_job[job.id] = held

    return patched((JobPlacement, "_gate", wrong))


def machines_without_number() -> AbstractContextManager[None]:
    init = JobPlacement.__init__

    def wrong(self: Any, *args: Any) -> None:
        init(self, *args)
        self.machines = 0

    return patched((JobPlacement, "__init__", wrong), not_asked_again_at_the_call())


def lists_alone() -> AbstractContextManager[None]:
    return patched((LossEvidence, "confirm_absence", lambda *_args, **_kwargs: True))


def silence_alone() -> AbstractContextManager[None]:
    return patched((LossEvidence, "patience", lambda self, *_: self._silence_max))


def large_news_at_once() -> AbstractContextManager[None]:
    return patched((reconcile, "held_back", lambda *_: frozenset()))


ROUGH_SMALL = small(ROUGH, storm=timedelta(hours=4))
OUTAGES = replace(ROUGH, outages_per_hour=0.3)
IMPATIENT = replace(ROUGH_SMALL, whims_per_hour=3.0)
ENDS_LATE = replace(OUTAGES, hazards=frozenset({Hazard.RETRY_AFTER, Hazard.SPIKES}))
HEARD_LATE = replace(OUTAGES, hazards=frozenset({Hazard.RETRY_AFTER, Hazard.SILENCE}))
BUDGETED = replace(ROUGH, limits={"budget_day": 2_000_000}, user=False, outages_per_hour=0.0, reachable=True)

BUGS: Mapping[str, Bug] = {
    "no intent before the launch": Bug(daemon=NoIntent, rule=("launches", "doubles"), limit=timedelta(hours=8)),
    "relaunch on a time-out": Bug(patch=relaunches_after_a_timeout, rule=("doubles",)),
    "no reconcile window": Bug(daemon=NoWindow, rule=("doubles",), shape=ROUGH_SMALL),
    "end machines of others": Bug(
        patch=everything_is_ours,
        rule=("foreign_machines",),
        shape=replace(ROUGH, storm=timedelta(minutes=30)),
        limit=timedelta(hours=8),
        until=timedelta(hours=1),
    ),
    "trust a price that is none": Bug(daemon=TrustsAnyPrice, rule=("launches",), shape=ROUGH_SMALL, seed=7),
    "keep cancels in memory": Bug(daemon=CancelsInMemory, rule=("cancels_lost",), shape=IMPATIENT, seed=3),
    "believe a list against a heartbeat": Bug(
        daemon=BelievesEveryListing, patch=lists_alone, rule=("healthy_machines_killed", "doubles"), shape=ROUGH_SMALL
    ),
    "believe large news at once": Bug(patch=large_news_at_once, rule=("healthy_machines_killed",)),
    "take paused for gone": Bug(
        patch=paused_is_gone, rule=("doubles",), shape=ENDS_LATE, seed=5, until=timedelta(hours=5)
    ),
    "launch while the old machine may live": Bug(
        patch=no_waiting_for_the_old_machine, rule=("doubles",), shape=ROUGH_SMALL, seed=5
    ),
    "resume from the oldest checkpoint": Bug(daemon=ResumesFromTheOldest, rule=("resumes",)),
    "accept reports of ended attempts": Bug(
        daemon=ReadsTheDead, rule=("resumes",), shape=HEARD_LATE, seed=37, until=timedelta(hours=4)
    ),
    "accept manifests unseen": Bug(daemon=AcceptsUnseen, rule=("resumes",), shape=ROUGH_SMALL, seed=16),
    "promise no money to running machines": Bug(
        patch=nothing_is_promised, rule=("budgets",), shape=BUDGETED, seed=3, until=timedelta(hours=1)
    ),
    "bid above the ceiling": Bug(patch=bids_without_limit, rule=("launches",)),
    "count no machines": Bug(
        patch=machines_without_number,
        rule=("machines_max",),
        shape=replace(ROUGH, limits={"machines_max": 2}),
        until=timedelta(hours=1),
    ),
    "repeat a launch under its key": Bug(patch=asks_again_in_the_same_words, rule=("launches",)),
    "launch what is under way": Bug(patch=launches_twice, rule=("launches",), seed=111, until=timedelta(hours=4)),
    "end a machine only once": Bug(patch=ends_once, rule=("doubles", "forgotten_machines")),
    "forget at the start what was owed": Bug(
        patch=forgets_what_it_owed, rule=("launches", "jobs_lost", "forgotten_machines"), limit=timedelta(hours=30)
    ),
    "take a silent store for silent hosts": Bug(
        daemon=BlindIsSilent, patch=silence_alone, rule=("healthy_machines_killed",), shape=ROUGH_SMALL, seed=2
    ),
}
