"""AWS's own list of on-demand prices, from the Price List API: one price for each type.

The list knows every system, tenancy and licence. All of `MEANT` has to be asked for, and is checked again in the
answer, so that a Windows or dedicated price is never taken for a machine's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from pydantic import Field, ValidationError

from spotd_providers.contract.money import MicroUsdPerHour, micro_usd
from spotd_providers.kit.shapes import Row

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
