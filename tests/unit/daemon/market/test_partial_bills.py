"""A bill that is not whole, or is no bill of dollars, takes nothing back; a later and better one corrects it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from spotd.core.bills import DONE, READ_AFTER
from spotd.core.domain.attempts import MachineState
from spotd.core.domain.intents import JobId
from spotd.core.domain.plan import Event, Plan
from spotd.core.domain.states import AttemptState
from spotd.core.kernel.reconcile import reconcile
from spotd.daemon.clock import Computer, begin_timeline
from spotd.daemon.commits import cycle_points
from spotd.daemon.market.price_recorder import BillCheck
from spotd_providers.contract.values import (
    AttemptKey,
    Capability,
    InstanceId,
    InstanceState,
    MicroUsd,
    Power,
    ProviderCharge,
)
from tests.unit.core.builders import NOW, instance, listing, report, world_with
from tests.unit.daemon.clocks import VirtualClock
from tests.unit.daemon.rig import Rig
from tests.unit.daemon.shop import Shop

pytestmark = pytest.mark.anyio
HOUR = timedelta(hours=1)
BEGAN = NOW - 30 * HOUR
WHOLE = 12_000_000
Row = tuple[float, float, int]
"""From which hour of the machine's life to which one, and the amount."""
Rows = Sequence[
    Row | tuple[float, float, int, str] | tuple[float, float, int, str, str] | tuple[float, float, int, str, str, str]
]


class Bookkeeper(Shop):
    """A shop with the rows of a bill."""

    rows: Rows = ()
    ahead = timedelta(0)
    """How far its clock is ahead of the one by which the machine was dated when it ran."""

    @property
    def capabilities(self) -> dict[Power, Capability]:
        return {**super().capabilities, Power.BILLING: Capability(available=True)}

    async def charges(self, since: datetime, until: datetime) -> Sequence[ProviderCharge]:
        (machine,) = self.machines.values()
        found = (
            ProviderCharge(
                key=AttemptKey(str(more[2])) if len(more) > 2 else machine.key,
                instance_id=machine.ref.instance_id,
                start=BEGAN + self.ahead + start * HOUR,
                end=BEGAN + self.ahead + end * HOUR,
                amount=MicroUsd(amount),
                kind=str(more[0]) if more else "total",
                currency=str(more[1]) if len(more) > 1 else "USD",
            )
            for start, end, amount, *more in self.rows
        )
        return tuple(row for row in found if row.end > since and row.start < until)


async def ended(
    folder: Path, *, former: datetime = NOW - timedelta(minutes=1)
) -> tuple[Rig, Bookkeeper, BillCheck, JobId]:
    """A job whose one machine ran for thirty hours and is gone, which was booked at $12.00.

    Args:
        former: the last proof of its life before it is known to be gone.
    """
    clock = VirtualClock()
    clock.now()
    shop = Bookkeeper(clock)
    rig = Rig(folder, clock=clock, shops=[shop])
    world = world_with(AttemptState.RUNNING, intended_at=BEGAN, launched_at=BEGAN, running_at=BEGAN + HOUR / 10)
    (item,) = world.attempts.values()
    (job,) = world.jobs.values()
    item = replace(
        item, meter=replace(item.meter, since=BEGAN), proven_at=former, over_since=NOW - timedelta(microseconds=1)
    )
    events = tuple(Event(at=NOW, kind="test", message="", job=job.id, attempt=number) for number in (None, 1))
    rig.store.tx(lambda tx: tx.commit(Plan(jobs=world.jobs, attempts={item.id: item}, events=events)))
    await rig.commits.commit(
        lambda world, now: reconcile(world, listing(instance(InstanceState.GONE)), report(seq=5), now), cycle_points
    )
    shop.put_machine(item.key)
    return rig, shop, checks_of(rig, shop), job.id


def checks_of(rig: Rig, shop: Bookkeeper) -> BillCheck:
    return BillCheck({shop.name: shop}, commits=rig.commits, database=rig.database, clock=rig.clock, log=rig.log)


