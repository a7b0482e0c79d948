"""A working copy of the world that remembers what changed and why.

Theory. Functions of the core take a world and return a plan. Inside one of them, later rules must see what earlier
ones did; this gives them that view and collects the changed rows. It lives for one call and is never shared, so
the core stays a function from values to values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Final, TypeVar

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.cooldowns import Cooldown
from spotd.core.domain.copies import replace
from spotd.core.domain.intents import AttemptId, Charge, Intent, IntentId, JobId, launch_intent_id, terminate_intent_id
from spotd.core.domain.jobs import Job
from spotd.core.domain.plan import Contained, Event, Plan
from spotd.core.domain.states import AttemptState, EndReason, JobState, check_attempt_transition, check_job_transition
from spotd.core.domain.world import ONE, Experience, Record, RecordId, RecordKind, World, added, nothing
from spotd.core.experience import (
    SLOT_HOURS,
    exposure,
    fault_record,
    loss_records,
    records_of_host,
    slot_of,
    time_subject,
)
from spotd.core.metering import closing_words, compared_cost
from spotd.core.starts import ANY_IMAGE, START_MAX, failure_record, is_slow, ratio_record, start_record
from spotd_providers.contract.values import HostId, Market, ProviderName

_Id = TypeVar("_Id")
_Row = TypeVar("_Row")


def _changes(rows: Mapping[_Id, _Row], before: Mapping[_Id, _Row]) -> dict[_Id, _Row]:
    # Identity first: comparing two rows field by field costs more than everything else a quiet cycle does.
    return {i: row for i, row in rows.items() if (old := before.get(i)) is not row and old != row}


def _order(item: Attempt) -> tuple[JobId, int]:
    return item.id.job, item.id.number


class WorkingCopy:
    """A world and the changes on top of it; `plan()` is what is to be committed."""

    def __init__(self, world: World, now: datetime) -> None:
        self.policy = world.policy
        self.now = now
        self._world = world
        self._jobs: dict[JobId, Job] = {}
        self._attempts: dict[AttemptId, Attempt] = {}
        self._attempts_now = world.attempts
        """Each as it is now, changed or not; a copy from the first change on."""
        self._intents: dict[IntentId, Intent] = {}
        self._cooldowns: list[Cooldown] = []
        self._former_bids: dict[tuple[ProviderName, str], list[tuple[int, int]]] | None = None
        self._learnt: dict[RecordId, Record] = {}
        self._charges: list[Charge] = []
        self._events: list[Event] = []
        self._wake_at: datetime | None = None
        self._list_again: set[ProviderName] = set()
        self._full_reads: set[AttemptId] = set()
        self.listed_at: Mapping[ProviderName, datetime] = {}
        """The instants of the listings that are being taken in."""
        self._contained: list[Contained] = []
        self._shared_silence: list[str] = []
        self._undo: list[Callable[[], object]] = []
        self._in_order: list[Attempt] | None = None
        self._by_host: dict[tuple[ProviderName, HostId], dict[AttemptId, None]] | None = None
        """Of each host, which attempts have had a machine of it in this plan."""
        self._has_new = False
        """Whether there may be attempts that the world lacks."""

    def plan(self) -> Plan:
        return Plan(
            jobs=_changes(self._jobs, self._world.jobs),
            attempts=_changes(self._attempts, self._world.attempts),
            intents=_changes(self._intents, self._world.intents),
            cooldowns=tuple(self._cooldowns),
            experience=_changes(self._learnt, self._world.experience),
            charges=tuple(self._charges),
            events=tuple(self._events),
            wake_at=self._wake_at,
            list_again=frozenset(self._list_again),
            full_reads=frozenset(self._full_reads),
            shared_silence=tuple(self._shared_silence),
            contained=tuple(self._contained),
        )

    def attempted(self, step: Callable[[], None]) -> Exception | None:
        """Run the step; if it raises, nothing of it remains and the exception is returned."""
        self._undo.clear()
        cooldowns, charges, events = len(self._cooldowns), len(self._charges), len(self._events)
        wake_at, again, closer = self._wake_at, frozenset(self._list_again), frozenset(self._full_reads)
        try:
            step()
        except Exception as exc:  # noqa: BLE001 - whatever it is, it must not reach the other jobs
            for undo in reversed(self._undo):
                undo()
            del self._cooldowns[cooldowns:], self._charges[charges:], self._events[events:]
            self._wake_at, self._list_again, self._full_reads = wake_at, set(again), set(closer)
            return exc
        return None

    @property
    def experience(self) -> Experience:
        """What was known before, with what this adds."""
        return {**self._world.experience, **self._learnt} if self._learnt else self._world.experience

    def learn(self, identity: RecordId, count: int, span: timedelta) -> None:
        """Add so many events, in millionths, and so much time to a record."""
        known = self._learnt.get(identity) or self._world.experience.get(identity)
        self._put(self._learnt, identity, added(known, identity, count, span, self.now))

    def note_contained(self, subject: str, error: str) -> None:
        self._contained.append(Contained(subject=subject, error=error))

    def _put(self, rows: dict[_Id, _Row], identity: _Id, row: _Row) -> None:
        known = rows.get(identity)
        if known is None:
            self._undo.append(lambda: rows.pop(identity, None))
        else:
            self._undo.append(lambda: rows.__setitem__(identity, known))
        rows[identity] = row

    def job(self, job: JobId) -> Job:
        return self._jobs.get(job) or self._world.jobs[job]

    def read_before(self, attempt: AttemptId) -> datetime | None:
        """When the host's words were read completely the last time before this judgement."""
        before = self._world.attempts.get(attempt)
        return None if before is None else before.read_at

    def note_shared_silence(self, why: str) -> None:
        self._shared_silence.append(why)

    def find_job(self, job: JobId) -> Job | None:
        return self._jobs.get(job) or self._world.jobs.get(job)

    def attempt(self, attempt: AttemptId) -> Attempt:
        return self._attempts_now[attempt]

    def before_and_now(self) -> Iterable[tuple[Attempt, Attempt]]:
        """Return each attempt of the world as it was before and as it is now, by job and number; none that is new.

        To sort and to find a thousand attempts costs more than what is asked of them.
        """
        if self._in_order is None:
            self._in_order = sorted(self._world.attempts.values(), key=_order)
        before, now = self._in_order, self._attempts_now
        if not self._attempts:
            return zip(before, before, strict=True)
        return [(item, now[item.id]) for item in before]

    def intent(self, intent: IntentId) -> Intent | None:
        return self._intents.get(intent) or self._world.intents.get(intent)

    def launch_order(self, item: Attempt) -> Intent | None:
        """Return the intent to launch the attempt's machine, open or not."""
        return self.intent(launch_intent_id(item.key))

    def end_order(self, item: Attempt) -> Intent | None:
        """Return the intent to end the attempt's machine, open or not."""
        return None if item.ref is None else self.intent(terminate_intent_id(item.ref))

    def attempts(self) -> tuple[Attempt, ...]:
        """Every attempt that has not ended, in order of job and number."""
        found = [item for _, item in self.before_and_now()]
        if self._has_new:
            found += [item for i, item in self._attempts.items() if i not in self._world.attempts]
            found.sort(key=_order)
        return tuple(item for item in found if item.state is not AttemptState.ENDED)

    def attempts_on(self, provider: ProviderName, host: HostId) -> list[Attempt]:
        """Every attempt with a machine of this host that has not ended."""
        if self._by_host is None:
            self._by_host = {}
            for item in self._attempts_now.values():
                self._note_host(item)
        items = (self._attempts_now.get(one) for one in self._by_host.get((provider, host), ()))
        return [
            item
            for item in items
            if item is not None and item.state is not AttemptState.ENDED and item.quote.offer.host_id == host
        ]

    def _note_host(self, item: Attempt) -> None:
        if self._by_host is None:
            return
        try:
            offer = item.quote.offer
            if offer.host_id is not None:
                self._by_host.setdefault((offer.provider, offer.host_id), {})[item.id] = None
        except Exception:  # noqa: BLE001 - its values are what is at fault, and the other machines are judged all the same
            return

    def intents(self) -> tuple[Intent, ...]:
        merged = {**self._world.intents, **self._intents} if self._intents else self._world.intents
        return tuple(merged[i] for i in sorted(merged) if merged[i].is_open)

    def wake(self, at: datetime) -> None:
        """Ask for the next decision no later than this."""
        self._wake_at = at if self._wake_at is None else min(self._wake_at, at)

    def window_end(self, provider: ProviderName) -> datetime:
        """When the absence of a machine whose launch may still be on its way begins to mean something."""
        return self.now + self.policy.list_lag(provider)

    def list_again(self, provider: ProviderName) -> None:
        self._list_again.add(provider)

    def read_in_full(self, attempt: AttemptId) -> None:
        self._full_reads.add(attempt)

    def put_attempt(self, attempt: Attempt) -> None:
        identity, now = attempt.id, self._attempts_now
        before = now.get(identity)
        if before is not None:
            check_attempt_transition(before.state, attempt.state)
        else:
            self._has_new = True
        if now is self._world.attempts or not isinstance(now, dict):
            now = self._attempts_now = dict(now)
        self._put(self._attempts, identity, attempt)
        self._put(now, identity, attempt)
        self._note_host(attempt)

    def put_job(self, job: Job) -> None:
        before = self._jobs.get(job.id) or self._world.jobs.get(job.id)
        if before is not None:
            check_job_transition(before.state, job.state)
        self._put(self._jobs, job.id, job)

    def put_intent(self, intent: Intent) -> None:
        self._put(self._intents, intent.id, intent)

    def event(
        self,
        kind: str,
        message: str,
        *,
        attempt: AttemptId | None = None,
        job: JobId | None = None,
        **data: str | int | float | None,
    ) -> None:
        self._events.append(
            Event(
                at=self.now,
                kind=kind,
                message=message,
                job=attempt.job if attempt is not None else job,
                attempt=attempt.number if attempt is not None else None,
                data=data,
            )
        )

    def move_job(self, job: JobId, state: JobState, reason: str, *, kind: str = "", **changes: object) -> None:
        """Put the job into this state for this reason; an event records it when either is new."""
        before = self.job(job)
        after = replace(
            before,
            state=state,
            reason=reason,
            state_since=self.now if state is not before.state else before.state_since,
            **changes,  # type: ignore[arg-type]  # keywords are fields of Job, checked by replace
        )
        if state.is_final and after.ended_at is None:
            after = replace(after, ended_at=self.now)
        self.put_job(after)
        if state is not before.state:
            self.event(kind or f"job.{state.value.lower()}", reason, job=job, state=state.value)
            self.close_job(job)

    def close_job(self, job: JobId) -> None:
        """Sum the job up in its last event, once it is final and all its attempts have ended."""
        item = self.job(job)
        if not item.state.is_final:
            return
        if any(i.job == job and one.state is not AttemptState.ENDED for i, one in self._attempts_now.items()):
            return
        compared = compared_cost(item.state, item.spent, item.on_demand)
        totals = replace(item.totals, uncompared=compared_cost(item.state, item.spent, item.totals.uncompared))
        if words := closing_words(totals, item.spent, compared, item.recoveries, item.lost):
            self.event(
                "job.closed",
                words,
                job=job,
                spent_microusd=item.spent,
                on_demand_microusd=compared,
                estimated=item.totals.estimated > 0,
            )


