"""Machine types of zones as offers: their GPUs, and Google's price list of the parts (SKUs) they are put together from.

A machine's price is a sum of parts: a part that is missing, or whose price cannot be understood, costs its types, never
the part. Prices are kept in billionths of a dollar, as they are stated, and rounded up once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from fractions import Fraction
from typing import Annotated, Any, Final

from pydantic import Field

from spotd_providers.contract.gpus import canonical
from spotd_providers.contract.values import (
    NO_GPU,
    Interruption,
    Market,
    MicroUsdPerGb,
    MicroUsdPerGbMonth,
    MicroUsdPerHour,
    Offer,
    OfferId,
    PoolId,
    QuotaId,
    Rejected,
)
from spotd_providers.googlecloud.wire import PROVIDER, GoogleSettings, last_part
from spotd_providers.kit.shapes import Lenient, Row, row_or_none, row_or_reason
from spotd_providers.kit.vm_market import Id, row_name

SERVICE: Final = "/v1/services/6F81-5844-456A/skus"
MONTH_HOURS: Final = 730
NANO_PER_MICRO: Final = 1000
UNITS_MAX: Final = 10_000_000
SKIPPED: Final = ("sole tenancy", "reserved", "premium", "custom", "suspended", "dws")
"""Words of other products: their rows are not what a plain launch costs."""
SSD: Final = "local ssd"
_USAGE: Final = {"OnDemand": False, "Preemptible": True}
_UNITS: Final = {"core": "h", "ram": "GiBy.h", "gpu": "h", "slice": "h", SSD: "GiBy.mo", "disk": "GiBy.mo"}
_MACHINE: Final = re.compile(
    r"(?P<family>[a-z0-9]+(?: ?plus)?)(?: amd| arm)?(?: predefined)? instance (?P<what>core|ram)\b"
)
_DISKS: Final = {
    "hyperdisk balanced capacity": "hyperdisk-balanced",
    "balanced pd capacity": "pd-balanced",
    "ssd backed pd capacity": "pd-ssd",
    "storage pd capacity": "pd-standard",
}
_GPU_WORDS: Final[Mapping[str, frozenset[str]]] = {
    "nvidia-b200": frozenset({"b200"}),
    "nvidia-h200-141gb": frozenset({"h200"}),
    "nvidia-h100-80gb": frozenset({"h100"}),
    "nvidia-a100-80gb": frozenset({"a100", "80gb"}),
    "nvidia-tesla-a100": frozenset({"a100"}),
    "nvidia-l4": frozenset({"l4"}),
    "nvidia-tesla-t4": frozenset({"t4"}),
    "nvidia-tesla-v100": frozenset({"v100"}),
    "nvidia-rtx-pro-6000": frozenset({"rtx", "6000"}),
}
_MEGA: Final = frozenset({"mega", "plus", "a3plus"})
Part = str
Place = tuple[str, bool, Part]
"""Region, whether Spot, part."""


class _Category(Row):
    resourceFamily: Annotated[str | None, Lenient] = None  # noqa: N815 - Google's own name
    resourceGroup: Annotated[str | None, Lenient] = None  # noqa: N815 - Google's own name
    usageType: Annotated[str | None, Lenient] = None  # noqa: N815 - Google's own name


class _Money(Row):
    currencyCode: str = "USD"  # noqa: N815 - Google's own name
    units: str | int = 0
    nanos: Annotated[int, Field(ge=0, lt=1_000_000_000)] = 0


class _Tier(Row):
    unitPrice: _Money  # noqa: N815 - Google's own name


class _Expression(Row):
    usageUnit: str  # noqa: N815 - Google's own name
    tieredRates: Annotated[list[_Tier], Field(min_length=1)]  # noqa: N815 - Google's own name


class _Pricing(Row):
    pricingExpression: _Expression  # noqa: N815 - Google's own name


class _Sku(Row):
    description: str
    category: _Category
    serviceRegions: list[str]  # noqa: N815 - Google's own name


class _Priced(Row):
    pricingInfo: Annotated[list[_Pricing], Field(min_length=1)]  # noqa: N815 - Google's own name


@dataclass(slots=True)
class PriceTable:
    """The parts of some regions. `odd` says of a part why its price cannot be used."""

    nanos: dict[Place, int] = field(default_factory=dict)
    odd: dict[Place, str] = field(default_factory=dict)

    def price(self, region: str, parts: Sequence[tuple[Part, int, int]], *, is_spot: bool) -> MicroUsdPerHour | str:
        """Return the sum of parts, each a number of them over a divisor, or the sentence why there is none."""
        total = Fraction(0)
        for part, count, divisor in parts:
            place = (region, is_spot, part)
            if part == SSD and place not in self.nanos:
                place = (region, False, part)  # the higher price: its rows for Spot do not exist everywhere
            if place in self.odd:
                return f"the price of {part} in {region}: {self.odd[place]}"
            if place not in self.nanos:
                return f"the price list names no {'Spot ' if is_spot else ''}price of {part} in {region}"
            total += Fraction(self.nanos[place] * count, divisor * NANO_PER_MICRO)
        return MicroUsdPerHour(math.ceil(total))


def part_of(description: str, group: str | None) -> Part | None:
    """Return the part of a machine that a row prices, as `core a3`; `None` for another product's row."""
    text = description.lower().replace("spot preemptible ", "")
    words = frozenset(re.findall(r"[a-z0-9]+", text.replace("80 gb", "80gb")))
    if any(one in text for one in SKIPPED):
        return None
    if (found := _MACHINE.match(text)) is not None:
        return f"{found['what']} {found['family'].replace(' ', '')}"
    for begins, kind in _DISKS.items():
        if text.startswith(begins):
            return f"disk {kind}"
    if "local" in words and words & {"ssd", "storage"}:
        return SSD
    if group != "GPU" and "gpu" not in words:
        return None
    gpu = next((name for name, needed in _GPU_WORDS.items() if needed <= words), None)
    if gpu == "nvidia-h100-80gb" and words & _MEGA:
        gpu = "nvidia-h100-mega-80gb"
    return None if gpu is None else f"{'slice' if 'slice' in words else 'gpu'} {gpu}"


