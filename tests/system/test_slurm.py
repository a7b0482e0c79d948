"""The slurm provider on a real cluster of three nodes: what Slurm does with our jobs, and what we make of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
import structlog

from spotd_providers.contract.errors import (
    NoCapacity,
    OfferGone,
    OutcomeUnknown,
    QuotaExceeded,
    RequestRejected,
    Unavailable,
)
from spotd_providers.contract.provider import Services
from spotd_providers.contract.values import (
    AttemptKey,
    InstallId,
    Instance,
    InstanceId,
    InstanceState,
    LaunchRequest,
    Loss,
    Market,
    OfferQuery,
)
from spotd_providers.slurm.plugin import PLUGIN, SlurmProvider
from tests.system.engines.slurm import GRACE_S, Slurm, running_slurm
from tests.unit.providers.kit.test_port_relay import ODD, exchange

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]
INSTALL = InstallId("lab")
NUMBERS = count(1)
SCRIPT = "#!/bin/sh\nenv >environment\nexec sleep 600\n"
NOTICED = "#!/bin/sh\nuntil [ -s work/notice ]; do sleep 0.2; done\ncp work/notice ../seen\nexec sleep 600\n"
Story = Callable[[SlurmProvider], Awaitable[None]]


class RealClock:
    """Time as it is."""

    def now(self) -> datetime:
        return datetime.now(UTC)

    async def sleep(self, duration: timedelta) -> None:
        await asyncio.sleep(duration.total_seconds())

    def real_seconds(self, duration: timedelta) -> float:
        return duration.total_seconds()


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with running_slurm(tmp_path_factory.mktemp("slurm")) as found:
        yield found


@pytest.fixture
def slurm(started: Slurm) -> Slurm:
    started.empty()
    return started


def play(slurm: Slurm, folder: Path, story: Story, partition: dict[str, Any] | None = None, **more: Any) -> None:
    """Open the provider on this cluster and play the story."""
    spot = {"name": "spot", "price": 0.4, **(partition or {})}
    values = {"partitions": [spot, {"name": "prod", "price": 0.9}], "folder": str(folder / "jobs"), **more}
    settings = PLUGIN.settings_model(slurm_conf=str(slurm.config), **values)
    services = Services(install=INSTALL, clock=RealClock(), rng=Random(1), log=structlog.get_logger(), state_dir=folder)

    async def main() -> None:
        async with PLUGIN.open(settings, services) as provider:
            assert isinstance(provider, SlurmProvider)
            await story(provider)

    asyncio.run(main())


async def ask_for(
    provider: SlurmProvider, market: Market = Market.SPOT, gpus: int = 1, script: str = SCRIPT
) -> LaunchRequest:
    page = await provider.offers(OfferQuery())
    offer = next(one for one in page.offers if one.market is market and one.gpu_count == gpus)
    key = AttemptKey(f"spotd-lab.test-j{next(NUMBERS)}-1")
    return LaunchRequest(
        key=key,
        install=INSTALL,
        offer=offer,
        price_max=offer.gpu_price,
        image="busybox",
        disk_gb=5,
        start_script=script,
    )


async def listed(provider: SlurmProvider, key: AttemptKey, what: Callable[[Instance], bool]) -> Instance:
    """Return the machine of this key once it is listed as expected."""
    listing = None
    for _ in range(240):
        listing = await provider.instances()
        found = [one for one in listing.instances if one.key == key]
        if found and what(found[0]):
            return found[0]
        await asyncio.sleep(0.5)
    pytest.fail(f"{key} did not get there: {listing}")


def is_running(one: Instance) -> bool:
    return one.state is InstanceState.RUNNING


def is_gone(one: Instance) -> bool:
    return one.state is InstanceState.GONE


def number_of(one: Instance) -> str:
    return one.ref.instance_id.partition(":")[0]


def test_a_job_is_one_machine_from_sbatch_to_scancel(slurm: Slurm, tmp_path: Path) -> None:
    async def story(provider: SlurmProvider) -> None:
        page = await provider.offers(OfferQuery())
        assert page.complete
        assert {(one.offer_id, one.market, one.gpu_price) for one in page.offers} == {
            ("spot:H100:1", Market.SPOT, 400_000), ("spot:H100:2", Market.SPOT, 800_000),
            ("prod:H100:1", Market.ON_DEMAND, 900_000), ("prod:H100:2", Market.ON_DEMAND, 1_800_000),
        }  # fmt: skip
        request = await ask_for(provider, script=SCRIPT + "# https://store.example/grant?signature=secret\n")
        made = (await provider.launch(request)).instance
        again = await listed(provider, request.key, is_running)
        assert again.ref == made.ref
        assert (again.price, again.market) == (400_000, Market.SPOT)
        about = slurm.job(number_of(made))
        assert (about["JobName"], about["Comment"], about["Requeue"]) == (request.key, request.key, "0")
        shown = slurm.run("scontrol", "show", "job", number_of(made)) + slurm.run(
            "scontrol", "write", "batch_script", number_of(made), "-"
        )
        assert "secret" not in shown
        environment = tmp_path / "jobs" / request.key / "job" / "environment"
        slurm.wait_until(environment.exists)
        assert "CUDA_VISIBLE_DEVICES=" in environment.read_text()
        assert (environment.parent.parent / "boot.sh").stat().st_mode & 0o077 == 0
        await provider.terminate(made.ref)
        ended = await listed(provider, request.key, is_gone)
        assert (ended.loss, ended.detail) == (Loss.SELF, "its end was ordered")
        assert not (environment.parent.parent / "boot.sh").exists()
        await provider.terminate(made.ref)
        assert await provider.find(request.key) == ()

    play(slurm, tmp_path, story)


def test_the_same_key_twice_is_one_job(slurm: Slurm, tmp_path: Path) -> None:
    async def story(provider: SlurmProvider) -> None:
        request = await ask_for(provider)
        made = (await provider.launch(request)).instance
        with pytest.raises(OutcomeUnknown):
            await provider.launch(request)
        assert [one.ref for one in await provider.find(request.key)] == [made.ref]
        assert slurm.run("squeue", "-h", "-n", request.key, "-o", "%A").split() == [number_of(made)]

    play(slurm, tmp_path, story)


def test_a_preemption_gives_notice_and_then_the_place(slurm: Slurm, tmp_path: Path) -> None:
    async def story(provider: SlurmProvider) -> None:
        request = await ask_for(provider, script=NOTICED)
        await provider.launch(request)
        await listed(provider, request.key, is_running)
        slurm.take_all()
        noticed = await listed(provider, request.key, lambda one: one.notice_at is not None)
        assert noticed.state is InstanceState.RUNNING
        assert noticed.notice_at is not None
        assert noticed.notice_at - datetime.now(UTC) < timedelta(seconds=GRACE_S + 2)
        ended = await listed(provider, request.key, is_gone)
        assert ended.loss is Loss.PREEMPTED
        assert slurm.job(number_of(ended))["JobState"] == "PREEMPTED"
        # The job itself is told by the signal.
        assert "Slurm ends it" in (tmp_path / "jobs" / request.key / "seen").read_text()

    play(slurm, tmp_path, story)


def test_a_job_that_comes_back_under_its_number_is_not_our_attempt(slurm: Slurm, tmp_path: Path) -> None:
    async def story(provider: SlurmProvider) -> None:
        request = await ask_for(provider)
        made = (await provider.launch(request)).instance
        await listed(provider, request.key, is_running)
        slurm.run("scontrol", "update", f"JobId={number_of(made)}", "Requeue=1")
        slurm.run("scontrol", "requeue", number_of(made))
        back = await listed(provider, request.key, lambda one: one.state is InstanceState.PAUSED)
        assert (back.ref, back.loss) == (made.ref, Loss.PREEMPTED)
        await provider.terminate(made.ref)
        await listed(provider, request.key, is_gone)

    play(slurm, tmp_path, story)


def test_a_node_that_falls_silent_loses_its_job(slurm: Slurm, tmp_path: Path) -> None:
    async def story(provider: SlurmProvider) -> None:
        request = await ask_for(provider)
        made = (await provider.launch(request)).instance
        await listed(provider, request.key, is_running)
        node = slurm.job(number_of(made))["NodeList"]
        slurm.lose_node(node)
        try:
            lost = await listed(provider, request.key, is_gone)
            assert lost.loss is Loss.HOST_LOST
            page = await provider.offers(OfferQuery())
            assert page.complete
            assert page.offers
        finally:
            slurm.start_node(node)

    play(slurm, tmp_path, story)


def test_a_drained_node_is_not_offered_and_its_job_goes_on(slurm: Slurm, tmp_path: Path) -> None:
    async def story(provider: SlurmProvider) -> None:
        request = await ask_for(provider, gpus=2)
        made = (await provider.launch(request)).instance
        await listed(provider, request.key, is_running)
        for name in ("n1", "n2", "n3"):
            slurm.run("scontrol", "update", f"NodeName={name}", "State=DRAIN", "Reason=a|b, maintenance")
        page = await provider.offers(OfferQuery())
        assert page.offers == ()
        assert {one.reason for one in page.rejected} == {"none of its nodes can be used now"}
        assert is_running(await listed(provider, request.key, is_running))
        await provider.terminate(made.ref)

    play(slurm, tmp_path, story)


def test_a_controller_that_restarts_forgets_nothing(slurm: Slurm, tmp_path: Path) -> None:
    async def story(provider: SlurmProvider) -> None:
        request = await ask_for(provider)
        other = await ask_for(provider)
        made = (await provider.launch(request)).instance
        await listed(provider, request.key, is_running)
        slurm.stop_controller()
        calls = (
            provider.instances(), provider.find(request.key), provider.terminate(made.ref), provider.launch(other)
        )  # fmt: skip
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(one) for one in outcomes] == [Unavailable, Unavailable, Unavailable, OutcomeUnknown]
        slurm.start_controller()
        slurm.wait_until(lambda: "UP" in slurm.run("scontrol", "ping", check=False))
        assert (await listed(provider, request.key, is_running)).ref == made.ref
        assert await provider.find(other.key) == ()
        await provider.terminate(made.ref)
        await listed(provider, request.key, is_gone)

    play(slurm, tmp_path, story)


def test_an_scancel_by_another_is_told_apart(slurm: Slurm, tmp_path: Path) -> None:
    async def story(provider: SlurmProvider) -> None:
        request = await ask_for(provider)
        made = (await provider.launch(request)).instance
        await listed(provider, request.key, is_running)
        slurm.run("scancel", number_of(made))
        ended = await listed(provider, request.key, is_gone)
        assert (ended.loss, ended.detail) == (Loss.PREEMPTED, "it was cancelled, and not by spotd")

    play(slurm, tmp_path, story)


def test_a_full_partition_lets_a_job_wait_and_spotd_takes_it_out(slurm: Slurm, tmp_path: Path) -> None:
    async def story(provider: SlurmProvider) -> None:
        taken = slurm.take_all()
        slurm.wait_until(lambda: slurm.job(taken)["JobState"] == "RUNNING")
        request = await ask_for(provider)
        made = (await provider.launch(request)).instance
        assert made.state is InstanceState.PENDING
        waits = await listed(provider, request.key, lambda one: one.state is not InstanceState.PENDING)
        assert (waits.state, waits.loss) == (InstanceState.PAUSED, Loss.NO_CAPACITY)
        assert waits.detail.startswith("it waits in Slurm's queue: ")
        await provider.terminate(made.ref)
        assert is_gone(await listed(provider, request.key, is_gone))
        assert not (tmp_path / "jobs" / request.key / "started").exists()

    play(slurm, tmp_path, story, {"queue": True}, queue_wait="30s")


def test_a_full_partition_is_not_offered_unless_asked_for(slurm: Slurm, tmp_path: Path) -> None:
    async def story(provider: SlurmProvider) -> None:
        taken = slurm.take_all()
        slurm.wait_until(lambda: slurm.job(taken)["JobState"] == "RUNNING")
        page = await provider.offers(OfferQuery())
        assert page.offers == ()
        assert page.complete

    play(slurm, tmp_path, story)


def test_the_time_limit_gives_notice_before_the_end(slurm: Slurm, tmp_path: Path) -> None:
    async def story(provider: SlurmProvider) -> None:
        request = await ask_for(provider, script=NOTICED)
        made = (await provider.launch(request)).instance
        noticed = await listed(provider, request.key, lambda one: one.notice_at is not None)
        assert noticed.notice_at is not None
        assert is_running(noticed)
        seen = tmp_path / "jobs" / request.key / "seen"
        slurm.wait_until(seen.exists, within_s=150)
        assert "its time limit comes" in seen.read_text()
        assert abs(datetime.now(UTC) - noticed.notice_at) < timedelta(seconds=100)
        ended = await listed(provider, request.key, is_gone)
        assert ended.loss is Loss.EXPIRED
        assert slurm.job(number_of(made))["JobState"] == "TIMEOUT"

    play(slurm, tmp_path, story, {"time_limit": "1m"}, grace="30s")


def test_refusals_are_what_sbatch_says(slurm: Slurm, tmp_path: Path) -> None:
    async def story(provider: SlurmProvider) -> None:
        request = await ask_for(provider)
        cases: tuple[tuple[dict[str, str], type[Exception] | tuple[type[Exception], ...]], ...] = (
            ({"gres": "gpu:h100:9"}, NoCapacity), ({"gres": "gpu:b200:1"}, (NoCapacity, RequestRejected)),
            ({"memory_mb": "900000"}, (NoCapacity, QuotaExceeded)),
        )  # fmt: skip
        for number, (change, kind) in enumerate(cases):
            bad = replace(
                request,
                key=AttemptKey(f"{request.key[:-1]}{number + 2}"),
                offer=replace(request.offer, extra={**request.offer.extra, **change}),
            )
            with pytest.raises(kind):
                await provider.launch(bad)
            assert await provider.find(bad.key) == ()
            assert not (tmp_path / "jobs" / bad.key).exists()
        gone = replace(request.offer, extra={**request.offer.extra, "partition": "nope"})
        with pytest.raises(OfferGone):
            await provider.launch(replace(request, offer=gone))

    play(slurm, tmp_path, story)


def test_only_our_own_jobs_are_shown_and_ended(slurm: Slurm, tmp_path: Path) -> None:
    async def story(provider: SlurmProvider) -> None:
        request = await ask_for(provider)
        made = (await provider.launch(request)).instance
        names = ("my,notebook", "spotd-lab2-j1-1", "two words | and a pipe")
        common = ("--parsable", "--mem=100", "--output=/dev/null", "--wrap", "sleep 600")
        others = [slurm.run("sbatch", f"--job-name={one}", *common).strip() for one in names]
        array = slurm.run("sbatch", "--array=1-3", "--job-name=spotd is nice", *common).strip()
        listing = await provider.instances()
        assert listing.complete
        assert [one.ref for one in listing.instances if not is_gone(one)] == [made.ref]
        for number in (*others, array):
            for name in ("spotd-lab2-j1-1", request.key):
                with suppress(RequestRejected):  # one of another name does not exist for us
                    await provider.terminate(replace(made.ref, instance_id=InstanceId(f"{number}:{name}")))
            assert slurm.job(number)["JobState"] in ("RUNNING", "PENDING")

    play(slurm, tmp_path, story)


def test_the_doctor_names_what_works_and_what_does_not(slurm: Slurm, tmp_path: Path) -> None:
    async def story(provider: SlurmProvider) -> None:
        lines = {one.name: one for one in await provider.check()}
        assert lines["login node"].ok
        assert "22.05" in lines["login node"].detail or "slurm" in lines["login node"].detail
        assert lines["partition spot"].ok
        assert lines["partition spot"].detail == "6 of 6 places free; spot"
        assert lines["partition prod"].detail == "6 of 6 places free; on-demand"
        assert lines["accounting"].detail.startswith("off")
        assert lines["clock"].ok

    play(slurm, tmp_path, story)


SERVING = """#!/bin/sh
exec python3 -c '
import socket, threading
def serve(near):
    while data := near.recv(65536): near.sendall(data)
    near.close()
