"""What the handlers share: references to the running daemon, and access to its two stores."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import anyio
import anyio.to_thread

from spotd.api.responses import (
    ApiUnavailable,
    Forbidden,
    Invalid,
    JobHead,
    NotFound,
    OverBudget,
    StateConflict,
    resolve,
)
from spotd.api.schemas.answers import CheckResponse
from spotd.core.domain.intents import JobId
from spotd.core.domain.jobs import Job
from spotd.core.domain.plan import Plan
from spotd.core.domain.policy import OWNER, Caller
from spotd.core.domain.world import Verdict, World
from spotd.core.metering import day_start
from spotd.core.requests import DayLimit, users_day
from spotd.daemon.commits import (
    Beside,
    Commits,
    Committed,
    CrashPoint,
    CrashPoints,
    Database,
    DecideWith,
    Points,
    PolicyHolder,
)
from spotd.daemon.control_loop import ControlLoop
from spotd.daemon.controllers import WakeEvent
from spotd.daemon.datasets import Datasets
from spotd.daemon.grants.inputs import JobSecrets
from spotd.daemon.hosts.monitor import HostMonitor
from spotd.daemon.install import JobIds
from spotd.daemon.job_records import JobRecords
from spotd.daemon.market.offer_cache import OfferCache
from spotd.daemon.market.pollers import ProviderEntry
from spotd.daemon.market.price_recorder import PriceRecorder
from spotd.daemon.recovery_survey import RecoverySurvey
from spotd.store import JobView, Reads, StateError
from spotd_jobs.objects.api import ObjectMissing, ObjectStore
from spotd_jobs.objects.api import StoreError as ObjectsError
from spotd_providers.contract.provider import Clock, Logger
from spotd_providers.contract.values import MicroUsd, ProviderName

if TYPE_CHECKING:
    from spotd.daemon.notifications.notifier import Notifier

T = TypeVar("T")

CALLER: Final[ContextVar[Caller]] = ContextVar("caller", default=OWNER)
"""Who made the request that is being answered."""
OBJECTS_DEADLINE_S: Final = 120.0
OBJECTS_THREADS: Final = 4
DAY_HINT: Final = "jobs that end free their budgets; a person who sets the config may raise it"
COMMIT_POINTS: Final = (CrashPoint.BEFORE_COMMIT_RETRY, CrashPoint.AFTER_COMMIT_RETRY)
"""Of every request that changes rows and has no points of its own."""


@dataclass(slots=True, kw_only=True)
class HandlerContext:
    """The running daemon, as its API needs it."""

    clock: Clock
    wall: Clock
    database: Database
    commits: Commits
    policy: PolicyHolder
    offer_cache: OfferCache
    price_recorder: PriceRecorder
    control_loop: ControlLoop
    wake_event: WakeEvent
    host_monitor: HostMonitor
    objects: ObjectStore
    datasets: Datasets
    secrets: JobSecrets
    surveyor: RecoverySurvey
    job_records: JobRecords
    ids: JobIds
    providers: Mapping[ProviderName, ProviderEntry]
    crash: CrashPoints
    log: Logger
    started_at: datetime
    spool: Path
    """A private folder for what is on its way into the object store."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Of this process, for `status` and `doctor`: version, config path, state folder."""
    notifier: Notifier | None = None
    """Where the config has a channel for notifications."""
    users: Callable[[], Mapping[str, Caller]] = dict
    """Those of the config, by name."""
    findings: list[Callable[[], list[CheckResponse]]] = field(default_factory=list)
    """What parts that only some daemons have add to `doctor`."""
    inline: bool = False
    _limiter: anyio.CapacityLimiter | None = None

    async def read(self, work: Callable[[Reads], T]) -> T:
        """Read from one consistent state.

        Raises:
            ApiUnavailable: it cannot be read now.
        """
        try:
            return await self.database.read(work)
        except StateError as exc:
            raise ApiUnavailable(exc.message, hint=exc.hint) from exc

    async def stored(self, work: Callable[[], T]) -> T:
        """Return the result of a blocking call of the object store.

        Raises:
            NotFound: the object does not exist.
            ApiUnavailable: the store does not answer.
        """
        try:
            if self.inline:
                return work()
            if self._limiter is None:
                self._limiter = anyio.CapacityLimiter(OBJECTS_THREADS)
            with anyio.fail_after(OBJECTS_DEADLINE_S):
                return await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._limiter)
        except ObjectMissing as exc:
            raise NotFound(str(exc)) from exc
        except ObjectsError as exc:
            raise ApiUnavailable(str(exc), hint="spotctl doctor") from exc
        except TimeoutError as exc:
            raise ApiUnavailable("the checkpoint store does not answer", hint="spotctl doctor") from exc

    async def commit(
        self,
        decide: DecideWith,
        points: Points | Callable[[Plan], Points] = COMMIT_POINTS,
        beside: Beside | None = None,
    ) -> Committed:
        """Make a request durable with its author, and wake the control loop.

        Raises:
            ApiUnavailable: the state cannot be written now.
        """
        author = CALLER.get().name
        try:
            committed = await self.commits.commit_with(
                lambda *now: _with_author(decide(*now), author), points, beside=beside
            )
        except StateError as exc:
            raise ApiUnavailable(exc.message, hint=exc.hint) from exc
        self.wake_event.notify()
        return committed

    async def require_secrets_kept(self, values: Mapping[str, str], *, jobs: int = 0) -> None:
        """Require that these secrets of so many new jobs can be kept; none of them is new where they are taken back.

        Raises:
            Invalid: they cannot, as this spotd is configured.
            ApiUnavailable: the state cannot be read now.
        """
        try:
            refused = await self.secrets.refusal(values, jobs=jobs)
        except StateError as exc:
            raise ApiUnavailable(exc.message, hint=exc.hint) from exc
        if refused is not None:
            raise Invalid(refused.message, hint=refused.hint)

    async def find(self, ref: str) -> JobId:
        """Return the id of the job that a user means.

        Raises:
            NotFound, Ambiguous
        """
        return await self.read(lambda reads: find_job(reads, ref))

    async def own(self, ref: str, caller: Caller) -> JobId:
        """Return the id of the job or array that is meant, which stays the same whatever is queued meanwhile.

        Raises:
            Forbidden: another user queued it.
            NotFound, Ambiguous
        """

        def work(reads: Reads) -> tuple[JobId, str]:
            if (array := find_array(reads, ref)) is not None:
                return array, reads.array_jobs(array)[0].submitted_by
            job = reads.job(found := find_job(reads, ref))
            return found, "" if job is None else job.submitted_by

        found, author = await self.read(work)
        if not caller.may_change(author):
            hint = "who queued it may do this, and who may operate"
            raise Forbidden(f"{ref} was queued by {author or 'the owner of spotd'}", hint=hint)
        return found

    async def find_array(self, ref: str) -> JobId | None:
        """Return the id of the array that a user means, `None` where a job is meant, or nothing."""
        return await self.read(lambda reads: find_array(reads, ref))

    @property
    def why_paused(self) -> str:
        """Return why nothing may be launched now, in a sentence; empty while launches are allowed."""
        held = self.control_loop.held
        return f"no decisions are made: {held}" if held else self.policy.why_paused

    def verdict_of(self, job: JobId) -> Verdict | None:
        """Return the newest decision about a job, if there is one yet."""
        return None if self.control_loop.state is None else self.control_loop.state.verdicts.get(job)

    def world(self) -> World:
        """Return the world of the newest cycle.

        Raises:
            ApiUnavailable: there is none yet.
        """
        if self.control_loop.state is None:
            raise ApiUnavailable("the daemon has only just started", hint="try again in a moment")
        return self.control_loop.state.world


