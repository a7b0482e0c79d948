"""The list of jobs: filters, search, one page at a time."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, cast

from spotd import words
from spotd.lists import is_line_of_array, states_of, with_arrays_as_one
from spotd.web import markup
from spotd.web.poller import LogHits
from spotd.web.views.market import CeilingLine

GROUPS: Final[Mapping[str, frozenset[str]]] = {
    "all": frozenset(),
    "active": markup.ON_MACHINES | markup.WAITING,
    "running": markup.ON_MACHINES,
    "waiting": markup.WAITING,
    "ended": words.FINAL_STATES,
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
        and markup.holds(text, job["state"].replace("_", " "), *(job[key] for key in _SEARCHED))
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
) -> markup.Node:
    columns = "Job | State:s | GPU:names | Where | $/h:n | Spent:n | Saved:n | Preempted:n | Age:n | Why:why"
    rows = [
        [
            markup.el("span", _checkbox(job, selected), markup.job_link(job), markup.el("small", _below(job))),
            markup.counts(states)
            if len(states := states_of(job)) > 1
            else markup.state(job["state"], markup.doing(job, now)),
            markup.gpus(job),
            words.clean(words.where_text(job)),
            words.price(job["effective_usd_h"]),
            words.spent_words(job),
            words.dollars(job["saved_usd"]) if job["spent_usd"] and job["state"] != "FAILED" else words.NOTHING,
            str(job["recoveries"]),
            markup.ago(job["submitted_at"], now),
            _why(job),
        ]
        for job in jobs
    ]
    if not rows and not is_filtered:
        ways = ("No job was queued yet. ", markup.el("a", "Queue one here", href="/submit"), ", or with ")
        return markup.el(
            "section", markup.el("p", *ways, markup.el("code", "spotctl submit job.toml"), ".", cls="empty")
        )
    return markup.el("section", markup.table("Jobs", columns, rows, empty="No job matches."))


def _why(job: Mapping[str, Any]) -> str:
    """Return why it is so; of an array what its most urgent job states, where that is not only how it ended."""
    if job["failure"] and job["state"] == "FAILED":
        return words.clean(words.failure_lines(job["failure"])[0])
    return words.clean(job["verdict"] if is_line_of_array(job) else job["summary"] or job["verdict"])


def _checkbox(job: Mapping[str, Any], selected: Container[str]) -> markup.Node:
    name = words.clean(job["name"])
    return markup.el(
        "input", type="checkbox", checked=job["id"] in selected, data_pick=job["id"], aria_label=f"Select {name}"
    )


def _below(job: Mapping[str, Any]) -> str:
    """Return the id, or of the line of an array, how many jobs it has."""
    return words.count(job["array"]["count"], "job") if is_line_of_array(job) else str(job["id"])


# One job: what it is doing and why, its attempts, its log, what it cost.


EVENTS_SHOWN: Final = 60


def ceilings_waited_for(known: Mapping[str, float]) -> list[CeilingLine]:
    """Return a line for each ceiling of a job; GPUs with the same one share it."""
    gpus: dict[float, list[str]] = {}
    for gpu, limit in known.items():
        gpus.setdefault(round(limit, 4), []).append(words.clean(gpu))
    if len(gpus) == 1:
        return [CeilingLine(usd_gpu_h=limit, name="ceiling") for limit in gpus]
    return [
        CeilingLine(usd_gpu_h=limit, name=f"ceiling {of[0] if len(of) == 1 else words.count(len(of), 'GPU')}")
        for limit, of in sorted(gpus.items())
    ]


def heading(detail: Mapping[str, Any], why: Mapping[str, Any] | None) -> markup.Node:
    """Return what the job is and why it is so, in a sentence."""
    job = detail["job"]
    sentence = job["summary"] or (why["sentence"] if why else job["verdict"])
    notices = [*detail["set_aside"], job["checkpoint_late"]]
    costs = [*(why["costs"] if why else ()), detail["checkpoint_advice"]]
    return markup.el(
        "div",
        markup.el("p", markup.state(job["state"]), markup.el("code", job["id"]), cls="who"),
        markup.el("p", missing, cls="missing") if (missing := words.missing_text(why) if why else "") else None,
        markup.el("p", words.clean(sentence), cls="sentence") if job["state"] != "FAILED" else None,
        _failure(job["failure"]) if job["failure"] is not None else None,
        *(markup.el("p", f"Ran there: {words.clean(text)}", cls="muted") for text in (why["placed"] if why else ())),
        *(markup.el("p", words.clean(text), cls="muted") for text in costs if text),
        *(markup.el("p", words.clean(text), cls="problem") for text in notices if text),
        cls="heading",
    )


def summary(detail: Mapping[str, Any], now: datetime) -> markup.Node:
    """Return the facts of the job."""
    job, spec = detail["job"], detail["spec"]
    point, moving = job["checkpoint"], job["transfer"]
    checkpoint = (
        words.NOTHING
        if point is None
        else f"{words.clean(point['name'])}, {words.size_text(point['bytes'])}, {markup.ago(point['at'], now)} ago"
    )
    pairs: list[tuple[str, markup.Node]] = [
        ("Where", words.clean(words.where_text(job))),
        ("GPU", markup.gpus(job)),
        (
            "Price",
            f"${words.price(job['effective_usd_h'])} an hour" if job["effective_usd_h"] is not None else words.NOTHING,
        ),
        (
            "Ceiling",
            words.NOTHING
            if detail["ceiling_usd_gpu_h"] is None
            else f"{words.clean(words.ceiling_text(detail))} per GPU-hour",
        ),
        (
            "Spent",
            words.spent_words(job)
            + ("" if detail["budget_usd"] is None else f" of {words.dollars(detail['budget_usd'])}"),
        ),
        ("Saved", _saving(job)),
        ("Preemptions", f"{job['recoveries']}, {words.span_text(detail['lost_s'])} lost" if job["recoveries"] else "0"),
        ("Checkpoint", checkpoint),
        ("Now", "" if job["stage"] is None else words.clean(words.stage_text(job["stage"], now.isoformat()))),
        ("On its way", "" if moving is None else _moving(moving)),
        ("Submitted", markup.moment(job["submitted_at"])),
        ("Started", markup.moment(job["started_at"])),
        ("Ended", markup.moment(job["ended_at"]) if job["ended_at"] else ""),
        ("Priority", str(detail["priority"]) if detail["priority"] else ""),
        ("Image", words.clean(str(spec.get("image", "")))),
    ]
    return markup.el(
        "div",
        markup.facts(pairs),
        markup.el("pre", _command(spec), cls="command", tabindex=0, aria_label="Command"),
        cls="panel",
    )


def _saving(job: Mapping[str, Any]) -> str:
    if job["state"] == "FAILED":
        return ""
    return f"{words.dollars(job['saved_usd'])} against on-demand" if job["spent_usd"] else words.NOTHING


def _failure(failure: Mapping[str, Any]) -> markup.Node:
    """Return why a job failed, the last lines of its output and the next step."""
    first, *output, step = words.failure_lines(failure)
    lines = "\n".join(line.removeprefix("| ") for line in output)
    return markup.el(
        "div",
        markup.el("p", first, cls="problem", role="status"),
        markup.el("pre", lines, cls="output", tabindex=0, aria_label="The last lines of its output") if lines else None,
        markup.el("p", step, cls="sentence"),
    )


def _command(spec: Mapping[str, Any]) -> str:
    run = spec.get("run", "")
    text = run if isinstance(run, str) else " ".join(str(word) for word in run)
    filtering = words.ControlFilter()
    return filtering.feed(text) + filtering.end()


def _moving(moving: Mapping[str, Any]) -> str:
    done, total = words.size_text(moving["bytes_done"]), words.size_text(moving["bytes_total"])
    left = "" if moving["seconds_left"] is None else f", {words.span_text(moving['seconds_left'])} left"
    stuck = f"; {words.clean(moving['failing'])}" if moving["failing"] else ""
    return f"{moving['kind']} of {words.clean(moving['checkpoint'])}: {done} of {total}{left}{stuck}"


def attempts(job: Mapping[str, Any], now: datetime) -> markup.Node:
    """Return the attempts as a table: what the timeline shows, in words."""
    columns = "Try:n | Where | GPU | $/h:n | Spent:n | Began | Ran:n | Resumed from | End:why"
    rows: list[list[markup.Node]] = [
        [
            str(one["attempt"]),
            words.clean(words.where_text(one)),
            markup.gpus(one),
            words.price(one["effective_usd_h"]),
            words.spent_words(one),
            markup.moment(one["launched_at"] or one["intended_at"], form="short"),
            words.NOTHING
            if one["running_at"] is None
            else words.run_span(one["running_at"], one["ended_at"] or now.isoformat()),
            words.clean(one["resumed_from"] or words.NOTHING),
            words.clean(one["detail"]) or one["state"],
        ]
        for one in reversed(job["attempts"])
    ]
    return markup.section(
        "Attempts", markup.table("Attempts, the newest first", columns, rows, empty="It had no machine yet.")
    )


def checkpoints(kept: Sequence[Mapping[str, Any]]) -> markup.Node:
    columns = "Checkpoint | Step:n | Size:n | Stored | Attempt:n | Mark"
    rows: list[list[markup.Node]] = [
        [
            words.clean(one["name"]),
            words.NOTHING if one["step"] is None else str(one["step"]),
            words.size_text(one["bytes"]),
            markup.moment(one["at"], form="short"),
            str(one["attempt"]) if one["attempt"] else "another job's",
            ", ".join(word for word, there in (("best", one["best"]), ("pinned", one["pinned"])) if there),
        ]
        for one in reversed(kept[-50:])
    ]
    return markup.section("Checkpoints", markup.table("Kept checkpoints", columns, rows, empty="None is stored yet."))


def receipt(answer: Mapping[str, Any]) -> markup.Node:
    """Return what the job cost, attempt by attempt, and what that saved."""
    found = answer["receipts"]
    if not found:
        return markup.section("Receipt", markup.el("p", "Nothing was spent yet.", cls="empty"))
    one = found[0]
    columns = (
        "Try:n | Where | Machine:n | Disk:n | Traffic:n | Fee:n | Not billed:n | Corrected:n | Spent:n | On-demand:n"
    )
    rows: list[list[markup.Node]] = [
        [
            str(row["attempt"]),
            words.clean(f"{row['provider']}/{row['host']}"),
            words.dollars(row["gpu_usd"]),
            words.dollars(row["disk_usd"]),
            words.dollars(row["traffic_usd"]),
            words.dollars(row["fee_usd"]),
            words.dollars(row["free_usd"]),
            words.dollars(row["corrected_usd"]),
            words.spent_words(row),
            words.dollars(row["on_demand_usd"]),
        ]
        for row in one["attempts"]
    ]
    compared = one["on_demand_usd"] - one["uncompared_usd"]
    total = f"Spent {words.spent_words(one)}"
    if compared > 0 and one["state"] != "FAILED":
        share = f"{100 * one['saved_usd'] / compared:.0f} %"
        total += f", on-demand {words.dollars(compared)}, saved {words.dollars(one['saved_usd'])} ({share})"
    return markup.section(
        "Receipt",
        markup.el("p", total, cls="sentence"),
        markup.table("What each attempt cost", columns, rows, empty="Nothing was spent yet."),
        *(markup.el("p", words.clean(text), cls="muted") for text in one["corrections"]),
    )


def log(tail: markup.LogTail) -> markup.Node:
    """Return the last lines of the log. The newest comes first in the tree, and is drawn at the bottom."""
    lines = tail.shown()
    if not lines:
        return markup.el("p", "It has written nothing yet.", cls="empty")
    drawn = [markup.el("div", text or " ", cls=None if kind == "log" else "mark") for kind, text in reversed(lines)]
    return markup.el("pre", *drawn, cls="log", tabindex=0, role="log", aria_label="The last lines of the log")


def log_hits(found: LogHits, text: str) -> markup.Node:
    """Return the lines that hold the text, the newest at the bottom, and how many there are."""
    where = f"the last {words.count(found.lines, 'line')}" if found.is_cut else words.count(found.lines, "line")
    if not found.total:
        return markup.el("section", markup.el("p", f"No line of {where} holds {text}.", cls="empty"))
    cut = f", the newest {len(found.hits)} shown" if found.total > len(found.hits) else ""
    lines = [
        markup.el("div", markup.el("span", f"{attempt} ", cls="mark"), line or " ")
        for attempt, line in reversed(found.hits)
    ]
    return markup.section(
        "Found in the log",
        markup.el("pre", *lines, cls="log", tabindex=0, aria_label="Lines that hold the text, each after its attempt"),
        note=f"{words.count(found.total, 'line')} of {where}{cut}",
    )


def events(found: Sequence[Mapping[str, Any]], *, kind: str = "", each: bool = False) -> markup.Node:
    """Return what happened to the job, the newest first; `kind` names the family, where only that is shown."""
    known = markup.matching_events(found, "", each=each)
    empty = f"No event of the kind {kind}." if kind else "Nothing has happened yet."
    note = f"the newest {EVENTS_SHOWN} of {len(known)}" if len(known) > EVENTS_SHOWN else ""
    return markup.section("Events", markup.step_list(known[:EVENTS_SHOWN], of_job=True, empty=empty), note=note)


def figures_table(tail: markup.LogTail) -> markup.Node:
    """Return the newest value of each figure that the job logs, besides its picture."""
    rows: list[list[markup.Node]] = [
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
        markup.el("p", f"{left_out} values were left out: not finite, too large or too many.", cls="muted")
        if left_out
        else None
    )
    return markup.el("div", markup.table("Figures", columns, rows), note)
