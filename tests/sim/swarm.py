"""Many worlds, each drawn from its seed alone, on all processors; what was run is written down and not run again.

    python -m tests.sim.swarm --days 2000 --jobs 2 --record swarm.jsonl

A seed that broke a rule is printed with the command that replays it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import replace
from datetime import timedelta
from itertools import count
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

from tests.sim.gangs import GANGS_FROM, RANGES_FROM, with_gangs
from tests.sim.harsh import HARSH_FROM, harsh
from tests.sim.hazards import ALONE, LATER, PLANNED, READY, Hazard
from tests.sim.late import LATE_FROM, with_late_causes
from tests.sim.oracles import broken_rules
from tests.sim.own import OWN_FROM, with_own
from tests.sim.plans import with_plans
from tests.sim.run import run_world
from tests.sim.unfit import UNFIT_FROM, with_unfit
from tests.sim.worlds import GPU_COUNTS, Shape

RULES_SHOWN = 5
LINE = 300
UNREACHABLE = frozenset(
    {
        Hazard.SILENCE,
        Hazard.ONE_SIDED,
        Hazard.DEAD_ACCOUNT,
        Hazard.LOST_AND_AWAY,
        Hazard.SLEEP,
        Hazard.LISTS,
        Hazard.ROWS,
        Hazard.RETRY_AFTER,
        Hazard.BORN_LONG_AGO,
        Hazard.NUMBERS,
        Hazard.CLOCK_STEPS,
        Hazard.FULL_DISK,
        Hazard.TWIN,
        Hazard.RESTORED,
        Hazard.REVOKED,
        Hazard.READ_ONLY,
    }
)
"""With one of these a machine may be out of reach, so that no budget can be promised."""
ALONE_FROM = 200
PLANNED_FROM = 50_000
"""Worlds of smaller seeds were there before these hazards, and stay as they were."""
REUSE_FROM = 3_000_000
"""The first seed of worlds in which machines pass from job to job."""
QUEUES_FROM = 3_001_000
"""From this one on all jobs of such a world come within an hour or two, and wait for one or two machines."""
BASES = (PLANNED_FROM, HARSH_FROM, OWN_FROM, REUSE_FROM, QUEUES_FROM, GANGS_FROM)
"""Worlds of these seeds are played with canaries, too."""
LATE_BASES = (*BASES, RANGES_FROM, UNFIT_FROM)
"""And these with late causes."""
OFTEN = frozenset({Hazard.BIDS, Hazard.MOVES})
"""What the market must suit besides to happen."""


def drawn(seed: int, ready: frozenset[Hazard] = READY) -> Shape:
    """The world of this seed: its size, its character, and which hazards it holds."""
    if seed >= LATE_FROM:
        number = seed - LATE_FROM
        return with_late_causes(drawn(LATE_BASES[number % len(LATE_BASES)] + number // len(LATE_BASES)), seed)
    if seed >= UNFIT_FROM:
        return with_unfit(drawn(BASES[seed % len(BASES)] + (seed - UNFIT_FROM) // len(BASES)), seed)
    if seed >= RANGES_FROM:
        number = seed - RANGES_FROM
        bases = (_short(seed), harsh(seed), with_own(_short(seed), seed), with_reuse(REUSE_FROM + number))
        return with_gangs(bases[number % len(bases)], seed)
    if seed >= GANGS_FROM:
        return with_gangs(_short(seed), seed)
    if seed >= OWN_FROM:
        return with_own(harsh(seed) if Random(f"base of {seed}").random() < 0.5 else _short(seed), seed)
    if seed >= REUSE_FROM:
        return with_reuse(seed)
    if seed >= HARSH_FROM:
        return harsh(seed)
    shape = _drawn(seed, ready - PLANNED)
    planned = (h for h in sorted(ready & PLANNED) if Random(f"{h} in {seed}").random() < (0.5 if h in OFTEN else 0.3))
    return with_plans(shape, frozenset(planned), seed) if seed >= PLANNED_FROM else shape


def _short(seed: int) -> Shape:
    """A world of all hazards that are drawn without deceptions, of a few hours."""
    shape = _drawn(seed, READY - PLANNED)
    planned = frozenset(h for h in sorted(PLANNED) if Random(f"{h} in {seed}").random() < 0.3)
    need = (60, 400) if shape.need[1] > 400 else shape.need
    short = replace(shape, storm=min(shape.storm, timedelta(hours=8)), need=need, paces=(60, 120))
    return with_plans(short, planned, seed)


def with_reuse(seed: int) -> Shape:
    """A world of another seed in which machines pass from job to job, mostly with few machines for more jobs."""
    luck = Random(f"reuse in {seed}")
    number = seed - REUSE_FROM
    shape = drawn(HARSH_FROM + number) if number % 4 == 3 else drawn(PLANNED_FROM + number)
    limits = {**shape.limits, "reuse_wait": timedelta(minutes=luck.choice([1, 5, 15, 15]))}
    hazards = shape.hazards | {Hazard.REUSE}
    if seed >= QUEUES_FROM:
        limits["machines_max"] = luck.randint(1, 2)
        storm = timedelta(hours=luck.choice([1, 2]))
        return replace(shape, hazards=hazards, limits=limits, jobs=luck.randint(6, 10), storm=storm, need=(5, 40))
    if luck.random() < 0.7:
        limits.setdefault("machines_max", luck.randint(1, 3))
    return replace(
        shape,
        hazards=hazards,
        limits=limits,
        jobs=luck.randint(6, 14),
        storm=min(shape.storm, timedelta(hours=luck.choice([6, 12, 24]))),
        need=luck.choice([(5, 40), (10, 120), (20, 300)]),
    )


def _drawn(seed: int, ready: frozenset[Hazard]) -> Shape:
    luck = Random(f"shape of {seed}")
    later = Random(f"later hazards of {seed}")
    days = luck.choice([0.25, 0.25, 0.5, 1, 3, 10])
    jobs = luck.randint(2, 8) if days < 1 else luck.randint(1, 4)
    shape = Shape(
        jobs=jobs,
        hosts=luck.randint(3, 6),
        storm=timedelta(days=days),
        crash_rate=luck.choice([0.0, 0.002, 0.02]),
        kills_per_hour=luck.choice([0.0, 0.02, 0.1]),
        outages_per_hour=luck.choice([0.0, 0.02, 0.1, 0.3]),
        faults=luck.random() < 0.9,
        user=luck.random() < 0.7,
        need=luck.choice([(20, 400), (20, 400), (600, 3000)]) if days < 10 else (1000, 6000),
        paces=(30, 60, 120) if days < 1 else (120, 240, 480),
        hazards=frozenset(h for h in sorted(ready - LATER - ALONE) if luck.random() < 0.2)
        | frozenset(h for h in sorted(ready & LATER) if later.random() < 0.2)
        | frozenset(h for h in sorted(ready & ALONE) if seed >= ALONE_FROM and Random(f"{h} in {seed}").random() < 0.2),
    )
    if Hazard.GPUS in shape.hazards:
        shape = replace(shape, hosts=max(len(GPU_COUNTS) + 1, shape.hosts))
    if not shape.hazards & UNREACHABLE and luck.random() < 0.3:
        return budgeted(shape, luck)
    if luck.random() < 0.2:
        return replace(shape, limits={"machines_max": luck.randint(1, 3)})
    return shape


def budgeted(shape: Shape, luck: Random) -> Shape:
    reachable = replace(shape, outages_per_hour=0.0, reachable=True)
    match luck.choice(["day", "month", "job", "none"]):
        case "day":
            return replace(reachable, user=False, limits={"budget_day": luck.randint(2, 9) * 1_000_000})
        case "month":
            return replace(reachable, user=False, limits={"budget_month": luck.randint(20, 60) * 1_000_000})
        case "job":
            return replace(reachable, job_budget=luck.randint(5, 40) * 100_000)
        case _:
            return reachable


def one_world(seed: int) -> dict[str, Any]:
    """What there is to say of the world of this seed."""
    begun = monotonic()
    shape = drawn(seed)
    result = run_world(seed, shape)
    events = result.daemon.told.events
    return {
        "seed": seed,
        "days": round(result.days, 3),
        "seconds": round(monotonic() - begun, 2),
        "hazards": sorted(shape.hazards),
        "crashes": result.crashes,
        "launches": sum(len(c.launch_calls) for c in result.clouds),
        "machines": sum(len(c.machines) for c in result.clouds),
        "events": len(events),
        "broken": broken_rules(result),
    }


def read_record(path: Path | None) -> list[dict[str, Any]]:
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def run_all(days: float, jobs: int, first: int, record: Path | None) -> Iterator[dict[str, Any]]:
    """Worlds until so many days have been simulated, those on record included."""
    known = read_record(record)
    done = sum(world["days"] for world in known)
    seen = {world["seed"] for world in known}
    yield from known
    seeds = (seed for seed in count(first) if seed not in seen)
    with ProcessPoolExecutor(jobs) as pool:
        running: set[Future[dict[str, Any]]] = set()
        while done < days or running:
            while done < days and len(running) < jobs + 1:
                running.add(pool.submit(one_world, next(seeds)))
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                world = future.result()
                done += world["days"]
                if record is not None:
                    with record.open("a", encoding="utf-8") as lines:
                        lines.write(json.dumps(world) + "\n")
                yield world


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="simulate many days of spotd in worlds drawn from seeds")
    parser.add_argument("--days", type=float, default=2000.0)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--record", type=Path, help="a file of what was run; a second call goes on where it ends")
    options = parser.parse_args(arguments)
    begun = monotonic()
    days = seconds = 0.0
    worlds = broken = crashes = machines = launches = 0
    low, high = sys.maxsize, -1
    for world in run_all(options.days, options.jobs, options.first, options.record):
        worlds += 1
        days += world["days"]
        seconds += world["seconds"]
        crashes += world["crashes"]
        machines += world["machines"]
        launches += world["launches"]
        low, high = min(low, world["seed"]), max(high, world["seed"])
        if world["broken"]:
            broken += 1
            print(f"seed {world['seed']} ({', '.join(world['hazards'])}): python -m tests.sim.run {world['seed']}")
            for rule in world["broken"][:RULES_SHOWN]:
                print(f"    {rule[:LINE]}")
        if worlds % 50 == 0:
            print(f"... {worlds} worlds, {days:.0f} days, {broken} with a broken rule", flush=True)
    print(
        f"{days:.1f} simulated days in {worlds} worlds (seeds {low} to {high}), {launches} launches, "
        f"{machines} machines, {crashes} crashes, {broken} worlds with a broken rule; "
        f"{days / max(seconds, 0.001):.2f} days per second of one process, {monotonic() - begun:.0f} s in this call"
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
