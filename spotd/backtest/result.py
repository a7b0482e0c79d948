"""A back-test from its history to its recommendation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Final

from spotd.backtest import playing
from spotd.backtest.recorded import Assumptions, RecordedMarket
from spotd.backtest.run import End, RunOutcome
from spotd.backtest.traces import TraceDefaults, read_history
from spotd.core.ranking.remaining_work import Speeds
from spotd_jobs.spec.model import JobSpec, PriceLimit

# What the runs of one case have in common: medians, ninetieth percentiles, means.
#
# A run that did not finish counts as longer and as more expensive than every one that did. So a percentile that falls
# among those is not known, and is `None`; it is never the percentile of the lucky ones.


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One case over all its starts. Spans in seconds, money in micro-dollars; `None` where too few runs finished.

    Attributes:
        waiting: share of all time without a machine.
        preemptions, returns, price_stops, moves, bids, repeated_s: means over all runs.
        on_demand: what the finished runs would have cost on-demand in sum, beside `paid`.
        late: share of runs that were not finished by the deadline, `None` without one.
        why_stopped: the reasons of runs that spotd gave up, the most frequent first.
    """

    case: playing.BacktestCase
    runs: int
    finished: int
    censored: int
    stopped: int
    cost_median: int | None
    cost_p90: int | None
    took_median_s: int | None
    took_p90_s: int | None
    preemptions: float
    price_stops: float
    waiting: float
    repeated_s: float
    paid: int
    on_demand: int
    late: float | None
    why_stopped: tuple[str, ...]
    returns: float = 0.0
    moves: float = 0.0
    bids: float = 0.0


def summarized(case: playing.BacktestCase, outcomes: Sequence[RunOutcome], *, deadline_s: int | None) -> Summary:
    """Return the summary of the runs of one case."""
    finished = [one for one in outcomes if one.end is End.FINISHED]
    count = len(outcomes)
    stopped = [one.why for one in outcomes if one.end is End.STOPPED]
    late = None
    if deadline_s is not None and count:
        late = 1 - sum(one.took_s <= deadline_s for one in finished) / count
    return Summary(
        case=case,
        runs=count,
        finished=len(finished),
        censored=sum(one.end is End.CENSORED for one in outcomes),
        stopped=len(stopped),
        cost_median=percentile((one.cost for one in finished), count, 50),
        cost_p90=percentile((one.cost for one in finished), count, 90),
        took_median_s=percentile((one.took_s for one in finished), count, 50),
        took_p90_s=percentile((one.took_s for one in finished), count, 90),
        preemptions=_mean([one.preemptions for one in outcomes]),
        price_stops=_mean([one.price_stops for one in outcomes]),
        waiting=sum(one.waiting_s for one in outcomes) / max(1, sum(one.took_s for one in outcomes)),
        repeated_s=_mean([one.repeated_s for one in outcomes]),
        paid=sum(one.cost for one in finished),
        on_demand=sum(one.on_demand for one in finished),
        late=late,
        returns=_mean([one.returns for one in outcomes]),
        moves=_mean([one.moves for one in outcomes]),
        bids=_mean([one.bids for one in outcomes]),
        why_stopped=tuple(sorted(set(stopped), key=lambda why: (-stopped.count(why), why))[:3]),
    )