def _with_author(plan: Plan, name: str) -> Plan:
    """Return the plan with the name of the user who asked for it in each of its events; as it is for the owner."""
    if not name:
        return plan
    events = (replace(e, message=f"{e.message} (by {name})", data={**e.data, "by": name}) for e in plan.events)
    return replace(plan, events=tuple(events))


def require_day(day: DayLimit, reads: Reads, world: World, jobs: Sequence[Job], now: datetime) -> None:
    """Check that these jobs of an author, which are new or to be changed, and the others hold no more than they may.

    Raises:
        OverBudget: they would hold more.
    """
    begin = day_start(now.astimezone(UTC).date())
    today = reads.spent_by(day.author, ended_since=begin)
    counted = [job for job in jobs if job.ended_at is not None and job.ended_at >= begin]
    today = MicroUsd(today - sum(job.spent for job in counted))
    if problem := day.problem(jobs, world, today, now):
        raise OverBudget(problem, hint=DAY_HINT)


def require_callers_day(
    reads: Reads, world: World, jobs: Sequence[Job], now: datetime, *, is_first_budget: bool = False
) -> None:
    """Check the same for jobs of the caller, where a budget of the day limits that.

    Args:
        is_first_budget: the jobs have not ended and get one, which is right whatever others lack.

    Raises:
        OverBudget: they would hold more, or one that has not ended has no budget of its own.
    """
    caller = CALLER.get()
    if caller.budget_per_day is None:
        return
    mine = {job.id for job in jobs}
    others = [j for j in world.jobs.values() if j.submitted_by == caller.name and not j.state.is_final]
    require_budgets([*jobs, *(j for j in others if not is_first_budget and j.id not in mine)])
    require_day(users_day(caller.name, caller.budget_per_day), reads, world, jobs, now)


