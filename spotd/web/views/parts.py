"""What several pages show alike: states, times, prices, figures with a name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from spotd.lists import EventStep, steps
from spotd.web.markup import Node, el, job_href
from spotd.words import NOTHING, age_text, clean, gpu_text, stage_word

WAITING: Final = frozenset({"QUEUED", "WAITING_PRICE", "RECOVERING"})
ON_MACHINES: Final = frozenset({"PROVISIONING", "STARTING", "RUNNING", "CANCELLING"})

_WORDS: Final[Mapping[str, str]] = {
    "WAITING_PRICE": "waits for a price",
    "QUEUED": "waits",
    "PROVISIONING": "is rented",
}
"""Where the name of a state in small letters would not say it."""
_STATES: Final[Mapping[str, tuple[str, str]]] = {
    "QUEUED": ("○", "idle"),
    "WAITING_PRICE": ("○", "wait"),
    "PROVISIONING": ("◔", "busy"),
    "STARTING": ("◑", "busy"),
    "RUNNING": ("●", "good"),
    "RECOVERING": ("↻", "wait"),
    "CANCELLING": ("◌", "idle"),
    "SUCCEEDED": ("✓", "good"),
    "FAILED": ("✕", "bad"),
    "CANCELLED": ("-", "idle"),
    "EXPIRED": ("✕", "bad"),
}
"""A sign and a class: never the colour alone."""


def holds(text: str, *parts: str | None) -> bool:
    """Whether every word of the text is in one of these parts."""
    if not text:
        return True
    searched = " ".join(part for part in parts if part).lower()
    return all(word in searched for word in text.lower().split())


def doing(job: Mapping[str, Any], now: datetime) -> str:
    """Return in a word or two what a machine does while the command does not run; empty else."""
    return "" if job["stage"] is None else clean(stage_word(job["stage"], now.isoformat()))


def state(name: str, note: str = "") -> Node:
    """Return a state as a sign and a word, with a note."""
    sign, kind = _STATES.get(name, ("?", "idle"))
    words = _WORDS.get(name) or name.replace("_", " ").lower()
    return el(
        "span",
        el("span", sign, aria_hidden="true", cls="sign"),
        words,
        el("small", note) if note else None,
        cls=f"state {kind}",
    )


def counts(states: Mapping[str, int]) -> Node:
    """Return how many jobs are in each state."""
    shown = []
    for name, number in states.items():
        sign, kind = _STATES.get(name, ("?", "idle"))
        word = name.replace("_", " ").lower()
        shown.append(
            el("span", el("span", sign, aria_hidden="true", cls="sign"), f"{number} {word}", cls=f"state {kind}")
        )
    return el("span", *shown, cls="counts")


def moment(at: str | None, *, form: str = "full") -> Node:
    """Return an instant; the browser writes it in its own time zone."""
    if at is None:
        return NOTHING
    return el("time", at.replace("T", " ")[:16] + " UTC", datetime=at, data_form=form)


def ago(at: str | None, now: datetime) -> str:
    """Return how long ago an instant was, in one unit."""
    return age_text(at, now.isoformat())


def gpus(item: Mapping[str, Any]) -> str:
    """Return a number of GPUs with their kind."""
    if not item["gpu"]:
        return "no GPU"
    return clean(gpu_text(item))


def figure(name: str, value: str, note: Node = "", *, share: float | None = None, kind: str = "") -> Node:
    """Return one of the large figures; `share` of 1 draws a bar below it."""
    bar = None
    if share is not None:
        percent = max(0, min(100, round(share * 100)))
        bar = el(
            "progress", value=percent, max=100, aria_label=f"{name}: {percent} %", cls="hot" if percent >= 80 else None
        )
    small = el("div", note, cls="note") if note != "" else None
    return el(
        "div", el("div", name, cls="name"), el("div", value, cls="value"), bar, small, cls=f"figure {kind}".strip()
    )


def section(title: str, *content: Node | None, note: str = "") -> Node:
    """Return a part of a page with its title."""
    head = el("h2", title, el("small", note) if note else None)
    return el("section", head, *content)


def problem(error: str, hint: str = "") -> Node:
    """Return why something is not shown or was refused, and the way out."""
    way = f"{clean(error).rstrip('.')}. Try: {clean(hint)}" if hint else clean(error)
    return el("p", way, cls="problem", role="status")


def waiting_for(name: str) -> Node:
    """Return what stands where an answer is not there yet."""
    return el("p", f"Asking the daemon for {name} …", cls="empty")


# Events: what happened and why.


_SEARCHED: Final = ("kind", "message", "job_name", "job")


def step_line(step: EventStep, *, of_job: bool = False) -> Node:
    """Return one step; on the page of a job its name is not repeated."""
    event = step.event
    who = None
    if event["job"] is not None and not of_job:
        who = el("a", clean(event["job_name"] or event["job"]), href=job_href(event["job"]))
    number = f"attempt {event['attempt']}" if event["attempt"] is not None else ""
    span = [", since ", moment(step.since)] if step.is_folded else []
    return el(
        "li",
        moment(event["at"]),
        el("span", who, f" {number}" if number else None, cls="who"),
        el("code", clean(event["kind"])),
        el("span", step.message, *span, cls="message"),
    )


def matching_events(events: Sequence[Mapping[str, Any]], text: str, *, each: bool = False) -> list[EventStep]:
    """Return those events that hold every word of the text as steps, the newest first; `each` folds none."""
    found = [event for event in events if holds(text, *(event[key] for key in _SEARCHED))]
    return ([EventStep(event=event) for event in found] if each else steps(found))[::-1]


def step_list(found: Sequence[EventStep], *, of_job: bool = False, empty: str) -> Node:
    if not found:
        return el("p", empty, cls="empty")
    return el("ol", *(step_line(one, of_job=of_job) for one in found), cls="events of-job" if of_job else "events")


def event_listing(found: Sequence[EventStep], *, is_filtered: bool = False) -> Node:
    return el("section", step_list(found, empty="No event matches." if is_filtered else "Nothing has happened yet."))
