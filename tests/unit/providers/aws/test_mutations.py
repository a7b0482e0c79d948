"""Damaged XML through AWS's own client: no crash, no price that is not there, no machine called gone by accident."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from io import BytesIO
from typing import Any

import pytest
from botocore.awsrequest import AWSResponse
from botocore.compat import HTTPHeaders
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spotd_providers.aws.offers import as_instance, current_prices, key_in
from spotd_providers.aws.prices import listed_prices
from spotd_providers.aws.sdk import AwsRefused, AwsSettings, Sdk
from spotd_providers.aws.wire import AwsInstanceRow, rows_of
from spotd_providers.contract.errors import ProviderError
from spotd_providers.contract.values import InstallId, InstanceState
from spotd_providers.kit.http import AnswerLost
from spotd_providers.kit.shapes import row_or_none
from tests.fakes.aws.wire import answer, iso

AT = datetime(2026, 3, 2, 12, tzinfo=UTC)
PRICE_ROW = {
    "instanceType": "g5.xlarge",
    "productDescription": "Linux/UNIX",
    "spotPrice": "0.412300",
    "timestamp": iso(AT),
    "availabilityZone": "us-east-1a",
    "availabilityZoneId": "use1-az6",
}
PRICES = answer(
    "DescribeSpotPriceHistory",
    {"spotPriceHistorySet": [PRICE_ROW, {**PRICE_ROW, "availabilityZone": "us-east-1b"}], "nextToken": ""},
    "r",
)
MACHINE = {
    "instanceId": "i-0a1b2c3d4e5f60001",
    "instanceState": {"code": 16, "name": "running"},
    "instanceType": "g5.xlarge",
    "launchTime": iso(AT),
    "placement": {"availabilityZone": "us-east-1a"},
    "instanceLifecycle": "spot",
    "clientToken": "spotd-lab-j0b-1",
    "tagSet": [{"key": "spotd:install", "value": "lab"}, {"key": "spotd:key", "value": "spotd-lab-j0b-1"}],
}
MACHINES = answer("DescribeInstances", {"reservationSet": [{"instancesSet": [MACHINE]}], "nextToken": ""}, "r")
LISTED = json.dumps(
    {
        "product": {"attributes": {"instanceType": "g5.xlarge", "regionCode": "us-east-1", "tenancy": "Shared"}},
        "terms": {"OnDemand": {"t": {"priceDimensions": {"d": {"unit": "Hrs", "pricePerUnit": {"USD": "1.0060"}}}}}},
    }
)
PIECES = st.sampled_from(
    [
        b"<item>",
        b"</item>",
        b"<spotPrice>",
        b"&#0;",
        b"&amp;",
        b"\x00",
        b"\xff",
        b"NaN",
        b"-1",
        b"1e999",
        b"<!--",
        b"]]>",
    ]
)


class Wire(BytesIO):
    """A body as the client's HTTP library hands it over."""

    def stream(self, **_: Any) -> Any:
        yield self.read()


@lru_cache(maxsize=1)
def client() -> tuple[Sdk, list[tuple[int, bytes]]]:
    """The provider's own client, whose every request is answered by the last entry of the list."""
    sdk = Sdk(AwsSettings(endpoint_url="http://127.0.0.1:9"), "AKIA:secret")
    said: list[tuple[int, bytes]] = []

    def reply(request: Any, **_: Any) -> AWSResponse:
        status, body = said[-1]
        return AWSResponse(request.url, status, HTTPHeaders.from_dict({"content-type": "text/xml"}), Wire(body))

    sdk._client("ec2", "us-east-1").meta.events.register("before-send.ec2", reply)
    return sdk, said


def understood(operation: str, name: str, status: int, body: bytes) -> list[Any] | None:
    """The rows, or `None` where the provider has a word for what went wrong. Anything else raised fails the test."""
    sdk, said = client()
    said[:] = [(status, body)]
    try:
        found: Mapping[str, Any] = sdk._invoke("ec2", "us-east-1", operation, {})
        return list(rows_of(found, name))
    except (AwsRefused, AnswerLost, ProviderError):
        return None


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """The body with a few cuts, doublings and insertions."""
    body = whole
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(body)))
        to = min(len(body), at + draw(st.integers(0, 40)))
        body = (
            body[:at]
            + draw(st.one_of(st.just(b""), PIECES, st.binary(max_size=6), st.just(body[at:to] * 2)))
            + body[to:]
        )
    return body


def judge_prices(status: int, body: bytes) -> None:
    rows = understood("describe_spot_price_history", "SpotPriceHistory", status, body)
    if rows is None:
        return
    prices, rejected = current_prices(rows)
    assert all(type(price) is int and 0 < price < 10**11 for price in prices.values())
    assert all(row.reason for row in rejected)


def judge_machines(status: int, body: bytes) -> None:
    rows = understood("describe_instances", "Reservations", status, body)
    for reservation in rows or ():
        for raw in reservation.get("Instances") or ():
            row = row_or_none(AwsInstanceRow, raw)
            key = key_in(row, InstallId("lab")) if row is not None else None
            if row is not None and key is not None:
                told = as_instance(row, key, region="us-east-1", request=None, prices={})
                assert told.state is not InstanceState.GONE or b"terminated" in body


def judge_listed(body: bytes) -> None:
    text = body.decode("utf-8", "replace")
    prices = listed_prices([LISTED, text], "us-east-1")
    assert prices["g5.xlarge"] >= 1_006_000, "a damaged row never lowers another one's price"
    assert all(type(price) is int and 0 < price <= 10**13 for price in prices.values())


STATUSES = st.sampled_from([200, 200, 200, 200, 400, 500, 503])
QUICK = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
LONG = settings(deadline=None, max_examples=5_000, suppress_health_check=[HealthCheck.too_slow])


def test_the_undamaged_answers_are_understood() -> None:
    rows = understood("describe_spot_price_history", "SpotPriceHistory", 200, PRICES)
    assert rows is not None
    assert len(current_prices(rows)[0]) == 2
    assert len(understood("describe_instances", "Reservations", 200, MACHINES) or ()) == 1


@QUICK
@given(STATUSES, damaged(PRICES))
def test_damaged_prices_never_crash_a_poll(status: int, body: bytes) -> None:
    judge_prices(status, body)


@QUICK
@given(STATUSES, damaged(MACHINES))
def test_damaged_listings_never_crash_a_poll(status: int, body: bytes) -> None:
    judge_machines(status, body)


@QUICK
@given(damaged(LISTED.encode()))
def test_a_damaged_product_of_the_price_list_costs_only_itself(body: bytes) -> None:
    judge_listed(body)


@pytest.mark.slow
@LONG
@given(damaged(LISTED.encode()))
def test_many_damaged_products_of_the_price_list_cost_only_themselves(body: bytes) -> None:
    judge_listed(body)


@pytest.mark.slow
@LONG
@given(STATUSES, damaged(PRICES))
def test_many_damaged_prices_never_crash_a_poll(status: int, body: bytes) -> None:
    judge_prices(status, body)


@pytest.mark.slow
@LONG
@given(STATUSES, damaged(MACHINES))
def test_many_damaged_listings_never_crash_a_poll(status: int, body: bytes) -> None:
    judge_machines(status, body)
