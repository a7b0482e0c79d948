"""Attacks from the documents, each between two features: what one does is held against the promise of the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from spotd.api.requests import JobDraft, Submission
from spotd.api.responses import OverBudget
from spotd.core import relocation
from spotd.core.domain.intents import JobId
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.daemon.market.late_causes import CauseCheck
from spotd.daemon.market.price_recorder import BillCheck
from spotd_jobs.spec.model import GpuAlternative, MarketChoice, Resources, Schedule
from spotd_providers.contract.errors import Unavailable
from spotd_providers.contract.values import (
    AttemptKey,
    Balance,
    Capability,
    InstanceId,
    InstanceState,
    Interruption,
    Loss,
    MicroUsd,
    MicroUsdPerGpuHour,
    Offer,
    Power,
    ProviderCharge,
    ProviderName,
)
from spotd_providers.contract.values import Market as Sold
from tests.unit.core.builders import MINUTE, NOW, SHOP, job, offer
from tests.unit.daemon.clocks import VirtualClock
from tests.unit.daemon.ledger import BID, KEY, Hosts, Market, at_work, first_runs, reload, rig_of, stop_reasons
from tests.unit.daemon.rig import Rig

pytestmark = pytest.mark.anyio
HOUR = timedelta(hours=1)
MIDNIGHT = datetime(2026, 4, 1, tzinfo=UTC)
OTHER = ProviderName("other")
HERE = offer("o1")
POOR, RICH = 500, 20_000_000


class Books(Market):
    """Is paid in advance, and states what it billed."""

    credit = RICH
    rows: Sequence[ProviderCharge] = ()

    @property
    def capabilities(self) -> Mapping[Power, Capability]:
        return {**super().capabilities, **dict.fromkeys((Power.BALANCE, Power.BILLING), Capability(available=True))}

    async def balance(self) -> Balance:
        return Balance(available=MicroUsd(self.credit))

    async def charges(self, since: datetime, until: datetime) -> Sequence[ProviderCharge]:
        return self.rows

    def row(self, name: str, amount: int, *, key: str = KEY, currency: str = "USD") -> ProviderCharge:
        machine = InstanceId(name)
        return ProviderCharge(
            key=AttemptKey(key),
            instance_id=machine,
            start=self.born_at.get(machine, NOW),
            end=self.ended_at.get(machine, self._clock.now()),
            amount=MicroUsd(amount),
            currency=currency,
        )


def there(price: int) -> Offer:
    return replace(offer("s1", price=price), provider=OTHER)


def books(rig: Rig) -> Books:
    assert isinstance(rig.shop, Books)
    return rig.shop


def days(rig: Rig, name: JobId) -> dict[date, int]:
    """What is booked for the job by day, which is what its attempts and the job itself say."""
    charges = rig.store.read(lambda reads: reads.charges_of(name))
    found: Counter[date] = Counter()
    for charge in charges:
        found[charge.day] += charge.amount
    assert rig.job(name).spent == sum(found.values()) == sum(item.meter.settled for item in rig.attempts(name))
    return dict(found)


async def bills_read(rig: Rig, hours: int = 5) -> None:
    shops = {shop.name: shop for shop in rig.shops}
    bills = BillCheck(shops, commits=rig.commits, database=rig.database, clock=rig.clock, log=rig.log)
    for _ in range(hours):
        await rig.clock.sleep(HOUR)
        await bills.reconcile_once()


def seldom(rig: Rig, folder: Path) -> Hosts:
    hosts = Hosts(rig, folder)
    hosts.every = MINUTE
    return hosts


def is_launched(rig: Rig, name: JobId, number: int) -> bool:
    return any(item.id.number == number and item.ref is not None for item in rig.attempts(name))


def draft(name: str) -> JobDraft:
    resources = {"gpu": "RTX_4090:1"}
    return JobDraft(
        data={"name": name, "run": "train", "image": "scratch", "resources": resources, "price": {"max_price": 10.0}}
    )


@pytest.mark.parametrize("ended", ["today", "yesterday"])
async def test_the_machine_of_an_agents_job_that_cannot_be_ended_counts_in_the_day_of_agents(
    tmp_path: Path, ended: str
) -> None:
    rig = rig_of(
        tmp_path,
        at=MIDNIGHT + HOUR if ended == "today" else MIDNIGHT - 20 * MINUTE,
        offers=[offer("o1", price=4_000_000), offer("o2", price=4_000_000)],
        every_s=60.0,
        agent_job_budget=MicroUsd(10_000_000),
        agent_day_budget=MicroUsd(15_000_000),
        ceilings={"RTX_4090": MicroUsdPerGpuHour(10_000_000)},
    )
    hosts, agents = seldom(rig, tmp_path), rig.handlers().submissions
    async with at_work(rig, hosts):
        first = JobId((await agents.submit(Submission(draft=draft("one"), agent=True)))["job"]["id"])
        await first_runs(rig, first)
        rig.shop.always["terminate"] = Unavailable("away")
        await rig.cancel(first)
        await rig.until_state(first, JobState.CANCELLED)
        second = JobId((await agents.submit(Submission(draft=draft("two"), agent=True)))["job"]["id"])
        await rig.cancel(second)
        await rig.until_state(second, JobState.CANCELLED)
        await rig.clock.sleep(80 * MINUTE)
        with pytest.raises(OverBudget, match=r"agents' jobs hold \$\d"):
            await agents.submit(Submission(draft=draft("three"), agent=True))


async def test_a_longest_duration_does_not_count_the_time_in_which_an_outbid_machine_is_held(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, offers=[BID], hold_max=15 * MINUTE)
    hosts = Hosts(rig, tmp_path)
    async with at_work(rig, hosts):
        name = await rig.submit(job(spec={"schedule": Schedule(max_duration=15 * MINUTE)}))
        await first_runs(rig, name)
        await rig.clock.sleep(5 * MINUTE)
        rig.shop.offer_index = []
        rig.shop.set_state(KEY, InstanceState.PAUSED, Loss.OUTBID)
        await rig.until(lambda: "attempt.held" in rig.kinds())
        await rig.clock.sleep(13 * MINUTE)
        assert rig.attempts(name)[0].state.counts
        rig.shop.set_state(KEY, InstanceState.RUNNING)
        await rig.clock.sleep(5 * MINUTE)
        assert rig.attempts(name)[0].state is AttemptState.RUNNING
        await rig.until(lambda: rig.job(name).state is JobState.EXPIRED, within=6 * MINUTE)
        assert abs(rig.job(name).totals.ran - 15 * MINUTE) <= MINUTE


async def test_an_outbid_machine_that_never_wakes_ran_until_it_was_outbid(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, offers=[BID], hold_max=10 * MINUTE)
    async with at_work(rig, Hosts(rig, tmp_path)):
        name = await rig.submit()
        began = (await first_runs(rig, name)).running_at
        await rig.clock.sleep(5 * MINUTE)
        rig.shop.offer_index = []
        rig.shop.set_state(KEY, InstanceState.PAUSED, Loss.OUTBID)
        assert began is not None
        ran = rig.clock.now() - began
        await rig.until(lambda: rig.attempts(name)[0].end_reason is EndReason.OUTBID, within=20 * MINUTE)
        assert abs(rig.job(name).totals.ran - ran) <= MINUTE


async def test_what_is_free_is_taken_back_from_each_day_as_it_was_booked_there(tmp_path: Path) -> None:
    at = MIDNIGHT - 15 * MINUTE
    rig = rig_of(tmp_path, at=at, offers=[replace(HERE, interruption=Interruption.NOTICE)], every_s=60.0)
    reload(rig, providers={SHOP: replace(rig.policy.current.providers[SHOP], free_if_taken_within=HOUR)})
    async with at_work(rig, seldom(rig, tmp_path)):
        name = await rig.submit()
        await first_runs(rig, name)
        await rig.clock.sleep(22 * MINUTE)
        rig.shop.offer_index = []
        await rig.clock.sleep(8 * MINUTE)
        rig.shop.set_state(KEY, InstanceState.GONE, Loss.PREEMPTED)
        await rig.until(lambda: rig.attempts(name)[0].state is AttemptState.ENDED)
        await rig.cancel(name)
        await rig.until(lambda: rig.job(name).state.is_final)
        assert days(rig, name) == {MIDNIGHT.date() - timedelta(days=1): 0, MIDNIGHT.date(): 0}


async def test_a_cause_is_read_in_time_although_no_machine_is_left_to_watch(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, offers=[offer(f"o{n}", price=400_000 + n) for n in range(4)])
    reload(rig, providers={SHOP: replace(rig.policy.current.providers[SHOP], causes_within=10 * MINUTE)})
    check = CauseCheck(rig.offer_cache.listings, commits=rig.commits, clock=rig.clock, log=rig.log)
    async with rig.running():
        name = await rig.submit(job(spec={"retry_starts": 2}))
        for number in (1, 2):
            await rig.until(partial(is_launched, rig, name, number))
            await rig.clock.sleep(MINUTE)
            rig.shop.set_state(rig.attempts(name)[-1].key, InstanceState.GONE)
            await rig.until(lambda: rig.attempts(name)[-1].state is AttemptState.ENDED)
        assert rig.job(name).failed_starts == 2
        await rig.clock.sleep(4 * MINUTE)
        rig.shop.set_state(rig.attempts(name)[1].key, InstanceState.GONE, Loss.PREEMPTED)
        await rig.clock.sleep(MINUTE)
        await check.reconcile_once()
        assert rig.job(name).failed_starts == 1


ALLOWS: Final[Mapping[str, Mapping[str, Any]]] = {
    "move": {"moves_max": 2},
    "leave": {"hold_max": 15 * MINUTE},
    "preempt": {"machines_max": 1},
}


@pytest.mark.parametrize("credit", [POOR, RICH], ids=["poor", "rich"])
@pytest.mark.parametrize("what", ALLOWS)
async def test_no_machine_is_stopped_for_one_that_a_balance_does_not_carry(
    tmp_path: Path, what: str, credit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relocation, "DWELL", 3 * MINUTE)
    monkeypatch.setattr(relocation, "_is_worth", lambda _found: True)
    clock = VirtualClock()
    first, second = Market(clock, offers=[BID if what == "leave" else HERE]), Books(clock, name=OTHER, offers=[])
    second.credit = credit
    rig = rig_of(tmp_path, clock=clock, shops=[first, second], every_s=30.0, **ALLOWS[what])
    async with at_work(rig, Hosts(rig, tmp_path)):
        name = await rig.submit()
        await first_runs(rig, name)
        await rig.clock.sleep((16 if what == "preempt" else 4) * MINUTE)
        first.offer_index, second.offer_index = [], [there(100_000)]
        if what == "leave":
            first.set_state(KEY, InstanceState.PAUSED, Loss.OUTBID)
        elif what == "preempt":
            urgent = job(9)
            await rig.submit(replace(urgent, spec=replace(urgent.spec, priority=10, schedule=Schedule(preempt=True))))
        await rig.clock.sleep(5 * MINUTE)
        is_left = "attempt.left" in rig.kinds() or bool(stop_reasons(rig, name))
        assert is_left is (credit == RICH), rig.kinds()


async def test_neither_a_double_nor_a_machine_of_that_id_elsewhere_nor_another_currency_is_in_a_bill(
    tmp_path: Path,
) -> None:
    clock = VirtualClock()
    first, second = Books(clock, offers=[HERE]), Books(clock, name=OTHER, offers=[])
    rig = rig_of(tmp_path, clock=clock, shops=[first, second], every_s=60.0)
    async with at_work(rig, seldom(rig, tmp_path)):
        one = await rig.submit()
        await first_runs(rig, one)
        first.offer_index, second.offer_index = [], [there(300_000)]
        await rig.clock.sleep(2 * MINUTE)
        two = await rig.submit(job(2))
        await first_runs(rig, two)
        first.put_machine(KEY)  # the answer to a launch was given twice
        await rig.clock.sleep(5 * MINUTE)
        second.set_state(AttemptKey("spotd-lab-j2-1"), InstanceState.GONE, Loss.PREEMPTED)
        second.offer_index = []
        await rig.until(lambda: rig.attempts(two)[0].end_reason is not None)
        assert rig.attempts(one)[0].state is AttemptState.RUNNING
        assert [m.ref.instance_id for m in first.alive()] == ["m1"]
        for name in (one, two):
            await rig.cancel(name)
        await rig.until(lambda: not first.not_gone() and not second.not_gone())
        await rig.clock.sleep(3 * MINUTE)
    booked = [sum(days(rig, name).values()) for name in (one, two)]
    euros = first.row("m1", 90_000, currency="EUR")
    first.rows = (first.row("m1", booked[0] + 30_000), first.row("m2", 900_000), euros)
    second.rows = (second.row("m1", 5 * booked[1]),)
    await bills_read(rig)
    assert sum(days(rig, one).values()) == booked[0], "no sum of two currencies is believed"
    first.rows = first.rows[:-1]
    await bills_read(rig, 24)
    assert [sum(days(rig, name).values()) for name in (one, two)] == [booked[0] + 30_000, booked[1]]


@pytest.mark.parametrize("parts", [(50, 50), (200, 200), (100, 50), (50, 100)], ids=str)
async def test_a_bill_corrects_each_day_to_what_it_says_of_it(tmp_path: Path, parts: tuple[int, int]) -> None:
    clock = VirtualClock()
    shop = Books(clock, offers=[HERE])
    rig = rig_of(tmp_path, at=MIDNIGHT - 25 * MINUTE, clock=clock, shops=[shop], every_s=60.0)
    async with at_work(rig, seldom(rig, tmp_path)):
        name = await rig.submit()
        await first_runs(rig, name)
        await rig.clock.sleep(34 * MINUTE)
        await rig.cancel(name)
        await rig.until(lambda: not shop.not_gone())
        await rig.clock.sleep(3 * MINUTE)
    before, today = days(rig, name), MIDNIGHT.date()
    wanted = {day: before[day] * part // 100 for day, part in zip(sorted(before), parts, strict=True)}
    whole = shop.row("m1", sum(wanted.values()))
    begin = MIDNIGHT - timedelta(days=1)
    first = replace(whole, start=begin, end=MIDNIGHT, amount=MicroUsd(wanted[begin.date()]))
    second = replace(whole, start=MIDNIGHT, end=MIDNIGHT + timedelta(days=1), amount=MicroUsd(wanted[today]))
    shop.rows = (whole,) if parts[0] == parts[1] else (first, second)
    await bills_read(rig)
    after = days(rig, name)
    assert sum(after.values()) == whole.amount
    assert after == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize("limit", ["budget_day", "budget_month"])
async def test_a_launch_without_an_answer_stops_no_machine_where_the_budget_has_no_room_for_both(
    tmp_path: Path, limit: str
) -> None:
    rig = rig_of(tmp_path, offers=[HERE, offer("o2", price=410_000)])
    async with at_work(rig, Hosts(rig, tmp_path)):
        name = await rig.submit()
        await first_runs(rig, name)
        reload(rig, **{limit: MicroUsd(300_000)})
        rig.shop.always = {"instances": Unavailable("away"), "launch": Unavailable("away"), "find": Unavailable("away")}
        await rig.submit(job(2))
        await rig.until(lambda: len(rig.shop.requests) == 2)
        await rig.clock.sleep(10 * MINUTE)
        rig.shop.always = {}
        await rig.clock.sleep(5 * MINUTE)
        assert rig.attempts(name)[0].state is AttemptState.RUNNING
        assert stop_reasons(rig, name) == []


WAITS = Resources(
    gpu=(GpuAlternative(name="RTX_4090", count=1),), market=MarketChoice.AUTO, on_demand_after=20 * MINUTE
)
DEMAND = replace(offer("d1", price=450_000), market=Sold.ON_DEMAND, interruption=Interruption.NEVER)
TOO_DEAR = offer("o1", price=900_000)
IN_THE_WAY: Final[Mapping[str, Mapping[str, Any]]] = {
    "the balance": {},
    "the day's budget": {"budget_day": MicroUsd(100)},
    "the month's budget": {"budget_month": MicroUsd(100)},
    "machines": {"machines_max": 0},
    "the store": {"launches_paused": "the store is away"},
}


@pytest.mark.parametrize("what", IN_THE_WAY)
async def test_only_time_counts_for_on_demand_in_which_nothing_but_the_market_is_in_the_way(
    tmp_path: Path, what: str
) -> None:
    clock = VirtualClock()
    shop = Books(clock, offers=[DEMAND, TOO_DEAR])
    rig = rig_of(tmp_path, clock=clock, shops=[shop], every_s=30.0)
    shop.credit = POOR if what == "the balance" else RICH
    async with at_work(rig, Hosts(rig, tmp_path)):
        await rig.clock.sleep(11 * MINUTE)  # a balance is asked for every ten minutes
        await rig.submit(job(resources=WAITS))
        await rig.clock.sleep(5 * MINUTE)
        reload(rig, **IN_THE_WAY[what])
        shop.offer_index = [DEMAND, HERE]
        await rig.clock.sleep(40 * MINUTE)
        shop.credit, shop.offer_index = RICH, [DEMAND, TOO_DEAR]
        await rig.clock.sleep(MINUTE)
        reload(rig, budget_day=None, budget_month=None, machines_max=8, launches_paused="")
        await rig.clock.sleep(10 * MINUTE)
        assert shop.requests == []
        await rig.until(lambda: bool(shop.requests), within=7 * MINUTE)


@pytest.mark.parametrize("how", ["dead", "asleep"])
async def test_no_time_counts_for_on_demand_in_which_nothing_was_decided(tmp_path: Path, how: str) -> None:
    rig = rig_of(tmp_path, offers=[DEMAND, TOO_DEAR])
    hosts, shop = Hosts(rig, tmp_path), rig.shop
    async with at_work(rig, hosts):
        await rig.submit(job(resources=WAITS))
        await rig.clock.sleep(15 * MINUTE)
        if how == "asleep":
            rig.clock.offset += 3 * HOUR
            await rig.clock.sleep(4 * MINUTE)
            assert shop.requests == []
            await rig.until(lambda: bool(shop.requests), within=7 * MINUTE)
            return
    await rig.clock.sleep(3 * HOUR)
    later = rig.reborn()
    async with at_work(later, hosts):
        await later.clock.sleep(4 * MINUTE)
        assert shop.requests == []
        await later.until(lambda: bool(shop.requests), within=7 * MINUTE)
