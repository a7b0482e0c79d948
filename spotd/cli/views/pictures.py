"""Lines over time: as characters in the terminal, and as pictures of matplotlib.

Nothing of matplotlib is loaded before a picture is drawn.

A dot of braille is an eighth of a character, so a line is four times as fine as with letters. Without colour, several
lines of dots could not be distinguished: then each line is drawn with its own letter, which the legend names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from spotd.cli import stderr, stdout
from spotd.cli.entry import CommandFailed, ExitCode
from spotd.cli.views.table import Cell, Column, fitted, rows_of
from spotd.lists import rates_of
from spotd.words import LOSSES, clean, dollars, instant, local_text, price, where_text

if TYPE_CHECKING:
    from spotd.api.schemas.answers import EventResponse
    from spotd.api.schemas.costs import HistoryResponse, PastBucketResponse, PastPricesResponse
    from spotd.api.schemas.jobs import AttemptResponse, JobDetailResponse, KeptCheckpointResponse

SERIES_MAX: Final = 6
VALUE_MAX: Final = 1e12
COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#999999")
"""Okabe and Ito's palette, which people who do not see all colours can tell apart."""
TERMINAL_COLOURS: Final = ("36", "33", "32", "35", "31", "34")
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
    return f"\x1b[{TERMINAL_COLOURS[number]}m{text}\x1b[0m" if canvas.colour else text


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


# Pictures: what each of them begins and ends with. matplotlib is loaded only when something is to be drawn.


@contextmanager
def picture(path: Path, *, width: float, height: float) -> Iterator[Any]:
    """Yield an empty figure of so many inches, and write it into the file at the end, with a note.

    Raises:
        CommandFailed: the file cannot be written.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # Without `parse_math` a dollar in a name would begin a formula.
    style: dict[Any, Any] = {
        "font.size": 10,
        "svg.hashsalt": "spotd",
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with rc_context({**style, "text.parse_math": False}):
        figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
        yield figure
        try:
            figure.savefig(path, metadata={"Date": None} if path.suffix.lower() == ".svg" else {"Software": None})
        except OSError as exc:
            raise CommandFailed(
                f"{path}: {exc.strerror or exc}", code=ExitCode.LOCAL_IO, hint="name another file"
            ) from exc
    stderr.note(f"drawn into {path}")


def write_time_axis(axes: Any) -> None:
    """Write the time axis in the time of this computer, briefly."""
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    zone = datetime.now().astimezone().tzinfo
    locator = AutoDateLocator(tz=zone)  # type: ignore[no-untyped-call]  # matplotlib types only a part of itself
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator, tz=zone))  # type: ignore[no-untyped-call]  # as above


def draw_history(answer: HistoryResponse, path: Path) -> None:
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
        write_time_axis(axes)
        some = f"; {len(shown)} of {len(answer['prices'])} are drawn" if len(answer["prices"]) > len(shown) else ""
        axes.set_title("median and middle 80 % of the time on offer" + some, fontsize=11)
        if shown:
            axes.legend(frameon=False, fontsize=9)


# The life of one job as a picture: its attempts across hosts, what they cost, checkpoints and preemptions.


HOSTS_MAX: Final = 40
"""Attempts on hosts before these are not drawn: a row each must stay readable."""
ATTEMPTS_MAX: Final = 300
PRICED_MAX: Final = 15
"""Of more attempts the prices beside their lines would cover each other."""
CHECKPOINTS_MAX: Final = 2_000
_NAME_CHARS: Final = 40


def draw_timeline(
    detail: JobDetailResponse,
    checkpoints: Sequence[KeptCheckpointResponse],
    changes: Sequence[EventResponse],
    now: str,
    path: Path,
) -> None:
    """Draw a row for each host, and the price of the machines below.

    Args:
        changes: the events by which bids changed, oldest first.

    Raises:
        CommandFailed: the file cannot be written.
    """
    job = detail["job"]
    hosts = list(dict.fromkeys(_host(attempt) for attempt in job["attempts"]))[-HOSTS_MAX:]
    attempts = [attempt for attempt in job["attempts"] if _host(attempt) in hosts][-ATTEMPTS_MAX:]
    rows = {name: place for place, name in enumerate(reversed(hosts))}
    end = _instant(job["ended_at"] or now)
    with picture(path, width=10, height=3.6 + 0.32 * max(1, len(hosts))) as figure:
        timeline, money = figure.subplots(2, 1, sharex=True, height_ratios=(0.32 * max(1, len(hosts)) + 0.6, 1.6))
        for attempt in attempts:
            rates = [(_instant(at), usd_h) for at, usd_h in rates_of(attempt, changes)]
            _draw_attempt(timeline, money, attempt, rates, rows[_host(attempt)], end)
            if len(attempts) <= PRICED_MAX:
                _write_prices(money, rates)
        begin = _instant(job["submitted_at"])
        _draw_checkpoints(timeline, checkpoints, {one["attempt"]: rows[_host(one)] for one in attempts}, begin, end)
        timeline.set_yticks(range(len(rows)), list(rows), fontsize=9)
        timeline.set_ylim(-0.6, max(0.6, len(rows) - 0.4))
        timeline.set_xlim(begin, max(end, begin + timedelta(minutes=1)))
        money.set_ylabel("$ per hour,\nwhole machine")
        money.set_ylim(bottom=0)
        for axes in (timeline, money):
            axes.grid(visible=True, axis="x", alpha=0.25)
        write_time_axis(money)
        left_out = len(job["attempts"]) - len(attempts)
        figure.suptitle(
            _machines_title(detail) + (f"; {left_out} earlier attempts not drawn" if left_out else ""), fontsize=11
        )
        handles, labels = _legend(timeline, money)
        if handles:
            figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=9)


def _draw_attempt(
    timeline: Any,
    money: Any,
    attempt: AttemptResponse,
    rates: Sequence[tuple[datetime, float]],
    row: int,
    end: datetime,
) -> None:
    """Draw the machine from its launch, the command's time in full colour, and how it ended."""
    began = _instant(attempt["launched_at"] or attempt["intended_at"])
    over = end if attempt["ended_at"] is None else _instant(attempt["ended_at"])
    runs = None if attempt["running_at"] is None else _instant(attempt["running_at"])
    timeline.barh(row, over - began, left=began, height=0.5, color=COLOURS[4], alpha=0.45, label="machine up")
    if runs is not None:
        timeline.barh(row, over - runs, left=runs, height=0.5, color=COLOURS[0], label="command runs")
        timeline.annotate(f"{attempt['attempt']}", (runs, row), xytext=(3, 0), textcoords="offset points",
                          color="white", fontsize=8, va="center")  # fmt: skip
    if attempt["reason"] in LOSSES:
        timeline.plot(over, row, "X", color=COLOURS[1], markersize=8, label="lost", zorder=3)
    elif attempt["reason"] is not None:
        timeline.plot(over, row, "s", color="#444444", markersize=5, label="ended", zorder=3)
    ats, prices = [at for at, _ in rates], [usd_h for _, usd_h in rates]
    money.plot([*ats, over], [*prices, prices[-1]], color=COLOURS[0], linewidth=2, drawstyle="steps-post")
    if attempt["on_demand_usd_h"] is not None:
        usual = attempt["on_demand_usd_h"]
        money.plot(
            [began, over], [usual, usual], color="#999999", linestyle=":", linewidth=1.5, label="on-demand price"
        )


