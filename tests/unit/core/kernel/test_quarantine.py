"""Whatever one row, one host, one listing or one offer holds, everything else goes on and no machine is forgotten."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from spotd.core.decide import decide
from spotd.core.domain.attempts import HostStatus, MachineState
from spotd.core.domain.intents import AttemptId, IntentId, IntentKind, IntentState, JobId, launch_intent_id
from spotd.core.domain.jobs import Checkpoint, Job
from spotd.core.domain.market import MarketSnapshot
from spotd.core.domain.plan import Plan, applied, broken_rules
from spotd.core.domain.policy import attempt_key
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.domain.world import World
from spotd.core.kernel.launch_calls import LaunchOutcome, end_contained, launch_contained
from spotd.core.kernel.quarantine import QUARANTINE_MARK, guarded, sound
from spotd.core.kernel.reconcile import reconcile
from spotd.core.plan_builder import PlanBuilder
from spotd_providers.contract.values import (
    InstanceId,
    InstanceRef,
    InstanceState,
    Listing,
    MicroUsd,
    MicroUsdPerGpuHour,
    ProviderName,
)
from tests.cases import every
from tests.unit.core.builders import INSTALL, NOW, REF, SHOP, instance, job, listing, market, offer, report, world_with

J, K = JobId("j1"), JobId("j2")
FIRST, SECOND = AttemptId(job=J, number=1), AttemptId(job=K, number=1)
NAIVE: Any = datetime(2026, 3, 2, 12, 0)  # noqa: DTZ001 - an instant without a zone is the poison
HOSTILE: Any = "not a number"


def two_jobs(state: AttemptState = AttemptState.RUNNING, **changes: Any) -> World:
    """The job `j1`, whose attempt has these changes, and a healthy `j2` on a machine of its own."""
    world = world_with(state, **changes)
    other = world_with(AttemptState.RUNNING)
    ref = InstanceRef(provider=SHOP, instance_id=InstanceId("m2"))
    item = replace(other.attempts[FIRST], id=SECOND, key=attempt_key(INSTALL, K, 1), ref=ref)
    owner = replace(other.jobs[J], id=K, name="job2")
    return replace(world, jobs={**world.jobs, K: owner}, attempts={**world.attempts, SECOND: item})


def shown(**changes: Any) -> dict[ProviderName, Listing]:
    mine = replace(instance(InstanceState.RUNNING), **changes)
    return listing(mine, instance(InstanceState.RUNNING, ident="m2", key=attempt_key(INSTALL, K, 1)))


def reports(**changes: Any) -> dict[AttemptId, HostStatus]:
    return {**report(**changes), SECOND: HostStatus(attempt=SECOND, read_at=NOW, seq=9, phase="run")}


def quarantined(world: World, plan: Plan) -> World:
    """The world after the plan, which ended the first job's machine and left the second job alone."""
    later = applied(world, plan)
    assert broken_rules(later) == ()
    assert later.jobs[K].state is JobState.RUNNING
    assert later.attempts[SECOND].state is AttemptState.RUNNING
    owner: Job = plan.jobs[J]
    assert owner.state is JobState.FAILED
    assert owner.reason.startswith(QUARANTINE_MARK)
    assert "spotctl retry job1" in owner.reason
    assert {e.kind for e in plan.events if e.job == J} >= {"job.quarantined", "attempt.quarantined"}
    item = plan.attempts[FIRST]
    assert item.end_reason is EndReason.QUARANTINED
    if item.ref is not None:
        owed = [t.ref for t in plan.intents.values() if t.kind is IntentKind.TERMINATE]
        assert owed == [item.ref]
    return later


ROWS: dict[str, dict[str, Any]] = {
    "an instant without a zone": {"heartbeat_seen_at": NAIVE, "heartbeat_seq": 99},
    "a number that is none": {"heartbeat_seq": HOSTILE},
    "a stop order that is none": {"stop": HOSTILE},
    "a meter that is none": {"meter": HOSTILE},
}


@every("changes", ROWS.values(), ids=ROWS.keys())
def test_an_attempt_that_cannot_be_judged_is_quarantined_and_the_next_lives_on(changes: dict[str, Any]) -> None:
    world = two_jobs(**changes)
    plan = reconcile(world, shown(), reports(seq=9, phase="run"), NOW)
    later = quarantined(world, plan)
    again = reconcile(later, shown(), reports(seq=9, phase="run"), NOW)
    assert not [e for e in again.events if e.kind == "job.quarantined"], "once is enough"


