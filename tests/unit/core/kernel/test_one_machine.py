"""A machine is one attempt's, whatever key a row gives it and whatever reference an answer names."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from spotd.core.domain.attempts import Attempt, MachineState
from spotd.core.domain.intents import AttemptId, IntentKind, IntentState, JobId, Meter, launch_intent_id
from spotd.core.domain.plan import applied, broken_rules
from spotd.core.domain.policy import attempt_key
from spotd.core.domain.states import AttemptState
from spotd.core.domain.world import World
from spotd.core.kernel.outcomes import launched
from spotd.core.kernel.reconcile import reconcile
from spotd_providers.contract.values import InstanceState
from tests.cases import every
from tests.unit.core.builders import INSTALL, MINUTE, NOW, REF, instance, job, listing, world_with

FIRST: Final = AttemptId(job=JobId("j1"), number=1)
SECOND: Final = AttemptId(job=JobId("j2"), number=1)
KEY: Final = attempt_key(INSTALL, SECOND.job, 1)
HAS_IT: Final = [AttemptState.STARTING, AttemptState.RUNNING, AttemptState.ENDING]


def beside(state: AttemptState, second: AttemptState) -> World:
    """The machine of the first attempt, which is in this state, beside an attempt of another job.

    Its end, if it is owed, is not accepted yet.
    """
    world, other = world_with(state), world_with(second)
    owed = {i: replace(t, state=IntentState.OPEN, accepted_at=None) for i, t in world.intents.items()}
    owner = job(2, attempts_made=1, state=other.jobs[FIRST.job].state)
    item: Attempt = replace(other.attempts[FIRST], id=SECOND, key=KEY)
    intents = {
        launch_intent_id(KEY): replace(t, id=launch_intent_id(KEY), key=KEY, attempt=SECOND)
        for t in other.intents.values()
        if t.kind is IntentKind.LAUNCH
    }
    return replace(
        world,
        jobs={**world.jobs, owner.id: owner},
        attempts={**world.attempts, SECOND: item},
        intents={**owed, **intents},
    )


@every("state", HAS_IT)
def test_two_attempts_that_share_a_machine_which_neither_took_over_break_a_rule(state: AttemptState) -> None:
    world = beside(state, AttemptState.RUNNING)
    assert {one.job for one in broken_rules(world) if "machine of another" in one.sentence} == {FIRST.job, SECOND.job}
    [item] = (a for a in world.attempts.values() if a.id == SECOND)
    alone = replace(world, attempts={**world.attempts, SECOND: replace(item, ref=None)})
    assert not [one for one in broken_rules(alone) if "machine of another" in one.sentence]


@every("state", HAS_IT)
def test_a_row_that_gives_the_machine_of_one_attempt_the_key_of_another_makes_it_no_other_ones(
    state: AttemptState,
) -> None:
    world = beside(state, AttemptState.INTENDED)
    plan = reconcile(world, listing(instance(InstanceState.RUNNING, key=KEY), at=NOW + MINUTE), {}, NOW + MINUTE)
    after = applied(world, plan)
    assert after.attempts[SECOND].ref is None
    assert after.attempts[FIRST].ref == REF
    assert broken_rules(after) == broken_rules(world) == ()


@every("state", HAS_IT)
def test_a_launch_that_is_answered_with_the_machine_of_another_attempt_has_no_answer(state: AttemptState) -> None:
    world = beside(state, AttemptState.INTENDED)
    item = replace(world.attempts[SECOND], outcome_unknown=False)
    sent = {i: replace(t, state=IntentState.SENT) if t.attempt == SECOND else t for i, t in world.intents.items()}
    world = replace(world, attempts={**world.attempts, SECOND: item}, intents=sent)
    plan = launched(world, SECOND, instance(InstanceState.RUNNING, key=KEY), NOW)
    after = applied(world, plan)
    assert after.attempts[SECOND].ref is None
    assert after.attempts[SECOND].outcome_unknown
    assert after.intents[launch_intent_id(KEY)].state is IntentState.UNKNOWN, "it is searched for by its key"
    assert broken_rules(after) == ()
    assert after.attempts[FIRST] == world.attempts[FIRST]


def test_its_machine_is_taken_once_the_former_attempt_with_this_reference_is_over() -> None:
    """A provider may use a reference again; the machine is found by its key then."""
    world = beside(AttemptState.ENDING, AttemptState.INTENDED)
    gone = replace(world, attempts={SECOND: world.attempts[SECOND]})
    assert world.attempts[FIRST].machine is not MachineState.GONE
    assert gone.attempts[SECOND].meter == Meter()
    plan = reconcile(gone, listing(instance(InstanceState.RUNNING, key=KEY), at=NOW + MINUTE), {}, NOW + MINUTE)
    assert plan.attempts[SECOND].ref == REF
