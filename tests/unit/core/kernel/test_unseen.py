"""Machines that no list ever showed: what their hosts wrote decides, and nobody waits for a provider for ever."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from spotd.core.billing import ENDING_TAKES
from spotd.core.budgets import committed
from spotd.core.decide import decide
from spotd.core.domain.attempts import HostStatus, MachineState
from spotd.core.domain.intents import AttemptId, IntentKind, IntentState, JobId
from spotd.core.domain.plan import Plan, applied
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.domain.world import World
from spotd.core.kernel.outcomes import after_restart, launch_unknown
from spotd.core.kernel.reconcile import reconcile
from spotd.core.metering import machines_in_use, spent
from spotd.core.requests import cancel
from spotd.core.timeline import redated
from spotd_providers.contract.values import InstanceState, MicroUsdPerHour, ProviderName, cost
from tests.cases import every
from tests.unit.core.builders import MINUTE, NOW, SHOP, instance, listing, market, offer, report, world_with

FIRST = AttemptId(job=JobId("j1"), number=1)
WINDOW = timedelta(minutes=3)
PATIENCE = timedelta(minutes=30) + timedelta(minutes=2) + timedelta(seconds=90)
"""Lease, time for saving and stop_grace."""


def booked(seconds: int) -> int:
    """What a machine costs that has given its last sign of life after so long."""
    return cost(MicroUsdPerHour(400_000), timedelta(seconds=seconds) + ENDING_TAKES)


def lost_launch(at: timedelta = timedelta(0)) -> World:
    """A launch whose answer was lost so long ago."""
    world = world_with(AttemptState.INTENDED, intended_at=NOW - at, outcome_unknown=False)
    world = replace(world, intents={i: replace(t, state=IntentState.SENT) for i, t in world.intents.items()})
    return applied(world, launch_unknown(world, FIRST, "time-out", NOW - at))


def twice_missing(world: World, at: datetime) -> Plan:
    """What follows from the second of two lists that lack the machine; the first one alone changes nothing of it."""
    first = reconcile(world, listing(at=at), {}, at)
    assert first.list_again == {SHOP}, "its host wrote, so that a machine there was, and one list may lack it"
    assert first.attempts[FIRST].machine is MachineState.EXPECTED
    again = reconcile(applied(world, first), listing(at=at), {}, at + MINUTE)
    assert FIRST not in again.attempts, "the same list is no second one"
    return reconcile(applied(world, first), listing(at=at + MINUTE), {}, at + MINUTE)


def test_a_job_that_was_done_while_spotd_was_away_is_done_and_its_machine_is_booked() -> None:
    began = NOW - timedelta(minutes=20)
    world = world_with(AttemptState.INTENDED, intended_at=began, outcome_unknown=False)
    world = replace(world, intents={i: replace(t, state=IntentState.SENT) for i, t in world.intents.items()})
    world = applied(world, after_restart(world, NOW))
    done = report(seq=200, phase="done", exit_reason=EndReason.DONE, exit_code=0, exit_at=NOW - 6 * MINUTE)
    plan = reconcile(world, listing(), done, NOW)
    assert plan.jobs[FIRST.job].state is JobState.SUCCEEDED
    item = plan.attempts[FIRST]
    assert (item.end_reason, item.exit_code) == (EndReason.DONE, 0)
    assert item.meter.settled == booked(14 * 60), "from its intent to a moment after its end"
    assert item.machine is MachineState.EXPECTED, "its key is searched for until the window has passed"
    world = applied(world, plan)
    later = NOW + WINDOW + MINUTE
    gone = twice_missing(world, later)
    assert gone.attempts[FIRST].state is AttemptState.ENDED
    assert gone.jobs[FIRST.job].spent == booked(14 * 60)
    found = reconcile(world, listing(instance(InstanceState.RUNNING), at=later), {}, later)
    assert [t.kind for t in found.intents.values() if t.state is IntentState.OPEN] == [IntentKind.TERMINATE]


@every(
    ("state", "minutes"),
    [(InstanceState.RUNNING, 14 + 40), (InstanceState.GONE, 14)],
    ids=["it runs", "it is gone"],
)
def test_a_machine_that_is_found_after_its_runner_ended_has_billed_since_if_it_runs(
    state: InstanceState, minutes: int
) -> None:
    world = lost_launch(20 * MINUTE)
    done = report(seq=200, phase="done", exit_reason=EndReason.LEASE_EXPIRED, exit_at=NOW - 6 * MINUTE)
    world = applied(world, reconcile(world, {}, done, NOW))
    later = NOW + 40 * MINUTE
    plan = reconcile(world, listing(instance(state), at=later), {}, later)
    assert spent(plan.attempts[FIRST], later) == pytest.approx(booked(minutes * 60), abs=1)


@every(
    ("cause", "code", "state"),
    [
        (EndReason.USER_ERROR, 1, JobState.RECOVERING),
        (EndReason.LEASE_EXPIRED, None, JobState.RECOVERING),
        (EndReason.PREEMPTED, 143, JobState.RECOVERING),
    ],
)
def test_any_end_that_its_host_reported_decides(cause: EndReason, code: int | None, state: JobState) -> None:
    plan = reconcile(
        lost_launch(MINUTE), listing(), report(seq=9, phase="done", exit_reason=cause, exit_code=code), NOW
    )
    assert plan.jobs[FIRST.job].state is state
    assert plan.attempts[FIRST].end_reason is not EndReason.NEVER_LAUNCHED


def test_an_end_is_not_taken_in_while_the_answer_to_the_launch_is_on_its_way() -> None:
    world = world_with(AttemptState.INTENDED, outcome_unknown=False)
    world = replace(world, intents={i: replace(t, state=IntentState.SENT) for i, t in world.intents.items()})
    done = report(seq=9, phase="done", exit_reason=EndReason.DONE, exit_code=0)
    assert FIRST.job not in reconcile(world, listing(), done, NOW).jobs


def test_a_machine_that_speaks_was_launched_whatever_the_lists_lack() -> None:
    world, at, plan = lost_launch(timedelta(hours=1)), NOW, Plan()
    for minute in range(30):
        at = NOW + minute * MINUTE
        speaks = {i: replace(r, read_at=at, seq=minute, phase="run") for i, r in report().items()}
        world = applied(world, reconcile(world, listing(at=at), speaks, at))
    assert world.attempts[FIRST].state is AttemptState.INTENDED
    silent = {i: replace(r, read_at=at + 2 * MINUTE, seq=29) for i, r in report().items()}
    for _ in range(3):
        at += 2 * MINUTE
        plan = reconcile(world, listing(at=at), {i: replace(r, read_at=at) for i, r in silent.items()}, at)
        world = applied(world, plan)
    assert plan.attempts[FIRST].end_reason is EndReason.HOST_LOST
    assert plan.jobs[FIRST.job].spent > 0


def test_one_list_that_lacks_a_machine_that_spoke_and_fell_silent_is_no_reason_for_another_one() -> None:
    def beat(seq: int, at: datetime) -> dict[AttemptId, HostStatus]:
        return {i: replace(r, read_at=at, seq=seq, phase="run") for i, r in report().items()}

    before = lost_launch(timedelta(hours=1))
    spoke = applied(before, reconcile(before, listing(at=NOW), beat(1, NOW), NOW))
    spoke = applied(spoke, reconcile(spoke, {}, beat(1, NOW + MINUTE), NOW + MINUTE))
    at = NOW + 2 * MINUTE
    first = reconcile(spoke, listing(at=at), beat(1, at), at)
    world = applied(spoke, first)
    assert world.attempts[FIRST].state is AttemptState.INTENDED
    assert SHOP in first.list_again
    later = at + timedelta(seconds=12)
    found = reconcile(world, listing(instance(InstanceState.RUNNING), at=later), beat(1, later), later)
    assert found.attempts[FIRST].ref is not None
    assert reconcile(world, listing(at=later), beat(1, later), later).attempts[FIRST].end_reason is EndReason.HOST_LOST
    again = applied(world, reconcile(world, listing(at=later), beat(2, later), later))
    again = applied(again, reconcile(again, {}, beat(2, later + MINUTE), later + MINUTE))
    silent = later + 2 * MINUTE
    plan = reconcile(again, listing(at=silent), beat(2, silent), silent)
    assert applied(again, plan).attempts[FIRST].state is AttemptState.INTENDED, "it spoke after the first of the two"


def test_a_machine_that_speaks_before_its_launch_is_settled_saves_and_is_booked_when_its_job_is_cancelled() -> None:
    world, died = lost_launch(timedelta(hours=3)), NOW - timedelta(hours=1)
    speaks = {i: replace(r, read_at=NOW, seq=9, phase="run", alive_at=died) for i, r in report().items()}
    world = applied(world, reconcile(world, {}, speaks, NOW))
    world = applied(world, cancel(world, FIRST.job, NOW))
    item = world.attempts[FIRST]
    assert item.stop is not None
    assert (item.state, item.stop.flush) == (AttemptState.INTENDED, True), "what it has not saved would be lost"
    late = item.stop.deadline
    plan = reconcile(world, {}, {i: replace(r, read_at=late) for i, r in speaks.items()}, late)
    assert plan.attempts[FIRST].end_reason is EndReason.CANCELLED
    assert spent(plan.attempts[FIRST], late) == booked(2 * 3600), "to a moment after its last sign of life"


def test_a_machine_that_lived_while_spotd_was_away_is_booked_for_as_long_as_it_lived() -> None:
    world, plan = lost_launch(timedelta(hours=10)), Plan()
    died = NOW - timedelta(hours=9)
    for minute in range(0, 9, 2):
        at = NOW + minute * MINUTE
        left = {i: replace(r, read_at=at, seq=240, phase="run", alive_at=died) for i, r in report().items()}
        plan = reconcile(world, listing(at=at), left, at)
        world = applied(world, plan)
        if plan.jobs and plan.jobs[FIRST.job].spent:
            break
    assert plan.attempts[FIRST].end_reason is EndReason.HOST_LOST
    assert plan.jobs[FIRST.job].spent == booked(3600), "to a moment after its last sign of life"


def test_a_cluster_that_was_given_up_keeps_its_money_and_its_place_until_two_complete_lists_lack_it() -> None:
    world = lost_launch()
    item = world.attempts[FIRST]
    item = replace(item, quote=replace(item.quote, offer=replace(item.quote.offer, ends_itself=False)))
    world = replace(world, attempts={FIRST: item})
    at = NOW + WINDOW + PATIENCE
    world = applied(world, reconcile(world, {}, {i: replace(r, read_at=at) for i, r in report().items()}, at))
    assert world.attempts[FIRST].end_reason is EndReason.LAUNCH_UNKNOWN

    def is_kept(at: datetime) -> tuple[int, bool]:
        return machines_in_use(world, at), sum(committed(world, one, at) for one in world.attempts.values()) > 0

    at += timedelta(days=30)
    assert is_kept(at) == (1, True)
    cut = {name: replace(one, complete=False) for name, one in listing(at=at).items()}
    for rows in (cut, cut, listing(at=at)):
        world = applied(world, reconcile(world, rows, {}, at))
        assert is_kept(at) == (1, True), "one list may lack what exists, and one that is cut proves nothing"
    at += WINDOW
    world = applied(world, reconcile(world, listing(at=at), {}, at))
    assert is_kept(at) == (0, False)


def test_a_job_whose_launch_got_no_answer_goes_on_elsewhere_when_its_provider_stays_away() -> None:
    world = lost_launch()
    early = NOW + WINDOW + PATIENCE - timedelta(seconds=1)
    looked = {i: replace(r, read_at=early) for i, r in report().items()}
    assert applied(world, reconcile(world, {}, looked, early)).attempts[FIRST].state is AttemptState.INTENDED
    late = NOW + WINDOW + PATIENCE
    looked = {i: replace(r, read_at=late) for i, r in report().items()}
    plan = reconcile(world, {}, looked, late)
    assert plan.attempts[FIRST].end_reason is EndReason.LAUNCH_UNKNOWN
    assert plan.attempts[FIRST].state is AttemptState.ENDING
    world = applied(world, plan)
    assert [t.state for t in world.intents.values()] == [IntentState.UNKNOWN], "its key is still searched for"
    other = ProviderName("other")
    rules = replace(world.policy.providers[SHOP], name=other)
    world = replace(world, policy=replace(world.policy, providers={**world.policy.providers, other: rules}))
    cheap = replace(
        market(replace(offer("x"), provider=other), at=late),
        by_provider={
            other: replace(market(replace(offer("x"), provider=other), at=late).by_provider[SHOP], provider=other)
        },
    )
    placed = decide(world, cheap, late + timedelta(seconds=30))
    assert [t.provider for t in placed.intents.values() if t.kind is IntentKind.LAUNCH] == [other]
    found = reconcile(
        applied(world, placed), listing(instance(InstanceState.RUNNING), at=late + MINUTE), {}, late + MINUTE
    )
    ended = [t for t in found.intents.values() if t.kind is IntentKind.TERMINATE]
    assert [t.attempt for t in ended] == [FIRST], "the first machine is ended when it is found"


def test_a_launch_without_an_answer_is_not_given_up_while_the_store_is_away_or_its_machine_speaks() -> None:
    world, late = lost_launch(), NOW + timedelta(hours=2)
    assert applied(world, reconcile(world, {}, {}, late)).attempts[FIRST].state is AttemptState.INTENDED
    speaks = {i: replace(r, read_at=late, seq=7, phase="run") for i, r in report().items()}
    assert applied(world, reconcile(world, {}, speaks, late)).attempts[FIRST].state is AttemptState.INTENDED


def test_lists_of_a_part_of_a_provider_hold_no_job_back_for_ever() -> None:
    world, late = lost_launch(), NOW + WINDOW + PATIENCE
    looked = {i: replace(r, read_at=late) for i, r in report().items()}
    cut_off = reconcile(world, listing(complete=False, at=late), looked, late)
    assert cut_off.attempts[FIRST].end_reason is EndReason.LAUNCH_UNKNOWN


def test_a_launch_that_was_given_up_without_an_answer_holds_no_slot() -> None:
    world = lost_launch()
    world = replace(world, policy=replace(world.policy, machines_max=1))
    late = NOW + WINDOW + PATIENCE
    assert machines_in_use(world, late) == 1
    looked = {i: replace(r, read_at=late) for i, r in report().items()}
    world = applied(world, reconcile(world, {}, looked, late))
    assert machines_in_use(world, late) == 0
    assert decide(world, market(offer("o2"), at=late), late).attempts, "its job goes on, although one machine is all"


def read_at(when: datetime) -> dict[AttemptId, HostStatus]:
    """Return what a full read of a host that wrote nothing showed then."""
    return {i: replace(r, read_at=when) for i, r in report().items()}


def test_one_list_that_lacks_a_machine_whose_launch_has_no_answer_is_no_reason_for_another_one() -> None:
    at = NOW + WINDOW + MINUTE
    first = reconcile(lost_launch(), listing(at=at), read_at(at), at)
    world = applied(lost_launch(), first)
    assert world.attempts[FIRST].state is AttemptState.INTENDED
    assert SHOP in first.list_again
    at += timedelta(seconds=12)
    seen = reconcile(world, listing(instance(InstanceState.RUNNING), at=at), read_at(at), at)
    assert seen.attempts[FIRST].state is AttemptState.STARTING, "its row was lacking, and its host could not write"
    never = reconcile(world, listing(at=at), read_at(at), at)
    assert never.attempts[FIRST].end_reason is EndReason.NEVER_LAUNCHED


def test_a_machine_of_a_launch_that_was_given_up_is_not_gone_because_the_first_list_lacks_it() -> None:
    at = NOW + WINDOW + PATIENCE
    world = applied(lost_launch(), reconcile(lost_launch(), {}, read_at(at), at))
    assert world.attempts[FIRST].end_reason is EndReason.LAUNCH_UNKNOWN
    at += MINUTE
    world = applied(world, reconcile(world, listing(at=at), {}, at))
    assert world.attempts[FIRST].machine is MachineState.EXPECTED
    back = at + MINUTE
    found = reconcile(world, listing(instance(InstanceState.RUNNING), at=back), {}, back)
    assert [t.kind for t in found.intents.values() if t.state is IntentState.OPEN] == [IntentKind.TERMINATE]
    assert spent(found.attempts[FIRST], back) > 0
    gone = reconcile(world, listing(at=at + WINDOW), {}, at + WINDOW)
    assert gone.attempts[FIRST].machine is MachineState.GONE


def test_a_machine_that_was_heard_and_is_silent_for_long_is_given_up_although_its_provider_stays_away() -> None:
    world = lost_launch(timedelta(hours=10))
    spoke = NOW - timedelta(hours=9)
    speaks = {i: replace(r, seq=9, phase="run", alive_at=spoke) for i, r in read_at(spoke).items()}
    world = applied(world, reconcile(world, {}, speaks, spoke))
    assert world.attempts[FIRST].heartbeat_seen_at == spoke
    limit = world.policy.silence_limit
    early = spoke + limit - MINUTE
    silent = {i: replace(r, seq=9, alive_at=spoke) for i, r in read_at(early).items()}
    world = applied(world, reconcile(world, {}, silent, early))
    assert world.attempts[FIRST].state is AttemptState.INTENDED
    late = spoke + limit + MINUTE
    silent = {i: replace(r, seq=9, alive_at=spoke) for i, r in read_at(late).items()}
    plan = reconcile(world, {}, silent, late)
    assert plan.attempts[FIRST].end_reason is EndReason.HOST_LOST
    assert spent(plan.attempts[FIRST], late) == booked(3600), "to a moment after its last sign of life"
    assert plan.jobs[FIRST.job].state is JobState.RECOVERING


@every("says_its_end", [False, True])
def test_a_machine_that_was_heard_is_booked_for_as_long_whatever_our_clock_is_set_to(says_its_end: bool) -> None:
    world = lost_launch(timedelta(hours=2))
    speaks = {i: replace(r, seq=9, phase="run", alive_at=NOW) for i, r in read_at(NOW).items()}
    world = applied(world, reconcile(world, {}, speaks, NOW))
    step = timedelta(hours=8)
    world = applied(world, redated(world, step, NOW))
    late = NOW + step + world.policy.silence_limit
    early = {i: replace(r, seq=9, phase="run", alive_at=NOW) for i, r in read_at(late).items()}
    world = applied(world, reconcile(world, {}, early, late))
    late += MINUTE
    left = {i: replace(r, seq=9, phase="run", alive_at=NOW) for i, r in read_at(late).items()}
    if says_its_end:
        left = {i: replace(r, exit_reason=EndReason.DONE, exit_code=0, exit_at=NOW) for i, r in left.items()}
    plan = reconcile(world, {}, left, late)
    assert plan.attempts[FIRST].end_reason is (EndReason.DONE if says_its_end else EndReason.HOST_LOST)
    assert spent(plan.attempts[FIRST], late) == booked(2 * 3600), "to a moment after its last sign of life"


def test_a_machine_that_wrote_before_it_was_listed_is_booked_up_to_its_end_hours_later() -> None:
    world = lost_launch()
    rules = replace(world.policy.providers[SHOP], ends_itself=False)
    world = replace(world, policy=replace(world.policy, providers={SHOP: rules}))
    speaks = {i: replace(r, seq=9, phase="run", alive_at=NOW) for i, r in read_at(NOW).items()}
    world = applied(world, reconcile(world, {}, speaks, NOW))
    for minutes in (1, 60, 120):
        at = NOW + minutes * MINUTE
        speaks = {i: replace(r, seq=9 + minutes, phase="run", alive_at=at) for i, r in read_at(at).items()}
        world = applied(world, reconcile(world, listing(instance(InstanceState.RUNNING), at=at), speaks, at))
    gone, at = instance(InstanceState.GONE), NOW + 121 * MINUTE
    world = applied(world, reconcile(world, listing(gone, at=at), read_at(at), at))
    at += MINUTE
    plan = reconcile(world, listing(gone, at=at), read_at(at), at)
    rate = plan.attempts[FIRST].quote.price.total
    assert 2 * rate <= plan.attempts[FIRST].meter.settled <= rate * 121 // 60 + 2


def test_a_machine_that_was_woken_before_any_list_came_is_booked_from_its_intent() -> None:
    world = lost_launch(timedelta(hours=2))
    woken = replace(instance(InstanceState.RUNNING), created_at=NOW - MINUTE)
    (item,) = reconcile(world, listing(woken), {}, NOW).attempts.values()
    assert spent(item, NOW) == 2 * item.quote.price.total


def test_one_that_a_list_lacked_meanwhile_is_booked_from_the_start_that_its_provider_states() -> None:
    world = lost_launch(timedelta(hours=2))
    lacked = NOW - timedelta(hours=1)
    world = applied(world, reconcile(world, listing(at=lacked), {}, lacked))
    found = replace(instance(InstanceState.RUNNING), created_at=NOW - 6 * MINUTE)
    (item,) = reconcile(world, listing(found), {}, NOW).attempts.values()
    assert spent(item, NOW) == item.quote.price.total // 10


@every(("minutes", "is_over"), [(19, False), (20, True), (60 * 24 * 30, True)])
def test_a_machine_that_never_spoke_is_given_up_in_time_although_its_provider_left_the_config(
    minutes: int, *, is_over: bool
) -> None:
    launched = NOW - minutes * MINUTE
    world = world_with(AttemptState.STARTING, launched_at=launched, intended_at=launched)
    world = replace(world, policy=replace(world.policy, providers={}))
    plan = reconcile(world, {}, report(seq=-1, phase=""), NOW)
    after = applied(world, plan)
    item = after.attempts[FIRST]
    assert item.end_reason is (EndReason.PROVISION_TIMEOUT if is_over else None)
    assert plan.wake_at == (None if is_over else launched + 20 * MINUTE)
    if is_over:
        assert after.jobs[FIRST.job].state is JobState.RECOVERING
        assert [t.kind for t in after.intents.values()] == [IntentKind.TERMINATE], "its end is owed for good"
