"""Pictures: what each of them begins and ends with. matplotlib is loaded only when something is to be drawn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from spotd.cli import stderr
from spotd.cli.entry import CommandFailed, ExitCode
from spotd.cli.views.chart import begins
from spotd.lists import rates_of
from spotd.words import LOSSES, clean, dollars, instant, price, where_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from spotd.api.schemas.answers import EventResponse
    from spotd.api.schemas.costs import HistoryResponse
    from spotd.api.schemas.jobs import AttemptResponse, JobDetailResponse, KeptCheckpointResponse


COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#999999")
"""Okabe and Ito's palette, which people who do not see all colours can tell apart."""


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


def dated(axes: Any) -> None:
    """Write the time axis in the time of this computer, briefly."""
    from datetime import datetime

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
        dated(axes)
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
        dated(money)
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
