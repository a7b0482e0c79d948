"""Effective prices over time, with ceilings, and the cheapest hours of the week."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, tzinfo
from typing import Any, Final

from spotd.web.charts.base import Options, line, options
from spotd.web.views.market import CeilingLine
from spotd.words import price

DAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
FIELDS: Final[Mapping[str, str]] = {"lowest": "low_usd_gpu_h", "median": "median_usd_gpu_h"}
_SHADES: Final = ("#fde725", "#7ad151", "#22a884", "#2a788e", "#414487", "#440154")
"""Viridis, from cheap and light to costly and dark: it reads without colour, too."""

Series = tuple[str, Mapping[str, Any]]
"""A provider, and its answer about the past."""


def prices(found: Sequence[Series], ceilings: Sequence[CeilingLine], kind: str) -> tuple[Options, str]:
    """Return the picture and what it shows in words; an empty text where there is nothing to draw."""
    field = FIELDS.get(kind, FIELDS["lowest"])
    lines: list[Options] = []
    words: list[str] = []
    highest = 0.0
    for provider, answer in found:
        for group in answer["prices"]:
            points = [[bucket["at"], bucket[field]] for bucket in group["buckets"]]
            if not points:
                continue
            values = [point[1] for point in points]
            highest = max(highest, *values)
            name = f"{provider} {group['gpu']} {group['market']}"
            lines.append(line(name, points, len(lines), step="end"))
            words.append(f"{name}: from ${price(min(values))} to ${price(max(values))}, now ${price(values[-1])}")
    if not lines:
        return {}, ""
    limits = [
        {
            "yAxis": one.usd_gpu_h,
            "name": f"{one.name} ${price(one.usd_gpu_h)}",
            # Ceilings may be close to each other: every second label is at the other end.
            "label": {"formatter": "{b}", "position": "insideEndTop" if number % 2 else "insideStartTop"},
        }
        for number, one in enumerate(ceilings)
    ]
    lines[0]["markLine"] = {
        "silent": True,
        "symbol": "none",
        "lineStyle": {"color": "#8a8f98", "type": "dashed", "width": 1.5},
        "label": {"fontSize": 11, "backgroundColor": "rgba(128,134,145,0.28)", "padding": [2, 5], "borderRadius": 3},
        "data": limits,
    }
    words += [f"ceiling of {one.name}: ${price(one.usd_gpu_h)}" for one in ceilings]
    top = _above(max([highest, *(one.usd_gpu_h for one in ceilings if one.usd_gpu_h < 4 * highest)]))
    y = {
        "type": "value",
        "name": "",
        "max": top,
        "min": 0,
        "axisLabel": {"formatter": "${value}"},
    }
    chart = options(lines, x={"type": "time"}, y=y)
    return chart, f"Effective {kind} price per GPU-hour. " + "; ".join(words)


def _above(value: float) -> float:
    """Return a round number that is a little larger, as the end of an axis."""
    if value <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(value))
    return round(next(unit * step for step in (1.2, 1.6, 2, 3, 4, 6, 8, 10, 12) if unit * step >= 1.02 * value), 8)


def week(answer: Mapping[str, Any], zone: tzinfo | None = None) -> tuple[Options, str]:
    """Return the mean of the lowest prices by hour of the week; empty where too little is known."""
    sums: dict[tuple[int, int], list[float]] = {}
    for group in answer["prices"]:
        if group["market"] != "spot" and any(one["market"] == "spot" for one in answer["prices"]):
            continue
        for bucket in group["buckets"]:
            begin = datetime.fromisoformat(bucket["at"])
            for hour in range(min(24, max(1, answer["bucket_s"] // 3600))):
                at = (begin + timedelta(hours=hour)).astimezone(zone)
                sums.setdefault((at.weekday(), at.hour), []).append(bucket["low_usd_gpu_h"])
    if not sums:
        return {}, ""
    means = {key: sum(values) / len(values) for key, values in sums.items()}
    low, high = min(means.values()), max(means.values())
    cheapest = sorted(means, key=lambda key: (means[key], key))[:3]
    series: Options = {
        "type": "heatmap",
        "data": [[hour, day, round(mean, 4)] for (day, hour), mean in sorted(means.items())],
        "itemStyle": {"borderWidth": 1, "borderColor": "rgba(128,134,145,0.25)"},
    }
    hours = [f"{hour:02d}" for hour in range(24)]
    chart = options(
        [series],
        x={"type": "category", "data": hours},
        y={"type": "category", "data": list(DAYS), "inverse": True},
        legend=False,
        visualMap={
            "min": round(low, 4),
            "max": round(max(high, low * 1.0001), 4),
            "calculable": False,
            "orient": "horizontal",
            "left": 0,
            "bottom": 0,
            "itemWidth": 12,
            "itemHeight": 120,
            "precision": 3,
            "text": [f"${price(high)}", f"${price(low)}"],
            "inRange": {"color": list(_SHADES)},
        },
    )
    chart["grid"]["bottom"] = 40
    chart["tooltip"] = {**chart["tooltip"], "trigger": "item", "formatter": "{c}"}
    named = ", ".join(f"{DAYS[day]} {hour:02d}:00 at ${price(means[day, hour])}" for day, hour in cheapest)
    return chart, f"Cheapest hours: {named}. The costliest hour is at ${price(high)}."
