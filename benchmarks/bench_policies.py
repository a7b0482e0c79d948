"""What each policy costs on recorded traces, as its share of the way from on-demand to the best that can be.

100 is the exact optimum, which knows the future; 0 is on-demand from beginning to end. A late run would void a row. The
traces lie beside the repository (`SPOTD_SHARED_DATA`). Run: python benchmarks/bench_policies.py [every Nth window]
"""

from __future__ import annotations

import sys
from collections import defaultdict
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from spotd.core.policies.library import POLICIES
from spotd.core.policies.replay import replay
from spotd.core.policies.shield import shielded
from tests.replays.traces import ABSENT, SCORES, windows


def main() -> None:
    if not SCORES.exists():
        print(ABSENT)
        return
    chosen = windows()[:: int(sys.argv[1]) if len(sys.argv) > 1 else 1]
    sets = sorted({window.set_name for window in chosen})
    print(f"{'policy':<24}" + "".join(f"{name:>22}" for name in sets) + f"{'late':>6}")
    for policy in POLICIES:
        if policy in {"ceiling", "on-demand"}:
            continue
        gained, possible, late = defaultdict[str, float](float), defaultdict[str, float](float), 0
        for window in chosen:
            result = replay(partial(shielded, POLICIES[policy]), [window.zone], window.terms)
            gained[window.set_name] += window.costs["on_demand"] - result.usd
            possible[window.set_name] += window.costs["on_demand"] - window.costs["offline_optimum"]
            late += result.is_late
        shares = "".join(f"{100 * gained[name] / possible[name]:>22.1f}" for name in sets)
        print(f"{policy:<24}{shares}{late:>6}", flush=True)


if __name__ == "__main__":
    main()