def relevant(rows: Iterable[Any], regions: frozenset[str]) -> list[Any]:
    """Return the rows that may price a part in these regions: a list of prices has forty thousand."""
    found = []
    for raw in rows:
        places = raw.get("serviceRegions") if isinstance(raw, dict) else None
        if isinstance(places, list) and any(isinstance(one, str) and one in regions for one in places[:100]):
            found.append(raw)
    return found


def price_table(rows: Iterable[Any], regions: frozenset[str]) -> PriceTable:
    """Read the rows; where two price one part, the higher counts, since a launch may cost that."""
    table = PriceTable()
    for raw in rows:
        sku = row_or_none(_Sku, raw)
        if sku is None or sku.category.usageType not in _USAGE:
            continue
        part = part_of(sku.description, sku.category.resourceGroup)
        if part is None:
            continue
        unit = _UNITS[part if part == SSD else part.split()[0]]
        price = _price(row_or_none(_Priced, raw), unit)
        for region in regions & frozenset(sku.serviceRegions):
            place = (region, _USAGE[sku.category.usageType], part)
            if isinstance(price, str):
                table.odd[place] = price
            else:
                table.nanos[place] = max(price, table.nanos.get(place, 0))
    return table


def _price(row: _Priced | None, unit: str) -> int | str:
    """Return the price of the last tier in billionths of a dollar, or why there is none."""
    if row is None:
        return "its row is malformed"
    expression = row.pricingInfo[0].pricingExpression
    if expression.usageUnit != unit:
        return "it is in another unit than expected"
    return nanos_of(expression.tieredRates[-1].unitPrice)


def nanos_of(money: _Money) -> int | str:
    """Return an amount in billionths of a dollar, or why it is none."""
    if money.currencyCode != "USD":
        return "it is not in US dollars"
    text = str(money.units)
    if not text.isascii() or not text.isdecimal() or len(text) > len(str(UNITS_MAX)):
        return "it is no amount of money"
    total = int(text) * 1_000_000_000 + money.nanos
    return total or "it is nothing"