WORDS: dict[str, dict[str, Any]] = {
    "a sequence number": {"seq": HOSTILE},
    "an instant without a zone": {"notice_at": NAIVE},
    "checkpoints": {"checkpoints": (HOSTILE,)},
    "an exit": {"exit_reason": HOSTILE, "seq": 9},
}


@every("changes", WORDS.values(), ids=WORDS.keys())
def test_what_a_host_wrote_costs_its_own_job_and_no_other(changes: dict[str, Any]) -> None:
    world = two_jobs()
    quarantined(world, reconcile(world, shown(), reports(**changes), NOW))


LISTED: dict[str, dict[str, Any]] = {
    "a price in words": {"price": HOSTILE},
    "a state that is none": {"state": HOSTILE},
    "an instant without a zone": {"notice_at": NAIVE},
    "no ref": {"ref": None},
    "a key that is none": {"key": 7},
}


@every("changes", LISTED.values(), ids=LISTED.keys())
def test_a_listing_that_cannot_be_read_costs_that_reading_and_nothing_else(changes: dict[str, Any]) -> None:
    world = two_jobs()
    plan = reconcile(world, shown(**changes), reports(seq=9, phase="run"), NOW)
    assert plan.contained, "it is told"
    assert {i: a.state for i, a in applied(world, plan).attempts.items()} == dict.fromkeys(
        (FIRST, SECOND), AttemptState.RUNNING
    )
    assert not [t for t in plan.intents.values() if t.kind is IntentKind.TERMINATE]


def test_a_listing_dated_without_a_zone_costs_that_reading_and_nothing_else() -> None:
    world = two_jobs()
    plan = reconcile(world, {SHOP: replace(listing()[SHOP], at=NAIVE)}, reports(seq=9, phase="run"), NOW)
    assert plan.contained
    assert all(a.state is AttemptState.RUNNING for a in applied(world, plan).attempts.values())


def placed(plan: Plan) -> list[JobId]:
    return [t.attempt.job for t in plan.intents.values() if t.kind is IntentKind.LAUNCH and t.attempt is not None]


def test_a_job_that_cannot_be_placed_is_quarantined_and_the_next_is_launched() -> None:
    poisoned = replace(job(1), spec=replace(job(1).spec, resources=HOSTILE))
    world = replace(two_jobs(), jobs={J: poisoned, K: job(2)}, attempts={}, intents={})
    plan = decide(world, market(offer()), NOW)
    assert placed(plan) == [K]
    assert plan.jobs[J].state is JobState.FAILED
    assert broken_rules(applied(world, plan)) == ()


def test_a_board_with_an_offer_that_cannot_be_priced_is_left_out_and_the_jobs_buy_elsewhere() -> None:
    good, bad = market(offer()).by_provider[SHOP], market(offer("bad", price=1, upload_price=HOSTILE)).by_provider[SHOP]
    other = ProviderName("other")
    rules = world_with(AttemptState.RUNNING).policy.providers[SHOP]
    world = replace(two_jobs(), jobs={J: job(1, checkpoints=CHECKPOINTS), K: job(2)}, attempts={}, intents={})
    world = replace(world, policy=replace(world.policy, providers={SHOP: rules, other: replace(rules, name=other)}))
    plan = decide(world, MarketSnapshot(by_provider={SHOP: good, other: replace(bad, provider=other)}), NOW)
    assert J in placed(plan)
    assert [c.subject for c in plan.contained] == ["the offers of other"]
    assert not [e for e in plan.events if e.kind == "job.quarantined"]


CHECKPOINTS = (
    replace(
        Checkpoint(name="c", attempt=1, step=1, bytes=10**9, at=NOW, manifest_key="k", sha256="0" * 64),
    ),
)


@every("what", ["budget", "cooldown"])
def test_what_is_added_up_over_all_jobs_is_contained_too(what: str) -> None:
    world = two_jobs(meter=HOSTILE) if what == "budget" else two_jobs(quote=HOSTILE)
    queued = JobId("j3")
    world = replace(
        world,
        jobs={**world.jobs, queued: job(3)},
        policy=replace(world.policy, budget_day=MicroUsd(10**9)),
    )
    plan = decide(world, market(offer()), NOW)
    assert placed(plan) == [queued]
    assert plan.jobs[J].state is JobState.FAILED


