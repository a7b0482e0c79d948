from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotd.estimates.machines import CARD_WATTS, WEEKS_PER_MONTH, Purchase, break_even
from spotd_providers.contract.gpus import gpu_info
from tests.cases import every

USD = 1_000_000
CARD = Purchase(
    price=1900 * USD,
    cards=1,
    busy_watts=Fraction(450),
    idle_watts=Fraction(0),
    electricity=Fraction(150_000),
    hosting=0,
    resale=Fraction(0),
    years=Fraction(3),
)


def test_the_months_are_the_price_over_what_a_month_saves() -> None:
    result = break_even(CARD, rent_hour=350_000, hours_per_week=Fraction(40))
    use = 40 * WEEKS_PER_MONTH
    saved = Fraction(350_000) * use - Fraction(45, 100) * use * 150_000
    assert result.months == 1900 * USD / saved
    assert result.hours == result.months * use
    assert (round(float(result.months), 1), result.pays) == (38.7, False)


def test_resale_brings_it_nearer_and_hosting_puts_it_off() -> None:
    plain = break_even(CARD, rent_hour=350_000, hours_per_week=Fraction(60)).months
    resold = break_even(replace(CARD, resale=Fraction(2, 5)), rent_hour=350_000, hours_per_week=Fraction(60)).months
    hosted = break_even(replace(CARD, hosting=20 * USD), rent_hour=350_000, hours_per_week=Fraction(60)).months
    assert plain is not None
    assert resold == plain * Fraction(3, 5)
    assert hosted is not None
    assert hosted > plain


def test_rent_below_the_electricity_never_breaks_even() -> None:
    result = break_even(CARD, rent_hour=50_000, hours_per_week=Fraction(168))
    assert (result.months, result.hours, result.pays, result.hours_per_week_min) == (None, None, False, None)


def test_a_machine_that_idles_pays_for_every_hour_of_the_month() -> None:
    idle = break_even(replace(CARD, idle_watts=Fraction(100)), rent_hour=350_000, hours_per_week=Fraction(42))
    busy = break_even(CARD, rent_hour=350_000, hours_per_week=Fraction(42))
    assert idle.owning_month - busy.owning_month == Fraction(1, 10) * 150_000 * Fraction(7305, 10) * Fraction(3, 4)


@every("hours", [0, -1, 169])
def test_a_week_has_168_hours(hours: int) -> None:
    with pytest.raises(ValueError, match="hours a week"):
        break_even(CARD, rent_hour=350_000, hours_per_week=Fraction(hours))


@given(
    st.integers(1, 10**12), st.integers(0, 10**7), st.integers(1, 168), st.integers(0, 2000), st.integers(0, 10**9),
    st.integers(0, 100), st.integers(1, 10),
)  # fmt: skip
def test_at_the_least_use_buying_pays_exactly_when_the_machine_is_sold(
    price: int, rent: int, hours: int, idle: int, hosting: int, resale: int, years: int
) -> None:
    purchase = replace(
        CARD,
        price=price,
        idle_watts=Fraction(idle),
        hosting=hosting,
        resale=Fraction(resale, 100),
        years=Fraction(years),
    )
    result = break_even(purchase, rent_hour=rent, hours_per_week=Fraction(hours))
    least = result.hours_per_week_min
    assert result.pays == (result.months is not None and result.months <= 12 * years)
    if least is None or least == 0:
        return
    at_least = break_even(purchase, rent_hour=rent, hours_per_week=least)
    assert result.lost_value == 0 or at_least.months == 12 * years
    if hours > least:
        assert result.pays


def test_every_card_whose_power_is_stated_is_a_known_gpu() -> None:
    assert [name for name in CARD_WATTS if gpu_info(name) is None] == []
