"""Several machines of one attempt that lose the first one: the healthy ones are kept as those of the next attempt."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from spotd.core import gangs
from spotd.core.decide import decide
from spotd.core.domain.attempts import Attempt, HostStatus
from spotd.core.domain.intents import AttemptId, IntentKind
from spotd.core.domain.members import Members
from spotd.core.domain.plan import Plan, applied, broken_rules
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.domain.world import World
from spotd.core.handover import is_held_back
from spotd.core.kernel.reconcile import reconcile
from spotd.core.recovery import LaunchRecord, Survey, Unknown, record_of, recover
from spotd.core.requests import cancel
from spotd.store.values import from_json, to_json
from spotd_providers.contract.values import InstanceState, MicroUsd
from tests.unit.core.builders import MINUTE, NOW, instance, listing, market, offer
from tests.unit.core.kernel.test_kept_machines import ID, WITHIN, after, item_of, members, running, said

NEXT = replace(ID, number=2)
SILENCE = timedelta(seconds=45)
SECOND = timedelta(seconds=1)
LATER = NOW + SILENCE


def wordy(
    some: World,
    ranks: Iterable[int],
    *,
    at: datetime = LATER,
    first_at: datetime = NOW,
    since: datetime | None = None,
    number: int = 0,
    checks: bool = False,
) -> Plan:
    """What follows of a read that finds the words of these, and nothing new of the first one."""
    words = tuple((number, rank, since or at, at) for rank in ranks)
    found = HostStatus(
        attempt=ID, read_at=at, seq=100, phase="run", gang=(0, ()), first_at=first_at, words=words, marker_at=at
    )
    shown = listing(instance(InstanceState.RUNNING), at=at)
    return reconcile(some, shown, {ID: replace(found, liveness_check=checks)}, at)


def ran(*, replaces_first: bool = True) -> World:
    some = running()
    rules = {name: replace(one, replaces_first=replaces_first) for name, one in some.policy.providers.items()}
    return after(replace(some, policy=replace(some.policy, providers=rules)), lambda now: said(now, 0))


def decided(some: World, at: datetime = LATER, ident: AttemptId = ID) -> World:
    some = replace(some, attempts={**some.attempts, ident: replace(some.attempts[ident], read_at=at)})
    some = applied(some, decide(some, market(offer(), at=at), at))
    assert broken_rules(some) == ()
    return some


def handed_over(*ranks: int) -> World:
    return decided(after(ran(), lambda some: wordy(some, ranks, since=NOW - SILENCE)))


def next_of(some: World) -> Attempt:
    return some.attempts[NEXT]


def test_the_others_go_on_as_the_next_attempt_and_the_first_one_is_replaced() -> None:
    before = ran()
    some = handed_over(1, 2, 3)
    item, former = next_of(some), before.attempts[ID]
    assert ID not in some.attempts or some.attempts[ID].state is AttemptState.ENDED
    assert (item.state, item.ref, item.carried_key, item.former_key) == (
        AttemptState.STARTING,
        former.ref,
        former.carried_key,
        former.key,
    )
    assert item.members == Members(since=(0, 0, 0, 0), round=1, lost=(0,), kept_since=LATER)
    assert (item.meter.rate, item.meter.since, item.quote) == (former.meter.rate, LATER, former.quote)
    job = some.jobs[ID.job]
    assert (job.state, job.attempts_made) == (JobState.PROVISIONING, 2)
    # It is the end of an attempt, and not of its machines.
    assert not [i for i in some.intents.values() if i.kind is IntentKind.TERMINATE and i.is_open]
    some = decided(some, LATER, NEXT)
    some = after(some, lambda now: gangs.begin_mending(now, NEXT, LATER))
    call = gangs.mending_of(some, NEXT, LATER)
    assert call is not None
    assert (call.ranks, call.number, call.shrinks) == ((0,), 2, False)
    some = after(some, lambda now: gangs.record_mending(now, call, LATER + MINUTE))
    known = next_of(some).members
    assert known is not None
    assert (known.since, known.round, known.lost, known.whole_since) == ((2, 0, 0, 0), 2, (), LATER + MINUTE)


def test_the_next_attempt_begins_only_once_all_is_read_that_the_lost_one_stored() -> None:
    some = after(ran(), lambda now: wordy(now, (1, 2, 3), since=NOW - SILENCE))
    unread = replace(some.attempts[ID], read_at=None)
    some = replace(some, attempts={**some.attempts, ID: unread})
    plan = decide(some, market(offer(), at=LATER), LATER)
    assert ID in plan.full_reads
    assert {i: item.state for i, item in applied(some, plan).attempts.items()} == {ID: AttemptState.RUNNING}


def test_those_that_say_nothing_are_lost_with_it() -> None:
    assert [m.lost for m in [next_of(handed_over(1, 3)).members] if m is not None] == [(0, 2)]


@pytest.mark.parametrize(
    ("ranks", "wait", "is_lost"),
    [
        pytest.param((1, 2, 3), {"at": LATER - SECOND}, False, id="the first one was silent for too short a time"),
        pytest.param((1, 2, 3), {"first_at": LATER - SECOND}, False, id="it speaks"),
        pytest.param((1, 2), {}, False, id="the words of one of them may come yet"),
        pytest.param((1, 2), {"since": NOW - SILENCE}, True, id="they had their time"),
        pytest.param((), {}, False, id="no one waits"),
        pytest.param((1, 2, 3), {"number": 4}, False, id="words of another round"),
        pytest.param((0,), {"since": NOW - SILENCE}, False, id="a word of the first one itself"),
        pytest.param((1, 2, 3), {"checks": True}, False, id="not all was read"),
    ],
)
def test_when_the_first_one_is_lost(ranks: tuple[int, ...], wait: dict[str, object], *, is_lost: bool) -> None:
    some = after(ran(), lambda now: wordy(now, ranks, **wait))  # type: ignore[arg-type]  # named above
    known = item_of(some).members
    assert is_lost == (known is not None and 0 in known.lost)


def test_words_count_for_nothing_where_the_provider_replaces_no_first_one() -> None:
    some = after(ran(replaces_first=False), lambda now: wordy(now, (1, 2, 3), since=NOW - SILENCE))
    assert item_of(some).members is None or not members(some).lost
    assert NEXT not in decided(some).attempts


def test_words_keep_an_attempt_alive_whose_first_one_is_silent_for_long() -> None:
    late = NOW + 60 * MINUTE
    plan = wordy(ran(), (1, 2, 3), at=late, first_at=late - SECOND)
    assert plan.attempts.get(ID, item_of(ran())).state is AttemptState.RUNNING


def test_what_the_lost_one_says_once_it_is_back_is_not_believed() -> None:
    some = after(ran(), lambda now: wordy(now, (1, 2, 3)))
    back = after(some, lambda now: said(now, 0, 1, 2, 3, at=LATER + SECOND))
    assert members(back).lost == (0,)


def test_nothing_is_kept_where_nothing_was_saved_since_one_was_replaced_before() -> None:
    some = after(ran(), lambda now: wordy(now, (1, 2, 3)))
    item = replace(item_of(some), members=replace(members(some), newest=""))
    some = decided(replace(some, attempts={ID: item}))
    assert NEXT not in some.attempts
    assert item_of(some).end_reason is EndReason.HOST_LOST
    assert [i for i in some.intents.values() if i.kind is IntentKind.TERMINATE and i.is_open]


def test_a_cancelled_job_begins_no_next_attempt() -> None:
    some = after(ran(), lambda now: wordy(now, (1, 2, 3)))
    some = decided(applied(some, cancel(some, ID.job, LATER)))
    assert NEXT not in some.attempts


def test_the_next_attempt_waits_as_long_as_its_job_allows_and_is_then_ended() -> None:
    some = handed_over(1, 2, 3)
    silent = HostStatus(attempt=NEXT, read_at=LATER)
    shown = replace(instance(InstanceState.RUNNING), key=next_of(some).carried_key)
    for minutes in (3, 6, 9):
        at = LATER + minutes * MINUTE
        plan = reconcile(some, listing(shown, at=at), {NEXT: replace(silent, read_at=at)}, at)
        some = decided(applied(some, plan), at, NEXT)
        assert next_of(some).state is AttemptState.STARTING, next_of(some)
    at = LATER + WITHIN
    some = decided(some, at, NEXT)
    assert next_of(some).end_reason is EndReason.HOST_LOST
    assert [i for i in some.intents.values() if i.kind is IntentKind.TERMINATE and i.is_open]


def test_machines_that_wait_are_ended_in_time_although_a_notice_keeps_the_first_one_from_being_replaced() -> None:
    some = handed_over(1, 2, 3)
    item = replace(next_of(some), notice_at=LATER + MINUTE)
    some = replace(some, attempts={**some.attempts, NEXT: item})
    shown = replace(instance(InstanceState.RUNNING), key=item.carried_key)
    for span, ended in ((29 * MINUTE, False), (30 * MINUTE, True)):
        at = LATER + span
        plan = reconcile(some, listing(shown, at=at), {NEXT: HostStatus(attempt=NEXT, read_at=at)}, at)
        assert (plan.attempts.get(NEXT, item).state is AttemptState.ENDING) == ended


def test_one_that_came_and_never_speaks_ends_all_after_the_time_of_a_start() -> None:
    some = handed_over(1, 2, 3)
    some = decided(some, LATER, NEXT)
    some = after(some, lambda now: gangs.begin_mending(now, NEXT, LATER))
    call = gangs.mending_of(some, NEXT, LATER)
    assert call is not None
    came = LATER + 9 * MINUTE
    some = after(some, lambda now: gangs.record_mending(now, call, came))
    shown = replace(instance(InstanceState.RUNNING), key=next_of(some).carried_key)
    for after_, ended in ((19 * MINUTE, False), (20 * MINUTE, True)):
        at = came + after_
        silent = HostStatus(attempt=NEXT, read_at=at)
        plan = reconcile(some, listing(shown, at=at), {NEXT: silent}, at)
        assert (plan.attempts.get(NEXT, next_of(some)).state is AttemptState.ENDING) == ended


def test_the_wait_is_over_with_the_first_report_of_a_command_that_runs() -> None:
    some = handed_over(1, 2, 3)
    some = decided(some, LATER, NEXT)
    some = after(some, lambda now: gangs.begin_mending(now, NEXT, LATER))
    call = gangs.mending_of(some, NEXT, LATER)
    assert call is not None
    some = after(some, lambda now: gangs.record_mending(now, call, LATER + MINUTE))
    at = LATER + 3 * MINUTE
    shown = replace(instance(InstanceState.RUNNING), key=next_of(some).carried_key)
    ran_again = HostStatus(attempt=NEXT, read_at=at, seq=1, phase="run", gang=(2, ()), first_at=at, alive_at=at)
    some = after(some, lambda now: reconcile(now, listing(shown, at=at), {NEXT: ran_again}, at))
    known = next_of(some).members
    assert known is not None
    assert (next_of(some).state, known.kept_since, known.kept_for) == (AttemptState.RUNNING, None, 3 * MINUTE)
    assert known.kept_cost == 80_000  # three minutes of four machines at 0.40 an hour


def test_what_says_that_all_run_without_the_first_one_begins_nothing() -> None:
    some = handed_over(1, 2, 3)
    for minutes in (1, 2, 3):
        at = LATER + minutes * MINUTE
        shown = replace(instance(InstanceState.RUNNING), key=next_of(some).carried_key)
        lie = HostStatus(attempt=NEXT, read_at=at, seq=minutes, phase="run", gang=(1, ()), first_at=at, alive_at=at)
        some = applied(some, reconcile(some, listing(shown, at=at), {NEXT: lie}, at))
        some = decided(some, at, NEXT)
        assert (next_of(some).state, some.jobs[ID.job].attempts_made) == (AttemptState.STARTING, 2)
    some = decided(some, LATER + WITHIN, NEXT)
    assert next_of(some).end_reason is EndReason.HOST_LOST


def test_a_copy_of_the_state_from_the_wait_ends_no_machines_that_run_with_another_first_one() -> None:
    some = handed_over(1, 2, 3)
    at = LATER + WITHIN + MINUTE
    shown = replace(instance(InstanceState.RUNNING), key=next_of(some).carried_key)
    runs = HostStatus(attempt=NEXT, read_at=at, seq=9, phase="run", gang=(2, ()), first_at=at, alive_at=at)
    some = decided(after(some, lambda now: reconcile(now, listing(shown, at=at), {NEXT: runs}, at)), at, NEXT)
    known = next_of(some).members
    assert known is not None
    assert (next_of(some).state, known.lost, known.is_outdated) == (AttemptState.RUNNING, (), True)


def test_a_wait_that_began_in_the_attempt_before_is_that_ones_up_to_the_handover() -> None:
    some = decided(after(ran(), lambda now: said(now, 0, 2, phase="save")), NOW)
    at = NOW + 5 * MINUTE
    found = {"at": at, "first_at": NOW + 4 * MINUTE, "since": NOW + 3 * MINUTE}
    some = after(some, lambda now: wordy(now, (1, 3), **found))  # type: ignore[arg-type]  # named above
    some = replace(some, attempts={ID: replace(item_of(some), read_at=at)})
    plan = decide(some, market(offer(), at=at), at)
    former, known = plan.attempts[ID].members, plan.attempts[NEXT].members
    assert former is not None
    assert known is not None
    assert (former.kept_for, known.kept_since, known.lost) == (5 * MINUTE, NOW, (0, 2))
    later = known.going_on(MicroUsd(7), at + 2 * MINUTE, plan.attempts[NEXT].intended_at)
    assert (later.kept_for, later.kept_cost) == (2 * MINUTE, 7)


def test_a_copy_of_the_state_from_before_ends_no_machine_that_the_next_attempt_has() -> None:
    older, some = ran(), handed_over(1, 2, 3)
    unknown = Unknown(number=2, record=record_of(next_of(some)))
    at = LATER + MINUTE
    found = after(older, lambda now: recover(now, [Survey(job=ID.job, unknown=[unknown])], at))
    ends = [i for i in found.intents.values() if i.kind is IntentKind.TERMINATE and i.is_open]
    assert all(is_held_back(found, one, at, at) for one in ends)
    shown = replace(instance(InstanceState.RUNNING), key=next_of(some).carried_key)
    found = after(found, lambda now: reconcile(now, listing(shown, at=at), {}, at))
    assert found.attempts[NEXT].ref == next_of(some).ref
    assert not [i for i in found.intents.values() if i.kind is IntentKind.TERMINATE and i.is_open]


def recovered(at: datetime) -> World:
    """A state from before the handover, once the store was asked for what it lacks."""
    stored = from_json(LaunchRecord, to_json(record_of(next_of(handed_over(1, 2, 3)))))
    survey = Survey(job=ID.job, unknown=[Unknown(number=2, record=stored)])
    return after(ran(), lambda now: recover(now, [survey], at))


def next_read(some: World, at: datetime, **read: Any) -> World:
    shown = replace(instance(InstanceState.RUNNING), key=item_of(ran()).key)
    status = HostStatus(attempt=NEXT, read_at=at, **read)
    return decided(after(some, lambda now: reconcile(now, listing(shown, at=at), {NEXT: status}, at)), at, NEXT)


def test_a_state_that_does_not_know_the_next_attempt_has_its_first_one_replaced_all_the_same() -> None:
    at = LATER + 20 * MINUTE
    found = recovered(at)
    for minutes in (0, 1, 9):
        found = next_read(found, at + minutes * MINUTE)
        assert next_of(found).state is AttemptState.STARTING, next_of(found).end_detail
    call = gangs.mending_of(found, NEXT, at)
    assert call is not None
    assert (call.ranks, call.number) == ((0,), 2)
    assert decided(found, at + WITHIN, NEXT).attempts[NEXT].end_reason is EndReason.HOST_LOST


def test_a_state_that_does_not_know_the_next_attempt_replaces_no_first_one_that_spoke_in_it() -> None:
    at = LATER + 20 * MINUTE
    found = recovered(at)
    for seconds in (0, 1, 2):
        when = at + seconds * SECOND
        ran_again = {"seq": 9, "phase": "run", "gang": (2, ()), "first_at": when, "alive_at": when}
        found = next_read(found, when, **ran_again)
        assert gangs.mending_of(found, NEXT, when) is None
    known = next_of(found).members
    assert known is not None
    assert (next_of(found).state, known.lost, known.is_outdated) == (AttemptState.RUNNING, (), True)


def test_two_attempts_that_are_over_hold_back_no_end_of_the_machines_that_both_had() -> None:
    older, some = ran(), handed_over(1, 2, 3)
    at = LATER + MINUTE
    unknown = Unknown(number=2, record=record_of(next_of(some)))
    found = after(older, lambda now: recover(now, [Survey(job=ID.job, unknown=[unknown])], at))
    (order,) = [i for i in found.intents.values() if i.kind is IntentKind.TERMINATE and i.is_open]
    assert is_held_back(found, order, at, at)
    over = replace(found.attempts[NEXT], state=AttemptState.ENDING)
    found = replace(found, attempts={**found.attempts, NEXT: over})
    assert not is_held_back(found, order, at, at)
