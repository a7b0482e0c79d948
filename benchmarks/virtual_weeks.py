"""A week of one daemon in virtual time: memory and state file for each simulated day, with eight jobs that save 50 GB
every 15 minutes.

    python benchmarks/virtual_weeks.py [DAYS]

Everything is real but the hosts, the provider and the objects: those are kept as sizes. Takes some minutes.
"""

from __future__ import annotations

import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from time import process_time

import trio
from trio.testing import MockClock

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.unit.daemon.soak import GB, Soak


def main(days: int) -> None:
    begun = process_time()
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), jobs=8, size=50 * GB, save_every=timedelta(minutes=15), read_every_s=60.0)
        trio.run(soak.readings, days, timedelta(days=1), clock=MockClock(autojump_threshold=0))
        saves = 8 * days * 96
    print(f"{days} days, {saves} checkpoints of 50 GB, {process_time() - begun:.0f} s of processor time")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 7)
