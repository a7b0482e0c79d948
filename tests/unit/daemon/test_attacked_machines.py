"""Machines that are being stopped, held or moved while their host, market, computer or config does something else."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from spotd.core import enforcement, relocation
from spotd.core.domain.intents import AttemptId
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.daemon.clock import Computer, begin_timeline
from spotd_jobs.spec.fields import parse_window
from spotd_jobs.spec.model import GpuAlternative, MarketChoice, Resources, Schedule
from spotd_providers.contract.errors import OutcomeUnknown, Unavailable
from spotd_providers.contract.values import InstanceState, Interruption, Listing, Loss, ProviderName
from spotd_providers.contract.values import Market as Sold
from tests.unit.core.builders import MINUTE, NOW, job, offer
from tests.unit.daemon.clocks import VirtualClock
from tests.unit.daemon.ledger import BID, KEY, Hosts, Market, at_work, first_runs, reload, rig_of, stop_reasons
from tests.unit.daemon.rig import Log, Rig

pytestmark = pytest.mark.anyio
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)
HERE, CHEAP = offer("o1"), offer("o2", price=100_000)
OTHER = ProviderName("other")
URGENT = replace(job(9, name="urgent"), spec=replace(job(9).spec, priority=10, schedule=Schedule(preempt=True)))
ONE = AttemptId(job=job().id, number=1)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines may be moved, or stopped for another job, minutes after their launch, and any saving is worth it."""
    monkeypatch.setattr(relocation, "DWELL", 3 * MINUTE)
    monkeypatch.setattr(enforcement, "DWELL", 3 * MINUTE)
    monkeypatch.setattr(relocation, "_is_worth", lambda _found: True)


def market(rig: Rig) -> Market:
    assert isinstance(rig.shop, Market)
    return rig.shop


def sleep_of_the_computer(rig: Rig, span: timedelta = 8 * HOUR) -> None:
    """Nothing of the daemon runs meanwhile; its clock goes on."""
    rig.clock.offset += span


async def test_a_move_over_which_the_computer_sleeps_goes_on_from_what_was_saved_last(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, offers=[HERE], moves_max=9)
    hosts, shop = Hosts(rig, tmp_path), market(rig)
    async with at_work(rig, hosts):
        name = await rig.submit()
        await first_runs(rig, name)
        await rig.clock.sleep(5 * MINUTE)
        hosts.mute = True
        shop.offer_index = [HERE, CHEAP]
        await rig.until(lambda: stop_reasons(rig, name) == [EndReason.MIGRATED])
        sleep_of_the_computer(rig)
        host = hosts.known[ONE]
        for saved in ("z1", "z2"):
            hosts.save(host, saved)
        host.exit("stopped", code=143)
        hosts.mute = False
        hosts._over.add(ONE)
        await rig.until(lambda: len(rig.attempts(name)) == 2 and rig.attempts(name)[1].running_at is not None)
        assert hosts.resumed[AttemptId(job=name, number=2)][0] == "z2"
        assert shop.most_alive["spotd-lab-j1"] == 1
        assert shop.requests[-1].offer.offer_id == "o2"
        await rig.cancel(name)
        await rig.until(lambda: not shop.not_gone())
        await rig.clock.sleep(MINUTE)
        assert rig.attempts(name)[0].meter.settled == pytest.approx(shop.billed(key=KEY), rel=0.02), "it ran all night"


@pytest.mark.parametrize("woke", [True, False], ids=["it woke meanwhile", "it stayed paused"])
async def test_a_hold_over_which_the_computer_sleeps_is_over(tmp_path: Path, woke: bool) -> None:
    rig = rig_of(tmp_path, offers=[BID, offer("o2", price=480_000)], hold_max=10 * MINUTE, raise_bids=True)
    hosts, shop = Hosts(rig, tmp_path), market(rig)
    async with at_work(rig, hosts):
        name = await rig.submit()
        await first_runs(rig, name)
        shop.set_state(KEY, InstanceState.PAUSED, Loss.OUTBID)
        await rig.until(lambda: "attempt.held" in rig.kinds())
        sleep_of_the_computer(rig)
        if woke:
            shop.set_state(KEY, InstanceState.RUNNING)
        await rig.clock.sleep(3 * MINUTE)
        assert len(rig.shop.alive()) == 1
        assert shop.most_alive["spotd-lab-j1"] == 1
        if woke:
            assert [a.state for a in rig.attempts(name)] == [AttemptState.RUNNING], rig.kinds()
        else:
            assert rig.attempts(name)[0].end_reason is EndReason.OUTBID
        await rig.cancel(name)
        await rig.until(lambda: not shop.not_gone())
        await rig.clock.sleep(MINUTE)
        assert rig.job(name).spent == pytest.approx(shop.billed(), abs=10_000)


