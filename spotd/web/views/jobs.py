"""The list of jobs: filters, search, one page at a time."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, cast

from spotd.lists import is_line_of_array, states_of, with_arrays_as_one
from spotd.web.markup import LogTail, Node, el, facts, job_link, table
from spotd.web.poller import LogHits
from spotd.web.views.market import CeilingLine
from spotd.web.views.parts import (
    ON_MACHINES,
    WAITING,
    ago,
    counts,
    doing,
    gpus,
    holds,
    matching_events,
    moment,
    section,
    state,
    step_list,
)
from spotd.words import (
    FINAL_STATES,
    NOTHING,
    ControlFilter,
    ceiling_text,
    clean,
    count,
    dollars,
    failure_lines,
    missing_text,
    price,
    run_span,
    size_text,
    span_text,
    spent_words,
    stage_text,
    where_text,
)

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


def listing(
    jobs: Sequence[Mapping[str, Any]], now: datetime, selected: Container[str] = (), *, is_filtered: bool = False
) -> Node:
    columns = "Job | State:s | GPU:names | Where | $/h:n | Spent:n | Saved:n | Preempted:n | Age:n | Why:why"
    rows = [
        [
            el("span", _checkbox(job, selected), job_link(job), el("small", _below(job))),
            counts(states) if len(states := states_of(job)) > 1 else state(job["state"], doing(job, now)),
            gpus(job),
            clean(where_text(job)),
            price(job["effective_usd_h"]),
            spent_words(job),
            dollars(job["saved_usd"]) if job["spent_usd"] and job["state"] != "FAILED" else NOTHING,
            str(job["recoveries"]),
            ago(job["submitted_at"], now),
            _why(job),
        ]
        for job in jobs
    ]
    if not rows and not is_filtered:
        ways = ("No job was queued yet. ", el("a", "Queue one here", href="/submit"), ", or with ")
        return el("section", el("p", *ways, el("code", "spotctl submit job.toml"), ".", cls="empty"))
    return el("section", table("Jobs", columns, rows, empty="No job matches."))


def _why(job: Mapping[str, Any]) -> str:
    """Return why it is so; of an array what its most urgent job states, where that is not only how it ended."""
    if job["failure"] and job["state"] == "FAILED":
        return clean(failure_lines(job["failure"])[0])
    return clean(job["verdict"] if is_line_of_array(job) else job["summary"] or job["verdict"])


def _checkbox(job: Mapping[str, Any], selected: Container[str]) -> Node:
    name = clean(job["name"])
    return el("input", type="checkbox", checked=job["id"] in selected, data_pick=job["id"], aria_label=f"Select {name}")


def _below(job: Mapping[str, Any]) -> str:
    """Return the id, or of the line of an array, how many jobs it has."""
    return count(job["array"]["count"], "job") if is_line_of_array(job) else str(job["id"])


# One job: what it is doing and why, its attempts, its log, what it cost.


EVENTS_SHOWN: Final = 60


def ceilings_waited_for(known: Mapping[str, float]) -> list[CeilingLine]:
    """Return a line for each ceiling of a job; GPUs with the same one share it."""
    gpus: dict[float, list[str]] = {}
    for gpu, limit in known.items():
        gpus.setdefault(round(limit, 4), []).append(clean(gpu))
    if len(gpus) == 1:
        return [CeilingLine(usd_gpu_h=limit, name="ceiling") for limit in gpus]
    return [
        CeilingLine(usd_gpu_h=limit, name=f"ceiling {of[0] if len(of) == 1 else count(len(of), 'GPU')}")
        for limit, of in sorted(gpus.items())
    ]


def heading(detail: Mapping[str, Any], why: Mapping[str, Any] | None) -> Node:
    """Return what the job is and why it is so, in a sentence."""
    job = detail["job"]
    sentence = job["summary"] or (why["sentence"] if why else job["verdict"])
    notices = [*detail["set_aside"], job["checkpoint_late"]]
    costs = [*(why["costs"] if why else ()), detail["checkpoint_advice"]]
    return el(
        "div",
        el("p", state(job["state"]), el("code", job["id"]), cls="who"),
        el("p", missing, cls="missing") if (missing := missing_text(why) if why else "") else None,
        el("p", clean(sentence), cls="sentence") if job["state"] != "FAILED" else None,
        _failure(job["failure"]) if job["failure"] is not None else None,
        *(el("p", f"Ran there: {clean(text)}", cls="muted") for text in (why["placed"] if why else ())),
        *(el("p", clean(text), cls="muted") for text in costs if text),
        *(el("p", clean(text), cls="problem") for text in notices if text),
        cls="heading",
    )


def summary(detail: Mapping[str, Any], now: datetime) -> Node:
    """Return the facts of the job."""
    job, spec = detail["job"], detail["spec"]
    point, moving = job["checkpoint"], job["transfer"]
    checkpoint = (
        NOTHING
        if point is None
        else f"{clean(point['name'])}, {size_text(point['bytes'])}, {ago(point['at'], now)} ago"
    )
    pairs: list[tuple[str, Node]] = [
        ("Where", clean(where_text(job))),
        ("GPU", gpus(job)),
        ("Price", f"${price(job['effective_usd_h'])} an hour" if job["effective_usd_h"] is not None else NOTHING),
        (
            "Ceiling",
            NOTHING if detail["ceiling_usd_gpu_h"] is None else f"{clean(ceiling_text(detail))} per GPU-hour",
        ),
        (
            "Spent",
            spent_words(job) + ("" if detail["budget_usd"] is None else f" of {dollars(detail['budget_usd'])}"),
        ),
        ("Saved", _saving(job)),
        ("Preemptions", f"{job['recoveries']}, {span_text(detail['lost_s'])} lost" if job["recoveries"] else "0"),
        ("Checkpoint", checkpoint),
        ("Now", "" if job["stage"] is None else clean(stage_text(job["stage"], now.isoformat()))),
        ("On its way", "" if moving is None else _moving(moving)),
        ("Submitted", moment(job["submitted_at"])),
        ("Started", moment(job["started_at"])),
        ("Ended", moment(job["ended_at"]) if job["ended_at"] else ""),
        ("Priority", str(detail["priority"]) if detail["priority"] else ""),
        ("Image", clean(str(spec.get("image", "")))),
    ]
    return el(
        "div", facts(pairs), el("pre", _command(spec), cls="command", tabindex=0, aria_label="Command"), cls="panel"
    )


def _saving(job: Mapping[str, Any]) -> str:
    if job["state"] == "FAILED":
        return ""
    return f"{dollars(job['saved_usd'])} against on-demand" if job["spent_usd"] else NOTHING


def _failure(failure: Mapping[str, Any]) -> Node:
    """Return why a job failed, the last lines of its output and the next step."""
    first, *output, step = failure_lines(failure)
    lines = "\n".join(line.removeprefix("| ") for line in output)
    return el(
        "div",
        el("p", first, cls="problem", role="status"),
        el("pre", lines, cls="output", tabindex=0, aria_label="The last lines of its output") if lines else None,
        el("p", step, cls="sentence"),
    )


def _command(spec: Mapping[str, Any]) -> str:
    run = spec.get("run", "")
    text = run if isinstance(run, str) else " ".join(str(word) for word in run)
    filtering = ControlFilter()
    return filtering.feed(text) + filtering.end()


def _moving(moving: Mapping[str, Any]) -> str:
    done, total = size_text(moving["bytes_done"]), size_text(moving["bytes_total"])
    left = "" if moving["seconds_left"] is None else f", {span_text(moving['seconds_left'])} left"
    stuck = f"; {clean(moving['failing'])}" if moving["failing"] else ""
    return f"{moving['kind']} of {clean(moving['checkpoint'])}: {done} of {total}{left}{stuck}"


def attempts(job: Mapping[str, Any], now: datetime) -> Node:
    """Return the attempts as a table: what the timeline shows, in words."""
    columns = "Try:n | Where | GPU | $/h:n | Spent:n | Began | Ran:n | Resumed from | End:why"
    rows: list[list[Node]] = [
        [
            str(one["attempt"]),
            clean(where_text(one)),
            gpus(one),
            price(one["effective_usd_h"]),
            spent_words(one),
            moment(one["launched_at"] or one["intended_at"], form="short"),
            NOTHING if one["running_at"] is None else run_span(one["running_at"], one["ended_at"] or now.isoformat()),
            clean(one["resumed_from"] or NOTHING),
            clean(one["detail"]) or one["state"],
        ]
        for one in reversed(job["attempts"])
    ]
    return section("Attempts", table("Attempts, the newest first", columns, rows, empty="It had no machine yet."))


def checkpoints(kept: Sequence[Mapping[str, Any]]) -> Node:
    columns = "Checkpoint | Step:n | Size:n | Stored | Attempt:n | Mark"
    rows: list[list[Node]] = [
        [
            clean(one["name"]),
            NOTHING if one["step"] is None else str(one["step"]),
            size_text(one["bytes"]),
            moment(one["at"], form="short"),
            str(one["attempt"]) if one["attempt"] else "another job's",
            ", ".join(word for word, there in (("best", one["best"]), ("pinned", one["pinned"])) if there),
        ]
        for one in reversed(kept[-50:])
    ]
    return section("Checkpoints", table("Kept checkpoints", columns, rows, empty="None is stored yet."))


def receipt(answer: Mapping[str, Any]) -> Node:
    """Return what the job cost, attempt by attempt, and what that saved."""
    found = answer["receipts"]
    if not found:
        return section("Receipt", el("p", "Nothing was spent yet.", cls="empty"))
    one = found[0]
    columns = (
        "Try:n | Where | Machine:n | Disk:n | Traffic:n | Fee:n | Not billed:n | Corrected:n | Spent:n | On-demand:n"
    )
    rows: list[list[Node]] = [
        [
            str(row["attempt"]),
            clean(f"{row['provider']}/{row['host']}"),
            dollars(row["gpu_usd"]),
            dollars(row["disk_usd"]),
            dollars(row["traffic_usd"]),
            dollars(row["fee_usd"]),
            dollars(row["free_usd"]),
            dollars(row["corrected_usd"]),
            spent_words(row),
            dollars(row["on_demand_usd"]),
        ]
        for row in one["attempts"]
    ]
    compared = one["on_demand_usd"] - one["uncompared_usd"]
    total = f"Spent {spent_words(one)}"
    if compared > 0 and one["state"] != "FAILED":
        share = f"{100 * one['saved_usd'] / compared:.0f} %"
        total += f", on-demand {dollars(compared)}, saved {dollars(one['saved_usd'])} ({share})"
    return section(
        "Receipt",
        el("p", total, cls="sentence"),
        table("What each attempt cost", columns, rows, empty="Nothing was spent yet."),
        *(el("p", clean(text), cls="muted") for text in one["corrections"]),
    )


def log(tail: LogTail) -> Node:
    """Return the last lines of the log. The newest comes first in the tree, and is drawn at the bottom."""
    lines = tail.shown()
    if not lines:
        return el("p", "It has written nothing yet.", cls="empty")
    drawn = [el("div", text or " ", cls=None if kind == "log" else "mark") for kind, text in reversed(lines)]
    return el("pre", *drawn, cls="log", tabindex=0, role="log", aria_label="The last lines of the log")


def log_hits(found: LogHits, text: str) -> Node:
    """Return the lines that hold the text, the newest at the bottom, and how many there are."""
    where = f"the last {count(found.lines, 'line')}" if found.is_cut else count(found.lines, "line")
    if not found.total:
        return el("section", el("p", f"No line of {where} holds {text}.", cls="empty"))
    cut = f", the newest {len(found.hits)} shown" if found.total > len(found.hits) else ""
    lines = [el("div", el("span", f"{attempt} ", cls="mark"), line or " ") for attempt, line in reversed(found.hits)]
    return section(
        "Found in the log",
        el("pre", *lines, cls="log", tabindex=0, aria_label="Lines that hold the text, each after its attempt"),
        note=f"{count(found.total, 'line')} of {where}{cut}",
    )


def events(found: Sequence[Mapping[str, Any]], *, kind: str = "", each: bool = False) -> Node:
    """Return what happened to the job, the newest first; `kind` names the family, where only that is shown."""
    known = matching_events(found, "", each=each)
    empty = f"No event of the kind {kind}." if kind else "Nothing has happened yet."
    note = f"the newest {EVENTS_SHOWN} of {len(known)}" if len(known) > EVENTS_SHOWN else ""
    return section("Events", step_list(known[:EVENTS_SHOWN], of_job=True, empty=empty), note=note)


def figures_table(tail: LogTail) -> Node:
    """Return the newest value of each figure that the job logs, besides its picture."""
    rows: list[list[Node]] = [
        [
            key,
            f"{points[-1][1]:g}",
            f"{min(y for _, y in points):g}",
            f"{max(y for _, y in points):g}",
            str(len(points)),
        ]
        for key in tail.figures.names()
        if (points := tail.figures.series[key])
    ]
    columns = "Figure | Newest:n | Lowest:n | Highest:n | Points:n"
    left_out = tail.figures.left_out
    note = (
        el("p", f"{left_out} values were left out: not finite, too large or too many.", cls="muted")
        if left_out
        else None
    )
    return el("div", table("Figures", columns, rows), note)