def _write_prices(money: Any, rates: Sequence[tuple[datetime, float]]) -> None:
    for at, rate in rates[:PRICED_MAX]:
        money.annotate(f"${price(rate)}", (at, rate), xytext=(2, 3), textcoords="offset points", fontsize=8)


def _draw_checkpoints(
    timeline: Any, checkpoints: Sequence[KeptCheckpointResponse], rows: dict[int, int], begin: datetime, end: datetime
) -> None:
    # A host dates its checkpoints itself, and the newest come first.
    shown = [one for one in checkpoints if one["attempt"] in rows and begin <= _instant(one["at"]) <= end]
    shown = shown[:CHECKPOINTS_MAX]
    if shown:
        timeline.plot(
            [_instant(one["at"]) for one in shown], [rows[one["attempt"]] + 0.34 for one in shown],
            "v", color=COLOURS[2], markersize=5, linestyle="none", label="checkpoint",
        )  # fmt: skip


def _legend(*parts: Any) -> tuple[list[Any], list[str]]:
    """Return each mark once, though every attempt brings its own."""
    once: dict[str, Any] = {}
    for axes in parts:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            once.setdefault(label, handle)
    return list(once.values()), list(once)


def _machines_title(detail: JobDetailResponse) -> str:
    job = detail["job"]
    name = clean(job["name"])[:_NAME_CHARS]
    return f"{name} ({clean(job['id'])}), {job['state']}: {dollars(job['spent_usd'])} spent"


def _host(attempt: AttemptResponse) -> str:
    return clean(f"{where_text(attempt)} {attempt['market']}")[:_NAME_CHARS]


def _instant(text: str) -> datetime:
    moment = instant(text)
    if moment is None:
        raise ValueError(text)
    return moment