with socket.create_server(("127.0.0.1", 0)) as listener:
    open("../port.new", "w").write(str(listener.getsockname()[1]))
    import os; os.rename("../port.new", "../port")
    while True: threading.Thread(target=serve, args=(listener.accept()[0],)).start()
'
"""


def test_a_port_of_a_job_is_reached_from_the_login_node_for_as_long_as_it_runs(slurm: Slurm, tmp_path: Path) -> None:
    async def story(provider: SlurmProvider) -> None:
        request = await ask_for(provider, script=SERVING)
        made = (await provider.launch(request)).instance
        await listed(provider, request.key, lambda one: one.state is InstanceState.RUNNING)
        file = tmp_path / "jobs" / request.key / "port"
        for _ in range(200):
            if file.exists():
                break
            await asyncio.sleep(0.1)
        port = int(file.read_text())
        several = [await provider.open_port(made.ref, port) for _ in range(3)]
        for number, one in enumerate(several):
            sent = bytes([number]) + ODD
            assert await exchange(one, sent) == sent
        for one in several:
            await one.aclose()
        with pytest.raises(Unavailable, match="nothing answers at port 1 "):
            await provider.open_port(made.ref, 1)
        last = await provider.open_port(made.ref, port)
        await provider.terminate(made.ref)
        with suppress(Unavailable):
            assert not await last.receive(), "a connection outlived its job"
        await last.aclose()
        with pytest.raises(Unavailable):
            await provider.open_port(made.ref, port)

    play(slurm, tmp_path, story)


def test_what_the_controller_forgot_is_known_to_accounting(tmp_path: Path) -> None:
    with running_slurm(tmp_path / "own", accounting=True) as own:

        async def story(provider: SlurmProvider) -> None:
            [line] = [one for one in await provider.check() if one.name == "accounting"]
            assert (line.ok, line.detail) == (True, "on")
            request = await ask_for(provider)
            made = (await provider.launch(request)).instance
            await listed(provider, request.key, is_running)
            await provider.terminate(made.ref)
            number = number_of(made)
            await asyncio.to_thread(own.wait_until, lambda: not own.job(number))
            await asyncio.to_thread(own.wait_until, lambda: "CANCELLED" in own.past(number))
            assert await provider.find(request.key) == (), "both know it, and it is over"
            # A "runaway" job: a controller that lost its state has told accounting nothing of its end.
            own.forget_end(number)
            assert own.past(number) == "RUNNING"
            with pytest.raises(Unavailable, match=f"does not prove that {request.key} is absent"):
                await provider.find(request.key)

        play(own, tmp_path, story)


def test_a_cluster_that_is_stopped_leaves_no_process(tmp_path: Path) -> None:
    with running_slurm(tmp_path / "own") as own:
        number = own.run("sbatch", "--parsable", "--mem=100", "--output=/dev/null", "--wrap", "sleep 600").strip()
        own.wait_until(lambda: own.job(number)["JobState"] == "RUNNING" and len(own.processes()) > 1)
    assert own.processes() == []
