"""Jobs of two nodes on a real cluster of three: what each node runs, what Slurm takes away, and a training over it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from spotd.core.domain.market import gang_of
from spotd_providers.contract.errors import NoCapacity
from spotd_providers.contract.values import InstanceState, LaunchRequest, Loss, OfferQuery
from spotd_providers.slurm.plugin import SlurmProvider
from tests.e2e.gangs import saved_on_its_own, straight_sha256, submit_two
from tests.e2e.harness import lab, until
from tests.system.engines.slurm import GRACE_S, PATH, Slurm, running_slurm
from tests.system.test_slurm import ask_for, is_gone, is_running, listed, number_of, play

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]
PLACES = """#!/bin/sh
echo "0000000001 000600" >machine-lease
exec python3 -c '
import os, signal, time
rank = os.environ["SPOTD_NODE_RANK"]
def note(name, text):
    with open(f"../{name}.new.{rank}", "w") as file: file.write(text)
    os.rename(f"../{name}.new.{rank}", f"../{name}.{rank}")
signalled = []
def notice(*_):
    signalled.append(time.time())
    note("signal", str(signalled[0]))
signal.signal(signal.SIGTERM, notice)
wanted = ("SPOTD_NODE", "SLURMD_NODENAME", "CUDA")
note("place", "".join(f"{name}={value}\\n" for name, value in os.environ.items() if name.startswith(wanted)))
while True:
    note("alive", str(time.time()))
    time.sleep(0.2)
'
"""
ENDS_EARLY = """#!/bin/sh
[ "$SPOTD_NODE_RANK" = 1 ] && exit 78
echo "0000000001 000600" >machine-lease
exec sleep 600
"""


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with running_slurm(tmp_path_factory.mktemp("slurm")) as found:
        yield found


@pytest.fixture
def slurm(started: Slurm) -> Slurm:
    started.empty()
    return started


async def ask_for_two(provider: SlurmProvider, script: str = PLACES, nodes: int = 2) -> LaunchRequest:
    one = await ask_for(provider, gpus=2, script=script)
    offer = gang_of(one.offer, nodes)
    return replace(one, offer=offer, price_max=offer.gpu_price)


async def places(slurm: Slurm, home: Path) -> list[dict[str, str]]:
    """Return what the scripts of both nodes found in their environment."""
    files = [home / f"place.{rank}" for rank in range(2)]
    await asyncio.to_thread(slurm.wait_until, lambda: all(file.exists() and file.read_text() for file in files))
    return [dict(line.split("=", 1) for line in file.read_text().split()) for file in files]


def test_two_nodes_are_one_job_with_a_place_for_each_and_end_as_one(slurm: Slurm, tmp_path: Path) -> None:
    async def story(provider: SlurmProvider) -> None:
        await provider.offers(OfferQuery())
        assert provider.nodes_max == 3
        request = await ask_for_two(provider)
        made = (await provider.launch(request)).instance
        found = await listed(provider, request.key, is_running)
        assert (found.ref, found.price) == (made.ref, 2 * 800_000)
        about = slurm.job(number_of(made))
        assert (about["NumNodes"], about["JobName"], about["Requeue"]) == ("2", request.key, "0")
        home = tmp_path / "jobs" / request.key
        first, second = await places(slurm, home)
        assert (first["SPOTD_NODE_RANK"], second["SPOTD_NODE_RANK"]) == ("0", "1")
        assert first["SPOTD_NODE_ADDRESS"] == second["SPOTD_NODE_ADDRESS"] == "127.0.0.1"
        assert {first["SLURMD_NODENAME"], second["SLURMD_NODENAME"]} == {"n1", "n2"}
        assert first["SLURMD_NODENAME"] == about["BatchHost"] or first["SLURMD_NODENAME"] == "n1"
        assert first["CUDA_VISIBLE_DEVICES"] == second["CUDA_VISIBLE_DEVICES"] == "0,1"
        assert [one.ref for one in (await provider.instances()).instances if one.key == request.key] == [made.ref]
        await provider.terminate(made.ref)
        ended = await listed(provider, request.key, is_gone)
        assert ended.detail == "its end was ordered"
        await asyncio.to_thread(slurm.wait_until, lambda: not slurm.processes())

    play(slurm, tmp_path, story)


def test_there_are_all_or_none(slurm: Slurm, tmp_path: Path) -> None:
    async def story(provider: SlurmProvider) -> None:
        first = await ask_for_two(provider)
        await provider.launch(first)
        await listed(provider, first.key, is_running)
        with pytest.raises(NoCapacity, match="1 nodes of Slurm's partition spot are free, not 2"):
            await provider.launch(await ask_for_two(provider))
        with pytest.raises(NoCapacity):
            await provider.launch(await ask_for_two(provider, nodes=4))
        assert len(slurm.run("squeue", "-h", "-o", "%A").split()) == 1

    play(slurm, tmp_path, story)


def test_a_gang_without_room_waits_as_a_whole_where_the_partition_has_a_queue(slurm: Slurm, tmp_path: Path) -> None:
    async def story(provider: SlurmProvider) -> None:
        first, request = await ask_for_two(provider), await ask_for_two(provider)
        await provider.launch(first)
        await listed(provider, first.key, is_running)
        assert (await provider.launch(request)).instance.state is InstanceState.PENDING
        waits = await listed(provider, request.key, lambda one: one.state is not InstanceState.PENDING)
        assert (waits.state, waits.loss) == (InstanceState.PAUSED, Loss.NO_CAPACITY)
        await provider.terminate(waits.ref)
        await listed(provider, request.key, is_gone)
        assert not (tmp_path / "jobs" / request.key / "started").exists()

    play(slurm, tmp_path, story, {"queue": True}, queue_wait="30s")


def test_a_preemption_signals_every_node_and_takes_all(slurm: Slurm, tmp_path: Path) -> None:
    async def story(provider: SlurmProvider) -> None:
        request = await ask_for_two(provider)
        await provider.launch(request)
        home = tmp_path / "jobs" / request.key
        await places(slurm, home)
        slurm.take_all()
        noticed = await listed(provider, request.key, lambda one: one.notice_at is not None)
        assert is_running(noticed)
        assert noticed.notice_at is not None
        assert noticed.notice_at - datetime.now(UTC) < timedelta(seconds=GRACE_S + 2)
        ended = await listed(provider, request.key, is_gone)
        assert ended.loss is Loss.PREEMPTED
        for rank in range(2):
            signalled, alive = (float((home / f"{name}.{rank}").read_text()) for name in ("signal", "alive"))
            assert alive - signalled > GRACE_S - 3, "each node has the whole grace to save"

    play(slurm, tmp_path, story)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_loss_of_one_node_is_the_end_of_all(slurm: Slurm, tmp_path: Path, rank: int) -> None:
    async def story(provider: SlurmProvider) -> None:
        request = await ask_for_two(provider)
        await provider.launch(request)
        node = (await places(slurm, tmp_path / "jobs" / request.key))[rank]["SLURMD_NODENAME"]
        slurm.lose_node(node)
        try:
            lost = await listed(provider, request.key, is_gone)
            assert lost.loss is Loss.HOST_LOST
        finally:
            slurm.start_node(node)
        await asyncio.to_thread(slurm.wait_until, lambda: not slurm.processes())

    play(slurm, tmp_path, story)


def test_a_node_that_does_not_begin_ends_all(slurm: Slurm, tmp_path: Path) -> None:
    async def story(provider: SlurmProvider) -> None:
        request = await ask_for_two(provider, ENDS_EARLY)
        await provider.launch(request)
        ended = await listed(provider, request.key, is_gone)
        assert ended.detail == "its start script ended with 70"
        assert "node 1 of 2 did not begin" in (tmp_path / "jobs" / request.key / "log").read_text()

    play(slurm, tmp_path, story)


PRICE = 0.05


@pytest.mark.timeout(900)
def test_a_training_on_two_nodes_outlives_a_lost_node_and_a_preemption_bit_by_bit(slurm: Slurm, tmp_path: Path) -> None:
    expected = straight_sha256(tmp_path / "straight")
    config = f"""
