"""GPU use over time stays small, however long a machine runs and whatever its host states."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from spotd.daemon.hosts.host_reader import SAMPLES_MAX, GpuHistory
from spotd_jobs.wire.reports import Gpu
from tests.cases import every

AT = datetime(2026, 3, 2, 12, tzinfo=UTC)


def gpu(**given: Any) -> Gpu:
    return Gpu(
        **{
            "index": 0,
            "name": "H100",
            "util_pct": 50.0,
            "mem_used_mb": 1000.0,
            "mem_total_mb": 80000.0,
            "power_w": None,
            "temp_c": None,
            **given,
        }
    )


def test_samples_hold_the_mean_use_and_the_sum_of_the_memory() -> None:
    history = GpuHistory()
    history.take([gpu(util_pct=20.0), gpu(index=1, util_pct=100.0, mem_used_mb=None), gpu(index=2, util_pct=None)], AT)
    (sample,) = history.samples()
    assert (sample.at, sample.util_pct, sample.mem_used_mb, sample.mem_total_mb) == (AT, 60.0, 2000.0, 240000.0)


def test_a_machine_without_figures_has_no_samples_and_an_unknown_one_is_none() -> None:
    history = GpuHistory()
    history.take([], AT)
    history.take([gpu(util_pct=None, mem_used_mb=None)], AT)
    assert [(s.util_pct, s.mem_used_mb) for s in history.samples()] == [(None, None)]


@every("count", [1, SAMPLES_MAX - 1, SAMPLES_MAX, 10_000])
def test_however_many_heartbeats_come_the_samples_cover_all_of_the_time(count: int) -> None:
    history = GpuHistory()
    for number in range(count):
        history.take([gpu(util_pct=float(number % 100))], AT + timedelta(seconds=15 * number))
    found = [sample.at for sample in history.samples()]
    assert len(found) < SAMPLES_MAX
    assert found == sorted(found)
    assert found[0] == AT
    if count > 2:
        gap = (found[-1] - found[0]) / (len(found) - 1)
        assert AT + timedelta(seconds=15 * (count - 1)) - found[-1] <= 3 * gap