# What the end of an attempt, and the beginning of its command, add to the records, and what is forgotten.


EXPOSURE_MAX: Final = timedelta(days=30)
"""No attempt adds more machine time than this: a clock may have leapt."""
EARLY: Final = timedelta(minutes=30)
"""A machine that is lost so soon after its launch was hardly worth it."""


def learn_from_end(builder: WorkingCopy, item: Attempt, reason: EndReason, *, suspects_job: bool) -> None:
    """Add the machine hours of an attempt that ends now, and its loss if it is one; every other end is censored.

    Args:
        suspects_job: the job failed to start elsewhere just before, so that the host is not to blame.
    """
    spoke, held_since = item.heartbeat_seen_at is not None, item.bidding.held_since
    span = exposure(item, builder.now if held_since is None else min(builder.now, held_since))
    is_loss = reason.traits.is_loss and item.launched_at is not None and spoke and held_since is None
    if span is not None and spoke:
        _add_exposure(builder, item, span, ONE if is_loss else 0)
    _add_faults(builder, item, reason, is_loss=is_loss, suspects_job=suspects_job)


def learn_from_hold(builder: WorkingCopy, item: Attempt) -> None:
    """Add the loss of a machine that was outbid and is kept: its command is dead, whatever becomes of it."""
    offer = item.quote.offer
    time = time_subject(offer.market, slot_of(builder.now))
    of_time = RecordId(kind=RecordKind.LOSSES_TIME, provider=offer.provider, subject=time)
    for identity in (*loss_records(offer), of_time):
        builder.learn(identity, ONE, timedelta(0))


