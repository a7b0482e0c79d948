"""A real job on the fake EC2: bought on spot, warned two minutes ahead, saved, carried on by the next machine."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from spotd_providers.local.hosts import ScaledClock, read_ledger, segments, write_clock
from spotd_providers.testkit.serve import Served, serving
from tests.e2e.harness import Lab, lab, straight_sha256, training_folder, until
from tests.fakes.aws import ACCESS_KEY, Ec2Api, Ec2Cloud, FakeInstance, Phase, ticking
from tests.fakes.ledger_sums import most_at_once

pytestmark = pytest.mark.e2e
SCALE = 10.0
VIRTUAL0 = datetime(2026, 3, 2, 12, tzinfo=UTC)
SECRET = "secret-of-the-journey-5d1c"


@contextmanager
def install(folder: Path) -> Iterator[tuple[Lab, Ec2Cloud, Served]]:
    """A daemon whose only market is a fake EC2, both on one fast clock."""
    clock = ScaledClock(real0=time.time(), virtual0=VIRTUAL0, scale=SCALE)
    cloud = Ec2Cloud(folder / "cloud", clock=clock)
    cloud.stock_usual()
    with serving(Ec2Api(cloud)) as served, ticking(cloud):
        aws = f"""
[providers.aws]
enabled = true
api_key = {{ env = "JOURNEY_KEY" }}
endpoint_url = "{served.url}"
container = "none"
"""
        try:
            with lab(folder / "lab", hosts=aws, market="enabled = false", scale=SCALE, virtual0=VIRTUAL0) as found:
                write_clock(found.folder / "state" / "clock.json", clock)
                found.ledgers = [cloud.ledger_path]
                found.environment["JOURNEY_KEY"] = f"{ACCESS_KEY}:{SECRET}"
                found.start()
                yield found, cloud, served
        finally:
            cloud.shut_down()


def running(cloud: Ec2Cloud, *, but: str = "") -> FakeInstance | None:
    """A machine of ours whose job has begun to save."""
    for machine in list(cloud.instances.values()):
        home = cloud.machines.home(machine.instance_id)
        if machine.phase is Phase.RUNNING and machine.instance_id != but and any(home.glob("checkpoints/step-*")):
            return machine
    return None


@pytest.mark.lengthy
def test_a_notice_saves_the_job_and_the_next_machine_ends_it_with_the_same_bytes(tmp_path: Path) -> None:
    flags = "--steps 3000 --save-every 20"
    release = tmp_path / "release"
    code = training_folder(tmp_path)
    run = f"RELEASE={release} {sys.executable} slow_train.py {flags} --pace 0.02"
    with install(tmp_path) as (found, cloud, served):
        job = found.submit(
            "net", run, workdir=code, resources={"gpu": ["T4:1"], "disk": "10GB"}, checkpoint={"every": "10m"}
        )
        first = until(lambda: running(cloud), what="the job to run on the first machine")
        assert first.spot is not None
        assert first.pool == "g4dn.xlarge:us-east-1a"
        published = found.folder / "state" / "store" / "jobs" / job / "attempts" / "1" / "checkpoints"
        before = len(list(published.glob("*.json"))) if published.is_dir() else 0
        cloud.interrupt(first.instance_id)
        until(lambda: len(list(published.glob("*.json"))) > before, what="a save within the notice", within=30)
        assert first.phase is Phase.RUNNING
        second = until(lambda: running(cloud, but=first.instance_id), what="the job to run on the next machine")
        release.touch()
        found.wait_final(job)
        assert found.state(job) == "SUCCEEDED"
        assert found.delivered(job, "weights.sha256") == straight_sha256(tmp_path, flags)
        assert found.job(job)["recoveries"] == 1
        until(lambda: not any(m.phase.exists for m in cloud.instances.values()), what="every machine to be gone")
        assert len(cloud.instances) == 2
        assert second.reason is not None
        assert first.interrupted, first.reason
        # What was free is known only when a list of machines says who ended this one.
        until(lambda: found.receipts(job)[0]["attempts"][0]["free_usd"], what="the free time to be booked back")
        bought, (receipt,) = cloud.billed(first.instance_id), found.receipts(job)
        taken, last = receipt["attempts"]
        assert taken["free_usd"] > taken["spent_usd"] > 0, "in its first hour EC2 bills the disk of what it takes, only"
        assert taken["spent_usd"] * 1e6 == pytest.approx(bought, rel=0.2), "image, disk and address are in the quote"
        assert last["free_usd"] == 0
        assert receipt["spent_usd"] == pytest.approx(taken["spent_usd"] + last["spent_usd"])
        assert most_at_once(segments(read_ledger(cloud.ledger_path))) <= 2
        asked = "\n".join(request.url + request.body.decode("latin-1") for request in served.requests)
        assert SECRET not in asked
        written = [file for file in found.folder.rglob("*") if file.is_file() and file.stat().st_size < 5_000_000]
        assert not [file for file in written if SECRET.encode() in file.read_bytes()]
        print(json.dumps({"first": first.reason, "second": second.reason, "requests": len(served.requests)}))
