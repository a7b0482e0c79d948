"""The jobs of an array as one line of a list."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from spotd.api.schemas.jobs import ArrayTaskResponse, JobResponse

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


def cut_array(jobs: Sequence[JobResponse]) -> str:
    """Return the id of the array of which a limit may have cut off jobs; empty where there is none.

    The jobs of an array that has ended follow each other in a list, so it can be the last one only.
    """
    task = jobs[-1]["array"] if jobs else None
    return "" if task is None else task["id"]


def with_arrays_as_one(jobs: Iterable[JobResponse], whole: Sequence[JobResponse] = ()) -> list[JobResponse]:
    """Return the jobs in their order, with one line for each array where its first job is.

    Args:
        whole: all jobs of one of the arrays.
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
    for task in (job["array"] for job in whole[:1]):
        if task is not None:
            tasks[task["id"]] = list(whole)
    return [job if task is None else _line(task, tasks[task["id"]]) for job, task in lines]


def _line(task: ArrayTaskResponse, jobs: Sequence[JobResponse]) -> JobResponse:
    states = Counter(job["state"] for job in jobs)
    state = min(states, key=_FIRST.index)
    first = min(jobs, key=lambda job: _FIRST.index(job["state"]))
    line = first.copy()
    line["id"] = task["id"]
    line["name"] = f"{task['name']} {states[state]}/{task['count']}"
    line["effective_usd_h"] = sum(job["effective_usd_h"] or 0 for job in jobs) or None
    line["spent_usd"] = sum(job["spent_usd"] for job in jobs)
    line["on_demand_usd"] = sum(job["on_demand_usd"] for job in jobs)
    line["saved_usd"] = sum(job["saved_usd"] for job in jobs)
    line["uncompared_usd"] = sum(job["uncompared_usd"] for job in jobs)
    line["recoveries"] = sum(job["recoveries"] for job in jobs)
    line["checkpoint"] = line["transfer"] = None
    if sum(job["provider"] is not None for job in jobs) > 1:
        line["provider"] = line["host"] = None
    return line
