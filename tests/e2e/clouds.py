"""One daemon over fakes of vast.ai, AWS and RunPod at once, and Google Cloud and Verda, on one fast clock.

Each cloud has books of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Final

from spotd_jobs.objects.api import ObjectMissing
from spotd_jobs.objects.s3 import S3Store
from spotd_jobs.wire.manifest_document import parse_manifest
from spotd_providers.local.hosts import ScaledClock, Segment, read_ledger, segments, write_clock
from spotd_providers.testkit.serve import RecordedRequest, Served, serving
from tests.e2e.harness import Lab, lab
from tests.fakes.aws import ACCESS_KEY, KINDS, ZONES, Ec2Api, Ec2Cloud
from tests.fakes.cloud import FakeCloud
from tests.fakes.runpod import Gpu, RunpodApi, RunpodCloud
from tests.fakes.ticking import ticking
from tests.fakes.vastai import Ask, VastApi, VastCloud
from tests.fakes.verda import VerdaApi, VerdaCloud, VerdaType
from tests.unit.providers.googlecloud.fake import GoogleApi, GoogleCloud, some_kinds

SCALE: Final = 10.0
SCALE_OF_FIVE: Final = 20.0
"""For a job that waits nowhere for a notice of minutes."""
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
GCP_TOKEN: Final = "ya29.token-of-gcp-canary-5b02"
L4_KIND: Final = "g2-standard-4"
"""As Spot $0.21 an hour at Google, which puts it between AWS and RunPod."""
VERDA_KIND: Final = VerdaType(
    name="1RTX6000ADA.10V", gpu="1x RTX6000 Ada 48GB", gpus=1, price=0.83, spot=0.36, memory_gb=48
)
"""A little more than RunPod's."""
GPUS_OF_FIVE: Final = [*GPUS, "L4:1", "RTX_6000_ADA:1"]
MANIFEST_BYTES_MAX: Final = 1 << 20


@dataclass(frozen=True)
class Clouds:
    """The daemon's lab and the three clouds: vast.ai is the cheapest, then AWS, then RunPod."""

    lab: Lab
    clock: ScaledClock
    vast: VastCloud
    aws: Ec2Cloud
    runpod: RunpodCloud
    served: dict[str, Served]

    @property
    def clouds(self) -> dict[str, FakeCloud]:
        """All of them, by the name of their provider."""
        return {"vast": self.vast, "aws": self.aws, "runpod": self.runpod}

    def spending(self) -> dict[str, tuple[Segment, ...]]:
        """What each cloud billed, by its own ledger."""
        return {name: segments(read_ledger(cloud.ledger_path)) for name, cloud in self.clouds.items()}

    def left(self) -> list[str]:
        """Machines that a cloud still bills for."""
        return [f"{name} {s.machine_id}" for name, own in self.spending().items() for s in own if s.end is None]

    def requests(self) -> list[tuple[str, RecordedRequest]]:
        """Everything that was asked of any of them."""
        return [(name, request) for name, served in self.served.items() for request in list(served.requests)]

    def machine_folders(self) -> list[Path]:
        """Everything that machines of all clouds have written."""
        return [cloud.ledger_path.parent for cloud in self.clouds.values()]


@dataclass(frozen=True)
class FiveClouds(Clouds):
    """The three, and Google between AWS and RunPod, and Verda, which is the dearest."""

    gcp: GoogleCloud
    verda: VerdaCloud

    @property
    def clouds(self) -> dict[str, FakeCloud]:
        return {**super().clouds, "gcp": self.gcp, "verda": self.verda}


@contextmanager
def three_clouds(
    folder: Path,
    *,
    more: str = "",
    environment: dict[str, str] | None = None,
    scale: float = SCALE,
    poll_s: float = POLL_S,
    virtual0: datetime = VIRTUAL0,
    clock: ScaledClock | None = None,
) -> Iterator[Clouds]:
    """A daemon with three providers is about to be started: `found.lab.start()`. `more` begins in RunPod's section."""
    clock = clock or ScaledClock(real0=time.time(), virtual0=virtual0, scale=scale)
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


