from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotd_jobs.spec import units
from spotd_jobs.spec.model import PriceLimit
from spotd_jobs.spec.units import UnitError
from tests.cases import every

DURATIONS = [
    ("90s", timedelta(seconds=90)),
    ("15m", timedelta(minutes=15)),
    ("1h30m", timedelta(hours=1, minutes=30)),
    ("2d", timedelta(days=2)),
    ("1w 2d 3h 4m 5s", timedelta(weeks=1, days=2, hours=3, minutes=4, seconds=5)),
    ("1.5h", timedelta(minutes=90)),
    ("200ms", timedelta(milliseconds=200)),
    (" 10 minutes ", timedelta(minutes=10)),
    ("1 Hour", timedelta(hours=1)),
    ("0s", timedelta(0)),
]


@every(("text", "expected"), DURATIONS, ids=[text for text, _ in DURATIONS])
def test_a_duration_is_read_exactly(text: str, expected: timedelta) -> None:
    assert units.parse_duration(text) == expected


@every(
    ("value", "message", "hint"),
    [
        pytest.param("15", '"15" has no unit of time', 'write "15s" for seconds or "15m" for minutes', id="no unit"),
        pytest.param(15, "15 has no unit of time", 'write "15s" for seconds or "15m" for minutes', id="number"),
        pytest.param("15 parsecs", 'the unknown unit of time "parsecs"', '"1h30m"', id="unknown unit"),
        pytest.param("15M", 'the unknown unit of time "M"', '"15m"', id="months or minutes"),
        pytest.param("30m1h", "does not go from the larger unit to the smaller", '"1h30m"', id="order"),
        pytest.param("1h1h", "does not go from the larger unit to the smaller", '"1h30m"', id="twice"),
        pytest.param("-5m", '"-5m" is not a duration', '"90s"', id="negative"),
        pytest.param("nan", '"nan" is not a duration', '"90s"', id="nan"),
        pytest.param(float("nan"), "nan is not a duration", '"90s"', id="nan as a number"),
        pytest.param(-3, "-3 is not a duration", '"90s"', id="negative number"),
        pytest.param("1e3s", "unknown unit", '"90s"', id="exponent"),
        pytest.param("", '"" is not a duration', '"90s"', id="empty"),
        pytest.param("0.0001ms", "finer than a microsecond", '"90s"', id="too fine"),
        pytest.param("11y", "unknown unit", '"90s"', id="years"),
        pytest.param("999999999d", "longer than ten years", '"90s"', id="too long"),
        pytest.param("1" * 5000 + "s", "is not a duration", '"90s"', id="absurd"),
        pytest.param(True, "True is not a duration", '"90s"', id="bool"),
        pytest.param(["1s"], "is not a duration", '"90s"', id="list"),
    ],
)
def test_a_bad_duration_says_what_is_wrong_and_how_to_write_it(value: object, message: str, hint: str) -> None:
    with pytest.raises(UnitError) as caught:
        units.parse_duration(value)
    assert message in str(caught.value)
    assert hint in caught.value.hint


@given(st.timedeltas(min_value=timedelta(0), max_value=units.DURATION_MAX))
def test_every_duration_survives_its_own_text(duration: timedelta) -> None:
    assert units.parse_duration(units.format_duration(duration)) == duration


@every(
    ("duration", "text"),
    [
        (timedelta(seconds=90), "1m30s"),
        (timedelta(minutes=15), "15m"),
        (timedelta(milliseconds=200), "200ms"),
        (timedelta(days=8, hours=1), "8d1h"),
        (timedelta(seconds=1, microseconds=5), "1.000005s"),
        (timedelta(0), "0s"),
    ],
    ids=lambda value: str(value),
)
def test_a_duration_is_written_shortly(duration: timedelta, text: str) -> None:
    assert units.format_duration(duration) == text


SIZES = [
    ("100GB", 100 * 10**9),
    ("40 GiB", 40 * 2**30),
    ("512MB", 512 * 10**6),
    ("1.5TB", 1_500_000_000_000),
    ("10 kb", 10_000),
    ("7B", 7),
    ("0.5B", 1),
]


@every(("text", "expected"), SIZES, ids=[text for text, _ in SIZES])
def test_a_size_is_read_in_bytes(text: str, expected: int) -> None:
    assert units.parse_size(text) == expected


def test_a_size_is_rounded_up_to_what_holds_it() -> None:
    assert units.parse_size_gb("40GiB") == 43
    assert units.parse_size_gb("1B") == 1
    assert units.parse_size_mb("1.0001MB") == 2
    assert units.parse_size_gb("100GB") == 100


