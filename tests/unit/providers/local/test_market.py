"""Who gets a host, at what price, and who has to go."""

from __future__ import annotations

import errno
import json
import os
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from spotd_providers.contract.values import InstanceState, Loss, MicroUsdPerHour
from spotd_providers.local.hosts import LedgerEvent, segments
from spotd_providers.local.market.market import Refused
from spotd_providers.local.settings import Refusal
from tests.fakes.ledger_sums import most_at_once
from tests.unit.providers.local.clocks import START
from tests.unit.providers.local.market_setup import FOREVER, HOUR, LAB, MINUTE, bench, host, steps, trace
from tests.unit.providers.local.waiting import until


def test_outbid_stops_the_machine_bills_its_disk_and_wakes_it_when_the_bid_wins_again(tmp_path: Path) -> None:
    prices = steps(tmp_path, (0, 1.0), (1, 2.0), (2, 1.0))
    with bench(tmp_path, hosts=[host(spot=prices, storage_gb_month="0.10")]) as b:
        machine = b.buy(dollars=1.5, disk_gb=72)
        b.advance(HOUR + 30 * MINUTE)
        assert (machine.state, machine.loss) == (InstanceState.PAUSED, Loss.OUTBID)
        assert not b.alive(machine)
        b.advance(HOUR)
        assert (machine.state, machine.loss) == (InstanceState.RUNNING, None)
        assert b.alive(machine)
        assert b.market.machines.status(machine.machine_id).boots == 2
        b.market.terminate(machine.machine_id, install=LAB)
        # An hour and a half at the bid of 1.50, and two and a half hours of 72 GB at 0.10 per month, 0.01 per hour.
        assert b.bill(machine) == 1_500_000 * 3 // 2 + 25_000


def test_a_bidder_pays_the_bid_and_not_the_price(tmp_path: Path) -> None:
    with bench(tmp_path, hosts=[host()]) as b:
        machine = b.buy(dollars=1.5)
        b.advance(HOUR)
        assert b.bill(machine) == 1_500_000


def test_a_changed_bid_is_billed_from_then_on_and_may_win_the_host_back(tmp_path: Path) -> None:
    with bench(tmp_path, hosts=[host(spot=steps(tmp_path, (0, 1.0), (2, 3.0)))]) as b:
        machine = b.buy(dollars=1.5)
        b.advance(HOUR)
        b.market.change_bid(machine.machine_id, install=LAB, price=MicroUsdPerHour(2_000_000))
        b.advance(2 * HOUR)
        assert machine.state is InstanceState.PAUSED
        assert b.bill(machine) == 1_500_000 + 2_000_000
        b.market.change_bid(machine.machine_id, install=LAB, price=MicroUsdPerHour(3_000_000))
        assert b.alive(machine)
        b.advance(HOUR)
        assert b.bill(machine) == 1_500_000 + 2_000_000 + 3_000_000


def test_a_notice_comes_two_virtual_minutes_ahead_and_then_the_machine_is_gone(tmp_path: Path) -> None:
    prices = steps(tmp_path, (0, 1.0), (1, 2.0))
    with bench(tmp_path, hosts=[host(spot=prices, flavour="notice")]) as b:
        machine = b.buy(dollars=1.5)
        b.advance(HOUR - MINUTE)
        notice = b.market.machines.home(machine.machine_id) / "notice"
        assert machine.doomed_at is None
        assert not notice.exists()
        b.advance(MINUTE)
        assert machine.doomed_at == START + HOUR + 2 * MINUTE
        assert datetime.fromisoformat(json.loads(notice.read_text())["virtual_at"]) == machine.doomed_at
        b.advance(2 * MINUTE - timedelta(seconds=1))
        assert b.alive(machine)
        b.advance(timedelta(seconds=1))
        assert not b.alive(machine)
        assert (machine.state, machine.loss) == (InstanceState.GONE, Loss.PREEMPTED)
        # An hour at 1.00, and the last two minutes at what was agreed at most.
        b.advance(HOUR)
        assert b.bill(machine) == 1_000_000 + 50_000


