"""Google's price list of parts (SKUs), and what a machine costs that is put together from them.

A machine's price is a sum of parts: a part that is missing, or whose price cannot be understood, costs its types, never
the part. Prices are kept in billionths of a dollar, as they are stated, and rounded up once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Annotated, Any, Final

from pydantic import Field

from spotd_providers.contract.values import MicroUsdPerHour
from spotd_providers.kit.shapes import Lenient, Row, row_or_none

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
_GPUS: Final[Mapping[str, frozenset[str]]] = {
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
    gpu = next((name for name, needed in _GPUS.items() if needed <= words), None)
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
