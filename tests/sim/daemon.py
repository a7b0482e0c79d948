"""The daemon of the simulator: the real core, a dictionary for a database, and a shell that can die anywhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from random import Random

from spotd.core import outcomes
from spotd.core.decide import decide
from spotd.core.invariants import check
from spotd.core.market import Board, MarketSnapshot, build_shelf
from spotd.core.model import (
    Attempt,
    AttemptId,
    Charge,
    Checkpoint,
    ExitCause,
    HostReport,
    Intent,
    IntentKind,
    IntentState,
    Job,
    JobId,
    Plan,
    Policy,
    ProviderPolicy,
    World,
)
from spotd.core.outcomes import LaunchFailure
from spotd.core.plans import applied, combine
from spotd.core.reconcile import reconcile
from spotd.core.states import AttemptState, JobState
from spotd_jobs.spec.model import GpuAlternative, JobSpec, PriceLimit, Resources
from spotd_providers.contract.money import MicroUsd
from spotd_providers.contract.values import InstallId, Listing, ProviderName
from tests.sim.cloud import Cloud, CloudDown, LostAnswer, Machine, Refused

EPOCH = datetime(2026, 1, 5, 12, tzinfo=UTC)
INSTALL = InstallId("lab")
WINDOW = timedelta(minutes=3)


def policy(clouds: list[Cloud], **limits: object) -> Policy:
    rules = {
        c.name: ProviderPolicy(
            name=c.name,
            fee_ppm=1_000_000,
            quote_ttl=timedelta(minutes=5),
            reconcile_window=WINDOW,
            provision_timeout=timedelta(minutes=20),
        )
        for c in clouds
    }
    return replace(
        Policy(install=INSTALL, providers=rules, silence_max=timedelta(minutes=2), machines_max=64), **limits
    )


def job(number: int, *, ceiling: int, need: timedelta, budget: int | None = None, at: datetime = EPOCH) -> Job:
    spec = JobSpec(
        name=f"job{number}",
        run=("true",),
        image="scratch",
        resources=Resources(gpu=(GpuAlternative(name="RTX_4090", count=1),)),
        price=PriceLimit(per_gpu_hour=ceiling),
        job_budget=budget,
    )
    return Job(
        id=JobId(f"j{number:03d}"),
        name=spec.name,
        spec=spec,
        code_sha256=None,
        code_bytes=0,
        submitted_at=at,
        state=JobState.QUEUED,
        reason="queued",
        state_since=at,
    )


class Died(Exception):
    """The process was killed at a named point."""


class Daemon:
    """Everything durable is in `world`, `done` and `history`; everything else dies with the process."""

    def __init__(self, world: World, clouds: list[Cloud], needs: dict[JobId, timedelta], rng: Random) -> None:
        self.world = world
        self.clouds = {c.name: c for c in clouds}
        self.needs = needs
        self.rng = rng
        self.done: dict[JobId, Job] = {}
        self.attempts_ever: dict[AttemptId, Attempt] = {}
        self.events: list[str] = []
        self.charges: list[Charge] = []
        self.crash: Callable[[str], None] = lambda _point: None
        self.resumes: list[tuple[JobId, timedelta, timedelta]] = []
        self.boot(EPOCH)

    def boot(self, now: datetime) -> None:
        """A new process: boards are empty, open launches are unknown."""
        self.boards = {name: Board(provider=name) for name in self.clouds}
        self.listings: dict[ProviderName, Listing] = {}
        self.queue: list[Intent] = []
        self.commit(outcomes.after_restart(self.world, now))

    def commit(self, plan: Plan) -> None:
        before = self.world
        changed = {j.id: j for j in plan.jobs.values()}
        said = {e.job for e in plan.events}
        for i, after in changed.items():
            if i in before.jobs and before.jobs[i].state is not after.state:
                assert i in said, f"{i} changed its state without an event"
        self.world = applied(before, plan)
        self.attempts_ever.update(plan.attempts)
        for i, j in changed.items():
            if j.state.is_final:
                self.done[i] = j
        self.events.extend(e.kind for e in plan.events)
        self.charges.extend(plan.charges)
        broken = check(self.world)
        assert not broken, broken

    def machine_of(self, attempt: Attempt) -> Machine | None:
        cloud = self.clouds[attempt.provider]
        found = [m for m in cloud.machines.values() if m.key == attempt.key]
        return found[0] if found else None

    def poll(self, now: datetime) -> None:
        for name, cloud in sorted(self.clouds.items()):
            self.boards[name] = Board(provider=name, shelf=build_shelf(cloud.offers()), at=now)
            try:
                self.listings[name] = cloud.listing(INSTALL)
            except CloudDown:
                self.listings.pop(name, None)

    def look(self, now: datetime) -> dict[AttemptId, HostReport]:
        reports = {}
        for item in self.world.attempts.values():
            if not item.state.counts:
                continue
            m = self.machine_of(item)
            if m is None:
                reports[item.id] = HostReport(attempt=item.id, looked_at=now)
                continue
            fresh = []
            known = {c.name for c in self.world.jobs[item.id.job].checkpoints if c.attempt == item.id.number}
            for work, at in m.saved:
                name = f"w{int(work.total_seconds())}"
                if name not in known:
                    fresh.append(
                        Checkpoint(
                            name=name,
                            attempt=item.id.number,
                            step=int(work.total_seconds()),
                            bytes=1000,
                            at=at,
                            manifest_key=f"k{name}",
                            sha256="0" * 64,
                        )
                    )
            cause = ExitCause.FINISHED if m.exited else ExitCause.STOPPED if m.stopped else None
            reports[item.id] = HostReport(
                attempt=item.id,
                looked_at=now,
                seq=m.seq,
                phase="run" if m.seq >= 0 else "",
                checkpoints=tuple(fresh),
                exit_cause=cause,
                exit_code=0 if m.exited else None,
            )
        return reports

    def cycle(self, now: datetime) -> None:
        """One brain cycle and everything the executor owes."""
        store_down = any(self.rng.random() < c.faults.store_down for c in self.clouds.values())
        reports = {} if store_down else self.look(now)
        first = reconcile(self.world, self.listings, reports, now)
        market = MarketSnapshot(boards=self.boards)
        second = decide(applied(self.world, first), market, now)
        plan = combine(first, second)
        self.crash("before commit")
        self.commit(plan)
        self.crash("after commit")
        self.queue.extend(
            t for t in plan.intents.values() if t.kind is IntentKind.LAUNCH and t.state is IntentState.OPEN
        )
        for item in self.world.attempts.values():
            if item.state is AttemptState.STOPPING and (m := self.machine_of(item)) is not None:
                m.stop_ordered = True
        self.execute(now)

    def execute(self, now: datetime) -> None:
        while self.queue:
            intent = self.queue.pop(0)
            assert intent.attempt is not None
            item = self.world.attempts.get(intent.attempt)
            if item is None:
                continue
            self.launch(item, now)
        for intent in sorted(self.world.intents.values(), key=lambda t: t.id):
            if intent.kind is IntentKind.TERMINATE and intent.state is IntentState.OPEN:
                if intent.not_before is not None and intent.not_before > now:
                    continue
                self.crash("before terminate")
                assert intent.ref is not None
                try:
                    self.clouds[intent.provider].terminate(intent.ref)
                except CloudDown:
                    self.commit(outcomes.terminate_failed(self.world, intent.id, "down", now))
                    continue
                self.crash("after terminate")
                self.commit(outcomes.terminate_accepted(self.world, intent.id, now))
                self.crash("after terminate commit")

    def launch(self, item: Attempt, now: datetime) -> None:
        owner = self.world.jobs[item.id.job]
        newest = owner.checkpoints[0].step if owner.checkpoints else 0
        start = timedelta(seconds=newest or 0)
        self.resumes.append((owner.id, start, self.best_saved(owner.id)))
        self.crash("before launch")
        try:
            instance = self.clouds[item.provider].launch(
                item.key, item.quote.offer, item.price_max, start, self.needs[owner.id]
            )
        except LostAnswer:
            self.crash("after lost launch")
            self.commit(outcomes.launch_unknown(self.world, item.id, "time-out", now))
        except Refused:
            self.crash("after refused launch")
            self.commit(outcomes.launch_refused(self.world, item.id, LaunchFailure.NO_CAPACITY, "no capacity", now))
        else:
            self.crash("after launch")
            self.commit(outcomes.launched(self.world, item.id, instance, now))
            self.crash("after launch commit")

    def best_saved(self, job_id: JobId) -> timedelta:
        """The most work any machine of the job ever published while its attempt counted."""
        best = timedelta(0)
        for identity, item in self.attempts_ever.items():
            m = self.machine_of(item)
            if identity.job != job_id or m is None:
                continue
            best = max([best, *(work for work, at in m.saved if item.ended_at is None or at <= item.ended_at)])
        return best

    def spent(self) -> MicroUsd:
        jobs = {**self.world.jobs, **self.done}
        return MicroUsd(
            sum(j.spent for j in jobs.values()) + sum(a.meter.settled for a in self.world.attempts.values())
        )