def require_authors_days(
    users: Mapping[str, Caller], reads: Reads, world: World, jobs: Sequence[Job], now: datetime
) -> None:
    """Check the same for jobs of others than the caller: the day of a user bounds what is done with its jobs.

    Raises:
        OverBudget: they would hold more.
    """
    for name in sorted({job.submitted_by for job in jobs} - {CALLER.get().name}):
        if name in users and (limit := users[name].budget_per_day) is not None:
            require_day(users_day(name, limit), reads, world, [j for j in jobs if j.submitted_by == name], now)


def require_budgets(jobs: Iterable[Job]) -> None:
    """Check that each of these jobs has a budget of its own, where a budget of the day limits the caller.

    Raises:
        OverBudget: one has none, as after a change of role.
    """
    caller = CALLER.get()
    if caller.budget_per_day is None:
        return
    if without := next((job for job in jobs if job.budget is None), None):
        raise OverBudget(
            f"{without.name} has no budget, and all jobs of {caller.name} count against one of a day",
            hint=f"submit --budget USD, or [budget] job in the job file; queued: spotctl budget {without.name} =USD",
        )


class DaemonAnswers:
    """Handlers that answer from the running daemon."""

    def __init__(self, context: HandlerContext) -> None:
        self._context = context


def get_job(reads: Reads, job_id: JobId, world: World | None = None) -> Job:
    """Return a job by its id, as the world of this very transaction has it where one is given.

    Raises:
        ApiUnavailable: its row is gone since the reference was resolved.
    """
    job = (None if world is None else world.jobs.get(job_id)) or reads.job(job_id)
    if job is None:
        raise ApiUnavailable(f"job {job_id} is not there any more")
    return job


def find_array(reads: Reads, ref: str) -> JobId | None:
    """Return the id of the array that the reference means; a job of that id, or that goes on, is meant first."""
    array = reads.array_meant_by(ref)
    if array is None:
        return None
    views = [view for view in reads.jobs_meant_by(ref) if ref in {view.id, view.name}]
    if any(view.id == ref or not view.state.is_final or view.submitted_at > array.submitted_at for view in views):
        return None
    return array.id


def find_job(reads: Reads, ref: str) -> JobId:
    """Return the one job that the reference means by the API's rule, reading only jobs that could be it.

    Raises:
        NotFound, Ambiguous
    """
    if find_array(reads, ref) is not None:
        hint = f"spotctl ls --array {ref} lists them; cancel, retry and cost take the whole array"
        raise NotFound(f"{ref} is an array, and this takes one of its jobs", hint=hint)
    heads = [
        JobHead(id=view.id, name=view.name, is_final=view.state.is_final, order=view.submitted_at.timestamp())
        for view in reads.jobs_meant_by(ref)
    ]
    return JobId(resolve(ref, heads))


def require_free_views(views: Collection[JobView]) -> None:
    """Check that there are no jobs that have not ended, of a name that a new one is to have.

    Raises:
        StateConflict: there is one.
    """
    for view in views:
        raise _name_conflict(f"a job named {view.name} is {view.state.value} already", view.id)


def require_free_names(world: World, names: Collection[str], array: str = "") -> None:
    """Check that no unfinished job has one of the names, and no unfinished array.

    Args:
        array: the name of the array that jobs of these names would be.

    Raises:
        StateConflict: one has.
    """
    for job in world.jobs.values():
        if job.state.is_final:
            continue
        if job.name in names or job.name == array:
            raise _name_conflict(f"a job named {job.name} is {job.state.value} already", job.id)
        if job.array is not None and job.array.name in {array, *names}:
            raise _name_conflict(f"an array named {job.array.name} has not ended yet", job.array.id)


def _name_conflict(sentence: str, ref: JobId) -> StateConflict:
    hint = f"wait for it, cancel it (spotctl cancel {ref}), or give this one another name"
    return StateConflict(f"{sentence} ({ref})", hint=hint)
