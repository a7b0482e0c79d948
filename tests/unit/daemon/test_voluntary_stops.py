"""Healthy machines over the daemon's own parts: no wrong page, outage or refusal has them stopped for nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest

from spotd.core import enforcement, relocation
from spotd.core import running as claims
from spotd.core.domain.intents import AttemptId, JobId
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.domain.world import VerdictKind
from spotd.store import StateUnavailable
from spotd_jobs.objects.api import ObjectMissing, StoreUnavailable
from spotd_jobs.objects.folder import FolderStore
from spotd_jobs.spec.model import Schedule
from spotd_jobs.wire.grant import Grant
from spotd_providers.contract.errors import OfferGone, Unavailable
from spotd_providers.contract.values import (
    AttemptKey,
    InstanceState,
    Launched,
    LaunchRequest,
    Loss,
    MicroUsdPerHour,
    Offer,
    ProviderName,
)
from tests.unit.core.builders import MINUTE, SHOP, job, offer, shop_policy
from tests.unit.daemon.clocks import VirtualClock
from tests.unit.daemon.host import Host
from tests.unit.daemon.rig import Rig
from tests.unit.daemon.shop import Shop

pytestmark = pytest.mark.anyio
OTHER = ProviderName("other")
HERE, CHEAP = offer("o1"), offer("o2", price=100_000)


class Refusing(Shop):
    """Lists what it never sells."""

    refused: frozenset[str] = frozenset()

    async def launch(self, request: LaunchRequest) -> Launched:
        if request.offer.offer_id in self.refused:
            self.requests.append(request)
            raise OfferGone("it is not for sale")
        return await super().launch(request)


class Interruptible(FolderStore):
    """A store that can be away for the daemon alone."""

    is_away = False

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name.startswith("_") or name == "is_away" or not callable(value) or not self.is_away:
            return value

        def fail(*_args: Any, **_kwargs: Any) -> Any:
            raise StoreUnavailable("the store does not answer")

        return fail


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines may be moved, or stopped for another job, minutes after their launch, and any saving is worth it."""
    monkeypatch.setattr(relocation, "DWELL", 3 * MINUTE)
    monkeypatch.setattr(enforcement, "DWELL", 3 * MINUTE)
    monkeypatch.setattr(relocation, "_is_worth", lambda _found: True)


def rig_of(folder: Path, *, shops: Callable[[VirtualClock], list[Shop]] | None = None, **policy: Any) -> Rig:
    clock = VirtualClock()
    sold: list[Shop] = [Refusing(clock, offers=[HERE])] if shops is None else shops(clock)
    rules = shop_policy(moves_max=100, **policy)
    known = {SHOP: rules.providers[SHOP], OTHER: replace(rules.providers[SHOP], name=OTHER)}
    return Rig(
        folder,
        clock=clock,
        shops=sold,
        policy=replace(rules, providers=known),
        objects=Interruptible(folder / "objects"),
        read_every_s=20.0,
        list_every_s=20.0,
    )


async def work(rig: Rig, folder: Path) -> None:
    """Every host beats, saves now and then, and saves and exits when it is ordered to."""
    objects, hosts, turn = FolderStore(folder / "objects"), dict[AttemptId, Host](), 0
    while True:
        await rig.clock.sleep(MINUTE / 3)
        turn += 1
        for machine in [m for shop in rig.shops for m in shop.alive()]:
            _, _, name, number = machine.key.split("-")
            identity = AttemptId(job=JobId(name), number=int(number))
            host = hosts.setdefault(identity, Host(objects, identity))
            try:
                data = objects.get(f"jobs/{name}/attempts/{number}/grant.json", bytes_max=1_000_000)
            except ObjectMissing:
                continue
            is_first = host.seq < 0
            host.beat("run")
            if is_first or turn % 3 == 0:
                host.checkpoint(f"{number}-{turn:05d}", b"x", created_at=rig.clock.now().isoformat())
            if Grant.model_validate_json(data).orders.stop is not None:
                host.exit("stopped", code=143)


