"""CPU time of the answers of a state with 10,000 ended jobs and a million charges: python benchmarks/bench_state.py."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from spotd.api.handlers.context import find_job
from spotd.api.handlers.receipts import RECEIPTS_MAX, _receipts
from spotd.core.domain.attempts import Attempt, MachineState
from spotd.core.domain.intents import AttemptId, Charge, JobId
from spotd.core.domain.jobs import Job
from spotd.core.domain.plan import Event, Plan
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.store import Reads, Store, Tx
from spotd_providers.contract.values import AttemptKey, MicroUsd
from tests.unit.core.builders import SHOP, job, shop_policy, world_with

NOW = datetime(2026, 11, 22, tzinfo=UTC)
ATTEMPTS = 4


def fill(store: Store, jobs: int, charges: int) -> None:
    """Ended jobs of a year, each with a few attempts and its share of the charges."""
    per_attempt = max(1, charges // (jobs * ATTEMPTS))
    for first in range(0, jobs, 500):
        plan = [_ended(number, per_attempt) for number in range(first, min(jobs, first + 500))]
        made = Plan(
            jobs={one.id: one for one, _, _ in plan},
            attempts={a.id: a for _, attempts, _ in plan for a in attempts},
            charges=tuple(c for _, _, charged in plan for c in charged),
            events=tuple(
                Event(at=NOW, kind="x", message="", job=a.id.job, attempt=a.id.number)
                for _, attempts, _ in plan
                for a in attempts
            ),
        )
        store.tx(partial(_commit, plan=made))


def _commit(tx: Tx, *, plan: Plan) -> None:
    tx.commit(plan)


def _ended(number: int, charges: int) -> tuple[Job, list[Attempt], list[Charge]]:
    began = NOW - timedelta(days=364) + timedelta(minutes=number * 50)
    name = JobId(f"j{number:09d}")
    attempts: list[Attempt] = []
    charged: list[Charge] = []
    for nth in range(1, ATTEMPTS + 1):
        identity = AttemptId(job=name, number=nth)
        base = next(iter(world_with(AttemptState.ENDING).attempts.values()))
        key = AttemptKey(f"spotd-lab-{name}-{nth}")
        attempts.append(
            replace(
                base,
                id=identity,
                key=key,
                state=AttemptState.ENDED,
                machine=MachineState.GONE,
                end_reason=EndReason.PREEMPTED,
                meter=replace(base.meter, settled=MicroUsd(charges * 10), since=None),
            )
        )
        for n in range(charges):
            at = began + timedelta(hours=nth, seconds=n * 20)
            end = at if (at + timedelta(seconds=20)).date() != at.date() else at + timedelta(seconds=20)
            charged.append(
                Charge(
                    attempt=identity,
                    provider=SHOP,
                    day=at.date(),
                    start=at,
                    end=end,
                    amount=MicroUsd(10),
                    on_demand=MicroUsd(30),
                )
            )
    done = replace(
        job(1),
        id=name,
        name=f"job{number}",
        submitted_at=began,
        state=JobState.SUCCEEDED,
        attempts_made=ATTEMPTS,
        ended_at=began,
        spent=MicroUsd(ATTEMPTS * charges * 10),
    )
    return done, attempts, charged


def receipts(reads: Reads) -> object:
    return _receipts(reads, reads.ended_jobs(limit=RECEIPTS_MAX), NOW), reads.totals(), reads.strays()


QUESTIONS: dict[str, Callable[[Reads], object]] = {
    "cost of everything": receipts,
    "cost of one job": lambda r: _receipts(r, [v for v in [r.job_view(JobId("j000000017"))] if v], NOW),
    "list of 100 jobs": lambda r: r.ended_jobs(limit=101),
    "counts": lambda r: r.counts_by_state(),
    "the world": lambda r: r.world(shop_policy(), NOW),
    "newest events": lambda r: r.newest_events(),
    "find by name": lambda r: find_job(r, "job17"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--charges", type=int, default=1_000_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.sqlite"
        with Store.open(path) as store:
            fill(store, options.jobs, options.charges)
        print(f"{options.jobs} ended jobs, {options.charges} charges, {path.stat().st_size / 1e6:.0f} MB")
        for name, question in QUESTIONS.items():
            took = []
            for _ in range(3):
                with Store.open(path) as store:  # a new one each time, which remembers nothing
                    began = time.process_time()
                    store.read(question)
                    took.append(time.process_time() - began)
            print(f"{name:<22}{statistics.median(took) * 1000:9.1f} ms CPU, at most {max(took) * 1000:.1f} ms")


if __name__ == "__main__":
    main()
