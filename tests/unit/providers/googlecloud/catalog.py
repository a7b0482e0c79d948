"""What the fake Google Cloud sells: machine types, the catalogue of prices, and knobs for what the API leaves open."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta
from fractions import Fraction
from typing import Any, Final

from spotd_providers.contract.values import MicroUsdPerHour
from tests.fakes.rest import MONTH_HOURS, RestQuirks

ZONES: Final = {"us-central1": ("us-central1-a", "us-central1-b"), "europe-west4": ("europe-west4-a",)}
REGION_PERCENT: Final = {"us-central1": 100, "europe-west4": 130}
"""What a region's prices are, of those of us-central1."""
COMPUTE_SERVICE: Final = "6F81-5844-456A"
IMAGE_PROJECT: Final = "deeplearning-platform-release"
IMAGES: Final = {"common-cu129-ubuntu-2204": "common-cu129-ubuntu-2204-v20261101", "common-cu128": "common-cu128-v1"}
SPOT_ONLY: Final = ("a4x-", "a4-", "a3-ultragpu-", "a3-highgpu-1g", "a3-highgpu-2g", "a3-highgpu-4g")
SPOT_PERCENT: Final = 30
LOCAL_SSD: Final = "local-ssd"
DISK_MONTH_NANOS: Final = {"pd-balanced": 100_000_000, "pd-ssd": 170_000_000, "hyperdisk-balanced": 125_000_000}
IP_HOUR_NANOS: Final = {True: 2_500_000, False: 5_000_000}
ATTACHED: Final = {"nvidia-tesla-t4": "Nvidia Tesla T4 GPU", "nvidia-tesla-v100": "Nvidia Tesla V100 GPU"}
SCRIPT_BYTES_MAX: Final = 256 * 1024
METADATA_BYTES_MAX: Final = 512 * 1024


@dataclass(slots=True, kw_only=True)
class Family:
    """How machines of one family are priced on demand, in nano-dollars of us-central1; 0 where no such row exists.

    Attributes:
        gpu_words: of the row for its GPU. `slice_words` are added where a GPU has one price with all that goes with it.
    """

    words: str
    core: int
    ram: int
    gpu: int = 0
    gpu_words: str = ""
    gpu_type: str = ""
    is_sliced: bool = False


@dataclass(slots=True, kw_only=True)
class Kind:
    """A machine type. `free` counts what is left by zone and by whether it is spot."""

    name: str
    cpus: int
    memory_mb: int
    gpus: int = 0
    ssd_gb: int = 0
    is_deprecated: bool = False
    free: dict[tuple[str, bool], int] = field(default_factory=dict)

    @property
    def family(self) -> str:
        middle = "-mega" if "megagpu" in self.name else "-ultra" if self.name.startswith("a2-ultra") else ""
        return self.name.partition("-")[0] + middle


def families() -> dict[str, Family]:
    return {
        "a2": Family(
            words="A2 Instance", core=31_611_000, ram=4_237_000, gpu=2_933_908_000,
            gpu_words="Nvidia Tesla A100 GPU", gpu_type="nvidia-tesla-a100",
        ),
        "a2-ultra": Family(
            words="A2 Instance", core=31_611_000, ram=4_237_000, gpu=3_929_100_000,
            gpu_words="Nvidia Tesla A100 80GB GPU", gpu_type="nvidia-a100-80gb",
        ),
        "a3": Family(
            words="A3 Instance", core=29_380_000, ram=2_560_000, gpu=9_796_550_000,
            gpu_words="Nvidia H100 80GB GPU", gpu_type="nvidia-h100-80gb",
        ),
        "a3-mega": Family(
            words="A3Plus Instance", core=29_380_000, ram=2_560_000, gpu=9_900_000_000,
            gpu_words="Nvidia H100 80GB Plus GPU", gpu_type="nvidia-h100-mega-80gb",
        ),
        "a4": Family(
            words="A4", core=0, ram=0, gpu=16_100_000_000,
            gpu_words="A4 Nvidia B200", gpu_type="nvidia-b200", is_sliced=True,
        ),
        "g2": Family(
            words="G2 Instance", core=24_988_000, ram=2_927_000, gpu=560_040_000,
            gpu_words="Nvidia L4 GPU", gpu_type="nvidia-l4",
        ),
        "n1": Family(words="N1 Predefined Instance", core=31_611_000, ram=4_237_000),
    }  # fmt: skip


