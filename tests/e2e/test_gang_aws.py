"""Two machines of one launch at a fake EC2 that train together, while EC2 takes back each of them in turn."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from spotd_providers.local.hosts import ScaledClock, write_clock
from spotd_providers.testkit.serve import Call, Faults, serving
from tests.e2e.clouds import AWS_SECRET, KIND, VIRTUAL0
from tests.e2e.gangs import saved_on_its_own, straight_sha256, submit_two
from tests.e2e.harness import Lab, lab, until
from tests.fakes.aws import ACCESS_KEY, ZONES, Ec2Api, Ec2Cloud, FakeInstance, Phase, classify
from tests.fakes.ticking import ticking

pytestmark = [pytest.mark.e2e, pytest.mark.lengthy, pytest.mark.timeout(900)]
SCALE = 20.0
CONFIG = """
[providers.aws]
enabled = true
api_key = {{ env = "AWS_KEY" }}
endpoint_url = "{url}"
container = "none"
"""


def running(aws: Ec2Cloud) -> list[FakeInstance]:
    """The machines that run, by rank."""
    found = [one for one in list(aws.instances.values()) if one.phase is Phase.RUNNING]
    return sorted(found, key=lambda one: one.launch_index)


RESOURCES = {"gpu": [f"{KIND.gpu}:1"], "disk": "10GB"}


@contextmanager
def ec2_and_daemon(folder: Path) -> Iterator[tuple[Ec2Cloud, Faults, Lab]]:
    """An EC2 of two zones, what may go wrong on the way to it, and a daemon that is to be started."""
    clock = ScaledClock(real0=time.time(), virtual0=VIRTUAL0, scale=SCALE)
    aws = Ec2Cloud(folder / "aws", clock=clock)
    aws.quirks.boot = timedelta(seconds=2)
    for zone in ZONES[:2]:
        aws.stock(KIND, zone, KIND.spot, since=VIRTUAL0)
    faults = Faults(Ec2Api(aws), classify=classify)
    try:
        with (
            serving(faults) as served,
            ticking(aws),
            lab(
                folder / "lab",
                hosts=CONFIG.format(url=served.url),
                market="enabled = false",
                scale=SCALE,
                virtual0=VIRTUAL0,
                poll_s=1.0,
            ) as found,
        ):
            write_clock(found.folder / "state" / "clock.json", clock)
            found.environment = {"AWS_KEY": f"{ACCESS_KEY}:{AWS_SECRET}"}
            found.ledgers = [aws.ledger_path]
            yield aws, faults, found
    finally:
        aws.shut_down()


def test_a_training_on_two_ec2_machines_outlives_the_loss_of_each_bit_by_bit(tmp_path: Path) -> None:
    expected = straight_sha256(tmp_path / "straight")
    with ec2_and_daemon(tmp_path) as (aws, _, found):
        found.start()
        job = submit_two(found, tmp_path, resources=RESOURCES)
        last = 0
        for rank, notice in ((1, True), (0, True), (1, False)):
            last = until(lambda: (n := saved_on_its_own(found, job)) > last and n, what="a save", within=240)  # noqa: B023 - called at once
            until(lambda: len(running(aws)) == 2, what="two machines", within=60)
            gang = running(aws)
            assert len({one.reservation for one in gang}) == 1
            aws.interrupt(gang[rank].instance_id, notice=notice)
            until(lambda: not any(one.phase.exists for one in gang), what="the end of both", within=240)  # noqa: B023 - called at once
        until(lambda: saved_on_its_own(found, job) > last, what="the job to go on", within=240)
        (tmp_path / "release").touch()
        found.wait_final(job, within=240)
        row = found.job(job)
        assert row["state"] == "SUCCEEDED", row
        assert found.delivered(job, "weights.sha256") == expected
        attempts = row["attempts"]
        assert {one["reason"] for one in attempts[:-1]} <= {"host_lost", "preempted"}
        assert all(one["resumed_from"] is not None for one in attempts[1:])
        until(lambda: not any(one.phase.exists for one in aws.instances.values()), what="the end")
        by_launch = {one.reservation for one in aws.instances.values()}
        assert len(aws.instances) == 2 * len(by_launch) == 2 * len(attempts), "a gang was bought twice or in part"
        assert len(aws.networks.placement_groups) <= 2
        # EC2 charges nothing for the one that it took, and spotd books both: never less than the bill.
        billed = sum(aws.billed(one) for one in list(aws.instances))
        booked = sum(one["spent_usd"] for receipt in found.receipts(job) for one in receipt["attempts"])
        print(f"{len(attempts)} attempts, billed ${billed / 1e6:.4f}, booked ${booked:.4f}")
        assert booked >= billed / 1e6 * 0.98
        found.stop()


def test_a_launch_whose_answer_is_lost_with_the_daemon_is_taken_in_and_not_bought_again(tmp_path: Path) -> None:
    with ec2_and_daemon(tmp_path) as (aws, faults, found):
        faults.hang(Call.LAUNCH)
        found.start()
        job = submit_two(found, tmp_path, resources=RESOURCES)
        until(lambda: len(running(aws)) == 2, what="the launch", within=120)
        found.kill()
        faults.clear()
        found.start()
        until(lambda: saved_on_its_own(found, job), what="a save", within=240)
        (tmp_path / "release").touch()
        found.wait_final(job, within=240)
        row = found.job(job)
        assert (row["state"], len(row["attempts"])) == ("SUCCEEDED", 1), row
        until(lambda: not any(one.phase.exists for one in aws.instances.values()), what="the end")
        assert len(aws.instances) == 2, "it was bought again"
        found.stop()
