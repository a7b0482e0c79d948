"""The local provider against a real server process."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import anyio

from spotd_providers.contract.provider import Provider, Services
from spotd_providers.contract.values import AttemptKey, InstallId, LaunchRequest, MicroUsdPerHour, Offer, OfferQuery
from spotd_providers.kit.http import open_http
from spotd_providers.local.hosts import ScaledClock
from spotd_providers.local.plugin import PLUGIN
from spotd_providers.local.settings import find_endpoint
from spotd_providers.testkit.harness import RecordingLog
from tests.unit.providers.local.clocks import START

LAB = InstallId("lab")


class LiveClock(ScaledClock):
    """A scaled clock that can also wait."""

    async def sleep(self, duration: timedelta) -> None:
        await anyio.sleep(max(0.0, self.real_seconds(duration)))


def live_clock(scale: float = 1.0) -> LiveClock:
    """A clock that shows START now."""
    return LiveClock(real0=time.time(), virtual0=START, scale=scale)


@dataclass
class Desk:
    """A customer's desk: the open provider and where its market lives."""

    provider: Provider
    folder: Path
    log: RecordingLog

    async def offer(self, offer_id: str | None = None) -> Offer:
        """An offer of the market; by default its first."""
        page = await self.provider.offers(OfferQuery())
        return next(offer for offer in page.offers if offer_id in (None, offer.offer_id))

    async def request(self, key: str = "spotd-lab-job-1", offer_id: str | None = None, **more: Any) -> LaunchRequest:
        """A sound request for a machine that does nothing for long."""
        offer = more.pop("offer", None) or await self.offer(offer_id)
        values: dict[str, Any] = {
            "key": AttemptKey(key),
            "install": LAB,
            "offer": offer,
            "price_max": MicroUsdPerHour(offer.gpu_price * 3 // 2),
            "image": "any",
            "disk_gb": 10,
            "start_script": "exec sleep 1000",
            **more,
        }
        return LaunchRequest(**values)

    async def control(self, what: str, body: Mapping[str, Any]) -> Any:
        """Turns one of the market's knobs."""
        endpoint = find_endpoint(self.folder)
        assert endpoint is not None
        async with open_http(endpoint.url, headers={"authorization": f"Bearer {endpoint.token}"}) as http:
            answer = await http.send("POST", what, json_body=dict(body))
        assert answer.status == 200, answer.text
        return answer.json()


async def eventually(look: Callable[[], Awaitable[bool]], *, seconds: float = 20.0) -> None:
    """Returns once `look` says yes, asking no more often than every 20 ms; fails if it does not in time."""
    with anyio.fail_after(seconds):
        while not await look():  # noqa: ASYNC110 - another process changes the answer; it can set no event of ours
            await anyio.sleep(0.02)


@asynccontextmanager
async def desk(folder: Path, *, clock: LiveClock | None = None, **settings: Any) -> AsyncIterator[Desk]:
    """The provider is open; its market lives on afterwards."""
    log = RecordingLog()
    services = Services(
        install=LAB, clock=clock or live_clock(), rng=Random(5), log=log, state_dir=folder, credential=None
    )
    async with PLUGIN.open(PLUGIN.settings_model.model_validate(settings), services) as provider:
        yield Desk(provider=provider, folder=folder, log=log)


def environment_of(pid: int) -> bytes:
    """The environment a process was started with."""
    return Path(f"/proc/{pid}/environ").read_bytes()


def server_pid(folder: Path) -> int | None:
    """The server that says it has this market."""
    try:
        return int(json.loads((folder / "server.json").read_text())["pid"])
    except FileNotFoundError:
        return None


def is_running(pid: int) -> bool:
    """Whether this process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def kill_server(folder: Path) -> int:
    """SIGKILL for the market's server."""
    pid = server_pid(folder)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return pid
