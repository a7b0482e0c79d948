"""One job across five markets: it loses its machine in each, ends where it began, and has the bytes of a calm run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from spotd_jobs.objects.s3 import S3Store
from spotd_providers.local.hosts import Segment
from spotd_providers.testkit.serve import Call
from tests.e2e.clouds import (
    ASK,
    GPUS_OF_FIVE,
    POOLS,
    VERDA_KIND,
    FiveClouds,
    assert_one_machine_at_a_time,
    five_clouds,
    newest_complete,
)
from tests.e2e.harness import (
    LEAVES_AT_ONCE,
    assert_receipts_agree,
    straight_sha256,
    training_folder,
    until,
)
from tests.e2e.test_bucket import store_keys, store_section
from tests.fakes.rest import RestRefusal
from tests.fakes.seaweed import Weed
from tests.fakes.vastai import Ask

pytestmark = pytest.mark.e2e
FLAGS = "--steps 800 --save-every 20"
NO_ROOM = RestRefusal(503, "The zone does not have enough resources available", code="UNSUPPORTED_OPERATION")
"""Google lists what it has not, and says so at the launch."""
BY_PRICE = ("vast", "aws", "gcp", "runpod", "verda")


def machine_at_work(found: FiveClouds, job: str, provider: str, *, after: int) -> tuple[int, Segment]:
    """The attempt of the job at this provider and its machine, once a checkpoint of this very attempt was accepted."""

    def saved() -> int | None:
        row = found.lab.job(job)
        attempt = int(row["attempts"][-1]["attempt"]) if row["attempts"] else 0
        if (row["state"], row["provider"]) != ("RUNNING", provider) or attempt <= after:
            return None
        kept = found.lab.api.checkpoints(job)["checkpoints"]
        return attempt if any(one["attempt"] == attempt for one in kept) else None

    attempt = until(saved, what=f"a checkpoint of an attempt after {after} at {provider}", within=120, every=0.1)
    assert attempt is not None
    (machine,) = (
        span
        for span in found.spending()[provider]
        if span.end is None and span.compute and span.key.endswith(f"{job}-{attempt}")
    )
    return attempt, machine


def take(found: FiveClouds, provider: str, machine_id: str) -> None:
    """The machine is taken without a warning, and its market has nothing more that the job may pay for."""
    match provider:
        case "vast":
            found.vast.set_min_bid(ASK, 5.0)
        case "aws":
            found.aws.interrupt(machine_id, notice=False)
            for pool in POOLS:
                found.aws.set_price(pool, "0.50")
        case "gcp":
            found.gcp.quirks.refusals[Call.LAUNCH] = NO_ROOM
            found.gcp.preempt(machine_id)
        case "runpod":
            found.runpod.lose_host(machine_id)
            found.runpod.sell_out("NVIDIA GeForce RTX 4090")
        case _:
            found.verda.preempt(machine_id)
            found.verda.sell_out(VERDA_KIND.name)


@pytest.mark.timeout(600)  # a minute on two free cores; a busy machine stretches every restart
def test_a_job_loses_its_machine_in_each_of_five_clouds_and_ends_with_the_same_bytes(
    weed: Weed, tmp_path: Path
) -> None:
    release = tmp_path / "release"
    run = f"RELEASE={release} {sys.executable} slow_train.py {FLAGS} --pace 0.1"
    more = LEAVES_AT_ONCE + store_section(weed, tmp_path.name)
    with five_clouds(tmp_path, more=more, environment=store_keys(weed)) as found:
        found.lab.start()
        job = found.lab.submit(
            "net",
            run,
            workdir=training_folder(tmp_path),
            image="python:3.12-slim",
            resources={"gpu": GPUS_OF_FIVE, "disk": "10GB", "market": "auto"},
            price={"max_price": 0.39},
        )
        store = S3Store(weed.place(f"{tmp_path.name}/"))
        attempt = 0
        left: list[tuple[int, str | None]] = []
        for provider in BY_PRICE:
            attempt, machine = machine_at_work(found, job, provider, after=attempt)
            take(found, provider, machine.machine_id)
            left.append((attempt, newest_complete(store, job)))
        found.vast.stock(Ask(ask_id=ASK + 1, machine_id=18_002, dph_base=0.40, min_bid=0.11))
        machine_at_work(found, job, "vast", after=attempt)
        release.touch()
        found.lab.wait_final(job)

        row = found.lab.job(job)
        assert row["state"] == "SUCCEEDED", row
        assert found.lab.delivered(job, "weights.sha256") == straight_sha256(tmp_path, FLAGS)
        ran = [one for one in row["attempts"] if one["running_at"] is not None]
        assert [one["provider"] for one in ran] == [*BY_PRICE, "vast"], row["attempts"]
        assert [one["attempt"] for one in ran[:-1]] == [number for number, _ in left]
        assert [one["resumed_from"] for one in ran] == [None, *(name for _, name in left)]
        assert all(name is not None for _, name in left)
        until(lambda: not found.left(), what="every machine and every disk to be gone")
        order, going = [*BY_PRICE, "vast"], {"gcp": found.gcp.quirks.ending}  # its process is gone at once
        assert_one_machine_at_a_time(found.spending(), order, may_outlive=going)
        assert_receipts_agree(found.lab)