def some_kinds() -> list[Kind]:
    """A market with several GPUs, some of them for spot alone, and machines without any."""
    us, more, eu = "us-central1-a", "us-central1-b", "europe-west4-a"
    both = {(zone, spot): 9 for zone in (us, more, eu) for spot in (True, False)}
    spot = {(zone, True): 9 for zone in (us, eu)}
    kinds = [
        Kind(name="a2-highgpu-1g", cpus=12, memory_mb=87_040, gpus=1, free=both),
        Kind(name="a2-ultragpu-1g", cpus=12, memory_mb=174_080, gpus=1, ssd_gb=375, free=both),
        Kind(name="a3-highgpu-8g", cpus=208, memory_mb=1_916_928, gpus=8, ssd_gb=6000, free=both),
        Kind(name="a3-highgpu-1g", cpus=26, memory_mb=239_616, gpus=1, ssd_gb=750, free=spot),
        Kind(name="a3-megagpu-8g", cpus=208, memory_mb=1_916_928, gpus=8, ssd_gb=6000, free={(us, False): 2}),
        Kind(name="a4-highgpu-8g", cpus=224, memory_mb=4_063_232, gpus=8, ssd_gb=12_000, free={(us, True): 2}),
        Kind(name="g2-standard-4", cpus=4, memory_mb=16_384, gpus=1, free=both),
        Kind(name="g2-standard-24", cpus=24, memory_mb=98_304, gpus=2, free=both),
        Kind(name="n1-standard-8", cpus=8, memory_mb=30_720, free=both),
        Kind(name="n1-standard-4", cpus=4, memory_mb=15_360, is_deprecated=True, free={(us, False): 1}),
    ]
    return [replace(one, free=dict(one.free)) for one in kinds]


@dataclass(slots=True, kw_only=True)
class GoogleQuirks(RestQuirks):
    """Knobs for what Google leaves open or does now and then, beside those of every REST fake.

    Attributes:
        insert_takes: until the operation of an insert is done; a wait for it ends at once, as the server holds it.
        waits_cut: so many waits end before their operation is done.
        capacity_by: who says that there is nothing left: the `operation`, or the `insert` itself, with 503.
        capacity_code, quota_by: likewise, and the code in the operation.
        silent_paths: ends of paths that answer 503. `attachable`: what every zone lists as types of accelerators.
        unreachable: zones whose machines are not listed, with a warning in their place.
        page_rows: rows of one page at most.
        advice_refused: status with which both calls for advice are refused; `None` where they answer.
        obtainability, preemption_rate: what they say; texts or other nonsense are sent as they are.
        leaves_disk: a deleted machine's disk stays, whatever its `autoDelete` says.
        preempted_after: from the notice to the end of a machine that was given one.
        logs_late: so long an operation of the system is missing from the log of operations.
    """

    boot: timedelta = timedelta(minutes=1)
    ending: timedelta = timedelta(seconds=30)
    lingers: timedelta = timedelta(0)
    insert_takes: timedelta = timedelta(seconds=5)
    waits_cut: int = 0
    capacity_by: str = "operation"
    capacity_code: str = "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS"
    quota_by: str = "insert"
    silent_paths: set[str] = field(default_factory=set)
    attachable: tuple[str, ...] = ()
    unreachable: set[str] = field(default_factory=set)
    page_rows: int | None = None
    advice_refused: int | None = None
    obtainability: Any = 0.72
    preemption_rate: Any = 0.21
    leaves_disk: bool = False
    logs_late: timedelta = timedelta(0)


def region_of(zone: str) -> str:
    return zone.rpartition("-")[0]


def unit_nanos(base: int, region: str, *, is_spot: bool) -> int:
    """The price of one unit in a region and market."""
    return base * REGION_PERCENT[region] // 100 * (SPOT_PERCENT if is_spot else 100) // 100


SSD_MONTH: Final = 80_000_000


