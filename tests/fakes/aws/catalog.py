"""What the fake sells: a few real instance types, and zones whose ids differ from their names, as they do for real."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One instance type.

    Attributes:
        gpu: empty for a type without one.
        gpus: what `GpuInfo.Gpus[].Count` says: 0 for the fractions of `g6f`.
        on_demand: list price in us-east-1, $/h.
        spot: what the fake asks for at first, $/h.
        efa: how many EFA interfaces it takes at most.
    """

    name: str
    gpu: str
    gpus: int
    mib: int
    vcpus: int
    ram_gib: int
    on_demand: str
    spot: str
    network: str = "Up to 10 Gigabit"
    nvme_gb: int = 0
    maker: str = "NVIDIA"
    arch: str = "x86_64"
    fraction: float | None = None
    efa: int = 0

    def quota(self, *, spot: bool) -> str:
        """The Service Quotas code of the limit that it counts against."""
        if not self.gpu:
            return "L-34B43A08" if spot else "L-1216C47A"
        if self.name[0] == "g":
            return "L-3819A6DF" if spot else "L-DB2E81BA"
        if not spot:
            return "L-417A185B"
        return "L-C4BD4855" if self.name.startswith("p5") else "L-7212CCBC"

    def row(self) -> dict[str, Any]:
        """The type as DescribeInstanceTypes tells it."""
        gpu: dict[str, Any] = {
            "name": self.gpu,
            "manufacturer": self.maker,
            "count": self.gpus,
            "memoryInfo": {"sizeInMiB": self.mib},
        }
        if self.fraction is not None:
            gpu |= {"logicalGpuCount": 1, "gpuPartitionSize": self.fraction}
        return {
            "instanceType": self.name,
            "currentGeneration": True,
            "freeTierEligible": False,
            "supportedUsageClasses": ["on-demand", "spot"],
            "bareMetal": False,
            "processorInfo": {"supportedArchitectures": [self.arch], "sustainedClockSpeedInGhz": 2.5},
            "vCpuInfo": {"defaultVCpus": self.vcpus},
            "memoryInfo": {"sizeInMiB": self.ram_gib * 1024},
            "instanceStorageSupported": bool(self.nvme_gb),
            "instanceStorageInfo": {"totalSizeInGB": self.nvme_gb} if self.nvme_gb else None,
            "networkInfo": {
                "networkPerformance": self.network,
                "maximumNetworkCards": max(1, self.efa),
                "efaSupported": bool(self.efa),
                "efaInfo": {"maximumEfaInterfaces": self.efa} if self.efa else None,
            },
            "placementGroupInfo": {"supportedStrategies": ["cluster", "partition", "spread"]},
            "gpuInfo": {"gpus": [gpu], "totalGpuMemoryInMiB": self.mib * max(1, self.gpus)} if self.gpu else None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Zone:
    """An availability zone: its name is this account's own, its id is not."""

    region: str
    name: str
    zone_id: str

    @property
    def subnet(self) -> str:
        """The default one of the zone."""
        return f"subnet-0{self.zone_id.replace('-', '')}"

    @property
    def subnets(self) -> tuple[str, str]:
        """The default one, whose machines get public addresses, and a private one that somebody added."""
        return self.subnet, f"{self.subnet}b"

    @property
    def vpc(self) -> str:
        """The default VPC of its region."""
        return f"vpc-0{self.region.replace('-', '')}"


PLAIN_KIND: Final = Kind(name="m7i.xlarge", gpu="", gpus=0, mib=0, vcpus=4, ram_gib=16, on_demand="0.2016", spot="0.08")
KINDS: Final = (
    Kind(name="g4dn.xlarge", gpu="T4", gpus=1, mib=16384, vcpus=4, ram_gib=16, on_demand="0.526", spot="0.1578"),
    Kind(name="g4dn.12xlarge", gpu="T4", gpus=4, mib=16384, vcpus=48, ram_gib=192, on_demand="3.912", spot="1.5648"),
    Kind(name="g5.xlarge", gpu="A10G", gpus=1, mib=22888, vcpus=4, ram_gib=16, on_demand="1.006", spot="0.4123"),
    Kind(name="g5.2xlarge", gpu="A10G", gpus=1, mib=22888, vcpus=8, ram_gib=32, on_demand="1.212", spot="0.5211"),
    Kind(name="g5.4xlarge", gpu="A10G", gpus=1, mib=22888, vcpus=16, ram_gib=64, on_demand="1.624", spot="0.6934"),
    Kind(
        name="g6f.large", gpu="L4", gpus=0, mib=2861, vcpus=2, ram_gib=8, on_demand="0.202", spot="0.3", fraction=0.125
    ),
    Kind(name="g6e.xlarge", gpu="L40S", gpus=1, mib=45776, vcpus=4, ram_gib=32, on_demand="1.861", spot="0.7816"),
    Kind(
        name="p4d.24xlarge",
        gpu="A100",
        gpus=8,
        mib=40960,
        vcpus=96,
        ram_gib=1152,
        on_demand="21.9576",
        spot="9.7312",
        efa=4,
    ),
    Kind(
        name="p5.48xlarge",
        gpu="H100",
        gpus=8,
        mib=81920,
        vcpus=192,
        ram_gib=2048,
        on_demand="55.04",
        spot="24.1178",
        efa=32,
    ),
    Kind(
        name="g5g.xlarge",
        gpu="T4g",
        gpus=1,
        mib=16384,
        vcpus=4,
        ram_gib=8,
        on_demand="0.42",
        spot="0.16",
        arch="arm64",
    ),
    Kind(
        name="g4ad.xlarge",
        gpu="Radeon Pro V520",
        gpus=1,
        mib=8192,
        vcpus=4,
        ram_gib=16,
        on_demand="0.379",
        spot="0.15",
        maker="AMD",
    ),
)

ZONES: Final = (
    Zone(region="us-east-1", name="us-east-1a", zone_id="use1-az6"),
    Zone(region="us-east-1", name="us-east-1b", zone_id="use1-az1"),
    Zone(region="us-east-1", name="us-east-1c", zone_id="use1-az2"),
    Zone(region="us-west-2", name="us-west-2a", zone_id="usw2-az2"),
    Zone(region="us-west-2", name="us-west-2b", zone_id="usw2-az1"),
)
