"""What a machine cost an hour over time: its price changes where its bid is raised or lowered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

CHANGES: Final = ("bid.raised", "bid.lowered")
"""Kinds of the events that change the price of a machine; their data has it before and after, per hour."""

Rates = list[tuple[str, float]]
"""From each instant on, dollars per hour for the whole machine."""


def rates_of(attempt: Mapping[str, Any], events: Iterable[Mapping[str, Any]]) -> Rates:
    """Return the prices of an attempt from its launch on, oldest first; at least one.

    Args:
        events: of its job, oldest first. One without figures, as earlier versions wrote it, changes nothing.
    """
    began = attempt["launched_at"] or attempt["intended_at"]
    found: Rates = []
    for event in events:
        before, after = event["data"].get("before_usd_h"), event["data"].get("usd_h")
        if event["kind"] not in CHANGES or event["attempt"] != attempt["attempt"]:
            continue
        if isinstance(before, int | float) and isinstance(after, int | float):
            found = found or [(began, float(before))]
            found.append((max(event["at"], began), float(after)))
    return found or [(began, attempt["effective_usd_h"])]
