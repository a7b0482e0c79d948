"""Four jobs are carried through recorded days of nine zones, at the prices and preemptions of those days."""

from __future__ import annotations

import gzip
import json
import os
import sys
from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tests.e2e.harness import BUSY_S, REPO, Lab, assert_books_are_clean, lab, straight_sha256, training_folder, until

pytestmark = pytest.mark.e2e
TRACES = Path(os.environ.get("SPOTD_SHARED_DATA", REPO.parent / "shared" / "data")) / "traces" / "aws-2023-v100-9zone"
SCALE = 12_000.0
POLL_S = 0.25
"""The lab's poll interval on the wall; on the market's clock it is fifty minutes."""
ARRIVALS = 3 / 14
"""The part of the time after which the next job comes."""
STEPS_A_DAY = 86
"""So many steps that even on a fast machine the last job cannot end before the recorded time does."""
PACE_S = 0.03


def zones() -> list[Path]:
    return sorted(TRACES.glob("*_v100_1.json.gz"))


def recorded_start(trace: Path) -> datetime:
    metadata = json.loads(gzip.decompress(trace.read_bytes()))["metadata"]
    return datetime.fromisoformat(metadata["start_time_utc"])


def zone_host(trace: Path) -> str:
    """One machine at a time in each zone, which is what the recording knows."""
    name = trace.name.removesuffix("_v100_1.json.gz")
    return f"""
[[providers.local.hosts]]
name = "{name}"
gpu = "V100_16"
region = "{name[:-1]}"
flavour = "notice"
on_demand = 3.06
spot = {{ kind = "trace", path = "{trace}" }}
"""


def flags_of(number: int, span: timedelta) -> str:
    return f"--steps {span.days * STEPS_A_DAY} --seed {number} --save-every 10"


def _wait_for(found: Lab, due: datetime) -> None:
    until(lambda: found.now() >= due, what="the next job's day", every=0.1)


def all_bills_are_read(found: Lab) -> bool:
    """The market's bills are final when a machine ends, and read within seconds at this pace."""
    lines = [line for receipt in found.api.cost(None)["receipts"] for line in receipt["attempts"]]
    return all(line["billed_usd"] is not None for line in lines if line["seconds"])


@pytest.mark.timeout(600)  # two weeks take two minutes on two free cores; a busy machine stretches every restart
@pytest.mark.skipif(not zones(), reason=f"the recorded traces are not here: {TRACES} (set SPOTD_SHARED_DATA)")
@pytest.mark.parametrize(
    ("span", "preemptions"),
    [
        # Four to seven were seen: which losses meet a job depends on the seconds in which it begins.
        pytest.param(timedelta(days=4), 3, marks=pytest.mark.lengthy),
        pytest.param(timedelta(days=14), 20, marks=pytest.mark.slow),
    ],
    ids=["four days", "two weeks"],
)
def test_four_jobs_live_through_recorded_days_of_nine_zones(tmp_path: Path, span: timedelta, preemptions: int) -> None:
    assert len(zones()) == 9
    code = training_folder(tmp_path)
    with lab(
        tmp_path / "lab",
        hosts="".join(zone_host(trace) for trace in zones()),
        scale=SCALE,
        virtual0=recorded_start(zones()[0]),
    ) as found:
        found.start()
        opened = found.now()
        jobs: dict[int, str] = {}
        for number in range(4):
            _wait_for(found, opened + number * ARRIVALS * span)
            jobs[number] = found.submit(
                f"net-{number}",
                f"{sys.executable} train.py {flags_of(number, span)} --pace {PACE_S}",
                workdir=code,
                resources={"gpu": ["V100_16:1"], "disk": "10GB"},
                price={"max_price": 2.0},
                checkpoint={"every": "1h", "settle": "1h", "stop_grace": "90s"},
            )
        found.wait_final(*jobs.values(), within=400)
        took = found.now() - opened
        until(lambda: not found.open_machines(), what="every machine to be gone")
        states = {number: found.state(job) for number, job in jobs.items()}
        assert set(states.values()) == {"SUCCEEDED"}, states
        reasons = Counter(
            line["reason"] for receipt in found.api.cost(None)["receipts"] for line in receipt["attempts"]
        )
        machines = len({span.machine_id for span in found.ledger()})
        print(f"{took.days} days, {machines} machines, attempts ended by {dict(reasons)}")
        until(lambda: all_bills_are_read(found), what="the bill of every machine", within=60)
        for number, job in jobs.items():
            assert found.delivered(job, "weights.sha256") == straight_sha256(tmp_path, flags_of(number, span))
        assert_books_are_clean(found, reconcile_s=(POLL_S + BUSY_S) * SCALE)
        assert reasons["preempted"] >= preemptions
        assert took >= span
