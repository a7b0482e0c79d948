"""The machine of a job that is done: waiting for the next one, handed over, or ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from spotd.core.decide import decide
from spotd.core.domain.attempts import Attempt, MachineState
from spotd.core.domain.intents import AttemptId, Intent, IntentState, JobId, terminate_intent_id
from spotd.core.domain.jobs import Job
from spotd.core.domain.plan import Plan, applied, broken_rules
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.domain.world import World
from spotd.core.handover import CONFIRMED_WITHIN, LEAST_LEFT, is_held_back, waiting_words, words_against_reuse
from spotd.core.kernel.reconcile import reconcile
from spotd.core.metering import lease_and_save, machines_in_use
from spotd.core.recovery import LaunchRecord, Survey, Unknown, record_of, recover
from spotd_jobs.spec.model import GpuAlternative, Resources
from spotd_providers.contract.values import InstanceState
from tests.cases import every
from tests.unit.core.builders import MINUTE, NOW, REF, SHOP, instance, job, listing, market, offer, report, world_with

FIRST = AttemptId(job=JobId("j1"), number=1)
NEXT = AttemptId(job=JobId("j2"), number=1)
ORDER = terminate_intent_id(REF)
WAIT = 5 * MINUTE


def running(**policy: Any) -> World:
    some = world_with(AttemptState.RUNNING)
    return replace(some, policy=replace(some.policy, reuse_wait=WAIT, **policy))


def done(some: World, **changes: Any) -> Plan:
    said = report(**{"seq": 6, "phase": "done", "exit_reason": EndReason.DONE, "exit_code": 0, "waits": True} | changes)
    return reconcile(some, listing(instance(InstanceState.RUNNING)), said, NOW)


def waiting(*others: Job, **policy: Any) -> World:
    """A job that is done, whose machine waits, and others that are queued."""
    some = running(**policy)
    some = applied(some, done(some))
    assert some.intents[ORDER].not_before == NOW + WAIT
    return replace(some, jobs={**some.jobs, **{one.id: one for one in others}})


def taken(some: World, plan: Plan) -> Attempt | None:
    found = [item for i, item in plan.attempts.items() if item.machine_key is not None]
    assert broken_rules(applied(some, plan)) == ()
    return found[0] if found else None


def queued(**changes: Any) -> Job:
    return job(2, **changes)


# --- who waits ---


def test_the_machine_of_a_job_that_is_done_waits_with_its_end_already_owed() -> None:
    plan = done(running())
    item, order = plan.attempts[FIRST], plan.intents[ORDER]
    assert plan.jobs[FIRST.job].state is JobState.SUCCEEDED
    assert (item.state, item.machine) == (AttemptState.ENDING, MachineState.LIVE)
    assert (order.state, order.not_before) == (IntentState.OPEN, NOW + WAIT)
    assert "it waits for another job for 5 min, [reuse] wait" in plan.events[-1].message


@every(
    ("policy", "said"),
    [
        pytest.param({"reuse_wait": timedelta(0)}, {}, id="not set"),
        pytest.param({}, {"waits": False}, id="its host could not clear it"),
        pytest.param({}, {"exit_code": 1, "exit_reason": EndReason.USER_ERROR}, id="it failed"),
        pytest.param({}, {"exit_reason": EndReason.PREEMPTED}, id="it is taken away"),
    ],
)
def test_any_other_machine_is_ended_at_once(policy: dict[str, Any], said: dict[str, Any]) -> None:
    some = running()
    plan = done(replace(some, policy=replace(some.policy, **policy)), **said)
    assert plan.intents[ORDER].not_before is None


@every(
    "rules",
    [
        {"bills_at_least": MINUTE},
        {"bills_by": MINUTE},
        {"free_if_taken_within": MINUTE},
        {"unusable": "no key"},
        {"is_own": True},
    ],
)
def test_no_machine_waits_at_a_provider_that_bills_by_more_than_time_or_is_the_users_own(rules: dict[str, Any]) -> None:
    some = running()
    shop = replace(some.policy.providers[SHOP], **rules)
    plan = done(replace(some, policy=replace(some.policy, providers={SHOP: shop})))
    assert plan.intents[ORDER].not_before is None


def test_a_job_says_that_its_machine_goes_to_no_other() -> None:
    some = running()
    owner = job(attempts_made=1, state=JobState.RUNNING, spec={"reuse": False})
    assert done(replace(some, jobs={owner.id: owner})).intents[ORDER].not_before is None


def test_several_machines_of_one_job_go_to_no_other() -> None:
    some = running()
    several = Resources(gpu=(GpuAlternative(name="RTX_4090", count=1),), nodes=2)
    owner = job(attempts_made=1, state=JobState.RUNNING, resources=several)
    assert done(replace(some, jobs={owner.id: owner})).intents[ORDER].not_before is None
    said = words_against_reuse(some.policy, some.policy.providers[SHOP], owner.spec)
    assert said == "its job runs on several machines, which begin and end together"


@every(
    ("exit_at", "until"),
    [
        pytest.param(NOW - 2 * MINUTE, NOW + WAIT - 2 * MINUTE, id="read late"),
        pytest.param(NOW - 2 * WAIT, None, id="read too late"),
        pytest.param(NOW + WAIT, NOW + WAIT, id="a clock that is ahead"),
        pytest.param(None, NOW + WAIT, id="not stated"),
    ],
)
def test_a_machine_waits_from_the_end_of_its_job_as_its_host_does(
    exit_at: datetime | None, until: datetime | None
) -> None:
    assert done(running(), exit_at=exit_at).intents[ORDER].not_before == until


# --- who takes over ---


def test_the_next_job_has_the_machine_in_one_commit() -> None:
    some = waiting(queued())
    plan = decide(some, market(offer("o2", price=390_000)), NOW + MINUTE)
    item = taken(some, plan)
    assert item is not None
    assert (item.id, item.ref, item.state) == (NEXT, REF, AttemptState.STARTING)
    assert (item.carried_key, item.key) == (some.attempts[FIRST].key, "spotd-lab-j2-1")
    former = plan.attempts[FIRST]
    assert (former.state, former.machine, former.meter.since) == (AttemptState.ENDED, MachineState.GONE, None)
    assert plan.intents == {ORDER: replace(some.intents[ORDER], state=IntentState.DONE)}
    assert former.meter.settled == sum(charge.amount for charge in plan.charges)
    assert plan.charges[-1].end == item.meter.since == NOW + MINUTE, "what it waited is the former job's"
    assert plan.jobs[NEXT.job].state is JobState.PROVISIONING
    assert plan.jobs[NEXT.job].reason.startswith("takes over the machine of job job1, which is done: ")
    assert {event.kind for event in plan.events} >= {"machine.handed_over", "attempt.intended"}


def test_two_jobs_do_not_get_the_same_machine() -> None:
    some = waiting(queued(), job(3))
    plan = decide(some, market(offer("o2")), NOW + MINUTE)
    assert [i for i, item in plan.attempts.items() if item.ref == REF and item.state.counts] == [NEXT]
    assert plan.attempts[AttemptId(job=JobId("j3"), number=1)].state is AttemptState.INTENDED


def test_a_machine_that_waits_has_its_place_among_the_machines_in_use() -> None:
    some = waiting(queued(), machines_max=1)
    assert machines_in_use(some, NOW) == 1
    assert taken(some, decide(some, market(offer("o2")), NOW + MINUTE)) is not None


@every(
    ("price", "is_taken"),
    [
        pytest.param(399_000, True, id="hardly cheaper: less than its start costs"),
        pytest.param(300_000, False, id="clearly cheaper"),
    ],
)
def test_an_offer_is_taken_where_it_is_better_with_the_time_of_its_start(price: int, *, is_taken: bool) -> None:
    some = waiting(queued())
    assert (taken(some, decide(some, market(offer("o2", price=price)), NOW + MINUTE)) is not None) is is_taken


@every(
    "changes",
    [
        pytest.param({"spec": {"reuse": False}}, id="it says so"),
        pytest.param({"submitted_by": "agent"}, id="it is an agent's"),
        pytest.param({"ceiling": 300_000}, id="its ceiling is lower"),
        pytest.param({"budget": 1}, id="its budget carries no run"),
        pytest.param({"resources": Resources(gpu=(GpuAlternative(name="H100", count=1),))}, id="another GPU"),
        pytest.param(
            {"resources": Resources(gpu=(GpuAlternative(name="RTX_4090", count=1),), nodes=2)}, id="it needs several"
        ),
        pytest.param(
            {"resources": Resources(gpu=(GpuAlternative(name="RTX_4090", count=1),), disk_gb=5000)}, id="more disk"
        ),
        pytest.param(
            {"resources": Resources(gpu=(GpuAlternative(name="RTX_4090", count=1),), regions=("EU",))}, id="elsewhere"
        ),
    ],
)
def test_a_job_that_does_not_fit_leaves_the_machine_to_others(changes: dict[str, Any]) -> None:
    some = waiting(queued(**changes))
    assert taken(some, decide(some, market(), NOW + MINUTE)) is None


def test_a_job_with_another_image_leaves_the_machine_to_others() -> None:
    other = queued()
    some = waiting(replace(other, spec=replace(other.spec, image="other")))
    assert taken(some, decide(some, market(), NOW + MINUTE)) is None


@every(
    "at",
    [
        pytest.param(NOW + WAIT - LEAST_LEFT + timedelta(seconds=1), id="its end is about to be ordered"),
        pytest.param(NOW + WAIT + MINUTE, id="its wait is over"),
    ],
)
def test_a_machine_is_not_handed_over_once_it_may_be_ended(at: datetime) -> None:
    some = waiting(queued())
    assert taken(some, decide(some, market(), at)) is None


def order_changed(some: World, **changes: Any) -> World:
    return replace(some, intents={ORDER: replace(some.intents[ORDER], **changes)})


def item_changed(some: World, **changes: Any) -> World:
    return replace(some, attempts={FIRST: replace(some.attempts[FIRST], **changes)})


@every(
    "change",
    [
        pytest.param(lambda some: order_changed(some, state=IntentState.ACCEPTED), id="its end is accepted"),
        pytest.param(lambda some: order_changed(some, tries=1), id="its end was tried"),
        pytest.param(lambda some: item_changed(some, notice_at=NOW + MINUTE), id="its provider takes it"),
        pytest.param(lambda some: item_changed(some, over_since=NOW), id="a list states that it is over"),
        pytest.param(lambda some: item_changed(some, machine=MachineState.HALTED), id="it does not run"),
        pytest.param(lambda some: item_changed(some, account="another"), id="it is out of reach"),
        pytest.param(
            lambda some: item_changed(some, meter=replace(some.attempts[FIRST].meter, rate=500_000)),
            id="its price rose",
        ),
    ],
)
def test_a_machine_of_which_anything_is_doubtful_is_not_handed_over(change: Callable[[World], World]) -> None:
    some = change(waiting(queued()))
    shop = replace(some.policy.providers[SHOP], account="mine" if some.attempts[FIRST].account else "")
    some = replace(some, policy=replace(some.policy, providers={SHOP: shop}))
    assert taken(some, decide(some, market(), NOW + MINUTE)) is None


# --- who is released ---


def released(plan: Plan) -> Intent | None:
    return plan.intents.get(ORDER)


def test_a_machine_waits_on_while_nothing_speaks_against_it() -> None:
    assert released(decide(waiting(), market(), NOW + MINUTE)) is None


@every("policy", [{"reuse_wait": timedelta(0)}, {"budget_day": 1}])
def test_a_machine_is_ended_once_nothing_may_wait_any_more(policy: dict[str, Any]) -> None:
    some = waiting()
    some = replace(some, policy=replace(some.policy, **policy))
    order = released(decide(some, market(), NOW + MINUTE))
    assert order is not None
    assert order.not_before == NOW + MINUTE


def test_a_machine_does_not_wait_at_the_cost_of_its_own_jobs_budget() -> None:
    some = waiting()
    owner = some.jobs[FIRST.job]
    some = replace(some, jobs={owner.id: replace(owner, spec=replace(owner.spec, job_budget=70_000))})
    order = released(decide(some, market(), NOW + MINUTE))
    assert order is not None
    assert order.not_before == NOW + MINUTE


def test_a_machine_is_ended_where_a_job_that_it_does_not_fit_lacks_its_place() -> None:
    other = queued()
    some = waiting(replace(other, spec=replace(other.spec, image="other")), machines_max=1)
    order = released(decide(some, market(offer("o2")), NOW + MINUTE))
    assert order is not None
    assert order.not_before == NOW + MINUTE


def test_prices_state_which_machine_waits_what_it_costs_and_for_how_long() -> None:
    (words,) = waiting_words(waiting(), NOW + MINUTE)
    assert words.startswith(
        "the machine of job job1, which is done, waits for the next one that fits: 1 x RTX_4090 at "
    )
    assert words.endswith("$0.40/h, without a start, for 4 min more")
    assert [*waiting_words(waiting(), NOW + WAIT)] == []


# --- after it ---


def handed_over() -> World:
    some = waiting(queued())
    after = applied(some, decide(some, market(), NOW + MINUTE))
    assert NEXT in after.attempts
    return after


def seen(some: World, at: datetime, *, speaks: bool, shows: InstanceState = InstanceState.RUNNING) -> Plan:
    said = replace(next(iter(report(seq=1 if speaks else -1, phase="run" if speaks else "").values())), attempt=NEXT)
    return reconcile(some, listing(instance(shows), at=at), {NEXT: replace(said, read_at=at)}, at)


def test_what_a_list_shows_of_the_machine_is_the_next_attempts_and_no_stray() -> None:
    some = handed_over()
    plan = seen(some, NOW + 2 * MINUTE, speaks=True)
    assert plan.intents == {}
    assert plan.attempts[NEXT].state is AttemptState.RUNNING
    assert plan.jobs[NEXT.job].state is JobState.RUNNING
    assert not plan.experience, "its start was no launch, and says nothing of one"


def test_a_machine_whose_host_does_not_speak_in_time_is_ended_and_its_job_placed_anew() -> None:
    some = handed_over()
    assert seen(some, NOW + MINUTE + CONFIRMED_WITHIN - timedelta(seconds=1), speaks=False).intents == {}
    plan = seen(some, NOW + MINUTE + CONFIRMED_WITHIN, speaks=False)
    item = plan.attempts[NEXT]
    assert (item.state, item.end_reason) == (AttemptState.ENDING, EndReason.NOT_HANDED_OVER)
    assert plan.jobs[NEXT.job].state is JobState.RECOVERING
    assert plan.intents[ORDER].state is IntentState.OPEN, (
        "the order of the former attempt is settled: this is a new one"
    )
    assert plan.intents[ORDER].attempt == NEXT
    assert plan.cooldowns == (), "its host did nothing wrong"


def test_a_host_that_cannot_write_is_waited_for_and_has_time_to_speak_afterwards() -> None:
    some = handed_over()
    late, full = NOW + MINUTE + CONFIRMED_WITHIN, {"store_takes_no_writes": True}
    for at in (late - timedelta(seconds=30), late + MINUTE):
        said = replace(next(iter(report(seq=-1, phase="", **full).values())), attempt=NEXT, read_at=at)
        some = applied(some, reconcile(some, listing(instance(InstanceState.RUNNING), at=at), {NEXT: said}, at))
        assert some.attempts[NEXT].state is AttemptState.STARTING
    some = applied(some, seen(some, late + 1.1 * MINUTE, speaks=False))
    assert some.attempts[NEXT].state is AttemptState.STARTING, "nothing that it wrote could arrive until a moment ago"
    some = applied(some, seen(some, late + 20 * MINUTE, speaks=False))
    assert some.attempts[NEXT].end_reason is EndReason.NOT_HANDED_OVER


def test_a_machine_that_ended_itself_meanwhile_is_no_loss_of_its_host() -> None:
    some = handed_over()
    some = applied(some, seen(some, NOW + 2 * MINUTE, speaks=False, shows=InstanceState.GONE))
    plan = seen(some, NOW + 2.5 * MINUTE, speaks=False, shows=InstanceState.GONE)
    assert plan.attempts[NEXT].end_reason is EndReason.NOT_HANDED_OVER
    assert plan.cooldowns == ()


def test_a_machine_is_found_again_by_a_state_that_is_older_than_its_handover() -> None:
    """Its launch record names the key that it carries, and the former attempt, which is over, no longer ends it."""
    before = waiting(queued())
    record: LaunchRecord = record_of(handed_over().attempts[NEXT])
    survey = Survey(job=NEXT.job, unknown=(Unknown(number=1, record=record),))
    restored = applied(before, recover(before, [survey], NOW + 2 * MINUTE))
    plan = seen(restored, NOW + 2 * MINUTE, speaks=True)
    assert plan.attempts[NEXT].ref == REF
    assert plan.attempts[FIRST].state is AttemptState.ENDED
    assert plan.intents[ORDER].state is IntentState.DONE
    assert broken_rules(applied(restored, plan)) == ()


def older(*, ended: bool) -> World:
    """A state from before the handover, with what the store knows of it; the former job is done, or still runs."""
    before = waiting(queued()) if ended else replace(running(), jobs={**running().jobs, NEXT.job: queued()})
    record = record_of(handed_over().attempts[NEXT])
    survey = Survey(job=NEXT.job, unknown=(Unknown(number=1, record=record),))
    return applied(before, recover(before, [survey], NOW + 2 * MINUTE))


def test_a_state_older_than_a_handover_gives_the_machine_to_no_third_job() -> None:
    some = older(ended=True)
    third = job(3)
    some = replace(some, jobs={**some.jobs, third.id: third})
    plan = decide(some, market(), NOW + 2 * MINUTE)
    assert [i for i, item in plan.attempts.items() if item.machine_key is not None] == []


@every("after", [timedelta(0), WAIT - timedelta(seconds=1), WAIT + MINUTE])
def test_a_state_older_than_a_handover_does_not_end_the_machine_of_the_next_job(after: timedelta) -> None:
    """It reads of the end of the former job only now, long after that, and the next one has its machine."""
    some, at = older(ended=False), NOW + after
    said = report(seq=6, phase="done", exit_reason=EndReason.DONE, exit_code=0, waits=True, exit_at=NOW)
    said = {FIRST: replace(said[FIRST], read_at=at)}
    some = applied(some, reconcile(some, listing(instance(InstanceState.RUNNING), at=at), said, at))
    order = some.intents[ORDER]
    assert some.attempts[FIRST].state is AttemptState.ENDING
    assert is_held_back(some, order, at, at)
    some = applied(some, decide(some, market(), at))
    plan = seen(some, at + MINUTE, speaks=True)
    assert plan.attempts[NEXT].ref == REF
    assert plan.intents[ORDER].state is IntentState.DONE


def test_a_state_older_than_the_launch_gives_the_machine_to_one_attempt_at_a_time() -> None:
    """Neither attempt is known, and both are found by one key: the later has it once the former is known as done."""
    later, end = NOW + 2 * MINUTE, report(seq=6, phase="done", exit_reason=EndReason.DONE, exit_code=0, waits=True)
    known = handed_over()
    both = {**running().attempts, **known.attempts}
    surveys = [Survey(job=i.job, unknown=(Unknown(number=1, record=record_of(both[i])),)) for i in (FIRST, NEXT)]
    queue = {FIRST.job: job(1), NEXT.job: queued()}
    some = replace(known, jobs=queue, attempts={}, intents={})
    some = applied(some, recover(some, surveys, later))
    some = applied(some, seen(some, later, speaks=True))
    assert broken_rules(some) == ()
    assert [some.attempts[i].ref for i in (FIRST, NEXT)] == [REF, None]
    at = later + MINUTE
    some = applied(some, reconcile(some, listing(instance(InstanceState.RUNNING), at=at), end, at))
    assert some.attempts[FIRST].state is AttemptState.ENDING
    assert is_held_back(some, some.intents[ORDER], at, at)
    some = applied(some, seen(some, at + MINUTE, speaks=True))
    assert broken_rules(some) == ()
    assert FIRST not in some.attempts
    assert some.attempts[NEXT].ref == REF


def test_an_end_is_held_back_until_the_store_was_asked_and_no_longer_than_a_lease() -> None:
    some = waiting()
    order, job_of = some.intents[ORDER], some.jobs[FIRST.job]
    unsure = replace(some, policy=replace(some.policy, identity_sure=False))
    lasts = lease_and_save(job_of, some.policy)
    assert not is_held_back(some, order, NOW, NOW)
    assert is_held_back(unsure, order, NOW, NOW + lasts - timedelta(seconds=1))
    assert not is_held_back(unsure, order, NOW, NOW + lasts)
    never = replace(unsure, policy=replace(unsure.policy, reuse_wait=timedelta(0)))
    assert not is_held_back(never, order, NOW, NOW), "nothing is handed over there"


def test_two_attempts_with_one_machine_break_a_rule() -> None:
    some = handed_over()
    twice = replace(some.attempts[NEXT], id=AttemptId(job=JobId("j1"), number=1), key=some.attempts[NEXT].carried_key)
    both = replace(
        some, jobs={**some.jobs, JobId("j1"): job(attempts_made=1)}, attempts={**some.attempts, FIRST: twice}
    )
    assert any("the machine of another attempt" in one.sentence for one in broken_rules(both))