async def test_a_cancel_over_which_the_computer_sleeps_keeps_what_was_saved(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, offers=[HERE])
    hosts, shop = Hosts(rig, tmp_path), market(rig)
    async with at_work(rig, hosts):
        name = await rig.submit()
        await first_runs(rig, name)
        hosts.mute = True
        await rig.cancel(name)
        await rig.clock.sleep(timedelta(seconds=3))
        sleep_of_the_computer(rig)
        hosts.save(hosts.known[ONE], "z1")
        hosts.known[ONE].exit("stopped", code=143)
        await rig.until(lambda: not shop.not_gone(), within=5 * MINUTE)
        await rig.until(lambda: rig.job(name).state is JobState.CANCELLED, within=5 * MINUTE)
        assert rig.job(name).checkpoints[0].name == "z1"


def computer(rig: Rig, step: timedelta = timedelta(0)) -> Computer:
    return Computer(
        wall=lambda: rig.clock.now() + step,
        uptime_s=lambda: (rig.clock.now() - NOW).total_seconds() + 1000,
        boot_id=lambda: "one",
        compare_every_s=1,
    )


@pytest.mark.parametrize(
    ("open_", "step"),
    [
        pytest.param("raise", -2 * HOUR, marks=pytest.mark.lengthy),
        ("raise", 365 * DAY),
        pytest.param("hold", 365 * DAY, marks=pytest.mark.lengthy),
        ("move", -3 * MINUTE),
    ],
    ids=str,
)
async def test_a_clock_that_is_set_while_something_is_open_changes_nothing_of_it(
    tmp_path: Path, open_: str, step: timedelta
) -> None:
    rig = rig_of(tmp_path, offers=[BID], raise_bids=open_ == "raise", hold_max=10 * MINUTE, moves_max=2)
    hosts, shop = Hosts(rig, tmp_path), market(rig)
    begin_timeline(rig.store, rig.policy.current, computer(rig), Log())
    async with at_work(rig, hosts):
        name = await rig.submit()
        await first_runs(rig, name)
        await rig.clock.sleep(4 * MINUTE)
        if open_ == "raise":
            shop.faults["change_bid"].append(OutcomeUnknown("lost", key=KEY))
            shop.floor(430_000)
            await rig.until(lambda: "bid.raising" in rig.kinds())
            shop.faults["instances"].extend([Unavailable("away")] * 1000)
            await rig.clock.sleep(timedelta(seconds=30))
        elif open_ == "hold":
            shop.set_state(KEY, InstanceState.PAUSED, Loss.OUTBID)
            await rig.until(lambda: "attempt.held" in rig.kinds())
            await rig.clock.sleep(2 * MINUTE)
        else:
            shop.offer_index = [BID, CHEAP]
            hosts.deaf = True
            await rig.until(lambda: stop_reasons(rig, name) == [EndReason.MIGRATED])
    later = rig.reborn()
    began = rig.clock.now()
    timeline = begin_timeline(later.store, later.policy.current, computer(rig, step), later.log)
    assert timeline.clock.now() - began in (step, step + timedelta(microseconds=1)), later.log.events()
    rig.clock.offset += step
    shop.faults["instances"].clear()
    for rows in shop.changes.values():
        rows[:] = [(at + step, rate) for at, rate in rows]
    hosts.deaf = False
    async with at_work(later, hosts):
        await later.clock.sleep(5 * MINUTE)
        if open_ == "raise":
            assert [a.state for a in later.attempts(name)] == [AttemptState.RUNNING], later.kinds()
            assert shop.machine_of(KEY).price == 473_000
            assert later.attempts(name)[0].meter.rate == 473_000
        elif open_ == "hold":
            assert [a.state for a in later.attempts(name)] == [AttemptState.RUNNING], "held for seven of ten minutes"
            await later.clock.sleep(4 * MINUTE)
            assert later.attempts(name)[0].end_reason is EndReason.OUTBID
        else:
            assert shop.requests[-1].offer.offer_id == "o2"
        assert shop.most_alive["spotd-lab-j1"] == 1
        await later.cancel(name)
        await later.until(lambda: not shop.not_gone())
        await later.clock.sleep(MINUTE)
        assert later.job(name).spent == pytest.approx(shop.billed(), abs=5_000)


