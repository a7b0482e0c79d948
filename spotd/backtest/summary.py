"""What the runs of one case have in common: medians, ninetieth percentiles, means.

A run that did not finish counts as longer and as more expensive than every one that did. So a percentile that falls
among those is not known, and is `None`; it is never the percentile of the lucky ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spotd.backtest.question import BacktestCase
from spotd.backtest.run import End, RunOutcome


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

    case: BacktestCase
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


def summarized(case: BacktestCase, outcomes: Sequence[RunOutcome], *, deadline_s: int | None) -> Summary:
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
