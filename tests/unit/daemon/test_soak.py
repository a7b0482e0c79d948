"""Hours of one daemon whose jobs save 50 GB every quarter of an hour: what it holds does not grow with time.

`python benchmarks/soak.py` is the same for a week and eight jobs; `test_housekeeping.py` holds the rows to their bound.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from tests.unit.daemon.soak import GB, Soak

pytestmark = pytest.mark.anyio
KEPT_AT_MOST = 12
"""Checkpoints on a list or not yet deleted: those that are kept, and what is written between two sweeps."""


@pytest.mark.slow
async def test_large_checkpoints_saved_for_hours_leave_memory_state_and_store_as_they_were(tmp_path: Path) -> None:
    soak = Soak(tmp_path, jobs=1, size=50 * GB, save_every=timedelta(minutes=15), read_every_s=60.0)
    early, late = await soak.readings(2, timedelta(minutes=105))
    assert late.checkpoints <= KEPT_AT_MOST
    assert late.stored_bytes <= KEPT_AT_MOST * 50 * GB
    assert late.python_objects - early.python_objects < 5_000
    assert late.state_bytes - early.state_bytes < 500_000
    assert late.wal_bytes < 8_000_000
    assert late.events - early.events <= 7 * 3  # three rows for each of seven saves: accepted, told and dropped
