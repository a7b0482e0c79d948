"""A job with a deadline through the whole daemon: it waits, pays for on-demand, goes back to spot, and is in time."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

import pytest

from spotd.core.domain.states import EndReason, JobState
from spotd.store import Reads
from spotd_jobs.spec.model import (
    CheckpointPolicy,
    Deadline,
    GpuAlternative,
    MarketChoice,
    PolicyName,
    Resources,
    Schedule,
    Work,
)
from spotd_providers.contract.values import InstanceState, Interruption, Loss, Market, MicroUsdPerHour, Offer
from tests.unit.core.builders import NOW, job, offer
from tests.unit.daemon.rig import Rig

pytestmark = pytest.mark.anyio

_AUTO: Final = Resources(gpu=(GpuAlternative(name="RTX_4090", count=1),), market=MarketChoice.AUTO)
_SPOT: Final = offer("spot", price=100_000)
_SOLD: Final[Offer] = replace(
    offer("sold", price=400_000),
    market=Market.ON_DEMAND,
    interruption=Interruption.NEVER,
    on_demand_price=MicroUsdPerHour(400_000),
)


def _spec(hours: float, work: float, **schedule: Any) -> dict[str, Any]:
    return {
        "schedule": Schedule(deadline=Deadline(span=timedelta(hours=hours)), **schedule),
        "work": Work(time=timedelta(hours=work)),
        "checkpoint": CheckpointPolicy(every=timedelta(minutes=15)),
    }


async def test_a_job_whose_spot_machine_is_taken_waits_until_slack_asks_for_on_demand(rig: Rig) -> None:
    rig.shop.offer_index = [_SPOT, _SOLD]
    async with rig.running():
        name = await rig.submit(job(spec=_spec(5, 2), resources=_AUTO, submitted_at=NOW))
        host = await rig.until_running(name, 1)
        assert rig.attempts(name)[0].quote.offer.market is Market.SPOT
        host.checkpoint("step-1")
        await rig.until(lambda: bool(rig.job(name).checkpoints))
        rig.shop.offer_index = [_SOLD]
        rig.shop.set_state(rig.attempts(name)[0].key, InstanceState.GONE, Loss.PREEMPTED)
        await rig.until(lambda: rig.job(name).state is JobState.WAITING_PRICE)
        why = await rig.handlers().jobs.why(name)
        assert why["kind"] == "paced"
        assert "waits for spot: slack is" in why["sentence"]
        began = rig.clock.now()
        await rig.until(lambda: len(rig.attempts(name)) == 2, within=timedelta(hours=4))
        waited = rig.clock.now() - began
        assert timedelta(hours=1) < waited < timedelta(hours=3)
        second = rig.attempts(name)[1]
        assert second.quote.offer.market is Market.ON_DEMAND
        await rig.until_running(name, 2)
        # two hours of work, begun now, are done before the deadline
        assert rig.clock.now() + timedelta(hours=2) < NOW + timedelta(hours=5)
        assert "stays on on-demand" in (await rig.handlers().jobs.why(name))["sentence"]


async def test_the_one_host_that_there_is_carries_the_job_again_soon_after_it_was_lost(rig: Rig) -> None:
    rig.shop.offer_index = [_SPOT, replace(_SOLD, host_id=_SPOT.host_id)]
    async with rig.running():
        name = await rig.submit(job(spec=_spec(3.2, 2), resources=_AUTO, submitted_at=NOW))
        await rig.until_running(name, 1)
        rig.shop.set_state(rig.attempts(name)[0].key, InstanceState.GONE, Loss.HOST_LOST)
        await rig.until(lambda: rig.job(name).state is JobState.RECOVERING)
        lost_at = rig.clock.now()
        await rig.until(lambda: len(rig.attempts(name)) == 2, within=timedelta(hours=1))
        assert timedelta(minutes=3) <= rig.clock.now() - lost_at < timedelta(minutes=5)
        launched = [e.event for e in rig.store.read(Reads.events) if e.event.kind == "attempt.intended"]
        assert "its host is avoided until" in launched[-1].message


@pytest.mark.lengthy
async def test_on_demand_is_left_for_spot_saved_and_without_a_second_machine(rig: Rig) -> None:
    rig.shop.offer_index = [_SOLD]
    async with rig.running():
        spec = _spec(9, 2, policy=PolicyName.UNIFORM_PROGRESS_EAGER)
        name = await rig.submit(job(spec=spec, resources=_AUTO, submitted_at=NOW - timedelta(hours=4)))
        host = await rig.until_running(name, 1)
        assert rig.attempts(name)[0].quote.offer.market is Market.ON_DEMAND
        host.checkpoint("step-1")
        rig.shop.offer_index = [_SPOT, _SOLD]
        await rig.until(lambda: rig.attempts(name)[0].stop is not None)
        first = rig.attempts(name)[0]
        assert first.stop is not None
        assert first.stop.reason is EndReason.MIGRATED
        assert first.running_at is not None
        assert first.stop.ordered_at - first.running_at >= timedelta(minutes=15)
        order = rig.grant(name, 1).orders.stop
        assert order is not None
        assert order.flush
        assert len(rig.attempts(name)) == 1
        host.checkpoint("step-2")
        host.exit("stopped", code=None)
        await rig.until(lambda: len(rig.attempts(name)) == 2 and rig.attempts(name)[1].ref is not None)
        assert [one.name for one in rig.grant(name, 2).restore] == ["step-2", "step-1"]
        await rig.until_running(name, 2)
        second = rig.attempts(name)[1]
        assert second.quote.offer.market is Market.SPOT
        assert len(rig.shop.alive()) == 1
        assert rig.shop.most_alive == {} or max(rig.shop.most_alive.values()) == 1
        after = rig.job(name)
    assert (after.recoveries, after.errors, after.idle_launches) == (0, 0, 0)


@pytest.mark.lengthy
async def test_a_deadline_ends_a_running_job_saved_and_a_retry_goes_on_from_its_newest_checkpoint(rig: Rig) -> None:
    rig.shop.offer_index = [_SPOT]
    async with rig.running():
        spec = {"schedule": Schedule(deadline=Deadline(span=timedelta(minutes=30)))}
        name = await rig.submit(job(spec=spec, submitted_at=NOW))
        host = await rig.until_running(name, 1)
        await rig.until(lambda: rig.attempts(name)[0].stop is not None)
        assert NOW + timedelta(minutes=30) <= rig.clock.now() < NOW + timedelta(minutes=31)
        host.checkpoint("step-1")
        host.exit("stopped", code=None)
        await rig.until_state(name, JobState.EXPIRED)
        assert "its deadline has passed: it was due 2026-03-02 12:30 UTC" in rig.job(name).reason
        await rig.until(lambda: not rig.shop.not_gone())
        await rig.handlers().jobs.retry(name)
        await rig.until(lambda: len(rig.attempts(name)) == 2 and rig.attempts(name)[1].ref is not None)
        assert [one.name for one in rig.grant(name, 2).restore] == ["step-1"]
