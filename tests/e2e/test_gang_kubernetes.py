"""Two pods of one Job that train together in a cluster of three nodes, while each of them is taken away in turn."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from spotd_providers.local.hosts import ScaledClock, write_clock
from spotd_providers.testkit.serve import serving
from tests.e2e.gangs import saved_on_its_own, straight_sha256, submit_two
from tests.e2e.harness import lab, until
from tests.fakes.kubernetes import KubeApi, KubeCloud
from tests.fakes.kubernetes.objects import Document, rank_of
from tests.fakes.ticking import ticking

pytestmark = [pytest.mark.e2e, pytest.mark.lengthy, pytest.mark.timeout(900)]
SCALE = 20.0
VIRTUAL0 = datetime(2026, 3, 2, 12, tzinfo=UTC)
TOKEN = "token-of-kubernetes-canary-4c1b"
PRICE = 0.20


def running_pods(kube: KubeCloud) -> list[Document]:
    with kube.lock:
        return [pod for pod in kube.objects["pods"].rows.values() if pod["status"]["phase"] in ("Pending", "Running")]


def test_a_training_on_two_pods_outlives_the_loss_of_each_bit_by_bit(tmp_path: Path) -> None:
    expected = straight_sha256(tmp_path / "straight")
    clock = ScaledClock(real0=time.time(), virtual0=VIRTUAL0, scale=SCALE)
    kube = KubeCloud(tmp_path / "kube", clock=clock)
    kube.tokens[TOKEN] = "spotd"
    for name in ("n1", "n2", "n3"):
        kube.add_node(name, gpus=1, product="NVIDIA-GeForce-RTX-4090")
    try:
        with serving(KubeApi(kube)) as served, ticking(kube):
            config = (
                f'[providers.kubernetes]\nbase_url = "{served.url}"\napi_key = {{ env = "KUBE_TOKEN" }}\n'
                f'prices = [{{ gpu = "RTX_4090", price = "{PRICE}" }}]\n'
            )
            with lab(
                tmp_path / "lab", hosts=config, daemon='silence_limit = "8m"', market="enabled = false",
                scale=SCALE, virtual0=VIRTUAL0, poll_s=1.5,
            ) as found:  # fmt: skip
                write_clock(found.folder / "state" / "clock.json", clock)
                found.environment = {"KUBE_TOKEN": TOKEN}
                found.ledgers = []  # a cluster sends no bill
                found.start()
                job = submit_two(found, tmp_path)
                last, keys = 0, set()
                for rank in (1, 0):
                    last = until(lambda: (n := saved_on_its_own(found, job)) > last and n, what="a save", within=240)  # noqa: B023 - called at once
                    with kube.lock:
                        running = running_pods(kube)
                        keys |= {one["metadata"]["annotations"]["spotd.dev/key"] for one in running}
                        assert sorted(map(rank_of, running)) == [0, 1]
                        kube.evict(next(one for one in running if rank_of(one) == rank), "PreemptionByScheduler")
                until(lambda: saved_on_its_own(found, job) > last, what="the job to go on", within=240)
                (tmp_path / "release").touch()
                found.wait_final(job, within=240)
                row = found.job(job)
                assert row["state"] == "SUCCEEDED", row
                assert found.delivered(job, "weights.sha256") == expected
                attempts = row["attempts"]
                assert {one["reason"] for one in attempts[:-1]} <= {"host_lost", "preempted"}
                assert all(one["resumed_from"] is not None for one in attempts[1:])
                booked = [one for receipt in found.receipts(job) for one in receipt["attempts"]]
                assert {(one["gpu_count"], one["effective_usd_h"]) for one in booked} == {(2, 2 * PRICE)}
                assert len(keys) == 2, "an attempt got another pod"
                until(lambda: not running_pods(kube), what="the end of all")  # a Job that is over is kept for an hour
                found.stop()  # there is no bill that its receipts could be held against
    finally:
        kube.shut_down()
