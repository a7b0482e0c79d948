"""What all charts share. Colours that people who do not see all of them can tell apart, and never colour alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import date, datetime, timedelta, tzinfo
from typing import Any, Final

from spotd.lists import rates_of
from spotd.web.markup import Figures
from spotd.web.views.market import CeilingLine
from spotd.words import LOSSES, clean, count, dollars, price

Options = dict[str, Any]

COLOURS: Final = ("#3b8fd6", "#e0701a", "#1fa37c", "#cc79a7", "#b8860b", "#56b4e9", "#9a6fd0", "#8a8f98")
"""After Okabe and Ito, of a lightness that stands out on white and on black."""
FONT: Final = 'system-ui, -apple-system, "Segoe UI", "Noto Sans", "DejaVu Sans", sans-serif'
"""As the rest of the page; texts are measured with it before they are drawn."""
DASHES: Final = ("solid", "dashed", "dotted")
_FAINT: Final = "rgba(128,134,145,0.25)"


def options(series: list[Options], *, x: Options, y: Options, legend: bool = True, **more: Any) -> Options:
    """Return the options of a chart over two axes."""
    axis = {"axisLine": {"lineStyle": {"color": _FAINT}}, "axisTick": {"show": False}}
    x["axisLabel"] = {"hideOverlap": True, "fontSize": 11, "margin": 12, "rich": {}, **x.get("axisLabel", {})}
    faint = {"splitLine": {"lineStyle": {"color": _FAINT}}}
    return {
        "animation": False,
        "aria": {"enabled": False},
        "textStyle": {"fontFamily": FONT, "fontSize": 12},
        "grid": {"left": 8, "right": 24, "top": 34 if legend else 12, "bottom": 8, "containLabel": True},
        "legend": {
            "show": legend,
            "type": "scroll",
            "top": 0,
            "left": 0,
            "icon": "roundRect",
            "itemWidth": 18,
            "itemHeight": 3,
        },
        "tooltip": {
            "trigger": "axis",
            "confine": True,
            "renderMode": "richText",
            "backgroundColor": "#1c2128",
            "borderWidth": 0,
            "textStyle": {"color": "#e6e8eb", "fontSize": 12},
        },
        "xAxis": {**axis, "splitLine": {"show": False}, **x},
        "yAxis": {**axis, **faint, "axisLine": {"show": False}, **y},
        "series": series,
        **more,
    }


def line(name: str, points: list[list[Any]], number: int, **more: Any) -> Options:
    """Return a line; further ones differ in colour, and beyond the colours in their dashes."""
    style = {"width": 2, "type": DASHES[number // len(COLOURS) % len(DASHES)]}
    return {
        "type": "line",
        "name": name,
        "data": points,
        "showSymbol": len(points) == 1,
        "color": COLOURS[number % len(COLOURS)],
        "lineStyle": style,
        **more,
    }


# What a job logs, and what the GPUs of its machine do.


def figure(figures: Figures, key: str) -> tuple[Options, str]:
    """Return one series of what the job logs, and what it shows in words."""
    points = figures.series.get(key) or []
    if not points:
        return {}, ""
    x = {"type": "value", "name": "", "min": "dataMin", "max": "dataMax"}
    y = {"type": "value", "scale": True}
    chart = options([line(key, [list(point) for point in points], 0)], x=x, y=y)
    unit = "step" if figures.has_steps else "record"
    last_x, last = points[-1]
    low = min(value for _, value in points)
    return chart, f"{key} by {unit}: {last:g} at {unit} {last_x:g}, lowest {low:g}, {len(points)} points."


def gpu_use(answer: Mapping[str, Any]) -> tuple[Options, str]:
    """Return the use of the GPUs and of their memory, both in percent."""
    samples = answer["samples"]
    if not samples:
        return {}, ""
    use = [[one["at"], one["util_pct"]] for one in samples]
    memory = [
        [
            one["at"],
            None
            if not one["mem_total_mb"] or one["mem_used_mb"] is None
            else round(100 * one["mem_used_mb"] / one["mem_total_mb"], 1),
        ]
        for one in samples
    ]
    y = {"type": "value", "min": 0, "max": 100, "axisLabel": {"formatter": "{value} %"}}
    second = line("memory", memory, 1)
    second["lineStyle"]["type"] = "dashed"
    chart = options([line("GPU use", use, 0), second], x={"type": "time"}, y=y)
    last_use, last_memory = use[-1][1], memory[-1][1]
    words = [f"{name} {value:g} %" for name, value in (("use", last_use), ("memory", last_memory)) if value is not None]
    return chart, f"GPUs of attempt {answer['attempt']} now: {', '.join(words) or 'not stated'}."


# Effective prices over time, with ceilings, and the cheapest hours of the week.


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
    is_of_several = len({group["gpu"] for _, answer in found for group in answer["prices"] if group["buckets"]}) > 1
    for provider, answer in found:
        for group in answer["prices"]:
            points = [[bucket["at"], bucket[field]] for bucket in group["buckets"]]
            if not points:
                continue
            values = [point[1] for point in points]
            highest = max(highest, *values)
            name = f"{provider} {group['gpu']} {group['market']}"
            # A phone has room for short names only, and the title of the picture has the GPU where there is one.
            short = name if is_of_several else f"{provider} {group['market']}"
            lines.append(line(short, points, len(lines), step="end"))
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
            "show": low < high,
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
    if low < high:
        chart["grid"]["bottom"] = 40
    chart["tooltip"] = {**chart["tooltip"], "trigger": "item", "formatter": "{c}"}
    named = ", ".join(f"{DAYS[day]} {hour:02d}:00 at ${price(means[day, hour])}" for day, hour in cheapest)
    return chart, f"Cheapest hours: {named}. The costliest hour is at ${price(high)}."


# What was spent, and how many machines ran, day by day.


SPEND_DAYS: Final = 30
_DAY_S: Final = 86_400


def spend(groups: Sequence[Mapping[str, Any]], now: datetime) -> tuple[Options, str]:
    """Return the picture of the last days, and what it shows in words; an empty text where nothing was spent.

    Args:
        groups: the sums of the ledger by day, of UTC.
        now: the daemon's time; of its day, only what has passed is divided by.
    """
    today = now.date()
    known = {group["key"]: group for group in groups}
    first = today - timedelta(days=SPEND_DAYS - 1)
    earlier = [date.fromisoformat(key) for key in known if first <= date.fromisoformat(key) <= today]
    if not earlier:
        return {}, ""
    days = [min(earlier) + timedelta(days=number) for number in range((today - min(earlier)).days + 1)]
    spent = [_of(known, day, "spent_usd") for day in days]
    passed = max(1.0, (now - datetime.combine(today, datetime.min.time(), now.tzinfo)).total_seconds())
    machines = [round(_of(known, day, "seconds") / (passed if day == today else _DAY_S), 2) for day in days]
    names = [f"{day:%m-%d}" for day in days]
    bars: Options = {
        "type": "bar", "name": "spent", "data": [round(one, 4) for one in spent], "color": COLOURS[0], "barMaxWidth": 28
    }  # fmt: skip
    average: Options = {**line("machines, on average", [], 1), "data": machines, "yAxisIndex": 1, "showSymbol": True}
    chart = options([bars, average], x={"type": "category", "data": names}, y={"type": "value"})
    chart["yAxis"] = [
        {**chart["yAxis"], "axisLabel": {"formatter": "${value}"}, "min": 0},
        {**chart["yAxis"], "splitLine": {"show": False}, "min": 0, "minInterval": 1},
    ]
    most = max(range(len(days)), key=lambda place: spent[place])
    words = (
        f"{dollars(sum(spent))} in {count(len(days), 'day')}, most on {days[most].isoformat()} with "
        f"{dollars(spent[most])}; today {dollars(spent[-1])} by {machines[-1]:g} machines on average. "
        "Days are those of UTC."
    )
    return chart, words


def _of(known: Mapping[str, Mapping[str, Any]], day: date, key: str) -> float:
    group = known.get(day.isoformat())
    return 0.0 if group is None else float(group[key])


# The attempts of a job over time, a bar each, with what happened to it.


ROWS_MAX: Final = 40
SAVED: Final = "checkpoint.accepted"
"""The kind of the event by which a checkpoint counts."""
_WAITS, _STARTS, _RUNS, _LOSS, _SAVES = "#8a8f98", "#56b4e9", "#1fa37c", "#d55e00", "#b8860b"


def timeline(job: Mapping[str, Any], events: Sequence[Mapping[str, Any]], now: datetime) -> tuple[Options, str]:
    """Return the picture and what it shows in words; an empty text before the first attempt."""
    shown = job["attempts"][-ROWS_MAX:]
    if not shown:
        return {}, ""
    rows = [_row(one, events) for one in shown]
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


def _row(one: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> str:
    """Return where an attempt ran and what an hour cost, at first and last where its bid was changed."""
    rates = [f"${price(usd_h)}" for _at, usd_h in rates_of(one, sorted(events, key=lambda event: event["id"]))]
    cost = rates[0] if rates[0] == rates[-1] else f"{rates[0]} to {rates[-1]}"
    return f"{one['attempt']}: {clean(one['host'])[:16]}, {cost}"


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
