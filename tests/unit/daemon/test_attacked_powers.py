"""Attacks from the documents on two powers at once: bids, holds, moves, preemption, windows, budgets and set clocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from spotd.core import enforcement, relocation
from spotd.core.domain.intents import JobId
from spotd.core.domain.jobs import Job
from spotd.core.domain.plan import Plan
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.domain.world import World
from spotd.daemon.clock import begin_timeline
from spotd_jobs.spec.fields import parse_window
from spotd_jobs.spec.model import GpuAlternative, MarketChoice, PriceLimit, Resources, Schedule
from spotd_providers.contract.errors import OutcomeUnknown, Unavailable
from spotd_providers.contract.values import (
    InstanceState,
    Interruption,
    Loss,
    MicroUsd,
    MicroUsdPerHour,
    Offer,
)
from spotd_providers.contract.values import Market as Sold
from tests.unit.core.builders import MINUTE, NOW, SHOP, job, offer
from tests.unit.daemon.clocks import VirtualClock
from tests.unit.daemon.ledger import (
    BID,
    KEY,
    Hosts,
    Market,
    at_work,
    first_runs,
    reload,
    rig_of,
    stop_reasons,
    with_fee,
)
from tests.unit.daemon.rig import CANCEL, Log, Rig
from tests.unit.daemon.test_attacked_machines import OTHER, computer

pytestmark = pytest.mark.anyio
HOUR = timedelta(hours=1)
LATER = pytest.mark.lengthy
HERE, CHEAP = offer("o1"), offer("o2", price=100_000)
DEMAND = replace(offer("d1", price=450_000), market=Sold.ON_DEMAND, interruption=Interruption.NEVER)
DEAR = replace(BID, gpu_price=MicroUsdPerHour(900_000))
WAITS = Resources(
    gpu=(GpuAlternative(name="RTX_4090", count=1),), market=MarketChoice.AUTO, on_demand_after=30 * MINUTE
)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines may be moved, or stopped for another job, minutes after their launch, and any saving is worth it."""
    monkeypatch.setattr(relocation, "DWELL", 3 * MINUTE)
    monkeypatch.setattr(enforcement, "DWELL", 3 * MINUTE)
    monkeypatch.setattr(relocation, "_is_worth", lambda _found: True)


def market(rig: Rig) -> Market:
    assert isinstance(rig.shop, Market)
    return rig.shop


def urgent(**changes: Any) -> Job:
    made = job(9, name="urgent", **changes)
    return replace(made, spec=replace(made.spec, priority=10, schedule=Schedule(preempt=True)))


def times(offers: list[Offer], factor: float) -> list[Offer]:
    return [replace(one, gpu_price=MicroUsdPerHour(round(one.gpu_price * factor))) for one in offers]


async def one_list(rig: Rig, change: Callable[[], object], undo: Callable[[], object], what: str = "instances") -> None:
    """One list, or one page of offers, shows it so."""
    change()
    before = rig.shop.counts[what]
    await rig.until(lambda: rig.shop.counts[what] > before, within=5 * MINUTE)
    undo()


def is_one_healthy(rig: Rig, name: JobId) -> bool:
    return [a.state for a in rig.attempts(name)] == [AttemptState.RUNNING] and len(rig.shop.alive()) == 1


async def set_clock(rig: Rig, step: timedelta) -> Rig:
    """The clock of the computer is set while the daemon is dead for a moment."""
    later = rig.reborn()
    begin_timeline(later.store, later.policy.current, computer(rig, step), later.log)
    rig.clock.offset += step
    return later


@pytest.mark.parametrize(
    ("budget", "factor"),
    [("job", 100), ("day", 100), *(pytest.param(*one, marks=LATER) for one in [("month", 100), ("job", 0.01)])],
)
async def test_one_wrong_price_of_a_machine_reaches_no_budget(tmp_path: Path, budget: str, factor: float) -> None:
    limits: dict[str, Any] = {} if budget == "job" else {f"budget_{budget}": MicroUsd(2_000_000)}
    rig = rig_of(tmp_path, offers=[HERE], **limits)
    async with at_work(rig, Hosts(rig, tmp_path)):
        name = await rig.submit(job(budget=2_000_000 if budget == "job" else None))
        await first_runs(rig, name)
        await rig.clock.sleep(10 * MINUTE)
        shop, right = market(rig), market(rig).machine_of(KEY)
        wrong = replace(right, price=MicroUsdPerHour(round(400_000 * factor)))
        ident = right.ref.instance_id
        await one_list(rig, lambda: shop.machines.update({ident: wrong}), lambda: shop.machines.update({ident: right}))
        await rig.clock.sleep(20 * MINUTE)
        assert is_one_healthy(rig, name)
        await rig.cancel(name)
        await rig.until(lambda: not shop.not_gone())
        await rig.clock.sleep(MINUTE)
        assert rig.job(name).spent == pytest.approx(shop.billed(), abs=8_000)


