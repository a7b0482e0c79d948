"""Trees of elements as plain lists, which the browser draws, and those that several pages show alike."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final
from urllib.parse import quote

from spotd.client.daemon import Daemon
from spotd.lists import EventStep, is_line_of_array, steps
from spotd.words import NOTHING, ControlFilter, age_text, clean, gpu_text, stage_word, visible

Node = Any
"""A text, or a list of a tag, its attributes, and its children."""

TEXT_MAX: Final = 2_000
"""Longer texts are cut: a sentence may hold what a host wrote."""
_TAGS: Final = frozenset(
    [
        *(
            "a",
            "code",
            "input",
            "dd",
            "details",
            "div",
            "dl",
            "dt",
            "h1",
            "h2",
            "li",
            "ol",
            "p",
            "pre",
            "progress",
            "section",
        ),
        *("small", "span", "strong", "summary", "table", "caption", "tbody", "td", "th", "thead", "time", "tr", "ul"),
    ]
)
_ATTRIBUTES: Final = frozenset(
    {"class", "href", "id", "title", "role", "scope", "value", "max", "datetime", "tabindex", "type", "checked"}
)


def el(tag: str, *children: Node, **attributes: str | float | None) -> Node:
    """Return an element; `cls` is its class, an underscore in a name is a hyphen, `None` leaves an attribute out.

    Raises:
        ValueError: a tag or an attribute that could run something.
    """
    named = {
        "class" if key == "cls" else key.replace("_", "-"): _shown(value) if isinstance(value, str) else value
        for key, value in attributes.items()
        if value is not None
    }
    if tag not in _TAGS or not all(key in _ATTRIBUTES or key.startswith(("aria-", "data-")) for key in named):
        raise ValueError(f"no element {tag} with {', '.join(named)}")
    if tag == "input" and named.get("type") != "checkbox":
        raise ValueError("no element input but a checkbox")
    if not str(named.get("href", "/")).startswith(("/", "#")):
        raise ValueError("a link leads to another place")
    return [
        tag,
        named,
        *(
            _shown(child) if isinstance(child, str) else child
            for child in children
            if child is not None and child != ""
        ),
    ]


def _shown(text: str) -> str:
    """Return a text that every view may hold, of any author: bounded, with nothing hidden, its lines as they are."""
    text = visible(text[: 4 * TEXT_MAX])
    return text[: TEXT_MAX - 1] + "…" if len(text) > TEXT_MAX else text


def job_link(job: Any) -> Node:
    """Return the name of a job as a link to its page; of the line of an array, to its jobs."""
    if is_line_of_array(job):
        return el("a", clean(job["array"]["name"]) or job["id"], href=array_href(job["id"]))
    return el("a", clean(job["name"]) or job["id"], href=job_href(job["id"]))


def array_href(array_id: str) -> str:
    """Return the address of the jobs of an array."""
    return f"/jobs?array={quote(array_id, safe='')}"


def job_href(job_id: str) -> str:
    return f"/job/{quote(job_id, safe='')}"


def table(caption: str, columns: str, rows: list[list[Node]], *, empty: str = "") -> Node:
    """Return a table; on a narrow screen each row becomes a card whose cells carry their column's title.

    Args:
        columns: their titles, each with its class: `State:s | Spent:n | Why:why`. `n` is for figures, `why` for
            sentences, `s` for states.
        empty: what is shown where there are no rows.

    Raises:
        ValueError: a column has no title, by which alone a screen reader and a narrow screen name its cells.
    """
    heads = [(title, kind) for title, _, kind in (column.partition(":") for column in columns.split(" | "))]
    if not all(title.strip() for title, _ in heads):
        raise ValueError(f"a column of {caption!r} has no title")
    if not rows:
        return el("p", empty, cls="empty")
    head = el("tr", *(el("th", title, scope="col", cls=kind or None) for title, kind in heads))
    body = [el("tr", *(_cell(*column, cell) for column, cell in zip(heads, row, strict=True))) for row in rows]
    return el(
        "div",
        el("table", el("caption", caption), el("thead", head), el("tbody", *body)),
        cls="scroll",
    )


def _cell(title: str, kind: str, cell: Node) -> Node:
    """Return a cell; one that holds nothing can be left out of a card."""
    return el("td", cell, cls=f"{kind} none".strip() if cell == NOTHING else kind or None, data_label=title)


def facts(pairs: list[tuple[str, Node]]) -> Node:
    """Return names with their values."""
    shown = [el("div", el("dt", name), el("dd", value)) for name, value in pairs if value != ""]
    return el("dl", *shown, cls="facts")


# The log of a job as the dashboard keeps it: its last lines, and the figures in those that are JSON.
#
# Whatever a host wrote arrives here. Lines, names, figures and their number are bounded, and what is no finite number
# of a size that can be drawn is counted and left out.


LINES_MAX: Final = 400
LINE_LENGTH_MAX: Final = 500
"""Longer lines are cut where they are shown."""
FIRST_LINES: Final = 5_000
"""Of a job whose page is opened, so many of the last lines are read for figures."""
READ_LENGTH_MAX: Final = 4_000_000
"""Characters taken in at one time; what is left follows at the next."""
RECORD_LENGTH_MAX: Final = 4_000
KEYS_MAX: Final = 12
POINTS_MAX: Final = 1_000
"""When a series has more, every second point is left out."""
VALUE_MAX: Final = 1e12
STEPS: Final = ("step", "global_step", "iteration", "iter", "batch")
_NOT_FIGURES: Final = frozenset({*STEPS, "epoch", "time", "timestamp", "ts", "elapsed", "pid", "rank", "attempt"})
_KEY: Final = re.compile(r"[A-Za-z][A-Za-z0-9_./ -]{0,39}")


@dataclass(slots=True)
class Figures:
    """Series of what the job logs as JSON objects, one to a line, by its step or else by the number of the record."""

    series: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    left_out: int = 0
    """Values that cannot be drawn."""
    has_steps: bool = False
    _records: int = 0

    def take(self, line: str) -> None:
        """Take in one line; most are none of this."""
        record = _record(line)
        if record is None:
            return
        self._records += 1
        step = next((found for key in STEPS if (found := _number(record.get(key))) is not None), None)
        self.has_steps = self.has_steps or step is not None
        for key, value in list(record.items())[:100]:
            if key in _NOT_FIGURES or isinstance(value, bool) or not isinstance(value, int | float):
                continue
            number = _number(value)
            known = key in self.series
            if number is None or not (known or (len(self.series) < KEYS_MAX and _KEY.fullmatch(key))):
                self.left_out += 1
                continue
            self._add(key, float(self._records) if step is None else step, number)

    def _add(self, key: str, x: float, y: float) -> None:
        points = self.series.setdefault(key, [])
        # A job that was resumed computes some steps once more: what it found the second time counts.
        while points and points[-1][0] >= x:
            points.pop()
        points.append((x, y))
        if len(points) > POINTS_MAX:
            del points[1:-1:2]

    def names(self) -> list[str]:
        """Return what there is to draw: losses first, then as they came."""
        return sorted(self.series, key=lambda key: "loss" not in key.lower())


def _record(line: str) -> Mapping[str, Any] | None:
    text = line.strip()
    if not text.startswith("{") or not text.endswith("}") or len(text) > RECORD_LENGTH_MAX:
        return None
    # A dictionary as Python prints it, as the Hugging Face Trainer logs, is nearly JSON.
    for candidate in (text, text.replace("'", '"')):
        try:
            record = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        return record if isinstance(record, dict) else None
    return None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if abs(number) <= VALUE_MAX else None  # NaN compares as false


@dataclass(slots=True)
class LogTail:
    """The end of one job's log, read on from where it was left."""

    lines: deque[tuple[str, str]] = field(default_factory=lambda: deque(maxlen=LINES_MAX))
    """Kind of the record and text."""
    figures: Figures = field(default_factory=Figures)
    version: int = 0
    _cursor: str = ""
    _filter: ControlFilter = field(default_factory=ControlFilter)
    _rest: str = ""

    def read(self, daemon: Daemon, ref: str) -> LogTail:
        """Take in what the job wrote since."""
        query: dict[str, Any] = {"after": self._cursor} if self._cursor else {"tail": FIRST_LINES}
        taken = 0
        for record in daemon.logs(ref, query):
            if record["kind"] != "end":
                self.take(record)
                taken += len(record["text"])
            self._cursor = record["cursor"] or self._cursor
            if taken > READ_LENGTH_MAX:
                break
        return self

    def take(self, record: Mapping[str, Any]) -> None:
        """Take in one record of the log."""
        self.version += 1
        if record["kind"] != "log":
            self._end_line()
            self.lines.append((str(record["kind"]), self._filter.feed(record["text"]).strip()[:LINE_LENGTH_MAX]))
            return
        *whole, self._rest = (self._rest + self._filter.feed(record["text"])).split("\n")
        for line in whole:
            self._line(line)
        if len(self._rest) > RECORD_LENGTH_MAX:
            self._end_line()

    def shown(self) -> list[tuple[str, str]]:
        """Return the last lines, with one that is not finished yet."""
        return [*self.lines, *([("log", _whole_units(self._rest))] if self._rest else [])]

    def _end_line(self) -> None:
        if self._rest:
            self._line(self._rest)
            self._rest = ""

    def _line(self, line: str) -> None:
        self.figures.take(line)
        self.lines.append(("log", _whole_units(line)))


def _whole_units(line: str) -> str:
    return line if len(line) <= LINE_LENGTH_MAX else line[: LINE_LENGTH_MAX - 1] + "…"


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
