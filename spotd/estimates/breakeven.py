"""Renting a machine against buying one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

HOURS_PER_WEEK: Final = 168
WEEKS_PER_MONTH: Final = Fraction(36_525, 8_400)
HOURS_PER_MONTH: Final = HOURS_PER_WEEK * WEEKS_PER_MONTH
MONTHS_PER_YEAR: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Purchase:
    """A machine to buy. Money is micro-dollars.

    Attributes:
        price: of everything that is bought.
        busy_watts, idle_watts: of the whole machine while it is used, and the rest of the time.
        electricity: price of a kilowatt-hour.
        hosting: per month: place, network, insurance.
        resale: share of the price that it brings in the end.
        years: after which it is sold.
    """

    price: int
    cards: int
    busy_watts: Fraction
    idle_watts: Fraction
    electricity: Fraction
    hosting: int
    resale: Fraction
    years: Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """When buying has cost as much as renting. Money is micro-dollars.

    Attributes:
        renting_month, owning_month: what a month costs; owning without the purchase.
        lost_value: the price less what is got back in the end.
        months, hours: until then, of calendar time and of use; `None` where renting stays cheaper.
        pays: it is reached before the machine is sold.
        owned_gpu_hour: one card-hour of use with everything in it, over all the years.
        hours_per_week_min: use from which buying pays within the years; `None` where none does.
    """

    renting_month: Fraction
    owning_month: Fraction
    lost_value: Fraction
    months: Fraction | None
    hours: Fraction | None
    pays: bool
    owned_gpu_hour: Fraction
    hours_per_week_min: Fraction | None


def break_even(purchase: Purchase, *, rent_hour: int, hours_per_week: Fraction) -> BreakEven:
    """Return when buying has cost as much as renting.

    With u hours of use per month (hours per week x 365.25 / 12 / 7), out of 730.5, and kW and $/kWh as given:

        renting = rent per hour x u
        owning  = (busy kW x u + idle kW x (730.5 - u)) x $/kWh + hosting
        months  = price x (1 - resale share) / (renting - owning)
        hours   = months x u

    Renting stays cheaper for ever where renting <= owning. The money in the machine is taken to earn no interest.

    Raises:
        ValueError: no use at all, or more than a week has.
    """
    if not 0 < hours_per_week <= HOURS_PER_WEEK:
        raise ValueError(f"use of {hours_per_week} hours a week")
    use = hours_per_week * WEEKS_PER_MONTH
    busy = purchase.busy_watts / 1000 * purchase.electricity
    idle = purchase.idle_watts / 1000 * purchase.electricity
    renting = rent_hour * use
    owning = busy * use + idle * (HOURS_PER_MONTH - use) + purchase.hosting
    lost = purchase.price * (1 - purchase.resale)
    span = purchase.years * MONTHS_PER_YEAR
    months = lost / (renting - owning) if renting > owning else None
    return BreakEven(
        renting_month=renting,
        owning_month=owning,
        lost_value=lost,
        months=months,
        hours=None if months is None else months * use,
        pays=months is not None and months <= span,
        owned_gpu_hour=(lost / span + owning) / (use * purchase.cards),
        hours_per_week_min=_least_use(lost / span + idle * HOURS_PER_MONTH + purchase.hosting, rent_hour - busy + idle),
    )


def _least_use(fixed_month: Fraction, saved_hour: Fraction) -> Fraction | None:
    """Return the hours per week at which what an hour saves makes up for what a month costs anyway."""
    if saved_hour <= 0:
        return None
    week = fixed_month / saved_hour / WEEKS_PER_MONTH
    return week if week <= HOURS_PER_WEEK else None


# What cards draw under load, by their makers' data sheets, in watts. A card that is missing must be given.


CARD_WATTS: Final[Mapping[str, int]] = {
    "B200_SXM": 1000,
    "H200_SXM": 700,
    "H200_NVL": 600,
    "H100_SXM": 700,
    "H100_PCIE": 350,
    "H100_NVL": 400,
    "A100_SXM_80": 400,
    "A100_SXM_40": 400,
    "A100_PCIE_80": 300,
    "A100_PCIE_40": 250,
    "L40S": 350,
    "L40": 300,
    "L4": 72,
    "A40": 300,
    "A30": 165,
    "A10": 150,
    "T4": 70,
    "MI300X": 750,
    "RTX_PRO_6000_SE": 600,
    "RTX_PRO_6000_WS": 600,
    "RTX_PRO_6000_MAXQ": 300,
    "RTX_6000_ADA": 300,
    "RTX_A6000": 300,
    "RTX_A5000": 230,
    "RTX_A4000": 140,
    "RTX_5090": 575,
    "RTX_5080": 360,
    "RTX_4090": 450,
    "RTX_4080": 320,
    "RTX_4080_SUPER": 320,
    "RTX_4070_TI": 285,
    "RTX_3090": 350,
    "RTX_3090_TI": 450,
    "RTX_3080": 320,
}