async def test_two_providers_of_one_account_end_nothing_of_each_other(tmp_path: Path) -> None:
    clock = VirtualClock()
    first, second = Market(clock, offers=[HERE]), Market(clock, name=OTHER, offers=[])
    second.machines, second.changes = first.machines, first.changes
    plain = second.instances

    async def instances() -> Listing:
        listing = await plain()
        rows = tuple(replace(row, ref=replace(row.ref, provider=OTHER)) for row in listing.instances)
        return replace(listing, instances=rows)

    second.instances = instances  # type: ignore[method-assign]  # the same account, asked by another name
    rig = rig_of(tmp_path, clock=clock, shops=[first, second])
    hosts = Hosts(rig, tmp_path)
    async with at_work(rig, hosts):
        name = await rig.submit()
        await first_runs(rig, name)
        await rig.clock.sleep(10 * MINUTE)
        assert len(first.alive()) == 1, rig.kinds()
        assert [a.state for a in rig.attempts(name)] == [AttemptState.RUNNING], rig.kinds()
        assert len(first.requests) == 1
        await rig.cancel(name)
        await rig.until(lambda: not first.not_gone())


@pytest.mark.parametrize("open_", ["runs", "left", "left, and its first list fails"])
async def test_a_provider_that_is_taken_out_of_the_config_and_put_back(tmp_path: Path, open_: str) -> None:
    clock = VirtualClock()
    first, second = Market(clock, offers=[BID]), Market(clock, name=OTHER, offers=[])
    rig = rig_of(tmp_path, clock=clock, shops=[first, second], hold_max=10 * MINUTE, moves_max=2)
    hosts = Hosts(rig, tmp_path)
    async with at_work(rig, hosts):
        name = await rig.submit()
        await first_runs(rig, name)
        await rig.clock.sleep(4 * MINUTE)
        if open_ == "held":
            first.set_state(KEY, InstanceState.PAUSED, Loss.OUTBID)
            await rig.until(lambda: "attempt.held" in rig.kinds())
        if open_.startswith("left"):
            hosts.deaf = True
            first.offer_index = [BID, CHEAP]
            await rig.until(lambda: stop_reasons(rig, name) == [EndReason.MIGRATED])
            hosts.deaf = False
    both = rig.policy.current
    second.offer_index = [replace(offer("s1", price=390_000), provider=OTHER)]
    without = Rig(
        tmp_path,
        clock=clock,
        shops=[second],
        policy=replace(both, providers={OTHER: both.providers[OTHER]}),
        store=rig.store,
        read_every_s=20.0,
        list_every_s=20.0,
    )
    async with at_work(without, hosts):
        hosts.rig = rig
        await without.clock.sleep(15 * MINUTE)
        alive = len(first.alive()) + len(second.alive())
        assert alive <= 1, without.kinds()
        if open_ == "runs":
            assert [a.state for a in without.attempts(name)] == [AttemptState.RUNNING], without.kinds()
        await without.clock.sleep(25 * MINUTE)
    back = rig.reborn()
    back.policy.reload(both)
    if "fails" in open_:
        first.faults["instances"].append(Unavailable("in a moment"))
    async with at_work(back, hosts):
        await back.clock.sleep(5 * MINUTE)
        assert len(first.not_gone()) + len(second.not_gone()) == 1, back.kinds()
        await back.cancel(name)
        await back.until(lambda: not first.not_gone() and not second.not_gone())
        await back.clock.sleep(2 * MINUTE)
        assert back.job(name).spent == pytest.approx(first.billed() + second.billed(), rel=0.03)