@pytest.mark.parametrize(
    ("what", "factor"),
    [
        ("offers", 0.01),
        ("floor", 100),
        *(pytest.param(*one, marks=LATER) for one in [("offers", 100), ("floor", 0.01)]),
    ],
)
async def test_one_wrong_page_gives_up_no_hold(tmp_path: Path, what: str, factor: float) -> None:
    rig = rig_of(tmp_path, offers=[BID, offer("o3", price=490_000)], hold_max=60 * MINUTE, raise_bids=True, moves_max=3)
    async with at_work(rig, Hosts(rig, tmp_path)):
        name = await rig.submit()
        await first_runs(rig, name)
        await rig.clock.sleep(5 * MINUTE)
        shop = market(rig)
        shop.set_state(KEY, InstanceState.PAUSED, Loss.OUTBID)
        await rig.until(lambda: "attempt.held" in rig.kinds())
        sold = list(shop.offer_index)
        if what == "offers":
            wrong = times(sold, factor)
            await one_list(
                rig,
                lambda: setattr(shop, "offer_index", wrong),
                lambda: setattr(shop, "offer_index", sold),
                "offers",
            )
        else:
            right = shop.machine_of(KEY)
            ident = right.ref.instance_id
            row = replace(right, bid_floor=MicroUsdPerHour(round(400_000 * factor)))
            await one_list(
                rig, lambda: shop.machines.update({ident: row}), lambda: shop.machines.update({ident: right})
            )
        await rig.clock.sleep(5 * MINUTE)
        assert stop_reasons(rig, name) == []
        shop.set_state(KEY, InstanceState.RUNNING)
        await rig.clock.sleep(5 * MINUTE)
        assert is_one_healthy(rig, name), rig.kinds()
        assert len(shop.requests) == 1


@pytest.mark.parametrize("state", [InstanceState.PAUSED, pytest.param(InstanceState.GONE, marks=LATER)])
async def test_one_wrong_row_while_a_raise_has_no_answer_changes_nothing(tmp_path: Path, state: InstanceState) -> None:
    rig = rig_of(tmp_path, offers=[BID], hold_max=10 * MINUTE, raise_bids=True)
    async with at_work(rig, Hosts(rig, tmp_path)):
        name = await rig.submit()
        await first_runs(rig, name)
        await rig.clock.sleep(5 * MINUTE)
        shop = market(rig)
        shop.faults["change_bid"].append(OutcomeUnknown("lost", key=KEY))
        shop.floor(430_000)
        await rig.until(lambda: "bid.raising" in rig.kinds())
        right = shop.machine_of(KEY)
        ident, loss = right.ref.instance_id, Loss.OUTBID if state is InstanceState.PAUSED else None
        wrong = replace(right, state=state, loss=loss)
        await one_list(
            rig,
            lambda: shop.machines.update({ident: wrong}),
            lambda: shop.machines.update({ident: replace(shop.machines[ident], state=right.state, loss=None)}),
        )
        await rig.clock.sleep(10 * MINUTE)
        assert is_one_healthy(rig, name), rig.kinds()
        assert shop.machine_of(KEY).price == rig.attempts(name)[0].meter.rate
        assert rig.kinds().count("bid.raising") == 1


