"""One daemon over fakes of vast.ai, AWS and RunPod at once, each with its own books, all on one fast clock."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from spotd_providers.local.hosts import ScaledClock, Segment, read_ledger, segments, write_clock
from spotd_providers.testkit.serve import RecordedRequest, Served, serving
from tests.e2e.harness import Lab, lab
from tests.fakes.aws import ACCESS_KEY, KINDS, ZONES, Ec2Api, Ec2Cloud
from tests.fakes.runpod import Gpu, RunpodApi, RunpodCloud
from tests.fakes.ticking import ticking
from tests.fakes.vastai import Ask, VastApi, VastCloud

SCALE: Final = 10.0
POLL_S: Final = 1.5
"""On the wall; fifteen seconds for the clouds, whose limits on requests are the true ones."""
VIRTUAL0: Final = datetime(2026, 3, 2, 12, tzinfo=UTC)
VAST_KEY: Final = "key-of-vast-canary-3f81"
AWS_SECRET: Final = "secret-of-aws-canary-77ad"
RUNPOD_KEY: Final = "key-of-runpod-canary-c05e"
KEYS: Final = {"vast": VAST_KEY, "aws": AWS_SECRET, "runpod": RUNPOD_KEY}
PROVIDER_KEYS: Final = tuple(KEYS.values())
GPUS: Final = ["RTX_4090:1", "T4:1"]
ASK: Final = 23_000_001
KIND: Final = next(kind for kind in KINDS if kind.name == "g4dn.xlarge")
POOLS: Final = tuple(f"{KIND.name}:{zone.name}" for zone in ZONES[:2])


@dataclass(frozen=True)
class Clouds:
    """The daemon's lab and the three clouds: vast.ai is the cheapest, then AWS, then RunPod."""

    lab: Lab
    clock: ScaledClock
    vast: VastCloud
    aws: Ec2Cloud
    runpod: RunpodCloud
    served: dict[str, Served]

    def spending(self) -> dict[str, tuple[Segment, ...]]:
        """What each cloud billed, by its own ledger."""
        clouds = {"vast": self.vast, "aws": self.aws, "runpod": self.runpod}
        return {name: segments(read_ledger(cloud.ledger_path)) for name, cloud in clouds.items()}

    def left(self) -> list[str]:
        """Machines that a cloud still bills for."""
        return [f"{name} {s.machine_id}" for name, own in self.spending().items() for s in own if s.end is None]

    def requests(self) -> list[tuple[str, RecordedRequest]]:
        """Everything that was asked of any of them."""
        return [(name, request) for name, served in self.served.items() for request in list(served.requests)]

    def machine_folders(self) -> list[Path]:
        """Everything that machines of all clouds have written."""
        return [cloud.ledger_path.parent for cloud in (self.vast, self.aws, self.runpod)]


@contextmanager
def three_clouds(
    folder: Path,
    *,
    more: str = "",
    environment: dict[str, str] | None = None,
    scale: float = SCALE,
    poll_s: float = POLL_S,
    virtual0: datetime = VIRTUAL0,
) -> Iterator[Clouds]:
    """A daemon with three providers is about to be started: `found.lab.start()`. `more` begins in RunPod's section."""
    clock = ScaledClock(real0=time.time(), virtual0=virtual0, scale=scale)
    vast = VastCloud(folder / "vast", clock=clock, api_key=VAST_KEY)
    vast.stock(Ask(ask_id=ASK, machine_id=18_001, dph_base=0.40, min_bid=0.10))
    aws = Ec2Cloud(folder / "aws", clock=clock)
    for zone in ZONES[:2]:
        aws.stock(KIND, zone, KIND.spot, since=virtual0)
    runpod = RunpodCloud(folder / "runpod", clock=clock, api_key=RUNPOD_KEY)
    runpod.stock(Gpu(gpu_id="NVIDIA GeForce RTX 4090", name="RTX 4090", memory=24, community_price=0.34))
    clouds = (vast, aws, runpod)
    try:
        with (
            serving(VastApi(vast)) as at_vast,
            serving(Ec2Api(aws)) as at_aws,
            serving(RunpodApi(runpod)) as at_runpod,
            ticking(vast),
            ticking(aws),
            ticking(runpod),
            lab(
                folder / "lab",
                hosts=_providers(at_vast.url, at_aws.url, at_runpod.url) + more,
                market="enabled = false",
                scale=scale,
                virtual0=virtual0,
                poll_s=poll_s,
            ) as found,
        ):
            write_clock(found.folder / "state" / "clock.json", clock)
            found.environment = {
                "VAST_KEY": VAST_KEY,
                "AWS_KEY": f"{ACCESS_KEY}:{AWS_SECRET}",
                "RUNPOD_KEY": RUNPOD_KEY,
                **(environment or {}),
            }
            found.ledgers = [cloud.ledger_path for cloud in clouds]
            served = {"vast": at_vast, "aws": at_aws, "runpod": at_runpod}
            yield Clouds(lab=found, clock=clock, vast=vast, aws=aws, runpod=runpod, served=served)
    finally:
        for cloud in clouds:
            cloud.shut_down()


def _providers(vast: str, aws: str, runpod: str) -> str:
    return f"""
[providers.vast]
api_key = {{ env = "VAST_KEY" }}
base_url = "{vast}"
fee_multiplier = 1.0
[providers.aws]
enabled = true
api_key = {{ env = "AWS_KEY" }}
endpoint_url = "{aws}"
container = "none"
cpu_types = ["m7i.*"]
[providers.runpod]
api_key = {{ env = "RUNPOD_KEY" }}
base_url = "{runpod}"
gpu_counts = [1]
"""