def listed_price(raw: Any) -> MicroUsdPerHour | None:
    """Read `{"currencyCode", "units", "nanos"}` as a price per hour; `None` where it is none."""
    money = row_or_none(_Money, raw)
    nanos = nanos_of(money) if money is not None else ""
    return MicroUsdPerHour(-(-nanos // NANO_PER_MICRO)) if isinstance(nanos, int) else None


SSD_GB: Final = 375
IMAGE_GB: Final = 50
"""What a machine image takes where it does not say so."""
STORAGE_MONTH_HOURS: Final = 720
ZONES_MAX: Final = 20
_GPUS: Final[Mapping[str, tuple[str, int]]] = {
    "nvidia-gb200": ("GB200", 186),
    "nvidia-b200": ("B200_SXM", 180),
    "nvidia-h200-141gb": ("H200_SXM", 141),
    "nvidia-h100-mega-80gb": ("H100_SXM", 80),
    "nvidia-h100-80gb": ("H100_SXM", 80),
    "nvidia-a100-80gb": ("A100_SXM_80", 80),
    "nvidia-tesla-a100": ("A100_SXM_40", 40),
    "nvidia-l4": ("L4", 24),
    "nvidia-rtx-pro-6000": ("RTX_PRO_6000_SE", 96),
    "nvidia-tesla-t4": ("T4", 16),
    "nvidia-tesla-v100": ("V100_16", 16),
}
"""Canonical GPU and its memory in GB by Google's type of accelerator."""
_ATTACHED: Final = {
    "nvidia-tesla-t4": ((1, 48, 312), (2, 48, 312)),
    "nvidia-tesla-v100": tuple((n, 12 * n, 78 * n) for n in (1, 2, 4, 8)),
}
"""How many GPUs may be attached to a type of N1, with the most vCPUs and GB of memory that it may have then."""
_SSD_GB: Final = {
    "a2-highgpu": 0,
    "a2-megagpu": 0,
    "a2-ultragpu": 375,
    "a3-highgpu": 750,
    "a3-megagpu": 750,
    "g2-standard": 0,
    "g4-standard": 0,
}
"""GB of local SSD for each GPU that come with a type and are billed, where the type does not state them."""
_FAMILIES: Final = {"a3-megagpu": "a3plus", "a3-ultragpu": "a3ultra"}
_SPOT_ONLY: Final = ("a4x-*", "a4-*", "a3-ultragpu-*", "a3-highgpu-1g", "a3-highgpu-2g", "a3-highgpu-4g")
_HYPERDISK: Final = ("a4x-*", "a4-*", "a3-ultragpu-*")
ARM: Final = ("a4x-*", "t2a-*", "c4a-*", "n4a-*")


class _Accelerator(Row):
    guestAcceleratorType: str  # noqa: N815 - Google's own name
    guestAcceleratorCount: Annotated[int, Field(gt=0, le=64)]  # noqa: N815 - Google's own name


class _Deprecated(Row):
    state: Annotated[str | None, Lenient] = None


class _Bundled(Row):
    partitionCount: Annotated[int, Field(ge=0, le=64)]  # noqa: N815 - Google's own name


class MachineTypeRow(Row):
    """A type of machine in a zone."""

    name: Id
    guestCpus: Annotated[int, Field(gt=0, lt=10_000)]  # noqa: N815 - Google's own name
    memoryMb: Annotated[int, Field(gt=0, lt=100_000_000)]  # noqa: N815 - Google's own name
    accelerators: list[_Accelerator] = Field(default_factory=list)
    deprecated: Annotated[_Deprecated | None, Lenient] = None
    architecture: Annotated[str | None, Lenient] = None
    bundledLocalSsds: Annotated[_Bundled | None, Lenient] = None  # noqa: N815 - Google's own name


@dataclass(frozen=True, slots=True, kw_only=True)
class GoogleKind:
    """A type with its GPUs. `attached`: they are ordered beside it."""

    row: MachineTypeRow
    zone: str
    accelerator: str = ""
    count: int = 0
    attached: bool = False

    @property
    def name(self) -> str:
        return f"{self.row.name}+{self.count}x{self.accelerator}" if self.attached else self.row.name

    @property
    def region(self) -> str:
        return self.zone.rpartition("-")[0]

    @property
    def gpu(self) -> str:
        """The canonical GPU, Google's own name where there is none."""
        known, _ = _GPUS.get(self.accelerator, ("", 0))
        return (known or canonical(PROVIDER, self.accelerator)) if self.count else NO_GPU

    def parts(self, table: PriceTable) -> list[tuple[Part, int, int]]:
        """Return what the machine is put together from; a GPU that is priced as a slice holds all else."""
        bundled, family = self.row.bundledLocalSsds, self.row.name.rpartition("-")[0]
        ssd_gb = self.count * _SSD_GB.get(family, 0) if bundled is None else bundled.partitionCount * SSD_GB
        ssd = [(SSD, ssd_gb, MONTH_HOURS)] if ssd_gb else []
        if any((self.region, is_spot, f"slice {self.accelerator}") in table.nanos for is_spot in (True, False)):
            return [(f"slice {self.accelerator}", self.count, 1), *ssd]
        family = _FAMILIES.get(family, family.partition("-")[0])
        gpus = [(f"gpu {self.accelerator}", self.count, 1)] if self.count else []
        return [(f"core {family}", self.row.guestCpus, 1), (f"ram {family}", self.row.memoryMb, 1024), *gpus, *ssd]


def kinds_of(
    rows: Iterable[Any], zone: str, attachable: frozenset[str], settings: GoogleSettings
) -> tuple[list[GoogleKind], list[Rejected]]:
    """Return the types of a zone that the settings name, each with its GPUs, and those that cannot be used."""
    kinds: list[GoogleKind] = []
    bad: list[Rejected] = []
    for raw in rows:
        name = row_name(raw, "name")
        is_gpu, is_cpu = (_fits(name, patterns) for patterns in (settings.machine_types, settings.cpu_types))
        if not is_gpu and not is_cpu and name != "unreadable":
            continue
        row = row_or_reason(MachineTypeRow, raw, offer_id=f"{name}:{zone}")
        if isinstance(row, Rejected):
            bad.append(row)
            continue
        reason = _why_not(row)
        if reason:
            bad.append(Rejected(offer_id=f"{name}:{zone}", reason=reason))
        elif row.accelerators:
            one = row.accelerators[0]
            kinds.append(
                GoogleKind(row=row, zone=zone, accelerator=one.guestAcceleratorType, count=one.guestAcceleratorCount)
            )
        else:
            kinds += _with_attached(row, zone, attachable) if is_gpu else []
            kinds += [GoogleKind(row=row, zone=zone)] if is_cpu else []
    return kinds, bad


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, one) for one in patterns)


