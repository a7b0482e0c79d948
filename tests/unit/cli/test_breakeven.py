from __future__ import annotations

import json

import pytest

from spotd.api.schemas.costs import AttemptCostResponse
from tests.cases import every
from tests.unit.api import made_responses
from tests.unit.cli.conftest import Ctl

BUY = ("breakeven", "--price", "1900", "--hours", "60")


@pytest.fixture
def market(ctl: Ctl) -> Ctl:
    quotes = [
        made_responses.quote(
            gpu="RTX_4090", gpu_count=count, effective_usd_h=price, effective_usd_gpu_h=price / count,
            provider="local", host=f"h{count}",
        )
        for count, price in ((1, 0.35), (2, 0.6), (4, 1.1))
    ]  # fmt: skip
    quotes.append(made_responses.quote(gpu="RTX_4090", gpu_count=1, effective_usd_h=0.0, market="own", host="titan"))
    ctl.place.answers("prices.quotes", {"quotes": quotes, "offers": [], "more": False})
    ctl.place.answers("receipts.cost", made_responses.cost())
    return ctl


def ran(hours: float, spent: float, **given: object) -> AttemptCostResponse:
    return made_responses.attempt_cost(seconds=hours * 3600, spent_usd=spent, gpu="RTX_4090", **given)


def test_what_rented_cards_have_cost_goes_before_the_price_of_today_and_own_ones_do_not_count(market: Ctl) -> None:
    few = [ran(4, 1.6, gpu_count=2), ran(500, 0.0, gpu_count=1, market="own")]
    market.place.answers("receipts.cost", made_responses.cost(made_responses.receipt(attempts=few)))
    assert json.loads(market(*BUY, "--gpu", "4090", "-o", "json").out)["rent_usd_h"] == 0.35, "8 hours are too few"
    enough = [*few, ran(12, 2.4, gpu_count=1), ran(100, 500.0, gpu_count=8) | {"gpu": "H100_SXM"}]
    market.place.answers("receipts.cost", made_responses.cost(made_responses.receipt(attempts=enough)))
    body = json.loads(market(*BUY, "--gpu", "4090", "--cards", "2", "-o", "json").out)
    assert (body["rent_usd_h"], body["quote"]) == (0.4, None)
    assert body["rent_source"] == "as 20 rented GPU-hours of your jobs cost"


def test_the_rent_of_today_is_compared_with_the_purchase(market: Ctl) -> None:
    result = market(*BUY, "--gpu", "4090", "--resale", "40%")
    assert (result.code, result.err) == (0, "")
    assert result.out == (
        "renting:    $0.3500 per hour, RTX_4090:1 spot at local/h1: $91.31 a month\n"
        "owning:     $17.61 a month for electricity and hosting, at 60 hours a week\n"
        "purchase:   $1900.00 for 1 card, of which $1140.00 are lost after 36 months\n"
        "break-even: 15.5 months or 4035 hours of use, before the machine is sold: buying is cheaper\n"
        "owned:      $0.1889 per GPU-hour with everything in it\n"
        "use:        buying pays from 25.8 hours a week, 112.1 a month\n"
    )


def test_as_many_cards_are_rented_as_bought(market: Ctl) -> None:
    body = json.loads(market(*BUY, "--gpu", "4090", "--cards", "3", "-o", "json").out)
    assert (body["schema"], body["rent_usd_h"], body["quote"]["gpu_count"], body["busy_watts"]) == (1, 1.1, 4, 1350.0)


@pytest.mark.parametrize(("rent", "hour"), [("0.35", 0.7), ("0.60/h", 0.6)])
def test_a_given_rent_needs_no_daemon(ctl: Ctl, monkeypatch: pytest.MonkeyPatch, rent: str, hour: float) -> None:
    monkeypatch.setenv("SPOTD_SOCKET", "/nonexistent/spotd.sock")
    result = ctl(*BUY, "--gpu", "4090", "--cards", "2", "--rent", rent, "-o", "json")
    body = json.loads(result.out)
    assert (result.code, body["rent_usd_h"], body["quote"]) == (0, hour, None)


def test_renting_that_is_always_cheaper_is_said(ctl: Ctl) -> None:
    result = ctl(*BUY, "--gpu", "4090", "--rent", "0.05")
    assert "break-even: never: owning costs at least as much per month as renting" in result.out
    assert "use:        however much it is used, buying does not pay within that time\n" in result.out
    body = json.loads(ctl(*BUY, "--gpu", "4090", "--rent", "0.05", "-o", "json").out)
    assert (body["months"], body["pays"], body["hours_per_week_min"]) == (None, False, None)


def test_a_break_even_after_the_end_means_renting(ctl: Ctl) -> None:
    result = ctl(*BUY, "--gpu", "4090", "--rent", "0.35", "--years", "1")
    assert "25.8 months or 6726 hours of use, after the machine is sold: renting is cheaper\n" in result.out


def test_without_daemon_and_rent_the_price_is_asked_for(ctl: Ctl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTD_SOCKET", "/nonexistent/spotd.sock")
    result = ctl(*BUY, "--gpu", "4090")
    assert (result.code, result.out) == (5, "")
    assert "today's price is not known: the daemon is not running" in result.err
    assert "hint: give --rent 0.35" in result.err


def test_a_card_that_is_not_offered_is_exit_6(market: Ctl) -> None:
    result = market(*BUY, "--gpu", "5090")
    assert (result.code, result.out) == (6, "")
    assert "nothing with 1 of this GPU is offered now" in result.err


@every(
    ("arguments", "words"),
    [
        (("--price", "0", "--hours", "40"), "a price must be above 0"),
        (("--price", "-5", "--hours", "40"), "is negative"),
        (("--price", "nan", "--hours", "40"), "is not a figure of money"),
        (("--price", "1e308", "--hours", "40"), "is not a figure of money"),
        (("--price", "99999999999", "--hours", "40"), "more than ten million dollars"),
        (("--price", "1900", "--hours", "0"), "is not above 0 and at most 168"),
        (("--price", "1900", "--hours", "169"), "is not above 0 and at most 168"),
        (("--price", "1900", "--hours", "nan"), "is not a number"),
        (("--price", "1900"), "missing option '--hours'"),
        (("--price", "1900", "--hours", "40"), "what a card draws is not known"),
        (("--price", "1900", "--hours", "40", "--power", "450W"), "give --gpu, whose price of today is asked for"),
        (("--price", "1900", "--hours", "40", "--gpu", "409"), "no GPU is known as '409'"),
        (("--price", "1900", "--hours", "40", "--gpu", "P4", "--rent", "1"), "what a card draws is not known"),
        (("--price", "1900", "--hours", "40", "--gpu", "4090", "--rent", "0"), "a price limit must be above 0"),
        (("--price", "1900", "--hours", "40", "--gpu", "4090", "--resale", "101%"), "is not between 0 and 100"),
        (("--price", "1900", "--hours", "40", "--gpu", "4090", "--years", "0"), "is not above 0 and at most 50"),
        (("--price", "1900", "--hours", "40", "--gpu", "4090", "--power", "10TB"), "is not a number"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_wrong_figure_is_exit_2_with_a_way_out(ctl: Ctl, arguments: tuple[str, ...], words: str) -> None:
    result = ctl("breakeven", *arguments)
    assert (result.code, result.out) == (2, "")
    assert words in result.err
    assert "hint: " in result.err
    assert "Traceback" not in result.err
