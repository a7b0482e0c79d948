"""Jobs and events as lists and charts show them: an array as one line, one line a step, a price that changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, cast

from spotd.words import clean, count, instant

if TYPE_CHECKING:
    from spotd.api.schemas.jobs import ArraySumResponse, ArrayTaskResponse, JobResponse


# Events as a person reads them: one line for each step, and the routine of checkpoints as one line.
#
# One decision may record a change of the job, of its attempt and of its machine at one instant and for one reason.
# That is one step. Each checkpoint that is stored, and each old one that is deleted for it, is routine: those of a
# job between two other events of that job are one line, where its newest is.


FAMILIES: Final = ("job", "attempt", "machine", "checkpoint", "bid", "launch", "outputs", "host", "provider")
"""The first words of the kinds of most events: each may be filtered by."""
_STORED: Final = "checkpoint.accepted"
_ROUTINE: Final = frozenset({_STORED, "checkpoint.dropped"})
_STATED_BY: Final = {
    "job.provisioning": "attempt.intended",
    "machine.launched": "job.starting",
    "attempt.running": "job.running",
}
"""Kinds that say less than another one of the same step."""
_MAY_REPEAT: Final = ("attempt.", "job.", "machine.ending")
_BECAUSE: Final = "its attempt ended: "

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventStep:
    """A line: the event that stands for it, and of routine how many events it is and when they began.

    Attributes:
        stored: checkpoints that were stored; 0 where this is no routine, or only old ones were deleted.
        since: the instant of the first of several events of routine, as the API states it; else that of `event`.
    """

    event: Event
    number: int = 1
    stored: int = 0
    since: str = ""

    @property
    def is_folded(self) -> bool:
        return self.number > 1 and bool(self.since)

    @property
    def message(self) -> str:
        """The sentence of the event; of several checkpoints, how many they are and the newest."""
        message: str = clean(self.event["message"])
        if not self.is_folded:
            return message
        if self.stored == 0:
            return f"deleted {count(self.number, 'old checkpoint')}"
        data = self.event["data"]
        newest = clean(str(data.get("name") or "")) if data.get("step") is None else f"step {data['step']}"
        return f"{count(self.stored, 'checkpoint')}{newest and f', newest {newest}'}"

    @property
    def local_span(self) -> str:
        """The time of several events of routine by this computer's clock: `12:03-14:10`; empty for one event."""
        first, last = instant(self.since or None), instant(self.event["at"])
        if not self.is_folded or first is None or last is None:
            return ""
        first, last = first.astimezone(), last.astimezone()
        if first.date() == last.date():
            return f"{first:%H:%M}-{last:%H:%M}"
        return f"{first:%m-%d %H:%M} to {last:%m-%d %H:%M}"


def steps(events: Iterable[Event]) -> list[EventStep]:
    """Return the steps of these events, which are in order, oldest first."""
    lines: list[EventStep | None] = []
    routine: dict[str, int] = {}
    """By job: the place of its line of routine, while nothing else happened to it."""
    newest: dict[str, tuple[str, list[int]]] = {}
    """By job: its newest instant and the lines of that."""
    for event in events:
        job = event["job"]
        if job is None:
            lines.append(EventStep(event=event))
        elif event["kind"] in _ROUTINE:
            before = routine.get(job)
            lines.append(_with_routine(None if before is None else lines[before], event))
            if before is not None:
                lines[before] = None
            routine[job] = len(lines) - 1
        else:
            routine.pop(job, None)
            at, places = newest.get(job, ("", []))
            if at != event["at"]:
                places = []
            if not _joins(lines, places, event):
                places = [*places, len(lines)]
                lines.append(EventStep(event=event))
            newest[job] = (event["at"], places)
    return [line for line in lines if line is not None]


def _with_routine(before: EventStep | None, event: Event) -> EventStep:
    is_stored = event["kind"] == _STORED
    if before is None:
        return EventStep(event=event, stored=int(is_stored), since=event["at"])
    # The line stands for the newest checkpoint that was stored, at the time of the newest event.
    shown = event if is_stored or not before.stored else {**before.event, "at": event["at"]}
    return replace(before, event=shown, number=before.number + 1, stored=before.stored + is_stored)


def _joins(lines: list[EventStep | None], places: Sequence[int], event: Event) -> bool:
    """Whether one of the lines of this instant is the same step; it then states what says more."""
    for place in places:
        line = lines[place]
        kept = None if line is None else _one_of(line.event, event)
        if line is not None and kept is not None:
            other = event if kept is line.event else line.event
            attempt = other["attempt"] if kept["attempt"] is None else kept["attempt"]
            lines[place] = replace(line, event={**kept, "attempt": attempt}, number=line.number + 1)
            return True
    return False


