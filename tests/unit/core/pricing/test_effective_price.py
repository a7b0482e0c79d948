"""The effective price, term by term, and the money that follows from it."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotd.core.domain.intents import Meter
from spotd.core.domain.jobs import Checkpoint
from spotd.core.domain.states import AttemptState
from spotd.core.metering import settled
from spotd.core.pricing import (
    Needs,
    gpu_price_limit,
    listed_rate,
    metered_rate,
    needs_of,
    quote,
    repriced,
    total_per_hour,
)
from spotd_providers.contract.values import (
    Market,
    MicroUsdPerGb,
    MicroUsdPerGbMonth,
    MicroUsdPerGpuHour,
    MicroUsdPerHour,
    Offer,
    cost,
    micro_usd,
    per_gpu,
)
from tests.cases import every
from tests.unit.core.builders import NOW, job, offer, shop_policy, world_with

PRICES = st.integers(0, 50_000_000)
OFFERS = st.builds(
    lambda price, storage, up, down, count: offer(
        price=price,
        storage_price=MicroUsdPerGbMonth(storage),
        upload_price=MicroUsdPerGb(up),
        download_price=MicroUsdPerGb(down),
        gpu_count=count,
    ),
    PRICES,
    st.integers(0, 1_000_000),
    st.integers(0, 100_000),
    st.integers(0, 100_000),
    st.integers(1, 16),
)
NEEDS = st.builds(
    lambda disk, up, down: Needs(disk_gb=disk, upload_bytes_per_hour=up, restore_bytes_per_hour=down),
    st.integers(1, 4_000),
    st.integers(0, 10**13),
    st.integers(0, 10**13),
)
FEES = st.integers(500_000, 2_000_000)


@given(OFFERS, NEEDS, FEES, PRICES)
def test_the_rate_of_a_listed_price_is_that_of_the_quote_at_this_price(
    sold: Offer, needs: Needs, fee_ppm: int, listed: int
) -> None:
    agreed = quote(sold, needs, fee_ppm, NOW)
    for price in (MicroUsdPerHour(listed), sold.gpu_price):
        there = repriced(agreed, price)
        assert listed_rate(agreed, price) == (metered_rate(there), there.price.per_gpu)


def test_every_term_of_a_worked_example() -> None:
    sold = offer(
        price=2_000_000,
        gpu_count=2,
        storage_price=MicroUsdPerGbMonth(150_000),
        upload_price=MicroUsdPerGb(4_000),
        download_price=MicroUsdPerGb(3_000),
    )
    needs = Needs(disk_gb=64, upload_bytes_per_hour=40 * 10**9, restore_bytes_per_hour=2 * 10**9)
    price = quote(sold, needs, 1_200_000, NOW).price
    assert price.storage == 13_334  # 64 GB x $0.15 / 720 h, rounded up
    assert price.fee == 402_667  # 20 % of 2.013334
    assert price.upload == 160_000
    assert price.restore == 6_000
    assert price.total == 2_000_000 + 13_334 + 402_667 + 160_000 + 6_000
    assert price.per_gpu == price.total // 2 + 1


@given(OFFERS, NEEDS, FEES)
def test_the_quick_total_is_the_total_of_the_breakdown(sold: Offer, needs: Needs, fee: int) -> None:
    assert total_per_hour(sold, needs, fee, sold.gpu_price) == quote(sold, needs, fee, NOW).price.total


@given(OFFERS, NEEDS, FEES, st.integers(1, 20_000_000))
def test_the_price_limit_is_the_highest_that_stays_under_the_ceiling(
    sold: Offer, needs: Needs, fee: int, ceiling: int
) -> None:
    agreed = quote(sold, needs, fee, NOW)
    limit = gpu_price_limit(agreed, MicroUsdPerGpuHour(ceiling))
    if limit > 0:
        assert repriced(agreed, limit).price.per_gpu <= ceiling
    if repriced(agreed, MicroUsdPerHour(0)).price.per_gpu <= ceiling:
        assert repriced(agreed, MicroUsdPerHour(limit + 5)).price.per_gpu > ceiling


@every(
    ("sold", "stated", "on_demand"),
    [
        pytest.param(Market.ON_DEMAND, None, 600_000, id="bought on demand, its own price"),
        pytest.param(Market.ON_DEMAND, 900_000, 900_000, id="bought on demand, another is stated"),
        pytest.param(Market.SPOT, None, None, id="spot alone"),
        pytest.param(Market.SPOT, 900_000, 900_000, id="spot beside on-demand"),
    ],
)
def test_savings_are_counted_against_the_on_demand_price_of_the_offer(
    sold: Market, stated: int | None, on_demand: int | None
) -> None:
    priced = None if stated is None else MicroUsdPerHour(stated)
    one = replace(offer(price=600_000), market=sold, on_demand_price=priced)
    assert (
        quote(one, Needs(disk_gb=1, upload_bytes_per_hour=0, restore_bytes_per_hour=0), 1_000_000, NOW).on_demand
        == on_demand
    )


def test_traffic_follows_the_newest_checkpoint_and_its_interval() -> None:
    saved = Checkpoint(name="c", attempt=1, step=1, bytes=6 * 10**9, at=NOW, manifest_key="k", sha256="0" * 64)
    needs = needs_of(job(checkpoints=(saved,)), shop_policy())
    assert needs.upload_bytes_per_hour == 24 * 10**9  # every 15 minutes unless the job says otherwise
    assert needs.restore_bytes_per_hour == 10**9  # spread over an expected stay of 6 hours


@given(st.integers(0, 10**8), st.timedeltas(timedelta(0), timedelta(days=70)))
def test_settling_books_every_microsecond_once_and_never_across_midnight(rate: int, span: timedelta) -> None:
    item = world_with(AttemptState.RUNNING).attempts
    start = datetime(2026, 2, 27, 21, 13, 7, 5, tzinfo=UTC)
    attempt = next(iter(item.values()))
    attempt = replace(attempt, meter=Meter(rate=MicroUsdPerHour(rate), on_demand_rate=None, since=start))
    after, charges = settled(attempt, start + span, MicroUsdPerHour(7), None)
    assert sum(((c.end - c.start) for c in charges), timedelta(0)) == span
    assert all(c.start.date() == c.day and (c.end - timedelta(microseconds=1)).date() == c.day for c in charges)
    exact = cost(MicroUsdPerHour(rate), span)
    assert exact <= after.meter.settled <= exact + len(charges)
    assert after.meter.since == start + span


BAD_PRICES = ["nan", "inf", "-1", float("nan"), float("inf"), -0.01, True, "abc", "", None, 1e9]


@every("value", BAD_PRICES, ids=repr)
def test_what_is_not_a_price_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"price|number"):
        micro_usd(value)  # type: ignore[arg-type]  # that is the point


def test_prices_round_up() -> None:
    assert micro_usd("0.0000001") == 1
    assert micro_usd(0.1) == 100_000
    assert per_gpu(MicroUsdPerHour(10), 3) == 4
    assert cost(MicroUsdPerHour(1), timedelta(seconds=1)) == 1
