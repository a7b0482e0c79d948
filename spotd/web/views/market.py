"""The market: offers of now, and which GPU and which ceilings a picture of prices is about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from typing import Any, Final, cast

from spotd import words
from spotd.lists import states_of, with_arrays_as_one
from spotd.web.markup import (
    ON_MACHINES,
    WAITING,
    Node,
    ago,
    counts,
    doing,
    el,
    facts,
    figure,
    gpus,
    holds,
    job_link,
    matching_events,
    problem,
    section,
    state,
    step_list,
    table,
)

CEILINGS_MAX: Final = 8
_SEARCHED: Final = ("provider", "host", "region", "gpu", "market", "verdict")


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferFilter:
    """Which offers are shown; empty for all."""

    gpu: str = ""
    provider: str = ""
    market: str = ""
    text: str = ""
    fits_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CeilingLine:
    """A ceiling, in dollars per GPU-hour, and the jobs that have it."""

    usd_gpu_h: float
    name: str


def matching(quotes: Sequence[Mapping[str, Any]], chosen: OfferFilter) -> list[Mapping[str, Any]]:
    """Return the offers that were asked for, in the order of the answer."""
    return [
        one
        for one in quotes
        if (not chosen.gpu or one["gpu"] == chosen.gpu)
        and (not chosen.provider or one["provider"] == chosen.provider)
        and (not chosen.market or one["market"] == chosen.market)
        and (not chosen.fits_only or one["fits"])
        and holds(chosen.text, *(one[key] for key in _SEARCHED))
    ]


def gpu_names(quotes: Sequence[Mapping[str, Any]], jobs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the GPUs that can be chosen: those that open jobs ask for first, then by the number of offers."""
    asked = Counter(job["gpu"] for job in jobs if job["gpu"] and job["state"] not in words.FINAL_STATES)
    offered = Counter(one["gpu"] for one in quotes)
    names = [*asked, *(name for name in offered if name not in asked)]
    return sorted(names, key=lambda name: (-asked[name], -offered[name], name))


def ceilings(jobs: Sequence[Mapping[str, Any]], gpu: str) -> list[CeilingLine]:
    """Return the ceilings of open jobs that ask for this GPU; those of several jobs are one line."""
    names: dict[float, list[str]] = {}
    for job in jobs:
        limit = job["ceiling_usd_gpu_h"]
        if job["state"] not in words.FINAL_STATES and limit is not None and _is_same_gpu(job["gpu"], gpu):
            names.setdefault(round(limit, 4), []).append(words.clean(job["name"]))
    busiest = sorted(names.items(), key=lambda row: -len(row[1]))[:CEILINGS_MAX]
    return [
        CeilingLine(usd_gpu_h=limit, name=of[0][:30] if len(of) == 1 else words.count(len(of), "job"))
        for limit, of in sorted(busiest)
    ]


def _is_same_gpu(asked: str | None, gpu: str) -> bool:
    """Whether a job that asks for one name may get the other: a job may ask for `H100`, which is `H100_SXM` too."""
    return bool(asked) and (asked == gpu or gpu.startswith((f"{asked}_", f"{asked}-")))


def offers(quotes: Sequence[Mapping[str, Any]]) -> Node:
    columns = "GPU | Where | Region | Market | $/GPU-hour:n | $/h:n | On-demand $/h:n | Ceiling:n | Verdict"
    rows: list[list[Node]] = [
        [
            gpus(one),
            words.clean(f"{one['provider']}/{one['host']}"),
            words.clean(one["region"]) or words.NOTHING,
            one["market"],
            el("span", words.price(one["effective_usd_gpu_h"]), title=breakdown(one)),
            words.price(one["effective_usd_h"]),
            words.price(one["on_demand_usd_h"]),
            words.price(one["ceiling_usd_gpu_h"]),
            el("span", "fits", cls="state good") if one["fits"] else _verdict(one),
        ]
        for one in quotes
    ]
    none = "The configuration has no ceiling for some of these GPUs; a job's own max_price counts for it."
    note = el("p", none, cls="muted") if any(_verdict(one) == words.NOTHING for one in quotes) else None
    return el("section", table("Offers of now, by effective price", columns, rows, empty="No offer matches."), note)


