"""How many simulated days of the whole core a second of processor time holds, with faults, crashes and a user.

Two sizes: the world that `make test` runs, and the one of the goal (200 offers, 40 jobs). The ratio between them says
how the cost of a decision grows; compare it between two revisions, since seconds depend on the machine.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from time import process_time

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.sim.run import run_world
from tests.sim.worlds import Shape

SIZES = {
    "6 jobs, 9 offers": (Shape(), range(5)),
    "40 jobs, 199 offers": (Shape(jobs=40, hosts=100), range(3)),
}


def main() -> None:
    print(f"{'world':22} {'days':>6} {'cycles':>8} {'us/cycle':>9} {'days/s':>8}   (medians; processor time)")
    for name, (shape, seeds) in SIZES.items():
        days, cycles, cost, speed = [], [], [], []
        for seed in seeds:
            begun = process_time()
            result = run_world(seed, shape)
            spent = process_time() - begun
            days.append(result.days)
            cycles.append(result.daemon.cycles)
            cost.append(spent / result.daemon.cycles * 1e6)
            speed.append(result.days / spent)
        print(f"{name:22} {median(days):6.2f} {median(cycles):8.0f} {median(cost):9.0f} {median(speed):8.2f}")


if __name__ == "__main__":
    main()
