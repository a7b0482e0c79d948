"""Keeps a record of every job in the checkpoint store, and reads those whose jobs the state does not know.

Theory. The state is the one place that decides; the records only follow it, so that a lost state can be rebuilt
(`spotd.core.recovery`). They lie in a folder of their own, below which no grant permits anything, and hold no secret:
of secrets a job has names only. A record is there before the first machine of its job is bought; what forbids something
(a cancellation, an end, another spec) is written within seconds, the rest at most once a minute for each job. A job
that has ended has its record under another name, which outweighs the first: a crash between the two never revives it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import islice
from typing import Final

from spotd.core.domain.intents import NOTHING, JobId
from spotd.core.domain.jobs import Checkpoint, Job
from spotd.core.domain.policy import Policy
from spotd.core.domain.world import World
from spotd.core.recovery import JobRecord, LostJob, Unknown, content_of, is_ours, must_be_stored_at_once
from spotd.daemon import object_keys
from spotd.daemon.commits import Database, PolicyHolder, StoreThreads
from spotd.daemon.controllers import Controller, Outage, Pause
from spotd.daemon.hosts.host_reader import known_manifest
from spotd.daemon.recovery_survey import HostRead, launch_record, survey_one, tolerant_read, used_numbers
from spotd.store import StateError as StateError
from spotd.store.values import from_json, to_json
from spotd_jobs.objects.api import ObjectInfo, ObjectMissing, ObjectStore, StoreError, StoreUnavailable
from spotd_jobs.spec.codec import SpecDocumentError, spec_from_json, spec_to_json
from spotd_jobs.spec.model import JobSpec
from spotd_providers.contract.provider import Clock, Logger
from spotd_providers.contract.values import InstallId

SCHEMA: Final = 1
RECORD_BYTES_MAX: Final = 8 * 2**20
"""A request that queues a job has at most two."""
LISTED_MAX: Final = 1_000_000
EVERY_S: Final = 10.0
AGAIN: Final = timedelta(minutes=1)
"""What forbids nothing is written no more often for one job."""
PER_ROUND: Final = 200
DEADLINE_S: Final = 120.0
READ_DEADLINE_S: Final = 600.0
READERS: Final = 16
REASON_MAX: Final = 200
ENDED: Final = ".ended.json"
OPEN: Final = ".json"
_NO_SPEC: Final = JobSpec(name="", run=(), image="")
"""In the place of the spec, which has a document of its own and a reader that refuses what it does not know."""


def to_document(record: JobRecord) -> bytes:
    """Return the record as it is stored."""
    bare = replace(record, job=replace(record.job, spec=_NO_SPEC))
    spec = spec_to_json(record.job.spec)
    return json.dumps({"schema": SCHEMA, "spec": spec, "record": json.loads(to_json(bare))}).encode()


def from_document(data: bytes) -> JobRecord:
    """Return what is stored.

    Raises:
        ValueError: it cannot be understood: a newer spotd may have written it.
    """
    try:
        document = json.loads(data)
        if document["schema"] != SCHEMA:
            raise ValueError(f"it has schema {document['schema']!r}, this spotd understands {SCHEMA}")
        spec = spec_from_json(document["spec"])
        record = from_json(JobRecord, json.dumps(document["record"]))
    except SpecDocumentError as exc:
        raise ValueError(str(exc)) from exc
    except (TypeError, KeyError, AttributeError, OverflowError, RecursionError) as exc:
        raise ValueError(f"it is no job record ({type(exc).__name__})") from exc
    return replace(record, job=replace(record.job, spec=spec))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """What is known of the record of a job that goes on.

    Attributes:
        job: as it was then; `None` for a record that a former process wrote.
        at: when it was written.
    """

    size: int
    job: Job | None = None
    at: datetime | None = None


class JobRecords:
    """The controller that keeps the records, one pass is `reconcile_once`; `require` serves launches."""

    def __init__(
        self,
        objects: ObjectStore,
        *,
        world: Callable[[], World | None],
        database: Database,
        policy: PolicyHolder,
        clock: Clock,
        log: Logger,
        may_write: Callable[[], bool],
        inline: bool = False,
    ) -> None:
        self._objects = objects
        self._world = world
        self._database = database
        self._policy = policy
        self._clock = clock
        self._threads = StoreThreads(inline=inline)
        self._log = log
        self._may_write = may_write
        self._stored: dict[JobId, _Stored] = {}
        self._is_listed = False
        self.controller = Controller(
            "job-records",
            self.reconcile_once,
            interval_s=EVERY_S,
            expected=(StoreError, StateError),
            outage=Outage(log, "job_records.held", "job_records.back"),
        )

    async def reconcile_once(self) -> Pause | None:
        """Write what has changed, a bounded number of records.

        Raises:
            StoreError, StateError: it is tried again.
        """
        world = self._world()
        if world is None or not self._may_write():
            return None
        if not self._is_listed:
            self._stored = {**await self._threads.run(self._list_own_records, deadline_s=DEADLINE_S), **self._stored}
            self._is_listed = True
        now = self._clock.now()
        going_on = {job.id: job for job in world.jobs.values() if not job.state.is_final}
        due = [job for job in going_on.values() if self._is_due(job, now)]
        left = list(islice((job for job in self._stored if job not in going_on), PER_ROUND))
        over = [job for job in await self._database.read(lambda r: r.readable_jobs(left)) if job.state.is_final]
        some = [*over, *due][:PER_ROUND]
        if some:
            await self._threads.run(lambda: self._write_all(some), deadline_s=DEADLINE_S)
        return Pause(seconds=EVERY_S / 100 if len(over) + len(due) > PER_ROUND else EVERY_S)

    def require(self, job: Job) -> None:
        """See to it that the record says what the job has cost and made, before its next number is used.

        Raises:
            StoreError: it could not be written.
        """
        known = self._stored.get(job.id)
        if known is None or known.job is None or must_be_stored_at_once(content_of(known.job), content_of(job)):
            self._write(job)

    def _is_due(self, job: Job, now: datetime) -> bool:
        known = self._stored.get(job.id)
        if known is None:
            return True
        if known.job is job:
            return False
        after = content_of(job)
        if known.job is None:
            if known.size != len(self._document(after)):
                return True
            self._stored[job.id] = replace(known, job=job, at=now)
            return False
        before = content_of(known.job)
        if before == after:
            self._stored[job.id] = replace(known, job=job)
            return False
        long_ago = known.at is None or not timedelta(0) <= now - known.at < AGAIN
        return long_ago or must_be_stored_at_once(before, after)

    def _list_own_records(self) -> dict[JobId, _Stored]:
        install = self._policy.current.install
        return {job: _Stored(size=info.size) for job, info in list_records(self._objects, install)[0].items()}

    def _write_all(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            self._write(job)

    def _write(self, job: Job) -> None:
        install = self._policy.current.install
        going_on = object_keys.job_record_key(install, job.id + OPEN)
        ended = object_keys.job_record_key(install, job.id + ENDED)
        document = self._document(content_of(job))
        if job.state.is_final:
            self._objects.put(ended, document)
            self._objects.delete([going_on])
            self._stored.pop(job.id, None)
            return
        if job.id not in self._stored:
            self._objects.delete([ended])  # its owner has queued it again
        self._objects.put(going_on, document)
        self._stored[job.id] = _Stored(size=len(document), job=job, at=self._clock.now())

    def _document(self, job: Job) -> bytes:
        policy = self._policy.current
        saved_at = self._clock.now().replace(microsecond=0)  # so that equal jobs have records of equal length
        return to_document(JobRecord(install=policy.install, identity=policy.identity, saved_at=saved_at, job=job))

    async def count_lost(self) -> int:
        """Return how many jobs that have not ended the store knows, and the state does not.

        Raises:
            StoreError, StateError: it is not known, or not yet under which identity this daemon acts.
        """
        if not self._may_write():
            raise StoreError("which jobs are this install's is known once it holds its lease")
        found = await self._find(only_open=True)
        return len(found.jobs) + len(found.unreadable)

    async def find_lost(self) -> Found:
        """Return what the store holds of every job that the state does not know, with its attempts.

        Raises:
            StoreError, StateError: it is not known.
        """
        found = await self._find(only_open=False)
        policy, now = self._policy.current, self._clock.now()
        return await self._threads.run(
            lambda: with_machines(self._objects, policy, found, now, tolerant_read(self._log)),
            deadline_s=READ_DEADLINE_S,
        )

    async def _find(self, *, only_open: bool) -> Found:
        policy = self._policy.current
        going_on, ended = await self._threads.run(
            lambda: list_records(self._objects, policy.install), deadline_s=DEADLINE_S
        )
        listed = going_on if only_open else {**going_on, **ended}
        known = await self._database.read(lambda reads: set(reads.names_of(listed)))
        keys = [info.key for job, info in sorted(listed.items()) if job not in known]
        if not keys:
            return Found()
        return await self._threads.run(lambda: _read_records(self._objects, policy, keys), deadline_s=READ_DEADLINE_S)


def list_records(objects: ObjectStore, install: InstallId) -> tuple[dict[JobId, ObjectInfo], dict[JobId, ObjectInfo]]:
    """Return the records of jobs that go on, and of those that have ended. The end outweighs the other.

    Raises:
        StoreUnavailable: the store does not answer.
    """
    going_on: dict[JobId, ObjectInfo] = {}
    ended: dict[JobId, ObjectInfo] = {}
    for info in islice(objects.list(object_keys.job_records_prefix(install)), LISTED_MAX):
        name = info.key.rpartition("/")[2]
        if name.endswith(ENDED):
            ended[JobId(name.removesuffix(ENDED))] = info
        elif name.endswith(OPEN):
            going_on[JobId(name.removesuffix(OPEN))] = info
    return {job: info for job, info in going_on.items() if job not in ended}, ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the store holds of jobs that the state does not know.

    Attributes:
        unreadable: records that cannot be understood: the key, and why.
        others: how many records are of another install with the same label.
    """

    jobs: tuple[LostJob, ...] = ()
    unreadable: tuple[tuple[str, str], ...] = ()
    others: int = 0


