"""Which ceiling to set, and why.

With a deadline: the least median cost among the cases in which every run is in time. Without one nothing says what an
hour is worth, so it is the least median cost among those whose slow runs (the ninetieth percentile) take at most
`patience` times as long as those of the fastest case. Of cases that cost the same within a hundredth the lowest ceiling
wins: it pays no more, and is safe from prices that were never recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from spotd.backtest.summary import Summary

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