def _why_not(row: MachineTypeRow) -> str:
    if row.deprecated is not None and row.deprecated.state in ("DEPRECATED", "OBSOLETE", "DELETED"):
        return f"Google calls the type {row.deprecated.state.lower()}"
    if (row.architecture or "").upper() == "ARM64" or _fits(row.name, ARM):
        return "an ARM machine"
    if len(row.accelerators) > 1:
        return "several kinds of accelerators in one machine"
    if any(one.guestAcceleratorType.endswith("-vws") for one in row.accelerators):
        return "a workstation's GPU with a licence of its own"
    if row.accelerators and row.bundledLocalSsds is None and row.name.rpartition("-")[0] not in _SSD_GB:
        return "Google does not say how much local SSD comes with the type, which is billed"
    return ""


def _with_attached(row: MachineTypeRow, zone: str, attachable: frozenset[str]) -> list[GoogleKind]:
    if not row.name.startswith("n1-"):
        return []
    return [
        GoogleKind(row=row, zone=zone, accelerator=accelerator, count=count, attached=True)
        for accelerator, limits in _ATTACHED.items()
        if accelerator in attachable
        for count, cpus_max, gb_max in limits
        if row.guestCpus <= cpus_max and row.memoryMb <= gb_max * 1024
    ]


def disk_type_of(type_name: str, settings: GoogleSettings) -> str:
    return settings.disk_type or ("hyperdisk-balanced" if _fits(type_name, _HYPERDISK) else "pd-balanced")


