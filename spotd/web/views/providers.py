"""Providers: whether they answer, what they can do, what is left of money paid in advance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from spotd.web.markup import Node, el, facts, table
from spotd.web.views.parts import ago, section
from spotd.words import NOTHING, clean, dollars, span_text


def cards(providers: Sequence[Mapping[str, Any]], now: datetime) -> Node:
    if not providers:
        return el("p", "No provider is configured.", cls="empty")
    return el("div", *(_card(one, now) for one in providers), cls="cards")


def _card(one: Mapping[str, Any], now: datetime) -> Node:
    sign, word, kind = ("●", "answers", "good") if one["ok"] else ("✕", "does not answer", "bad")
    if not one["enabled"]:
        sign, word, kind = "-", "disabled", "idle"
    balance = (
        "" if one["balance_usd"] is None else f"{dollars(one['balance_usd'])}, stated {ago(one['balance_at'], now)} ago"
    )
    pairs: list[tuple[str, Node]] = [
        ("Offers", str(one["offers"])),
        ("Machines", str(one["machines"])),
        ("Newest prices", _ago(one["last_poll_at"], now)),
        ("Newest list of machines", _ago(one["last_listing_at"], now)),
        ("Fee", f"{one['fee_multiplier']:.2f} times the listed price"),
        ("Requests", f"{one['requests_h']} an hour, {one['requests_min']} in the last minute"),
        ("Spending", f"{dollars(one['spend_usd_h'])} an hour" if one["spend_usd_h"] else ""),
        ("Balance", balance),
        ("Lasts for", "" if one["runway_s"] is None else span_text(one["runway_s"])),
    ]
    lacking = [c for c in one["capabilities"] if not c["available"]]
    powers = ", ".join(clean(c["power"]).replace("_", " ") for c in one["capabilities"] if c["available"])
    return el(
        "section",
        el(
            "h2",
            clean(one["title"] or one["name"]),
            el("span", el("span", sign, aria_hidden="true", cls="sign"), word, cls=f"state {kind}"),
        ),
        el("p", clean(one["detail"]), cls="" if one["ok"] else "problem"),
        facts(pairs),
        el("p", f"Can: {powers}", cls="muted") if powers else None,
        el(
            "details",
            el("summary", f"Cannot: {len(lacking)}"),
            el("ul", *(el("li", f"{clean(c['power']).replace('_', ' ')}: {clean(c['reason'])}") for c in lacking)),
        )
        if lacking
        else None,
        cls="card",
    )


def _ago(at: str | None, now: datetime) -> str:
    return NOTHING if at is None else f"{ago(at, now)} ago"


def hosts(answer: Mapping[str, Any], now: datetime) -> Node:
    """Return what is remembered of hosts, the worst first."""
    columns = "Host | Failed:n | Slow:n | Lost early:n | Lost:n | Machine hours:n | Behind:n | Newest:n | Avoided until"
    rows: list[list[Node]] = [
        [
            clean(f"{one['provider']}/{one['host']}"),
            f"{one['failed_starts']:g}",
            f"{one['slow_starts']:g}",
            f"{one['early_losses']:g}",
            f"{one['losses']:g}",
            f"{one['machine_h']:.1f}",
            f"{100 * one['ranks_behind']:.0f} %",
            f"{ago(one['at'], now)} ago",
            NOTHING if one["cools_until"] is None else one["cools_until"].replace("T", " ")[:16] + " UTC",
        ]
        for one in answer["hosts"][:50]
    ]
    return section("Hosts that are remembered", table("Hosts", columns, rows, empty="No host was used yet."))