@pytest.mark.parametrize("later", [40 * MINUTE, DAY + 40 * MINUTE], ids=["soon", "a day after its proof"])
async def test_the_end_of_a_machine_that_no_list_shows_waits_half_a_minute_and_not_for_ever(
    tmp_path: Path, later: timedelta
) -> None:
    rig = rig_of(tmp_path, offers=[HERE])
    hosts, shop = Hosts(rig, tmp_path), market(rig)
    async with at_work(rig, hosts):
        name = await rig.submit()
        await first_runs(rig, name)
        shop.always["terminate"] = Unavailable("not now")
        await rig.cancel(name)
        await rig.until(lambda: rig.job(name).state is JobState.CANCELLED)
    sleep_of_the_computer(rig, later)
    shop.always = {"instances": Unavailable("for ever")}
    again = rig.reborn()
    begun = again.clock.now()
    async with at_work(again, hosts):
        await again.until(lambda: not shop.not_gone())
    waited = again.clock.now() - begun
    assert (waited >= timedelta(seconds=30)) is (later < DAY)
    assert waited <= 2 * MINUTE


async def test_a_cancel_a_move_and_a_preemption_of_one_machine_end_it_once(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, offers=[HERE], moves_max=2, machines_max=1)
    hosts, shop = Hosts(rig, tmp_path), market(rig)
    async with at_work(rig, hosts):
        name = await rig.submit()
        await first_runs(rig, name)
        await rig.clock.sleep(5 * MINUTE)
        shop.offer_index = [HERE, CHEAP]
        await rig.until(lambda: rig.job(name).moves.proposed is not None)
        urgent = await rig.submit(URGENT)
        await rig.cancel(name)
        await rig.until(lambda: bool(rig.attempts(urgent)) and rig.attempts(urgent)[0].running_at is not None)
        await rig.clock.sleep(10 * MINUTE)
        assert rig.job(name).state is JobState.CANCELLED
        assert len(rig.attempts(name)) == 1
        assert len(shop.requests) == 2
        assert len(shop.alive()) == 1
        assert shop.counts["terminate"] == 1


async def test_what_a_host_wrote_for_two_hours_and_sends_at_once_spoils_nothing(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, offers=[HERE, offer("o2", price=410_000)])
    hosts, shop = Hosts(rig, tmp_path), market(rig)
    async with at_work(rig, hosts):
        name = await rig.submit()
        await first_runs(rig, name)
        await rig.clock.sleep(4 * MINUTE)
        hosts.mute = True
        await rig.clock.sleep(45 * MINUTE)
        hosts.mute = False
        hosts._over.add(ONE)
        await rig.until(lambda: len(rig.attempts(name)) == 2 and rig.attempts(name)[1].running_at is not None)
        await rig.clock.sleep(10 * MINUTE)
        newest = rig.job(name).checkpoints[0]
        for number in range(30):
            hosts.known[ONE].beat("run")
            hosts.save(hosts.known[ONE], f"late{number}")
        hosts.known[ONE].exit("succeeded")
        await rig.clock.sleep(5 * MINUTE)
        assert rig.job(name).state is JobState.RUNNING, rig.kinds()
        assert [c.name for c in rig.job(name).checkpoints if c.name.startswith("late")] == []
        assert rig.job(name).checkpoints[0].at >= newest.at
        assert len(shop.alive()) == 1
        assert shop.most_alive["spotd-lab-j1"] == 1
        assert rig.attempts(name)[0].meter.settled == pytest.approx(shop.billed(key=KEY), rel=0.03)


async def test_a_notice_for_a_machine_that_is_being_moved(tmp_path: Path) -> None:
    here = replace(HERE, interruption=Interruption.NOTICE)
    rig = rig_of(tmp_path, offers=[here], moves_max=2)
    hosts, shop = Hosts(rig, tmp_path), market(rig)
    async with at_work(rig, hosts):
        name = await rig.submit()
        await first_runs(rig, name)
        await rig.clock.sleep(4 * MINUTE)
        hosts.deaf = True
        shop.offer_index = [here, replace(CHEAP, interruption=Interruption.NOTICE)]
        await rig.until(lambda: stop_reasons(rig, name) == [EndReason.MIGRATED])
        machine = shop.machine_of(KEY)
        shop.machines[machine.ref.instance_id] = replace(machine, notice_at=rig.clock.now() + 2 * MINUTE)
        await rig.clock.sleep(MINUTE)
        hosts.save(hosts.known[ONE], "last")
        hosts.known[ONE].exit("stopped", code=143)
        await rig.clock.sleep(MINUTE)
        shop.set_state(KEY, InstanceState.GONE, Loss.PREEMPTED)
        hosts.deaf = False
        hosts._over.add(ONE)
        await rig.until(lambda: len(rig.attempts(name)) == 2 and rig.attempts(name)[1].running_at is not None)
        assert hosts.resumed[AttemptId(job=name, number=2)][0] == "last"
        assert shop.requests[-1].offer.offer_id == "o2"
        await rig.clock.sleep(5 * MINUTE)
        assert len(shop.alive()) == 1
        assert rig.attempts(name)[0].meter.settled == pytest.approx(shop.billed(key=KEY), abs=4_000)


