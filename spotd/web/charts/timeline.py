"""The attempts of a job over time, a bar each, with what happened to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from spotd.web.charts.base import Options, options
from spotd.words import LOSSES, clean, price

ROWS_MAX: Final = 40
SAVED: Final = "checkpoint.accepted"
"""The kind of the event by which a checkpoint counts."""
_WAITS, _STARTS, _RUNS, _LOSS, _SAVES = "#8a8f98", "#56b4e9", "#1fa37c", "#d55e00", "#b8860b"


def timeline(job: Mapping[str, Any], events: Sequence[Mapping[str, Any]], now: datetime) -> tuple[Options, str]:
    """Return the picture and what it shows in words; an empty text before the first attempt."""
    shown = job["attempts"][-ROWS_MAX:]
    if not shown:
        return {}, ""
    rows = [_row(one) for one in shown]
    starts: list[Any] = []
    runs: list[Any] = []
    losses: list[Any] = []
    words: list[str] = []
    for row, one in zip(rows, shown, strict=True):
        begin, end = one["launched_at"] or one["intended_at"], one["ended_at"] or now.isoformat()
        running = one["running_at"]
        starts += [[begin, row], [running or end, row], [None, row]]
        if running:
            runs += [[running, row], [end, row], [None, row]]
        if one["reason"] in LOSSES:
            losses.append({"value": [end, row], "name": one["reason"]})
        words.append(f"attempt {one['attempt']} at {clean(one['host'])}: {one['reason'] or one['state']}")
    by_number = {one["attempt"]: row for row, one in zip(rows, shown, strict=True)}
    saves = [
        [one["at"], by_number[one["attempt"]]] for one in events if one["kind"] == SAVED and one["attempt"] in by_number
    ]
    series = [
        _bar("starting", starts, _STARTS),
        _bar("running", runs, _RUNS),
        _marks("checkpoint", saves, _SAVES, "diamond"),
        _marks("lost", losses, _LOSS, "triangle"),
    ]
    chart = options(
        [one for one in series if one["data"]],
        x={"type": "time", "min": job["submitted_at"]},
        y={"type": "category", "data": rows, "inverse": True, "axisLabel": {"fontSize": 11}},
    )
    chart["tooltip"]["trigger"] = "item"
    chart["grid"] |= {"left": 7 * max(map(len, rows)) + 14, "bottom": 26, "containLabel": False}
    chart["legend"]["itemHeight"] = 10
    return chart, f"{len(job['attempts'])} attempts, {len(saves)} checkpoints shown. " + "; ".join(words)


def _row(one: Mapping[str, Any]) -> str:
    return f"{one['attempt']}: {clean(one['host'])[:16]}, ${price(one['effective_usd_h'])}"


def _bar(name: str, data: list[Any], colour: str) -> Options:
    """Return spans as thick lines: gaps in the data are gaps between them."""
    return {
        "type": "line",
        "name": name,
        "data": data,
        "color": colour,
        "symbol": "none",
        "lineStyle": {"width": 12, "cap": "butt"},
        "connectNulls": False,
        "z": 2,
    }


def _marks(name: str, data: list[Any], colour: str, symbol: str) -> Options:
    return {
        "type": "scatter",
        "name": name,
        "data": data,
        "color": colour,
        "symbol": symbol,
        "symbolSize": 11,
        "z": 5,
        "itemStyle": {"borderColor": "#ffffff", "borderWidth": 1},
    }
