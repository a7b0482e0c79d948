"""How long something cools down: bounded once, doubled in a row, prolonged and never cut short."""

from __future__ import annotations

from datetime import timedelta

import pytest

from spotd.core.domain.cooldowns import CooldownEnd, CooldownScope
from spotd.core.domain.plan import applied
from spotd.core.domain.states import AttemptState
from spotd.core.plan_builder import PlanBuilder
from tests.cases import every
from tests.unit.core.builders import MINUTE, NOW, SHOP, world_with

HOUR = timedelta(hours=1)


class Cooling:
    """One subject that is refused again and again."""

    def __init__(self) -> None:
        self.world = world_with(AttemptState.RUNNING)
        self.builder = PlanBuilder(self.world, NOW)

    def cool(self, span: timedelta, *, longest: timedelta | None = None, most: timedelta = HOUR) -> timedelta:
        self.builder.cool(SHOP, CooldownScope.OFFER, "o", span, "refused", longest=longest, most=most)
        return self.builder.plan().cooldowns[-1].until - NOW


def test_a_pause_is_as_long_as_was_said() -> None:
    assert Cooling().cool(MINUTE) == MINUTE


@every("span", [HOUR + MINUTE, timedelta(days=400), timedelta.max])
def test_no_pause_is_longer_than_the_most(span: timedelta) -> None:
    cooling = Cooling()
    assert [cooling.cool(span) for _ in range(3)] == [HOUR] * 3


def test_nor_is_one_in_a_row_whatever_the_longest_of_its_kind() -> None:
    cooling = Cooling()
    pauses = [cooling.cool(20 * MINUTE, longest=timedelta(days=2)) for _ in range(4)]
    assert pauses == [20 * MINUTE, 40 * MINUTE, HOUR, HOUR]


def test_a_pause_in_a_row_doubles_up_to_the_longest_of_its_kind() -> None:
    cooling = Cooling()
    assert [cooling.cool(MINUTE, longest=3 * MINUTE) for _ in range(3)] == [MINUTE, 2 * MINUTE, 3 * MINUTE]


def test_a_shorter_pause_cuts_no_longer_one_short() -> None:
    cooling = Cooling()
    assert cooling.cool(30 * MINUTE) == 30 * MINUTE
    assert cooling.cool(MINUTE) == 30 * MINUTE


def refusal(cooling: Cooling, seconds: int, asked: int | None, ends: CooldownEnd = CooldownEnd.TIME) -> timedelta:
    """How long the pause is after another refusal, whose call was decided at `asked`, in seconds."""
    now = NOW + timedelta(seconds=seconds)
    cooling.world = applied(cooling.world, cooling.builder.plan())
    cooling.builder = PlanBuilder(cooling.world, now)
    asked_at = None if asked is None else NOW + timedelta(seconds=asked)
    cooling.builder.cool(SHOP, CooldownScope.OFFER, "o", MINUTE, "no", longest=HOUR, ends=ends, asked_at=asked_at)
    return cooling.builder.plan().cooldowns[-1].until - now


@every(
    ("asked", "pause"),
    [
        pytest.param(-1, MINUTE, id="decided before the first refusal: the same cause"),
        pytest.param(0, 2 * MINUTE, id="decided in its instant, so that it was known"),
        pytest.param(1, 2 * MINUTE, id="decided after it, so that the cause has lasted"),
        pytest.param(None, 2 * MINUTE, id="not known"),
    ],
)
def test_two_calls_that_one_rise_of_a_price_refuses_are_one_strike(asked: int | None, pause: timedelta) -> None:
    cooling = Cooling()
    refusal(cooling, 0, -5)
    assert refusal(cooling, 2, asked) == pause
    assert refusal(cooling, 4, 3) == 2 * pause, "the next one, which knew of both, is another strike"


def test_refusals_of_one_kind_do_not_lengthen_the_pause_of_another() -> None:
    """A right that was refused after some throttles was left alone for 215 s instead of a minute."""
    cooling = Cooling()
    pauses = [refusal(cooling, n * 60, n * 60 - 1) for n in range(3)]
    assert pauses == [MINUTE, 2 * MINUTE, 4 * MINUTE]
    over = 120 + 240 + 1
    assert refusal(cooling, over, over - 1, CooldownEnd.KEY) == MINUTE
    assert refusal(cooling, over + 60, over + 59, CooldownEnd.KEY) == 2 * MINUTE