async def read_for(hours: int, rig: Rig, bills: BillCheck, step: int = 1) -> None:
    for _ in range(0, hours, step):
        await rig.clock.sleep(step * HOUR)
        await bills.reconcile_once()


def spent(rig: Rig, job_id: JobId) -> int:
    """What the job, its attempt and its charges say, which is one sum."""
    charges = rig.store.read(lambda reads: reads.charges_of(job_id))
    sums = {rig.job(job_id).spent, rig.attempts(job_id)[0].meter.settled, sum(charge.amount for charge in charges)}
    (one,) = sums
    return one


def day(
    amount: int, *, number: int = 0, kind: str = "total", currency: str = "USD"
) -> tuple[float, float, int, str, str]:
    """A row for one day of two: from the machine's begin to its 18th hour, and on."""
    return (0, 18, amount, kind, currency) if number == 0 else (18, 42, amount, kind, currency)


NOT_BELIEVED: Mapping[str, tuple[Rows, str]] = {
    "for half, up to an instant that cannot be": ([(0, 24 * 365 * 100, 6_000_000)], "a time that is yet to come"),
    "up to more than a month ahead": ([(0, 31 + 24 * 33, 13_000_000)], "a time that is yet to come"),
    "its first day alone": ([day(7_200_000)], "does not cover all of its time"),
    "its last day alone": ([day(4_800_000, number=1)], "does not cover all of its time"),
    "a hole in it": ([(0, 10, 4_000_000), (20, 31, 4_400_000)], "does not cover all of its time"),
    "a hole that a row of nothing fills": (
        [(0, 10, 4_000_000), (10, 20, 0), (20, 31, 4_400_000)],
        "does not cover all of its time",
    ),
    "a row of nothing before its last day": ([day(0), day(4_800_000, number=1)], "does not cover all of its time"),
    "a day that is not written yet": ([day(7_200_000), day(0, number=1)], "does not cover all of its time"),
    "the last day's disk alone": (
        [day(7_100_000, kind="gpu"), day(100_000, kind="disk"), day(90_000, number=1, kind="disk")],
        "does not cover all of its time",
    ),
    "zero": ([(0, 31, 0)], "adds up to $0.0000"),
    "a credit": ([(0, 31, -5_000_000)], "adds up to $-5.0000"),
    "all of it credited": ([(0, 31, WHOLE), (0, 31, -WHOLE)], "adds up to $0.0000"),
    "yen": ([(0, 31, 1_860_000, "total", "JPY")], "is in JPY, and only USD is understood"),
    "more yen than dollars": ([(0, 31, 90_000_000, "total", "JPY")], "is in JPY, and only USD is understood"),
    "dollars and euros": (
        [day(7_200_000), day(4_000_000, number=1, currency="EUR")],
        "is in EUR, and only USD is understood",
    ),
    "two rows for one span": ([(0, 31, 6_000_000), (0, 31, 5_000_000)], "different rows for the same time (total)"),
    "a day and the sum of both": (
        [day(7_200_000), (0, 31, 11_000_000)],
        "different rows for the same time (total)",
    ),
    "a repeated row, and lower": ([(0, 31, 6_000_000), (0, 31, 6_000_000)], "does not cover all of its time"),
    "huge": ([(0, 31, 10**15)], "more than 10 times what was agreed"),
}


@pytest.mark.parametrize("case", NOT_BELIEVED)
async def test_a_bill_that_is_not_whole_takes_nothing_back_and_says_why_once(tmp_path: Path, case: str) -> None:
    rig, shop, bills, job_id = await ended(tmp_path)
    booked = spent(rig, job_id)
    assert booked in range(WHOLE, WHOLE + 3)
    shop.rows, why = NOT_BELIEVED[case]
    await read_for(5, rig, bills)
    assert spent(rig, job_id) == booked
    (item,) = rig.attempts(job_id)
    assert (item.bill.believed, why in item.bill.note) == (None, True), item.bill.note
    assert rig.kinds(job_id).count("attempt.bill_refused") == 1
    shop.rows = [(0, 30, 11_500_000)]
    await read_for(3 * 96, rig, bills, step=96)
    assert spent(rig, job_id) == 11_500_000, "a better one corrects it for days"
    assert (rig.attempts(job_id)[0].bill.believed, rig.attempts(job_id)[0].bill.note) == (11_500_000, "")


