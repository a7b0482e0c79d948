"""Several machines of one host of the local market, bought and ended as one."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest

from spotd_providers.contract.values import InstanceState, Loss
from spotd_providers.local.hosts.processes import pids_with_environment
from spotd_providers.local.market.floor import Machine
from spotd_providers.local.market.market import Refused
from spotd_providers.local.settings import Refusal
from tests.processes import oldest_first
from tests.unit.providers.local.market_setup import HOUR, LAB, MINUTE, Bench, bench, host, steps
from tests.unit.providers.local.waiting import until

SHOWS = "echo $SPOTD_NODE_RANK $SPOTD_NODE_ADDRESS > place; exec sleep 1000"


def alive(found: Bench, machine: Machine) -> list[bool]:
    known = found.market.machines.ids()
    return [member in known and found.market.machines.alive(member) for member in machine.members]


def kill(found: Bench, member: str) -> None:
    mark = (found.folder / "machines" / "mark").read_text()
    # The first of them notes how its script ended, and would take its death for an end of its own.
    for pid in oldest_first(pids_with_environment(f"SPOTD_LOCAL_MACHINE={mark}:{member}")):
        os.kill(pid, signal.SIGKILL)


def test_all_start_with_their_ranks_at_the_price_of_all_and_end_as_one(tmp_path: Path) -> None:
    with bench(tmp_path, hosts=[host(slots=4, storage_gb_month="0.10")]) as b:
        machine = b.buy(dollars=4.5, nodes=3, script=SHOWS, disk_gb=72)
        places = [b.market.machines.directory(member) / "place" for member in machine.members]
        until(lambda: all(place.exists() and place.read_text() for place in places))
        assert [place.read_text().split() for place in places] == [[str(rank), "127.0.0.1"] for rank in range(3)]
        assert b.market.listing(install=LAB) == (machine,)
        b.advance(HOUR)
        b.market.terminate(machine.machine_id, install=LAB)
        assert alive(b, machine) == [False, False, False]
        assert b.bill(machine) == 4_500_000 + 3 * 10_000


def test_there_are_all_or_none(tmp_path: Path) -> None:
    with bench(tmp_path, hosts=[host(slots=4)]) as b:
        b.buy(nodes=2, dollars=2.0)
        with pytest.raises(Refused) as caught:
            b.buy(nodes=3, dollars=9.0)
        assert caught.value.refusal is Refusal.NO_CAPACITY
        with pytest.raises(Refused) as caught:
            b.buy(nodes=2, dollars=1.9)
        assert caught.value.refusal is Refusal.PRICE_MOVED
        b.buy(nodes=2, dollars=2.0)
        assert b.market.sold() == ()


def test_a_server_that_died_between_two_starts_starts_the_rest_and_doubles_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bench(tmp_path, hosts=[host(slots=4)], provisioning="1m") as b:
        machine = b.buy(nodes=3, dollars=3.0)
        began: list[str] = []
        start = b.market.machines.start

        def dies_at_the_third(member: str, *rest: object) -> object:
            if len(began) == 2:
                raise KeyboardInterrupt
            began.append(member)
            return start(member, *rest)  # type: ignore[arg-type]  # handed on as they are

        monkeypatch.setattr(b.market.machines, "start", dies_at_the_third)
        with pytest.raises(KeyboardInterrupt):
            b.advance(2 * MINUTE)
        b.reopen()
        (again,) = b.market.listing(install=LAB)
        assert again.machine_id == machine.machine_id
        assert alive(b, again) == [True, True, True]
        assert [b.market.machines.status(member).boots for member in again.members] == [1, 1, 1]
        assert again.state is InstanceState.RUNNING


def vanish(found: Bench, machine: Machine, rank: int) -> None:
    member = machine.member(rank)
    kill(found, member)
    until(lambda: not found.market.machines.alive(member))
    found.advance(MINUTE / 60)


def replace_members(found: Bench, machine: Machine, ranks: list[int], number: int = 1) -> None:
    found.market.replace_members(
        machine.machine_id, install=LAB, ranks=ranks, number=number, start_script="exec sleep 1001"
    )


def test_one_that_vanished_is_shown_leaves_its_slot_and_the_others_go_on(tmp_path: Path) -> None:
    with bench(tmp_path, hosts=[host(slots=4)]) as b:
        machine = b.buy(nodes=4, dollars=4.0)
        assert b.market.sold() == ()
        vanish(b, machine, 2)
        assert (machine.state, machine.detail) == (InstanceState.RUNNING, "machine 3 of 4 vanished")
        assert (len(b.market.sold()), machine.doomed_at) == (1, None)
        b.advance(HOUR)
        assert alive(b, machine) == [True, True, False, True]


def test_another_one_takes_its_place_where_there_is_room_and_else_none_does(tmp_path: Path) -> None:
    with bench(tmp_path, hosts=[host(slots=4)]) as b:
        machine = b.buy(nodes=4, dollars=4.0)
        vanish(b, machine, 2)
        other = b.buy(dollars=1.0)
        with pytest.raises(Refused) as caught:
            replace_members(b, machine, [2])
        assert caught.value.refusal is Refusal.NO_CAPACITY
        assert alive(b, machine) == [True, True, False, True]
        b.market.terminate(other.machine_id, install=LAB)
        replace_members(b, machine, [2])
        assert (alive(b, machine), b.market.sold()) == ([True] * 4, ())
        b.advance(HOUR)
        b.market.terminate(machine.machine_id, install=LAB)
        assert b.bill(machine) == pytest.approx(4_001_111, abs=2)
        with pytest.raises(Refused):
            replace_members(b, machine, [2], 2)


def test_the_same_call_starts_nothing_twice_unless_what_it_started_vanished_too(tmp_path: Path) -> None:
    with bench(tmp_path, hosts=[host(slots=4)]) as b:
        machine = b.buy(nodes=3, dollars=3.0)
        for _ in range(3):
            replace_members(b, machine, [1, 2])
        assert machine.members == (machine.machine_id, f"{machine.machine_id}.1.1", f"{machine.machine_id}.2.1")
        assert [b.market.machines.status(member).boots for member in machine.members] == [1, 1, 1]
        vanish(b, machine, 1)
        replace_members(b, machine, [1, 2])
        assert [b.market.machines.status(member).boots for member in machine.members] == [1, 1, 1]
        assert alive(b, machine) == [True] * 3


def test_a_server_that_died_before_the_start_of_another_one_shows_that_it_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bench(tmp_path, hosts=[host(slots=4)]) as b:
        machine = b.buy(nodes=3, dollars=3.0)

        def dies(*_: object) -> object:
            raise KeyboardInterrupt

        monkeypatch.setattr(b.market.machines, "start", dies)
        with pytest.raises(KeyboardInterrupt):
            replace_members(b, machine, [1])
        b.reopen()
        (again,) = b.market.listing(install=LAB)
        assert (again.state, again.vanished, again.detail) == (InstanceState.RUNNING, [1], "machine 2 of 3 vanished")
        replace_members(b, again, [1])
        assert (again.vanished, alive(b, again)) == ([], [True] * 3)


def test_what_is_left_out_is_ended_and_costs_nothing_more(tmp_path: Path) -> None:
    with bench(tmp_path, hosts=[host(slots=4, storage_gb_month="0.10")]) as b:
        machine = b.buy(nodes=4, dollars=4.0, disk_gb=72)
        b.advance(HOUR)
        vanish(b, machine, 3)
        for _ in range(2):
            b.market.drop_members(machine.machine_id, install=LAB, ranks=[1, 3])
        assert (machine.nodes, machine.ranks, machine.price, machine.storage) == (2, (0, 2), 2_000_000, 20_000)
        assert len(b.market.sold()) == 1
        before = b.bill(machine)
        b.advance(HOUR)
        b.market.terminate(machine.machine_id, install=LAB)
        assert b.bill(machine) - before == pytest.approx(2_020_000, abs=2)
        assert alive(b, machine) == [False, False]


def test_ranks_that_are_none_and_all_of_them_are_refused(tmp_path: Path) -> None:
    with bench(tmp_path, hosts=[host(slots=4)]) as b:
        machine, alone = b.buy(nodes=2, dollars=2.0), b.buy(dollars=1.0)
        drop = partial(b.market.drop_members, machine.machine_id, install=LAB)
        replaced = partial(replace_members, b, machine)
        for call in (
            partial(replaced, [-1]),
            partial(replaced, [2]),
            partial(replaced, [0, 1]),
            partial(drop, ranks=[0, 1]),
            partial(replace_members, b, alone, [0]),
        ):
            with pytest.raises(Refused) as caught:
                call()
            assert caught.value.refusal is Refusal.REJECTED
        assert alive(b, machine) == [True, True]


def test_the_first_is_replaced_like_any_other_and_the_row_goes_on(tmp_path: Path) -> None:
    with bench(tmp_path, hosts=[host(slots=4)]) as b:
        machine = b.buy(nodes=3, dollars=3.0)
        vanish(b, machine, 0)
        assert (machine.state, machine.detail) == (InstanceState.RUNNING, "machine 1 of 3 vanished")
        assert (machine.vanished, alive(b, machine)) == ([0], [False, True, True])
        for _ in range(2):
            replace_members(b, machine, [0], 2)
        assert (machine.vanished, alive(b, machine)) == ([], [True] * 3)
        assert machine.first == f"{machine.machine_id}.0.2"
        assert machine.first not in {machine.member(2), machine.machine_id}
        b.reopen()
        (again,) = b.market.listing(install=LAB)
        b.advance(MINUTE)
        assert (again.state, alive(b, again)) == (InstanceState.RUNNING, [True] * 3)
        kill(b, again.first)
        until(lambda: not b.market.machines.alive(again.first))
        b.advance(MINUTE / 60)
        assert (again.state, again.vanished) == (InstanceState.RUNNING, [0])
        b.market.terminate(again.machine_id, install=LAB)
        assert alive(b, again) == [False] * 3


def test_the_first_is_left_out_and_the_next_one_is_the_first(tmp_path: Path) -> None:
    with bench(tmp_path, hosts=[host(slots=4)]) as b:
        machine = b.buy(nodes=3, dollars=3.0)
        vanish(b, machine, 0)
        b.market.drop_members(machine.machine_id, install=LAB, ranks=[0])
        assert (machine.nodes, machine.first, machine.price) == (2, machine.member(1), 2_000_000)
        b.advance(MINUTE)
        assert (machine.state, alive(b, machine)) == (InstanceState.RUNNING, [True, True])
        vanish(b, machine, 1)
        assert (machine.state, machine.vanished) == (InstanceState.RUNNING, [1])
        replace_members(b, machine, [1])
        assert alive(b, machine) == [True, True]


def test_all_have_ended_once_none_of_them_runs_after_the_loss_of_the_first(tmp_path: Path) -> None:
    with bench(tmp_path, hosts=[host(slots=4)]) as b:
        machine = b.buy(nodes=3, dollars=3.0)
        vanish(b, machine, 0)
        vanish(b, machine, 2)
        assert machine.state is InstanceState.RUNNING
        vanish(b, machine, 1)
        assert (machine.state, machine.loss) == (InstanceState.GONE, Loss.HOST_LOST)


def test_all_are_outbid_and_wake_together(tmp_path: Path) -> None:
    prices = steps(tmp_path, (0, 1.0), (1, 1.6), (2, 1.0))
    with bench(tmp_path, hosts=[host(spot=prices, slots=4)]) as b:
        machine = b.buy(nodes=3, dollars=4.5)
        assert b.market.bid_floor(machine) == 3_000_000
        b.advance(HOUR + MINUTE)
        assert (machine.state, alive(b, machine)) == (InstanceState.PAUSED, [False, False, False])
        b.advance(HOUR)
        assert (machine.state, alive(b, machine)) == (InstanceState.RUNNING, [True, True, True])


def test_one_that_could_not_be_started_is_started_by_the_next_same_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bench(tmp_path, hosts=[host(slots=4)]) as b:
        machine = b.buy(nodes=3, dollars=3.0)
        vanish(b, machine, 1)

        def fails(*_: object) -> object:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(b.market.machines, "start", fails)
            with pytest.raises(Refused) as caught:
                replace_members(b, machine, [1])
        assert (caught.value.refusal, machine.vanished) == (Refusal.INTERNAL, [1])
        replace_members(b, machine, [1])
        assert (alive(b, machine), machine.vanished) == ([True] * 3, [])


def test_a_call_that_arrives_after_one_was_left_out_starts_nothing(tmp_path: Path) -> None:
    with bench(tmp_path, hosts=[host(slots=4)]) as b:
        machine = b.buy(nodes=3, dollars=3.0)
        vanish(b, machine, 1)
        b.market.drop_members(machine.machine_id, install=LAB, ranks=[1])
        with pytest.raises(Refused) as caught:
            replace_members(b, machine, [1])
        assert (caught.value.refusal, alive(b, machine)) == (Refusal.REJECTED, [True] * 2)
