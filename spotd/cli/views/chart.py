"""Lines over time, drawn with characters: braille dots where the terminal has them, letters anywhere else.

A dot of braille is an eighth of a character, so a line is four times as fine as with letters. Without colour, several
lines of dots could not be distinguished: then each line is drawn with its own letter, which the legend names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from typing import TYPE_CHECKING, Final

from spotd.cli import stderr, stdout
from spotd.cli.views.table import Cell, Column, fitted, rows_of
from spotd.words import clean, instant, local_text, price

if TYPE_CHECKING:
    from spotd.api.schemas.costs import HistoryResponse, PastBucketResponse, PastPricesResponse


SERIES_MAX: Final = 6
VALUE_MAX: Final = 1e12
COLOURS: Final = ("36", "33", "32", "35", "31", "34")
"""SGR codes: cyan, yellow, green, magenta, red, blue."""
LETTERS: Final = "*o+x#@"
_BRAILLE: Final = 0x2800
_DOTS: Final = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bit of each dot of a character, by row and column."""
_LABEL_ROOM_MIN: Final = 24
"""A narrower chart has no figures beside it."""

Span = tuple[float, float, float]
"""From, until, value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line: values that hold for a span each. Between spans nothing is known, and nothing is drawn."""

    name: str
    spans: Sequence[Span]


@dataclass(frozen=True, slots=True, kw_only=True)
class Canvas:
    """Where the lines go.

    Attributes:
        width, height: in characters, labels and time axis included.
        dots: the terminal shows braille.
        colour: it shows colours.
    """

    width: int
    height: int
    dots: bool
    colour: bool


def drawn(
    series: Sequence[Series],
    canvas: Canvas,
    *,
    begin: float,
    end: float,
    value_text: Callable[[float], str],
    time_text: Callable[[float], str],
) -> list[str]:
    """Return the lines of the chart, none wider than the canvas; nothing where no value is known."""
    series = series[:SERIES_MAX]
    known = [value for one in series for *_, value in one.spans if _is_drawable(value)]
    if not known or not begin < end:
        return []
    low, high = min(known), max(known)
    if low == high:
        low, high = low * 0.95 if low else 0.0, high * 1.05 or 1.0
    labels = _labels(low, high, canvas, value_text)
    margin = max(map(len, labels))
    columns, rows = max(1, canvas.width - margin), max(1, canvas.height - 1)
    letters = not canvas.dots or (len(series) > 1 and not canvas.colour)
    across, down = (1, 1) if letters else (2, 4)
    grid = [[0] * columns for _ in range(rows)]
    owner = [[-1] * columns for _ in range(rows)]
    for number, one in enumerate(series):
        for x, top, bottom in _strokes(one, columns * across, rows * down, begin, end, low, high):
            for y in range(top, bottom + 1):
                row, column = y // down, x // across
                grid[row][column] |= 1 if letters else _DOTS[y % down][x % across]
                owner[row][column] = number
    found = [labels[row] + _row_text(grid[row], owner[row], canvas, letters=letters) for row in range(rows)]
    return [*(line.rstrip() for line in found), *_time_axis(margin, columns, begin, end, time_text)]


def mark(number: int, canvas: Canvas, *, alone: bool) -> str:
    """Return what stands for a series in the legend."""
    if canvas.dots and (canvas.colour or alone):
        return _with_colour("\u2501", number, canvas)
    return LETTERS[number]


def _is_drawable(value: float) -> bool:
    return math.isfinite(value) and 0 <= value <= VALUE_MAX


def _labels(low: float, high: float, canvas: Canvas, value_text: Callable[[float], str]) -> list[str]:
    """Return what stands left of each row: the value at the top, in the middle and at the bottom."""
    rows = max(1, canvas.height - 1)
    if canvas.width < _LABEL_ROOM_MIN:
        return [""] * rows
    at = {0: high, rows - 1: low}
    if rows >= 5:
        at[(rows - 1) // 2] = high - (high - low) * ((rows - 1) // 2) / (rows - 1)
    texts = {row: value_text(value) for row, value in at.items()}
    room = max(map(len, texts.values()))
    edge = "\u2524" if canvas.dots else "|"
    return [f"{texts.get(row, ''):>{room}} {edge}" for row in range(rows)]


def _strokes(
    one: Series, columns: int, rows: int, begin: float, end: float, low: float, high: float
) -> list[tuple[int, int, int]]:
    """Return the upright strokes of a line: place, top and bottom. Where it is not known there is none."""
    scale = columns / (end - begin)
    by_column: dict[int, tuple[int, int, int, int]] = {}
    for since, until, value in sorted(one.spans):
        first, last = max(begin, since), min(end, until)
        if not _is_drawable(value) or first >= last:
            continue
        y = round((high - value) / (high - low) * (rows - 1))
        start = min(columns - 1, int((first - begin) * scale))
        stop = max(start, min(columns - 1, math.ceil((last - begin) * scale) - 1))
        for x in range(start, stop + 1):
            before = by_column.get(x)
            if before is None:
                by_column[x] = (y, y, y, y)
            else:
                top, bottom, entry, _ = before
                by_column[x] = (min(top, y), max(bottom, y), entry, y)
    strokes = []
    for x, (top, bottom, entry, _) in by_column.items():
        if (left := by_column.get(x - 1)) is not None:
            # The line goes on from where the column before it left off.
            top, bottom = min(top, max(left[3], entry)), max(bottom, min(left[3], entry))
            top, bottom = min(top, left[3]), max(bottom, left[3])
        strokes.append((x, top, bottom))
    return strokes


def _row_text(bits: Sequence[int], owners: Sequence[int], canvas: Canvas, *, letters: bool) -> str:
    """Return a row; neighbours of one colour share one sequence."""
    text = ""
    for number, run in groupby(zip(bits, owners, strict=True), key=lambda cell: cell[1]):
        cells = "".join(" " if not dots else LETTERS[number] if letters else chr(_BRAILLE + dots) for dots, _ in run)
        text += cells if number < 0 else _with_colour(cells, number, canvas)
    return text


def _with_colour(text: str, number: int, canvas: Canvas) -> str:
    return f"\x1b[{COLOURS[number]}m{text}\x1b[0m" if canvas.colour else text


def _time_axis(margin: int, columns: int, begin: float, end: float, time_text: Callable[[float], str]) -> list[str]:
    first, last = time_text(begin), time_text(end)
    if len(first) + len(last) + 1 > columns:
        return [" " * margin + first] if len(first) <= columns else []
    middle = time_text((begin + end) / 2)
    room = columns - len(first) - len(last)
    between = middle.center(room) if len(middle) + 2 <= room else " " * room
    return [" " * margin + first + between + last]


# Past prices as a chart on a terminal, with a line on each series below it.


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
