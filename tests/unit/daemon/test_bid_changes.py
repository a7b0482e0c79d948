"""Bids of running machines over the daemon's own parts: one call for each change, settled whatever becomes of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from spotd.api.requests import JobQuery
from spotd.core import bids, relocation
from spotd.core.domain.intents import AttemptId, JobId
from spotd.core.domain.jobs import Moves
from spotd.core.domain.plan import Plan
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.domain.world import World
from spotd.daemon.executor import CALLS_PER_PROVIDER
from spotd_providers.contract.errors import OutcomeUnknown, RequestRejected, Unavailable
from spotd_providers.contract.values import AttemptKey, InstanceState, Loss, MicroUsdPerHour
from tests.unit.core.builders import MINUTE, job, offer, shop_policy
from tests.unit.daemon.rig import Rig
from tests.unit.daemon.shop import Fault, Hang

pytestmark = pytest.mark.anyio
KEY = AttemptKey("spotd-lab-j1-1")


@pytest.fixture
def look_every_s() -> float:
    """How often hosts and machines are read; a test of hours looks less often."""
    return 20.0


@pytest.fixture
def rig(tmp_path: Path, look_every_s: float) -> Rig:
    made = Rig(
        tmp_path,
        policy=shop_policy(raise_bids=True, hold_max=10 * MINUTE),
        read_every_s=look_every_s,
        list_every_s=look_every_s,
    )
    made.shop.offer_index = [offer("o1", price=400_000, pays_bid=True)]
    return made


def floor(rig: Rig, price: int, *, bid: int | None = None) -> None:
    """The market states so much as the lowest bid that wins for the job's machine."""
    machine = rig.shop.machine_of(KEY)
    placed = machine.price if bid is None else MicroUsdPerHour(bid)
    rig.shop.machines[machine.ref.instance_id] = replace(machine, bid_floor=MicroUsdPerHour(price), price=placed)


@asynccontextmanager
async def running(rig: Rig) -> AsyncIterator[JobId]:
    async with rig.running():
        name = await rig.submit()
        host = await rig.until_running(name, 1)
        host.checkpoint("step-1")
        host.beat("run")
        floor(rig, 100_000, bid=440_000)
        yield name


async def test_a_bid_is_raised_once_and_its_echo_raises_nothing(rig: Rig) -> None:
    async with running(rig) as name:
        floor(rig, 430_000)
        await rig.until(lambda: rig.shop.bids == [473_000])
        await rig.until(lambda: "bid.raised" in rig.kinds())
        floor(rig, 473_000)
        for _ in range(30):
            rig.host(name, 1).beat("run")
            await rig.clock.sleep(MINUTE / 2)
        assert rig.shop.bids == [473_000]
    moved = replace(rig.job(name), moves=Moves(count=2))
    rig.store.tx(lambda tx: tx.commit(Plan(jobs={name: moved})))
    [row] = (await rig.handlers().jobs.page(JobQuery()))["jobs"]
    assert row["moves"] == 2
    assert row["attempts"][0]["bid"] == {"usd_h": 0.473, "floor_usd_h": 0.43, "changes": 1, "held_since": None}


async def test_a_bid_is_lowered_once_and_billed_when_the_provider_took_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relocation, "DWELL", 3 * MINUTE)
    monkeypatch.setattr(relocation, "_is_worth", lambda _found: True)
    async with running(rig) as name:
        floor(rig, 200_000)
        for step in range(2, 10):
            rig.host(name, 1).checkpoint(f"step-{step}", created_at=rig.clock.now().isoformat())
            rig.host(name, 1).beat("run")
            await rig.clock.sleep(MINUTE)
        assert rig.shop.bids == [220_000]
        assert [kind for kind in rig.kinds() if kind.startswith("bid.")] == ["bid.lowering", "bid.lowered"]
        [attempt] = rig.attempts(name)
        assert (attempt.price_max, attempt.meter.rate) == (220_000, 220_000)


