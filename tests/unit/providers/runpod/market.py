"""A RunPod on loopback for clients that ask as often as they like."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spotd_providers.local.hosts.machines import ScaledClock
from spotd_providers.testkit.clock import START
from spotd_providers.testkit.serve import serving
from tests.fakes.runpod import Quirks, RunpodApi, RunpodCloud, some_gpus, ticking


@contextmanager
def busy_market(tmp_path: Path) -> Iterator[tuple[RunpodCloud, str]]:
    """A cloud with some GPUs, where a second is a minute, and its address."""
    clock = ScaledClock(real0=START.timestamp(), virtual0=START, scale=60.0)
    cloud = RunpodCloud(tmp_path / "cloud", clock=clock, quirks=Quirks(requests_a_minute=100_000))
    cloud.stock(*some_gpus())
    try:
        with serving(RunpodApi(cloud)) as served, ticking(cloud):
            yield cloud, served.url
    finally:
        cloud.shut_down()
