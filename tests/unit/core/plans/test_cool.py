"""How long something cools down: bounded once, doubled in a row, prolonged and never cut short."""

from __future__ import annotations

from datetime import timedelta

import pytest

from spotd.core.domain.cooldowns import CooldownScope
from spotd.core.domain.states import AttemptState
from spotd.core.plan_builder import PlanBuilder
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


@pytest.mark.parametrize("span", [HOUR + MINUTE, timedelta(days=400), timedelta.max])
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
