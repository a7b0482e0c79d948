"""Things that happen to hosts because a script or a test says so."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from spotd_providers.contract.values import InstanceState, Loss
from spotd_providers.local.settings import LocalSettings, MarketSpec
from tests.cases import every
from tests.unit.providers.local.clocks import START
from tests.unit.providers.local.market_setup import HOUR, MINUTE, bench, host


def test_the_second_launch_is_preempted_as_scripted_and_wakes_when_the_cause_has_passed(tmp_path: Path) -> None:
    event = {"do": "preempt", "after_launch": 2, "delay": "10m", "lasting": "20m"}
    with bench(tmp_path, hosts=[host(slots=2)], events=[event]) as b:
        first = b.buy(dollars=3)
        b.advance(5 * MINUTE)
        second = b.buy(dollars=1.5)
        b.advance(10 * MINUTE)
        assert [first.state, second.state] == [InstanceState.RUNNING, InstanceState.PAUSED]
        assert b.market.floor.tick("kyiv", b.clock.now()).price > second.price_max
        b.advance(20 * MINUTE)
        assert second.state is InstanceState.RUNNING
        assert b.market.machines.status(second.machine_id).boots == 2


def test_an_event_of_a_host_counts_the_launches_on_that_host(tmp_path: Path) -> None:
    event = {"do": "crash", "host": "oslo", "after_launch": 2, "delay": "10m"}
    with bench(tmp_path, hosts=[host(slots=2), host("oslo", slots=3)], events=[event]) as b:
        bought = [b.buy(f"{name}:spot") for name in ("oslo", "kyiv", "kyiv", "oslo", "oslo")]
        b.reopen()
        b.advance(11 * MINUTE)
        states = [b.market.memory.machines[one.machine_id].state for one in bought]
        assert [state is InstanceState.RUNNING for state in states] == [True, True, True, False, True]


def test_a_scripted_preemption_in_a_notice_market_gives_notice_first(tmp_path: Path) -> None:
    event = {"do": "preempt", "after_launch": 1, "delay": "10m"}
    with bench(tmp_path, hosts=[host(flavour="notice")], events=[event]) as b:
        machine = b.buy()
        b.advance(11 * MINUTE)
        assert machine.doomed_at == START + 12 * MINUTE
        assert b.alive(machine)
        b.advance(MINUTE)
        assert (machine.state, machine.loss) == (InstanceState.GONE, Loss.PREEMPTED)
        assert b.market.sold() == ()
        b.advance(HOUR)
        assert len(b.market.sold()) == 1


@pytest.mark.parametrize(
    ("flavour", "notice", "first", "last"),
    [
        ("sudden", True, InstanceState.RUNNING, InstanceState.PAUSED),
        ("notice", False, InstanceState.GONE, InstanceState.GONE),
    ],
    ids=["bid-market-with-notice", "notice-market-without"],
)
def test_a_preemption_may_break_the_habit_of_its_market(
    tmp_path: Path, flavour: str, notice: bool, first: InstanceState, last: InstanceState
) -> None:
    with bench(tmp_path, hosts=[host(flavour=flavour)]) as b:
        machine = b.buy()
        b.market.preempt(machine, notice=notice, lasting=30 * MINUTE)
        assert machine.state is first
        assert (b.market.machines.home(machine.machine_id) / "notice").exists() == notice
        b.advance(2 * MINUTE)
        assert machine.state is last


def test_scripted_stock_outs_and_prices_hold_for_their_time(tmp_path: Path) -> None:
    events = [
        {"do": "stock-out", "at": "1h", "host": "kyiv", "lasting": "30m"},
        {"do": "price", "at": "2026-03-02T14:00:00Z", "host": "kyiv", "price": "0.40", "lasting": "1h"},
    ]
    with bench(tmp_path, hosts=[host()], events=events) as b:
        seen = []
        for _ in range(14):
            b.advance(15 * MINUTE)
            seen.append([item.price for item in b.market.sold()])
    usual, cheap = [1_000_000], [400_000]
    assert seen == [usual] * 3 + [[]] * 2 + [usual] * 2 + [cheap] * 4 + [usual] * 3


def test_a_crashed_host_takes_its_machine_without_a_word(tmp_path: Path) -> None:
    event = {"do": "crash", "at": "10m", "host": "kyiv"}
    with bench(tmp_path, hosts=[host(flavour="notice")], events=[event]) as b:
        machine = b.buy()
        b.advance(10 * MINUTE)
        assert (machine.state, machine.loss) == (InstanceState.GONE, Loss.HOST_LOST)
        assert not b.alive(machine)


def test_a_scripted_event_happens_once_though_the_server_is_killed_after_it(tmp_path: Path) -> None:
    event = {"do": "crash", "at": "10m", "host": "kyiv"}
    with bench(tmp_path, hosts=[host()], events=[event]) as b:
        b.buy()
        b.advance(10 * MINUTE)
        second = b.buy()
        b.reopen()
        b.advance(MINUTE)
        assert b.alive(second)


def test_an_event_that_was_due_while_no_server_ran_happens_when_one_is_back(tmp_path: Path) -> None:
    event = {"do": "preempt", "after_launch": 1, "delay": "10m", "lasting": "20m"}
    with bench(tmp_path, hosts=[host()], events=[event]) as b:
        machine = b.buy(dollars=2)
        b.clock.advance(25 * MINUTE)
        b.reopen()
        assert not b.alive(machine)
        assert b.bill(machine) == -(-2_000_000 * 10 // 60)


@every(
    ("event", "complaint"),
    [
        ({"do": "crash"}, "either at or after_launch"),
        ({"do": "crash", "at": "1h", "after_launch": 1}, "either at or after_launch"),
        ({"do": "crash", "at": "1h"}, "needs its host"),
        ({"do": "price", "at": "1h", "host": "kyiv"}, "sets the price"),
        ({"do": "crash", "at": "1h", "host": "kyiv", "price": "1"}, "sets the price"),
        ({"do": "crash", "at": "1h", "host": "atlantis"}, "atlantis"),
        ({"do": "crash", "at": 60, "host": "kyiv"}, "needs its unit"),
        ({"do": "crash", "at": "soon", "host": "kyiv"}, "write it like"),
    ],
)
def test_an_event_that_makes_no_sense_is_refused(event: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        MarketSpec.model_validate({"hosts": [host()], "events": [event]})


@every(
    ("settings", "complaint"),
    [
        ({"hosts": [{"name": "kyiv", "gpu": "RTX_4090"}]}, "neither as spot nor on-demand"),
        ({"hosts": [host(), host()]}, "two hosts are named kyiv"),
        ({"hosts": [host(name="Bad Name")]}, "name"),
        ({"hosts": [host(spot={"kind": "fixed", "price": -1})]}, "not a price"),
        ({"colour": "blue"}, "colour"),
        ({"base_url": "https://example.org"}, "on this computer"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        LocalSettings.model_validate(settings)


def test_the_servers_copy_of_the_settings_says_the_same() -> None:
    events = [
        {"do": "crash", "at": "1h30m", "host": "kyiv"},
        {"do": "crash", "at": "2026-03-02T14:00:00Z", "host": "kyiv"},
        {"do": "price", "after_launch": 2, "delay": "90s", "price": "0.123456"},
    ]
    settings = LocalSettings.model_validate(
        {"seed": 7, "hosts": [host(on_demand=0.7), host("oslo", spot={"kind": "seeded", "base": 0.3})],
         "events": events, "notice_lead": "30s", "directory": "/nowhere"}
    )  # fmt: skip
    market = settings.market()
    assert MarketSpec.model_validate_json(market.model_dump_json()) == market
    assert market.notice_lead == timedelta(seconds=30)
    assert MarketSpec.model_validate_json(LocalSettings().market().model_dump_json()) == MarketSpec()
