"""Hours of one daemon whose jobs save every quarter of an hour: what it holds does not grow with time.

`python benchmarks/virtual_weeks.py` is the same for a week and eight jobs; `test_housekeeping.py` holds the rows to
their bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from spotd.core.domain.attempts import HostStatus
from spotd.core.domain.intents import AttemptId
from spotd.daemon.hosts.monitor import HostMonitor
from tests.unit.daemon.soak import GB, Reading, Soak

pytestmark = pytest.mark.anyio
SAVE_EVERY = timedelta(minutes=15)
SPAN = timedelta(minutes=70)
"""After one, what holds an hour is full. In each five checkpoints are accepted."""
WAL_MAX = 4_500_000
"""It is written back to the state file at 1,000 pages of 4 kB, which are full after two hours."""
KEPT_AT_MOST = 12
"""Checkpoints on a list or not yet deleted: those that are kept, and what is written between two sweeps."""


def growth(early: Reading, late: Reading) -> list[str]:
    """What grew by more than the chance of the instant at which it was read explains."""
    bounds = {"python_objects": 250, "memory_blocks": 450, "state_bytes": 20_000}
    grown = {name: getattr(late, name) - getattr(early, name) for name in bounds}
    return [f"{name}: {more}" for name, more in grown.items() if more > bounds[name]]


@pytest.mark.lengthy
async def test_a_daemon_holds_no_more_after_hours_than_it_did_before_and_a_leak_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    soak = Soak(tmp_path, jobs=1, size=GB, save_every=SAVE_EVERY, read_every_s=60.0)
    leaks_from = soak.rig.clock.now() + 2 * SPAN
    leaked: list[Mapping[AttemptId, HostStatus]] = []
    read_hosts = HostMonitor.read_hosts

    async def leaking(self: HostMonitor, *args: Any) -> Mapping[AttemptId, HostStatus]:
        reports = await read_hosts(self, *args)
        if soak.rig.clock.now() >= leaks_from:
            leaked.append(reports)
        return reports

    monkeypatch.setattr(HostMonitor, "read_hosts", leaking)
    early, late, after_the_leak = await soak.readings(3, SPAN)
    assert growth(early, late) == []
    assert after_the_leak.wal_bytes <= WAL_MAX
    assert late.checkpoints <= KEPT_AT_MOST
    assert {found.split(":")[0] for found in growth(late, after_the_leak)} == {"python_objects", "memory_blocks"}


@pytest.mark.slow
async def test_large_checkpoints_saved_for_hours_leave_memory_state_and_store_as_they_were(tmp_path: Path) -> None:
    soak = Soak(tmp_path, jobs=1, size=50 * GB, save_every=SAVE_EVERY, read_every_s=60.0)
    early, late = await soak.readings(2, timedelta(minutes=105))
    assert late.checkpoints <= KEPT_AT_MOST
    assert late.stored_bytes <= KEPT_AT_MOST * 50 * GB
    assert late.python_objects - early.python_objects < 5_000
    assert late.state_bytes - early.state_bytes < 500_000
    assert late.wal_bytes < 8_000_000
    assert late.events - early.events <= 7 * 3  # three rows for each of seven saves: accepted, told and dropped