def percentile(known: Iterable[int], count: int, percent: int) -> int | None:
    """Return the least value at or under which so many percent of all lie; those that are not known lie above."""
    ordered = sorted(known)
    rank = -(-count * percent // 100)
    return ordered[rank - 1] if 0 < rank <= len(ordered) else None


def _mean(values: Sequence[int]) -> float:
    return sum(values) / len(values) if values else 0.0


# Which ceiling to set, and why.
#
# With a deadline: the least median cost among the cases in which every run is in time. Without one nothing says what
# an hour is worth, so it is the least median cost among those whose slow runs (the ninetieth percentile) take at most
# `patience` times as long as those of the fastest case. Of cases that cost the same within a hundredth the lowest
# ceiling wins: it pays no more, and is safe from prices that were never recorded.


SAME: Final = 1.01


@dataclass(frozen=True, slots=True, kw_only=True)
class CeilingAdvice:
    """The case to choose and its reason; `None` where no ceiling of the range can be recommended.

    Attributes:
        neighbours: what the ceilings next to it do, each as its ceiling and figures.
    """

    summary: Summary | None
    reason: str
    neighbours: tuple[tuple[str, str], ...] = ()


def advice_on(summaries: Sequence[Summary], *, deadline_s: int | None, patience: float) -> CeilingAdvice:
    """Return the recommendation."""
    whole = [one for one in summaries if one.cost_median is not None and one.took_p90_s is not None]
    if deadline_s is not None:
        fit = [one for one in whole if one.late == 0]
        rule = f"every run is done within {span_words(deadline_s)}"
        if not fit:
            best = min(summaries, key=lambda one: (one.late or 0, one.case.limit), default=None)
            least = f"; the best, {ceiling_words(best)}, misses it in {best.late or 0:.0%} of its runs" if best else ""
            return CeilingAdvice(summary=None, reason=f"no ceiling of the range meets the deadline in every run{least}")
    else:
        if not whole:
            best = max(summaries, key=lambda one: (one.finished, -one.case.limit), default=None)
            most = f"; the most, {best.finished} of {best.runs}, at {ceiling_words(best)}" if best else ""
            return CeilingAdvice(
                summary=None,
                reason=f"under no ceiling of the range 9 of 10 runs finish within the history{most}: "
                "take higher ceilings or a longer history",
            )
        fastest = min(one.took_p90_s or 0 for one in whole)
        fit = [one for one in whole if (one.took_p90_s or 0) <= patience * fastest]
        rule = f"9 of 10 runs finish within {patience:g} times the fastest ({span_words(fastest)})"
    cheapest = min(one.cost_median or 0 for one in fit)
    chosen = min((one for one in fit if (one.cost_median or 0) <= SAME * cheapest), key=lambda one: one.case.limit)
    return CeilingAdvice(
        summary=chosen,
        reason=(
            f"the least median cost, {dollar_words(chosen.cost_median)}, of those where {rule};"
            f" its own median is {span_words(chosen.took_median_s)}"
        ),
        neighbours=_neighbours(chosen, summaries),
    )


def _neighbours(chosen: Summary, summaries: Sequence[Summary]) -> tuple[tuple[str, str], ...]:
    same = [one for one in summaries if one.case.policy == chosen.case.policy]
    place = same.index(chosen)
    return tuple((ceiling_words(one), _figures(one)) for one in (*same[:place][-1:], *same[place + 1 :][:1]))


def _figures(one: Summary) -> str:
    if one.took_p90_s is None:
        return f"only {one.finished} of {one.runs} runs finish"
    return f"{dollar_words(one.cost_median)}, 9 of 10 within {span_words(one.took_p90_s)}"


def ceiling_words(one: Summary) -> str:
    """Return the ceiling with its unit: cents, and tenths of a cent where it has any."""
    dollars, tenths = divmod(one.case.limit, 1_000_000)
    decimals = f"{tenths:06d}".rstrip("0").ljust(2, "0")
    return f"${dollars}.{decimals}{'/GPU-h' if one.case.is_per_gpu else '/h'}"


def dollar_words(amount: int | None) -> str:
    return "-" if amount is None else f"${amount / 1_000_000:.2f}"


def span_words(seconds: int | None) -> str:
    """Return a span as people say it: `38 min`, `41.5 h`, `5.2 d`."""
    if seconds is None:
        return "-"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 100 * 3600 else f"{seconds / 86_400:.1f} d"


GAP_NOTED_S: Final = 6 * 3600
"""A longer span in which no price changed is stated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a back-test found, with everything that it rests on.

    Attributes:
        series, changes: how much of the history concerned the job.
        notes: how the history was read, and what of the job could not be held against it.
    """

    job: str
    history: str
    begins_at: int
    ends_at: int
    series: int
    changes: int
    seed: int
    starts: int
    terms: Assumptions
    deadline_s: int | None
    summaries: tuple[Summary, ...]
    advice: CeilingAdvice
    notes: tuple[str, ...]


def answered(
    spec: JobSpec,
    place: Path,
    *,
    ceilings: Sequence[PriceLimit],
    starts: int,
    seed: int,
    terms: Assumptions,
    defaults: TraceDefaults,
    patience: float,
    processes: int,
    progress: playing.Progress,
    policies: Sequence[str],
    deadline: timedelta | None = None,
) -> Result:
    """Read the history, play every case from every start, and recommend a ceiling.

    Raises:
        BacktestRefused
    """
    read = read_history(place, lambda gpu, count: playing.is_wanted_by(spec, gpu, count), defaults)
    recorded = read.market
    wanted, unrecorded = playing.without_unrecorded(spec, recorded)
    fees = {name: terms.fee_ppm.get(name, 1_000_000) for name in recorded.providers}
    terms = replace(terms, fee_ppm=fees)
    question = playing.Question(
        spec=wanted,
        recorded=recorded,
        cases=playing.cases_of(ceilings, policies),
        starts=playing.starts_over(recorded, terms, fastest=_fastest(spec, recorded), count=starts, seed=seed),
        terms=terms,
        deadline=deadline,
    )
    deadline_s = None if deadline is None else round(deadline.total_seconds())
    outcomes = playing.play(question, processes=processes, progress=progress)
    summaries = tuple(
        summarized(case, some, deadline_s=deadline_s) for case, some in zip(question.cases, outcomes, strict=True)
    )
    return Result(
        job=spec.name,
        history=str(place),
        begins_at=recorded.begins_at,
        ends_at=recorded.ends_at,
        series=len(recorded.series),
        changes=len(recorded.instants),
        seed=seed,
        starts=len(question.starts),
        terms=terms,
        deadline_s=deadline_s,
        summaries=summaries,
        advice=advice_on(summaries, deadline_s=deadline_s, patience=patience),
        notes=(*read.notes, *_gap_words(recorded), *unrecorded),
    )


def _gap_words(recorded: RecordedMarket) -> list[str]:
    """Return the longest span in which nothing at all was recorded, where it is long."""
    instants = [recorded.begins_at, *recorded.instants, recorded.ends_at]
    length, since = max((after - before, before) for before, after in pairwise(instants))
    if length < GAP_NOTED_S:
        return []
    begins = f"{datetime.fromtimestamp(since, UTC):%Y-%m-%d %H:%M}"
    return [f"the longest span without a price is of {length / 3600:.1f} h, from {begins} UTC on"]


def _fastest(spec: JobSpec, recorded: RecordedMarket) -> int:
    speeds = Speeds(per_gpu=spec.speed)
    return max(speeds.of(offer.gpu, offer.gpu_count) for offer in recorded.series)
