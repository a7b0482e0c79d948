from __future__ import annotations

import contextlib
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotd.estimates.workload import parse_params
from spotd_jobs.spec.problems import BadValue
from spotd_jobs.spec.units import parse_number
from tests.cases import every


@every(
    ("text", "params"),
    [("7B", 7 * 10**9), ("7b", 7 * 10**9), ("0.5B", 5 * 10**8), ("350M", 35 * 10**7), ("1.5T", 15 * 10**11),
     ("6738415616", 6738415616), (" 1100 K", 1_100_000)],
)  # fmt: skip
def test_parameters_as_people_write_them(text: str, params: int) -> None:
    assert parse_params(text) == params


@every(
    ("text", "words"),
    [
        ("0", "not between"), ("", "not a number"), ("-7B", "not a number"), ("nan", "not a number"),
        ("inf", "not a number"), ("1e308", "not a number"), ("10TB", "a size in bytes"), ("16GiB", "a size in bytes"),
        ("9" * 40, "not a number"), ("7BB", "not a number"), ("\u0667B", "not a number"), ("999999T", "not between"),
        ("7,000,000,000", "not a number"),
    ],
)  # fmt: skip
def test_what_is_no_number_of_parameters_is_refused(text: str, words: str) -> None:
    with pytest.raises(BadValue, match=words) as caught:
        parse_params(text)
    assert "7B" in caught.value.hint


@every("text", ["-1", "nan", "inf", "1e3", "", "W", "0x10", "1001", "9" * 50])
def test_a_figure_outside_its_bounds_is_refused(text: str) -> None:
    with pytest.raises(BadValue):
        parse_number(text, unit="W", most=1000)


def test_a_figure_may_have_its_unit() -> None:
    assert parse_number("450W", unit="W", most=1000) == parse_number("450 w", unit="W", most=1000) == 450
    assert parse_number(".5", most=1) == Fraction(1, 2)
    with pytest.raises(BadValue, match="above 0 and at most 168"):
        parse_number("0", most=168, above=True)


@given(st.text(max_size=40))
def test_no_text_breaks_a_parser(text: str) -> None:
    for parse in (parse_params, lambda value: parse_number(value, unit="W", most=10**6)):
        with contextlib.suppress(BadValue):
            parse(text)
