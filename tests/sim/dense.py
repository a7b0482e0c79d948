"""Many short worlds with many faults each, one after the other in one process: more is found in a second than by days.

    python -m tests.sim.dense --worlds 200 --first 1000000

Each broken rule is counted, with the seeds that broke it, and an example.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from datetime import timedelta
from time import monotonic, process_time

from tests.sim.harsh import HARSH_FROM
from tests.sim.oracles import broken_rules
from tests.sim.run import run_world
from tests.sim.swarm import drawn

SEEDS_SHOWN = 8
LINE = 330


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="simulate many short worlds in which much goes wrong")
    parser.add_argument("--worlds", type=int, default=100)
    parser.add_argument("--first", type=int, default=HARSH_FROM, help="the first seed")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so many seconds")
    options = parser.parse_args(arguments)
    begun, used = monotonic(), process_time()
    seeds: defaultdict[str, list[int]] = defaultdict(list)
    examples: dict[str, str] = {}
    days, count, bad = timedelta(0), 0, 0
    for seed in range(options.first, options.first + options.worlds):
        if monotonic() - begun > options.seconds:
            break
        result = run_world(seed, drawn(seed))
        days += result.ended_at - result.begun_at
        broken = broken_rules(result)
        count += 1
        bad += bool(broken)
        for rule in broken:
            name = rule.partition(":")[0]
            examples.setdefault(name, f"{seed}: {rule}")
            if seed not in seeds[name]:
                seeds[name].append(seed)
    for name, of_rule in sorted(seeds.items(), key=lambda kv: -len(kv[1])):
        print(f"{len(of_rule):4} worlds break {name}: {of_rule[:SEEDS_SHOWN]}")
        print(f"     {examples[name][:LINE]}")
    span = days / timedelta(days=1)
    last, pace = options.first + count - 1, span / max(process_time() - used, 0.001)
    print(
        f"{count} worlds (seeds {options.first} to {last}), {span:.1f} simulated days, {bad} worlds broke a rule; "
        f"{monotonic() - begun:.0f} s, {pace:.2f} days per CPU second"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
