"""On-demand prices (the user's own, AWS's price list, or a built-in table of a stated date), and the Spot Advisor.

The table stands in where the price list may not be read. It holds us-east-1 alone: another region's prices differ by up
to a half, so nothing is guessed there, and its on-demand machines are rejected with the way out.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Annotated, Any, Final

from pydantic import Field, ValidationError

from spotd_providers.aws.wire import Text
from spotd_providers.contract.values import MicroUsdPerHour, micro_usd
from spotd_providers.kit.shapes import Row, row_or_none

TABLE_DATE: Final = date(2026, 7, 20)
TABLE_REGION: Final = "us-east-1"


def _price_table(text: str) -> Mapping[str, str]:
    """Read lines of a family with its sizes and their prices."""
    rows = [line.split() for line in text.split("\n") if line.strip()]
    return {
        f"{family}.{size}": price for family, *rest in rows for size, price in zip(rest[::2], rest[1::2], strict=True)
    }


# Linux, shared tenancy, USD per hour, from AWS's price list of that date.
_US_EAST_1: Final = _price_table(
    """
    g4dn     xlarge 0.526  2xlarge 0.752  4xlarge 1.204  8xlarge 2.176  12xlarge 3.912  16xlarge 4.352  metal 7.824
    g5       xlarge 1.006  2xlarge 1.212  4xlarge 1.624  8xlarge 2.448  16xlarge 4.096  12xlarge 5.672
    g5       24xlarge 8.144  48xlarge 16.288
    g6f      large 0.202  xlarge 0.2375  2xlarge 0.475  4xlarge 0.95
    g6       xlarge 0.8048  2xlarge 0.9776  4xlarge 1.3232  8xlarge 2.0144  16xlarge 3.3968  12xlarge 4.6016
    g6       24xlarge 6.6752  48xlarge 13.3504
    gr6      4xlarge 1.5392  8xlarge 2.4464
    g6e      xlarge 1.861  2xlarge 2.2421  4xlarge 3.0042  8xlarge 4.5286  16xlarge 7.5772  12xlarge 10.4926
    g6e      24xlarge 15.0656  48xlarge 30.1312
    g7       2xlarge 2.52  4xlarge 3.0421  8xlarge 4.0862  12xlarge 7.1283  24xlarge 14.2566  48xlarge 28.5133
    g7e      2xlarge 3.3631  4xlarge 3.9982  8xlarge 5.2682  12xlarge 8.2861  24xlarge 16.5722  48xlarge 33.1443
    p3       2xlarge 3.06  8xlarge 12.24  16xlarge 24.48
    p3dn     24xlarge 31.212
    p4d      24xlarge 21.9576
    p4de     24xlarge 27.4471
    p5       4xlarge 6.88  48xlarge 55.04
    p5en     48xlarge 63.296
    p6-b200  48xlarge 113.9328
    p6-b300  48xlarge 142.416
    """
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsOnDemandPrices:
    """The known on-demand prices of one region.

    Attributes:
        own: the user's figures, $/h.
        listed: AWS's price list.
        last_error: why there is no price list, empty if there is one.
    """

    region: str
    own: Mapping[str, float] = field(default_factory=dict)
    listed: Mapping[str, MicroUsdPerHour] = field(default_factory=dict)
    last_error: str = ""

    def price(self, instance_type: str) -> MicroUsdPerHour | None:
        """Return the hourly price of a type; `None` where none is known."""
        own = self.own.get(instance_type)
        if own is not None:
            return MicroUsdPerHour(micro_usd(own))
        listed = self.listed.get(instance_type)
        if listed is not None or self.listed:
            # A list that was read and lacks the type says that it is not sold on-demand here.
            return listed
        built_in = _US_EAST_1.get(instance_type) if self.region == TABLE_REGION else None
        return None if built_in is None else MicroUsdPerHour(micro_usd(built_in))

    def absence(self) -> str:
        """Return why a type has no price here."""
        if self.listed:
            return f"AWS's price list has no on-demand price of it in {self.region}; set on_demand_usd"
        why = f" ({self.last_error})" if self.last_error else ""
        return (
            f"no on-demand price of it is known in {self.region}{why}; allow pricing:GetProducts or set on_demand_usd"
        )


# AWS's own list of on-demand prices, from the Price List API: one price for each type.
#
# The list knows every system, tenancy and licence. All of `MEANT` has to be asked for, and is checked again in the
# answer, so that a Windows or dedicated price is never taken for a machine's.


VALUE_CHARS_MAX: Final = 1024
MEANT: Final[Mapping[str, str]] = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "preInstalledSw": "NA",
    "capacitystatus": "Used",
    "licenseModel": "No License required",
    "marketoption": "OnDemand",
}
_HOME: Final = "us-east-1"
_BY_AREA: Final[Mapping[str, str]] = {"eu": "eu-central-1", "ap": "ap-south-1"}


class Dimension(Row):
    unit: str
    price_per_unit: dict[str, str] = Field(alias="pricePerUnit")


class Term(Row):
    dimensions: dict[str, Dimension] = Field(alias="priceDimensions")


class OfferTerms(Row):
    OnDemand: dict[str, Term]


class Product(Row):
    attributes: dict[str, str]


class ListedProduct(Row):
    product: Product
    terms: OfferTerms


def endpoint_region(region: str) -> str:
    """Return the region of the nearest Price List endpoint; there are three."""
    return _BY_AREA.get(region.partition("-")[0], _HOME)


def questions(region: str, types: Iterable[str]) -> list[list[dict[str, str]]]:
    """Build as few filters as name all these types: the length of a filter's value is limited."""
    fixed = [{"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in MEANT.items()]
    fixed.append({"Type": "TERM_MATCH", "Field": "regionCode", "Value": region})
    found: list[list[dict[str, str]]] = []
    named = ""
    for kind in sorted(types):
        if named and len(named) + 1 + len(kind) > VALUE_CHARS_MAX:
            found.append([*fixed, _any_of(named)])
            named = ""
        named = f"{named},{kind}" if named else kind
    return [*found, [*fixed, _any_of(named)]] if named else found


def listed_prices(rows: Sequence[Any], region: str) -> dict[str, MicroUsdPerHour]:
    """Return the hourly price of each instance type; of several prices the highest, so that none is understated."""
    prices: dict[str, MicroUsdPerHour] = {}
    for row in rows:
        listed = _read(row)
        if listed is None or not _is_meant(listed.product.attributes, region):
            continue
        kind = listed.product.attributes.get("instanceType", "")
        for price in _hourly(listed):
            if kind and price > prices.get(kind, 0):
                prices[kind] = price
    return prices


def _any_of(named: str) -> dict[str, str]:
    return {"Type": "ANY_OF", "Field": "instanceType", "Value": named}


def _read(row: Any) -> ListedProduct | None:
    try:
        # Every row is a text of its own that holds JSON.
        return ListedProduct.model_validate_json(row) if isinstance(row, str) else ListedProduct.model_validate(row)
    except ValidationError:
        return None


def _is_meant(attributes: Mapping[str, str], region: str) -> bool:
    if attributes.get("regionCode") != region:
        return False
    return all(attributes.get(field, wanted) == wanted for field, wanted in MEANT.items())


def _hourly(listed: ListedProduct) -> Iterable[MicroUsdPerHour]:
    for term in listed.terms.OnDemand.values():
        for dimension in term.dimensions.values():
            if dimension.unit != "Hrs":
                continue
            try:
                price = micro_usd(dimension.price_per_unit.get("USD", "0"))
            except ValueError:
                continue
            if price > 0:
                yield MicroUsdPerHour(price)


# AWS's Spot Advisor: how many machines of a type were interrupted in a region within a month, in five bands.
#
# A public document, republished now and then: a prior and no more. It says little on top of the price: the worst band
# is a loss every two or three months, which is two hundredths of a percent of the price. So it decides only between
# offers that cost the same.


SYSTEM: Final = "Linux"
HOURS_PER_MONTH: Final = 730
OPEN_END_FACTOR: Final = 1.5
"""The last band has no upper end: what is in it counts as half above its lower one."""
_GZIP: Final = b"\x1f\x8b"
_BYTES_MAX: Final = 32_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A share of machines that are interrupted within a month; `percent` is the figure that is used."""

    label: str
    percent: float

    @property
    def hazard_ppm(self) -> int:
        """Interruptions per million machine-hours."""
        return round(-math.log(1 - self.percent / 100) / HOURS_PER_MONTH * 1_000_000)


class _Range(Row):
    index: Annotated[int, Field(ge=0, lt=100)]
    label: Text
    max: Annotated[int, Field(gt=0, le=100)]


class _Advice(Row):
    r: Annotated[int, Field(ge=0, lt=100)]


class _Document(Row):
    ranges: list[_Range] = Field(min_length=1)
    spot_advisor: dict[str, dict[str, dict[str, Any]]]


def read_advisor(content: bytes) -> Mapping[tuple[str, str], Band]:
    """Read the band of each region and type for machines with Linux. A row that cannot be read costs itself only.

    Raises:
        ValueError: it is not the Spot Advisor's document.
    """
    try:
        text = gzip.decompress(content) if content.startswith(_GZIP) else content
        document = _Document.model_validate(json.loads(text[:_BYTES_MAX]))
    except (OSError, EOFError, ValidationError, RecursionError, ValueError) as exc:
        raise ValueError(f"it is no copy of spot-advisor-data.json ({type(exc).__name__})") from None
    bands = _bands(document.ranges)
    found: dict[tuple[str, str], Band] = {}
    for region, systems in document.spot_advisor.items():
        for kind, raw in systems.get(SYSTEM, {}).items():
            row = row_or_none(_Advice, raw)
            if row is not None and row.r in bands:
                found[region, kind] = bands[row.r]
    return found


def _bands(ranges: list[_Range]) -> dict[int, Band]:
    bands: dict[int, Band] = {}
    below = 0.0
    for row in sorted(ranges, key=lambda row: row.max):
        percent = float(row.max) if row.max < 100 else min(99.0, below * OPEN_END_FACTOR or 50.0)
        bands[row.index] = Band(label=row.label, percent=percent)
        below = row.max
    return bands
