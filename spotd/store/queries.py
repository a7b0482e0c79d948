"""What is asked of the state: each question a fixed number of statements however many rows answer it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import wraps
from typing import Any, Final, TypeVar

from sqlalchemy import (
    ColumnElement,
    Connection,
    and_,
    desc,
    func,
    not_,
    or_,
    select,
    true,
)

from spotd.core.calibration import BilledMachine
from spotd.core.domain.attempts import Attempt, MachineState
from spotd.core.domain.intents import AttemptId, Charge, CostSums, Intent, JobId
from spotd.core.domain.jobs import OF_ANOTHER_JOB, Checkpoint, Job, PaceSample
from spotd.core.domain.policy import Policy
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.domain.world import Experience, PastJob, UnreadableRow, World
from spotd.core.kernel.quarantine import QUARANTINE_MARK
from spotd.core.requests import AGENT
from spotd.store import tables
from spotd.store.encryption import EncryptedSecrets, read_secrets, secrets_key_ids
from spotd.store.outbox import Outbox
from spotd.store.place import DatabasePlace, StoreCorrupt
from spotd.store.selects import (
    COMPARED,
    GROUPS,
    JOBS_BY_ID,
    OF_COST,
    SERVER,
    SETTINGS,
    active_named,
    begins_with,
    billed_machine_of,
    events_of,
    load_job,
    newest_checkpoints,
    newest_named,
    open_attempts,
    sums_of,
    unless_failed,
    view_of_event,
    view_of_job,
)
from spotd.store.tables import (
    ACTIVE,
    ATTEMPT_COSTS,
    ATTEMPTS,
    CHARGES,
    CHECKPOINTS,
    DAY_COSTS,
    EVENTS,
    IDS,
    INTENTS,
    JOBS,
    META,
    NOT_ENDED,
    OPEN,
    ROW_ERRORS,
    RowCache,
    chunks,
    kept,
    set_aside,
)
from spotd.store.values import (
    CHARGE,
    CHECKPOINT,
    COST_SUMS,
    INTENT,
    JOB,
    PACES,
    duration_in,
    instant_in,
    instant_out,
)
from spotd.store.views import (
    ArrayTotals,
    ArrayView,
    CostGroup,
    CostGrouping,
    EventView,
    JobView,
    MachineView,
    Totals,
)
from spotd.store.world import load_experience, load_past, load_world
from spotd_providers.contract.values import AttemptKey, MicroUsd, ProviderName

C = TypeVar("C")
AMBIGUOUS_MAX: Final = 10
_IN_LIST: Final = tuple(c for c in JOBS.c if c.name not in {"spec", "code_sha256", "code_bytes", "chain"})
_NAMES: Final = select(JOBS.c.id, JOBS.c.name).where(JOBS.c.id.in_(IDS))
_ATTEMPTS: Final = select(ATTEMPTS).where(ATTEMPTS.c.job_id.in_(IDS)).order_by(ATTEMPTS.c.job_id, ATTEMPTS.c.number)
_NEWEST_FIRST: Final = (desc(JOBS.c.submitted_at), desc(JOBS.c.id))
_QUARANTINED: Final = and_(
    JOBS.c.state == JobState.FAILED.value, JOBS.c.reason.startswith(QUARANTINE_MARK, autoescape=True)
)


def _reporting_damage(cls: type[C]) -> type[C]:
    """Make each public method of the class report a row that cannot be understood as a damaged state."""

    def reporting(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except ROW_ERRORS as exc:
                raise StoreCorrupt(
                    f"the state {self._place} holds a value that cannot be understood: {exc}",
                    hint="if a newer spotd has written it, install that one again; else restore a copy of the file",
                ) from exc

        return call

    for name, method in list(vars(cls).items()):
        if not name.startswith("_"):
            setattr(cls, name, reporting(method))
    return cls


@_reporting_damage
class Reads:
    """One consistent view of the state, valid until the function it was given to returns.

    Every method raises `StoreCorrupt` for a row that cannot be understood, unless it says that it leaves such rows out.
    """

    def __init__(self, place: DatabasePlace, connection: Connection, memory: RowCache) -> None:
        self._place = place
        self._connection = connection
        self.connection = connection
        """What this view reads by, for what copies whole tables."""
        self._memory = memory

    def world(self, policy: Policy, now: datetime) -> World:
        """Return everything that is not over yet, unexpired cooldowns, and the spending of this UTC month."""
        return self._load_world(policy, now)

    def _load_world(self, policy: Policy, now: datetime) -> World:
        return load_world(self._connection, self._memory, policy, now)

    def job(self, job_id: JobId) -> Job | None:
        """Return the whole job, spec and checkpoints included."""
        return load_job(self._connection, job_id)

    def jobs_meant_by(self, text: str) -> tuple[JobView, ...]:
        """Return the jobs that a user can mean by an id, a name or the beginning of an id, newest first.

        Only these are read: of a name, which ten thousand runs of one job file may have, the jobs that go on and the
        newest; of those whose ids begin so, the newest few.
        """
        if not text:
            return ()
        # An id first and alone: a name is compared with those of all jobs that go on.
        if self._connection.execute(select(JOBS.c.id).where(JOBS.c.id == text)).first() is not None:
            return self._list(JOBS.c.id == text)
        named = or_(JOBS.c.id == newest_named(text), active_named(text))
        return self._list(named) or self._list(begins_with(text), limit=AMBIGUOUS_MAX)

    def array_meant_by(self, text: str) -> ArrayView | None:
        """Return the array of this id, else the newest of this name; `None` where there is none."""
        for column in (JOBS.c.array_id, JOBS.c.array_name):
            query = select(JOBS.c.array_id, JOBS.c.submitted_at).where(column == text)
            row = self._connection.execute(query.order_by(*_NEWEST_FIRST).limit(1)).one_or_none()
            if row is not None:
                return ArrayView(id=JobId(row.array_id), submitted_at=instant_in(row.submitted_at))
        return None

    def array_jobs(self, array: JobId) -> tuple[JobView, ...]:
        """Return the jobs of this array, in the order of their indexes."""
        found = self._list(JOBS.c.array_id == array)
        return tuple(sorted(found, key=lambda view: 0 if view.array is None else view.array.index))

    def past_jobs(self, ids: Iterable[JobId]) -> Mapping[JobId, PastJob]:
        """Return those of these jobs that are over, as others that wait for them see them."""
        return {i: past for i, past in load_past(self._connection, ids).items() if past.state.is_final}

    def newest_paces(self, *, limit: int) -> tuple[tuple[PaceSample, ...], ...]:
        """Return what the steps of the newest jobs show of machines: of people's jobs, and of an array one."""
        own = (JOBS.c.paces != "[]", JOBS.c.submitted_by != AGENT)
        votes = select(func.max(JOBS.c.id)).where(*own).group_by(func.coalesce(JOBS.c.array_id, JOBS.c.id))
        query = select(JOBS.c.paces).where(JOBS.c.id.in_(votes)).order_by(desc(JOBS.c.submitted_at)).limit(limit)
        return tuple(one.paces for one in kept(PACES.read, tables.fetch(self._connection, query)))

    def active_named(self, name: str) -> tuple[JobView, ...]:
        """Return the jobs of this name that are not final, newest first."""
        return self._list(active_named(name))

    def jobs(self, *, active: bool = False, limit: int | None = None) -> tuple[JobView, ...]:
        """Return all jobs, or those that are not final; newest first."""
        where = ACTIVE if active else true()
        return self._memory.listed((active, limit), lambda: self._list(where, limit=limit))

    def ended_jobs(self, *, limit: int) -> tuple[JobView, ...]:
        """Return the newest jobs that are final."""
        return self._memory.listed(("ended", limit), lambda: self._list(not_(ACTIVE), limit=limit))

    def quarantined_jobs(self, *, limit: int = 20) -> tuple[JobView, ...]:
        """Return the newest jobs that spotd could not go on with and that were not queued again."""
        return self._list(_QUARANTINED, limit=limit)

    def count_quarantined(self) -> int:
        """Return how many jobs spotd could not go on with and were not queued again."""
        return int(self._connection.execute(select(func.count()).where(_QUARANTINED)).scalar() or 0)

    def job_view(self, job_id: JobId) -> JobView | None:
        """Return one line of the list of jobs."""
        found = self._list(JOBS.c.id == job_id)
        return found[0] if found else None

    def _list(self, where: ColumnElement[bool], *, limit: int | None = None) -> tuple[JobView, ...]:
        """Return the lines of these jobs, newest first."""
        listed = select(JOBS.c.id).where(where).order_by(*_NEWEST_FIRST).limit(limit)
        picked = where if limit is None else JOBS.c.id.in_(listed)
        attempts = open_attempts(self._connection, picked)
        checkpoints = newest_checkpoints(self._connection, picked)
        query = select(*_IN_LIST).where(where).order_by(*_NEWEST_FIRST).limit(limit)
        found = tables.fetch(self._connection, query)
        return tuple([view_of_job(row, tuple(attempts.get(row.id, ())), checkpoints.get(row.id)) for row in found])

    def ended_ids(self) -> tuple[JobId, ...]:
        """Return the ids of all final jobs, newest first."""
        query = select(JOBS.c.id).where(not_(ACTIVE)).order_by(*_NEWEST_FIRST)
        return tuple(JobId(one) for one in self._connection.execute(query).scalars())

    def ended_page(self, *, before: JobId | None, limit: int) -> tuple[JobId, ...]:
        """Return the next ids of final jobs by descending id, from the highest without `before`."""
        query = select(JOBS.c.id).where(not_(ACTIVE)).order_by(desc(JOBS.c.id)).limit(limit)
        query = query if before is None else query.where(JOBS.c.id < before)
        return tuple(JobId(one) for one in self._connection.execute(query).scalars())

    def names_of(self, ids: Iterable[JobId]) -> Mapping[JobId, str]:
        """Return the names of these jobs, as far as there are such jobs."""
        found: dict[JobId, str] = {}
        for some in chunks(ids):
            found.update((JobId(one), name) for one, name in self._connection.execute(_NAMES, {"ids": some}))
        return found

    def spent_by(self, submitted_by: str, *, ended_since: datetime) -> MicroUsd:
        """Return what the jobs cost that were submitted by these and have ended since then."""
        query = select(func.coalesce(func.sum(JOBS.c.spent), 0)).where(
            JOBS.c.submitted_by == submitted_by, not_(ACTIVE), JOBS.c.ended_at >= instant_out(ended_since)
        )
        return MicroUsd(self._connection.execute(query).scalar_one())

    def counts_by_state(self) -> Mapping[JobState, int]:
        """Return how many jobs are in each state; every state is there."""
        query = select(JOBS.c.state, func.count()).group_by(JOBS.c.state)
        found: dict[str, int] = dict(self._connection.execute(query).all())
        return {state: found.get(state.value, 0) for state in JobState}

    def jobs_by_id(self, ids: Sequence[JobId]) -> Mapping[JobId, Job]:
        """Return whole jobs without their checkpoints; those that cannot be understood are left out."""
        found = tables.fetch(self._connection, JOBS_BY_ID, {"ids": ids})
        jobs = kept(lambda row: JOB.read(row, spec=tables.spec_in(row.spec), checkpoints=()), found)
        return {job.id: job for job in jobs}

    def readable_jobs(self, ids: Sequence[JobId]) -> tuple[Job, ...]:
        """Return whole jobs with their checkpoints; those that cannot be understood are left out."""
        found: list[Job] = []
        for job_id in ids:
            with suppress(*ROW_ERRORS):
                one = load_job(self._connection, job_id)
                found += [] if one is None else [one]
        return tuple(found)

    def set_aside(self, job_id: JobId) -> tuple[UnreadableRow, ...]:
        """Return which rows of this job cannot be understood."""
        return set_aside(self._connection, job_id)

    def attempts_of(self, job_id: JobId) -> tuple[Attempt, ...]:
        """Return every attempt of a job, ended ones too, oldest first; one that cannot be understood is left out."""
        return self.attempts_of_jobs([job_id]).get(job_id, ())

    def attempts_of_jobs(self, ids: Sequence[JobId]) -> Mapping[JobId, tuple[Attempt, ...]]:
        """Return the same of several jobs."""
        found: dict[JobId, list[Attempt]] = {}
        for attempt in kept(tables.attempt_in, tables.fetch(self._connection, _ATTEMPTS, {"ids": ids})):
            found.setdefault(attempt.id.job, []).append(attempt)
        return {job_id: tuple(some) for job_id, some in found.items()}

    def open_machines(self) -> tuple[MachineView, ...]:
        """Return every machine that the state has to manage, or may have to, in order of its key."""
        attempts = select(ATTEMPTS.c.key, ATTEMPTS.c.provider, ATTEMPTS.c.ref_id)
        intents = select(INTENTS.c.key, INTENTS.c.provider, INTENTS.c.ref_id)
        found: dict[str, MachineView] = {}
        for query in (
            intents.where(OPEN),
            attempts.where(NOT_ENDED),
        ):
            for key, provider, ref in self._connection.execute(query):
                if key not in found or ref is not None:
                    found[key] = MachineView(key=AttemptKey(key), provider=provider, instance=ref)
        return tuple(found[key] for key in sorted(found))

    def borrowed_checkpoints(self) -> tuple[Checkpoint, ...]:
        """Return what jobs have on their lists that other jobs wrote; in no order."""
        query = select(CHECKPOINTS).where(CHECKPOINTS.c.attempt == OF_ANOTHER_JOB)
        return tuple(map(CHECKPOINT.read, tables.fetch(self._connection, query)))

    def events(
        self, *, since: int = 0, job_id: JobId | None = None, kinds: Sequence[str] = (), limit: int = 1000
    ) -> tuple[EventView, ...]:
        """Return events with a number above `since`, oldest first, the first `limit` of them.

        Args:
            kinds: only these; one without a dot means each that begins with it and a dot.
        """
        query = events_of(job_id, kinds).where(EVENTS.c.seq > since).order_by(EVENTS.c.seq).limit(limit)
        return tuple(map(view_of_event, tables.fetch(self._connection, query)))

    def newest_events(
        self, *, job_id: JobId | None = None, kinds: Sequence[str] = (), limit: int = 100
    ) -> tuple[EventView, ...]:
        """Return the last `limit` events, oldest first; `kinds` as for `events`."""
        query = events_of(job_id, kinds).order_by(desc(EVENTS.c.seq)).limit(limit)
        return tuple(map(view_of_event, tables.fetch(self._connection, query)))[::-1]

    def events_of_jobs(self, kinds: Sequence[str], ids: Sequence[JobId]) -> tuple[EventView, ...]:
        """Return the events of these kinds and jobs, oldest first."""
        query = select(EVENTS).where(EVENTS.c.kind.in_(kinds), EVENTS.c.job_id.in_(ids)).order_by(EVENTS.c.seq)
        return tuple(map(view_of_event, tables.fetch(self._connection, query)))

    def last_event(self) -> int:
        """Return the number of the newest event, 0 before the first."""
        return int(self._connection.execute(select(func.max(EVENTS.c.seq))).scalar() or 0)

    def charges_of(self, job_id: JobId) -> tuple[Charge, ...]:
        """Return every booked span of a job, in order of attempt and time."""
        query = select(CHARGES).where(CHARGES.c.job_id == job_id).order_by(CHARGES.c.attempt, CHARGES.c.start)
        return tuple(map(CHARGE.read, tables.fetch(self._connection, query)))

    def attempt_costs(self, ids: Sequence[JobId]) -> Mapping[AttemptId, CostSums]:
        """Return what is booked for each attempt of these jobs."""
        query = select(ATTEMPT_COSTS).where(ATTEMPT_COSTS.c.job_id.in_(ids))
        found = tables.fetch(self._connection, query)
        return {AttemptId(job=row.job_id, number=row.attempt): COST_SUMS.read(row) for row in found}

    def cost_groups(self, by: CostGrouping) -> tuple[CostGroup, ...]:
        """Return what is booked, added up by this; in no order."""
        found = tables.fetch(self._connection, GROUPS[by])
        return tuple(
            CostGroup(
                key=str(row.group_key),
                name=row.group_name,
                attempts=row.attempts,
                is_estimated=bool(row.estimated),
                sums=COST_SUMS.read(row),
            )
            for row in found
        )

    def costs_of_providers(self) -> Mapping[ProviderName, CostSums]:
        """Return what is booked at each provider, from one row for each day."""
        query = select(DAY_COSTS.c.provider, *sums_of(DAY_COSTS)).group_by(DAY_COSTS.c.provider)
        found = {row.provider: COST_SUMS.read(row) for row in tables.fetch(self._connection, query)}
        failed = _OF_FAILED.add_columns(ATTEMPTS.c.provider).join(ATTEMPTS, OF_COST).group_by(ATTEMPTS.c.provider)
        for row in self._connection.execute(failed):
            own = found.get(row.provider, CostSums())
            found[row.provider] = own + CostSums(on_demand=row.on_demand, uncompared=row.uncompared)
        return found

    def ends_of_attempts(self) -> Mapping[tuple[ProviderName, EndReason], int]:
        """Return how many attempts have ended at each provider for each reason."""
        columns = (ATTEMPTS.c.provider, ATTEMPTS.c.end_reason)
        query = select(*columns, func.count()).where(ATTEMPTS.c.end_reason.is_not(None)).group_by(*columns)
        found = self._connection.execute(query).all()
        known = {reason.value: reason for reason in EndReason}
        return {(provider, known[reason]): count for provider, reason, count in found if reason in known}

    def open_attempts(self) -> tuple[tuple[Attempt, str, JobState], ...]:
        """Return every attempt that has not ended, with name and state of its job; what is unreadable is left out."""
        own = (JOBS.c.name.label("job_name"), JOBS.c.state.label("job_state"))
        query = select(ATTEMPTS, *own).join(JOBS, JOBS.c.id == ATTEMPTS.c.job_id).where(NOT_ENDED)
        found = tables.fetch(self._connection, query)
        return tuple(kept(lambda row: (tables.attempt_in(row), row.job_name, JobState(row.job_state)), found))

    def billed_machines(self, *, limit: int) -> tuple[BilledMachine, ...]:
        """Return the newest machines whose bill is known and none of whose time was free."""
        carried = func.coalesce(ATTEMPTS.c.machine_key, ATTEMPTS.c.key).label("carried")
        own = (ATTEMPTS.c.provider, ATTEMPTS.c.quote, ATTEMPTS.c.restored_bytes, ATTEMPTS.c.billed.label("bill"))
        columns = (*own, carried, *(c for c in ATTEMPT_COSTS.c))
        query = (
            select(*columns)
            .join_from(ATTEMPTS, ATTEMPT_COSTS, OF_COST)
            .where(ATTEMPTS.c.billed.is_not(None), ATTEMPT_COSTS.c.free == 0)
            .order_by(desc(ATTEMPTS.c.ended_at))
            .limit(limit)
        )
        machines: dict[str, BilledMachine] = {}
        for row in tables.fetch(self._connection, query):
            own_part, rest = billed_machine_of(row), machines.get(row.carried)
            machines[row.carried] = own_part if rest is None else rest.plus(own_part)
        return tuple(machines.values())

    def experience(self) -> Experience:
        """Return what was learnt of providers, pools, hosts and images; what cannot be understood is left out."""
        return load_experience(self._connection)

    def totals(self) -> Totals:
        """Return what all jobs together cost, as far as it is booked."""
        columns = (DAY_COSTS.c.amount, DAY_COSTS.c.on_demand, DAY_COSTS.c.uncompared)
        spent, compared, uncompared = (
            int(n or 0) for n in self._connection.execute(select(*map(func.sum, columns))).one()
        )
        failed = self._connection.execute(_OF_FAILED).one()
        own = (JOBS.c.recoveries, JOBS.c.lost, JOBS.c.totals_estimated)
        sums = select(func.count(), *map(func.sum, own))
        count, recoveries, lost, estimated = self._connection.execute(sums).one()
        return Totals(
            jobs=int(count),
            spent=MicroUsd(spent),
            on_demand=MicroUsd(compared + int(failed.on_demand or 0)),
            uncompared=MicroUsd(uncompared + int(failed.uncompared or 0)),
            estimated=int(estimated or 0),
            recoveries=int(recoveries or 0),
            lost=duration_in(int(lost or 0)),
        )

    def array_totals(self, array: JobId) -> ArrayTotals:
        """Return what the jobs of an array come to, as far as it is booked."""
        of_failed = (unless_failed(JOBS.c.spent, one) for one in (JOBS.c.on_demand, JOBS.c.totals_uncompared))
        sums = (JOBS.c.spent, *of_failed, JOBS.c.recoveries, JOBS.c.totals_estimated)
        query = select(JOBS.c.state, func.count(), *map(func.sum, sums)).where(JOBS.c.array_id == array)
        found = self._connection.execute(query.group_by(JOBS.c.state)).all()
        spent, compared, uncompared, recoveries, estimated = (
            sum(int(row[n] or 0) for row in found) for n in range(2, 7)
        )
        return ArrayTotals(
            states={JobState(row[0]): int(row[1]) for row in found if row[0] in set(JobState)},
            spent=MicroUsd(spent),
            on_demand=MicroUsd(compared),
            uncompared=MicroUsd(uncompared),
            estimated=estimated,
            recoveries=recoveries,
        )

    def strays(self) -> tuple[Intent, ...]:
        """Return the ends of machines that no attempt owned, owed or done, as far as their cost is known."""
        query = (
            select(INTENTS)
            .where(INTENTS.c.stray_since.is_not(None), INTENTS.c.attempt_job.is_(None))
            .order_by(INTENTS.c.created_at, INTENTS.c.id)
        )
        return tuple(map(INTENT.read, tables.fetch(self._connection, query)))

    def unread_bills(
        self, provider: ProviderName, *, since: datetime, until: Sequence[datetime], limit: int
    ) -> tuple[Attempt, ...]:
        """Return attempts that had a machine and whose bill is to be read, oldest first.

        One whose bill was read n times must have ended after `since` and by `until[n]`.
        """
        ended = ATTEMPTS.c.ended_at
        is_due = (and_(ATTEMPTS.c.bill_tries == n, ended <= instant_out(at)) for n, at in enumerate(until))
        query = (
            select(ATTEMPTS)
            .where(
                ATTEMPTS.c.state == AttemptState.ENDED.value,
                ATTEMPTS.c.provider == provider,
                ATTEMPTS.c.machine.not_in([state.value for state in MachineState if state.may_compute]),
                ATTEMPTS.c.ref_id.is_not(None),
                ended >= instant_out(since),
                or_(*is_due),
            )
            .order_by(ended)
            .limit(limit)
        )
        return tuple(kept(tables.attempt_in, tables.fetch(self._connection, query)))

    def attempts_of_open_bills(self, *, since: datetime) -> tuple[Attempt, ...]:
        """Return the attempts that are over and whose machine one of them had that ended after `since`."""
        carried = func.coalesce(ATTEMPTS.c.machine_key, ATTEMPTS.c.key)
        is_over = and_(ATTEMPTS.c.state == AttemptState.ENDED.value, ATTEMPTS.c.ref_id.is_not(None))
        recent = select(carried).where(is_over, ATTEMPTS.c.ended_at >= instant_out(since))
        query = select(ATTEMPTS).where(is_over, carried.in_(recent))
        return tuple(kept(tables.attempt_in, tables.fetch(self._connection, query)))

    def attempts_on_machine_of(self, item: Attempt) -> tuple[Attempt, ...]:
        """Return the attempts that had the machine of this one, itself included, in the order in which they had it."""
        query = select(ATTEMPTS).where(
            ATTEMPTS.c.provider == item.provider,
            or_(ATTEMPTS.c.key == item.carried_key, ATTEMPTS.c.machine_key == item.carried_key),
        )
        found = kept(tables.attempt_in, tables.fetch(self._connection, query))
        own = [one for one in found if one.ref == item.ref and one.id != item.id]
        return tuple(sorted([*own, item], key=lambda one: (one.intended_at, one.id.job, one.id.number)))

    def outbox(self) -> Outbox:
        """Return the queues of the notification channels, which only a transaction may change."""
        return Outbox(self._connection)

    def server(self) -> str:
        """Return which database of which server this is, a copy of it being another one; empty for SQLite."""
        if self._place.url is None:
            return ""
        return str(self._connection.execute(SERVER).scalar_one())

    def secrets(self, jobs: Collection[JobId] | None = None) -> tuple[EncryptedSecrets, ...]:
        """Return the encrypted secrets of all jobs, or of these few; empty where values lie in files."""
        return read_secrets(self._connection, jobs)

    def secrets_key_ids(self, *, going_on: bool = False) -> Mapping[JobId, str]:
        """Return which key each job's secrets need; with `going_on` of jobs alone that have not ended."""
        return secrets_key_ids(self._connection, going_on=going_on)

    def server_settings(self) -> Mapping[str, str]:
        """Return what decides whether the server keeps a commit, by its own names; empty for SQLite."""
        if self._place.url is None:
            return {}
        return {row.name: row.setting for row in self._connection.execute(SETTINGS)}

    def meta(self, key: str) -> str | None:
        """Return a fact about this state itself."""
        return self._connection.execute(select(META.c.value).where(META.c.key == key)).scalar_one_or_none()


_OF_FAILED: Final = (
    select(*(func.sum(ATTEMPT_COSTS.c.amount - ATTEMPT_COSTS.c[name]).label(name) for name in sorted(COMPARED)))
    .join_from(ATTEMPT_COSTS, JOBS, JOBS.c.id == ATTEMPT_COSTS.c.job_id)
    .where(JOBS.c.state == JobState.FAILED.value)
)
"""What is to be added to sums in which jobs that failed are compared with on-demand."""
