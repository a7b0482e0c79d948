"""What a submit would do, before it is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spotd.web.markup import Node, el, facts
from spotd.web.views.market import offers
from spotd.web.views.parts import problem, section
from spotd.words import clean, count, dollars, price


def refusals(message: str, rows: Sequence[tuple[str, str]], hint: str = "") -> Node:
    """Return why a job cannot be queued, with the way out of each reason."""
    return el("div", problem(message, hint), *(problem(text, way) for text, way in rows))


def plan(answer: Mapping[str, Any]) -> Node:
    spec = answer["spec"]
    ceilings = ", ".join(f"{clean(gpu)} ${price(limit)}" for gpu, limit in answer["ceilings"].items())
    pairs: list[tuple[str, Node]] = [
        ("Name", clean(answer["name"])),
        ("Image", clean(answer["image"])),
        ("GPU", clean(", ".join(str(one) for one in spec.get("resources", {}).get("gpu", [])))),
        ("Ceiling per GPU-hour", ceilings),
        ("Budget", "" if answer["budget_usd"] is None else dollars(answer["budget_usd"])),
    ]
    passed = [f"{clean(row['reason'])}: {count(row['offers'], 'offer')}" for row in answer["passed_over"]]
    return section(
        "The plan",
        el("p", clean(answer["verdict"]), cls="sentence"),
        facts(pairs),
        *(problem(text) for text in (answer["unprotected"], *answer["warnings"]) if text),
        *(el("p", clean(text), cls="muted") for text in answer["costs"]),
        offers(answer["candidates"]) if answer["candidates"] else None,
        el("details", el("summary", "Why other offers do not fit"), el("ul", *(el("li", row) for row in passed)))
        if passed
        else None,
    )
