"""A back-test from its history to its recommendation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Final

from spotd.backtest.advice import CeilingAdvice, advice_on
from spotd.backtest.folder import read_history
from spotd.backtest.model import Assumptions
from spotd.backtest.playing import Progress, play
from spotd.backtest.question import Question, cases_of, is_wanted_by, starts_over, without_unrecorded
from spotd.backtest.recorded import RecordedMarket
from spotd.backtest.summary import Summary, summarized
from spotd.backtest.traces import TraceDefaults
from spotd.core.ranking.machine_speed import Speeds
from spotd_jobs.spec.model import JobSpec, PriceLimit

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
    progress: Progress,
    policies: Sequence[str],
    deadline: timedelta | None = None,
) -> Result:
    """Read the history, play every case from every start, and recommend a ceiling.

    Raises:
        BacktestRefused
    """
    read = read_history(place, lambda gpu, count: is_wanted_by(spec, gpu, count), defaults)
    recorded = read.market
    wanted, unrecorded = without_unrecorded(spec, recorded)
    fees = {name: terms.fee_ppm.get(name, 1_000_000) for name in recorded.providers}
    terms = replace(terms, fee_ppm=fees)
    question = Question(
        spec=wanted,
        recorded=recorded,
        cases=cases_of(ceilings, policies),
        starts=starts_over(recorded, terms, fastest=_fastest(spec, recorded), count=starts, seed=seed),
        terms=terms,
        deadline=deadline,
    )
    deadline_s = None if deadline is None else round(deadline.total_seconds())
    outcomes = play(question, processes=processes, progress=progress)
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