def hourly(
    prices: dict[str, Family], attached: dict[str, int], kind: Kind, zone: str, *, is_spot: bool, more: dict[str, int]
) -> MicroUsdPerHour:
    """What a machine with these further GPUs costs per hour: cores, memory, GPUs and local SSD, rounded up."""
    region, family = region_of(zone), prices[kind.family]

    def unit(base: int) -> int:
        return unit_nanos(base, region, is_spot=is_spot)

    nanos = Fraction(kind.cpus * unit(family.core) + kind.gpus * unit(family.gpu))
    nanos += Fraction(kind.memory_mb, 1024) * unit(family.ram) + Fraction(kind.ssd_gb * unit(SSD_MONTH), MONTH_HOURS)
    nanos += sum(count * unit(attached[name]) for name, count in more.items())
    return MicroUsdPerHour(-(-nanos.numerator // (nanos.denominator * 1000)))


def sku_rows(prices: dict[str, Family], attached: dict[str, int]) -> list[dict[str, Any]]:
    """The catalogue of Compute Engine: also rows of products that no machine of ours is."""
    found: list[dict[str, Any]] = []

    def add(
        words: str,
        base: int,
        group: str,
        unit: str,
        *,
        family: str = "Compute",
        markets: tuple[bool, ...] = (True, False),
    ) -> None:
        for region in ZONES:
            for is_spot in markets if base else ():
                found.append(
                    _sku(
                        f"{'Spot Preemptible ' if is_spot else ''}{words} running in {region}",
                        [(0, unit_nanos(base, region, is_spot=is_spot))],
                        (family, group, "Preemptible" if is_spot else "OnDemand", unit),
                        region,
                        len(found),
                    )
                )

    seen: set[str] = set()
    for one in prices.values():
        if one.words not in seen:
            add(f"{one.words} Core", one.core, "CPU", "h")
            add(f"{one.words} Ram", one.ram, "RAM", "GiBy.h")
        seen.add(one.words)
        add(one.gpu_words + (" (1 gpu slice)" if one.is_sliced else ""), one.gpu, "GPU", "h")
    for name, base in attached.items():
        add(ATTACHED[name], base, "GPU", "h")
    add("SSD backed Local Storage", SSD_MONTH, "LocalSSD", "GiBy.mo", family="Storage")
    for kind, base in DISK_MONTH_NANOS.items():
        words = {"pd-balanced": "Balanced PD Capacity", "pd-ssd": "SSD backed PD Capacity"}.get(
            kind, "Hyperdisk Balanced Capacity"
        )
        add(words, base, "SSD", "GiBy.mo", family="Storage", markets=(False,))
    for words in ("Sole Tenancy Premium for A2 Instance Core", "Reserved A3 Instance Core", "N1 Custom Instance Core",
                  "Nvidia H100 80GB GPU suspended", "A4 Nvidia B200 (1 gpu slice) DWS Calendar Mode"):  # fmt: skip
        add(words, 1_000_000, "GPU" if "Nvidia" in words else "CPU", "h", markets=(False,))
    row = ("Compute", "GPU", "Commit1Yr", "h")
    found.append(_sku("Commitment v1: Nvidia L4 GPU", [(0, 350_000_000)], row, "us-central1", len(found)))
    for is_spot, nanos in IP_HOUR_NANOS.items():
        words = f"External IP Charge on a {'Spot Preemptible' if is_spot else 'Standard'} VM"
        row = ("Network", "IpAddress", "Preemptible" if is_spot else "OnDemand", "h")
        tiers = [(0, 0), (1, nanos)]
        found += [_sku(words, tiers, row, region, len(found) + number) for number, region in enumerate(ZONES)]
    return found


def _sku(
    words: str, tiers: list[tuple[int, int]], category: tuple[str, str, str, str], region: str, number: int
) -> dict[str, Any]:
    family, group, usage, unit = category
    sku_id = f"{number:04X}-5D0C-{number * 7919 % 65536:04X}"
    return {
        "name": f"services/{COMPUTE_SERVICE}/skus/{sku_id}",
        "skuId": sku_id,
        "description": words,
        "category": {
            "serviceDisplayName": "Compute Engine",
            "resourceFamily": family,
            "resourceGroup": group,
            "usageType": usage,
        },
        "serviceRegions": [region],
        "pricingInfo": [
            {
                "summary": "",
                "pricingExpression": {
                    "usageUnit": unit,
                    "displayQuantity": 1,
                    "tieredRates": [
                        {
                            "startUsageAmount": start,
                            "unitPrice": {
                                "currencyCode": "USD",
                                "units": str(nanos // 10**9),
                                "nanos": nanos % 10**9,
                            },
                        }
                        for start, nanos in tiers
                    ],
                },
                "currencyConversionRate": 1,
            }
        ],
        "serviceProviderName": "Google",
    }
