"""A launch is wanted until the moment it is sent, and only one that was sent has an outcome to doubt."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from spotd.core.domain.attempts import MachineState
from spotd.core.domain.intents import AttemptId, IntentKind, IntentState, JobId, launch_intent_id
from spotd.core.domain.plan import applied
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.domain.world import World
from spotd.core.kernel.launch_calls import launch_sent
from spotd.core.kernel.outcomes import (
    TERMINATE_RETRY_MAX,
    LaunchFailure,
    after_restart,
    launch_refused,
    launched,
    terminate_failed,
)
from spotd.core.recovery import recover, unsent
from spotd.core.requests import cancel
from spotd_providers.contract.values import InstanceState
from tests.cases import every
from tests.unit.core.builders import MINUTE, NOW, REF, instance, world_with

FIRST = AttemptId(job=JobId("j1"), number=1)


def owed(state: IntentState = IntentState.OPEN) -> World:
    world = world_with(AttemptState.INTENDED, outcome_unknown=False)
    return replace(world, intents={i: replace(t, state=state) for i, t in world.intents.items()})


def test_a_launch_that_is_still_wanted_is_recorded_as_sent_before_the_call() -> None:
    world = owed()
    later = applied(world, launch_sent(world, FIRST, NOW))
    assert [t.state for t in later.intents.values()] == [IntentState.SENT]
    assert launch_sent(later, FIRST, NOW).is_empty, "once"


def test_a_launch_whose_job_was_cancelled_while_it_waited_is_never_sent() -> None:
    world = owed()
    world = applied(world, cancel(world, FIRST.job, NOW))
    assert [t.state for t in world.intents.values()] == [IntentState.OPEN]
    plan = launch_sent(world, FIRST, NOW)
    assert plan.attempts[FIRST].state is AttemptState.ENDED
    assert plan.attempts[FIRST].machine is MachineState.GONE
    assert plan.attempts[FIRST].meter.settled == 0
    assert not applied(world, plan).intents


def test_a_launch_whose_job_is_to_be_cancelled_is_never_sent_though_no_decision_has_stopped_it_yet() -> None:
    world = owed()
    owner = replace(world.jobs[FIRST.job], cancel_requested=True)
    plan = launch_sent(replace(world, jobs={owner.id: owner}), FIRST, NOW)
    assert plan.attempts[FIRST].machine is MachineState.GONE
    assert [t.state for t in plan.intents.values()] == [IntentState.FAILED]


def test_a_launch_is_not_sent_while_launches_are_paused_and_its_job_waits_for_its_turn_again() -> None:
    world = owed()
    paused = replace(world, policy=replace(world.policy, launches_paused="spotd is shutting down"))
    plan = launch_sent(paused, FIRST, NOW)
    assert plan.attempts[FIRST].end_reason is EndReason.NOT_SENT
    assert plan.jobs[FIRST.job].state is JobState.QUEUED
    assert plan.jobs[FIRST.job].reason == "the launch was not made: spotd is shutting down"
    assert not plan.cooldowns
    assert not applied(paused, plan).intents


def test_a_launch_is_not_sent_once_the_secrets_of_its_job_cannot_be_read() -> None:
    world = owed()
    locked = replace(world, policy=replace(world.policy, locked={FIRST.job: "no key for its secrets"}))
    plan = launch_sent(locked, FIRST, NOW)
    assert plan.attempts[FIRST].end_reason is EndReason.NOT_SENT
    assert plan.jobs[FIRST.job].reason == "the launch was not made: no key for its secrets"


@every("known", [True, False])
def test_of_a_launch_that_is_owed_no_more_nothing_is_sent(*, known: bool) -> None:
    world = owed(IntentState.UNKNOWN) if known else replace(owed(), attempts={}, intents={})
    assert launch_sent(world, FIRST, NOW).is_empty


def test_a_launch_that_another_life_prepared_is_searched_for_though_the_state_never_sent_it() -> None:
    world = applied(owed(), after_restart(owed(), NOW, asks_store=True))
    assert [t.state for t in world.intents.values()] == [IntentState.OPEN], "the store has not told yet"
    assert unsent(world) == {FIRST}
    never = recover(world, (), NOW, {FIRST: False})
    assert never.attempts[FIRST].end_reason is EndReason.NOT_SENT
    prepared = recover(world, (), NOW, {FIRST: True})
    assert prepared.attempts[FIRST].outcome_unknown
    assert prepared.attempts[FIRST].state is AttemptState.INTENDED
    [intent] = prepared.intents.values()
    assert (intent.state, intent.not_before is not None) == (IntentState.UNKNOWN, True)
    assert recover(applied(world, prepared), (), NOW, {FIRST: False}).is_empty, "what has an outcome is left alone"


def test_after_a_restart_only_what_was_sent_is_unknown() -> None:
    waiting = after_restart(owed(), NOW)
    assert waiting.attempts[FIRST].end_reason is EndReason.NOT_SENT
    assert waiting.attempts[FIRST].state is AttemptState.ENDED
    assert waiting.jobs[FIRST.job].state is JobState.QUEUED
    sent = after_restart(owed(IntentState.SENT), NOW)
    assert sent.attempts[FIRST].outcome_unknown
    [intent] = sent.intents.values()
    assert (intent.id, intent.state) == (launch_intent_id(intent.key), IntentState.UNKNOWN)


@every("state", [AttemptState.INTENDED, AttemptState.RUNNING, AttemptState.STOPPING])
def test_the_answer_to_a_launch_ends_no_machine_whose_attempt_counts_however_early_its_host_was_heard(
    state: AttemptState,
) -> None:
    world = world_with(state, ref=None, launched_at=None)
    (item,) = world.attempts.values()
    plan = launched(world, item.id, instance(InstanceState.RUNNING), NOW)
    assert not [i for i in plan.intents.values() if i.kind is IntentKind.TERMINATE]
    assert plan.attempts[item.id].ref == REF
    assert plan.attempts[item.id].state is (AttemptState.STARTING if state is AttemptState.INTENDED else state)


def test_the_answer_to_a_launch_whose_attempt_has_ended_ends_the_machine() -> None:
    world = world_with(AttemptState.ENDING, ref=None, launched_at=None)
    world = replace(world, intents={i: t for i, t in world.intents.items() if t.kind is IntentKind.LAUNCH})
    (item,) = world.attempts.values()
    plan = launched(world, item.id, instance(InstanceState.RUNNING), NOW)
    assert [i.ref for i in plan.intents.values() if i.kind is IntentKind.TERMINATE] == [REF]


def test_a_refusal_says_nothing_of_a_machine_that_is_known() -> None:
    world = world_with(AttemptState.STARTING)
    assert launch_refused(world, FIRST, LaunchFailure.NO_CAPACITY, "no", NOW).is_empty


def test_a_refusal_ends_its_attempt_and_one_of_an_attempt_that_is_unknown_changes_nothing() -> None:
    world = owed()
    plan = launch_refused(world, FIRST, LaunchFailure.NO_CAPACITY, "no", NOW)
    assert (plan.attempts[FIRST].state, plan.attempts[FIRST].machine) == (AttemptState.ENDED, MachineState.GONE)
    assert launch_refused(replace(world, attempts={}), FIRST, LaunchFailure.NO_CAPACITY, "no", NOW).is_empty


@every(("failure", "counts"), [(LaunchFailure.AUTH, False), (LaunchFailure.NOT_PREPARED, True)])
def test_only_a_refusal_of_this_job_alone_counts_against_it(failure: LaunchFailure, *, counts: bool) -> None:
    world = owed()
    before = world.jobs[FIRST.job]
    after = launch_refused(world, FIRST, failure, "no", NOW).jobs[FIRST.job]
    assert ((after.idle_launches, after.not_before) != (before.idle_launches, before.not_before)) is counts


def test_the_answer_to_a_launch_that_names_another_machine_ends_that_one_and_keeps_ours() -> None:
    world = world_with(AttemptState.RUNNING)
    plan = launched(world, FIRST, instance(InstanceState.RUNNING, ident="m2"), NOW)
    assert [i.ref.instance_id for i in plan.intents.values() if i.ref is not None] == ["m2"]
    assert applied(world, plan).attempts[FIRST].ref == REF


@every("tries", [0, 5, 1_000_000])
@every("asked", [None, MINUTE, timedelta(days=1), timedelta.max])
def test_a_machine_that_should_be_gone_is_ended_again_soon_whatever_wait_its_provider_asks_for(
    tries: int, asked: timedelta | None
) -> None:
    world = world_with(AttemptState.ENDING)
    [intent] = world.intents.values()
    owed_end = replace(intent, state=IntentState.OPEN, accepted_at=None, tries=tries)
    plan = terminate_failed(replace(world, intents={intent.id: owed_end}), intent.id, "no", NOW, asked)
    again = plan.intents[intent.id].not_before
    assert again is not None
    assert NOW < again <= NOW + TERMINATE_RETRY_MAX
