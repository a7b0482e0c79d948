"""Providers that hang or refuse from the daemon's first moment on: the job runs elsewhere, and they are named."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from spotd_providers.local.hosts import ScaledClock, write_clock
from spotd_providers.testkit.serve import (
    FOR_EVER,
    AsgiApp,
    Call,
    Canned,
    Faults,
    Receive,
    RecordedRequest,
    Scope,
    Send,
    serving,
)
from tests.e2e.clouds import RUNPOD_KEY, SCALE, VAST_KEY, VIRTUAL0
from tests.e2e.ctl import log_lines, spotctl
from tests.e2e.harness import FINAL, host, lab, until
from tests.fakes.runpod import Gpu, RunpodApi, RunpodCloud
from tests.fakes.runpod import Quirks as RunpodQuirks
from tests.fakes.runpod import classify as of_runpod
from tests.fakes.ticking import ticking
from tests.fakes.vastai import VastApi, VastCloud, some_asks
from tests.fakes.vastai import classify as of_vast

pytestmark = pytest.mark.e2e


def hanging() -> AsgiApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.Event().wait()

    return app


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_provider_that_hangs_and_one_that_is_down_delay_no_launch_elsewhere_and_are_named(tmp_path: Path) -> None:
    with serving(hanging()) as hung:
        providers = f"""
[providers.vast]
api_key = {{ env = "KEY" }}
base_url = "{hung.url}"
[providers.runpod]
api_key = {{ env = "KEY" }}
base_url = "http://127.0.0.1:{closed_port()}"
"""
        with lab(tmp_path, hosts=host("h1", 0.3) + providers, scale=1.0, poll_s=1.0) as found:
            found.environment = {"KEY": "none-of-their-business"}
            found.start()
            job = found.submit("net", "sleep 600")
            until(found.running_machines, what="a machine elsewhere", within=120)
            assert [request.status for request in hung.requests] == [None] * len(hung.requests)
            assert not log_lines(found, "daemon.stock_incomplete"), "the first launch waited for who has no machines"
            named = "vast: has not answered for"
            until(lambda: named in spotctl(found, "why", job).stdout, what=named, within=60, every=0.5)
            assert "runpod shows no prices:" in spotctl(found, "why", job).stdout
            rows = {line.split()[0]: line for line in spotctl(found, "providers").stdout.splitlines()}
            assert "failing" in rows["vast"]
            assert "has not answered for" in rows["vast"]
            assert "failing" in rows["runpod"]
            assert " ok " in rows["local"]
            found.api.cancel(job)
            until(lambda: found.state(job) in FINAL, what="the job to end", within=120, every=0.2)
            until(lambda: not found.open_machines(), what="every machine to be gone", within=120)


def with_nonsense(true: Canned) -> Canned:
    """Every price is a word."""
    page = json.loads(true.body)
    rows = [{**row, "min_bid": "cheap", "dph_base": "cheap"} for row in page["offers"]]
    return replace(true, body=json.dumps({**page, "offers": rows}).encode())


def test_one_that_lies_and_keeps_its_list_to_itself_delays_neither_polls_nor_launches_elsewhere(tmp_path: Path) -> None:
    clock = ScaledClock(real0=time.time(), virtual0=VIRTUAL0, scale=SCALE)
    vast = VastCloud(tmp_path / "vast", clock=clock, api_key=VAST_KEY)
    vast.stock(*some_asks())
    bad = Faults(VastApi(vast), classify=of_vast)
    bad.edit(Call.OFFERS, with_nonsense, times=FOR_EVER)
    bad.hang(Call.LIST, times=FOR_EVER)
    quirks = RunpodQuirks(requests_a_minute=100_000)
    runpod = RunpodCloud(tmp_path / "runpod", clock=clock, quirks=quirks, api_key=RUNPOD_KEY)
    runpod.stock(Gpu(gpu_id="NVIDIA GeForce RTX 4090", name="RTX 4090", memory=24, community_price=0.34))
    try:
        with serving(bad) as at_vast, serving(RunpodApi(runpod)) as at_runpod, ticking(runpod):
            providers = f"""
[providers.vast]
api_key = {{ env = "VAST_KEY" }}
base_url = "{at_vast.url}"
[providers.runpod]
api_key = {{ env = "RUNPOD_KEY" }}
base_url = "{at_runpod.url}"
gpu_counts = [1]
"""
            with lab(tmp_path / "lab", hosts=providers, market="enabled = false", scale=SCALE, poll_s=0.5) as found:
                write_clock(found.folder / "state" / "clock.json", clock)
                found.environment = {"VAST_KEY": VAST_KEY, "RUNPOD_KEY": RUNPOD_KEY}
                found.ledgers = [vast.ledger_path, runpod.ledger_path]
                found.start()

                def kept_waiting() -> list[RecordedRequest]:
                    return [request for request in at_vast.requests if of_vast(request) is Call.LIST]

                def polls() -> int:
                    return len([request for request in at_runpod.requests if of_runpod(request) is Call.OFFERS])

                until(lambda: bad.hanging, what="vast.ai to be asked for its machines", within=120)
                before = polls()
                resources = {"gpu": ["RTX_4090:1"], "disk": "10GB", "market": "auto"}
                job = found.submit("net", "sleep 600", resources=resources)
                until(lambda: any(pod.exists for pod in runpod.pods.values()), what="a pod elsewhere", within=120)
                until(lambda: polls() >= before + 4, what="four more polls elsewhere", within=120)
                # Not one of the bad one's lists was ever answered, and the polls did not go by turns with them.
                assert {request.status for request in kept_waiting()} == {None}
                assert polls() - before > len(kept_waiting())
                assert not log_lines(found, "daemon.stock_incomplete"), "the launch waited for who has no machines"
                named = re.compile(r"vast: .*rows about prices cannot be used")
                until(
                    lambda: named.search(spotctl(found, "why", job).stdout), what="vast to be named", within=60, every=1
                )
                (pod,) = runpod.pods.values()
                assert pod.name.startswith("spotd-lab.")
                assert f"-{job}-" in pod.name
                found.api.cancel(job)
                until(lambda: not pod.exists, what="the pod to be deleted", within=120)
    finally:
        vast.shut_down()
        runpod.shut_down()
