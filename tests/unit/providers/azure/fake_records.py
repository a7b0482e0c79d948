"""What the fake Azure keeps: sizes, machines, resources and operations, and its knobs."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from spotd_providers.contract.values import MicroUsdPerHour
from tests.fakes.cloud import NOTHING
from tests.fakes.rest import RestMachine, RestQuirks, RestRefusal


@dataclass(slots=True, kw_only=True)
class AzureSize:
    """One size of virtual machine.

    Attributes:
        product: what the price list calls it; Windows rows add that word.
        prices: dollars per hour on demand and as Spot by region; no Spot row where that is `None`.
        free: machines left by region and zone; the zone is "" for machines without one.
        restrictions: as the list of sizes states them, by region.
    """

    name: str
    product: str
    vcpus: int
    memory_gb: int
    gpus: int
    prices: dict[str, tuple[float, float | None]]
    is_spot_capable: bool = True
    is_arm: bool = False
    zones: tuple[str, ...] = ("1", "2", "3")
    free: dict[tuple[str, str], int] = field(default_factory=dict)
    restrictions: dict[str, str] = field(default_factory=dict)
    score: str = "High"
    eviction_rate: str = "5-10"

    @property
    def sku(self) -> str:
        """What price rows call it."""
        return self.name.removeprefix("Standard_").replace("_", " ")


@dataclass(slots=True, kw_only=True)
class AzureQuirks(RestQuirks):
    """Knobs of Azure beyond those of every REST fake.

    Attributes:
        allocates: until the operation of a launch has failed, or the machine has its host and bills.
        capacity: what an allocation without capacity fails with; `capacity_at_once` refuses the request itself.
        price_rows, list_rows, resource_rows: rows of a page. `breaks_list`: the second page of machines fails.
        cores_spot, cores: quotas of vCPU in a region.
        log_lag: so late the activity log shows what happened.
        token_lives: so long; `expires_in_says` if the answer states something else.
        upper_group: ids in answers have the resource group in upper case.
        leaves: kinds of resources that outlive a machine although that is to delete them.
        refused_paths: parts of paths (in lower case) whose calls the role does not allow.
        unpreviewed: the calls for scores and rates answer this status.
        sells_regular: machines are made with priority Regular, whatever was asked.
    """

    lingers: timedelta = timedelta(0)
    allocates: timedelta = timedelta(seconds=20)
    capacity: RestRefusal = field(
        default_factory=lambda: RestRefusal(
            409,
            "Allocation failed. We do not have sufficient capacity for the requested VM size",
            code="AllocationFailed",
        )
    )
    capacity_at_once: bool = False
    price_rows: int = 1000
    list_rows: int = 50
    breaks_list: bool = False
    resource_rows: int = 1000
    cores_spot: int = 100_000
    cores: int = 100_000
    log_lag: timedelta = timedelta(minutes=3)
    token_lives: timedelta = timedelta(seconds=3599)
    expires_in_says: Any = None
    upper_group: bool = True
    leaves: set[str] = field(default_factory=set)
    refused_paths: set[str] = field(default_factory=set)
    unpreviewed: int | None = None
    sells_regular: bool = False


@dataclass(slots=True, kw_only=True)
class AzureVm(RestMachine):
    """One virtual machine. `machine_id` is its `vmId`: a name may come back as another machine.

    `status` is `Creating`, `starting`, `running`, `stopped`, `deallocated`, `Failed` or `Deleting`.
    """

    name: str
    body: dict[str, Any]
    size: AzureSize
    region: str
    zone: str
    storage: MicroUsdPerHour
    max_price: float
    tags: dict[str, str]
    notice_at: datetime | None = None
    holds_place: bool = False
    fails: RestRefusal | None = None
    provisioning: str = ""
    """What its last change led to, where that is not what its status says."""

    @property
    def provisioning_state(self) -> str:
        if self.provisioning and self.status == "running":
            return self.provisioning
        if self.status in ("Failed", "Deleting"):
            return self.status
        return "Creating" if self.status in ("Creating", "starting") else "Succeeded"

    @property
    def power_state(self) -> str | None:
        return None if self.status in ("Creating", "Failed", "Deleting") else f"PowerState/{self.status}"


@dataclass(slots=True, kw_only=True)
class AzureResource:
    """Anything in the resource group but a machine: network, security group, disk, interface, address."""

    kind: str
    name: str
    region: str
    body: dict[str, Any]
    vm_id: str | None = None
    dies_with_vm: bool = False
    price: MicroUsdPerHour = NOTHING


@dataclass(slots=True, kw_only=True)
class AzureOperation:
    """What an asynchronous request leads to."""

    status: str = "InProgress"
    error: dict[str, str] | None = None


def some_sizes() -> tuple[AzureSize, ...]:
    """A small market: one, two and eight GPUs, fractions, a size unheard of, ARM, one without GPU, one restricted."""
    west, both = ("westeurope",), ("westeurope", "eastus")
    rows: list[tuple[str, str, int, int, int, tuple[str, ...], float, float | None]] = [
        ("NC40ads_H100_v5", "NCads H100 v5 Series", 40, 320, 1, both, 6.98, 2.513),
        ("NC80adis_H100_v5", "NCads H100 v5 Series", 80, 640, 2, west, 13.96, 5.026),
        ("ND96isr_H100_v5", "NDsr H100 v5 Series Linux", 96, 1900, 8, west, 127.816, 21.26),
        ("NC4as_T4_v3", "NCasT4 v3 Series", 4, 28, 1, both, 0.526, 0.1052),
        ("NC24ads_A100_v4", "NCads A100 v4 Series", 24, 220, 1, both, 3.673, 1.4692),
        ("NV6ads_A10_v5", "NVadsA10v5 Series", 6, 55, 1, west, 0.454, 0.0908),
        ("NV36ads_A10_v5", "NVadsA10v5 Series", 36, 440, 1, west, 3.2, 0.64),
        ("ND128isr_NDR_GB200_v6", "NDsr GB200 v6 Series", 128, 900, 4, west, 108.16, 43.2),
        ("NC99ads_Q9000_v9", "NCads Q9000 v9 Series", 99, 99, 1, west, 1.0, 0.5),
        ("D8s_v5", "Dsv5 Series", 8, 32, 0, west, 0.46, 0.092),
        ("ND40rs_v2", "NDrsv2 Series", 40, 672, 8, west, 22.032, None),
    ]
    return tuple(
        AzureSize(
            name=f"Standard_{name}",
            product=f"Virtual Machines {product}",
            vcpus=vcpus,
            memory_gb=memory_gb,
            gpus=gpus,
            prices=dict.fromkeys(regions, (price, spot)),
            is_spot_capable=spot is not None,
            is_arm="GB200" in name,
            restrictions={"eastus": "NotAvailableForSubscription"} if "A100" in name else {},
        )
        for name, product, vcpus, memory_gb, gpus, regions, price, spot in rows
    )
