"""What each policy chooses in situations that tell them apart, and the sentence that it gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from spotd.core.policies import HOUR_S, POLICIES, WITH_DEADLINE, Action, Observation, Zone, choose, hours_words
from spotd_providers.contract.values import MicroUsdPerHour
from tests.cases import every
from tests.replays.replay import zone_after

_DOWN: Final = Zone(name="a", is_up=False, price=MicroUsdPerHour(1_000_000))
_UP: Final = replace(_DOWN, is_up=True, up_s=600)
_OLD: Final = replace(_UP, up_s=20 * HOUR_S)


def _seen(hours_left: float = 30.0, work: float = 20.0, done: float = 0.0, **changes: Any) -> Observation:
    base = Observation(
        task_s=round((work + done) * HOUR_S),
        work_s=round(work * HOUR_S),
        elapsed_s=10 * HOUR_S,
        left_s=round(hours_left * HOUR_S),
        step_s=600,
        overhead_s=720,
        zones=(_DOWN,),
        on_demand=MicroUsdPerHour(3_000_000),
    )
    return replace(base, **changes)


_HELD: Final[dict[str, Any]] = {"holds": Action.SPOT, "held_zone": "a", "zones": (_UP,)}
_PAID: Final[dict[str, Any]] = {"holds": Action.ON_DEMAND}
_W, _S, _D = Action.WAIT, Action.SPOT, Action.ON_DEMAND


@every(
    ("name", "seen", "action"),
    [
        ("ceiling", _seen(), _W),
        ("ceiling", _seen(zones=(_UP,)), _S),
        ("ceiling", _seen(hours_left=20.4), _D),  # the shield
        ("greedy", _seen(), _W),
        ("greedy", _seen(hours_left=20.5), _D),
        ("greedy", _seen(hours_left=20.5, **_HELD), _S),
        ("uniform-progress", _seen(), _D),  # nothing done after ten of forty hours
        ("uniform-progress", _seen(done=10), _W),
        ("uniform-progress", _seen(done=10, zones=(_UP,)), _S),
        ("uniform-progress", _seen(done=6.67, zones=(_UP,), **_PAID), _D),
        ("uniform-progress-eager", _seen(done=6.67, zones=(_UP,), **_PAID), _S),
        ("slack-reserve", _seen(), _W),
        ("slack-reserve", _seen(hours_left=26), _D),
        ("slack-reserve-tenth", _seen(hours_left=23), _W),
        ("slack-reserve", _seen(**_PAID), _D),
        ("slack-pacing", _seen(), _W),
        ("slack-pacing", _seen(hours_left=22), _D),
        ("slack-pacing", _seen(hours_left=22, **_HELD), _S),
        ("slack-pacing", _seen(hours_left=22, zones=(_UP,), **_PAID), _D),
        ("slack-pacing", _seen(hours_left=22, zones=(_OLD,), **_PAID), _S),
        ("slack-pacing", _seen(zones=(replace(_UP, price=MicroUsdPerHour(3_000_000)),)), _D),
        ("on-demand", _seen(zones=(_UP,)), _D),
    ],
)
def test_each_policy_in_its_own_case(name: str, seen: Observation, action: Action) -> None:
    chosen = choose(name, seen)
    assert (chosen.action, bool(chosen.zone)) == (action, action is Action.SPOT), chosen


@every("name", sorted(POLICIES))
@every("left", [None, -5 * HOUR_S, 0, 5 * HOUR_S, 10**12])
@every("on_demand", [None, 0, 1, 10**15])
def test_no_figure_makes_a_policy_fail(name: str, left: int | None, on_demand: int | None) -> None:
    price = None if on_demand is None else MicroUsdPerHour(on_demand)
    for work in (-3, 0, 1, 10**12):
        for zones in ((), (_DOWN,), (_UP, replace(_OLD, name="b", price=MicroUsdPerHour(0)))):
            for overhead in (0, 10**9):
                seen = _seen(work_s=work, left_s=left, on_demand=price, zones=zones, overhead_s=overhead)
                chosen = choose(name, replace(seen, task_s=max(1, work)))
                assert chosen.sentence
                assert price is not None or chosen.action is not Action.ON_DEMAND


def test_without_an_on_demand_machine_a_job_out_of_time_takes_spot_and_says_so() -> None:
    chosen = choose("greedy", _seen(hours_left=1, zones=(_UP,), on_demand=None))
    assert chosen.action is Action.SPOT
    assert choose("greedy", _seen(hours_left=1, on_demand=None)).sentence.endswith("no on-demand machine may be used")


def test_slack_pacing_gives_its_reason_in_figures() -> None:
    chosen = choose(WITH_DEADLINE, _seen(hours_left=22, zones=(_UP,), **_PAID))
    assert chosen.sentence == (
        "stays on on-demand: spot has been up 10 min, asks for 15 min,"
        " because slack is 108 min beside a reserve of 2.4 h"
    )


def test_the_cheapest_zone_that_seems_to_last_is_returned_to_and_a_running_one_is_kept() -> None:
    young = replace(_UP, name="cheap", price=MicroUsdPerHour(900_000))
    seen = _seen(hours_left=21.5, zones=(young, replace(_OLD, name="old")))
    assert choose(WITH_DEADLINE, replace(seen, holds=Action.ON_DEMAND)).zone == "old"
    assert choose(WITH_DEADLINE, seen).zone == "cheap"
    assert choose(WITH_DEADLINE, replace(seen, holds=Action.SPOT, held_zone="old")).zone == "old"


def test_up_runs_are_counted_as_they_end() -> None:
    zone = _DOWN
    for is_up in (True, True, False, False, True):
        zone = zone_after(zone, is_up=is_up, price=zone.price, step_s=60)
    assert (zone.up_s, zone.past_up_s, zone.past_runs) == (60, 120, 1)


def test_spans_are_written_as_people_read_them() -> None:
    assert [hours_words(s) for s in (1200, 4.8 * HOUR_S, float("inf"))] == [
        "20 min",
        "4.8 h",
        "more time than there is",
    ]