def _verdict(one: Mapping[str, Any]) -> str:
    return words.NOTHING if one["verdict"] == words.WITHOUT_CEILING else words.clean(one["verdict"])


def breakdown(one: Mapping[str, Any]) -> str:
    """Return the terms of an effective price in one line."""
    terms = one["breakdown"]
    names = (
        ("gpu_usd_h", "GPU"),
        ("storage_usd_h", "disk"),
        ("fee_usd_h", "fee"),
        ("upload_usd_h", "upload"),
        ("restore_usd_h", "restore"),
    )
    parts = [f"{name} {words.price(terms[key])}" for key, name in names if terms[key]]
    return f"per hour: {' + '.join(parts)} = {words.price(terms['total_usd_h'])}"


# What a submit would do, before it is done.


def refusals(message: str, rows: Sequence[tuple[str, str]], hint: str = "") -> Node:
    """Return why a job cannot be queued, with the way out of each reason."""
    return el("div", problem(message, hint), *(problem(text, way) for text, way in rows))


def plan(answer: Mapping[str, Any]) -> Node:
    spec = answer["spec"]
    ceilings = ", ".join(f"{words.clean(gpu)} ${words.price(limit)}" for gpu, limit in answer["ceilings"].items())
    pairs: list[tuple[str, Node]] = [
        ("Name", words.clean(answer["name"])),
        ("Image", words.clean(answer["image"])),
        ("GPU", words.clean(", ".join(str(one) for one in spec.get("resources", {}).get("gpu", [])))),
        ("Ceiling per GPU-hour", ceilings),
        ("Budget", "" if answer["budget_usd"] is None else words.dollars(answer["budget_usd"])),
    ]
    passed = [f"{words.clean(row['reason'])}: {words.count(row['offers'], 'offer')}" for row in answer["passed_over"]]
    return section(
        "The plan",
        el("p", words.clean(answer["verdict"]), cls="sentence"),
        facts(pairs),
        *(problem(text) for text in (answer["unprotected"], *answer["warnings"]) if text),
        *(el("p", words.clean(text), cls="muted") for text in answer["costs"]),
        offers(answer["candidates"]) if answer["candidates"] else None,
        el("details", el("summary", "Why other offers do not fit"), el("ul", *(el("li", row) for row in passed)))
        if passed
        else None,
    )


# Providers: whether they answer, what they can do, what is left of money paid in advance.


def cards(providers: Sequence[Mapping[str, Any]], now: datetime) -> Node:
    if not providers:
        return el("p", "No provider is configured.", cls="empty")
    return el("div", *(_card(one, now) for one in providers), cls="cards")


def _card(one: Mapping[str, Any], now: datetime) -> Node:
    sign, word, kind = ("●", "answers", "good") if one["ok"] else ("✕", "does not answer", "bad")
    if not one["enabled"]:
        sign, word, kind = "-", "disabled", "idle"
    balance = (
        ""
        if one["balance_usd"] is None
        else f"{words.dollars(one['balance_usd'])}, stated {ago(one['balance_at'], now)} ago"
    )
    pairs: list[tuple[str, Node]] = [
        ("Offers", "" if one["ok"] else str(one["offers"])),  # the sentence above states them where all is well
        ("Machines", str(one["machines"])),
        ("Newest prices", _ago(one["last_poll_at"], now)),
        ("Newest list of machines", _ago(one["last_listing_at"], now)),
        ("Fee", f"{one['fee_multiplier']:.2f} times the listed price"),
        ("Requests", f"{one['requests_h']} an hour, {one['requests_min']} in the last minute"),
        ("Spending", f"{words.dollars(one['spend_usd_h'])} an hour" if one["spend_usd_h"] else ""),
        ("Balance", balance),
        ("Lasts for", "" if one["runway_s"] is None else words.span_text(one["runway_s"])),
    ]
    lacking = [c for c in one["capabilities"] if not c["available"]]
    powers = ", ".join(words.clean(c["power"]).replace("_", " ") for c in one["capabilities"] if c["available"])
    return el(
        "section",
        el(
            "h2",
            words.clean(one["title"] or one["name"]),
            el("span", el("span", sign, aria_hidden="true", cls="sign"), word, cls=f"state {kind}"),
        ),
        el("p", words.clean(one["detail"]), cls="" if one["ok"] else "problem"),
        facts(pairs),
        el("p", f"Can: {powers}", cls="muted") if powers else None,
        el(
            "details",
            el("summary", f"Cannot: {len(lacking)}"),
            el(
                "ul",
                *(
                    el("li", f"{words.clean(c['power']).replace('_', ' ')}: {words.clean(c['reason'])}")
                    for c in lacking
                ),
            ),
        )
        if lacking
        else None,
        cls="card",
    )