@contextmanager
def five_clouds(folder: Path, *, more: str = "", environment: Mapping[str, str] | None = None) -> Iterator[FiveClouds]:
    """The same with Google Cloud and Verda. Machines of all start soon. `more` begins in Verda's section."""
    clock = ScaledClock(real0=time.time(), virtual0=VIRTUAL0, scale=SCALE_OF_FIVE)
    google, verda = GoogleCloud(folder / "gcp", clock=clock), VerdaCloud(folder / "verda", clock=clock)
    google.access[GCP_TOKEN] = VIRTUAL0 + timedelta(days=9)
    google.stock(*(kind for kind in some_kinds() if kind.name == L4_KIND))
    verda.stock(replace(VERDA_KIND, free={("FIN-03", True): 1}))
    google.quirks.boot = verda.quirks.boot = timedelta(seconds=20)
    try:
        with (
            serving(GoogleApi(google)) as at_google,
            serving(VerdaApi(verda)) as at_verda,
            ticking(google),
            ticking(verda),
            three_clouds(
                folder,
                more=_two_providers(at_google.url, at_verda.url, google.project, verda.client_id) + more,
                environment={"GCP_TOKEN": GCP_TOKEN, "VERDA_KEY": verda.client_secret, **(environment or {})},
                scale=SCALE_OF_FIVE,
                poll_s=POLL_S * SCALE / SCALE_OF_FIVE,
                clock=clock,
            ) as three,
        ):
            three.vast.quirks.boot = three.aws.quirks.boot = three.runpod.quirks.starting = timedelta(seconds=2)
            three.runpod.quirks.provisioning = timedelta(0)
            three.lab.ledgers += [google.ledger_path, verda.ledger_path]
            three.served.update(gcp=at_google, verda=at_verda)
            yield FiveClouds(**vars(three), gcp=google, verda=verda)
    finally:
        google.shut_down()
        verda.shut_down()


def newest_complete(store: S3Store, job: str) -> str | None:
    """What the newest manifest whose chunks are all there names. No machine writes while this looks."""
    prefix = f"jobs/{job}/attempts/"
    keys = {info.key for info in store.list(prefix)}
    best: tuple[int, int, str] | None = None
    for key in keys:
        if "/checkpoints/" not in key:
            continue
        try:
            manifest = parse_manifest(store.get(key, bytes_max=MANIFEST_BYTES_MAX))
        except ObjectMissing:
            continue  # an older one that is not kept any longer
        if manifest.chunk_sizes().keys() <= keys:
            found = (manifest.attempt, manifest.serial, manifest.name)
            best = found if best is None else max(best, found)
    return None if best is None else best[2]


def assert_one_machine_at_a_time(
    spending: Mapping[str, Sequence[Segment]], order: Sequence[str], *, may_outlive: Mapping[str, timedelta]
) -> None:
    """By the clouds' own ledgers of one job: a machine an attempt, in this order, none when the next one starts.

    Machines of `may_outlive` may do so for so long. A disk that is billed on its own is no machine.
    """
    computing = sorted(
        ((name, span) for name, own in spending.items() for span in own if span.compute and span.start != span.end),
        key=lambda one: one[1].start,
    )
    machines: dict[int, set[tuple[str, str]]] = {}
    for name, span in computing:
        machines.setdefault(int(span.key.rsplit("-", 1)[1]), set()).add((name, span.machine_id))
    assert all(len(found) == 1 for found in machines.values()), machines
    assert [name for attempt in sorted(machines) for name, _ in machines[attempt]] == list(order)
    for (name, before), (_, after) in pairwise(computing):
        assert before.end is not None
        if before.machine_id != after.machine_id:
            overlap = before.end - after.start
            assert overlap <= may_outlive.get(name, timedelta(0)), (name, overlap)


def _two_providers(google: str, verda: str, project: str, client_id: str) -> str:
    return f"""
[providers.gcp]
api_key = {{ env = "GCP_TOKEN" }}
base_url = "{google}"
billing_url = "{google}"
project = "{project}"
container = "none"
[providers.verda]
api_key = {{ env = "VERDA_KEY" }}
base_url = "{verda}"
client_id = "{client_id}"
container = "none"
"""


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
