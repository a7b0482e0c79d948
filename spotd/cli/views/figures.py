"""Figures on the command line: parameters, watts, money, shares."""

from __future__ import annotations

from fractions import Fraction

from spotd.cli.inputs.options import Parsed
from spotd.estimates.figures import parse_number, parse_params
from spotd_jobs.spec.problems import BadValue
from spotd_jobs.spec.units import parse_money, parse_price


def number(*, unit: str = "", most: int, above: bool = False) -> Parsed:
    """Return the type of a number from 0, or `above` it, with or without its unit."""

    def parse(text: str) -> Fraction:
        return parse_number(text, unit=unit, most=most, above=above)

    return Parsed(unit or "number", parse)


def _paid(text: str) -> int:
    amount = parse_money(text)
    if amount == 0:
        raise BadValue("a price must be above 0", hint="write dollars like 1600")
    return amount


PARAMS = Parsed("params", parse_params)
MONEY = Parsed("dollars", parse_money)
PURCHASE = Parsed("dollars", _paid)
RENT = Parsed("price", parse_price)
