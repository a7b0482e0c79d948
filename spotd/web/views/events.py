"""Events: what happened and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from spotd.event_steps import EventStep, steps
from spotd.web.markup import Node, el, job_href
from spotd.web.views.parts import holds, moment
from spotd.words import clean

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


def matching(events: Sequence[Mapping[str, Any]], text: str, *, each: bool = False) -> list[EventStep]:
    """Return those events that hold every word of the text as steps, the newest first; `each` folds none."""
    found = [event for event in events if holds(text, *(event[key] for key in _SEARCHED))]
    return ([EventStep(event=event) for event in found] if each else steps(found))[::-1]


def step_list(found: Sequence[EventStep], *, of_job: bool = False, empty: str) -> Node:
    if not found:
        return el("p", empty, cls="empty")
    return el("ol", *(step_line(one, of_job=of_job) for one in found), cls="events of-job" if of_job else "events")


def listing(found: Sequence[EventStep]) -> Node:
    return el("section", step_list(found, empty="No event matches."))