@pytest.mark.parametrize(
    ("fault", "bid", "kind"),
    [
        pytest.param(RequestRejected("no", field="price", reason="no"), 440_000, "bid.not_raised", id="refused"),
        pytest.param(Unavailable("away"), 440_000, "bid.not_raised", id="lost, without effect"),
        pytest.param(OutcomeUnknown("lost", key=KEY), 473_000, "bid.raised", id="lost, with effect"),
        pytest.param(Hang(acts=True), 473_000, "bid.raised", id="no answer"),
    ],
)
async def test_what_a_change_came_to_is_learned(rig: Rig, fault: Fault, bid: int, kind: str) -> None:
    async with running(rig) as name:
        rig.shop.faults["change_bid"].append(fault)
        floor(rig, 430_000)
        await rig.until(lambda: "bid.raising" in rig.kinds())
        floor(rig, 100_000)
        await rig.until(lambda: kind in rig.kinds())
        assert rig.shop.counts["change_bid"] == 1
        assert rig.attempts(name)[0].price_max == bid


async def test_a_fee_that_is_read_anew_while_a_raise_waits_for_its_turn_keeps_the_bid_under_the_ceiling(
    rig: Rig,
) -> None:
    async with running(rig) as name:
        rig.shop.faults["launch"].extend([Hang()] * CALLS_PER_PROVIDER)
        rig.shop.offer_index = [offer(f"o{n}", price=400_000) for n in range(2, 2 + CALLS_PER_PROVIDER)]
        for number in range(2, 2 + CALLS_PER_PROVIDER):
            await rig.submit(job(number))
        await rig.until(lambda: len(rig.shop.requests) == 1 + CALLS_PER_PROVIDER)
        rig.shop.offer_index = []
        floor(rig, 430_000)
        await rig.until(lambda: "bid.raising" in rig.kinds())
        policy = rig.commits.policy
        rules = replace(policy.providers[rig.shop.name], fee_ppm=1_100_000)
        rig.policy.reload(replace(policy, providers={rig.shop.name: rules}))
        await rig.until(lambda: "bid.not_raised" in rig.kinds())
        await rig.clock.sleep(MINUTE)
        assert rig.shop.bids == []
        [attempt] = rig.attempts(name)
        assert (attempt.price_max, attempt.meter.rate) == (440_000, 484_000), "and is booked by that fee"


@pytest.mark.parametrize("look_every_s", [60.0])
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(RequestRejected("no", field="price", reason="no"), id="refused", marks=pytest.mark.lengthy),
        pytest.param(Unavailable("away"), id="not answered"),
    ],
)
async def test_a_raise_that_changes_nothing_is_not_asked_for_every_five_minutes(rig: Rig, fault: Fault) -> None:
    async with running(rig) as name:
        rig.shop.faults["change_bid"].extend([fault] * 100)
        floor(rig, 430_000)
        for _ in range(3 * 60):
            rig.host(name, 1).beat("run")
            floor(rig, 430_000)
            await rig.clock.sleep(MINUTE)
        assert 3 <= rig.shop.counts["change_bid"] <= 6, "and not 36 times"


async def test_an_outbid_machine_is_kept_and_its_grant_offers_what_to_go_on_from(rig: Rig) -> None:
    async with running(rig) as name:
        assert rig.grant(name, 1).restore == []
        rig.shop.set_state(KEY, InstanceState.PAUSED, Loss.OUTBID)
        await rig.until(lambda: "attempt.held" in rig.kinds())
        await rig.until(lambda: bool(rig.grant(name, 1).restore))
        await rig.clock.sleep(3 * MINUTE)
        assert rig.shop.counts["terminate"] == 0
        rig.shop.set_state(KEY, InstanceState.RUNNING)
        await rig.until(lambda: "attempt.woke" in rig.kinds())
        await rig.clock.sleep(MINUTE)
        rig.host(name, 1).beat("run")
        await rig.until(lambda: "attempt.resumed" in rig.kinds())
        assert len(rig.attempts(name)) == 1