@pytest.mark.parametrize("away", ["provider", "store"])
async def test_a_bid_that_loses_while_something_is_away_and_something_cheaper_appears(
    tmp_path: Path, away: str
) -> None:
    clock = VirtualClock()
    first, second = Market(clock, offers=[BID]), Market(clock, name=OTHER, offers=[])
    rig = rig_of(tmp_path, clock=clock, shops=[first, second], hold_max=10 * MINUTE, raise_bids=True, moves_max=3)
    async with at_work(rig, Hosts(rig, tmp_path)):
        name = await rig.submit()
        await first_runs(rig, name)
        await rig.clock.sleep(5 * MINUTE)
        first.floor(430_000)
        second.offer_index = [replace(CHEAP, provider=OTHER)]
        gone = Unavailable("it does not answer")
        if away == "provider":
            first.always = dict.fromkeys(("instances", "change_bid", "terminate", "offers", "find"), gone)
        else:
            reload(rig, launches_paused="the store is away")
        await rig.clock.sleep(30 * MINUTE)
        assert is_one_healthy(rig, name), rig.kinds()
        first.always = {}
        reload(rig, launches_paused="")
        await rig.until(lambda: bool(second.alive()), within=20 * MINUTE)
        await rig.clock.sleep(10 * MINUTE)
        assert (len(first.alive()), len(second.alive())) == (0, 1)
        assert first.most_alive["spotd-lab-j1"] == second.most_alive["spotd-lab-j1"] == 1


async def test_a_notice_that_lapses_while_its_machine_makes_room(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, offers=[HERE], machines_max=1)
    async with at_work(rig, Hosts(rig, tmp_path)):
        name = await rig.submit()
        await first_runs(rig, name)
        await rig.clock.sleep(20 * MINUTE)
        shop, right = market(rig), market(rig).machine_of(KEY)
        shop.machines[right.ref.instance_id] = replace(right, notice_at=rig.clock.now() + 2 * MINUTE)
        await rig.clock.sleep(MINUTE)
        other = await rig.submit(urgent())
        await rig.clock.sleep(MINUTE)
        if shop.machine_of(KEY).state is InstanceState.RUNNING:
            shop.machines[right.ref.instance_id] = replace(shop.machine_of(KEY), notice_at=None)
        await rig.until(lambda: any(a.running_at is not None for a in rig.attempts(other)), within=40 * MINUTE)
        await rig.clock.sleep(10 * MINUTE)
        assert len(shop.alive()) == 1
        assert len(rig.attempts(name)) == 1
        assert rig.attempts(name)[0].end_reason in {EndReason.MADE_ROOM, EndReason.PREEMPTED}


@pytest.mark.parametrize(
    "what", ["the job's budget", "the day's budget", "the fee", pytest.param("the ceiling", marks=LATER)]
)
async def test_a_limit_that_is_lowered_while_a_move_is_open_holds_for_what_follows(tmp_path: Path, what: str) -> None:
    rig = rig_of(tmp_path, offers=[HERE], moves_max=2)
    hosts, shop = Hosts(rig, tmp_path), market(rig)
    async with at_work(rig, hosts):
        name = await rig.submit(job(budget=5_000_000))
        await first_runs(rig, name)
        await rig.clock.sleep(5 * MINUTE)
        hosts.deaf = True
        shop.offer_index = [HERE, offer("o2", price=300_000)]
        await rig.until(lambda: stop_reasons(rig, name) == [EndReason.MIGRATED])
        spent = rig.job(name).spent + rig.attempts(name)[0].meter.settled
        if what == "the job's budget":
            await rig.commits.commit(lambda world, _now: _changed(world, name, budget_set=spent + 90_000), CANCEL)
        elif what == "the day's budget":
            reload(rig, budget_day=MicroUsd(90_000))
        elif what == "the fee":
            rig.policy.reload(with_fee(rig.commits.policy, 1_700_000))
        else:
            await rig.commits.commit(lambda world, _now: _with_ceiling(world, name, 200_000), CANCEL)
        hosts.deaf = False
        await rig.until(lambda: not shop.alive())
        await rig.clock.sleep(20 * MINUTE)
        assert len(shop.requests) == 1, rig.kinds()
        assert rig.job(name).state is not JobState.RUNNING


def _changed(world: World, name: JobId, **changes: Any) -> Plan:
    return Plan(jobs={name: replace(world.jobs[name], **changes)})


def _with_ceiling(world: World, name: JobId, ceiling: int) -> Plan:
    known = world.jobs[name]
    return _changed(world, name, spec=replace(known.spec, price=PriceLimit(per_gpu_hour=ceiling)))


