"""Several machines of one host of the local market, bought and ended as one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from spotd_providers.contract.values import InstanceState, Loss
from spotd_providers.local.hosts.processes import pids_with_environment
from spotd_providers.local.market.floor import Machine
from spotd_providers.local.market.market import Refusal, Refused
from tests.unit.providers.local.market_setup import HOUR, LAB, MINUTE, Bench, bench, host, steps
from tests.unit.providers.local.waiting import until

SHOWS = "echo $SPOTD_NODE_RANK $SPOTD_NODE_ADDRESS > place; exec sleep 1000"


def alive(found: Bench, machine: Machine) -> list[bool]:
    known = found.market.machines.ids()
    return [member in known and found.market.machines.alive(member) for member in machine.members]


def kill(found: Bench, member: str) -> None:
    mark = (found.folder / "machines" / "mark").read_text()
    for pid in pids_with_environment(f"SPOTD_LOCAL_MACHINE={mark}:{member}"):
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


def test_the_loss_of_one_is_announced_and_ends_all(tmp_path: Path) -> None:
    with bench(tmp_path, hosts=[host(slots=4)]) as b:
        machine = b.buy(nodes=3, dollars=3.0)
        kill(b, machine.members[2])
        until(lambda: not b.market.machines.alive(machine.members[2]))
        b.advance(MINUTE / 60)
        assert (machine.state, machine.detail) == (
            InstanceState.RUNNING,
            "machine 2 of 3 vanished, and all of them end",
        )
        assert machine.doomed_at is not None
        assert alive(b, machine) == [True, True, False]
        b.advance(3 * MINUTE)
        assert (machine.state, machine.loss) == (InstanceState.GONE, Loss.HOST_LOST)
        assert alive(b, machine) == [False, False, False]


def test_the_loss_of_the_first_ends_all_at_once(tmp_path: Path) -> None:
    with bench(tmp_path, hosts=[host(slots=4)]) as b:
        machine = b.buy(nodes=3, dollars=3.0)
        kill(b, machine.members[0])
        until(lambda: not b.market.machines.alive(machine.members[0]))
        b.advance(MINUTE / 60)
        assert (machine.state, machine.loss) == (InstanceState.GONE, Loss.HOST_LOST)
        assert alive(b, machine) == [False, False, False]


def test_all_are_outbid_and_wake_together(tmp_path: Path) -> None:
    prices = steps(tmp_path, (0, 1.0), (1, 1.6), (2, 1.0))
    with bench(tmp_path, hosts=[host(spot=prices, slots=4)]) as b:
        machine = b.buy(nodes=3, dollars=4.5)
        assert b.market.bid_floor(machine) == 3_000_000
        b.advance(HOUR + MINUTE)
        assert (machine.state, alive(b, machine)) == (InstanceState.PAUSED, [False, False, False])
        b.advance(HOUR)
        assert (machine.state, alive(b, machine)) == (InstanceState.RUNNING, [True, True, True])
