"""What each policy costs on recorded traces, as its share of the way from on-demand to the best that can be.

100 is the exact optimum of the published model, which knows the future and loses nothing; 0 is on-demand from beginning
to end. A late run would void a row. The second table is of a fuller model (`tests/replays/fuller.py`): lost work,
starts that take long or fail, silent ends, traffic. The traces lie beside the repository (`SPOTD_SHARED_DATA`).

Run: python benchmarks/bench_policies.py [every Nth window of the first table] [of the second]
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from spotd.core.policies import POLICIES, Rule, shielded
from tests.replays.fuller import replay_fully
from tests.replays.replay import ReplayResult, replay
from tests.replays.traces import ABSENT, SCORES, Window, windows


def table(chosen: Sequence[Window], run: Callable[[Rule, Window, int], ReplayResult]) -> None:
    sets = sorted({window.set_name for window in chosen})
    print(f"{'policy':<24}" + "".join(f"{name:>22}" for name in sets) + f"{'late':>6} of {len(chosen)}")
    for policy in POLICIES:
        if policy in {"ceiling", "on-demand"}:
            continue
        gained, possible, late = defaultdict[str, float](float), defaultdict[str, float](float), 0
        for number, window in enumerate(chosen):
            result = run(partial(shielded, POLICIES[policy]), window, number)
            gained[window.set_name] += window.costs["on_demand"] - result.usd
            possible[window.set_name] += window.costs["on_demand"] - window.costs["offline_optimum"]
            late += result.is_late
        shares = "".join(f"{100 * gained[name] / possible[name]:>22.1f}" for name in sets)
        print(f"{policy:<24}{shares}{late:>6}", flush=True)


def main() -> None:
    if not SCORES.exists():
        print(ABSENT)
        return
    every, fully = (int(sys.argv[n]) if len(sys.argv) > n else default for n, default in ((1, 1), (2, 6)))
    print("the published model")
    table(windows()[::every], lambda rule, window, _: replay(rule, [window.zone], window.terms))
    print("a fuller model")
    table(windows()[::fully], lambda rule, window, seed: replay_fully(rule, [window.zone], window.terms, seed))


if __name__ == "__main__":
    main()
