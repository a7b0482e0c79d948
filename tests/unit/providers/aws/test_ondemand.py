"""What an on-demand machine costs in each region: AWS's list where it may be read, a dated table where it may not."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

from spotd_providers.aws.plugin import AwsProvider
from spotd_providers.aws.prices import VALUE_CHARS_MAX, AwsOnDemandPrices, endpoint_region, listed_prices, questions
from spotd_providers.aws.sdk import AwsSettings
from spotd_providers.contract.values import Market, MicroUsdPerHour, OfferPage
from tests.cases import every
from tests.fakes.aws import Quirks
from tests.unit.providers.aws.harness import AwsHarness
from tests.unit.providers.aws.stories import official, play

DENIED = Quirks(allowed=lambda action: action != "pricing:GetProducts")


def prices(page: OfferPage) -> dict[tuple[str, str], int]:
    """By type and region, the on-demand price."""
    return {(o.extra["type"], o.region): o.gpu_price for o in page.offers if o.market is Market.ON_DEMAND}


def test_each_region_has_the_price_of_its_own_list(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        page = await provider.offers(h.query())
        found = prices(page)
        assert found["g5.xlarge", "us-east-1"] == 1_006_000
        assert found["g5.xlarge", "us-west-2"] == 1_106_600
        assert {(o.on_demand_price, o.region) for o in page.offers if o.extra["type"] == "g5.xlarge"} == {
            (1_006_000, "us-east-1"),
            (1_106_600, "us-west-2"),
        }
        assert not any("on-demand" in row.reason for row in page.rejected)

    play(tmp_path, story)


def test_the_list_is_read_once_a_day(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        def asked() -> int:
            return sum(1 for r in h.requests() if r.headers.get("x-amz-target") == "AWSPriceListService.GetProducts")

        await provider.offers(h.query())
        first = asked()
        assert first == len(h.settings().regions)
        await provider.offers(h.query())
        assert asked() == first
        await h.advance(timedelta(days=1, minutes=1))
        await provider.offers(h.query())
        assert asked() == 2 * first

    play(tmp_path, story)


def test_without_the_permission_the_table_stands_in_for_its_region_and_nothing_is_guessed_elsewhere(
    tmp_path: Path,
) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        page = await provider.offers(h.query())
        assert prices(page)["g5.xlarge", "us-east-1"] == 1_006_000
        assert not any(region == "us-west-2" for _, region in prices(page))
        reasons = [row.reason for row in page.rejected if "us-west-2" in row.offer_id and "on-demand" in row.reason]
        assert reasons
        assert all("allow pricing:GetProducts or set on_demand_usd" in reason for reason in reasons)
        assert page.complete
        assert any(o.region == "us-west-2" and o.market is Market.SPOT for o in page.offers)

    play(tmp_path, story, Quirks(allowed=DENIED.allowed))


def test_a_permission_that_is_granted_later_is_noticed(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        await provider.offers(h.query())
        h.cloud.quirks.allowed = None
        await h.advance(timedelta(hours=1, minutes=1))
        assert ("g5.xlarge", "us-west-2") in prices(await provider.offers(h.query()))

    play(tmp_path, story, Quirks(allowed=DENIED.allowed))


def test_an_own_figure_wins_over_list_and_table() -> None:
    settings = AwsSettings(on_demand_usd={"us-east-1": {"g5.xlarge": 0.9}})
    known = AwsOnDemandPrices(
        region="us-east-1",
        own=settings.on_demand_usd["us-east-1"],
        listed={"g5.xlarge": MicroUsdPerHour(1_100_000), "g6.xlarge": MicroUsdPerHour(800_000)},
    )
    assert known.price("g5.xlarge") == 900_000
    assert known.price("g6.xlarge") == 800_000
    assert known.price("p5.48xlarge") is None, "a list that was read and lacks a type says that it is not sold"
    assert AwsOnDemandPrices(region="us-east-1").price("p5.48xlarge") == 55_040_000
    assert AwsOnDemandPrices(region="eu-west-1").price("p5.48xlarge") is None


def test_the_official_client_gets_one_price_with_every_filter_and_many_without(tmp_path: Path) -> None:
    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        client = official(h.served.url, "pricing")
        (filters,) = questions("us-west-2", ["g5.xlarge"])
        rows = client.get_products(ServiceCode="AmazonEC2", Filters=filters)["PriceList"]
        assert len(rows) == 1
        assert listed_prices(rows, "us-west-2") == {"g5.xlarge": 1_106_600}
        wide = [f for f in filters if f["Field"] in ("instanceType", "regionCode")]
        many = client.get_products(ServiceCode="AmazonEC2", Filters=wide)["PriceList"]
        assert len(many) > 3
        assert listed_prices(many, "us-west-2") == {"g5.xlarge": 1_106_600}, "other products are not taken for it"

    play(tmp_path, story)


def product(**changes: Any) -> dict[str, Any]:
    dimension = {"unit": changes.get("unit", "Hrs"), "pricePerUnit": changes.get("per_unit", {"USD": "1.5"})}
    attributes = {"instanceType": "g5.xlarge", "regionCode": "eu-west-1", **changes.get("attributes", {})}
    return {
        "product": {"attributes": attributes},
        "terms": {"OnDemand": {"t": {"priceDimensions": {"d": dimension}}}},
    }


@every(
    "changes",
    [
        {"unit": "Quantity"},
        {"per_unit": {"USD": "0.0000000000"}},
        {"per_unit": {"USD": "NaN"}},
        {"per_unit": {"USD": "-1"}},
        {"per_unit": {"CNY": "9"}},
        {"attributes": {"operatingSystem": "Windows"}},
        {"attributes": {"tenancy": "Host"}},
        {"attributes": {"capacitystatus": "UnusedCapacityReservation"}},
        {"attributes": {"regionCode": "eu-west-2"}},
        {"attributes": {"instanceType": ""}},
    ],
    ids=str,
)
def test_what_is_no_hourly_price_of_this_machine_is_no_price(changes: dict[str, Any]) -> None:
    assert listed_prices([json.dumps(product())], "eu-west-1") == {"g5.xlarge": 1_500_000}
    assert listed_prices([json.dumps(product(**changes))], "eu-west-1") == {}


def test_of_two_prices_of_one_machine_the_higher_counts() -> None:
    rows = [json.dumps(product(per_unit={"USD": usd})) for usd in ("1.2", "1.4", "1.3")]
    assert listed_prices(rows, "eu-west-1") == {"g5.xlarge": 1_400_000}


def test_questions_name_every_type_once_within_the_limit_of_a_filter() -> None:
    types = [f"g{number}.{size}xlarge" for number in range(40) for size in (2, 4, 8, 16)]
    found = [f["Value"] for question in questions("us-east-1", types) for f in question if f["Type"] == "ANY_OF"]
    assert len(found) > 1
    assert all(len(value) <= VALUE_CHARS_MAX for value in found)
    assert sorted(",".join(found).split(",")) == sorted(types)
    assert questions("us-east-1", []) == []


def test_prices_are_asked_of_the_nearest_endpoint() -> None:
    asked = {name: endpoint_region(name) for name in ("us-west-2", "eu-west-1", "ap-northeast-1", "sa-east-1")}
    assert asked == {
        "us-west-2": "us-east-1",
        "eu-west-1": "eu-central-1",
        "ap-northeast-1": "ap-south-1",
        "sa-east-1": "us-east-1",
    }
