"""What all charts share. Colours that people who do not see all of them can tell apart, and never colour alone."""

from __future__ import annotations

from typing import Any, Final

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
    x["axisLabel"] = {"hideOverlap": True, "fontSize": 11, "rich": {}, **x.get("axisLabel", {})}
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
