"""What a back-test found, as a table, as JSON and in sentences."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Final

from spotd.backtest.result import ceiling_words, dollar_words, span_words
from spotd.cli import stderr, stdout
from spotd.cli.views.pictures import COLOURS, picture
from spotd.cli.views.table import Cell, Column
from spotd.cli.views.table import show as show_table
from spotd.words import clean, count

if TYPE_CHECKING:
    from spotd.backtest.recorded import Assumptions
    from spotd.backtest.result import Result, Summary

SCHEMA: Final = 1
_MICRO: Final = 1_000_000
_INDENT: Final = 13
_LINE_MAX: Final = 100


def show(result: Result) -> None:
    """Print the table, the recommendation, and what both rest on."""
    chosen = result.advice.summary
    several = len({one.case.policy for one in result.summaries}) > 1

    def ceiling(one: Summary) -> Cell:
        return Cell(
            f"{one.case.limit / _MICRO:.3f}" + (" <" if one is chosen else ""), "green" if one is chosen else ""
        )

    unit = "$/GPU-H" if result.summaries[0].case.is_per_gpu else "$/H"
    columns: list[Column[Summary]] = [Column(unit, ceiling)]
    if several:
        columns.append(Column("POLICY", lambda one: one.case.policy))
    columns += [
        Column("DONE", lambda one: f"{one.finished}/{one.runs}", right=True),
        Column("COST", lambda one: dollar_words(one.cost_median), right=True),
        Column("P90", lambda one: dollar_words(one.cost_p90), right=True),
        Column("FINISH", lambda one: span_words(one.took_median_s), right=True),
        Column("P90", lambda one: span_words(one.took_p90_s), right=True),
    ]
    if result.deadline_s is not None:
        columns.append(Column("LATE", lambda one: f"{one.late or 0:.0%}", right=True))
    columns += [
        Column("LOST", lambda one: f"{one.preemptions:.1f}", right=True),
        Column("STOPPED", lambda one: f"{one.price_stops:.1f}", right=True, drop=2),
        Column("WAITING", lambda one: f"{one.waiting:.0%}", right=True),
        Column("REPEATED", lambda one: span_words(round(one.repeated_s)), right=True, drop=1),
        Column("SAVED", _saving, right=True, drop=3),
    ]
    show_table(columns, result.summaries)
    stdout.write("\n" + "".join(_wrap(key, clean(text)) for key, text in _lines(result)))
    for note in result.notes:
        stderr.note(note)


def _wrap(key: str, text: str) -> str:
    """Return one line, or on a terminal as many as it takes, indented."""
    first = f"{key:<{_INDENT}}"
    if not stdout.is_terminal():
        return f"{first}{text}\n"
    room = min(stdout.width(), _LINE_MAX)
    return "\n".join(wrap(text, room, initial_indent=first, subsequent_indent=" " * _INDENT)) + "\n"


def _saving(one: Summary) -> str:
    return "-" if one.on_demand <= one.paid else f"{1 - one.paid / one.on_demand:.0%}"


def _lines(result: Result) -> Iterator[tuple[str, str]]:
    chosen = result.advice.summary
    if chosen is None:
        yield "recommended:", f"none, since {result.advice.reason}"
    else:
        several = len({one.case.policy for one in result.summaries}) > 1
        yield "recommended:", ceiling_words(chosen) + (f" with {chosen.case.policy}" if several else "")
        yield "because:", result.advice.reason
    for ceiling, figures in result.advice.neighbours:
        yield f"{ceiling.split('/')[0]}:", figures
    begins, ends = (_instant_words(at) for at in (result.begins_at, result.ends_at))
    yield "history:", f"{begins} to {ends} UTC, {result.series} offers that fit, {result.changes} changes"
    terms = result.terms
    sentences = [
        f"the job runs {span_words(terms.work_s)}",
        f"every launch succeeds and takes {span_words(terms.restart_s)}",
        f"a checkpoint every {span_words(terms.every_s)}",
        f"decided every {span_words(terms.step_s)}",
        f"a spot machine whose offer leaves the market is {terms.vanished.value}",
        *_relocation_words(terms),
        "fees " + ", ".join(f"{name} x{fee / _MICRO:.2f}" for name, fee in sorted(terms.fee_ppm.items())),
        f"{result.starts} starts, seed {result.seed}",
    ]
    yield "assumed:", "; ".join(sentences)
    censored = sum(one.censored for one in result.summaries)
    if censored:
        runs = sum(one.runs for one in result.summaries)
        yield "unfinished:", f"{censored} of {runs} runs were not done when the history ended: they count as longest"
    stopped = next((one for one in result.summaries if one.stopped), None)
    if stopped is not None:
        yield "given up:", f"{count(stopped.stopped, 'run')} at {ceiling_words(stopped)}: {stopped.why_stopped[0]}"


def _relocation_words(terms: Assumptions) -> Iterator[str]:
    """Yield what `[bids]` and `[moves]` of the config let the daemon do, as it was played."""
    yield "[bids] raise_running: bids follow the lowest that wins" if terms.raise_bids else "bids stay as placed"
    hold = span_words(round(terms.hold_max.total_seconds()))
    yield f"[bids] hold: an outbid machine is kept for up to {hold}" if terms.hold_max else "no outbid machine is kept"
    yield (
        f"[moves] most: up to {count(terms.moves_max, 'move')} to a cheaper machine" if terms.moves_max else "no moves"
    )


def _instant_words(at: int) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M}"


def _utc(at: int) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%SZ}"


def document(result: Result) -> None:
    chosen = result.advice.summary
    terms = result.terms
    stdout.document(
        {
            "schema": SCHEMA,
            "job": result.job,
            "history": {
                "place": result.history,
                "begins_at": _utc(result.begins_at),
                "ends_at": _utc(result.ends_at),
                "offers": result.series,
                "changes": result.changes,
            },
            "assumptions": {
                "work_s": terms.work_s,
                "restart_s": terms.restart_s,
                "every_s": terms.every_s,
                "checkpoint_bytes": terms.checkpoint_bytes,
                "step_s": terms.step_s,
                "vanished": terms.vanished.value,
                "raise_running": terms.raise_bids,
                "hold_s": round(terms.hold_max.total_seconds()),
                "moves_most": terms.moves_max,
                "fee_multiplier": {name: fee / _MICRO for name, fee in sorted(terms.fee_ppm.items())},
                "starts": result.starts,
                "seed": result.seed,
                "deadline_s": result.deadline_s,
            },
            "rows": [_row(one) for one in result.summaries],
            "recommended": None if chosen is None else _row(chosen),
            "reason": result.advice.reason,
            "notes": list(result.notes),
        }
    )


def _row(one: Summary) -> dict[str, Any]:
    def usd(amount: int | None) -> float | None:
        return None if amount is None else amount / _MICRO

    return {
        "policy": one.case.policy,
        "ceiling_usd_gpu_h": usd(one.case.ceiling.per_gpu_hour),
        "ceiling_usd_h": usd(one.case.ceiling.machine_hour),
        "runs": one.runs,
        "finished": one.finished,
        "unfinished": one.censored,
        "given_up": one.stopped,
        "cost_median_usd": usd(one.cost_median),
        "cost_p90_usd": usd(one.cost_p90),
        "finish_median_s": one.took_median_s,
        "finish_p90_s": one.took_p90_s,
        "late_share": one.late,
        "preemptions_mean": round(one.preemptions, 3),
        "returns_mean": round(one.returns, 3),
        "moves_mean": round(one.moves, 3),
        "bid_changes_mean": round(one.bids, 3),
        "price_stops_mean": round(one.price_stops, 3),
        "waiting_share": round(one.waiting, 4),
        "repeated_mean_s": round(one.repeated_s, 1),
        "paid_usd": usd(one.paid),
        "on_demand_usd": usd(one.on_demand),
        "given_up_because": list(one.why_stopped),
    }


# The chart of a back-test, by the same drawing as the other charts.


_HOUR_S: Final = 3600


def draw_backtest(result: Result, path: Path) -> None:
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


# Past prices as a picture.
