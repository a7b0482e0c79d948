"""A back-test as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from spotd.backtest.advice import ceiling_words
from spotd.cli.views.plotting import COLOURS, picture

if TYPE_CHECKING:
    from pathlib import Path

    from spotd.backtest.result import Result

_MICRO: Final = 1_000_000
_HOUR_S: Final = 3600


def draw(result: Result, path: Path) -> None:
    """Draw cost, finish and waiting over the ceiling, a line for each policy.

    Raises:
        CommandFailed: the file cannot be written.
    """
    with picture(path, width=8, height=8.5) as figure:
        cost, finish, share = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 2))
        for number, policy in enumerate(dict.fromkeys(one.case.policy for one in result.summaries)):
            _draw_policy(result, policy, number, cost, finish, share)
        unit = "per GPU-hour" if result.summaries[0].case.is_per_gpu else "per machine-hour"
        cost.set_ylabel("cost of the job, $")
        finish.set_ylabel("from submission to end, h")
        share.set_ylabel("time without a machine, %")
        share.set_xlabel(f"ceiling, $ {unit}")
        share.set_ylim(0, 100)
        if result.deadline_s is not None:
            finish.axhline(result.deadline_s / _HOUR_S, color="#444444", linewidth=1)
            finish.annotate("deadline", (1, result.deadline_s / _HOUR_S), xycoords=("axes fraction", "data"),
                            ha="right", va="top", fontsize=9)  # fmt: skip
        chosen = result.advice.summary
        for axes in (cost, finish, share):
            axes.grid(visible=True, alpha=0.25)
            if axes is not share:
                axes.set_ylim(bottom=0)
            if chosen is not None:
                axes.axvline(chosen.case.limit / _MICRO, color="#444444", linestyle=":", linewidth=1.5)
        figure.align_ylabels()
        figure.suptitle(_title(result), fontsize=11)
        cost.legend(frameon=False, fontsize=9)


def _draw_policy(result: Result, policy: str, number: int, cost: Any, finish: Any, share: Any) -> None:
    """Draw one policy; later ones are thinner, so that lines which coincide can all be seen."""
    colour, width = COLOURS[number % len(COLOURS)], max(1.0, 3.5 - number)
    line = {"color": colour, "linewidth": width, "markersize": 4 + 2 * width}
    rows = [one for one in result.summaries if one.case.policy == policy]
    ceilings = [one.case.limit / _MICRO for one in rows]
    nothing = float("nan")
    several = any(one.case.policy != policy for one in result.summaries)
    name = f"{policy}: " if several else ""
    for axes, median, slow, unit in (
        (cost, [one.cost_median for one in rows], [one.cost_p90 for one in rows], _MICRO),
        (finish, [one.took_median_s for one in rows], [one.took_p90_s for one in rows], _HOUR_S),
    ):
        middle = [nothing if one is None else one / unit for one in median]
        high = [nothing if one is None else one / unit for one in slow]
        axes.plot(ceilings, middle, "o-", **line, label=f"{name}median")
        axes.plot(ceilings, high, "^--", **line, alpha=0.7, label=f"{name}9 of 10 runs")
        axes.fill_between(ceilings, middle, high, color=colour, alpha=0.12, linewidth=0)
    share.plot(ceilings, [100 * one.waiting for one in rows], "o-", **line)


def _title(result: Result) -> str:
    chosen = result.advice.summary
    advice = "no ceiling recommended" if chosen is None else f"recommended: {ceiling_words(chosen)}"
    return f"{result.job}: {result.starts} starts for each ceiling; {advice} (dotted)"
