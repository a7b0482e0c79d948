"""Weekly windows as spans between instants, correct where clocks are changed.

Theory. A window is two times of local clocks on a day. Each is turned into one instant, by one rule for both: of a time
that clocks show twice, the first; for one that they skip, the instant at which they skip it. This keeps the order of
times, so windows that touch still touch, none opens twice for one begin, and a window that is skipped as a whole is
empty. A window over a change is an hour longer or shorter than its times say.

What is searched is bounded: so many days ahead, whatever the rules of a zone do. Rules of zones are data of the
computer, read once for each name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from functools import cached_property, lru_cache, partial
from typing import Final
from zoneinfo import ZoneInfo

from spotd.core.author import order_stop
from spotd.core.checkpoints import outputs_warning
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.copies import replace
from spotd.core.domain.intents import JobId
from spotd.core.domain.jobs import Job, JobInput, bytes_within
from spotd.core.domain.policy import Policy
from spotd.core.domain.states import EndKind, EndReason, JobState
from spotd.core.domain.world import PastJob, VerdictKind, World
from spotd.core.kernel.quarantine import contain
from spotd.core.plan_builder import PlanBuilder
from spotd.core.pricing import span_words, transfer_time, useful_run
from spotd_jobs.spec.fields import window_words
from spotd_jobs.spec.model import PriceLimit, Schedule, Window
from spotd_providers.contract.values import Offer

DAY: Final = timedelta(days=1)
BEFORE: Final = 3
"""Days before an instant on which a window that is open at it can have begun: a day may be skipped as a whole."""
AHEAD: Final = 23
"""Days that are searched for the next window. In one week a change of clocks may skip the only one; the next has it."""
ALWAYS: Final = timedelta(days=15)
"""A span as long as this has no end: in two weeks every time of a week comes that clocks do not skip."""
_YEARS: Final = range(2, 9990)
"""Of which days before and after can be counted."""


@dataclass(frozen=True, slots=True)
class OpenSpan:
    """A time in which windows are open; `closes` is `None` where no end is known."""

    opens: datetime
    closes: datetime | None

    def left(self, at: datetime) -> timedelta:
        """Return how long it stays open from this instant on, or from its begin."""
        return timedelta.max if self.closes is None else self.closes - max(self.opens, at)


def zone_of(name: str | None) -> ZoneInfo | None:
    """Return the rules of a zone, `None` where this computer does not know it."""
    try:
        return ZoneInfo(name or "UTC")
    except (KeyError, ValueError, OSError):
        return None


def open_spans(windows: tuple[Window, ...], zone: ZoneInfo, at: datetime) -> tuple[OpenSpan, ...]:
    """Return the spans that end after this instant, in order, none of which touches the next."""
    if at.year not in _YEARS:
        return ()
    spans = _spans_around(windows, zone, at.astimezone(zone).date())
    return tuple(span for span in spans if span.closes is None or span.closes > at)


@lru_cache(maxsize=4096)
def _spans_around(windows: tuple[Window, ...], zone: ZoneInfo, today: date) -> tuple[OpenSpan, ...]:
    days = [today + offset * DAY for offset in range(-BEFORE, AHEAD)]
    found = [_span_on(window, zone, day) for day in days for window in windows if day.weekday() in window.days]
    joined: list[tuple[datetime, datetime]] = []
    for opens, closes in sorted(span for span in found if span[0] < span[1]):
        if joined and opens <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(closes, joined[-1][1]))
        else:
            joined.append((opens, closes))
    return tuple(OpenSpan(opens, None if closes - opens >= ALWAYS else closes) for opens, closes in joined)


def _span_on(window: Window, zone: ZoneInfo, day: date) -> tuple[datetime, datetime]:
    midnight = datetime.combine(day, time())
    opens, closes = (midnight + timedelta(minutes=minutes) for minutes in (window.start_min, window.end_min))
    return instant_of(opens, zone), instant_of(closes if closes > opens else closes + DAY, zone)


def instant_of(local: datetime, zone: ZoneInfo) -> datetime:
    """Return when clocks of the zone show this time first, or when they skip it."""
    first, last = (local.replace(tzinfo=zone, fold=fold).astimezone(UTC) for fold in (0, 1))
    if first <= last:
        return first
    # Skipped: the offset from before the change puts it behind the change, the one from after it before the change.
    before = last.astimezone(zone).utcoffset()
    while first - last > timedelta(seconds=1):
        middle = last + (first - last) // 2
        if middle.astimezone(zone).utcoffset() == before:
            last = middle
        else:
            first = middle
    return first.replace(microsecond=0)


# Whether the windows of a job let it have a machine now, and when the one that it has must save.
#
# Theory. A machine is bought only where what is left of the window holds a useful run and the save behind it, and it
# is ordered to save so early that it should be gone when the window closes. Both are estimates: a save that takes
# longer is waited for as any other, since work comes before the window.


_WEEK: Final = timedelta(days=6)


def window_wait(job: Job, policy: Policy, now: datetime) -> tuple[str, datetime | None] | None:
    """Return why the job gets no machine now, and until when; `None` where its windows are no reason."""
    schedule = job.spec.schedule
    if (zone := zone_of(schedule.timezone)) is None:
        return f"the time zone {schedule.timezone} of its windows is unknown on this computer: install tzdata", None
    needed = useful_run(job, None, policy) + save_lead(job, None, policy)
    spans = open_spans(schedule.windows, zone, now)
    usable = next((span for span in spans if span.left(now) >= needed), None)
    if usable is None:
        longest = max((span.left(now) for span in spans), default=timedelta(0))
        words = f"the longest that comes lasts {span_words(longest)}" if longest else "none comes in the next weeks"
        return (
            f"waits for a window in which it can run: {words}, a useful run and its save take {span_words(needed)}",
            None,
        )
    if usable.opens <= now:
        return None
    opens = f"opens {_instant_words(usable.opens, schedule, now)}"
    closing = spans[0]
    if closing.opens <= now and closing.closes is not None:
        short = f"its window closes in {span_words(closing.closes - now)}, too soon for a useful run"
        return f"{short}; the next {opens}", usable.opens
    return f"waits for its window, {opens}", usable.opens


def enforce_windows(builder: PlanBuilder, world: World) -> None:
    """Stop each machine whose window closes, so early that its job has saved by then."""
    bound = (a for a in world.attempts.values() if a.state.counts and world.jobs[a.id.job].spec.schedule.windows)
    for item in sorted(bound, key=lambda a: (a.id.job, a.id.number)):
        contain(builder, item.id.job, partial(_enforce, builder, item), "its windows cannot be judged")


def _enforce(builder: PlanBuilder, item: Attempt) -> None:
    job, now = builder.job(item.id.job), builder.now
    if builder.attempt(item.id).stop is not None:
        return
    zone = zone_of(job.spec.schedule.timezone)
    if zone is None:
        return  # what runs goes on: which hour it is there cannot be known
    why, save_at = _why_to_save(job, item, builder.policy, zone, now)
    if why and item.ends_itself:
        # Its command has ended: what it still uploads is waited for as long as any save, as if it were earlier.
        patience = builder.policy.save_limit
        earlier, save_at = _why_to_save(job, item, builder.policy, zone, now - patience)
        why, save_at = (why if earlier else ""), None if save_at is None else save_at + patience
    if why:
        order_stop(builder, item, EndReason.WINDOW_CLOSED, why)
    elif save_at is not None:
        builder.wake(save_at)


def _why_to_save(job: Job, item: Attempt, policy: Policy, zone: ZoneInfo, at: datetime) -> tuple[str, datetime | None]:
    """Return why the machine must save at this instant, empty where it need not, and when it must at last."""
    schedule = job.spec.schedule
    span = next(iter(open_spans(schedule.windows, zone, at)), None)
    if span is None or span.opens > at:
        words = ", ".join(map(window_words, schedule.windows))
        return f"it is outside of {words} {schedule.timezone}", None
    if span.closes is None:
        return "", None
    save_at = save_instant(job, item.quote.offer, policy, span.opens, span.closes)
    return ("" if at < save_at else f"closes {_clock_words(span.closes, schedule, at)}"), save_at


def save_instant(job: Job, offer: Offer | None, policy: Policy, opens: datetime, closes: datetime) -> datetime:
    """Return when a machine must begin to save; at least half of its window is for work."""
    return closes - min(save_lead(job, offer, policy), (closes - opens) / 2)


def save_lead(job: Job, offer: Offer | None, policy: Policy) -> timedelta:
    """How long before its window closes a machine is ordered to save: time to stop, and to upload the newest state."""
    size = job.checkpoints[0].bytes if job.checkpoints else 0
    upload = transfer_time(bytes_within(size), None if offer is None else offer.upload_mbps)
    return job.spec.checkpoint.stop_grace + policy.save_allowance + min(upload, policy.save_limit)


def closing_words(job: Job, item: Attempt, now: datetime) -> str:
    """`its window closes Tue 08:00 Europe/Kyiv (in 5 h 2 min)`, for a job that runs; empty where none closes."""
    if item.stop is not None and item.stop.reason.traits.kind is EndKind.FOR_TIME:
        return f"it saves and stops: {item.stop.reason.sentence(item.stop.detail)}"
    schedule = job.spec.schedule
    zone = zone_of(schedule.timezone) if schedule.windows else None
    if zone is None:
        return ""
    span = next(iter(open_spans(schedule.windows, zone, now)), OpenSpan(now, None))
    if span.opens > now or span.closes is None:
        return ""
    return f"its window closes {_instant_words(span.closes, schedule, now)}"


def _instant_words(at: datetime, schedule: Schedule, now: datetime) -> str:
    return f"{_clock_words(at, schedule, now)} (in {span_words(at - now)})"


def _clock_words(at: datetime, schedule: Schedule, now: datetime) -> str:
    """`Mon 22:00 Europe/Kyiv`; with its date where the day of the week alone may mean another."""
    local = at.astimezone(zone_of(schedule.timezone))
    date = "" if at - now < _WEEK else f" {local:%Y-%m-%d}"
    return f"{local:%a}{date} {local:%H:%M} {schedule.timezone}"


# Waiting for other jobs, and what becomes of their outputs.
#
# Theory. A job names others by ids that existed when it was submitted, so no chain can lead back to itself; where a
# state says otherwise all the same, the jobs of the circle wait, and say so. A job waits until each of the others has
# succeeded. One that ended otherwise ends nothing else: what follows it waits, which costs nothing, and goes on when
# it was retried and succeeds. From then on the job has inputs of its own: exactly those outputs, by their hash, on
# each of its machines, whatever becomes of the others later.


NAMED_MAX: Final = 3
"""How many of the jobs that are waited for a sentence names."""


class Predecessors:
    """The jobs that others wait for, as one decision sees them."""

    def __init__(self, world: World) -> None:
        self._world = world

    @cached_property
    def _circular(self) -> frozenset[JobId]:
        return circular(self._world.jobs)

    def _find(self, job: JobId) -> Job | PastJob | None:
        return self._world.jobs.get(job) or self._world.past.get(job)

    def wait(self, job: Job) -> str:
        """Return what the job waits for, in a sentence; empty where nothing keeps it."""
        if job.chain is None or job.chain.inputs is not None:
            return ""
        if job.id in self._circular:
            return f"waits for jobs that wait for it in turn, so none of them can begin: spotctl cancel {job.name}"
        missing = [before for before in job.chain.after if not _has_succeeded(self._find(before))]
        if missing:
            return self._waiting_words(job, missing)
        lacking = ((before, self._find(before)) for before in job.chain.after)
        for before, found in lacking:
            if found is not None and (problem := outputs_warning(found.outputs)):
                return f"waits for the outputs of {found.name} ({before}): {problem}; spotctl retry --anyway {before}"
        return ""

    def _waiting_words(self, job: Job, missing: list[JobId]) -> str:
        """Name what stands still first: the user has to do something about it."""
        found = [(before, self._find(before)) for before in missing]
        stuck = [(before, one) for before, one in found if one is None or one.state.is_final]
        for before, one in stuck[:1]:
            if one is None:
                return f"waits for {before}, of which the state holds nothing; spotctl cancel {job.name} ends the wait"
            way_out = f"spotctl retry {before} lets both go on, spotctl cancel {job.name} ends the wait"
            return f"waits for {one.name} ({before}), which is {one.state.value}: {one.reason}; {way_out}"
        named = [f"{one.name} ({before}), which is {one.state.value}" for before, one in found[:NAMED_MAX] if one]
        more = f" and {len(found) - NAMED_MAX} more" if len(found) > NAMED_MAX else ""
        return f"waits for {'; '.join(named)}{more}"

    def with_inputs(self, job: Job) -> Job:
        """Return the job with what the others left for it, once all of them have succeeded."""
        if job.chain is None or job.chain.inputs is not None or self.wait(job):
            return job
        found = [(before, self._find(before)) for before in job.chain.after]
        names = Counter(one.name for _, one in found if one is not None)
        inputs = tuple(
            JobInput(
                job=before,
                name=one.name if names[one.name] == 1 else f"{one.name}.{before}",
                attempt=one.outputs.attempt,
                sha256=one.outputs.sha256,
                bytes=one.outputs.bytes,
            )
            for before, one in found
            if one is not None and one.outputs is not None and one.outputs.sha256 is not None
        )
        return replace(job, chain=replace(job.chain, inputs=inputs))


def _has_succeeded(one: Job | PastJob | None) -> bool:
    return one is not None and one.state is JobState.SUCCEEDED


def circular(jobs: Mapping[JobId, Job]) -> frozenset[JobId]:
    """Return the jobs that wait for themselves, through others or not, and those that wait for one of these.

    Jobs that wait for none of the rest are taken away until nothing changes: what is left can never begin.
    """
    waiting = {
        job.id: {before for before in job.chain.after if _waits(jobs.get(before))}
        for job in jobs.values()
        if _waits(job) and job.chain is not None
    }
    followers: dict[JobId, list[JobId]] = {}
    for job, befores in waiting.items():
        for before in befores:
            followers.setdefault(before, []).append(job)
    free = [job for job, befores in waiting.items() if not befores]
    while free:
        begun = free.pop()
        del waiting[begun]
        for follower in followers.get(begun, ()):
            waiting[follower].discard(begun)
            if not waiting[follower]:
                free.append(follower)
    return frozenset(waiting)


def _waits(job: Job | None) -> bool:
    return job is not None and job.chain is not None and job.chain.inputs is None and not job.state.is_final


def readers(jobs: Iterable[Job], job: JobId) -> list[Job]:
    """Return the jobs that have not ended and read the outputs of this one."""
    return [
        one
        for one in jobs
        if not one.state.is_final and one.chain is not None and any(i.job == job for i in one.chain.inputs or ())
    ]


# Why it is not a job's turn yet, whatever machines cost.


TurnWait = tuple[VerdictKind, str, datetime | None]
WAITS_FOR_ITS_TURN: Final = frozenset({VerdictKind.WINDOW, VerdictKind.AFTER, VerdictKind.ARRAY})
"""It wants no machine now, whether or not it had one."""


class Turns:
    """What jobs wait for apart from the market, in one decision.

    Theory. The jobs of an array differ in nothing that a decision depends on until they have had a machine. So once one
    of them waits, whatever for, those behind it would wait for the same: they wait for it, and ten thousand of them
    cost a decision and the history no more than one.
    """

    def __init__(self, builder: PlanBuilder, world: World) -> None:
        self._builder = builder
        self._world = world
        self._predecessors = Predecessors(world)
        self._first_waiting: dict[tuple[JobId, PriceLimit | None], tuple[str, str]] = {}
        """Of each array and each ceiling in it, the name of the first job that waits, and what for."""

    def with_inputs(self, job: Job) -> Job:
        """Return the job, which is changed once all others that it waits for have succeeded."""
        after = job if job.chain is None else self._predecessors.with_inputs(job)
        if after is not job:
            self._builder.put_job(after)
        return after

    def wait(self, job: Job) -> TurnWait | None:
        """Return why it is not this job's turn, and until when; `None` when it is."""
        if job.chain is not None and (words := self._predecessors.wait(job)):
            return VerdictKind.AFTER, words, None
        if job.array is not None and (words := self._array_wait(job)):
            return VerdictKind.ARRAY, words, None
        if not job.spec.schedule.windows:
            return None
        shut = window_wait(job, self._world.policy, self._builder.now)
        if shut is None:
            return None
        if shut[1] is not None:
            self._builder.wake(shut[1])
        return VerdictKind.WINDOW, *shut

    def _array_wait(self, job: Job) -> str:
        task = job.array
        if task is None:
            return ""
        if is_untried(job) and (first := self._first_waiting.get((task.id, job.spec.price))):
            return f"comes after {first[0]} of its array ({first[1]})"
        if task.at_once is None:
            return ""
        at_work = self._at_work[task.id]
        return (
            f"waits for its turn: {at_work} jobs of {task.name} run, the most at once"
            if at_work >= task.at_once
            else ""
        )

    @cached_property
    def _at_work(self) -> Counter[JobId]:
        """How many jobs of each array have a machine."""
        counting = (i.job for i, item in self._world.attempts.items() if item.state.counts)
        tasks = (self._world.jobs[job].array for job in counting)
        return Counter(task.id for task in tasks if task is not None)

    def note_wait(self, job: Job, sentence: str) -> None:
        """Let the jobs of its array that come later wait for this one."""
        if job.array is not None and is_untried(job):
            self._first_waiting.setdefault((job.array.id, job.spec.price), (job.name, sentence))

    def note_launch(self, job: Job) -> None:
        """Count a machine for the array of this job."""
        if job.array is not None:
            self._at_work[job.array.id] += 1


def is_untried(job: Job) -> bool:
    """Whether nothing distinguishes the job from another one of its array."""
    return job.attempts_made == 0 and job.budget_set is None
