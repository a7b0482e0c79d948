"""What a job logs, and what the GPUs of its machine do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spotd.web.charts.base import Options, line, options
from spotd.web.figures import Figures


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
