"""A provider's own bill takes the place of what was booked, once it says the same twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

import pytest

from spotd.core.bills import DONE, READ_AFTER, Sharer, _moved_by_day, shares
from spotd.core.domain.attempts import MachineState
from spotd.core.domain.intents import AttemptId, Charge, ChargePart, JobId, Meter
from spotd.core.domain.plan import Event, Plan
from spotd.core.domain.states import AttemptState, JobState
from spotd.core.domain.world import World
from spotd.core.kernel.reconcile import reconcile
from spotd.daemon.commits import cycle_points
from spotd.daemon.market.price_recorder import BillCheck
from spotd_providers.contract.errors import Unavailable
from spotd_providers.contract.values import (
    AttemptKey,
    Capability,
    InstanceState,
    Listing,
    MicroUsd,
    MicroUsdPerHour,
    Power,
    ProviderCharge,
    ProviderName,
)
from tests.unit.core.builders import MINUTE, NOW, instance, job, listing, report, world_with
from tests.unit.daemon.clocks import VirtualClock
from tests.unit.daemon.rig import Rig
from tests.unit.daemon.shop import Shop

pytestmark = pytest.mark.anyio
HOUR = timedelta(hours=1)


class Bookkeeper(Shop):
    """A shop that says what it billed."""

    bill: int | None = None
    away = False
    asked = 0

    @property
    def capabilities(self) -> dict[Power, Capability]:
        return {**super().capabilities, Power.BILLING: Capability(available=True)}

    async def charges(self, since: datetime, until: datetime) -> Sequence[ProviderCharge]:
        self.asked += 1
        if self.away:
            raise Unavailable("the books are closed")
        (machine,) = self.machines.values()
        amounts = [] if self.bill is None else [self.bill - 1_000, 1_000]
        return tuple(
            ProviderCharge(
                key=machine.key,
                instance_id=machine.ref.instance_id,
                start=since,
                end=until,
                amount=MicroUsd(amount),
                kind=kind,
            )
            for amount, kind in zip(amounts, ("gpu", "disk"), strict=False)
        )


async def ended(folder: Path) -> tuple[Rig, Bookkeeper, BillCheck, JobId]:
    """A job whose one machine ran for an hour and is gone, which was booked at $0.40."""
    clock = VirtualClock()
    clock.now()
    shop = Bookkeeper(clock)
    rig = Rig(folder, clock=clock, shops=[shop])
    began = NOW - HOUR
    world = world_with(
        AttemptState.RUNNING, intended_at=began, launched_at=began, over_since=NOW - timedelta(microseconds=1)
    )
    (item,) = world.attempts.values()
    (job,) = world.jobs.values()
    item = replace(item, meter=replace(item.meter, since=began))
    told = tuple(Event(at=NOW, kind="test", message="", job=job.id, attempt=number) for number in (None, 1))
    rig.store.tx(lambda tx: tx.commit(Plan(jobs=world.jobs, attempts={item.id: item}, events=told)))
    await rig.commits.commit(
        lambda world, now: reconcile(world, listing(instance(InstanceState.GONE)), report(seq=5), now), cycle_points
    )
    shop.put_machine(item.key)
    bills = BillCheck({shop.name: shop}, commits=rig.commits, database=rig.database, clock=clock, log=rig.log)
    return rig, shop, bills, job.id


def spent(rig: Rig, job_id: JobId) -> tuple[int, int, int]:
    """What the job, its attempt and its charges say."""
    charges = rig.store.read(lambda reads: reads.charges_of(job_id))
    return rig.job(job_id).spent, rig.attempts(job_id)[0].meter.settled, sum(charge.amount for charge in charges)


@pytest.mark.parametrize("bill", [240_000, 700_000], ids=["less", "more"])
async def test_a_bill_that_says_the_same_twice_is_what_was_spent(tmp_path: Path, bill: int) -> None:
    rig, shop, bills, job_id = await ended(tmp_path)
    booked = spent(rig, job_id)
    assert booked[0] in range(400_000, 400_002)
    shop.bill = bill
    await bills.reconcile_once()
    assert shop.asked == 0, "its books may still be open"
    await rig.clock.sleep(2 * HOUR)
    await bills.reconcile_once()
    assert spent(rig, job_id) == booked
    await rig.clock.sleep(HOUR)
    await bills.reconcile_once()
    assert spent(rig, job_id) == (bill, bill, bill)
    assert rig.attempts(job_id)[0].bill.believed == bill
    assert rig.kinds(job_id).count("attempt.billed") == 1
    await rig.control_loop.adopt()
    cost = await rig.handlers().receipts.cost(job_id)
    (receipt,) = cost["receipts"]
    assert receipt["spent_usd"] == pytest.approx(bill / 1_000_000)
    assert "bills $0." in receipt["corrections"][0]
    assert receipt["attempts"][0]["free_usd"] == 0
    for _ in range(20):
        await rig.clock.sleep(24 * HOUR)
        await bills.reconcile_once()
    assert shop.asked <= 2 + len(READ_AFTER), "it is asked no more"
    assert rig.attempts(job_id)[0].bill.tries == DONE
    assert spent(rig, job_id) == (bill, bill, bill)
    assert rig.kinds(job_id).count("attempt.billed") == 1


async def taken_over(folder: Path) -> tuple[Rig, Bookkeeper, BillCheck, JobId, JobId]:
    """Two jobs on one machine: the first ran there for an hour and 20 minutes, the second for 40 minutes."""
    rig, shop, bills, first = await ended(folder)
    (lender,) = rig.attempts(first)
    began, second = rig.clock.now(), JobId("j2")
    rate = MicroUsdPerHour(lender.quote.price.total)
    heir = replace(
        lender,
        id=AttemptId(job=second, number=1),
        key=AttemptKey("spotd-lab-j2-1"),
        machine_key=lender.key,
        former_key=lender.key,
        state=AttemptState.RUNNING,
        machine=MachineState.LIVE,
        intended_at=began,
        launched_at=began,
        running_at=began,
        ended_at=None,
        end_reason=None,
        meter=Meter(rate=rate, since=began),
        on_demand_settled=MicroUsd(0),
    )
    owner = job(2, state=JobState.RUNNING, attempts_made=1)
    told = tuple(Event(at=began, kind="test", message="", job=second, attempt=number) for number in (None, 1))
    rig.store.tx(lambda tx: tx.commit(Plan(jobs={second: owner}, attempts={heir.id: heir}, events=told)))
    return rig, shop, bills, first, second


async def test_the_bill_of_a_machine_that_two_jobs_had_is_divided_by_their_metered_time(tmp_path: Path) -> None:
    rig, shop, bills, first, second = await taken_over(tmp_path)
    shop.bill = 600_001
    for _ in range(4):
        await rig.clock.sleep(10 * MINUTE)
        await bills.reconcile_once()
    await rig.clock.sleep(3 * HOUR)
    await bills.reconcile_once()
    assert rig.attempts(first)[0].bill.believed is None, "the machine goes on, and so does its bill"
    await gone(rig, second)
    booked = [spent(rig, one)[0] for one in (first, second)]
    for _ in range(20):
        await rig.clock.sleep(6 * HOUR)
        await bills.reconcile_once()
    paid = [spent(rig, one) for one in (first, second)]
    assert all(len(set(one)) == 1 for one in paid), "job, attempt and charges say the same"
    assert sum(one[0] for one in paid) == shop.bill
    assert paid[0][0] == pytest.approx(shop.bill * booked[0] / sum(booked), abs=2)
    assert rig.kinds(first).count("attempt.billed") == 1
    assert rig.kinds(second).count("attempt.billed") <= 1, "less than a cent has no line, and none has two"
    await rig.control_loop.adopt()
    costs = [(await rig.handlers().receipts.cost(one))["receipts"][0] for one in (first, second)]
    assert sum(one["spent_usd"] for one in costs) == pytest.approx(shop.bill / 1_000_000)
    assert [one["estimated"] for one in costs] == [False, False]
    (machine,) = rig.store.read(lambda reads: reads.billed_machines(limit=10))
    assert machine.billed == shop.bill, "for the fee it is one machine"


async def gone(rig: Rig, job_id: JobId) -> None:
    """The machine of the second job is over by two lists."""
    for _ in range(2):
        at = rig.clock.now()
        row = listing(instance(InstanceState.GONE), at=at)
        await rig.commits.commit(partial(_seen, row, job_id), cycle_points)
        await rig.clock.sleep(MINUTE)
    assert rig.attempts(job_id)[0].state is AttemptState.ENDED


def _seen(row: dict[ProviderName, Listing], job_id: JobId, world: World, now: datetime) -> Plan:
    (said,) = report(seq=-1, phase="").values()
    identity = AttemptId(job=job_id, number=1)
    return reconcile(world, row, {identity: replace(said, attempt=identity, read_at=now)}, now)


async def test_a_bill_that_is_still_being_written_changes_nothing(tmp_path: Path) -> None:
    rig, shop, bills, job_id = await ended(tmp_path)
    booked = spent(rig, job_id)
    for hours in range(24 * 15):
        shop.bill = 1_000 * (hours + 1)
        await rig.clock.sleep(HOUR)
        await bills.reconcile_once()
    assert spent(rig, job_id) == booked
    assert rig.attempts(job_id)[0].bill.tries == DONE
    assert shop.asked == len(READ_AFTER)


async def test_a_bill_that_cannot_be_is_not_believed(tmp_path: Path) -> None:
    rig, shop, bills, job_id = await ended(tmp_path)
    booked = spent(rig, job_id)
    shop.bill = 10**12
    for _ in range(8):
        await rig.clock.sleep(HOUR)
        await bills.reconcile_once()
    assert spent(rig, job_id) == booked


async def test_a_provider_that_cannot_answer_is_asked_again_and_costs_nothing(tmp_path: Path) -> None:
    rig, shop, bills, job_id = await ended(tmp_path)
    booked = spent(rig, job_id)
    shop.away = True
    await rig.clock.sleep(4 * HOUR)
    await bills.reconcile_once()
    assert rig.log.events().count("bills.unanswered") == 1
    assert spent(rig, job_id) == booked
    shop.away, shop.bill = False, booked[0] - 5_000
    await bills.reconcile_once()
    assert spent(rig, job_id) == booked
    await rig.clock.sleep(HOUR)
    await bills.reconcile_once()
    assert rig.attempts(job_id)[0].bill.believed == shop.bill
    assert spent(rig, job_id) == (shop.bill,) * 3
    assert "attempt.billed" not in rig.kinds(job_id), "half a cent is not worth a line"


@pytest.mark.parametrize("state", [MachineState.GONE, MachineState.LIVE])
async def test_a_bill_that_is_final_at_once_is_believed_once_the_machine_is_gone(
    tmp_path: Path, state: MachineState
) -> None:
    rig, shop, bills, job_id = await ended(tmp_path)
    booked = spent(rig, job_id)
    policy = rig.commits.policy
    rules = replace(policy.providers[shop.name], bill_open_for=timedelta(0))
    rig.policy.reload(replace(policy, providers={shop.name: rules}))
    item = replace(rig.attempts(job_id)[0], machine=state)
    rig.store.tx(lambda tx: tx.commit(Plan(attempts={item.id: item})))
    shop.bill = 300_000
    await bills.reconcile_once()
    assert spent(rig, job_id) == ((shop.bill,) * 3 if state is MachineState.GONE else booked)


def sharer(number: int, **parts: int) -> Sharer:
    """An attempt of a job with these charges, in micro-dollars by part."""
    world = world_with(AttemptState.RUNNING)
    ((identity, item),), (owner,) = world.attempts.items(), world.jobs.values()
    item = replace(item, id=replace(identity, number=number))
    booked = [
        Charge(
            attempt=item.id,
            provider=item.provider,
            day=NOW.date(),
            start=NOW,
            end=NOW + HOUR,
            amount=MicroUsd(amount),
            on_demand=None,
            part=ChargePart(part),
        )
        for part, amount in parts.items()
    ]
    return Sharer(job=owner, item=item, booked=booked)


@pytest.mark.parametrize("billed", [0, 1, 99, 100, 150, 199, 200, 201, 1_000])
def test_no_share_of_a_bill_is_below_zero_and_all_of_them_are_the_bill(billed: int) -> None:
    each = sharer(1, machine=100), sharer(2, machine=50, traffic=100), sharer(3, traffic=100)
    found = shares(each, MicroUsd(billed))
    assert sum(found) == billed
    assert min(found) >= 0


def test_no_day_is_corrected_to_less_than_nothing() -> None:
    today = NOW.date()
    yesterday = today - timedelta(days=1)
    booked, billed = {yesterday: 100, today: 50}, {yesterday: 2, today: 1}
    assert _moved_by_day(booked, -60, billed) == {yesterday: -40, today: -20}
    assert _moved_by_day(booked, -60, {}) == {today: -50, yesterday: -10}
    assert _moved_by_day(booked, -200, billed) == {today: -50, yesterday: -100}
    assert _moved_by_day(booked, 30, {}) == {today: 30}
    assert _moved_by_day({}, 30, {}) == {}
