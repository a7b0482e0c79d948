"""How long a back-test takes: thirty days of 3,000 offers in minute steps, for one job, from the file to the advice.

Every offer fits the job, changes its price some ten times a day and is absent now and then: about 30,000 changes a day,
as recorded markets of that size have them. Bids, holds and moves are those of a config that states none. The peer in
the same run is the plain replay of `tests/unit/backtest/plain.py`, which builds the whole market anew and asks the core
at every minute; it plays a few hours of one run and is scaled to all minutes of all runs. `--profile` shows where the
time goes, in one process.

    python benchmarks/bench_backtest.py [--days 30] [--offers 3000] [--starts 40] [--processes 2]
"""

from __future__ import annotations

import argparse
import cProfile
import os
import resource
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[1]))

from spotd.backtest.playing import Question, cases_of, play, starts_over
from spotd.backtest.recorded import Assumptions
from spotd.backtest.replay import PlannedRun
from spotd.backtest.result import answered
from spotd.backtest.run import JobRun, policy_of, series_key
from spotd.backtest.traces import TraceDefaults, read_history
from spotd_jobs.spec.model import GpuAlternative, JobSpec, PriceLimit, Resources
from tests.unit.backtest import plain

BEGIN = datetime(2026, 10, 1, tzinfo=UTC)
CEILINGS = [PriceLimit(per_gpu_hour=amount) for amount in range(180_000, 360_001, 30_000)]
PLAIN_HOURS = 2
GOAL_S = 10
LEAST_RATIO = 10
"""What fails the run is the ratio to the plain replay: seconds are those of the machine."""


def write_market(file: Path, *, offers: int, days: float, seed: int = 1) -> int:
    """Write the market as CSV; return how many changes it has."""
    rng = Random(seed)
    rows: list[tuple[int, str]] = []
    for number in range(offers):
        usual, at = rng.uniform(0.22, 0.60), rng.randrange(60)
        while at < days * 86_400:
            price = round(usual * rng.lognormvariate(0, 0.2), 3)
            rows.append((at, f"vast,o{number},RTX 4090,1,{price},spot,{int(rng.random() > 0.15)}"))
            at += int(rng.expovariate(1 / 8_640)) + 60
    rows.sort()
    with file.open("w") as out:
        out.write("at,provider,offer,gpu,count,price,market,available\n")
        for at, row in rows:
            out.write(f"{BEGIN + timedelta(seconds=at):%Y-%m-%dT%H:%M:%SZ},{row}\n")
    return len(rows)


def job() -> JobSpec:
    return JobSpec(
        name="bench",
        run=("true",),
        image="scratch",
        resources=Resources(gpu=(GpuAlternative(name="RTX_4090", count=1),)),
    )


def nothing(_count: int) -> None:
    """Take no notice."""


def always(_gpu: str, _count: int) -> bool:
    return True


def cpu_s() -> float:
    """CPU seconds of this process and of those that it has waited for."""
    both = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in both)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=float, default=30)
    parser.add_argument("--offers", type=int, default=3_000)
    parser.add_argument("--starts", type=int, default=40)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    terms = Assumptions(work_s=24 * 3600, raise_bids=True, hold_max=timedelta(minutes=10), moves_max=2)
    with tempfile.TemporaryDirectory() as folder:
        changes = write_market(Path(folder) / "market.csv", offers=options.offers, days=options.days)

        def whole() -> object:
            return answered(
                job(), Path(folder), ceilings=CEILINGS, starts=options.starts, seed=1, terms=terms,
                defaults=TraceDefaults(), patience=1.5, policies=["ceiling"], progress=nothing,
                processes=1 if options.profile else options.processes,
            )  # fmt: skip

        if options.profile:
            cProfile.runctx("whole()", {}, {"whole": whole}, sort="tottime")
            return 0
        began, used = time.perf_counter(), cpu_s()
        whole()
        wall, used = time.perf_counter() - began, cpu_s() - used
        began_reading = time.process_time()
        recorded = read_history(Path(folder), always, TraceDefaults()).market
        reading = time.process_time() - began_reading
    cases = cases_of(CEILINGS, ["ceiling"])
    question = Question(
        spec=job(),
        recorded=recorded,
        cases=cases,
        starts=starts_over(recorded, terms, fastest=1_000_000, count=options.starts, seed=1),
        terms=terms,
    )
    outcomes = play(question, processes=options.processes, progress=nothing)
    minutes = sum(one.took_s for case in outcomes for one in case) // 60
    policy = policy_of(terms, recorded.providers)
    numbers = {series_key(offer): number for number, offer in enumerate(recorded.series)}
    start = question.starts[0]
    planned = PlannedRun(JobRun(question.spec_for(cases[0]), policy, terms, numbers, start), start, 0)
    began_plain = time.process_time()
    steps = plain.played(planned.run, recorded, start, 60, until=start + PLAIN_HOURS * 3600)
    by_minute = (time.process_time() - began_plain) / max(1, steps)
    runs = len(cases) * len(question.starts)
    python = sys.version.split()[0]
    print(f"{options.offers} offers, {options.days:g} days, {changes} changes, {runs} runs, Python {python}")
    print(f"all of it        {wall:6.1f} s with {options.processes} processes, {used:.1f} s of CPU")
    print(f"  of it reading  {reading:6.1f} s of CPU, in one process")
    print(f"  the runs       {(used - reading) / runs * 1000:6.1f} ms of CPU each, {minutes} minutes of market in all")
    print(f"plain replay     {by_minute * 1000:6.1f} ms of CPU a minute: {by_minute * minutes:.0f} s for the same runs")
    print(f"ratio            {by_minute * minutes / (used - reading):6.0f} x")
    undisturbed = reading + (used - reading) / options.processes
    met = undisturbed <= GOAL_S
    print(f"undisturbed      {undisturbed:6.1f} s: reading, and the runs on {options.processes} cores that are free")
    print(f"goal: below {GOAL_S} s: {'met' if met else 'MISSED'}")
    return 0 if by_minute * minutes >= LEAST_RATIO * (used - reading) else 1


if __name__ == "__main__":
    raise SystemExit(main())