def _one_of(first: Event, second: Event) -> Event | None:
    """Return which of two events of one job and instant states the step; `None` where they are two steps."""
    for less, more in ((first, second), (second, first)):
        if _STATED_BY.get(less["kind"]) == more["kind"]:
            return more
    if not all(event["kind"].startswith(_MAY_REPEAT) for event in (first, second)):
        return None
    one, other = first["message"].removeprefix(_BECAUSE), second["message"].removeprefix(_BECAUSE)
    if one in other:
        is_ending = second["kind"] == "machine.ending"
        return first if one == other and (is_ending or first["attempt"] is not None) else second
    return first if other in one else None


# The jobs of an array as one line of a list.


_STATES: Final = "array_states"
"""A key of a line that no job of the API has."""
_FIRST: Final = (
    "RUNNING",
    "STARTING",
    "PROVISIONING",
    "RECOVERING",
    "CANCELLING",
    "WAITING_PRICE",
    "QUEUED",
    "FAILED",
    "EXPIRED",
    "CANCELLED",
    "SUCCEEDED",
)
"""Which state of several an array shows."""


def with_arrays_as_one(jobs: Iterable[JobResponse], sums: Iterable[ArraySumResponse] = ()) -> list[JobResponse]:
    """Return the jobs in their order, with one line for each array where its first job is.

    Args:
        sums: of the arrays of which not all jobs are given.
    """
    tasks: dict[str, list[JobResponse]] = {}
    lines: list[tuple[JobResponse, ArrayTaskResponse | None]] = []
    for job in jobs:
        task = job["array"]
        if task is not None and task["id"] in tasks:
            tasks[task["id"]].append(job)
            continue
        if task is not None:
            tasks[task["id"]] = [job]
        lines.append((job, task))
    whole = {one["id"]: one for one in sums}
    return [job if task is None else _line(task, tasks[task["id"]], whole.get(task["id"])) for job, task in lines]


def is_line_of_array(job: JobResponse | Mapping[str, Any]) -> bool:
    """Whether this is the line of an array, and not one of its jobs."""
    task: Mapping[str, Any] | None = job["array"]
    return task is not None and task["id"] == job["id"]


def states_of(line: JobResponse | Mapping[str, Any]) -> Mapping[str, int]:
    """Return how many jobs of the array are in each state, those that matter most first; empty for a single job."""
    found: Mapping[str, int] = cast("Mapping[str, Any]", line).get(_STATES, {})
    return found


def state_rank(state: str) -> int:
    """Return the place of a state in order of care; one of another version of the daemon comes last."""
    return _FIRST.index(state) if state in _FIRST else len(_FIRST)


def _line(task: ArrayTaskResponse, jobs: Sequence[JobResponse], whole: ArraySumResponse | None) -> JobResponse:
    states = Counter(job["state"] for job in jobs) if whole is None else Counter(whole["states"])
    state = min(states, key=state_rank)
    first = min(jobs, key=lambda job: state_rank(job["state"]))
    line = first.copy()
    line["id"], line["state"] = task["id"], state
    line["name"] = f"{task['name']} {states[state]}/{task['count']}"
    line["effective_usd_h"] = sum(job["effective_usd_h"] or 0 for job in jobs) or None
    parts: Sequence[JobResponse | ArraySumResponse] = jobs if whole is None else [whole]
    line["estimated"] = any(part["estimated"] for part in parts)
    line["spent_usd"] = sum(part["spent_usd"] for part in parts)
    line["on_demand_usd"] = sum(part["on_demand_usd"] for part in parts)
    line["saved_usd"] = sum(part["saved_usd"] for part in parts)
    line["uncompared_usd"] = sum(part["uncompared_usd"] for part in parts)
    line["recoveries"] = sum(part["recoveries"] for part in parts)
    line["checkpoint"] = line["transfer"] = None
    cast("dict[str, Any]", line)[_STATES] = {name: states[name] for name in sorted(states, key=state_rank)}
    if sum(job["provider"] is not None for job in jobs) > 1:
        line["provider"] = line["host"] = None
    return line


CHANGES: Final = ("bid.raised", "bid.lowered")
"""Kinds of the events that change the price of a machine; their data has it before and after, per hour."""

Rates = list[tuple[str, float]]
"""From each instant on, dollars per hour for the whole machine."""


def rates_of(attempt: Mapping[str, Any], events: Iterable[Mapping[str, Any]]) -> Rates:
    """Return the prices of an attempt from its launch on, oldest first; at least one.

    Args:
        events: of its job, oldest first. One without figures, as earlier versions wrote it, changes nothing.
    """
    began = attempt["launched_at"] or attempt["intended_at"]
    found: Rates = []
    for event in events:
        before, after = event["data"].get("before_usd_h"), event["data"].get("usd_h")
        if event["kind"] not in CHANGES or event["attempt"] != attempt["attempt"]:
            continue
        if isinstance(before, int | float) and isinstance(after, int | float):
            found = found or [(began, float(before))]
            found.append((max(event["at"], began), float(after)))
    return found or [(began, attempt["effective_usd_h"])]