@asynccontextmanager
async def running(rig: Rig, folder: Path) -> AsyncIterator[JobId]:
    """A job that has run for so long that it may move."""
    async with rig.running(), anyio.create_task_group() as group:
        group.start_soon(work, rig, folder)
        name = await rig.submit()
        await rig.until(lambda: bool(rig.attempts(name)) and rig.attempts(name)[-1].running_at is not None)
        await rig.clock.sleep(5 * MINUTE)
        yield name
        group.cancel_scope.cancel()


def stop_reasons(rig: Rig, name: JobId) -> list[EndReason]:
    return [item.stop.reason for item in rig.attempts(name) if item.stop is not None]


async def show(rig: Rig, offers: Sequence[Offer], *, pages: int) -> None:
    """Let so many polls read these offers."""
    before = rig.offer_cache.snapshot().by_provider[SHOP].at
    seen: set[datetime | None] = set()
    rig.shops[0].offer_index = list(offers)
    while len(seen) < pages:
        await rig.clock.sleep(timedelta(seconds=1))
        at = rig.offer_cache.snapshot().by_provider[SHOP].at
        if at != before and rig.offer_cache.page(SHOP) is not None:
            seen.add(at)


async def test_one_page_of_prices_a_hundred_times_lower_moves_nothing(tmp_path: Path) -> None:
    rig = rig_of(tmp_path)
    calm = [HERE, offer("o2", price=450_000)]
    wild = [replace(one, gpu_price=MicroUsdPerHour(one.gpu_price // 100)) for one in calm]
    async with running(rig, tmp_path) as name:
        for _ in range(3):
            await show(rig, calm, pages=2)
            await show(rig, wild, pages=1)
        await show(rig, calm, pages=4)
        assert stop_reasons(rig, name) == []
        assert len(rig.shop.requests) == 1
        await show(rig, [HERE, CHEAP], pages=2)
        await rig.until(lambda: stop_reasons(rig, name) == [EndReason.MIGRATED])


async def test_a_machine_stays_while_the_store_is_away_and_something_is_cheaper(tmp_path: Path) -> None:
    rig = rig_of(tmp_path)
    async with running(rig, tmp_path) as name:
        assert isinstance(rig.objects, Interruptible)
        rig.objects.is_away = True
        await rig.clock.sleep(2 * MINUTE)
        rig.shop.offer_index = [HERE, CHEAP]
        await rig.clock.sleep(20 * MINUTE)
        assert stop_reasons(rig, name) == []
        rig.objects.is_away = False
        await rig.until(lambda: stop_reasons(rig, name) == [EndReason.MIGRATED])


async def test_a_machine_stays_while_the_state_cannot_be_written_and_something_is_cheaper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_work: object) -> None:
        raise StateUnavailable("the disk with the state is full", hint="free some space there")

    rig = rig_of(tmp_path)
    async with running(rig, tmp_path) as name:
        with monkeypatch.context() as patched:
            patched.setattr(rig.store, "tx", refused)
            rig.shop.offer_index = [HERE, CHEAP]
            await rig.clock.sleep(6 * MINUTE)
            assert rig.grant(name, 1).orders.stop is None
            assert len(rig.shop.alive()) == 1
        await rig.until(lambda: stop_reasons(rig, name) == [EndReason.MIGRATED])


async def test_no_machine_is_stopped_for_another_job_while_the_store_is_away(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, machines_max=1)
    urgent = replace(job(9, name="urgent"), spec=replace(job(9).spec, priority=10, schedule=Schedule(preempt=True)))
    async with running(rig, tmp_path) as name:
        rig.shop.offer_index = [HERE, offer("o3", price=390_000)]
        assert isinstance(rig.objects, Interruptible)
        rig.objects.is_away = True
        await rig.clock.sleep(2 * MINUTE)
        await rig.submit(urgent)
        await rig.clock.sleep(20 * MINUTE)
        assert stop_reasons(rig, name) == []
        rig.objects.is_away = False
        await rig.until(lambda: stop_reasons(rig, name) == [EndReason.MADE_ROOM])


async def test_a_machine_stays_while_its_provider_is_away_and_another_one_is_cheaper(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, shops=lambda clock: [Shop(clock, offers=[HERE]), Shop(clock, name=OTHER, offers=[])])
    async with running(rig, tmp_path) as name:
        first, second = rig.shops
        first.always["instances"] = first.always["offers"] = first.always["terminate"] = Unavailable("away")
        await rig.clock.sleep(2 * MINUTE)
        second.offer_index = [replace(CHEAP, provider=OTHER)]
        await rig.clock.sleep(35 * MINUTE)
        assert stop_reasons(rig, name) == []
        assert rig.attempts(name)[-1].state is AttemptState.RUNNING
        first.always.clear()
        await rig.until(lambda: any(m.key.endswith("-2") for m in second.alive()))
        assert stop_reasons(rig, name) == [EndReason.MIGRATED]


@pytest.mark.lengthy
async def test_a_job_is_moved_seldom_to_what_is_listed_and_never_sold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "PATIENCE_FIRST", 10 * MINUTE)
    rig = rig_of(tmp_path)
    assert isinstance(rig.shop, Refusing)
    rig.shop.refused = frozenset({"o2"})
    async with running(rig, tmp_path) as name:
        rig.shop.offer_index = [HERE, CHEAP]
        await rig.clock.sleep(25 * MINUTE)
        stops = [item.stop.ordered_at for item in rig.attempts(name) if item.stop is not None]
        assert len(stops) == 2
        assert stops[1] - stops[0] >= 10 * MINUTE
        assert rig.kinds().count("job.claim_failed") == 2
        moves = rig.job(name).moves
        assert (moves.refusals, moves.claim) == (2, None)
    later = rig.reborn()
    async with later.running():
        await later.clock.sleep(10 * MINUTE)
        assert later.job(name).moves.not_before == moves.not_before, "it is remembered over a restart"


async def test_a_proposal_is_seen_twice_across_a_restart(tmp_path: Path) -> None:
    rig = rig_of(tmp_path)
    async with running(rig, tmp_path) as name:
        rig.shop.offer_index = [HERE, CHEAP]
        await rig.until(lambda: rig.job(name).moves.proposed is not None)
        proposed = rig.job(name).moves.proposed
        assert proposed is not None
        assert dict(proposed.readings).keys() == {"offers of shop", "machines of shop", "grants of the store"}
        assert stop_reasons(rig, name) == []
    later = rig.reborn()
    assert later.job(name).moves.proposed == proposed
    async with later.running():
        await later.until(lambda: stop_reasons(later, name) == [EndReason.MIGRATED])


async def test_a_held_machine_that_vanishes_frees_its_job_and_why_says_that_it_is_held(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, hold_max=30 * MINUTE)
    rig.shop.offer_index = [replace(HERE, pays_bid=True)]
    async with running(rig, tmp_path) as name:
        key = AttemptKey("spotd-lab-j1-1")
        rig.shop.set_state(key, InstanceState.PAUSED, Loss.OUTBID)
        await rig.until(lambda: "attempt.held" in rig.kinds())
        await rig.clock.sleep(MINUTE)
        state = rig.control_loop.state
        assert state is not None
        assert state.verdicts[name].kind is VerdictKind.HELD
        del rig.shop.machines[rig.shop.machine_of(key).ref.instance_id]
        gone_at = rig.clock.now()
        await rig.until(lambda: rig.attempts(name)[0].end_reason is EndReason.OUTBID)
        assert rig.clock.now() - gone_at <= 2 * MINUTE


# Two orders that overlap: what is decided first is not yet done when the second one comes.


URGENT = replace(job(9, name="urgent"), spec=replace(job(9).spec, priority=10, schedule=Schedule(preempt=True)))


async def test_a_victim_goes_on_where_the_job_it_made_room_for_is_cancelled_meanwhile(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, machines_max=1)
    async with running(rig, tmp_path) as name:
        urgent = await rig.submit(URGENT)
        await rig.until(lambda: stop_reasons(rig, name) == [EndReason.MADE_ROOM])
        await rig.cancel(urgent)
        await rig.until(lambda: len(rig.attempts(name)) == 2 and rig.attempts(name)[-1].running_at is not None)
        await rig.clock.sleep(30 * MINUTE)
        assert stop_reasons(rig, name) == [EndReason.MADE_ROOM], "and is stopped for nothing else"
        assert rig.attempts(urgent) == ()
        assert [m.key for m in rig.shop.alive()] == ["spotd-lab-j1-2"]


async def test_nothing_is_bought_above_a_ceiling_that_is_lowered_while_a_move_is_open(tmp_path: Path) -> None:
    rig = rig_of(tmp_path)
    async with running(rig, tmp_path) as name:
        rig.shop.offer_index = [HERE, CHEAP]
        await rig.until(lambda: stop_reasons(rig, name) == [EndReason.MIGRATED])
        policy = rig.commits.policy
        rules = replace(policy.providers[SHOP], fee_ppm=6_000_000)
        rig.policy.reload(replace(policy, providers={**policy.providers, SHOP: rules}))
        await rig.clock.sleep(20 * MINUTE)
        assert len(rig.shop.requests) == 1, "$0.60 by the fee of today, where $0.50 is accepted"
        assert rig.job(name).state is JobState.WAITING_PRICE
        assert rig.shop.alive() == []
        rig.policy.reload(policy)
        await rig.until(lambda: bool(rig.shop.alive()))
        assert rig.shop.requests[-1].offer.offer_id == "o2"


async def test_a_job_whose_target_is_sold_to_another_goes_back_and_stays(tmp_path: Path) -> None:
    rig = rig_of(tmp_path)
    async with running(rig, tmp_path) as name:
        rig.shop.offer_index = [HERE, CHEAP]
        await rig.until(lambda: stop_reasons(rig, name) == [EndReason.MIGRATED])
        rig.shop.offer_index = [HERE]
        await rig.until(lambda: len(rig.attempts(name)) == 2 and rig.attempts(name)[-1].running_at is not None)
        for _ in range(6):  # it is listed now and then, and gone before anyone can have it
            await show(rig, [HERE, CHEAP], pages=1)
            await show(rig, [HERE], pages=2)
        assert stop_reasons(rig, name) == [EndReason.MIGRATED]
        assert {machine.key for machine in rig.shop.alive()} == {"spotd-lab-j1-2"}


async def test_a_job_that_is_cancelled_while_it_moves_buys_nothing_more(tmp_path: Path) -> None:
    rig = rig_of(tmp_path)
    async with running(rig, tmp_path) as name:
        rig.shop.offer_index = [HERE, CHEAP]
        await rig.until(lambda: stop_reasons(rig, name) == [EndReason.MIGRATED])
        await rig.cancel(name)
        await rig.until(lambda: rig.job(name).state is JobState.CANCELLED)
        await rig.clock.sleep(10 * MINUTE)
        assert len(rig.shop.requests) == 1
        assert rig.shop.not_gone() == []


async def test_a_preemption_goes_on_over_a_restart_and_stops_one_machine_alone(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, machines_max=2)
    async with running(rig, tmp_path) as name:
        rig.shop.offer_index = [HERE, offer("o2", price=410_000), offer("o3", price=420_000)]
        second = await rig.submit(job(2))
        await rig.until(lambda: bool(rig.attempts(second)) and rig.attempts(second)[-1].running_at is not None)
        await rig.clock.sleep(5 * MINUTE)
        await rig.submit(URGENT)
        await rig.until(lambda: stop_reasons(rig, name) + stop_reasons(rig, second) == [EndReason.MADE_ROOM])
    later = rig.reborn()
    async with later.running(), anyio.create_task_group() as group:
        group.start_soon(work, later, tmp_path)
        await later.until(lambda: any(a.running_at is not None for a in later.attempts(URGENT.id)))
        await later.clock.sleep(20 * MINUTE)
        group.cancel_scope.cancel()
    stopped = stop_reasons(later, name) + stop_reasons(later, second)
    assert stopped == [EndReason.MADE_ROOM]
    assert len(later.shop.alive()) == 2


async def test_a_notice_a_row_that_says_gone_and_a_store_that_is_away_cost_no_healthy_machine(tmp_path: Path) -> None:
    """The notice never comes true, and the row is wrong once."""
    rig = rig_of(tmp_path)
    async with running(rig, tmp_path) as name:
        assert isinstance(rig.objects, Interruptible)
        key = AttemptKey("spotd-lab-j1-1")
        machine = rig.shop.machine_of(key)
        rig.shop.machines[machine.ref.instance_id] = replace(machine, notice_at=rig.clock.now() + 2 * MINUTE)
        await rig.clock.sleep(MINUTE / 2)
        rig.objects.is_away = True
        rig.shop.set_state(key, InstanceState.GONE)
        lists = rig.shop.counts["instances"]
        await rig.until(lambda: rig.shop.counts["instances"] > lists)
        rig.shop.machines[machine.ref.instance_id] = machine
        await rig.clock.sleep(15 * MINUTE)
        rig.objects.is_away = False
        await rig.clock.sleep(15 * MINUTE)
        assert [a.state for a in rig.attempts(name)] == [AttemptState.RUNNING]
        assert len(rig.shop.requests) == 1


async def test_a_fee_that_rises_while_a_machine_is_held_keeps_it_from_waking_above_the_ceiling(tmp_path: Path) -> None:
    rig = rig_of(tmp_path, hold_max=60 * MINUTE)
    rig.shop.offer_index = [replace(HERE, pays_bid=True)]
    async with running(rig, tmp_path) as name:
        key = AttemptKey("spotd-lab-j1-1")
        rig.shop.set_state(key, InstanceState.PAUSED, Loss.OUTBID)
        await rig.until(lambda: "attempt.held" in rig.kinds())
        policy = rig.commits.policy
        rules = replace(policy.providers[SHOP], fee_ppm=1_300_000)
        rig.policy.reload(replace(policy, providers={**policy.providers, SHOP: rules}))
        await rig.until(lambda: not rig.shop.not_gone(), within=10 * MINUTE)
        await rig.clock.sleep(10 * MINUTE)
        assert len(rig.shop.requests) == 1, "$0.52 by the fee of today, where $0.50 is accepted"
        assert rig.job(name).state in {JobState.WAITING_PRICE, JobState.RECOVERING}


async def test_a_claim_of_a_job_whose_limit_is_lowered_stops_no_second_machine(tmp_path: Path) -> None:
    """The urgent job can pay for the machine until another one is stopped for it."""
    rig = rig_of(tmp_path, machines_max=1)
    async with running(rig, tmp_path) as name:
        urgent = await rig.submit(URGENT)
        await rig.until(lambda: stop_reasons(rig, name) == [EndReason.MADE_ROOM])
        dear = [replace(HERE, gpu_price=MicroUsdPerHour(900_000)), offer("o4", price=950_000)]
        rig.shop.offer_index = dear
        rig.pollers[SHOP].ask_again()  # these prices are known before the machine has saved
        await rig.until(lambda: not rig.shop.alive())
        rig.shop.offer_index = [offer("o5", price=350_000), *dear]
        await rig.clock.sleep(40 * MINUTE)
        assert rig.shop.most_alive["spotd-lab-j1"] <= 1
        assert len(rig.shop.alive()) == 1
        assert [m.key.split("-")[2] for m in rig.shop.alive()] == [urgent]
        assert stop_reasons(rig, name) == [EndReason.MADE_ROOM]
