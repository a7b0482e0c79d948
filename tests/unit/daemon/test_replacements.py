"""Calls that replace machines of several, over the daemon's own parts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.intents import AttemptId, IntentState, JobId
from spotd.core.domain.market import gang_of
from spotd.core.domain.members import Members
from spotd.core.domain.plan import Plan
from spotd.core.domain.states import AttemptState, EndReason
from spotd.core.domain.world import World
from spotd.core.gangs import replace_intent_id
from spotd.core.plan_builder import PlanBuilder
from spotd_providers.contract.errors import RequestRejected
from spotd_providers.contract.values import AttemptKey, InstanceRef, InstanceState, LaunchRequest, Loss
from tests.unit.core.builders import MINUTE, offer, shop_policy
from tests.unit.daemon.rig import SUBMIT, Rig
from tests.unit.daemon.shop import Shop

pytestmark = pytest.mark.anyio
KEY = AttemptKey("spotd-lab-j1-1")


class Refusing(Shop):
    """It replaces machines, and these do not run any more."""

    async def replace_members(
        self, _request: LaunchRequest, _ref: InstanceRef, _ranks: Sequence[int], _number: int
    ) -> None:
        raise RequestRejected("it does not run", field="machine", reason="it does not run")

    async def drop_members(self, _ref: InstanceRef, _ranks: Sequence[int]) -> None:
        raise RequestRejected("it does not run", field="machine", reason="it does not run")


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    made = Rig(tmp_path, policy=shop_policy())
    made.shop.offer_index = [offer("o1", price=400_000)]
    return made


@asynccontextmanager
async def losing(rig: Rig) -> AsyncIterator[JobId]:
    """A job on three machines, of which the last one is lost; yields once a call has failed that replaces it."""
    async with rig.running():
        name = await rig.submit()
        await rig.until_running(name, 1)
        rig.executor._providers = {rig.shop.name: rig.shop} if isinstance(rig.shop, Refusing) else {}

        def lose(world: World, now: datetime) -> Plan:
            builder = PlanBuilder(world, now)
            item, owner = builder.attempt(AttemptId(job=name, number=1)), builder.job(name)
            agreed = replace(item.quote, offer=gang_of(item.quote.offer, 3))
            members = Members(since=(0, 0, 0), lost=(2,), kept_since=now)
            builder.put_job(replace(owner, spec=replace(owner.spec, replace_within=10 * MINUTE)))
            builder.put_attempt(replace(item, quote=agreed, members=members))
            return builder.plan()

        await rig.commits.commit(lose, SUBMIT)
        rig.wake_event.notify()
        await rig.until(lambda: "attempt.not_replaced" in rig.kinds(name), within=5 * MINUTE)
        yield name


def attempt_of(rig: Rig, name: JobId) -> Attempt:
    return rig.attempts(name)[-1]


async def test_those_of_a_provider_that_left_the_config_are_asked_for_again_and_end_nothing(rig: Rig) -> None:
    async with losing(rig) as name:
        order = (await rig.commits.world()).intents[replace_intent_id(KEY)]
        assert attempt_of(rig, name).state is AttemptState.RUNNING
        assert (order.state, order.error) == (IntentState.OPEN, "the config has no shop")


async def test_what_does_not_run_ends_by_the_reason_that_its_lists_give(rig: Rig) -> None:
    rig.shop.__class__ = Refusing
    async with losing(rig) as name:
        order = (await rig.commits.world()).intents[replace_intent_id(KEY)]
        assert (attempt_of(rig, name).state, order.state) == (AttemptState.RUNNING, IntentState.OPEN)
        machine = rig.shop.machine_of(KEY)
        gone = replace(machine, state=InstanceState.ENDING, loss=Loss.PREEMPTED)
        rig.shop.machines[machine.ref.instance_id] = gone
        await rig.until(lambda: "attempt.preempted" in rig.kinds(name), within=5 * MINUTE)
        assert rig.attempts(name)[0].end_reason is EndReason.PREEMPTED