async def test_a_store_that_comes_back_with_older_objects_is_resumed_from_what_it_has(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, offers=[HERE, offer("o2", price=410_000)])
    hosts, shop = Hosts(rig, tmp_path), market(rig)
    objects = hosts.objects

    def keys() -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for item in objects.list(""):
            found[item.key] = objects.get(item.key, bytes_max=10_000_000)
        return found

    async with at_work(rig, hosts):
        name = await rig.submit()
        await first_runs(rig, name)
        await rig.clock.sleep(4 * MINUTE)
        older, had = keys(), {c.name for c in rig.job(name).checkpoints}
        await rig.clock.sleep(8 * MINUTE)
        for key in keys():
            objects.delete([key])
        for key, data in older.items():
            objects.put(key, data)
        await rig.clock.sleep(2 * MINUTE)
        assert [a.state for a in rig.attempts(name)] == [AttemptState.RUNNING], rig.kinds()
        saved_since = [c.name for c in rig.job(name).checkpoints]
        shop.set_state(KEY, InstanceState.GONE, Loss.PREEMPTED)
        await rig.until(lambda: len(rig.attempts(name)) == 2 and rig.attempts(name)[1].running_at is not None)
        resumed = hosts.resumed[AttemptId(job=name, number=2)]
        assert resumed, (saved_since, had)
        assert len(shop.alive()) == 1
        assert all(list(objects.list(f"jobs/{name}/attempts/1/checkpoints/{one}.json")) for one in resumed)


async def test_a_hold_through_which_the_daemon_is_dead_is_over(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, hold_max=10 * MINUTE)
    hosts, shop = Hosts(rig, tmp_path), market(rig)
    async with at_work(rig, hosts):
        name = await rig.submit()
        await first_runs(rig, name)
        shop.set_state(KEY, InstanceState.PAUSED, Loss.OUTBID)
        await rig.until(lambda: "attempt.held" in rig.kinds())
    await rig.clock.sleep(HOUR)
    later = rig.reborn()
    async with at_work(later, hosts):
        await later.until(lambda: later.attempts(name)[0].end_reason is EndReason.OUTBID, within=3 * MINUTE)
        await later.until(lambda: len(shop.alive()) == 1, within=5 * MINUTE)


async def test_fewer_machines_allowed_while_a_move_is_open_buys_none_above_it(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, offers=[HERE, offer("o3", price=410_000)], moves_max=2, machines_max=2)
    hosts, shop = Hosts(rig, tmp_path), market(rig)
    async with at_work(rig, hosts):
        first, second = await rig.submit(), await rig.submit(job(2))
        await first_runs(rig, first)
        await first_runs(rig, second)
        await rig.clock.sleep(4 * MINUTE)
        shop.offer_index = [*shop.offer_index, CHEAP]
        await rig.until(lambda: bool(stop_reasons(rig, first) + stop_reasons(rig, second)))
        reload(rig, machines_max=1)
        await rig.clock.sleep(10 * MINUTE)
        assert len(shop.alive()) == 1
        assert len(shop.requests) == 2
        reload(rig, machines_max=2)
        await rig.until(lambda: len(shop.alive()) == 2, within=10 * MINUTE)


