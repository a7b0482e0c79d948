"""Trees of elements as plain lists, which the browser draws. Text stays text: no string is ever parsed as HTML."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import quote

from spotd.arrays import is_line_of_array
from spotd.words import NOTHING, clean

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
        "class" if key == "cls" else key.replace("_", "-"): value
        for key, value in attributes.items()
        if value is not None
    }
    if tag not in _TAGS or not all(key in _ATTRIBUTES or key.startswith(("aria-", "data-")) for key in named):
        raise ValueError(f"no element {tag} with {', '.join(named)}")
    if tag == "input" and named.get("type") != "checkbox":
        raise ValueError("no element input but a checkbox")
    if not str(named.get("href", "/")).startswith(("/", "#")):
        raise ValueError("a link leads to another place")
    return [tag, named, *(_cut(child) for child in children if child is not None and child != "")]


def _cut(child: Node) -> Node:
    return child[: TEXT_MAX - 1] + "…" if isinstance(child, str) and len(child) > TEXT_MAX else child


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
    """
    if not rows:
        return el("p", empty, cls="empty")
    heads = [(title, kind) for title, _, kind in (column.partition(":") for column in columns.split(" | "))]
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