async def test_an_outbid_machine_is_ended_when_its_time_is_up(rig: Rig) -> None:
    async with running(rig) as name:
        rig.shop.set_state(KEY, InstanceState.PAUSED, Loss.OUTBID)
        await rig.until(lambda: not rig.shop.not_gone())
        assert rig.attempts(name)[0].end_reason is EndReason.OUTBID
        assert rig.kinds().count("attempt.held") == 1


async def test_a_bid_of_a_cycle_that_was_faster_than_the_start_of_the_calls_is_placed_later(rig: Rig) -> None:
    async with running(rig):
        group, rig.executor._group = rig.executor._group, None
        floor(rig, 430_000)
        await rig.until(lambda: "bid.raising" in rig.kinds())
        assert rig.shop.bids == []
        rig.executor._group = group
        await rig.until(lambda: rig.shop.bids == [473_000])


async def test_a_bid_that_is_owed_at_a_provider_that_left_the_config_is_given_up(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the record of a life before: the executor would end at the call, and so each of its lives."""
    monkeypatch.setattr(bids, "words_against_raise", lambda *_: "")
    async with running(rig):
        group, rig.executor._group = rig.executor._group, None
        floor(rig, 430_000)
        await rig.until(lambda: "bid.raising" in rig.kinds())
        rig.executor._providers = {}
        rig.executor._group = group
        await rig.until(lambda: "bid.not_raised" in rig.kinds())
        assert rig.shop.bids == []


async def test_a_change_of_a_bid_that_cannot_be_recorded_is_not_asked_for(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object) -> Plan:
        raise ValueError("planted")

    async with running(rig) as name:
        monkeypatch.setattr(bids, "bid_sent", fail)
        floor(rig, 430_000)
        await rig.until(lambda: "bid.raising" in rig.kinds())
        for _ in range(10):
            rig.host(name, 1).beat("run")
            await rig.clock.sleep(MINUTE / 2)
        assert rig.shop.bids == []


async def test_a_bid_whose_call_the_state_refuses_to_record_is_never_placed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job is quarantined, and the change stays as it was: a bid that is placed then would be in no record."""

    def without_an_event(world: World, attempt: AttemptId, _now: datetime, _market: object) -> Plan:
        return Plan(jobs={attempt.job: replace(world.jobs[attempt.job], state=JobState.RECOVERING)})

    async with running(rig) as name:
        monkeypatch.setattr(bids, "bid_sent", without_an_event)
        floor(rig, 430_000)
        await rig.until(lambda: rig.job(name).state is JobState.FAILED)
        await rig.clock.sleep(MINUTE)
        assert rig.shop.counts["change_bid"] == 0
        assert "bid.raised" not in rig.kinds()


async def test_an_outbid_machine_that_woke_while_its_time_ran_out_may_save(rig: Rig) -> None:
    async with running(rig) as name:
        rig.shop.set_state(KEY, InstanceState.PAUSED, Loss.OUTBID)
        await rig.until(lambda: "attempt.held" in rig.kinds())
        rig.shop.faults["instances"].extend(Unavailable("away") for _ in range(1000))
        await rig.until(lambda: "attempt.left" in rig.kinds())
        rig.shop.set_state(KEY, InstanceState.RUNNING)
        assert rig.grant(name, 1).orders.stop is not None
        assert rig.attempts(name)[0].state is AttemptState.STOPPING
        rig.shop.faults["instances"].clear()
        host = rig.host(name, 1)
        host.checkpoint("step-2")
        host.beat("save")
        await rig.until(lambda: rig.attempts(name)[0].end_reason is EndReason.OUTBID)
        assert rig.job(name).checkpoints[0].name == "step-2"