def _ago(at: str | None, now: datetime) -> str:
    return words.NOTHING if at is None else f"{ago(at, now)} ago"


def hosts(answer: Mapping[str, Any], now: datetime) -> Node:
    """Return what is remembered of hosts, the worst first."""
    columns = "Host | Failed:n | Slow:n | Lost early:n | Lost:n | Machine hours:n | Behind:n | Newest:n | Avoided until"
    rows: list[list[Node]] = [
        [
            words.clean(f"{one['provider']}/{one['host']}"),
            f"{one['failed_starts']:g}",
            f"{one['slow_starts']:g}",
            f"{one['early_losses']:g}",
            f"{one['losses']:g}",
            f"{one['machine_h']:.1f}",
            f"{100 * one['ranks_behind']:.0f} %",
            f"{ago(one['at'], now)} ago",
            words.NOTHING if one["cools_until"] is None else one["cools_until"].replace("T", " ")[:16] + " UTC",
        ]
        for one in answer["hosts"][:50]
    ]
    return section(
        "Hosts that are remembered", table("Hosts", columns, rows, empty="Nothing is remembered of any host yet.")
    )


# The overview: what runs, what it costs, what waits and why, what happened last.


ROWS_MAX: Final = 25
REASONS_MAX: Final = 15
FAILED_MAX: Final = 5
NAMES_MAX: Final = 6
EVENTS_SHOWN: Final = 8


def figures(
    status: Mapping[str, Any] | None, jobs: Sequence[Mapping[str, Any]] | None, cost: Mapping[str, Any] | None
) -> Node:
    rate = sum(job["effective_usd_h"] or 0 for job in jobs or ())
    now = words.NOTHING if jobs is None else words.dollars(rate) if rate else "$0"
    counts = {} if status is None else status["jobs"]
    waiting = sum(number for name, number in counts.items() if name in WAITING)
    return el(
        "div",
        _machines(status, cost),
        figure("$/h now", now, "all machines, effective"),
        _spent("Spent today", "day", "spent_day_usd", status, cost),
        _spent("Spent this month", "month", "spent_month_usd", status, cost),
        _saving(cost),
        figure("Waiting", str(waiting) if status else words.NOTHING, _job_counts(counts)),
        cls="figures",
    )


def _budget(cost: Mapping[str, Any] | None, name: str) -> Mapping[str, Any] | None:
    return next((one for one in (cost or {}).get("budgets", ()) if one["name"] == name), None)


def _machines(status: Mapping[str, Any] | None, cost: Mapping[str, Any] | None) -> Node:
    """Return the machines that count against the limit on them, and how many of these compute."""
    budget = _budget(cost, "machines")
    if status is None or budget is None or budget["limit"] is None:
        return figure("Machines now", words.NOTHING if status is None else str(status["machines"]))
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
        return figure(title, words.dollars(spent), "no budget is set" if spent is not None else "")
    committed = found["committed"] if found else 0
    note = f"of {words.dollars(limit)}" + (f", {words.dollars(committed)} more is committed" if committed else "")
    return figure(title, words.dollars(spent), note, share=spent / limit)


