"""The jobs of an array as one line of a list."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from spotd.api.schemas.jobs import ArraySumResponse, ArrayTaskResponse, JobResponse

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