def test_a_notice_market_bills_its_price_while_that_moves(tmp_path: Path) -> None:
    prices = steps(tmp_path, (0, 1.0), (1, 1.25), (2, 0.75))
    with bench(tmp_path, hosts=[host(spot=prices, flavour="notice")]) as b:
        machine = b.buy(dollars=1.5)
        b.advance(3 * HOUR)
        assert machine.price == 750_000
        assert b.bill(machine) == 1_000_000 + 1_250_000 + 750_000


@pytest.mark.parametrize("flavour", ["sudden", "notice"])
def test_the_books_are_the_same_however_seldom_the_market_looks(tmp_path: Path, flavour: str) -> None:
    spending = []
    for name, stride in (("often", timedelta(minutes=7)), ("once", timedelta(hours=56))):
        folder = tmp_path / name
        folder.mkdir()
        with bench(folder, hosts=[host(spot={"kind": "seeded", "base": "1.0"}, flavour=flavour)]) as b:
            b.buy(dollars=1.05)
            for _ in range(timedelta(hours=56) // stride):
                b.advance(stride)
            spending.append(b.lines())
    assert spending[0] == spending[1]
    assert len(spending[0]) > 3


def test_a_recorded_trace_preempts_when_it_says_that_none_is_left(tmp_path: Path) -> None:
    replay = trace(tmp_path, [2, 1, 0, 0, 2])
    with bench(tmp_path, hosts=[host(spot=replay, flavour="notice", slots=4)]) as b:
        first, second = b.buy(), b.buy()
        assert b.market.sold() == ()
        b.advance(HOUR + 2 * MINUTE)
        assert [first.state, second.state] == [InstanceState.RUNNING, InstanceState.GONE]
        b.advance(HOUR)
        assert first.state is InstanceState.GONE
        assert b.market.sold() == ()
        b.advance(2 * HOUR)
        assert [item.offer_id for item in b.market.sold()] == ["kyiv:spot"]


def test_the_higher_bid_has_the_slot_and_the_lower_waits_for_it(tmp_path: Path) -> None:
    # Both fit at first; then only one machine is left.
    with bench(tmp_path, hosts=[host(spot=trace(tmp_path, [2, 1, 2]), slots=2)]) as b:
        low, high = b.buy(dollars=1.2), b.buy(dollars=1.4)
        b.advance(HOUR)
        assert [low.state, high.state] == [InstanceState.PAUSED, InstanceState.RUNNING]
        b.advance(HOUR)
        assert [low.state, high.state] == [InstanceState.RUNNING, InstanceState.RUNNING]


def test_a_second_launch_under_the_same_key_makes_a_second_machine_that_the_books_show(tmp_path: Path) -> None:
    with bench(tmp_path, hosts=[host(slots=3)]) as b:
        b.buy(key="spotd-lab-twin-1")
        b.buy(key="spotd-lab-twin-1")
        assert len(b.market.listing(install=LAB, key="spotd-lab-twin-1")) == 2
        b.advance(HOUR)
        assert most_at_once(span for span in segments(b.lines()) if span.key == "spotd-lab-twin-1") == 2


def test_a_machine_that_ends_itself_is_gone_and_billed_until_it_ended(tmp_path: Path) -> None:
    with bench(tmp_path, hosts=[host()]) as b:
        machine = b.buy(script='touch "$HOME/machine-done"; ' + FOREVER)
        failed = "spotd-lab-failed-1"
        until(lambda: not b.alive(machine))
        b.market.advance()
        assert (machine.state, machine.loss, machine.detail) == (InstanceState.GONE, Loss.SELF, "done")
        assert b.bill(machine) == 0
        other = b.buy(script="exit 4", key=failed)
        until(lambda: not b.alive(other))
        b.market.advance()
        assert (other.state, other.loss) == (InstanceState.GONE, Loss.SELF)
        assert "exit code 4" in other.detail


def test_machines_books_and_promises_survive_the_server(tmp_path: Path) -> None:
    prices = steps(tmp_path, (0, 1.0), (1, 2.0), (3, 1.0))
    spec = {"hosts": [host(spot=prices), host("oslo", flavour="notice", spot=prices)]}
    with bench(tmp_path, **spec) as b:
        b.buy(dollars=1.5)
        b.buy("oslo:spot", dollars=5)
        b.reopen()
        bid, agreed = b.market.listing(install=LAB)
        assert b.alive(bid)
        assert b.alive(agreed)
        b.advance(2 * HOUR)
        b.reopen()
        bid, agreed = b.market.listing(install=LAB)
        assert [bid.state, agreed.state] == [InstanceState.PAUSED, InstanceState.RUNNING]
        b.clock.advance(2 * HOUR)
        b.reopen()
        bid, agreed = b.market.listing(install=LAB)
        assert b.alive(bid)
        assert b.bill(bid) == 1_500_000 * 2
        assert b.bill(agreed) == 1_000_000 + 2 * 2_000_000 + 1_000_000


def test_a_server_killed_between_selling_and_booking_books_when_it_is_back(tmp_path: Path) -> None:
    with bench(tmp_path, hosts=[host()]) as b:
        machine = b.buy(dollars=1.5)
        b.market.ledger.path.write_text("")
        b.advance(HOUR)
        b.reopen()
        assert b.bill(machine) == 1_500_000


def test_a_server_killed_before_the_start_script_ran_runs_it_when_it_is_back(tmp_path: Path) -> None:
    with bench(tmp_path, hosts=[host()], provisioning="2m") as b:
        machine = b.buy()
        assert (machine.state, b.alive(machine)) == (InstanceState.PENDING, False)
        b.clock.advance(5 * MINUTE)
        b.reopen()
        (machine,) = b.market.listing(install=LAB)
        assert machine.state is InstanceState.RUNNING
        assert b.alive(machine)


def test_processes_that_vanish_without_a_word_mean_a_lost_host(tmp_path: Path) -> None:
    with bench(tmp_path, hosts=[host()]) as b:
        machine = b.buy()
        b.market.machines.kill(machine.machine_id)
        b.advance(MINUTE)
        assert (machine.state, machine.loss) == (InstanceState.GONE, Loss.HOST_LOST)


REFUSALS: list[tuple[str, dict[str, Any], dict[str, Any], Refusal, str]] = [
    ("no such host", {}, {"offer_id": "nowhere:spot"}, Refusal.NO_OFFER, "nowhere"),
    ("not sold that way", {}, {"offer_id": "kyiv:on-demand"}, Refusal.NO_OFFER, "kyiv"),
    ("no such market", {}, {"offer_id": "kyiv:futures"}, Refusal.NO_OFFER, "futures"),
    ("bid too low", {}, {"dollars": 0.5}, Refusal.PRICE_MOVED, "costs more"),
    ("disk too large", {}, {"disk_gb": 5000}, Refusal.REJECTED, "2000 GB"),
    ("script too long", {}, {"start_script": "#" * 4097}, Refusal.REJECTED, "4096"),
    ("quota", {"machines_max": 1}, {}, Refusal.QUOTA, "1 machines"),
    ("host is full", {}, {}, Refusal.NO_CAPACITY, "kyiv"),
    ("the customer gave up", {}, {"expired": lambda: True}, Refusal.REJECTED, "too late"),
]


@pytest.mark.parametrize(
    ("spec", "request_", "refusal", "word"),
    [pytest.param(*case[1:], id=case[0]) for case in REFUSALS],
)
def test_a_refused_launch_leaves_no_machine_and_no_bill(
    tmp_path: Path, spec: dict[str, Any], request_: dict[str, Any], refusal: Refusal, word: str
) -> None:
    with bench(tmp_path, hosts=[host()], **spec) as b:
        full = refusal in (Refusal.QUOTA, Refusal.NO_CAPACITY)
        if full:
            b.buy()
        with pytest.raises(Refused, match=word) as refused:
            b.buy(request_.pop("offer_id", "kyiv:spot"), **request_)
        assert refused.value.refusal is refusal
        assert len(b.lines()) == len(b.market.listing(install=LAB)) == int(full)


def test_what_is_on_offer_follows_price_slots_and_stock(tmp_path: Path) -> None:
    prices = steps(tmp_path, (0, 1.0, 5), (1, 1.5, 0))
    with bench(tmp_path, hosts=[host(spot=prices, on_demand="3.00")]) as b:
        assert [(i.offer_id, i.price) for i in b.market.sold()] == [
            ("kyiv:spot", 1_000_000), ("kyiv:on-demand", 3_000_000),
        ]  # fmt: skip
        machine = b.buy("kyiv:on-demand", dollars=3)
        assert b.market.sold() == ()
        b.advance(HOUR + MINUTE)
        assert machine.state is InstanceState.RUNNING
        assert b.bill(machine) == 3_050_000
        b.market.terminate(machine.machine_id, install=LAB)
        assert [i.offer_id for i in b.market.sold()] == ["kyiv:on-demand"]


def test_another_install_neither_sees_nor_touches_a_machine(tmp_path: Path) -> None:
    with bench(tmp_path, hosts=[host()]) as b:
        machine = b.buy()
        assert b.market.listing(install="other") == ()
        b.market.terminate(machine.machine_id, install="other")
        with pytest.raises(Refused, match="no machine"):
            b.market.get(machine.machine_id, install="other")
        assert b.alive(machine)


def test_terminating_twice_or_a_stranger_succeeds(tmp_path: Path) -> None:
    with bench(tmp_path, hosts=[host()]) as b:
        machine = b.buy()
        for name in (machine.machine_id, machine.machine_id, "m-999999"):
            b.market.terminate(name, install=LAB)
        assert [line.event for line in b.lines()] == [LedgerEvent.OPEN, LedgerEvent.END]


def test_a_new_machine_shows_up_in_lists_after_the_lag_only(tmp_path: Path) -> None:
    with bench(tmp_path, hosts=[host()], list_lag="90s") as b:
        b.buy()
        assert b.market.listing(install=LAB) == ()
        b.advance(90 * timedelta(seconds=1))
        assert len(b.market.listing(install=LAB)) == 1


def test_gone_machines_are_listed_for_a_while_and_then_forgotten_with_their_files(tmp_path: Path) -> None:
    with bench(tmp_path, hosts=[host()]) as b:
        machine = b.buy()
        b.market.terminate(machine.machine_id, install=LAB)
        b.advance(59 * MINUTE)
        assert [m.state for m in b.market.listing(install=LAB)] == [InstanceState.GONE]
        b.advance(2 * MINUTE)
        assert b.market.listing(install=LAB) == ()
        assert not b.market.machines.directory(machine.machine_id).exists()


def test_a_machine_on_a_host_that_was_taken_out_of_the_settings_ends(tmp_path: Path) -> None:
    with bench(tmp_path, hosts=[host(), host("oslo")]) as b:
        machine = b.buy("oslo:spot")
        b.spec = b.spec.model_copy(update={"hosts": b.spec.hosts[:1]})
        b.reopen()
        assert not b.alive(machine)
        assert [line.event for line in b.lines()] == [LedgerEvent.OPEN, LedgerEvent.END]


def test_a_market_that_was_shut_down_has_no_machine_and_no_open_bill(tmp_path: Path) -> None:
    with bench(tmp_path, hosts=[host(slots=3)]) as b:
        machines = [b.buy(), b.buy(), b.buy()]
        b.market.shut_down()
        assert not any(b.alive(machine) for machine in machines)
        assert all(span.end is not None for span in segments(b.lines()))


def test_a_machine_that_cannot_be_written_down_is_not_sold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with bench(tmp_path, hosts=[host()]) as b:
        b.market.advance()
        with monkeypatch.context() as full_disk:
            full_disk.setattr(os, "write", _no_space)
            with pytest.raises(Refused, match="cannot write its ledger") as refused:
                b.buy()
        assert refused.value.refusal is Refusal.INTERNAL
        b.reopen()
        assert b.market.listing(install=LAB) == ()
        assert b.lines() == ()


def _no_space(descriptor: int, text: bytes) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
