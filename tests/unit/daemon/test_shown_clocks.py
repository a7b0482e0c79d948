"""A computer's clock that is wrong and never set is known by the dates that others state, and is said once."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest

from spotd.daemon.shown_clocks import KNOWN_FOR_S, ShownClocks
from tests.unit.core.builders import MINUTE, NOW
from tests.unit.daemon.rig import Log
from tests.unit.daemon.test_timeline import Machine

pytestmark = pytest.mark.anyio
HOUR = timedelta(hours=1)
SECOND = timedelta(seconds=1)


class Desk:
    """A computer whose clock shows `NOW`, and what was said of it."""

    def __init__(self) -> None:
        self.machine = Machine()
        self.said: list[tuple[str, str]] = []
        self.log = Log()
        self.clocks = ShownClocks(self.machine.computer, note=lambda *said: self.said.append(said), log=self.log)

    async def hears(self, **ahead: timedelta) -> list[tuple[str, str]]:
        """What is said once these have answered, whose clocks are ahead by so much."""
        for who, off in ahead.items():
            self.clocks.note(who, self.machine.wall + off)
        await self.clocks.reconcile_once()
        return self.said


@pytest.mark.parametrize(
    "ahead",
    [
        {},
        {"vast": 5 * HOUR},
        {"vast": 5 * HOUR, "runpod": -5 * HOUR},
        {"vast": 5 * HOUR, "runpod": 2 * SECOND, "store": SECOND},
        {"vast": 5 * HOUR, "lambda": 5 * HOUR, "runpod": 2 * SECOND, "store": SECOND},
        {"vast": 90 * SECOND, "store": 91 * SECOND},
    ],
    ids=["nothing known", "one alone", "two against each other", "two for it", "as many for it", "a slow answer"],
)
async def test_a_clock_is_not_called_wrong_without_two_who_agree(ahead: dict[str, timedelta]) -> None:
    assert await Desk().hears(**ahead) == []


@pytest.mark.parametrize(
    ("off", "way"), [(5 * HOUR, "5 h 0 min behind"), (-5 * HOUR, "5 h 0 min ahead of")], ids=["behind", "ahead"]
)
async def test_a_clock_that_two_others_show_to_be_wrong_is_said_once_and_again_once_it_is_right(
    off: timedelta, way: str
) -> None:
    desk = Desk()
    for _ in range(3):
        await desk.hears(vast=off, store=off + 20 * SECOND)
    [(kind, words)] = desk.said
    assert (kind, f"{way} those of store and vast" in words, "budgets" in words) == ("clock.wrong", True, True), words
    desk.machine.passes(MINUTE)
    desk.machine.wall += off
    await desk.hears()
    assert [kind for kind, _ in desk.said] == ["clock.wrong", "clock.right"], "what was shown counts on as time passes"
    assert desk.log.events() == ["clock.wrong", "clock.right"]


async def test_what_was_shown_an_hour_ago_says_nothing() -> None:
    desk = Desk()
    await desk.hears(vast=HOUR)
    desk.machine.passes(timedelta(seconds=KNOWN_FOR_S + 1))
    assert await desk.hears(store=HOUR) == []
    assert desk.clocks.difference() is None


async def test_a_date_without_a_zone_is_of_utc() -> None:
    desk = Desk()
    desk.clocks.note("vast", datetime.fromisoformat((NOW + HOUR).replace(tzinfo=None).isoformat()))
    [(kind, _)] = await desk.hears(store=HOUR)
    assert kind == "clock.wrong"