def test_what_fails_only_for_all_jobs_together_ends_none_and_is_said() -> None:
    def think(world: World) -> Plan:
        if len(world.jobs) > 1:
            raise ValueError("too many")
        return PlanBuilder(world, NOW).plan()

    plan = guarded(think, two_jobs(), NOW)
    assert [c.subject for c in plan.contained] == ["the judgement of all jobs"]
    assert not plan.jobs


def test_what_fails_for_the_others_too_still_ends_the_job_that_cannot_be_judged() -> None:
    asked: list[World] = []

    def think(world: World) -> Plan:
        asked.append(world)
        if J in world.jobs or len(asked) > 1 + len(two_jobs().jobs):
            raise ValueError("never")
        return PlanBuilder(world, NOW).plan()

    plan = guarded(think, two_jobs(), NOW)
    assert [c.subject for c in plan.contained] == ["job j1", "the judgement of all other jobs"]
    quarantined(two_jobs(), plan)


BROKEN: dict[str, Callable[[World], World]] = {
    "two attempts count": lambda world: replace(
        world, attempts={**world.attempts, AttemptId(job=J, number=2): _second(world)}
    ),
    "it counts although its job is over": lambda world: replace(
        world, jobs={**world.jobs, J: replace(world.jobs[J], state=JobState.CANCELLED)}
    ),
    "it carries another key": lambda world: _first(world, key="spotd-lab-other-9"),
    "it was agreed above its ceiling": lambda world: _first(world, ceiling=MicroUsdPerGpuHour(1)),
    "its job does not count it": lambda world: replace(
        world, jobs={**world.jobs, J: replace(world.jobs[J], attempts_made=0)}
    ),
    "nobody ends its machine": lambda world: _first(world, state=AttemptState.ENDING),
}


def _first(world: World, **changes: Any) -> World:
    return replace(world, attempts={**world.attempts, FIRST: replace(world.attempts[FIRST], **changes)})


def _second(world: World) -> Any:
    ref = InstanceRef(provider=SHOP, instance_id=InstanceId("m3"))
    return replace(world.attempts[FIRST], id=AttemptId(job=J, number=2), key=attempt_key(INSTALL, J, 2), ref=ref)


@every("break_it", BROKEN.values(), ids=BROKEN.keys())
def test_a_world_that_breaks_a_rule_is_made_sound_by_ending_what_breaks_it(break_it: Callable[[World], World]) -> None:
    world = break_it(two_jobs())
    assert broken_rules(world)
    plan, later = sound(world, Plan(), NOW)
    assert later == applied(world, plan)
    assert broken_rules(later) == ()
    assert later.jobs[K] == world.jobs[K]
    assert later.attempts[SECOND] == world.attempts[SECOND]
    machines = {item.ref for i, item in world.attempts.items() if i.job == J}
    assert {t.ref for t in later.intents.values() if t.kind is IntentKind.TERMINATE} == machines
    assert not any(item.state.counts for i, item in later.attempts.items() if i.job == J)
    assert sound(later, Plan(), NOW)[0].is_empty


def test_the_part_of_a_plan_that_breaks_a_rule_is_left_out_and_the_rest_is_done() -> None:
    world = two_jobs()
    good = replace(world.attempts[SECOND], heartbeat_seq=77)
    bad = replace(world.attempts[FIRST], ceiling=MicroUsdPerGpuHour(1))
    plan, after = sound(world, Plan(attempts={FIRST: bad, SECOND: good}), NOW)
    assert after == applied(world, plan)
    assert plan.attempts[SECOND] == good
    assert plan.attempts[FIRST].end_reason is EndReason.QUARANTINED
    assert plan.attempts[FIRST].machine is MachineState.LIVE


def test_what_a_job_costs_that_is_left_out_of_a_decision_still_counts_in_it() -> None:
    stage = world_with(AttemptState.RUNNING)
    (item,) = stage.attempts.values()
    costly = replace(item, meter=replace(item.meter, since=NOW - timedelta(minutes=150)))
    second = job(2)
    stage = replace(stage, jobs={**stage.jobs, second.id: second}, attempts={item.id: costly})

    def think(world: World) -> Plan:
        if item.id.job in world.jobs:
            raise ValueError("a value that cannot be added up")
        return decide(world, market(offer("o2")), NOW)

    assert second.id in {i.job for i in guarded(think, stage, NOW).attempts}
    short = replace(stage, policy=replace(stage.policy, budget_day=MicroUsd(1_100_000)))
    assert second.id not in {i.job for i in guarded(think, short, NOW).attempts}
    full = replace(stage, policy=replace(stage.policy, machines_max=1))
    assert second.id not in {i.job for i in guarded(think, full, NOW).attempts}


