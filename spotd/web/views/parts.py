"""What several pages show alike: states, times, prices, figures with a name."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from spotd.web.markup import Node, el
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
