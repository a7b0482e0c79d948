"""Asks the store, once at each start, for attempts that were made by a run of spotd that the state does not know."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import datetime, timedelta
from heapq import nlargest
from typing import Final

from spotd.core.domain.attempts import Attempt, HostStatus
from spotd.core.domain.intents import AttemptId, JobId
from spotd.core.domain.jobs import Checkpoint, Job
from spotd.core.domain.policy import Policy
from spotd.core.domain.states import JobState
from spotd.core.domain.world import World
from spotd.core.recovery import LaunchRecord, Survey, Unknown, attempt_of, record_of, recover, unsent
from spotd.daemon import object_keys
from spotd.daemon.commits import Commits, CrashPoint, StoreThreads
from spotd.daemon.controllers import Controller, Outage
from spotd.daemon.hosts.host_reader import ReadMemory
from spotd.daemon.hosts.reader import read_host
from spotd.daemon.install import store_now
from spotd.store import StateError as StateError
from spotd.store.values import from_json, to_json
from spotd_jobs.objects.api import Conflict, ObjectStore, StoreError, StoreUnavailable
from spotd_jobs.wire.grant import NextAttempt
from spotd_providers.contract.provider import Clock, Logger

RECORD_BYTES_MAX: Final = 65_536
RECORDS_MAX: Final = 10_000
READ_MAX: Final = 10
"""Of how many unknown attempts of one job that saved anything the checkpoints are read: the newest."""
WRITTEN_WITHIN: Final = timedelta(minutes=10)
"""A launch record is no older than this: what is intended may wait for its turn before it is written."""
RETRY_S: Final = 10.0
DEADLINE_S: Final = 300.0
NOT_DONE: Final = "spotd has just started and first asks the checkpoint store which attempts were made"

HostRead = Callable[[ObjectStore, Attempt, Job, datetime], HostStatus | None]
"""What the host of an attempt wrote, with the accepted checkpoints that the job does not know; `None` if nothing."""


class NumberUsed(StoreError):
    """An attempt that was launched before, in a run of spotd that the state does not know."""


def lost_words(jobs: int) -> str:
    """Return why nothing is bought, and no stray machine ended, while the store has jobs that the state lacks."""
    those = "1 job" if jobs == 1 else f"{jobs:,} jobs"
    return (
        f"the checkpoint store has {those} of this install that the state does not know: the state was lost, or is an"
        " older copy; spotctl reconcile --adopt shows what it takes back"
    )


def use_number(objects: ObjectStore, attempt: Attempt) -> None:
    """Make the number this launch's alone, whatever another run or another daemon believes.

    Raises:
        NumberUsed: it was used before, in a run that this state does not know.
    """
    number, record = attempt.id.number, to_json(record_of(attempt)).encode()
    try:
        objects.put(object_keys.launch_key(attempt.id.job, number), record, create_only=True)
    except Conflict as exc:
        raise NumberUsed(f"attempt {number} of this job was launched before, in another run of spotd") from exc


def require_same(objects: ObjectStore, attempt: Attempt) -> None:
    """Require that the number was used for this very attempt, by what was agreed for it and when.

    No date of the record counts that follows the computer's clock in the state, and cannot in the store.

    Raises:
        NumberUsed: for another one, in a run that this state does not know.
        StoreUnavailable: the store does not answer.
    """
    record = launch_record(objects, attempt.id.job, attempt.id.number)
    if record is None or (record.key, record.quote.at) != (attempt.key, attempt.quote.at):
        raise NumberUsed(f"attempt {attempt.id.number} of this job was launched before, in another run of spotd")


def name_next(objects: ObjectStore, former: AttemptId, attempt: Attempt, grant_url: str) -> None:
    """Tell the machine of the former attempt that it goes on with this one. Each attempt is named one next, ever.

    Raises:
        NumberUsed: it was named another one, in a run that this state does not know.
        StoreError: it could not be written.
    """
    key = object_keys.next_key(former)
    document = NextAttempt(job=attempt.id.job, attempt=attempt.id.number, grant_url=grant_url)
    try:
        objects.put(key, document.to_bytes(), create_only=True)
    except Conflict as exc:
        try:
            known = NextAttempt.model_validate_json(objects.get(key, bytes_max=RECORD_BYTES_MAX))
        except ValueError:
            known = None
        if known is None or (known.job, known.attempt) != (attempt.id.job, attempt.id.number):
            raise NumberUsed(f"the machine of {former.job}-{former.number} was handed over in another run") from exc


def require_newest(objects: ObjectStore, attempt: AttemptId) -> None:
    """Require that no attempt of this job was prepared after this one, in any run.

    Raises:
        NumberUsed: a later number was used, so its machine may compute.
        StoreUnavailable: the store does not answer.
    """
    later = _numbers_after(objects, attempt.job, attempt.number)
    if later:
        raise NumberUsed(f"attempt {max(later)} of job {attempt.job} was launched after attempt {attempt.number}")


class RecoverySurvey:
    """The one survey at a start; `done` once the state is known to be no older than the store."""

    def __init__(
        self,
        objects: ObjectStore,
        *,
        commits: Commits,
        clock: Clock,
        log: Logger,
        inline: bool = False,
        count_lost: Callable[[], Awaitable[int]] | None = None,
    ) -> None:
        """Make the survey.

        Args:
            count_lost: how many jobs the store knows that have not ended, and that the state does not know.
        """
        self._count_lost = count_lost
        self.lost = 0
        self._objects = objects
        self._commits = commits
        self._clock = clock
        self._log = log
        self._threads = StoreThreads(inline=inline)
        self._outage = Outage(log, "survey.waits", "survey.answered")
        self.controller = Controller(
            "recovery-survey",
            self.reconcile_once,
            interval_s=RETRY_S,
            expected=(StoreError, StateError),
            outage=self._outage,
        )
        self.done = False

    @property
    def hold(self) -> str:
        """Why nothing may be bought yet, in a sentence."""
        if self.done:
            return ""
        if self.lost:
            return lost_words(self.lost)
        return f"{NOT_DONE}: {self._outage.error}" if self._outage.error else NOT_DONE

    async def run(self) -> None:
        """Ask until the store has answered.

        Raises:
            InvariantBroken: as every commit.
        """
        await self.controller.run_until_success()

    async def reconcile_once(self) -> None:
        """Ask once.

        Raises:
            StoreError, StateError: it is asked again.
            InvariantBroken: as every commit.
        """
        world = await self._commits.world()
        now = self._clock.now()
        found, unsent = await self._threads.run(
            lambda: (
                survey_all(self._objects, world, now, tolerant_read(self._log)),
                unsent_launches(self._objects, world),
            ),
            deadline_s=DEADLINE_S,
        )
        if found or unsent:
            committed = await self._commits.commit(
                lambda newest, at: recover(newest, found, at, unsent),
                (CrashPoint.BEFORE_COMMIT_ADOPT, CrashPoint.AFTER_COMMIT_ADOPT),
            )
            if found:
                self._log.warning("survey.recovered", jobs=sorted(committed.plan.jobs))
        self.lost = 0 if self._count_lost is None else await self._count_lost()
        if self.lost:
            self._log.error("survey.state_lost", jobs=self.lost, error=lost_words(self.lost))
        self.done = not self.lost

    def note_adoption(self) -> None:
        """Every job that the store knows is in the state."""
        self.lost, self.done = 0, True


def tolerant_read(log: Logger) -> HostRead:
    """Return a reader for which a host that wrote what raises wrote nothing."""

    def read(objects: ObjectStore, attempt: Attempt, job: Job, now: datetime) -> HostStatus | None:
        try:
            return read_attempt(objects, attempt, job, now)
        except StoreError:
            raise
        except Exception as exc:  # whatever one host wrote, the others must be read
            log.warning("host.not_readable", attempt=attempt.key, error=str(exc)[:500], exc_info=exc)
            return None

    return read


def read_attempt(objects: ObjectStore, attempt: Attempt, job: Job, now: datetime) -> HostStatus | None:
    """Return what the host of an attempt wrote; `None` where no machine of it ever did."""
    if next(iter(objects.list(object_keys.prefix_of(attempt.id))), None) is None:
        return None  # no machine of it ever wrote
    return read_host(objects, ReadMemory(), attempt, job, at=now, dated=lambda real: real)


def unsent_launches(objects: ObjectStore, world: World) -> dict[AttemptId, bool]:
    """Return the launches that were not sent as far as this state knows, and whether each was ever prepared.

    Raises:
        StoreUnavailable: the store does not answer.
    """
    return {
        identity: objects.head(object_keys.launch_key(identity.job, identity.number)) is not None
        for identity in unsent(world)
    }


def survey_all(objects: ObjectStore, world: World, now: datetime, read: HostRead = read_attempt) -> list[Survey]:
    """Return what the store knows of each job that is not over, beyond the state; jobs without news are left out.

    Args:
        read: reads what a host wrote.

    Raises:
        StoreUnavailable: the store does not answer.
    """
    found = []
    ahead: timedelta | None = None
    for job in world.jobs.values():
        if job.state.is_final:
            continue
        numbers = _numbers_after(objects, job.id, job.attempts_made)
        if not numbers:
            continue
        ahead = now - _store_now(objects, world.policy, now) if ahead is None else ahead
        unknown = [Unknown(number=number, record=launch_record(objects, job.id, number)) for number in sorted(numbers)]
        counting = next((a for a in world.attempts_of(job.id) if a.state.counts), None)
        status = None if counting is None else read(objects, counting, job, now)
        checkpoints = () if status is None else status.checkpoints
        oldest = [replace(one, record=_not_after(one.record, numbers[one.number] + ahead)) for one in unknown]
        saved = _checkpoints(objects, world.policy, job, oldest, now, read)
        copied = {one.attempt for one in saved if numbers.get(one.attempt, one.at) - one.at > WRITTEN_WITHIN}
        found.append(
            Survey(
                job=job.id,
                unknown=[
                    replace(one, record=_dated(one.record, numbers[one.number] + ahead, now))
                    if one.number not in copied
                    else one
                    for one in unknown
                ],
                checkpoints=(*checkpoints, *saved),
                alive_at=None if status is None else max(filter(None, (status.alive_at, status.exit_at)), default=None),
            )
        )
    return found


def survey_one(
    objects: ObjectStore, policy: Policy, job: Job, now: datetime, read: HostRead = read_attempt
) -> Survey | None:
    """Return what the store knows of a job that is over, and whose owner wants more of it; nothing without news.

    Raises:
        StoreUnavailable: the store does not answer.
    """
    world = World(policy=policy, jobs={job.id: replace(job, state=JobState.QUEUED)}, attempts={}, intents={})
    return next(iter(survey_all(objects, world, now, read)), None)


def _store_now(objects: ObjectStore, policy: Policy, now: datetime) -> datetime:
    try:
        return store_now(objects, policy.install)
    except StoreError:
        return now  # it may only be read: its clock is taken to be right


def _not_after(record: LaunchRecord | None, written_at: datetime) -> LaunchRecord | None:
    """Return the record with a date before which its host did nothing, whichever clock was wrong."""
    return None if record is None else replace(record, intended_at=min(record.intended_at, written_at))


def _dated(record: LaunchRecord | None, written_at: datetime, now: datetime) -> LaunchRecord | None:
    """Return the record with the date that its age by the store's clock gives it, unless its own agrees with that.

    A record is written right before its launch. The clock of this computer may have been set since, in either
    direction: that moves every date of the state and none in the store, and no such date may make hours that are
    booked. It is not asked for where its host saved before the object was written, by its own clock: that object is a
    copy, as of a bucket that was copied, and its own date counts.
    """
    if record is None:
        return None
    is_near = abs(record.intended_at - written_at) <= WRITTEN_WITHIN
    return replace(record, intended_at=min(record.intended_at if is_near else written_at, now))


def used_numbers(objects: ObjectStore, job: JobId) -> set[int]:
    """Return the numbers of the job that were used.

    Raises:
        StoreUnavailable: the store does not answer.
    """
    return set(_numbers_after(objects, job, 0))


def _numbers_after(objects: ObjectStore, job: JobId, known: int) -> dict[int, datetime]:
    """Return the numbers above this one that were used, and when by the store's clock.

    Of very many the highest, since the newest one may compute.
    """
    listed = objects.list(object_keys.launches_prefix(job))
    names = ((info.key.rpartition("/")[2].removesuffix(".json"), info.modified) for info in listed)
    numbers = ((int(name), at) for name, at in names if name.isascii() and name.isdecimal())
    return dict(nlargest(RECORDS_MAX, ((number, at) for number, at in numbers if number > known)))


def launch_record(objects: ObjectStore, job: JobId, number: int) -> LaunchRecord | None:
    """Return what was agreed when the number was used; `None` where that cannot be read.

    Raises:
        StoreUnavailable: the store does not answer.
    """
    try:
        stored = objects.get(object_keys.launch_key(job, number), bytes_max=RECORD_BYTES_MAX)
        return from_json(LaunchRecord, stored.decode())
    except StoreUnavailable:
        raise
    except (StoreError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return None  # the number is used all the same


def _checkpoints(
    objects: ObjectStore, policy: Policy, job: Job, unknown: list[Unknown], now: datetime, read: HostRead
) -> tuple[Checkpoint, ...]:
    """Return accepted checkpoints of unknown attempts, oldest first for each attempt.

    A launch that is refused uses up its number, too, so there may be many in a row that saved nothing.
    """
    found: list[Checkpoint] = []
    hosts = 0
    for one in reversed(unknown):
        attempt = attempt_of(policy, job.id, one)
        status = None if attempt is None else read(objects, attempt, job, now)
        if status is not None and status.checkpoints:
            found.extend(status.checkpoints)
            hosts += 1
        if hosts >= READ_MAX:
            break
    return tuple(found)
