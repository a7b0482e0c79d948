"""Budgets, ceilings and bids while something is under way, held against what the market itself bills."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from spotd.core.domain.states import JobState
from spotd.core.requests import retry
from spotd.daemon.commits import cycle_points
from spotd_providers.contract.errors import OutcomeUnknown, Unavailable
from spotd_providers.contract.values import InstanceState, Listing, Loss, MicroUsdPerHour
from tests.unit.core.builders import MINUTE, job, offer
from tests.unit.daemon.ledger import BID, KEY, Hosts, Market, at_work, first_runs, reload, rig_of
from tests.unit.daemon.rig import Rig
from tests.unit.daemon.shop import Hang

pytestmark = pytest.mark.anyio
MIDNIGHT = datetime(2026, 4, 1, tzinfo=UTC)
UNIT = 8_000
"""Micro-dollars of a minute: how often the daemon looks in these tests."""


def market(rig: Rig) -> Market:
    assert isinstance(rig.shop, Market)
    return rig.shop


@pytest.mark.parametrize("what", ["budget_day", "budget_month"])
async def test_a_budget_holds_up_to_midnight_while_a_raise_has_no_answer_and_begins_anew_there(
    tmp_path: Path, what: str
) -> None:
    rig = rig_of(tmp_path, at=MIDNIGHT - 50 * MINUTE, raise_bids=True, every_s=60.0)
    rig.policy.reload(replace(rig.policy.current, **{what: 250_000}))  # type: ignore[arg-type]  # a field of money
    hosts, shop = Hosts(rig, tmp_path), market(rig)
    hosts.every = MINUTE
    async with at_work(rig, hosts):
        name = await rig.submit()
        await first_runs(rig, name)
        shop.floor(100_000)
        await rig.clock.sleep(MINUTE)
        shop.faults["change_bid"].append(Hang(acts=True))
        shop.floor(430_000)
        await rig.clock.sleep(MIDNIGHT - rig.clock.now())
        before = shop.billed(until=MIDNIGHT)
        assert 200_000 <= before <= 250_000
        await rig.clock.sleep(5 * MINUTE)
        assert shop.billed(MIDNIGHT) > 0, "it goes on"
        assert shop.most_alive["spotd-lab-j1"] == 1
        charged = rig.store.read(lambda reads: reads.charges_of(name))
        assert abs(sum(c.amount for c in charged if c.end <= MIDNIGHT) - before) <= UNIT


async def test_a_budget_that_is_lowered_to_what_is_spent_ends_a_held_machine(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, hold_max=60 * MINUTE, raise_bids=True, budget_day=50_000_000)
    hosts, shop = Hosts(rig, tmp_path), market(rig)
    async with at_work(rig, hosts):
        name = await rig.submit()
        await first_runs(rig, name)
        await rig.clock.sleep(3 * MINUTE)
        shop.set_state(KEY, InstanceState.PAUSED, Loss.OUTBID)
        await rig.until(lambda: "attempt.held" in rig.kinds())
        reload(rig, budget_day=shop.billed())
        await rig.clock.sleep(2 * MINUTE)
        shop.floor(380_000)
        shop.set_state(KEY, InstanceState.RUNNING)
        spent = shop.billed()
        await rig.clock.sleep(6 * MINUTE)
        assert shop.billed() - spent <= 4 * UNIT, "what woke saves and ends"
        assert shop.alive() == []
        assert shop.bids == []
        reload(rig, budget_day=50_000_000)
        await rig.until(lambda: bool(shop.alive()), within=5 * MINUTE)


@pytest.mark.parametrize("acts", [True, False], ids=["it took effect", "it did not"])
async def test_a_raise_without_an_answer_is_booked_as_it_is_billed_though_no_list_is_read_for_long(
    tmp_path: Path, acts: bool
) -> None:
    rig = rig_of(tmp_path, raise_bids=True)
    hosts, shop = Hosts(rig, tmp_path), market(rig)
    async with at_work(rig, hosts):
        name = await rig.submit()
        await first_runs(rig, name)
        shop.floor(100_000)
        await rig.clock.sleep(MINUTE)
        shop.faults["change_bid"].append(OutcomeUnknown("lost", key=KEY) if acts else Hang())
        shop.floor(430_000)
        await rig.until(lambda: "bid.raising" in rig.kinds())
        shop.floor(100_000)
        shop.always["instances"] = Unavailable("away")
        await rig.clock.sleep(15 * MINUTE)
        shop.always.clear()
        await rig.clock.sleep(3 * MINUTE)
        await rig.cancel(name)
        await rig.until(lambda: not shop.not_gone())
        await rig.clock.sleep(MINUTE)
        assert rig.job(name).spent == pytest.approx(shop.billed(), rel=0.01)


@pytest.mark.parametrize("acts", [True, False], ids=["it took effect", "it did not"])
async def test_a_job_that_is_cancelled_while_its_raise_has_no_answer_bids_no_more(tmp_path: Path, acts: bool) -> None:
    rig = rig_of(tmp_path, raise_bids=True)
    hosts, shop = Hosts(rig, tmp_path), market(rig)
    async with at_work(rig, hosts):
        name = await rig.submit()
        await first_runs(rig, name)
        shop.floor(100_000)
        await rig.clock.sleep(MINUTE)
        shop.faults["change_bid"].append(OutcomeUnknown("lost", key=KEY) if acts else Hang())
        shop.floor(430_000)
        await rig.until(lambda: "bid.raising" in rig.kinds())
        await rig.clock.sleep(timedelta(seconds=2))
        await rig.cancel(name)
        await rig.until(lambda: not shop.not_gone())
        await rig.clock.sleep(2 * MINUTE)
        assert rig.job(name).state is JobState.CANCELLED
        assert shop.counts["change_bid"] == 1
        assert abs(rig.job(name).spent - shop.billed()) <= 200, "of 14,000 micro-dollars"


async def test_a_list_that_was_asked_for_before_a_raise_does_not_settle_it(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, raise_bids=True)
    hosts, shop = Hosts(rig, tmp_path), market(rig)
    plain, lag = shop.instances, {"on": False}

    async def slow() -> Listing:
        listing = await plain()
        if lag["on"]:
            await rig.clock.sleep(timedelta(seconds=15))
        return listing

    shop.instances = slow  # type: ignore[method-assign]  # a market whose answers take their time
    async with at_work(rig, hosts):
        name = await rig.submit()
        await first_runs(rig, name)
        shop.floor(100_000)
        await rig.clock.sleep(MINUTE)
        lag["on"] = True
        shop.faults["change_bid"].extend([OutcomeUnknown("lost", key=KEY)] * 5)
        shop.floor(430_000)
        await rig.until(lambda: shop.machine_of(KEY).price == 473_000)
        for _ in range(60):
            await rig.clock.sleep(timedelta(seconds=1))
            assert rig.attempts(name)[0].meter.rate >= 440_000
        await rig.clock.sleep(3 * MINUTE)
        assert rig.attempts(name)[0].meter.rate == 473_000
        await rig.cancel(name)
        await rig.until(lambda: not shop.not_gone())
        await rig.clock.sleep(MINUTE)
        assert rig.job(name).spent == pytest.approx(shop.billed(), rel=0.01)


async def test_a_raise_that_waits_for_its_turn_is_not_placed_above_the_on_demand_price_of_now(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, raise_bids=True)
    hosts, shop = Hosts(rig, tmp_path), market(rig)
    async with at_work(rig, hosts):
        name = await rig.submit()
        await first_runs(rig, name)
        shop.floor(100_000)
        await rig.clock.sleep(MINUTE)
        shop.faults["launch"].extend([Hang()] * 4)
        shop.offer_index = [offer(f"o{n}", price=400_000) for n in range(2, 6)]
        for number in range(2, 6):
            await rig.submit(job(number))
        await rig.until(lambda: len(shop.requests) == 5)
        shop.offer_index = []
        shop.floor(430_000)
        await rig.until(lambda: "bid.raising" in rig.kinds())
        assert not shop.bids
        shop.offer_index = [replace(BID, on_demand_price=MicroUsdPerHour(450_000))]
        rig.pollers[shop.name].ask_again()
        await rig.until(lambda: "bid.not_raised" in rig.kinds() or bool(shop.bids))
        assert shop.bids == []


async def test_a_machine_that_is_not_proved_ended_holds_a_retry_back(tmp_path: Path) -> None:
    rig = rig_of(tmp_path)
    hosts, shop = Hosts(rig, tmp_path), market(rig)
    shop.offer_index = [offer("o1"), offer("o2", price=390_000)]
    async with at_work(rig, hosts):
        name = await rig.submit()
        await first_runs(rig, name)
        shop.always["terminate"] = Unavailable("away")
        await rig.cancel(name)
        await rig.until(lambda: rig.job(name).state is JobState.CANCELLED, within=10 * MINUTE)
        for _ in range(2):
            await rig.commits.commit(lambda world, now: retry(world, world.jobs[name], now), cycle_points)
            rig.wake_event.notify()
            await rig.clock.sleep(MINUTE)
            await rig.cancel(name)
        await rig.commits.commit(lambda world, now: retry(world, world.jobs[name], now), cycle_points)
        await rig.clock.sleep(3 * MINUTE)
        assert shop.most_alive["spotd-lab-j1"] == 1
        assert len(shop.requests) == 1
        shop.always.clear()
        await rig.until(lambda: len(rig.attempts(name)) == 2 and rig.attempts(name)[1].running_at is not None)
        assert shop.most_alive["spotd-lab-j1"] == 1
        assert len(shop.alive()) == 1
