"""The overview: what runs, what it costs, what waits and why, what happened last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import islice
from typing import Any, Final, cast

from spotd.arrays import states_of, with_arrays_as_one
from spotd.web.markup import Node, el, job_link, table
from spotd.web.views.events import matching, step_list
from spotd.web.views.parts import ON_MACHINES, WAITING, ago, counts, doing, figure, gpus, section, state
from spotd.words import NOTHING, clean, count, dollars, price, where_text

ROWS_MAX: Final = 25
REASONS_MAX: Final = 15
NAMES_MAX: Final = 6
EVENTS_SHOWN: Final = 8


def figures(
    status: Mapping[str, Any] | None, jobs: Sequence[Mapping[str, Any]], cost: Mapping[str, Any] | None
) -> Node:
    rate = sum(job["effective_usd_h"] or 0 for job in jobs)
    counts = {} if status is None else status["jobs"]
    waiting = sum(number for name, number in counts.items() if name in WAITING)
    return el(
        "div",
        _machines(status, cost),
        figure("$/h now", dollars(rate) if rate else "$0", "all machines, effective"),
        _spent("Spent today", "day", "spent_day_usd", status, cost),
        _spent("Spent this month", "month", "spent_month_usd", status, cost),
        _saved(cost),
        figure("Waiting", str(waiting) if status else NOTHING, _job_counts(counts)),
        cls="figures",
    )


def _budget(cost: Mapping[str, Any] | None, name: str) -> Mapping[str, Any] | None:
    return next((one for one in (cost or {}).get("budgets", ()) if one["name"] == name), None)


def _machines(status: Mapping[str, Any] | None, cost: Mapping[str, Any] | None) -> Node:
    """Return the machines that count against the limit on them, and how many of these compute."""
    budget = _budget(cost, "machines")
    if status is None or budget is None or budget["limit"] is None:
        return figure("Machines now", NOTHING if status is None else str(status["machines"]))
    used, computing = round(budget["used"]), status["machines"]
    note = f"of {budget['limit']:.0f} allowed at once"
    if used > computing:
        note += f", {used - computing} of them being rented or ended"
    return figure("Machines now", str(max(used, computing)), note)


def _spent(title: str, budget: str, key: str, status: Mapping[str, Any] | None, cost: Mapping[str, Any] | None) -> Node:
    spent = None if status is None else status[key]
    found = _budget(cost, budget)
    limit = None if found is None else found["limit"]
    if spent is None or not limit:
        return figure(title, dollars(spent), "no budget is set" if spent is not None else "")
    committed = found["committed"] if found else 0
    note = f"of {dollars(limit)}" + (f", {dollars(committed)} more is committed" if committed else "")
    return figure(title, dollars(spent), note, share=spent / limit)


def _saved(cost: Mapping[str, Any] | None) -> Node:
    if cost is None:
        return figure("Saved so far", NOTHING)
    compared = cost["on_demand_usd"] - cost["uncompared_usd"]
    note = "against on-demand"
    if compared > 0:
        note = f"{100 * cost['saved_usd'] / compared:.0f} % of what on-demand costs"
    return figure("Saved so far", dollars(cost["saved_usd"]), note, kind="good" if cost["saved_usd"] > 0 else "")


def _job_counts(counts: Mapping[str, int]) -> str:
    running = sum(number for name, number in counts.items() if name in ON_MACHINES)
    ended = sum(counts.values()) - running - sum(counts.get(name, 0) for name in WAITING)
    return f"{count(running, 'job')} on machines, {ended} ended" if counts else ""


def running(jobs: Sequence[Mapping[str, Any]], now: datetime) -> Node:
    running = [job for job in jobs if job["state"] in ON_MACHINES]
    shown = _folded(running)
    columns = "Job | State:s | GPU | Where | $/h:n | Spent:n | Saved:n | Checkpoint:n"
    rows = [
        [
            job_link(job),
            counts(states) if len(states := states_of(job)) > 1 else state(job["state"], doing(job, now)),
            gpus(job),
            clean(where_text(job)),
            price(job["effective_usd_h"]),
            dollars(job["spent_usd"]),
            NOTHING if job["state"] == "FAILED" else dollars(job["saved_usd"]),
            _checkpoint(job, now),
        ]
        for job in shown[:ROWS_MAX]
    ]
    return section(
        "On machines",
        table("Jobs that have a machine", columns, rows, empty="No job has a machine."),
        el("p", el("a", f"All {len(running)}", href="/jobs?show=running")) if len(shown) > ROWS_MAX else None,
        note=str(len(running)) if running else "",
    )


def _checkpoint(job: Mapping[str, Any], now: datetime) -> Node:
    if job["checkpoint_late"]:
        return el("span", "late", cls="state wait", title=clean(job["checkpoint_late"]))
    return NOTHING if job["checkpoint"] is None else f"{ago(job['checkpoint']['at'], now)} ago"


def waiting(jobs: Sequence[Mapping[str, Any]]) -> Node:
    """Return what waits, with one sentence each on why; jobs that wait for the same have it in common."""
    shown = [job for job in jobs if job["state"] in WAITING]
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for job in shown:
        groups.setdefault((job["state"], clean(job["verdict"])), []).append(job)
    items = [
        el("li", el("div", *_names(_folded(of)), state(name), cls="who"), el("p", sentence or "not decided yet"))
        for (name, sentence), of in islice(groups.items(), REASONS_MAX)
    ]
    content = (
        el("ul", *items, cls="reasons")
        if items
        else el("p", "Nothing waits. ", el("a", "Queue a job", href="/submit"), cls="empty")
    )
    left_out = len(groups) > REASONS_MAX or len(shown) > NAMES_MAX
    more = el("p", el("a", f"All {len(shown)}", href="/jobs?show=waiting")) if left_out else None
    return section("What waits, and why", content, more, note=str(len(shown)) if shown else "")


def _folded(jobs: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    return cast("Sequence[Mapping[str, Any]]", with_arrays_as_one(cast("Any", jobs)))


def _names(jobs: Sequence[Mapping[str, Any]]) -> list[Node]:
    more = len(jobs) - NAMES_MAX
    return [*(job_link(job) for job in jobs[:NAMES_MAX]), *([f"and {count(more, 'other')}"] if more > 0 else [])]


def latest(events: Sequence[Mapping[str, Any]]) -> Node:
    content = step_list(matching(events, "")[:EVENTS_SHOWN], empty="Nothing has happened yet.")
    return section("Latest events", content, el("p", el("a", "All events", href="/events")))