def test_what_is_owed_for_a_job_that_is_left_out_is_left_out_with_it_and_no_other_order_is() -> None:
    """Its orders are written by its quarantine; those of the others, and for machines without a job, are judged on."""
    world = two_jobs(meter=HOSTILE)
    builder = PlanBuilder(world, NOW)
    builder.owe_termination(REF, world.attempts[FIRST].key, FIRST, why="mine")
    builder.owe_termination(world.attempts[SECOND].ref or REF, world.attempts[SECOND].key, SECOND, why="another's")
    foreign = InstanceRef(provider=SHOP, instance_id=InstanceId("m9"))
    builder.owe_termination(foreign, attempt_key(INSTALL, JobId("j9"), 1), None, why="of no attempt")
    world = applied(world, builder.plan())
    judged: list[World] = []

    def think(part: World) -> Plan:
        if J in part.jobs:
            raise ValueError("a value that cannot be added up")
        judged.append(part)
        return Plan()

    guarded(think, world, NOW)
    assert {t.ref for t in judged[-1].intents.values()} == {world.attempts[SECOND].ref, foreign}


@every(
    ("outcome", "state"),
    [
        (LaunchOutcome.NOT_MADE, IntentState.FAILED),
        (LaunchOutcome.MADE, IntentState.DONE),
        (LaunchOutcome.UNKNOWN, IntentState.UNKNOWN),
    ],
)
def test_the_launch_of_a_job_that_cannot_be_judged_is_settled_once(outcome: LaunchOutcome, state: IntentState) -> None:
    world = world_with(AttemptState.INTENDED)
    launch = launch_intent_id(world.attempts[FIRST].key)
    made = instance(InstanceState.RUNNING) if outcome is LaunchOutcome.MADE else None

    def settled(before: IntentState) -> dict[IntentId, IntentState]:
        known = replace(world, intents={launch: replace(world.intents[launch], state=before)})
        plan = launch_contained(known, FIRST, outcome, made, "it raises", NOW)
        return {i: one.state for i, one in plan.intents.items() if one.kind is IntentKind.LAUNCH}

    assert settled(IntentState.SENT) == {launch: state}
    assert settled(IntentState.DONE) == settled(IntentState.FAILED) == {}


def test_an_end_that_the_provider_accepted_is_recorded_at_the_first_answer() -> None:
    """The list that must lack the machine is one begun after that instant: a later answer must not move it."""
    world = world_with(AttemptState.ENDING)
    (order,) = world.intents.values()
    owed = replace(order, state=IntentState.OPEN, accepted_at=None, error="away")
    accepted = applied(world, end_contained(replace(world, intents={order.id: owed}), order.id, NOW))
    assert accepted.intents[order.id] == replace(
        owed, state=IntentState.ACCEPTED, accepted_at=NOW, tries=owed.tries + 1, error=""
    )
    assert end_contained(accepted, order.id, NOW + timedelta(minutes=1)).is_empty
    assert end_contained(replace(world, intents={}), order.id, NOW).is_empty


@every(
    ("ref", "settled", "words"),
    [
        (REF, 0, "it cost $0.0000"),
        (REF, 250_000, "it cost $0.2500"),
        (None, 250_000, "it cost $0.2500"),
        (None, 0, "no machine was made for this attempt; it cost nothing"),
    ],
)
def test_what_is_said_of_a_closed_attempt_is_what_it_cost_or_that_it_had_no_machine(
    ref: InstanceRef | None, settled: int, words: str
) -> None:
    world = world_with(AttemptState.ENDING, ref=ref)
    (item,) = world.attempts.values()
    meter = replace(item.meter, since=None, settled=MicroUsd(settled))
    world = replace(world, attempts={FIRST: replace(item, meter=meter)})
    builder = PlanBuilder(world, NOW)
    builder._close(builder.attempt(FIRST))
    (gone,) = [event for event in builder.plan().events if event.kind == "machine.gone"]
    assert gone.message.endswith(words)
