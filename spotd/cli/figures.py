"""Figures on the command line: parameters, watts, money, shares."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import click

from spotd.estimates.figures import parse_number, parse_params
from spotd_jobs.spec.problems import BadValue
from spotd_jobs.spec.units import parse_money, parse_price


class Figure(click.ParamType[Any]):
    """A value that a function parses, refused with the function's own sentence and way out."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except BadValue as exc:
            self.fail(f"{exc}; {exc.hint}", param, ctx)


def number(*, unit: str = "", most: int, above: bool = False) -> Figure:
    """Return the type of a number from 0, or `above` it, with or without its unit."""

    def parse(text: str) -> Fraction:
        return parse_number(text, unit=unit, most=most, above=above)

    return Figure(unit or "number", parse)


def _paid(text: str) -> int:
    amount = parse_money(text)
    if amount == 0:
        raise BadValue("a price must be above 0", hint="write dollars like 1600")
    return amount


PARAMS = Figure("params", parse_params)
MONEY = Figure("dollars", parse_money)
PURCHASE = Figure("dollars", _paid)
RENT = Figure("price", parse_price)
