"""A machine that can neither be seen nor ended is given up by its owner, and remembered in case it comes back."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from spotd.core.budgets import committed
from spotd.core.decide import decide
from spotd.core.domain.intents import AttemptId, Intent, IntentKind, IntentState, JobId, Meter, terminate_intent_id
from spotd.core.domain.jobs import Checkpoint
from spotd.core.domain.plan import applied, broken_rules
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.domain.world import VerdictKind, World
from spotd.core.host_reports import find_machine, forget, refusal
from spotd.core.kernel.reconcile import reconcile
from spotd.core.metering import UNSEEN_MAX, machines_in_use
from spotd_providers.contract.values import InstanceState, Listing
from tests.cases import every
from tests.unit.core.builders import NOW, REF, SHOP, instance, listing, market, offer, report, world_with

FIRST = AttemptId(job=JobId("j1"), number=1)
KEY = "spotd-lab-j1-1"
LASTS = timedelta(minutes=30 + 2, seconds=90)


@every("text", ["m1", KEY, "j1-1", "j1@1"])
def test_a_machine_is_named_by_its_id_its_key_or_its_attempt(text: str) -> None:
    assert find_machine(world_with(AttemptState.RUNNING), text) == FIRST


def test_text_that_names_no_machine_finds_none() -> None:
    for text in ("", "j1", "m2", "spotd-lab-j1-11"):
        assert find_machine(world_with(AttemptState.RUNNING), text) is None


@every("state", [AttemptState.STARTING, AttemptState.RUNNING, AttemptState.ENDING])
def test_what_was_given_up_holds_no_slot_no_budget_and_no_job(state: AttemptState) -> None:
    stage = world_with(state)
    plan = forget(stage, FIRST, NOW)
    after = applied(stage, plan)
    assert plan.attempts[FIRST].state is AttemptState.ENDED
    assert plan.attempts[FIRST].meter.rate == 0
    assert machines_in_use(after, NOW) == 0
    assert not after.intents
    assert broken_rules(after) == ()
    assert "machine.forgotten" in [e.kind for e in plan.events]
    assert all("provider says" not in e.message for e in plan.events)


def test_the_next_machine_of_its_job_waits_until_no_lease_can_keep_the_former_alive() -> None:
    after = applied(world_with(AttemptState.RUNNING), forget(world_with(AttemptState.RUNNING), FIRST, NOW))
    assert after.jobs[FIRST.job].state is JobState.RECOVERING
    early, late = NOW + LASTS - timedelta(seconds=1), NOW + LASTS
    plan = decide(after, market(offer("o2"), at=early), early)
    assert plan.verdicts[FIRST.job].kind is VerdictKind.BACKING_OFF
    assert not plan.attempts
    assert decide(after, market(offer("o2"), at=late), late).attempts


def test_a_machine_that_was_given_up_and_is_listed_again_is_ended() -> None:
    stage = world_with(AttemptState.RUNNING)
    after = applied(stage, forget(stage, FIRST, NOW))
    plan = reconcile(after, listing(instance(InstanceState.RUNNING), at=NOW + LASTS), {}, NOW + LASTS)
    assert [t.ref for t in plan.intents.values()] == [REF]


def test_what_its_host_saved_until_then_is_kept_for_the_next_machine() -> None:
    stage = world_with(AttemptState.RUNNING)
    saved = Checkpoint(name="c3", attempt=1, step=3, bytes=1, at=NOW, manifest_key="k3", sha256="0" * 64)
    last = report(seq=6, phase="run", checkpoints=(saved,))[FIRST]
    after = applied(stage, forget(stage, FIRST, NOW, last))
    assert after.jobs[FIRST.job].checkpoints == (saved,)
    assert after.jobs[FIRST.job].state is JobState.RECOVERING
    assert broken_rules(after) == ()


def test_a_job_that_its_host_had_finished_is_not_run_again() -> None:
    stage = world_with(AttemptState.RUNNING)
    last = report(seq=6, phase="done", exit_reason=EndReason.DONE, exit_code=0)[FIRST]
    plan = forget(stage, FIRST, NOW, last)
    after = applied(stage, plan)
    assert plan.jobs[FIRST.job].state is JobState.SUCCEEDED
    assert plan.attempts[FIRST].state is AttemptState.ENDED
    assert plan.attempts[FIRST].end_reason is EndReason.DONE
    assert machines_in_use(after, NOW) == 0
    assert not after.intents
    assert broken_rules(after) == ()


def test_a_cancelled_job_is_cancelled_once_its_machine_is_given_up() -> None:
    stage = world_with(AttemptState.STOPPING)
    plan = forget(stage, FIRST, NOW)
    assert plan.jobs[FIRST.job].state is JobState.CANCELLED
    assert plan.jobs[FIRST.job].not_before is None


def stray() -> World:
    stage = world_with(AttemptState.RUNNING)
    order = Intent(
        id=terminate_intent_id(REF),
        kind=IntentKind.TERMINATE,
        provider=SHOP,
        key=KEY,  # type: ignore[arg-type]  # spelled out
        state=IntentState.OPEN,
        created_at=NOW,
        attempt=None,
        ref=REF,
    )
    return replace(stage, attempts={}, jobs={}, intents={order.id: order})


def test_a_machine_without_an_attempt_is_given_up_too() -> None:
    stage = stray()
    found = find_machine(stage, "m1")
    assert isinstance(found, Intent)
    assert not applied(stage, forget(stage, found, NOW)).intents


SEEN = {SHOP: Listing(instances=(instance(InstanceState.RUNNING),), complete=True, at=NOW)}
EMPTY = {SHOP: Listing(instances=(), complete=True, at=NOW)}


def test_only_what_cannot_be_seen_may_be_given_up() -> None:
    stage = world_with(AttemptState.RUNNING)
    assert "lists it as running" in refusal(stage, FIRST, SEEN, {})
    assert "lists it" in refusal(stray(), stray().intents[terminate_intent_id(REF)], SEEN, {})
    assert refusal(stage, FIRST, SEEN, {SHOP: "the key was refused"}) == ""
    assert refusal(stage, FIRST, {}, {}) == ""
    assert refusal(stage, FIRST, EMPTY, {}) == ""
    assert refusal(replace(stage, policy=replace(stage.policy, providers={})), FIRST, SEEN, {}) == ""


def test_a_machine_that_lists_may_lack_yet_cannot_be_given_up() -> None:
    stage = world_with(AttemptState.RUNNING)
    item = stage.attempts[FIRST]
    window = stage.policy.providers[SHOP].reconcile_window
    young = replace(item, ever_listed=False, launched_at=NOW - window + timedelta(seconds=1))
    older = replace(young, launched_at=NOW - window)
    assert "rented just now" in refusal(replace(stage, attempts={FIRST: young}), FIRST, EMPTY, {})
    assert refusal(replace(stage, attempts={FIRST: older}), FIRST, EMPTY, {}) == ""
    assert refusal(replace(stage, attempts={FIRST: young}), FIRST, EMPTY, {SHOP: "the key was refused"}) == ""


@every("state", [IntentState.OPEN, IntentState.SENT])
def test_a_launch_that_is_under_way_cannot_be_given_up(state: IntentState) -> None:
    stage = world_with(AttemptState.INTENDED)
    under_way = {i: replace(t, state=state) for i, t in stage.intents.items()}
    assert "under way" in refusal(replace(stage, intents=under_way), FIRST, {}, {})
    assert refusal(stage, FIRST, {}, {SHOP: "away"}) == ""


def test_a_machine_at_a_dead_account_holds_slot_and_budget_for_a_day_beyond_its_lease() -> None:
    stage = world_with(AttemptState.ENDING, end_reason=EndReason.HOST_LOST)
    (item,) = stage.attempts.values()
    item = replace(item, meter=replace(item.meter, until=NOW))
    stage = replace(stage, attempts={item.id: item})
    assert (machines_in_use(stage, NOW), committed(stage, item, NOW) > 0) == (1, True)
    assert machines_in_use(stage, NOW + UNSEEN_MAX) == 1
    later = NOW + UNSEEN_MAX + timedelta(seconds=1)
    assert (machines_in_use(stage, later), committed(stage, item, later)) == (0, 0)
    paused = replace(item, ended_at=NOW, meter=Meter())
    stage = replace(stage, attempts={item.id: paused})
    assert (machines_in_use(stage, NOW + UNSEEN_MAX), machines_in_use(stage, later)) == (1, 0), (
        "its disk is all it costs"
    )
    unbounded = replace(item, meter=replace(item.meter, until=None))
    assert committed(stage, unbounded, later) > 0, "nothing but an order ends it"
