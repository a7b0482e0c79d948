"""Rows of bills, as the providers write them: what they are for, in which currency, and up to when."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pydantic import ValidationError

from spotd_providers.contract.values import InstallId
from spotd_providers.kit.shapes import row_or_none
from spotd_providers.vastai.listing import as_charges
from spotd_providers.vastai.wire import ChargeRow
from tests.cases import every

DAY = timedelta(days=1)
FIRST = datetime(2024, 11, 1, tzinfo=UTC)


def row(start: datetime, end: datetime, description: str | None = None, **more: Any) -> dict[str, Any]:
    return {
        "start": start.timestamp(),
        "end": end.timestamp(),
        "type": "instance",
        "source": "instance-12345678",
        "description": description,
        "amount": 38.42,
        "metadata": {"label": "spotd-lab-j1-1"},
        "items": [{"type": "gpu", "amount": 30.0}, {"type": "gpu", "amount": 6.4}, {"type": "disk", "amount": 2.02}],
        **more,
    }


def charges(raw: dict[str, Any]) -> list[tuple[str, datetime, datetime, int, str]]:
    found = as_charges(ChargeRow.model_validate(raw), InstallId("lab"))
    return [(c.kind, c.start, c.end, c.amount, c.currency) for c in found]


@every(
    ("end", "description", "until"),
    [
        (FIRST + 3 * DAY, "Instance 12345678 Charges - 4 days", FIRST + 4 * DAY),
        (FIRST, "Instance 12345678 Charges - 1 day", FIRST + DAY),
        (FIRST + 4 * DAY, "Instance 12345678 Charges - 4 days", FIRST + 4 * DAY),
        (FIRST + 3 * DAY, "Instance 12345678 Charges", FIRST + 3 * DAY),
        (FIRST + 3 * DAY, None, FIRST + 3 * DAY),
        (FIRST + timedelta(hours=5), "Instance 12345678 Charges - 1 day", FIRST + timedelta(hours=5)),
    ],
    ids=["the last day is named", "one day", "its end is named", "not counted", "no words", "hours"],
)
def test_a_row_of_vast_is_for_all_days_that_it_counts(end: datetime, description: str | None, until: datetime) -> None:
    found = charges(row(FIRST, end, description))
    assert {(start, end) for _, start, end, _, _ in found} == {(FIRST, until)}


def test_parts_of_one_kind_are_one_charge() -> None:
    assert [(kind, amount) for kind, _, _, amount, _ in charges(row(FIRST, FIRST + DAY))] == [
        ("gpu", 36_400_000),
        ("disk", 2_020_000),
    ]


def test_a_row_in_another_currency_says_so() -> None:
    assert {c for *_, c in charges(row(FIRST, FIRST + DAY))} == {"USD"}
    assert {c for *_, c in charges(row(FIRST, FIRST + DAY, currency="jpy"))} == {"JPY"}


@every("odd", [float("nan"), float("inf"), 1e300, "12", None], ids=str)
def test_a_row_whose_amount_is_none_is_no_row(odd: object) -> None:
    with pytest.raises(ValidationError):
        ChargeRow.model_validate(row(FIRST, FIRST + DAY, amount=odd))


def test_a_row_whose_currency_is_not_understood_is_no_row_of_dollars() -> None:
    assert row_or_none(ChargeRow, row(FIRST, FIRST + DAY, currency=392)) is None