BELIEVED: Mapping[str, tuple[Rows, int]] = {
    "two days": ([day(7_000_000), day(4_000_000, number=1)], 11_000_000),
    "out of order": ([day(4_000_000, number=1), day(7_000_000)], 11_000_000),
    "hours": ([(hour, hour + 1, 350_000) for hour in range(31)], 31 * 350_000),
    "by kinds": ([(0, 31, 10_000_000, "gpu"), (0, 31, 500_000, "disk"), (3, 4, 200_000, "bwd")], 10_700_000),
    "beside a row with the key of another machine": (
        [(0, 31, 11_000_000), (0, 31, 9_000_000, "disk", "USD", "spotd-lab-j9-1")],
        11_000_000,
    ),
    "a part of it credited": ([(0, 31, WHOLE), (5, 6, -2_000_000)], 10_000_000),
    "higher, and not whole": ([day(13_000_000)], 13_000_000),
    "higher, with a row repeated": ([(0, 31, 13_000_000), (0, 31, 13_000_000)], 13_000_000),
    "paused in between": ([(0, 9, 6_000_000, "gpu"), (20, 31, 5_000_000, "gpu"), (0, 31, 100_000, "disk")], 11_100_000),
}


@pytest.mark.parametrize("case", BELIEVED)
async def test_a_bill_that_covers_the_machine_is_what_was_spent(tmp_path: Path, case: str) -> None:
    rig, shop, bills, job_id = await ended(tmp_path)
    shop.rows, amount = BELIEVED[case]
    await read_for(5, rig, bills)
    assert spent(rig, job_id) == amount
    assert rig.attempts(job_id)[0].bill.believed == amount
    assert "attempt.bill_refused" not in rig.kinds(job_id)


OFF = 0.11  # hours: the machine of these rows was launched a while after the full hour
OTHER_CLOCKS: Mapping[str, tuple[Rows, int | None]] = {
    f"{words} by {hours} h": (tuple((begin + OFF - hours, end + OFF - hours, n) for begin, end, n in rows), amount)
    for hours in (5, -20)
    for words, rows, amount in (
        ("whole", [(0.0, 30.0, 11_000_000)], 11_000_000),
        ("whole in two rows", [(0.0, 12.0, 4_000_000), (12.0, 30.0, 7_000_000)], 11_000_000),
        ("without its end", [(0.0, 29.5, 10_800_000)], None),
        ("without its begin", [(0.5, 30.0, 10_800_000)], None),
        ("with a hole", [(0.0, 12.0, 4_000_000), (13.0, 30.0, 6_600_000)], None),
        ("for longer than it lived", [(0.0, 30.5, 11_000_000)], None),
        ("in full hours", [(-OFF, 30 - OFF, 11_000_000)], None),
        ("up to a full hour", [(-0.05, 30 - OFF, 11_000_000)], None),
        ("from a full hour", [(-OFF, 29.95, 11_000_000)], None),
        ("a row of nothing at its end", [(0.0, 20.0, 7_000_000), (20.0, 30.0, 0)], None),
    )
}


@pytest.mark.parametrize("case", OTHER_CLOCKS)
async def test_a_whole_and_lower_bill_is_known_by_its_length_where_a_clock_is_wrong(tmp_path: Path, case: str) -> None:
    rig, shop, bills, job_id = await ended(tmp_path)
    booked = spent(rig, job_id)
    shop.rows, amount = OTHER_CLOCKS[case]
    await read_for(5, rig, bills)
    assert spent(rig, job_id) == (booked if amount is None else amount)
    assert rig.attempts(job_id)[0].bill.believed == amount


