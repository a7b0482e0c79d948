"""A cluster of RunPod's that trains while each of its two machines is lost in turn, and the daemon once besides."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from spotd_providers.local.hosts import ScaledClock, write_clock
from spotd_providers.testkit.serve import serving
from tests.e2e.gangs import saved_on_its_own, straight_sha256, submit_two
from tests.e2e.harness import lab, until
from tests.fakes.runpod import Gpu, RunpodApi, RunpodCloud
from tests.fakes.runpod.clusters import Cluster
from tests.fakes.ticking import ticking

pytestmark = [pytest.mark.e2e, pytest.mark.lengthy, pytest.mark.timeout(900)]
SCALE = 20.0
VIRTUAL0 = datetime(2026, 3, 2, 12, tzinfo=UTC)
KEY = "key-of-runpod-canary-c05e"
PRICE = 0.45
CONFIG = """
[providers.runpod]
base_url = "{url}"
api_key = {{ env = "RUNPOD_KEY" }}
gpu_counts = [1]
cluster_gpu_counts = [1]
community = false
"""


def running(cloud: RunpodCloud) -> Cluster:
    """The one cluster that there is."""
    (found,) = cloud.clusters.visible()
    return found


def test_a_training_on_a_cluster_outlives_the_loss_of_each_machine_bit_by_bit(tmp_path: Path) -> None:
    expected = straight_sha256(tmp_path / "straight")
    clock = ScaledClock(real0=time.time(), virtual0=VIRTUAL0, scale=SCALE)
    cloud = RunpodCloud(tmp_path / "runpod", clock=clock, api_key=KEY)
    cloud.stock(Gpu(gpu_id="NVIDIA GeForce RTX 4090", name="4090", memory=24, secure_price=0.3, cluster_price=PRICE))
    try:
        with (
            serving(RunpodApi(cloud)) as served,
            ticking(cloud),
            lab(
                tmp_path / "lab", hosts=CONFIG.format(url=served.url), daemon='silence_limit = "8m"',
                market="enabled = false", scale=SCALE, virtual0=VIRTUAL0, poll_s=1.5,
            ) as found,
        ):  # fmt: skip
            write_clock(found.folder / "state" / "clock.json", clock)
            found.environment = {"RUNPOD_KEY": KEY}
            found.ledgers = [cloud.ledger_path]
            found.start()
            job = submit_two(found, tmp_path)
            last = 0
            for rank in (1, 0):
                last = until(lambda: (n := saved_on_its_own(found, job)) > last and n, what="a save", within=240)  # noqa: B023 - called at once
                found.kill()
                found.start()
                cloud.lose_host(running(cloud).pods[rank].pod_id)
            until(lambda: saved_on_its_own(found, job) > last, what="the job to go on", within=240)
            (tmp_path / "release").touch()
            found.wait_final(job, within=240)
            row = found.job(job)
            assert row["state"] == "SUCCEEDED", row
            assert found.delivered(job, "weights.sha256") == expected
            attempts = row["attempts"]
            assert {one["reason"] for one in attempts[:-1]} == {"host_lost"}
            assert all(one["resumed_from"] is not None for one in attempts[1:])
            booked = [one for receipt in found.receipts(job) for one in receipt["attempts"]]
            assert {one["gpu_count"] for one in booked} == {2}
            assert all(2 * PRICE <= one["effective_usd_h"] <= 2 * PRICE + 0.02 for one in booked)
            until(lambda: not cloud.clusters.visible(), what="the end of the last cluster")
            until(lambda: not any(pod.exists for pod in cloud.pods.values()), what="the end of all pods")
            sent = [(one.method, one.path.rpartition("/")[0]) for one in served.requests if one.method != "GET"]
            assert sent.count(("POST", "/v2")) == len(attempts)
            assert {path for method, path in sent if method == "DELETE" and path != "/v2/clusters"} == set()
            found.stop()  # its network is on no receipt before the bill is read, hours later
    finally:
        cloud.shut_down()