def _read_records(objects: ObjectStore, policy: Policy, keys: Sequence[str]) -> Found:
    jobs: list[LostJob] = []
    unreadable: list[tuple[str, str]] = []
    others = 0
    with ThreadPoolExecutor(READERS) as pool:
        for key, record in zip(keys, pool.map(lambda key: _read_record(objects, key), keys), strict=True):
            if isinstance(record, str):
                unreadable.append((key, record))
            elif record is not None and is_ours(record, policy):
                jobs.append(LostJob(record=record))
            elif record is not None:
                others += 1
    return Found(jobs=tuple(jobs), unreadable=tuple(unreadable), others=others)


def _read_record(objects: ObjectStore, key: str) -> JobRecord | str | None:
    """Return the record, or why it cannot be understood; `None` where it is gone since it was listed."""
    try:
        record = from_document(objects.get(key, bytes_max=RECORD_BYTES_MAX))
    except ObjectMissing:
        return None
    except StoreUnavailable:
        raise
    except (StoreError, ValueError) as exc:
        return str(exc)[:REASON_MAX]
    named = key.rpartition("/")[2].removesuffix(ENDED).removesuffix(OPEN)
    if record.job.id != named:
        return f"it is the record of job {record.job.id[:REASON_MAX]!r}"
    if record.job.state.is_final != key.endswith(ENDED):
        return "its name and its content differ in whether the job has ended"
    return record


