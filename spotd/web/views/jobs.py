"""The list of jobs: filters, search, one page at a time."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, cast

from spotd.arrays import is_line_of_array, states_of, with_arrays_as_one
from spotd.web.markup import Node, el, job_link, table
from spotd.web.views.parts import ON_MACHINES, WAITING, ago, counts, doing, gpus, holds, state
from spotd.words import FINAL_STATES, NOTHING, clean, count, dollars, failure_lines, price, where_text

GROUPS: Final[Mapping[str, frozenset[str]]] = {
    "all": frozenset(),
    "active": ON_MACHINES | WAITING,
    "running": ON_MACHINES,
    "waiting": WAITING,
    "ended": FINAL_STATES,
    "failed": frozenset({"FAILED", "EXPIRED"}),
}
SORTS: Final[Mapping[str, Callable[[Mapping[str, Any]], Any]]] = {
    "newest": lambda _job: 0,
    "name": lambda job: job["name"],
    "state": lambda job: job["state"],
    "price": lambda job: -(job["effective_usd_h"] or 0),
    "spent": lambda job: -job["spent_usd"],
}
"""What jobs, which come newest first, are ordered by."""
PAGE: Final = 50
_SEARCHED: Final = ("id", "name", "gpu", "provider", "host", "verdict")


def matching(jobs: Sequence[Mapping[str, Any]], group: str, text: str, order: str) -> list[Mapping[str, Any]]:
    """Return the jobs of a group that hold every word of the text, in this order."""
    states = GROUPS.get(group, frozenset())
    found = [
        job
        for job in jobs
        if (not states or job["state"] in states)
        and holds(text, job["state"].replace("_", " "), *(job[key] for key in _SEARCHED))
    ]
    return sorted(found, key=SORTS.get(order, SORTS["newest"]))


def lines(
    answer: Mapping[str, Any], group: str, text: str, order: str, *, folds: bool = True
) -> list[Mapping[str, Any]]:
    """Return the jobs that match, in this order; with `folds` the jobs of an array are one line."""
    found = matching(answer["jobs"], group, text, "newest")
    if folds:
        sums = answer["arrays"] if group == "all" and not text else ()
        found = cast("list[Mapping[str, Any]]", with_arrays_as_one(cast("Any", found), sums))
    return sorted(found, key=SORTS.get(order, SORTS["newest"]))


def page_of(number: int, total: int) -> tuple[int, int]:
    """Return the page that can be shown for the one that was asked for, and how many there are."""
    pages = max(1, -(-total // PAGE))
    return max(1, min(number, pages)), pages


def listing(jobs: Sequence[Mapping[str, Any]], now: datetime, selected: Container[str] = ()) -> Node:
    columns = "Job | State:s | GPU | Where | $/h:n | Spent:n | Saved:n | Preempted:n | Age:n | Why:why"
    rows = [
        [
            el("span", _checkbox(job, selected), job_link(job), el("small", _below(job))),
            counts(states) if len(states := states_of(job)) > 1 else state(job["state"], doing(job, now)),
            gpus(job),
            clean(where_text(job)),
            price(job["effective_usd_h"]),
            dollars(job["spent_usd"]),
            dollars(job["saved_usd"]) if job["spent_usd"] and job["state"] != "FAILED" else NOTHING,
            str(job["recoveries"]),
            ago(job["submitted_at"], now),
            _why(job),
        ]
        for job in jobs
    ]
    return el("section", table("Jobs", columns, rows, empty="No job matches."))


def _why(job: Mapping[str, Any]) -> str:
    """Return why it is so; of an array what its most urgent job states, where that is not only how it ended."""
    if job["failure"]:
        return clean(failure_lines(job["failure"])[0])
    return clean(job["verdict"] if is_line_of_array(job) else job["summary"] or job["verdict"])


def _checkbox(job: Mapping[str, Any], selected: Container[str]) -> Node:
    name = clean(job["name"])
    return el("input", type="checkbox", checked=job["id"] in selected, data_pick=job["id"], aria_label=f"Select {name}")


def _below(job: Mapping[str, Any]) -> str:
    """Return the id, or of the line of an array, how many jobs it has."""
    return count(job["array"]["count"], "job") if is_line_of_array(job) else str(job["id"])