async def test_rows_that_end_with_their_hour_are_not_whole_where_the_machine_lived_after_it(tmp_path: Path) -> None:
    rig, shop, bills, job_id = await ended(tmp_path, former=NOW - timedelta(minutes=58))
    booked = spent(rig, job_id)
    shop.rows = [(0, 29, 11_000_000)]
    await read_for(4 * 96, rig, bills, step=96)
    assert (spent(rig, job_id), rig.attempts(job_id)[0].bill.believed) == (booked, None), "be it of two minutes"
    assert "does not cover all of its time" in rig.attempts(job_id)[0].bill.note


async def test_the_row_of_the_minutes_after_midnight_is_added_to_that_of_the_day_before(tmp_path: Path) -> None:
    rig, shop, bills, job_id = await ended(tmp_path, former=NOW - timedelta(minutes=58))
    shop.rows = [(0, 29, 11_000_000)]
    await read_for(6, rig, bills)
    shop.rows = [(0, 29, 11_000_000), (29, 29.04, 15_000)]
    await read_for(48, rig, bills, step=6)
    assert spent(rig, job_id) == rig.attempts(job_id)[0].bill.believed == 11_015_000


async def test_rows_that_end_with_their_hour_are_whole_once_no_other_can_follow(tmp_path: Path) -> None:
    """Nothing shows whether the machine lived on after that: its last proof is of before, and it was gone after it."""
    rig, shop, bills, job_id = await ended(tmp_path, former=NOW - timedelta(minutes=62))
    booked = spent(rig, job_id)
    shop.rows = [(0, 29, 11_000_000)]
    await read_for(24, rig, bills, step=2)
    assert spent(rig, job_id) == booked, "the next row is written when its day is over"
    await read_for(48, rig, bills, step=6)
    assert spent(rig, job_id) == rig.attempts(job_id)[0].bill.believed == 11_000_000


async def test_a_later_bill_corrects_one_that_was_believed_up_and_down(tmp_path: Path) -> None:
    rig, shop, bills, job_id = await ended(tmp_path)
    for amount in (11_000_000, 14_000_000, 10_500_000):
        shop.rows = [(0, 31, amount)]
        await read_for(72, rig, bills, step=6)
        assert spent(rig, job_id) == amount
    shop.rows = [day(6_000_000)]
    await read_for(72, rig, bills, step=6)
    assert spent(rig, job_id) == 10_500_000, "a part of a bill that was whole before"
    assert rig.kinds(job_id).count("attempt.billed") == 3


async def test_a_restart_between_two_readings_forgets_neither_the_first_nor_why(tmp_path: Path) -> None:
    rig, shop, _, job_id = await ended(tmp_path)
    shop.rows = [(0, 31, 11_000_000)]
    for _ in range(4):
        await read_for(1, rig, checks_of(rig, shop))
    assert spent(rig, job_id) == 11_000_000
    shop.rows = [day(1_000_000)]
    for _ in range(24):
        await read_for(1, rig, checks_of(rig, shop))
    assert spent(rig, job_id) == 11_000_000
    assert rig.kinds(job_id).count("attempt.bill_refused") == 1


async def test_two_readings_after_a_long_sleep_are_an_hour_apart_all_the_same(tmp_path: Path) -> None:
    rig, shop, bills, job_id = await ended(tmp_path)
    booked = spent(rig, job_id)
    shop.rows = [(0, 31, 11_000_000)]
    await rig.clock.sleep(8 * HOUR)
    for _ in range(5):
        await bills.reconcile_once()
        await rig.clock.sleep(HOUR / 6)
    assert spent(rig, job_id) == booked, "minutes apart prove nothing"
    await read_for(4, rig, bills)
    assert spent(rig, job_id) == 11_000_000