def offers_of(
    kinds: Sequence[GoogleKind],
    table: PriceTable,
    settings: GoogleSettings,
    *,
    markets: Iterable[Market],
    image_gb: int,
    scores: Mapping[tuple[str, str], tuple[int | None, int | None]],
) -> tuple[list[Offer], list[Rejected]]:
    """Return an offer for each type and market whose parts have prices; `scores` by type and zone."""
    offers: list[Offer] = []
    bad: list[Rejected] = []
    for kind in kinds:
        prices = {is_spot: table.price(kind.region, kind.parts(table), is_spot=is_spot) for is_spot in (True, False)}
        for market in markets:
            is_spot = market is Market.SPOT
            price, number = prices[is_spot], offer_id(kind, market)
            if not is_spot and _fits(kind.row.name, _SPOT_ONLY):
                bad.append(Rejected(offer_id=number, reason="Google sells this type as Spot or reserved only"))
            elif isinstance(price, str):
                bad.append(Rejected(offer_id=number, reason=price))
            else:
                found = _offer(kind, market, price, table, settings, image_gb)
                on_demand = prices[False]
                score, hazard = scores.get((kind.name, kind.zone), (None, None)) if is_spot else (None, None)
                known = on_demand if isinstance(on_demand, int) else None
                offers.append(replace(found, on_demand_price=known, capacity_score=score, hazard_ppm=hazard))
    return offers, bad


def offer_id(kind: GoogleKind, market: Market) -> OfferId:
    return OfferId(f"{kind.name}:{kind.zone}:{market}")


def disk_price(kind: GoogleKind, table: PriceTable, settings: GoogleSettings) -> MicroUsdPerGbMonth:
    """Return what the boot disk costs by the price list, else by the settings."""
    listed = table.price(kind.region, [(f"disk {disk_type_of(kind.row.name, settings)}", 1, 1)], is_spot=False)
    return MicroUsdPerGbMonth(listed if isinstance(listed, int) else settings.disk_usd_per_gb_month)


def _offer(
    kind: GoogleKind, market: Market, price: MicroUsdPerHour, table: PriceTable, settings: GoogleSettings, image_gb: int
) -> Offer:
    _, vram_gb = _GPUS.get(kind.accelerator, ("", 0))
    is_spot = market is Market.SPOT
    disk = disk_price(kind, table, settings)
    address = settings.address_usd_per_h if settings.external_ip else 0
    metric = kind.accelerator.removeprefix("nvidia-").removeprefix("tesla-").replace("-", "_").upper() or "CPUS"
    return Offer(
        provider=PROVIDER,
        offer_id=offer_id(kind, market),
        pool=PoolId(f"{kind.name}:{kind.zone}"),
        quotas=(QuotaId(f"{kind.region} {'Spot ' if is_spot else ''}{metric}"),),
        market=market,
        interruption=Interruption.NOTICE if is_spot else Interruption.NEVER,
        gpu=kind.gpu,
        gpu_count=kind.count,
        gpu_vram_mb=vram_gb * 1024 or None,
        gpu_price=price,
        storage_price=disk,
        storage_fixed=MicroUsdPerHour(address + -(-disk * image_gb // STORAGE_MONTH_HOURS)),
        upload_price=MicroUsdPerGb(settings.egress_usd_per_gb),
        region=kind.zone,
        cpus=float(kind.row.guestCpus),
        memory_mb=kind.row.memoryMb,
        duration_max=settings.max_run,
        extra={
            "type": kind.row.name,
            "zone": kind.zone,
            "name": kind.name,
            **({"accelerator": kind.accelerator} if kind.attached else {}),
        },
    )


def zones_of(row: Any, settings: GoogleSettings) -> tuple[str, list[str], bool]:
    """Return the name of a region, its zones, and whether these are all; an empty name for one not asked for."""
    name = row.get("name") if isinstance(row, dict) else None
    if not isinstance(name, str) or name not in settings.regions:
        return "", [], isinstance(name, str)
    zones = row.get("zones")
    said = zones if isinstance(zones, list) else []
    found = [one for one in map(last_part, said[:ZONES_MAX]) if one.startswith(f"{name}-")]
    return name, sorted(set(found)), 0 < len(found) == len(said)