def learn_from_start(builder: WorkingCopy, item: Attempt, image: str) -> None:
    """Add the time from the attempt's launch until now, when its command began to run."""
    if item.launched_at is None:
        return
    took = builder.now - item.launched_at
    if took < timedelta(0):
        return
    if item.quote.offer.host_id is not None and is_slow(builder.experience, item.provider, image, took):
        _add_fault(builder, item, RecordKind.SLOW_STARTS)
    ratio = ratio_record(builder.experience, item.provider, image, item.quote.offer.market, took)
    builder.learn(ratio, ONE, min(took, START_MAX))
    for subject in (image, ANY_IMAGE):
        builder.learn(start_record(item.provider, subject), ONE, min(took, START_MAX))


def _add_exposure(builder: WorkingCopy, item: Attempt, span: tuple[datetime, datetime], losses: int) -> None:
    start, end = max(span[0], span[1] - EXPOSURE_MAX), span[1]
    offer = item.quote.offer
    for identity in loss_records(offer):
        builder.learn(identity, losses, end - start)
    parts: dict[int, timedelta] = {}
    at = start
    while at < end:
        until = min(end, _next_slot(at))
        parts[slot_of(at)] = parts.get(slot_of(at), timedelta(0)) + (until - at)
        at = until
    last = slot_of(end)
    for slot, length in sorted({last: timedelta(0), **parts}.items()):
        identity = RecordId(
            kind=RecordKind.LOSSES_TIME, provider=offer.provider, subject=time_subject(offer.market, slot)
        )
        if length or losses:
            builder.learn(identity, losses if slot == last else 0, length)


