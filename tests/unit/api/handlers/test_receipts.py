"""What everything cost is answered from sums, and beside the decisions, however long the history is."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from spotd.api.handlers import receipts
from spotd.core.domain.plan import Plan
from spotd.store import Store
from tests.unit.api.worlds import stray
from tests.unit.core.builders import MINUTE
from tests.unit.daemon.rig import Rig
from tests.unit.store import values as v
from tests.unit.store.reads import costs_by_day

pytestmark = pytest.mark.anyio


def history(store: Store, jobs: int, charges: int) -> None:
    """Final jobs with one attempt each, and so many charges of it."""
    for number in range(jobs):
        name = f"j{number:05d}"
        store.tx(lambda tx, name=name: tx.commit(v.running_job(name)))  # type: ignore[misc]  # a lambda's default
        booked = tuple(v.charge(name, at=v.NOW + n * MINUTE, amount=10, on_demand=30) for n in range(charges))
        store.tx(lambda tx, booked=booked: tx.commit(Plan(charges=booked)))  # type: ignore[misc]  # as above


class Asked:
    """The statements that a store's reader was given, and the rows that it gave back."""

    def __init__(self, store: Store) -> None:
        self.statements: list[str] = []
        event.listen(store._reader, "before_cursor_execute", self._note)

    def _note(self, *args: Any) -> None:
        self.statements.append(args[2])

    def selects(self) -> list[str]:
        return [one for one in self.statements if one.startswith("SELECT")]


async def test_the_cost_of_everything_takes_as_many_questions_for_many_jobs_as_for_one(tmp_path: Path) -> None:
    counted = []
    for jobs, charges in ((1, 1), (30, 40)):
        rig = Rig(tmp_path / f"{jobs}", store=Store.open(tmp_path / f"{jobs}.sqlite"))
        history(rig.store, jobs, charges)
        rig.pollers[v.VAST] = rig.pollers[rig.shop.name]
        await rig.control_loop.adopt()
        asked = Asked(rig.store)
        shape = await rig.handlers().receipts.cost(None)
        assert len(shape["receipts"]) == jobs
        counted.append(len(asked.selects()))
        assert not [one for one in asked.selects() if "FROM charges" in one]
        rig.store.close()
    assert counted[0] == counted[1]


async def test_of_many_jobs_the_newest_are_shown_and_all_are_summed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path, store=Store.open(tmp_path / "state.sqlite"))
    history(rig.store, 12, 3)
    rig.store.tx(lambda tx: tx.commit(stray()))
    rig.pollers[v.VAST] = rig.pollers[rig.shop.name]
    await rig.control_loop.adopt()
    whole = await rig.handlers().receipts.cost(None)
    monkeypatch.setattr(receipts, "RECEIPTS_MAX", 5)
    some = await rig.handlers().receipts.cost(None)
    assert (whole["more"], some["more"], len(some["receipts"])) == (0, 7, 5)
    for total in ("recoveries", "lost_s", "strays"):
        assert some[total] == whole[total]
    assert some["strays"] == [{"provider": "local", "machines": 1, "spent_usd": 1.75, "estimated": True}]
    rig.store.close()


async def test_jobs_that_wait_for_their_first_machine_hide_no_receipt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path, store=Store.open(tmp_path / "state.sqlite"))
    history(rig.store, 3, 2)
    for number in range(9):
        waiting = v.plan(v.job(f"waits-{number}"))
        rig.store.tx(lambda tx, waiting=waiting: tx.commit(waiting))  # type: ignore[misc]  # a lambda's default
    rig.pollers[v.VAST] = rig.pollers[rig.shop.name]
    await rig.control_loop.adopt()
    monkeypatch.setattr(receipts, "RECEIPTS_MAX", 5)
    some = await rig.handlers().receipts.cost(None)
    assert len([one for one in some["receipts"] if one["attempts"]]) == 3
    assert (len(some["receipts"]), some["more"]) == (5, 7)
    rig.store.close()


def test_a_long_answer_delays_no_transaction(tmp_path: Path) -> None:
    with Store.open(tmp_path / "state.sqlite") as store:
        store.tx(lambda tx: tx.commit(v.running_job("a")))
        reading, written = threading.Event(), threading.Event()
        seen: list[int] = []

        def slow(reads: Any) -> None:
            seen.append(len(reads.jobs()))
            reading.set()
            assert written.wait(20), "the transaction waited for the answer"
            seen.append(len(reads.jobs(active=True)))

        reader = threading.Thread(target=lambda: store.read(slow))
        reader.start()
        assert reading.wait(20)
        store.tx(lambda tx: tx.commit(v.running_job("b")))
        written.set()
        reader.join(20)
        assert seen == [1, 1], "an answer is one consistent view"
        assert store.read(lambda reads: len(reads.jobs())) == 2


def test_sums_are_what_the_charges_add_up_to(tmp_path: Path) -> None:
    with Store.open(tmp_path / "state.sqlite") as store:
        history(store, 3, 7)
        charges = store.read(lambda r: [c for job in r.jobs() for c in r.charges_of(job.id)])
        by_day = store.read(lambda r: {day: sums for day, *sums in costs_by_day(r)})
        assert sum(amount for amount, _ in by_day.values()) == sum(c.amount for c in charges) == 210
        costs = store.read(lambda r: r.attempt_costs([job.id for job in r.jobs()]))
        assert {i: (c.amount, c.billed) for i, c in costs.items()} == {
            i: (
                sum(c.amount for c in charges if c.attempt == i),
                sum((c.end - c.start for c in charges if c.attempt == i), MINUTE * 0),
            )
            for i in costs
        }
        assert store.read(lambda r: r.totals().spent) == 210
