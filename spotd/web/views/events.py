"""Events: what happened and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from spotd.web.markup import Node, el, job_href
from spotd.web.views.parts import holds, moment
from spotd.words import clean

_SEARCHED: Final = ("kind", "message", "job_name", "job")


def event_line(event: Mapping[str, Any], *, of_job: bool = False) -> Node:
    """Return one event; on the page of a job its name is not repeated."""
    who = None
    if event["job"] is not None and not of_job:
        who = el("a", clean(event["job_name"] or event["job"]), href=job_href(event["job"]))
    number = f"attempt {event['attempt']}" if event["attempt"] is not None else ""
    return el(
        "li",
        moment(event["at"]),
        el("span", who, f" {number}" if number else None, cls="who"),
        el("code", clean(event["kind"])),
        el("span", clean(event["message"]), cls="message"),
    )


def matching(events: Sequence[Mapping[str, Any]], text: str) -> list[Mapping[str, Any]]:
    """Return those events, the newest first, that hold every word of the text."""
    return [event for event in reversed(events) if holds(text, *(event[key] for key in _SEARCHED))]


def listing(events: Sequence[Mapping[str, Any]]) -> Node:
    if not events:
        return el("section", el("p", "No event matches.", cls="empty"))
    return el("section", el("ol", *(event_line(event) for event in events), cls="events"))