async def test_two_readings_on_either_side_of_an_instant_at_which_one_is_due_are_an_hour_apart(tmp_path: Path) -> None:
    rig, shop, bills, job_id = await ended(tmp_path)
    booked = spent(rig, job_id)
    shop.rows = [(0, 31, 11_000_000)]
    await rig.clock.sleep(8 * HOUR - HOUR / 12)  # the sixth reading is due at 8 h
    for _ in range(3):
        await bills.reconcile_once()
        assert spent(rig, job_id) == booked
        await rig.clock.sleep(HOUR / 6)


WHOLE_LATER = [(0.0, 31.0, 11_000_000)]


@pytest.mark.parametrize("is_set_right", [True, False], ids=["right from then on", "wrong from then on"])
@pytest.mark.parametrize("hours", [8, -8, 10 * 24, 30 * 24, -30 * 24])
async def test_a_clock_that_is_set_between_two_readings_neither_ends_nor_hurries_them(
    tmp_path: Path, hours: int, is_set_right: bool
) -> None:
    rig, shop, bills, job_id = await ended(tmp_path)
    booked, step = spent(rig, job_id), hours * HOUR
    shop.ahead = step if is_set_right else timedelta(0)
    begin_timeline(rig.store, rig.policy.current, computer(rig), rig.log)
    shop.rows = [(0, 31, 6_000_000)]  # a row of the whole day, of which half is written
    await read_for(2, rig, bills)
    for _ in range(2):
        rig = set_clock(rig, step)
        bills = checks_of(rig, shop)
        for _ in range(3):
            await rig.clock.sleep(HOUR / 6)
            await bills.reconcile_once()
        assert spent(rig, job_id) == booked, "two readings some minutes apart prove nothing"
        shop.rows = WHOLE_LATER
        await read_for(6, rig, bills)
        if is_set_right:
            break
        assert rig.attempts(job_id)[0].bill.tries not in {DONE, len(READ_AFTER)}
        step = -step
    assert spent(rig, job_id) == 11_000_000
    assert spent(rig, job_id) == rig.attempts(job_id)[0].bill.believed


def computer(rig: Rig, step: timedelta = timedelta(0)) -> Computer:
    return Computer(
        wall=lambda: rig.clock.now() + step,
        uptime_s=lambda: (rig.clock.now() - rig.clock.offset - NOW).total_seconds() + 1000,
        boot_id=lambda: "one",
        compare_every_s=1,
    )


def set_clock(rig: Rig, step: timedelta) -> Rig:
    """The wall clock is set, and the daemon begins anew with the new date."""
    begin_timeline(rig.store, rig.policy.current, computer(rig, step), rig.log)
    rig.clock.offset += step
    return rig.reborn()


async def test_a_row_of_another_machine_with_the_same_key_is_in_no_bill(tmp_path: Path) -> None:
    rig, shop, bills, job_id = await ended(tmp_path)
    shop.rows = [(0, 31, 11_000_000)]
    (machine,) = shop.machines.values()
    plain = shop.charges

    async def charges(since: datetime, until: datetime) -> Sequence[ProviderCharge]:
        rows = await plain(since, until)
        others = (replace(row, instance_id=InstanceId("double"), key=key) for row in rows for key in (row.key, None))
        return (*rows, *others)

    shop.charges = charges  # type: ignore[method-assign]  # an account in which a launch made two machines
    await read_for(5, rig, bills)
    assert spent(rig, job_id) == 11_000_000, machine.key


async def test_the_bill_of_a_machine_that_may_still_run_is_not_read(tmp_path: Path) -> None:
    rig, shop, bills, job_id = await ended(tmp_path)
    (item,) = rig.attempts(job_id)
    rig.store.tx(lambda tx: tx.commit(Plan(attempts={item.id: replace(item, machine=MachineState.LIVE)})))
    shop.rows = [(0, 31, 13_000_000)]
    await read_for(24, rig, bills)
    assert spent(rig, job_id) in range(WHOLE, WHOLE + 3)
    rig.store.tx(lambda tx: tx.commit(Plan(attempts={item.id: item})))
    await read_for(3, rig, bills)
    assert spent(rig, job_id) == 13_000_000
