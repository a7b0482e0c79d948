"""A plan is held against the rules unless it changes nothing that they read."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace

import pytest

from spotd.core.domain import plan as plans
from spotd.core.domain.plan import Plan, applied, broken_rules
from spotd.core.domain.states import AttemptState, JobState
from spotd.core.domain.world import World
from spotd.daemon import commits
from spotd.daemon.commits import keeps_rules
from spotd_providers.contract.values import InstanceId, InstanceRef
from tests.unit.store import values as v

JOB, ITEM = v.job("a", JobState.RUNNING, attempts_made=1), v.attempt("a", state=AttemptState.RUNNING)
ITEM = replace(ITEM, ref=ITEM.ref or InstanceRef(provider=ITEM.provider, instance_id=InstanceId("i1"), scope=""))
WORLD = World(policy=v.POLICY, jobs={JOB.id: JOB}, attempts={ITEM.id: ITEM}, intents={})


def test_what_the_rules_read_is_what_is_compared() -> None:
    source = inspect.getsource(plans.broken_rules) + inspect.getsource(plans._problems)
    of_attempts = set(re.findall(r"\b(?:a|item)\.([a-z_]+)", source))
    assert of_attempts - {"id", "carried_key"} == set(commits._RULED_OF_ATTEMPT)  # the id is the key of its row
    assert inspect.getsource(type(ITEM).carried_key.fget).count("self.") == 2  # type: ignore[attr-defined]  # a property
    assert set(re.findall(r"\bjob\.([a-z_]+)", source)) - {"state"} == set(commits._RULED_OF_JOB) - {"state"}


def test_signs_of_life_keep_every_rule() -> None:
    beat = Plan(attempts={ITEM.id: replace(ITEM, heartbeat_seq=9, read_at=v.NOW)})
    assert keeps_rules(WORLD, beat)
    assert keeps_rules(WORLD, Plan(jobs={JOB.id: replace(JOB, reason="another")}))
    assert keeps_rules(WORLD, Plan(cooldowns=(v.cooldown(),)))


BREAKS = {
    "an attempt without a job": Plan(attempts={v.attempt("b").id: v.attempt("b")}),
    "an attempt that is not counted": Plan(jobs={JOB.id: replace(JOB, attempts_made=0)}),
    "a final job": Plan(jobs={JOB.id: replace(JOB, state=JobState.FAILED)}),
    "another key": Plan(attempts={ITEM.id: replace(ITEM, key=v.attempt("b").key)}),
    "another ceiling": Plan(attempts={ITEM.id: replace(ITEM, ceiling=type(ITEM.ceiling)(1))}),
    "another price": Plan(attempts={ITEM.id: replace(ITEM, quote=v.quote(total=10**9))}),
    "without an order": Plan(attempts={ITEM.id: replace(ITEM, state=AttemptState.ENDING)}),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_plan_that_breaks_a_rule_is_never_passed_over(name: str) -> None:
    assert broken_rules(WORLD) == ()
    assert broken_rules(applied(WORLD, BREAKS[name]))
    assert not keeps_rules(WORLD, BREAKS[name])


def test_a_settled_call_and_a_sealed_row_are_held_against_the_rules() -> None:
    order = v.launch_of(ITEM)
    assert not keeps_rules(WORLD, Plan(intents={order.id: order}))
