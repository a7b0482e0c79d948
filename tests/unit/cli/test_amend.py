"""`spotctl budget` and `spotctl forget`."""

from __future__ import annotations

import json

import pytest

from spotd.api.requests import BudgetChange
from tests.unit.api import made_responses
from tests.unit.cli.conftest import Ctl


@pytest.fixture
def stocked(ctl: Ctl) -> Ctl:
    ctl.backend.rows = [
        made_responses.job(),
        made_responses.job(id="6j99ffffff", name="old", state="EXPIRED", provider=None, host=None),
    ]
    return ctl


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("+20", BudgetChange(amount=20_000_000, is_added=True)),
        ("=140", BudgetChange(amount=140_000_000)),
        ("140.50", BudgetChange(amount=140_500_000)),
        ("$3", BudgetChange(amount=3_000_000)),
        ("+0.000001", BudgetChange(amount=1, is_added=True)),
    ],
)
def test_a_budget_is_set_or_added_to(stocked: Ctl, text: str, change: BudgetChange) -> None:
    assert stocked("budget", "llama-lora", text, "-o", "id").out == "6k0a1b2c3d\n"
    assert stocked.backend.budget_changes == [change]


@pytest.mark.parametrize(
    "text", ["", "+", "=", "++20", "+-20", "1e9", "nan", "inf", "0", "+0", "0.0000001", "1" * 400, "20 apples", "1,000"]
)
def test_what_is_no_budget_is_refused_with_a_way_out(stocked: Ctl, text: str) -> None:
    result = stocked("budget", "llama-lora", text)
    assert result.code == 2
    assert result.err.startswith("error: the budget ")
    assert "hint:" in result.err
    assert stocked.backend.budget_changes == []


def test_an_expired_job_is_told_to_be_retried(stocked: Ctl) -> None:
    result = stocked("budget", "old", "+20")
    assert (result.code, result.err) == (0, "spotctl retry 6j99ffffff queues it again with this budget\n")
    assert stocked("budget", "llama-lora", "+20").err == ""


def test_the_new_budget_is_told_with_what_is_spent_of_it(stocked: Ctl) -> None:
    out = stocked("budget", "llama-lora", "+20").out
    assert out.startswith("llama-lora (6k0a1b2c3d) may cost $120.00 in all, $")
    assert "of it is spent; it is " in out


def test_a_machine_is_not_given_up_where_nobody_can_be_asked(ctl: Ctl) -> None:
    result = ctl("forget", "m1")
    assert result.code == 2
    assert "only with a confirmation" in result.err
    assert "--yes" in result.err
    assert ctl.backend.forgotten == []


def test_a_machine_is_given_up_with_a_confirmation(ctl: Ctl) -> None:
    result = ctl("forget", "m1", "-y")
    assert (result.code, result.out) == (0, "m1 at vast, attempt 1 of job j1 is given up\n")
    assert json.loads(ctl("forget", "m1", "-y", "-o", "json").out)["forgotten"]["job"] == "j1"
    assert ctl.backend.forgotten == ["m1", "m1"]


def test_an_unknown_machine_is_exit_6(ctl: Ctl) -> None:
    assert ctl("forget", "m2", "--yes").code == 6
    assert ctl("forget", "", "--yes").code == 2