def with_machines(objects: ObjectStore, policy: Policy, found: Found, now: datetime, read: HostRead) -> Found:
    """Return the same with what the store knows of their attempts and of what these saved.

    Raises:
        StoreUnavailable: the store does not answer.
    """
    with ThreadPoolExecutor(READERS) as pool:
        jobs = pool.map(lambda one: with_machine(objects, policy, one, now, read=read), found.jobs)
        return replace(found, jobs=tuple(jobs))


def with_machine(
    objects: ObjectStore,
    policy: Policy,
    one: LostJob,
    now: datetime,
    *,
    read: HostRead,
) -> LostJob:
    """Return the same with what the store knows of the job's attempts and of what these saved.

    Args:
        read: reads what a host wrote.

    Raises:
        StoreUnavailable: the store does not answer.
    """
    job = one.record.job
    if job.state.is_final:
        return replace(one, spent_on=_attempt_for_cost(objects, job.id, job.attempts_made, one.record, now))
    numbers = used_numbers(objects, job.id)
    # Whether the newest attempt was over is not known: it is taken as one that may have a machine.
    made = max(0, min(job.attempts_made, max(numbers)) - 1) if numbers else job.attempts_made
    checkpoints = tuple(c for c in job.checkpoints if _is_there(objects, c))
    job = replace(job, attempts_made=made, checkpoints=checkpoints)
    survey = survey_one(objects, policy, job, now, read)
    return LostJob(
        record=replace(one.record, job=job),
        survey=survey,
        spent_on=_attempt_for_cost(objects, job.id, max(made, 1), one.record, now),
    )


def _is_there(objects: ObjectStore, checkpoint: Checkpoint) -> bool:
    return known_manifest(objects, checkpoint.manifest_key, checkpoint.sha256) is not None


def _attempt_for_cost(
    objects: ObjectStore, job: JobId, number: int, record: JobRecord, now: datetime
) -> Unknown | None:
    """Return the attempt on which the cost of the job is booked, where it counts in this month's budget."""
    is_this_month = (record.saved_at.year, record.saved_at.month) >= (now.year, now.month)
    if record.job.spent <= NOTHING or number < 1 or not is_this_month:
        return None
    return Unknown(number=number, record=launch_record(objects, job, number))