@pytest.mark.parametrize("hours", [8, pytest.param(-8, marks=LATER)])
async def test_a_wait_for_spot_over_which_the_clock_is_set_is_as_long_as_before(tmp_path: Path, hours: int) -> None:
    rig = rig_of(tmp_path, offers=[DEMAND, DEAR])
    begin_timeline(rig.store, rig.policy.current, computer(rig), Log())
    hosts, shop = Hosts(rig, tmp_path), market(rig)
    async with at_work(rig, hosts):
        name = await rig.submit(job(resources=WAITS))
        await rig.clock.sleep(20 * MINUTE)
        assert shop.requests == []
    later = await set_clock(rig, hours * HOUR)
    async with at_work(later, hosts):
        await later.clock.sleep(5 * MINUTE)
        assert shop.requests == []
        await later.until(lambda: bool(shop.requests), within=16 * MINUTE)
        assert shop.requests[0].offer.offer_id == "d1"
        assert len(later.attempts(name)) == 1


@pytest.mark.parametrize("hours", [-8, pytest.param(8, marks=LATER)])
async def test_the_pause_after_a_move_that_failed_lasts_over_a_clock_that_is_set(tmp_path: Path, hours: int) -> None:
    rig = rig_of(tmp_path, offers=[HERE], moves_max=5)
    begin_timeline(rig.store, rig.policy.current, computer(rig), Log())
    hosts, shop = Hosts(rig, tmp_path), market(rig)
    shop.sells_once, shop.sold = True, {"o2"}
    async with at_work(rig, hosts):
        name = await rig.submit()
        await first_runs(rig, name)
        await rig.clock.sleep(5 * MINUTE)
        shop.sold.discard("o1")
        shop.offer_index = [HERE, CHEAP]
        await rig.until(lambda: stop_reasons(rig, name) == [EndReason.MIGRATED])
        await rig.until(lambda: rig.attempts(name)[-1].running_at is not None and len(rig.attempts(name)) > 1)
        before = len(shop.requests)
    later = await set_clock(rig, hours * HOUR)
    async with at_work(later, hosts):
        await later.clock.sleep(50 * MINUTE)
        assert stop_reasons(later, name) == [EndReason.MIGRATED], "no healthy machine within 75 min of that"
        assert len(shop.requests) == before


async def test_a_window_that_closes_ends_a_machine_that_is_held(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, offers=[BID], hold_max=10 * HOUR)
    hosts, shop = Hosts(rig, tmp_path), market(rig)
    closes = NOW + 40 * MINUTE
    window = parse_window(f"{NOW:%H:%M}-{closes:%H:%M}")
    async with at_work(rig, hosts):
        made = job()
        schedule = Schedule(windows=(window,), timezone="UTC")
        name = await rig.submit(replace(made, spec=replace(made.spec, schedule=schedule)))
        await first_runs(rig, name)
        await rig.clock.sleep(5 * MINUTE)
        shop.set_state(KEY, InstanceState.PAUSED, Loss.OUTBID)
        await rig.until(lambda: "attempt.held" in rig.kinds())
        await rig.until(lambda: not shop.not_gone(), within=HOUR)
        assert rig.clock.now() <= closes + 2 * MINUTE
        await rig.clock.sleep(2 * HOUR)
        assert len(shop.requests) == 1
        assert rig.job(name).state in {JobState.QUEUED, JobState.RECOVERING, JobState.WAITING_PRICE}


@pytest.mark.parametrize("when", ["before", "after"])
async def test_no_machine_makes_room_for_a_job_that_its_budget_does_not_let_run(tmp_path: Path, when: str) -> None:
    rig = rig_of(tmp_path, offers=[HERE], machines_max=1)
    hosts, shop = Hosts(rig, tmp_path), market(rig)
    async with at_work(rig, hosts):
        name = await rig.submit()
        await first_runs(rig, name)
        await rig.clock.sleep(20 * MINUTE)
        hosts.deaf = when == "after"
        other = await rig.submit(urgent(budget=20_000 if when == "before" else 5_000_000))
        if when == "before":
            await rig.clock.sleep(30 * MINUTE)
            assert stop_reasons(rig, name) == []
            return
        await rig.until(lambda: stop_reasons(rig, name) == [EndReason.MADE_ROOM])
        await rig.commits.commit(lambda world, _now: _changed(world, other, budget_set=20_000), CANCEL)
        hosts.deaf = False
        await rig.until(lambda: len(rig.attempts(name)) == 2 and rig.attempts(name)[1].running_at is not None)
        await rig.clock.sleep(HOUR)
        assert rig.attempts(other) == ()
        assert stop_reasons(rig, name) == [EndReason.MADE_ROOM]
        assert len(shop.alive()) == 1