def _saving(cost: Mapping[str, Any] | None) -> Node:
    if cost is None:
        return figure("Saved so far", words.NOTHING)
    compared = cost["on_demand_usd"] - cost["uncompared_usd"]
    note = "against on-demand"
    if compared > 0:
        note = f"{100 * cost['saved_usd'] / compared:.0f} % of what on-demand costs"
    return figure("Saved so far", words.dollars(cost["saved_usd"]), note, kind="good" if cost["saved_usd"] > 0 else "")


def _job_counts(counts: Mapping[str, int]) -> str:
    running = sum(number for name, number in counts.items() if name in ON_MACHINES)
    ended = sum(counts.values()) - running - sum(counts.get(name, 0) for name in WAITING)
    return f"{words.count(running, 'job')} on machines, {ended} ended" if counts else ""


def running(jobs: Sequence[Mapping[str, Any]], now: datetime) -> Node:
    running = [job for job in jobs if job["state"] in ON_MACHINES]
    shown = _fold(running)
    columns = "Job | State:s | GPU | Where | $/h:n | Spent:n | Saved:n | Checkpoint:n"
    rows = [
        [
            job_link(job),
            counts(states) if len(states := states_of(job)) > 1 else state(job["state"], doing(job, now)),
            gpus(job),
            words.clean(words.where_text(job)),
            words.price(job["effective_usd_h"]),
            words.spent_words(job),
            words.NOTHING if job["state"] == "FAILED" else words.dollars(job["saved_usd"]),
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
        return el("span", "late", cls="state wait", title=words.clean(job["checkpoint_late"]))
    return words.NOTHING if job["checkpoint"] is None else f"{ago(job['checkpoint']['at'], now)} ago"


def waiting(jobs: Sequence[Mapping[str, Any]]) -> Node:
    """Return what waits, with one sentence each on why; jobs that wait for the same have it in common."""
    shown = [job for job in jobs if job["state"] in WAITING]
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for job in shown:
        groups.setdefault((job["state"], words.clean(job["verdict"])), []).append(job)
    items = [
        el("li", el("div", *_names(_fold(of)), state(name), cls="who"), el("p", sentence or "not decided yet"))
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


def failed(jobs: Sequence[Mapping[str, Any]], now: datetime) -> Node:
    """Return the jobs that failed within a day, each with its reason; nothing where none did."""
    found = [job for job in jobs if job["state"] in {"FAILED", "EXPIRED"} and _is_of_today(job, now)]
    if not found:
        return ""
    rows = [
        el(
            "li",
            el("div", job_link(job), state(job["state"]), el("small", f"{ago(job['ended_at'], now)} ago"), cls="who"),
            el("p", words.clean(words.failure_lines(job["failure"])[0] if job["failure"] else job["reason"])),
        )
        for job in found[:FAILED_MAX]
    ]
    more = el("p", el("a", f"All {len(found)}", href="/jobs?show=failed")) if len(found) > FAILED_MAX else None
    return section("Failed in the last day", el("ul", *rows, cls="reasons"), more, note=str(len(found)))


def _is_of_today(job: Mapping[str, Any], now: datetime) -> bool:
    ended = words.instant(job["ended_at"])
    return ended is not None and now - ended < timedelta(days=1)


def _fold(jobs: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    return cast("Sequence[Mapping[str, Any]]", with_arrays_as_one(cast("Any", jobs)))


def _names(jobs: Sequence[Mapping[str, Any]]) -> list[Node]:
    more = len(jobs) - NAMES_MAX
    return [*(job_link(job) for job in jobs[:NAMES_MAX]), *([f"and {words.count(more, 'other')}"] if more > 0 else [])]


def latest(events: Sequence[Mapping[str, Any]]) -> Node:
    content = step_list(matching_events(events, "")[:EVENTS_SHOWN], empty="Nothing has happened yet.")
    return section("Latest events", content, el("p", el("a", "All events", href="/events")))
