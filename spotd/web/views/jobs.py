"""The list of jobs: filters, search, one page at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from spotd.web.markup import Node, el, job_link, table
from spotd.web.views.parts import ON_MACHINES, WAITING, ago, doing, gpus, state
from spotd.words import FINAL_STATES, NOTHING, clean, dollars, price, where_text

GROUPS: Final[Mapping[str, frozenset[str]]] = {
    "all": frozenset(),
    "active": ON_MACHINES | WAITING,
    "running": ON_MACHINES,
    "waiting": WAITING,
    "ended": FINAL_STATES,
    "failed": frozenset({"FAILED", "EXPIRED"}),
}
SORTS: Final = ("newest", "name", "state", "price", "spent")
PAGE: Final = 50


def matching(jobs: Sequence[Mapping[str, Any]], group: str, text: str, order: str) -> list[Mapping[str, Any]]:
    """Return the jobs of a group that hold every word of the text, in this order."""
    states, words = GROUPS.get(group, frozenset()), text.lower().split()
    found = [
        job
        for job in jobs
        if (not states or job["state"] in states) and (not words or all(word in _haystack(job) for word in words))
    ]
    if order == "name":
        found.sort(key=lambda job: job["name"])
    elif order == "state":
        found.sort(key=lambda job: job["state"])
    elif order == "price":
        found.sort(key=lambda job: -(job["effective_usd_h"] or 0))
    elif order == "spent":
        found.sort(key=lambda job: -job["spent_usd"])
    return found


def _haystack(job: Mapping[str, Any]) -> str:
    words = (job["id"], job["name"], job["state"].replace("_", " "), job["gpu"], job["provider"], job["host"])
    return " ".join(str(word) for word in (*words, job["verdict"]) if word).lower()


def page_of(number: int, total: int) -> tuple[int, int]:
    """Return the page that can be shown for the one that was asked for, and how many there are."""
    pages = max(1, -(-total // PAGE))
    return max(1, min(number, pages)), pages


def listing(jobs: Sequence[Mapping[str, Any]], now: datetime) -> Node:
    columns = "Job | State:s | GPU | Where | $/h:n | Spent:n | Saved:n | Losses:n | Age:n | Why:why"
    rows = [
        [
            el("span", job_link(job), el("small", job["id"])),
            state(job["state"], doing(job, now)),
            gpus(job),
            clean(where_text(job)),
            price(job["effective_usd_h"]),
            dollars(job["spent_usd"]),
            dollars(job["saved_usd"]) if job["spent_usd"] else NOTHING,
            str(job["recoveries"]),
            ago(job["submitted_at"], now),
            clean(job["summary"] or job["verdict"]),
        ]
        for job in jobs
    ]
    return el("section", table("Jobs", columns, rows, empty="No job matches."))