def _next_slot(at: datetime) -> datetime:
    begun = at.replace(minute=0, second=0, microsecond=0) - timedelta(hours=at.hour % SLOT_HOURS)
    return begun + timedelta(hours=SLOT_HOURS)


def _add_faults(builder: WorkingCopy, item: Attempt, reason: EndReason, *, is_loss: bool, suspects_job: bool) -> None:
    if item.launched_at is None:
        return
    took, has_run = max(timedelta(0), builder.now - item.launched_at), item.running_at is not None
    is_failed_start = reason.traits.is_host_fault and not has_run and not is_loss and not suspects_job
    _learn_from_failure(builder, item, took, is_lost=is_loss and not has_run, is_failed_start=is_failed_start)
    if item.quote.offer.host_id is None:
        return
    if is_loss and took < EARLY:
        _add_fault(builder, item, RecordKind.EARLY_LOSSES)
    elif is_failed_start:
        _add_fault(builder, item, RecordKind.FAILED_STARTS)


def _learn_from_failure(
    builder: WorkingCopy, item: Attempt, took: timedelta, *, is_lost: bool, is_failed_start: bool
) -> None:
    """Add a start that came to nothing. A spot machine that was taken while it started says nothing of starts."""
    market, rules = item.quote.offer.market, builder.policy.providers.get(item.provider)
    if rules is not None and (is_failed_start or (is_lost and market is Market.ON_DEMAND)):
        of_failures = failure_record(item.provider, market, took, rules.provision_timeout)
        builder.learn(of_failures, ONE, min(took, START_MAX))


def _add_fault(builder: WorkingCopy, item: Attempt, kind: RecordKind) -> None:
    host = item.quote.offer.host_id
    if host is not None:
        builder.learn(fault_record(kind, item.provider, host), ONE, timedelta(0))


def forget_host(world: World, host: str, now: datetime) -> Plan:
    """Forget what is remembered of the hosts that a user means by this."""
    gone = records_of_host(world.experience, host)
    if not gone:
        return Plan()
    what = f"what was remembered of host {host} is forgotten: it ranks by its price again"
    return Plan(
        experience={identity: nothing(identity, now) for identity in gone},
        events=(Event(at=now, kind="host.forgotten", message=what),),
    )
