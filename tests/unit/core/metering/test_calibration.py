"""The fee that bills imply: found where it is there, with how sure it is, and refused where there is too little."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotd.core.calibration import MACHINES_MIN, BilledMachine, calibration
from spotd_providers.contract.values import MicroUsd
from tests.cases import every
from tests.unit.core.builders import SHOP

X120 = 1_200_000


def machine(bare: int, billed: int, traffic: int = 0) -> BilledMachine:
    """A machine that was booked at x1.20."""
    booked = bare * 12 // 10 + traffic
    return BilledMachine(
        provider=SHOP,
        bare=MicroUsd(bare),
        traffic=MicroUsd(traffic),
        booked=MicroUsd(booked),
        billed=MicroUsd(billed + traffic),
    )


def bills(multiplier: float, count: int, noise: float = 0.0, seed: int = 1) -> list[BilledMachine]:
    """Machines of some dollars each, billed at this multiplier; their traffic is billed as it was booked."""
    chance = Random(seed)
    found = []
    for _ in range(count):
        bare = chance.randrange(500_000, 9_000_000)
        billed = round(bare * multiplier * (1 + chance.gauss(0, noise)))
        found.append(machine(bare, billed, chance.randrange(500_000)))
    return found


@every("true", [1.0, 1.08, 1.2, 1.35])
def test_the_true_multiplier_is_found(true: float) -> None:
    found = calibration(bills(true, 40, noise=0.01), X120)
    assert found.measured_ppm is not None
    assert found.spread_ppm is not None
    assert abs(found.measured_ppm - true * 1_000_000) <= 2 * found.spread_ppm
    assert found.spread_ppm < 10_000
    if true == 1.2:
        assert found.suggested_ppm is None
        assert found.sentence.endswith("x1.200 is in force and agrees")
    else:
        assert found.suggested_ppm is not None
        assert 0 <= found.suggested_ppm - found.measured_ppm <= 10_000


def test_the_true_multiplier_is_within_the_interval_as_often_as_is_claimed() -> None:
    hits: list[bool] = []
    for seed in range(400):
        found = calibration(bills(1.1, 12, noise=0.015, seed=seed), X120)
        if found.measured_ppm is not None and found.spread_ppm is not None:
            hits.append(abs(found.measured_ppm - 1_100_000) <= found.spread_ppm)
    assert len(hits) > 300
    assert 0.90 <= sum(hits) / len(hits) <= 0.985


@every("count", range(MACHINES_MIN))
def test_too_few_machines_say_nothing(count: int) -> None:
    found = calibration(bills(1.0, count), X120)
    assert (found.measured_ppm, found.suggested_ppm, found.machines) == (None, None, count)
    assert found.sentence.startswith("too little to say: ")


def test_too_little_money_says_nothing() -> None:
    found = calibration([machine(10_000, 10_000)] * 50, X120)
    assert (found.measured_ppm, found.suggested_ppm) == (None, None)


def test_bills_that_agree_with_nothing_suggest_nothing() -> None:
    found = calibration(bills(1.1, 8, noise=0.6), X120)
    assert found.suggested_ppm is None
    assert found.sentence.endswith("too uncertain to suggest anything")


@every("true", [0.0, 0.3, 9.0])
def test_what_cannot_be_a_fee_is_not_suggested(true: float) -> None:
    found = calibration(bills(true, 20), X120)
    assert found.suggested_ppm is None
    assert "something else differs" in found.sentence


@given(st.lists(st.tuples(st.integers(0, 10**10), st.integers(-(10**9), 10**13)), max_size=30), st.integers(0, 10**7))
def test_whatever_is_billed_makes_a_sentence(rows: list[tuple[int, int]], fee_ppm: int) -> None:
    found = calibration([machine(bare, billed) for bare, billed in rows], fee_ppm)
    assert found.sentence
    assert found.billed == sum(billed for _, billed in rows)


def test_what_is_in_force_to_the_hundredth_is_not_suggested_again() -> None:
    """1.0945 is rounded up to the 1.10 that the config holds."""
    found = calibration(bills(1.0945, 40, noise=0.001), 1_100_000)
    assert found.measured_ppm is not None
    assert found.spread_ppm is not None
    assert found.measured_ppm + found.spread_ppm < 1_100_000
    assert found.suggested_ppm is None
    assert found.sentence.endswith("x1.100 is in force and agrees")


@every("image", [30_000, 140_000, 900_000])
def test_what_each_start_costs_is_not_taken_for_a_fee(image: int) -> None:
    """The download of an image is billed with every start, whatever the machine then costs."""
    rows = [replace(one, billed=MicroUsd(one.billed + image)) for one in bills(1.0, 30, noise=0.005)]
    found = calibration(rows, X120)
    assert found.suggested_ppm in {1_000_000, 1_010_000}
    assert "for each start" in found.sentence
    assert calibration(rows, 1_000_000).suggested_ppm is None


def test_machines_that_cost_the_same_cannot_tell_a_start_from_a_fee() -> None:
    found = calibration([machine(1_000_000, 1_140_000 + 10 * n) for n in range(12)], 1_000_000)
    assert (found.measured_ppm, found.suggested_ppm) == (None, None)
    assert "too alike" in found.sentence
    chance = Random(3)
    nearly = [machine(1_000_000 + 20_000 * n, 1_140_000 + 20_000 * n + chance.randrange(40_000)) for n in range(12)]
    assert calibration(nearly, 1_000_000).suggested_ppm is None


@every("less", [30_000, 400_000])
def test_no_start_costs_less_than_nothing(less: int) -> None:
    rows = [replace(one, billed=MicroUsd(one.billed - less)) for one in bills(1.1, 30, noise=0.005)]
    found = calibration(rows, X120)
    assert "for each start" not in found.sentence
    sums = sum(one.billed - one.traffic for one in rows) / sum(one.bare for one in rows)
    assert found.measured_ppm == pytest.approx(1_000_000 * sums, abs=1)
    assert all(calibration(bills(1.1, 8, 0.03, seed), X120).sentence.count("less") == 0 for seed in range(50))


@every("factor", [0.1, 2.0, 8.0])
@every("bare", [40_000, 3_000_000, 500_000_000])
@every("count", [8, 40])
def test_one_bill_decides_nothing(bare: int, factor: float, count: int) -> None:
    """Whether it is of the smallest machine or of one that cost more than all others."""
    wrong = machine(bare, round(bare * factor))
    for seed in range(20):
        rows = bills(1.08, count, noise=0.01, seed=seed)
        found = calibration([*rows, wrong], X120)
        assert found.suggested_ppm is None or abs(found.suggested_ppm - 1_080_000) <= 30_000, (seed, found.sentence)
    assert calibration([*bills(1.08, 40, noise=0.01), wrong], X120).suggested_ppm in {1_080_000, 1_090_000}


def test_one_long_machine_beside_others_of_one_length_shows_no_fee() -> None:
    alike = [machine(1_000_000, 1_140_000 + 500 * n) for n in range(12)]
    found = calibration([*alike, machine(60_000_000, 60_140_000)], X120)
    assert (found.measured_ppm, found.suggested_ppm) == (None, None)


@every("count", [5, 6, 8, 12, 30])
@every("span", [1_000, 20_000, 200_000, 3_000_000])
def test_image_traffic_is_never_printed_as_a_fee(count: int, span: int) -> None:
    """The true multiplier is 1.00, and each start costs $0.14 of a machine of a dollar or more."""
    for seed in range(40):
        chance = Random(seed)
        bares = [1_000_000 + chance.randrange(span) for _ in range(count)]
        found = calibration([machine(b, b + 140_000 + chance.randrange(20_000)) for b in bares], 1_000_000)
        assert found.suggested_ppm is None or found.suggested_ppm <= 1_050_000, (seed, found.sentence)
        assert found.measured_ppm is None or found.measured_ppm < 1_100_000, (seed, found.sentence)
        assert "x1.1" not in found.sentence.split(", between")[0]


def test_bills_of_a_thousand_machines_are_compared_at_once() -> None:
    found = calibration(bills(1.08, 5_000, noise=0.2), X120)
    assert found.suggested_ppm in {1_080_000, 1_090_000}


@every(("wrong", "says"), [(8, True), (14, False)])
def test_more_than_one_strange_bill_in_four_says_nothing(wrong: int, *, says: bool) -> None:
    rows = bills(1.08, 40, noise=0.001)
    rows[:wrong] = [replace(one, billed=MicroUsd(3 * one.billed)) for one in rows[:wrong]]
    assert (calibration(rows, X120).suggested_ppm is not None) is says
