"""Past prices as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spotd.cli.views.history_chart import begins
from spotd.cli.views.plotting import COLOURS, dated, picture
from spotd.words import clean, instant

if TYPE_CHECKING:
    from datetime import datetime
    from pathlib import Path

    from spotd.api.schemas.prices import HistoryResponse


def draw(answer: HistoryResponse, path: Path) -> None:
    """Draw the median of each series with the middle four fifths of its prices; what is not known stays empty.

    Raises:
        CommandFailed: the file cannot be written.
    """
    from datetime import timedelta

    shown = answer["prices"][: len(COLOURS)]
    nothing = float("nan")
    with picture(path, width=9, height=4.8) as figure:
        axes = figure.subplots()
        for colour, one in zip(COLOURS, shown, strict=False):
            times: list[datetime] = []
            middle: list[float] = []
            low: list[float] = []
            high: list[float] = []
            for bucket in one["buckets"]:
                first, at = instant(begins(bucket)), instant(bucket["at"])
                if first is None or at is None:
                    continue
                last = at + timedelta(seconds=answer["bucket_s"])
                if times and first > times[-1]:
                    times.append(first)
                    middle.append(nothing)
                    low.append(nothing)
                    high.append(nothing)
                times += [first, last]
                middle += [bucket["median_usd_gpu_h"]] * 2
                low += [bucket["p10_usd_gpu_h"]] * 2
                high += [bucket["p90_usd_gpu_h"]] * 2
            axes.plot(times, middle, color=colour, linewidth=1.8, label=clean(f"{one['gpu']} {one['market']}"))
            axes.fill_between(times, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.set_xlim(instant(answer["since"]), instant(answer["until"]))
        axes.set_ylabel("effective price, $ per GPU-hour")
        axes.grid(visible=True, alpha=0.25)
        dated(axes)
        some = f"; {len(shown)} of {len(answer['prices'])} are drawn" if len(answer["prices"]) > len(shown) else ""
        axes.set_title("median and middle 80 % of the time on offer" + some, fontsize=11)
        if shown:
            axes.legend(frameon=False, fontsize=9)
