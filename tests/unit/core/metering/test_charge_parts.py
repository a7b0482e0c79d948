"""What each charge is for, and how much of it is the fee: the parts are the amount, to the micro-dollar."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from spotd.core.bills import Bill, Sharer, compared
from spotd.core.domain.attempts import Attempt, ReadBill
from spotd.core.domain.intents import ChargePart, CostSums, Meter, sums_of
from spotd.core.domain.states import AttemptState
from spotd.core.metering import booked_back, settled, spent, unsettled_sums
from spotd.core.pricing import Needs, halted_rate, metered_rate, quote
from spotd_providers.contract.values import MicroUsd, MicroUsdPerGbMonth, MicroUsdPerHour
from tests.cases import every
from tests.unit.core.builders import NOW, world_with

FEE = 1_200_000


def attempt(fee_ppm: int = FEE, **changes: object) -> Attempt:
    """A machine with a disk and a fee, metered for an hour."""
    [item] = world_with(AttemptState.RUNNING).attempts.values()
    offer = replace(item.quote.offer, storage_price=MicroUsdPerGbMonth(100_000))
    needs = Needs(disk_gb=100, upload_bytes_per_hour=0, restore_bytes_per_hour=0)
    agreed = quote(offer, needs, fee_ppm, NOW)
    meter = Meter(rate=metered_rate(agreed), since=NOW - timedelta(hours=1))
    return replace(item, quote=agreed, meter=replace(meter, **changes))  # type: ignore[arg-type]  # fields of Meter


def parts_of(item: Attempt) -> list[ChargePart]:
    return [charge.part for charge in settled(item, NOW, MicroUsdPerHour(0), None)[1]]


def test_a_running_machine_is_charged_with_its_fee() -> None:
    item = attempt()
    [sums] = unsettled_sums(item, NOW).values()
    price = item.quote.price
    assert parts_of(item) == [ChargePart.MACHINE]
    assert (int(sums.gpu), int(sums.fee)) == (price.gpu + price.storage, int(price.fee))


def test_the_disk_of_a_machine_that_is_stopped_is_charged_as_such() -> None:
    item = attempt()
    item = replace(item, meter=replace(item.meter, rate=halted_rate(item.quote)))
    [sums] = unsettled_sums(item, NOW).values()
    assert parts_of(item) == [ChargePart.DISK]
    assert (int(sums.gpu), int(sums.disk)) == (0, int(item.quote.price.storage))
    assert sums.fee == sums.amount - sums.disk


def test_traffic_is_charged_without_a_fee() -> None:
    item = attempt(traffic=MicroUsd(12_345), since=None)
    [sums] = unsettled_sums(item, NOW).values()
    assert parts_of(item) == [ChargePart.TRAFFIC]
    assert sums == CostSums(amount=MicroUsd(12_345), on_demand=MicroUsd(12_345), traffic=MicroUsd(12_345))


def test_what_is_taken_back_and_what_a_bill_corrects_are_kept_apart() -> None:
    item = attempt()
    back = sum(map(sums_of, booked_back(item, MicroUsd(300), NOW)), start=CostSums())
    assert (back.amount, back.free, back.gpu, back.corrected) == (-300, 300, 0, 0)
    world = world_with(AttemptState.RUNNING)
    [job] = world.jobs.values()
    ended, charges = settled(item, NOW, MicroUsdPerHour(0), None)
    billed = MicroUsd(ended.meter.settled + 50_000)
    bill = Bill(amount=billed, since=NOW - timedelta(days=1), until=NOW)
    plan = compared(
        world, [Sharer(job=job, item=replace(ended, bill=ReadBill(read=billed)), booked=charges)], bill, NOW
    )
    whole = sum(map(sums_of, [*charges, *plan.charges]), start=CostSums())
    assert (whole.amount, whole.corrected, whole.booked) == (billed, 50_000, ended.meter.settled)


@given(
    st.sampled_from([900_000, 1_000_000, 1_050_000, FEE, 3_000_000]),
    st.integers(0, 10**9),
    st.timedeltas(timedelta(0), timedelta(days=3)),
    st.integers(0, 10**7),
)
def test_the_parts_are_the_amount(fee_ppm: int, rate: int, span: timedelta, traffic: int) -> None:
    item = attempt(fee_ppm, rate=MicroUsdPerHour(rate), since=NOW - span, traffic=MicroUsd(traffic))
    days = unsettled_sums(item, NOW)
    whole = sum(days.values(), start=CostSums())
    assert whole.amount == whole.gpu + whole.disk + whole.traffic + whole.fee
    assert abs(whole.amount - spent(item, NOW)) <= len(days), "each day is rounded up alone"
    assert (whole.fee >= 0) == (fee_ppm >= 1_000_000 or whole.fee == 0)


@every("known", [True, False])
def test_a_charge_says_whether_its_on_demand_price_is_known(known: bool) -> None:
    item = attempt()
    item = item if known else replace(item, quote=replace(item.quote, on_demand=None))
    [sums] = unsettled_sums(item, NOW).values()
    assert sums.uncompared == (0 if known else sums.amount)
