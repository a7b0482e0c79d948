"""Providers that hang or refuse from the daemon's first moment on: the job runs elsewhere, and they are named."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from spotd_providers.testkit.serve import AsgiApp, Receive, Scope, Send, serving
from tests.e2e.ctl import log_lines, spotctl
from tests.e2e.harness import FINAL, host, lab, until

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
