"""What was spent, and how many machines ran, day by day."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date, datetime, timedelta
from typing import Any, Final

from spotd.web.charts.base import COLOURS, Options, line, options
from spotd.words import count, dollars

DAYS: Final = 30
_DAY_S: Final = 86_400


def spend(groups: Sequence[Mapping[str, Any]], now: datetime) -> tuple[Options, str]:
    """Return the picture of the last days, and what it shows in words; an empty text where nothing was spent.

    Args:
        groups: the sums of the ledger by day, of UTC.
        now: the daemon's time; of its day, only what has passed is divided by.
    """
    today = now.date()
    known = {group["key"]: group for group in groups}
    first = today - timedelta(days=DAYS - 1)
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