[providers.slurm]
grace = "3m"
slurm_conf = "{slurm.config}"
folder = "{tmp_path / "jobs"}"
path = "{Path(sys.executable).parent}:{PATH}"
[[providers.slurm.partitions]]
name = "spot"
gpu = "RTX_4090"
price = {PRICE}
"""
    with lab(
        tmp_path / "lab", hosts=config, daemon='silence_limit = "8m"', market="enabled = false", scale=20.0, poll_s=1.5
    ) as found:
        found.ledgers = []  # a cluster sends no bill
        found.start()
        job = submit_two(found, tmp_path)
        first = until(lambda: saved_on_its_own(found, job), what="a checkpoint of two nodes", within=240)
        number = slurm.run("squeue", "-h", "-t", "R", "-o", "%A").split()[0]
        nodes = slurm.run("scontrol", "show", "hostnames", slurm.job(number)["NodeList"]).split()
        slurm.lose_node(nodes[1])
        second = until(lambda: (n := saved_on_its_own(found, job)) > first and n, what="two other nodes", within=240)
        slurm.start_node(nodes[1])
        slurm.wait_until(lambda: not {"down", "down*"} & set(slurm.nodes().values()))
        other = slurm.take_all()
        slurm.wait_until(lambda: slurm.job(other)["JobState"] == "RUNNING", within_s=120)
        slurm.run("scancel", other)
        until(lambda: saved_on_its_own(found, job) > second, what="the job to go on", within=240)
        (tmp_path / "release").touch()
        found.wait_final(job, within=240)
        row = found.job(job)
        assert row["state"] == "SUCCEEDED", row
        assert found.delivered(job, "weights.sha256") == expected
        attempts = row["attempts"]
        reasons = [one["reason"] for one in attempts[:-1]]
        assert {"host_lost", "preempted"} <= set(reasons), reasons
        assert all(one["resumed_from"] is not None for one in attempts[second - 1 :])
        booked = [one for receipt in found.receipts(job) for one in receipt["attempts"]]
        assert {(one["gpu_count"], one["effective_usd_h"]) for one in booked} == {(2, 2 * PRICE)}
        slurm.wait_until(lambda: not slurm.run("squeue", "-h").strip())
        found.stop()  # there is no bill that its receipts could be held against