@pytest.mark.parametrize("order", ["right last", "wrong last"])
@pytest.mark.parametrize("wrong", [InstanceState.GONE, InstanceState.PAUSED], ids=str)
async def test_two_rows_for_one_machine_do_not_end_it(tmp_path: Path, wrong: InstanceState, order: str) -> None:
    rig = rig_of(tmp_path, offers=[HERE])
    hosts, shop = Hosts(rig, tmp_path), market(rig)
    plain, doubled = shop.instances, {"on": False}

    async def instances() -> Listing:
        listing = await plain()
        rows = list(listing.instances)
        if doubled["on"]:
            twice = [replace(row, state=wrong) for row in rows]
            rows = [*twice, *rows] if order == "right last" else [*rows, *twice]
        return replace(listing, instances=tuple(rows))

    shop.instances = instances  # type: ignore[method-assign]  # a market that states a row twice
    async with at_work(rig, hosts):
        name = await rig.submit()
        await first_runs(rig, name)
        doubled["on"] = True
        await rig.clock.sleep(5 * MINUTE)
        doubled["on"] = False
        await rig.clock.sleep(2 * MINUTE)
        assert [a.state for a in rig.attempts(name)] == [AttemptState.RUNNING], rig.kinds()
        assert len(shop.alive()) == 1
        await rig.cancel(name)
        await rig.until(lambda: not shop.not_gone())
        await rig.clock.sleep(MINUTE)
        assert rig.job(name).spent == pytest.approx(shop.billed(), abs=5_000)


WAITS = Resources(
    gpu=(GpuAlternative(name="RTX_4090", count=1),), market=MarketChoice.AUTO, on_demand_after=20 * MINUTE
)
DEMAND = replace(offer("d1", price=450_000), market=Sold.ON_DEMAND, interruption=Interruption.NEVER)


async def test_time_in_a_closed_window_does_not_count_for_on_demand(tmp_path: Path) -> None:
    schedule = Schedule(windows=(parse_window("11:00-12:10"), parse_window("13:00-15:00")), timezone="UTC")
    rig = rig_of(tmp_path, offers=[DEMAND, offer("o1", price=900_000)])
    hosts, shop = Hosts(rig, tmp_path), market(rig)
    async with at_work(rig, hosts):
        await rig.submit(job(resources=WAITS, spec={"schedule": schedule}))
        await rig.clock.sleep(61 * MINUTE)
        assert shop.requests == [], "nine minutes of twenty at the most"
        await rig.until(lambda: bool(shop.requests), within=40 * MINUTE)
        waited = rig.clock.now() - (NOW + HOUR)
        assert timedelta(minutes=5) <= waited <= timedelta(minutes=21), waited


@pytest.mark.parametrize("got_on", [True, False], ids=["it saved", "it saved nothing"])
async def test_the_wait_for_on_demand_begins_anew_only_after_progress(tmp_path: Path, got_on: bool) -> None:
    rig = rig_of(tmp_path, offers=[DEMAND, offer("o1", price=900_000)])
    hosts, shop = Hosts(rig, tmp_path), market(rig)
    async with at_work(rig, hosts):
        hosts.mute = not got_on
        await rig.submit(job(resources=WAITS))
        await rig.clock.sleep(15 * MINUTE)
        assert shop.requests == []
        shop.offer_index = [DEMAND, HERE]
        await rig.until(lambda: len(shop.requests) == 1, within=3 * MINUTE)
        shop.offer_index = [DEMAND, offer("o1", price=900_000)]
        await rig.clock.sleep(2 * MINUTE)
        shop.set_state(KEY, InstanceState.GONE, Loss.PREEMPTED)
        lost = rig.clock.now()
        await rig.until(lambda: len(shop.requests) == 2, within=40 * MINUTE)
        waited = rig.clock.now() - lost
        if got_on:
            assert timedelta(minutes=19) <= waited <= timedelta(minutes=22), waited
        else:
            assert waited <= timedelta(minutes=7), waited


async def test_a_machine_is_lost_whose_clock_is_ten_minutes_behind_and_whose_host_is_read_seldom(
    tmp_path: Path,
) -> None:
    rig = rig_of(tmp_path, offers=[HERE], every_s=60)
    hosts, shop = Hosts(rig, tmp_path), market(rig)
    hosts.clocks_off = -10 * MINUTE
    async with at_work(rig, hosts):
        name = await rig.submit()
        await first_runs(rig, name)
        await rig.clock.sleep(10 * MINUTE + timedelta(seconds=33))
        shop.set_state(KEY, InstanceState.GONE, Loss.PREEMPTED)
        await rig.until(lambda: rig.attempts(name)[0].end_reason is not None, within=5 * MINUTE)
        over = rig.attempts(name)[0].meter.settled - shop.billed(key=KEY)
        assert 0 <= over <= 400_000 // 60, "up to the list that lacked it first"
