"""The list of jobs: filters, search, one page at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from spotd.web.markup import Node, el, job_link, table
from spotd.web.views.parts import ON_MACHINES, WAITING, ago, doing, gpus, holds, state
from spotd.words import FINAL_STATES, NOTHING, clean, dollars, failure_lines, price, where_text

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


def page_of(number: int, total: int) -> tuple[int, int]:
    """Return the page that can be shown for the one that was asked for, and how many there are."""
    pages = max(1, -(-total // PAGE))
    return max(1, min(number, pages)), pages


def listing(jobs: Sequence[Mapping[str, Any]], now: datetime) -> Node:
    columns = "Job | State:s | GPU | Where | $/h:n | Spent:n | Saved:n | Preempted:n | Age:n | Why:why"
    rows = [
        [
            el("span", job_link(job), el("small", job["id"])),
            state(job["state"], doing(job, now)),
            gpus(job),
            clean(where_text(job)),
            price(job["effective_usd_h"]),
            dollars(job["spent_usd"]),
            dollars(job["saved_usd"]) if job["spent_usd"] and job["state"] != "FAILED" else NOTHING,
            str(job["recoveries"]),
            ago(job["submitted_at"], now),
            clean(failure_lines(job["failure"])[0] if job["failure"] else job["summary"] or job["verdict"]),
        ]
        for job in jobs
    ]
    return el("section", table("Jobs", columns, rows, empty="No job matches."))