@every(
    ("value", "message", "hint"),
    [
        pytest.param(100, "100 has no unit of size", 'write "100GB" for gigabytes', id="number"),
        pytest.param("100", '"100" has no unit of size', 'write "100GB" for gigabytes', id="no unit"),
        pytest.param("100G", '"100G" could be decimal or binary', 'write "100GB" or "100GiB"', id="ambiguous"),
        pytest.param("100Gb", 'is in bits ("b"), not bytes', 'write "100GB" for bytes', id="bits"),
        pytest.param("100 GPU", 'the unknown unit of size "GPU"', '"40GiB"', id="unknown unit"),
        pytest.param("-1GB", '"-1GB" is not a size', '"100GB"', id="negative"),
        pytest.param("1,5GB", '"1,5GB" is not a size', '"100GB"', id="comma"),
        pytest.param("9999999PB", "larger than an exabyte", '"100GB"', id="too large"),
        pytest.param(False, "False is not a size", '"100GB"', id="bool"),
    ],
)
def test_a_bad_size_says_what_is_wrong_and_how_to_write_it(value: object, message: str, hint: str) -> None:
    with pytest.raises(UnitError) as caught:
        units.parse_size(value)
    assert message in str(caught.value)
    assert hint in caught.value.hint


@given(st.integers(0, units.SIZE_MAX_BYTES))
def test_every_size_survives_its_own_text(size: int) -> None:
    assert units.parse_size(units.format_size(size)) == size


MONEY: list[tuple[object, int]] = [
    (2.40, 2_400_000),
    ("2.40", 2_400_000),
    ("$2.40", 2_400_000),
    ("120", 120_000_000),
    (120, 120_000_000),
    ("0.000001", 1),
    (".5", 500_000),
    ("3 USD", 3_000_000),
    (Decimal("0.1"), 100_000),
    (0, 0),
]


@every(("value", "expected"), MONEY, ids=[repr(value) for value, _ in MONEY])
def test_money_is_read_in_micro_dollars(value: object, expected: int) -> None:
    assert units.parse_money(value) == expected


@every(
    ("value", "message"),
    [
        pytest.param(float("nan"), "nan is not a figure of money", id="nan"),
        pytest.param(float("inf"), "inf is not a figure of money", id="inf"),
        pytest.param("NaN", '"NaN" is not a figure of money', id="nan text"),
        pytest.param(-1, "-1 is negative", id="negative"),
        pytest.param("-1", '"-1" is negative', id="negative text"),
        pytest.param("1,200", '"1,200" has a comma', id="comma"),
        pytest.param("2.40 EUR", "is not a figure of money", id="euros"),
        pytest.param("1e9", "is not a figure of money", id="exponent"),
        pytest.param(0.0000001, "finer than a millionth of a dollar", id="too fine"),
        pytest.param(1e12, "more than ten million dollars", id="too much"),
        pytest.param(True, "True is not a figure of money", id="bool"),
        pytest.param(None, "None is not a figure of money", id="none"),
        pytest.param({}, "{} is not a figure of money", id="table"),
    ],
)
def test_bad_money_says_what_is_wrong(value: object, message: str) -> None:
    with pytest.raises(UnitError) as caught:
        units.parse_money(value)
    assert message in str(caught.value)
    assert caught.value.hint


@given(st.integers(0, 10_000_000_000_000))
def test_every_amount_survives_its_own_text(amount: int) -> None:
    assert units.parse_money(units.format_money(amount)) == amount


@every(("amount", "text"), [(2_400_000, "2.40"), (1, "0.000001"), (120_000_000, "120.00"), (-2_500_000, "-2.50")])
def test_money_has_at_least_cents(amount: int, text: str) -> None:
    assert units.format_money(amount) == text


@every(
    ("value", "expected"),
    [
        pytest.param(2.40, PriceLimit(per_gpu_hour=2_400_000), id="number"),
        pytest.param("2.40", PriceLimit(per_gpu_hour=2_400_000), id="text"),
        pytest.param("2.40/gpu-h", PriceLimit(per_gpu_hour=2_400_000), id="per GPU"),
        pytest.param("$2.40 / h / gpu", PriceLimit(per_gpu_hour=2_400_000), id="per hour per GPU"),
        pytest.param("19.20/h", PriceLimit(machine_hour=19_200_000), id="machine"),
        pytest.param("19.20 / hour", PriceLimit(machine_hour=19_200_000), id="machine spelled out"),
    ],
)
def test_a_price_limit_knows_its_unit(value: object, expected: PriceLimit) -> None:
    assert units.parse_price(value) == expected


@every(
    ("value", "message"),
    [
        pytest.param("19.20/day", '"19.20/day" has the unknown unit "/day"', id="per day"),
        pytest.param("19.20/", 'has the unknown unit "/"', id="slash only"),
        pytest.param("/h", '"" is not a figure of money', id="no amount"),
        pytest.param(0, "must be above 0", id="zero"),
        pytest.param("cheap", '"cheap" is not a figure of money', id="word"),
    ],
)
def test_a_bad_price_limit_says_what_is_wrong(value: object, message: str) -> None:
    with pytest.raises(UnitError) as caught:
        units.parse_price(value)
    assert message in str(caught.value)
    assert '"19.20/h" for the whole machine' in caught.value.hint


@given(
    st.sampled_from([units.parse_duration, units.parse_size, units.parse_money, units.parse_price]),
    st.one_of(st.text(max_size=30), st.floats(), st.integers(), st.none(), st.booleans(), st.lists(st.text())),
)
def test_any_other_value_is_a_unit_error_and_never_a_crash(parse: Callable[[object], object], value: object) -> None:
    hint = "understood"
    try:
        parse(value)
    except UnitError as exc:
        hint = exc.hint
    assert hint