async def test_a_bid_is_not_raised_where_the_raise_would_end_the_job_sooner(tmp_path: Path) -> None:
    """With a budget for some twenty minutes more a raise must not be what stops the machine."""
    rig = rig_of(tmp_path, offers=[BID], raise_bids=True, hold_max=10 * MINUTE)
    async with at_work(rig, Hosts(rig, tmp_path)):
        name = await rig.submit(job(budget=250_000))
        await first_runs(rig, name)
        await rig.clock.sleep(8 * MINUTE)
        market(rig).floor(450_000)
        await rig.clock.sleep(6 * MINUTE)
        assert stop_reasons(rig, name) == []
        await rig.until(lambda: bool(stop_reasons(rig, name)), within=HOUR)
        assert stop_reasons(rig, name) == [EndReason.OVER_BUDGET]
        await rig.until(lambda: not market(rig).not_gone())
        assert market(rig).billed() <= 250_000


@pytest.mark.parametrize("open_", ["hold", "raise"])
async def test_a_provider_that_is_switched_off_while_something_is_open_there(tmp_path: Path, open_: str) -> None:
    rig = rig_of(tmp_path, offers=[BID], raise_bids=True, hold_max=10 * MINUTE)
    async with at_work(rig, Hosts(rig, tmp_path)):
        name = await rig.submit()
        await first_runs(rig, name)
        await rig.clock.sleep(5 * MINUTE)
        shop = market(rig)
        if open_ == "hold":
            shop.set_state(KEY, InstanceState.PAUSED, Loss.OUTBID)
            await rig.until(lambda: "attempt.held" in rig.kinds())
        else:
            shop.faults["change_bid"].extend([Unavailable("away")] * 3)
            shop.floor(430_000)
            await rig.until(lambda: "bid.raising" in rig.kinds())
        rules = replace(rig.commits.policy.providers[SHOP], unusable="it is disabled in the config")
        reload(rig, providers={SHOP: rules})
        await rig.clock.sleep(40 * MINUTE)
        if open_ == "hold":
            assert shop.not_gone() == []
            assert len(shop.requests) == 1
        else:
            assert is_one_healthy(rig, name)
            assert shop.machine_of(KEY).price == rig.attempts(name)[0].meter.rate
        assert shop.most_alive["spotd-lab-j1"] == 1


@pytest.mark.parametrize("hours", [-8, pytest.param(8, marks=LATER)])
async def test_a_machine_whose_window_is_closed_by_a_clock_that_is_set_saves_and_stops(
    tmp_path: Path, hours: int
) -> None:
    rig = rig_of(tmp_path, offers=[HERE])
    begin_timeline(rig.store, rig.policy.current, computer(rig), Log())
    hosts, shop, made = Hosts(rig, tmp_path), market(rig), job()
    window = parse_window(f"{NOW - HOUR:%H:%M}-{NOW + HOUR:%H:%M}")
    async with at_work(rig, hosts):
        schedule = Schedule(windows=(window,), timezone="UTC")
        name = await rig.submit(replace(made, spec=replace(made.spec, schedule=schedule)))
        await first_runs(rig, name)
        await rig.clock.sleep(5 * MINUTE)
    later = await set_clock(rig, hours * HOUR)
    async with at_work(later, hosts):
        await later.until(lambda: not shop.not_gone(), within=10 * MINUTE)
        assert stop_reasons(later, name) == [EndReason.WINDOW_CLOSED]
        await later.clock.sleep(HOUR)
        assert len(shop.requests) == 1


async def test_no_machine_makes_room_for_a_job_whose_window_is_about_to_close(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, offers=[HERE], machines_max=1)
    async with at_work(rig, Hosts(rig, tmp_path)):
        name = await rig.submit()
        await first_runs(rig, name)
        await rig.clock.sleep(20 * MINUTE)
        made, closes = urgent(), rig.clock.now() + 8 * MINUTE
        window = parse_window(f"{NOW:%H:%M}-{closes:%H:%M}")
        schedule = Schedule(windows=(window,), timezone="UTC", preempt=True)
        await rig.submit(replace(made, spec=replace(made.spec, schedule=schedule)))
        await rig.clock.sleep(30 * MINUTE)
        assert stop_reasons(rig, name) == []
        assert len(market(rig).requests) == 1
