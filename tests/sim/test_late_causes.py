"""Where lists name a preemption minutes late, every end that was taken for a loss is corrected, across crashes too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import timedelta

import pytest

from spotd.core.domain.states import EndKind, EndReason
from spotd.core.late_causes import is_correctable
from spotd_providers.contract.values import Loss
from tests.sim.hazards import Hazard
from tests.sim.oracles import broken_rules
from tests.sim.run import Result, run_world
from tests.sim.schedules import machine_of
from tests.sim.worlds import Shape

SHAPE = Shape(
    storm=timedelta(hours=6),
    hazards=frozenset({Hazard.LATE_CAUSES}),
    kills_per_hour=0.0,
    outages_per_hour=0.0,
    user=False,
)
STATED_WITHIN = timedelta(minutes=20)
"""From the end of a machine to a list that states why, with some time for lists that fail."""
FAST, MORE = 3, (0, 8, 12, 20, 26)


def uncorrected(result: Result) -> Iterator[str]:
    for item in result.daemon.attempts_ever.values():
        m = machine_of(result, item)
        if m is None or m.died is None or item.ended_at is None or m.loss is not Loss.PREEMPTED:
            continue
        if m.died <= item.ended_at and result.ended_at - m.died > STATED_WITHIN and is_correctable(item, item.ended_at):
            yield f"{m.key} was taken back at {m.died} and counts as {item.end_reason}: {item.end_detail}"


def corrected_wrongly(result: Result) -> Iterator[str]:
    """No machine counts as preempted that was not, and no job counts more or fewer of them than its attempts show."""
    taken: Counter[str] = Counter()
    for item in result.daemon.attempts_ever.values():
        m, reason = machine_of(result, item), item.end_reason
        if reason is not None and reason.traits.kind is EndKind.TAKEN and item.launched_at is not None:
            taken[item.id.job] += 1
        if reason is EndReason.PREEMPTED and m is not None and m.loss is not Loss.PREEMPTED and m.notice_at is None:
            yield f"{m.key} counts as preempted, and was lost by {m.loss}"
    for identity, job in result.daemon.done.items():
        if job.totals.preemptions != taken[identity]:
            yield f"{identity} counts {job.totals.preemptions} preemptions, and had {taken[identity]}"


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(FAST, marks=pytest.mark.long),
        *(pytest.param(n, marks=pytest.mark.lengthy) for n in MORE),
    ],
)
def test_each_preemption_counts_as_one_in_the_end(seed: int) -> None:
    result = run_world(seed, SHAPE)
    assert [*broken_rules(result), *uncorrected(result), *corrected_wrongly(result)] == []
    assert result.daemon.told.events.count("attempt.corrected") > 1
