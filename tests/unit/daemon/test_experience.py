"""What a daemon learns of its hosts reaches the state, the next attempt and the ranking."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from spotd.api.requests import PriceQuery
from spotd.core.checkpoints import advised_interval, prior_hazard_ppm
from spotd.core.domain.states import AttemptState
from spotd.core.domain.world import ONE, RecordKind
from spotd_jobs.spec.model import CheckpointPolicy, Work
from spotd_providers.contract.values import InstanceState, Loss
from tests.unit.core.builders import job
from tests.unit.daemon.rig import Rig

pytestmark = pytest.mark.anyio
MINUTE = timedelta(minutes=1)


async def saved_and_lost(rig: Rig, seconds: Any, **spec: Any) -> float | None:
    """What the second attempt is given as its interval, whose first one saved in so many seconds and was lost."""
    async with rig.ready():
        name = await rig.submit(job(spec=spec))
        host = await rig.until_running(name, 1)
        host.event("checkpoint", name="step-1", step=1, seconds=seconds)
        host.checkpoint("step-1")
        host.beat("run")
        await rig.until(lambda: bool(rig.job(name).checkpoints))
        rig.shop.set_state(rig.attempts(name)[0].key, InstanceState.GONE, Loss.PREEMPTED)
        await rig.until(lambda: len(rig.attempts(name)) == 2)
        await rig.until(lambda: rig.attempts(name)[1].state is AttemptState.STARTING)
        return rig.grant(name, 2).spec.checkpoint.every_s


async def test_the_measured_save_time_becomes_the_interval_of_the_next_attempt(rig: Rig) -> None:
    found = await saved_and_lost(rig, 20.0)
    [(item, _, _)] = rig.store.read(lambda reads: reads.open_attempts())
    assert item.save_every is not None
    assert found == item.save_every.total_seconds()
    without_evidence = advised_interval(timedelta(seconds=20), prior_hazard_ppm(rig.policy.current))
    assert without_evidence is not None
    # one loss a few minutes after the launch was seen, so that it saves a little more often than by the prior
    assert 60 < found < without_evidence.total_seconds()


async def test_what_the_owner_states_is_what_the_job_is_given(rig: Rig) -> None:
    assert await saved_and_lost(rig, 20.0, checkpoint=CheckpointPolicy(every=7 * MINUTE)) == 7 * 60


@pytest.mark.parametrize("seconds", ["soon", None, True, -1, 10**18], ids=str)
async def test_a_save_time_that_is_none_advises_nothing(rig: Rig, seconds: Any) -> None:
    assert await saved_and_lost(rig, seconds) is None


async def test_a_loss_and_a_start_are_on_record_after_a_restart(rig: Rig) -> None:
    await saved_and_lost(rig, 20.0)
    known = rig.store.read(lambda reads: reads.experience())
    counts = {identity.kind: record.count for identity, record in known.items()}
    assert counts[RecordKind.LOSSES_PROVIDER] == counts[RecordKind.LOSSES_HOST] == ONE
    assert counts[RecordKind.STARTS] == ONE
    assert counts[RecordKind.EARLY_LOSSES] == ONE


async def test_why_and_prices_state_what_finishing_costs(rig: Rig) -> None:
    async with rig.ready():
        name = await rig.submit(job(spec={"work": Work(time=timedelta(hours=10))}))
        await rig.until_running(name, 1)
        why = await rig.handlers().jobs.why(name)
        assert why["costs"][0].startswith("on its 1 x RTX_4090 at $0.40/h the rest takes ")
        shown = await rig.handlers().prices.quotes(PriceQuery(job="job1"))
        assert shown["costs"] == why["costs"]
        assert (await rig.handlers().prices.quotes(PriceQuery()))["costs"] == []
