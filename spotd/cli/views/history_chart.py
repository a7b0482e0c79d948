"""Past prices as a chart on a terminal, with a line on each series below it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Final

from spotd.cli import stderr, stdout
from spotd.cli.views.chart import SERIES_MAX, Canvas, Series, drawn, mark
from spotd.cli.views.table import Cell, Column, fitted, rows_of
from spotd.words import clean, instant, local_text, price

if TYPE_CHECKING:
    from spotd.api.schemas.prices import HistoryResponse, PastBucketResponse, PastPricesResponse

HEIGHT_MIN: Final = 4
HEIGHT_MAX: Final = 18
_BELOW: Final = 4
"""Lines of the screen that belong to the legend's title, the notes and the prompt."""
_DAY_S: Final = 86_400


def show_chart(answer: HistoryResponse) -> None:
    """Draw the median of each series over the time that was asked for."""
    prices = answer["prices"]
    shown = prices[:SERIES_MAX]
    columns, lines = stdout.size()
    canvas = Canvas(
        width=columns,
        height=max(HEIGHT_MIN, min(HEIGHT_MAX, lines - len(shown) - _BELOW)),
        dots=stdout.encodes("\u28ff\u2524\u2501"),
        colour=stdout.colour(),
    )
    begin, end = _seconds(answer["since"]), _seconds(answer["until"])
    short = end - begin <= 2 * _DAY_S
    chart = drawn(
        [Series(name=one["gpu"], spans=_spans(one, answer["bucket_s"])) for one in shown],
        canvas,
        begin=begin,
        end=end,
        value_text=price,
        time_text=lambda at: datetime.fromtimestamp(at).astimezone().strftime("%d %b %H:%M" if short else "%d %b"),
    )
    stdout.write("".join(f"{line}\n" for line in chart))
    legend: Sequence[Column[tuple[int, PastPricesResponse]]] = (
        Column("", lambda row: Cell(mark(row[0], canvas, alone=len(shown) == 1))),
        Column("GPU", lambda row: row[1]["gpu"], least=6),
        Column("MARKET", lambda row: row[1]["market"], least=4, drop=1),
        Column("FROM", lambda row: local_text(begins(row[1]["buckets"][0])), drop=3),
        Column("LOW", lambda row: price(min(one["low_usd_gpu_h"] for one in row[1]["buckets"])), right=True, drop=2),
        Column("LAST MEDIAN", lambda row: price(row[1]["buckets"][-1]["median_usd_gpu_h"]), right=True),
        Column("HIGH", lambda row: price(max(one["high_usd_gpu_h"] for one in row[1]["buckets"])), right=True, drop=2),
    )
    _show_legend(legend, list(enumerate(shown)), canvas)
    stderr.note("the lines are medians, $ per GPU-hour; -o table has every span, --plot FILE.svg makes a picture")
    if len(prices) > len(shown):
        rest = ", ".join(clean(f"{one['gpu']} {one['market']}") for one in prices[SERIES_MAX : 2 * SERIES_MAX])
        more = ", ..." if len(prices) > 2 * SERIES_MAX else ""
        stderr.note(f"{len(shown)} of {len(prices)} are drawn, not {rest}{more}: name a market or a more exact GPU")


def begins(bucket: PastBucketResponse) -> str:
    """Return from when on prices are known in a span; a daemon of before states its beginning only."""
    return bucket.get("begins", bucket["at"])


def _show_legend(
    columns: Sequence[Column[tuple[int, PastPricesResponse]]],
    rows: list[tuple[int, PastPricesResponse]],
    canvas: Canvas,
) -> None:
    """Print the legend; its marks have their colours already, so that they are put in after the table is fitted."""
    texts = [[Cell("~") if place == 0 else cell for place, cell in enumerate(row)] for row in rows_of(columns, rows)]
    table, _ = fitted(columns, texts, width=stdout.width(), colour=canvas.colour)
    title, *lines = table.splitlines()
    stdout.line(title)
    for (number, _), line in zip(rows, lines, strict=True):
        stdout.line(line.replace("~", mark(number, canvas, alone=len(rows) == 1), 1))


def _spans(one: PastPricesResponse, bucket_s: int) -> list[tuple[float, float, float]]:
    return [
        (_seconds(begins(bucket)), _seconds(bucket["at"]) + bucket_s, bucket["median_usd_gpu_h"])
        for bucket in one["buckets"]
    ]


def _seconds(text: str) -> float:
    moment = instant(text)
    return 0.0 if moment is None else moment.timestamp()
