"""Time comes from one place, and an accelerated one is the same for every process."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import spotd
from spotd.daemon.clock import SystemClock
from spotd.service.accelerated import (
    AcceleratedClock,
    ClockFileBroken,
    ClockParameters,
    open_clock,
    seconds_on_host,
)

PACKAGE = Path(spotd.__file__).parent
BEGIN = datetime(2026, 3, 2, tzinfo=UTC)


def fast(scale: float, real: float) -> AcceleratedClock:
    return AcceleratedClock(ClockParameters(real0=1000.0, virtual0=BEGIN, scale=scale), wall=lambda: real)


def test_virtual_time_is_computed_from_the_parameters_alone() -> None:
    assert fast(600, 1060.0).now() == BEGIN + timedelta(hours=10)
    assert fast(600, 1000.0).real_seconds(timedelta(minutes=10)) == 1.0


def test_a_folder_without_a_file_and_without_a_wish_runs_on_real_time(tmp_path: Path) -> None:
    assert isinstance(open_clock(tmp_path), SystemClock)
    assert not (tmp_path / "clock.json").exists()


def test_the_first_start_writes_the_parameters_and_later_ones_keep_them(tmp_path: Path) -> None:
    first = open_clock(tmp_path, scale=600, begin=BEGIN)
    second = open_clock(tmp_path, scale=7)
    assert isinstance(first, AcceleratedClock)
    assert isinstance(second, AcceleratedClock)
    assert first.parameters == second.parameters
    assert set(json.loads((tmp_path / "clock.json").read_text())) == {"real0", "virtual0", "scale"}
    assert list(tmp_path.iterdir()) == [tmp_path / "clock.json"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        '{"real0": 1, "virtual0": "2026-03-02T00:00:00", "scale": 2}',
        '{"real0": 1, "virtual0": "2026-03-02T00:00:00Z", "scale": 0}',
        '{"real0": NaN, "virtual0": "2026-03-02T00:00:00Z", "scale": 1}',
        '{"real0": "x", "virtual0": "2026-03-02T00:00:00Z", "scale": 1}',
    ],
    ids=["empty", "no keys", "a list", "no zone", "stands still", "nan", "text"],
)
def test_a_broken_file_is_refused_instead_of_guessed_around(text: str, tmp_path: Path) -> None:
    (tmp_path / "clock.json").write_text(text)
    with pytest.raises(ClockFileBroken, match=r"clock\.json"):
        open_clock(tmp_path)


def test_a_host_is_given_real_seconds_in_which_a_process_can_save() -> None:
    grace = timedelta(seconds=90)
    assert seconds_on_host(SystemClock())(grace) == 90
    assert seconds_on_host(fast(2, 0))(grace) == 45
    assert seconds_on_host(fast(600, 0))(grace) == 90 / 20


def test_nothing_below_the_service_knows_that_time_can_run_faster() -> None:
    known = re.compile(r"virtual_|\bvirtual time\b|FLOOR_S|accelerat|time_scale", re.IGNORECASE)
    roots = (PACKAGE / room for room in ("core", "daemon", "store", "history", "client"))
    files = [file for root in roots for file in root.rglob("*.py")]
    assert len(files) > 80
    assert [file.name for file in files if known.search(file.read_text(encoding="utf-8"))] == []
