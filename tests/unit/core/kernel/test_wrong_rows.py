"""One wrong row of a list ends no machine, whatever is known of its host; two lists that say it do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from spotd.core.domain.attempts import Attempt, MachineState
from spotd.core.domain.intents import AttemptId, Intent, IntentKind, IntentState, JobId, terminate_intent_id
from spotd.core.domain.plan import Plan, applied
from spotd.core.domain.policy import attempt_key
from spotd.core.domain.states import AttemptState, EndReason
from spotd.core.domain.world import World
from spotd.core.kernel.reconcile import reconcile
from spotd.core.metering import spent
from spotd_providers.contract.values import (
    AttemptKey,
    HostId,
    Instance,
    InstanceId,
    InstanceRef,
    InstanceState,
    Listing,
    Loss,
    Market,
    cost,
)
from tests.cases import every
from tests.unit.core.builders import INSTALL, MINUTE, NOW, REF, SHOP, instance, listing, report, world_with
from tests.unit.core.kernel.test_holding import world as outbid_world

A, S = AttemptState, InstanceState
FIRST = AttemptId(job=JobId("j1"), number=1)
SECOND = timedelta(seconds=1)
RUNS = instance(S.RUNNING)
OTHER = InstanceRef(provider=SHOP, instance_id=InstanceId("m2"))

WRONG: dict[str, Instance] = {
    "gone": instance(S.GONE),
    "gone: preempted": instance(S.GONE, loss=Loss.PREEMPTED),
    "gone: the image": instance(S.GONE, loss=Loss.IMAGE_ERROR),
    "gone: failed": instance(S.GONE, loss=Loss.PROVISION_FAILED),
    "gone: for want of money": instance(S.GONE, loss=Loss.BALANCE),
    "paused": instance(S.PAUSED),
    "paused: outbid": instance(S.PAUSED, loss=Loss.OUTBID),
    "ending": instance(S.ENDING, loss=Loss.HOST_LOST),
    "another market": replace(RUNS, market=Market.ON_DEMAND),
}
HARMLESS: dict[str, Instance] = {
    "another host": replace(RUNS, host_id=HostId("h99")),
    "made in the future": replace(RUNS, created_at=datetime(9999, 1, 1, tzinfo=UTC)),
    "made in the past": replace(RUNS, created_at=datetime(1970, 1, 1, tzinfo=UTC)),
    "another key": replace(RUNS, key=attempt_key(INSTALL, JobId("j9"), 3)),
    "another machine": replace(RUNS, ref=OTHER),
}


class Beating:
    """A machine whose host beats every five seconds until it is silent, under a daemon that looks as often."""

    def __init__(self, world: World | None = None, **changes: Any) -> None:
        self.world = world_with(A.RUNNING, **changes) if world is None else world
        self.now = NOW
        self.seq = 5
        self.silent = False
        self.list: dict[Any, Listing] = listing(RUNS)
        self.plans: list[Plan] = []

    def look(self, *rows: Instance, listed: bool = True, liveness_check: bool = False, **changes: Any) -> Plan:
        """Five seconds pass, and the provider is listed again where asked for."""
        self.now += 5 * SECOND
        self.seq += 0 if self.silent else 1
        if listed:
            self.list = listing(*rows, at=self.now - SECOND)
        heard = {
            i: replace(r, read_at=self.now)
            for i, r in report(
                seq=self.seq, phase="run" if self.seq >= 0 else "", liveness_check=liveness_check, **changes
            ).items()
        }
        plan = reconcile(self.world, self.list, heard, self.now)
        self.world = applied(self.world, plan)
        self.plans.append(plan)
        return plan

    @property
    def item(self) -> Attempt:
        """The newest row of the attempt, which an ended one has in a plan alone."""
        return {**self.world.attempts, **{i: a for plan in self.plans for i, a in plan.attempts.items()}}[FIRST]

    @property
    def ends(self) -> list[Intent]:
        return [t for plan in self.plans for t in plan.intents.values() if t.kind is IntentKind.TERMINATE]


@every("row", WRONG.values(), ids=WRONG)
@every("ours", [A.RUNNING, A.STOPPING])
def test_one_list_that_says_it_ends_nothing_and_asks_for_another(row: Instance, ours: AttemptState) -> None:
    seen = Beating(world_with(ours))
    before = seen.item
    plan = seen.look(row)
    assert plan.list_again == {SHOP}
    for _ in range(3):
        assert seen.look(row, listed=False).list_again == {SHOP}, "the same list is no second one"
    assert (seen.item.state, seen.item.machine) == (ours, MachineState.LIVE)
    assert (seen.item.meter.rate, seen.item.meter.settled) == (before.meter.rate, 0), "it bills on"
    seen.look(RUNS)
    assert seen.item.over_since is None
    assert seen.item.state is ours
    assert not seen.ends
    kinds = [e.kind for plan in seen.plans for e in plan.events]
    assert kinds.count("machine.doubted") == 1, "what was not believed is said once it is known"


@every("row", WRONG.values(), ids=WRONG)
def test_two_lists_that_say_it_end_it_though_the_host_gives_signs_of_life(row: Instance) -> None:
    seen = Beating()
    seen.look(row)
    glance = seen.look(row, liveness_check=True)
    if row.market is None:  # of another market nothing that the host wrote can be used to the contrary
        assert glance.full_reads == {FIRST}, "what its host wrote is read in full before"
        seen.look(row)
    assert not seen.item.state.counts
    assert "machine.doubted" not in [e.kind for plan in seen.plans for e in plan.events]


@every("row", [row for row in WRONG.values() if row.market is None], ids=list(WRONG)[:-1])
def test_one_list_and_a_silent_host_end_its_attempt_and_never_close_it(row: Instance) -> None:
    """A machine that is called gone is ended by nobody, so that silence, which may be its network's, is not enough."""
    seen = Beating()
    seen.look(row)
    seen.silent = True
    for _ in range(8):
        seen.look(listed=False)
        assert seen.item.state.counts
    for _ in range(2):
        seen.look(listed=False)
    assert seen.item.state.counts is (row.state is S.GONE)
    assert bool(seen.ends) is (row.state is not S.GONE)
    seen.look(row)
    assert not seen.item.state.counts


@every("phase", ["done", "save", "run"])
@every("is_newer", [False, True], ids=["the same list", "a newer one"])
def test_a_machine_whose_host_says_that_it_ends_itself_is_gone_by_two_lists(phase: str, *, is_newer: bool) -> None:
    """Its order to end itself may come to nothing, as ours does, while its provider is away."""
    owed = Intent(
        id=terminate_intent_id(REF),
        kind=IntentKind.TERMINATE,
        provider=SHOP,
        key=world_with(A.ENDING).attempts[FIRST].key,
        state=IntentState.OPEN,
        created_at=NOW,
        attempt=FIRST,
        ref=REF,
        tries=7,
        error="it does not answer",
    )
    seen = Beating(replace(world_with(A.ENDING, phase=phase), intents={owed.id: owed}))
    after_one = seen.look(instance(S.GONE))
    assert FIRST not in after_one.attempts or after_one.attempts[FIRST].state is A.ENDING
    assert seen.world.intents[owed.id].state is IntentState.OPEN
    seen.look(instance(S.GONE), listed=is_newer)
    assert (seen.item.state is A.ENDED) is is_newer


@pytest.mark.long
@every("row", WRONG.values(), ids=WRONG)
def test_wrong_rows_that_come_and_go_for_an_hour_end_nothing(row: Instance) -> None:
    seen = Beating()
    for n in range(720):
        seen.look(row if n % 3 == 0 else RUNS)
    assert seen.item.state is A.RUNNING
    assert not seen.ends


@every("row", HARMLESS.values(), ids=HARMLESS)
def test_no_other_wrong_value_of_a_row_ends_it_however_often_it_comes(row: Instance) -> None:
    seen = Beating()
    for _ in range(20):
        seen.look(row)
    assert seen.item.state is A.RUNNING
    assert not [t for t in seen.ends if t.ref == REF]


def test_what_its_host_reported_of_its_end_ends_the_attempt_and_two_lists_close_it() -> None:
    seen = Beating()
    seen.look(instance(S.GONE, loss=Loss.SELF), exit_reason=EndReason.DONE, exit_code=0)
    assert (seen.item.state, seen.item.end_reason) == (A.ENDING, EndReason.DONE)
    assert [intent.ref for intent in seen.ends] == [REF], "its host may have failed to end it"
    seen.look(instance(S.GONE, loss=Loss.SELF))
    assert seen.item.state is A.ENDED


@every("row", WRONG.values(), ids=WRONG)
def test_a_machine_that_never_spoke_is_over_when_a_second_list_says_so(row: Instance) -> None:
    seen = Beating(world_with(A.STARTING))
    seen.silent, seen.seq = True, -1
    before = seen.item
    assert seen.look(row).list_again == {SHOP}
    first = seen.now
    assert (seen.item.state, seen.item.machine) == (A.STARTING, MachineState.LIVE)
    assert (seen.item.meter.rate, seen.item.meter.settled) == (before.meter.rate, 0)
    seen.now += 60 * MINUTE
    seen.look(row)
    assert not seen.item.state.counts
    if row.state in {S.GONE, S.ENDING}:
        assert before.meter.since is not None
        most = cost(before.meter.rate, first - before.meter.since)
        assert spent(seen.item, seen.now) <= most + 1, "it is booked up to the first list that said it"


def test_a_machine_that_never_spoke_is_over_once_a_list_states_it_and_the_next_one_lacks_it() -> None:
    seen = Beating(world_with(A.STARTING, ever_listed=True))
    seen.silent, seen.seq = True, -1
    seen.look(instance(S.GONE, loss=Loss.PROVISION_FAILED))
    assert seen.item.state.counts
    seen.look()
    assert not seen.item.state.counts


@every("speaks", [False, True], ids=["silent", "speaks"])
def test_a_row_without_a_state_takes_back_what_another_said_only_where_the_host_spoke_since(*, speaks: bool) -> None:
    seen = Beating()
    seen.silent = not speaks
    for row in (instance(S.GONE), instance(S.UNKNOWN), instance(S.GONE)):
        assert seen.item.state is A.RUNNING
        seen.look(row)
    assert seen.item.state.counts is speaks
    kinds = [e.kind for plan in seen.plans for e in plan.events]
    assert ("machine.doubted" in kinds) is speaks


HELD = instance(S.PAUSED, loss=Loss.OUTBID)


def held() -> Beating:
    """A machine that was outbid an hour ago, and is waited for."""
    seen = Beating(outbid_world(hold=timedelta(hours=9)))
    seen.silent = True
    for _ in range(3):
        seen.look(HELD)
    assert seen.item.bidding.held_since is not None
    seen.now += 30 * MINUTE
    seen.look(HELD)
    return seen


@every("row", [row for row in WRONG.values() if row != HELD], ids=[i for i in WRONG if "outbid" not in i])
@every("is_new", [False, True], ids=["held for long", "just held"])
def test_one_row_ends_no_machine_that_is_held(row: Instance, *, is_new: bool) -> None:
    seen = Beating(outbid_world(hold=timedelta(hours=9))) if is_new else held()
    seen.silent = True
    if is_new:
        while seen.item.bidding.held_since is None:
            seen.look(HELD)
    rate = seen.item.meter.rate
    assert seen.look(row).list_again == {SHOP}
    assert (seen.item.state, seen.item.machine, seen.item.meter.rate) == (A.RUNNING, MachineState.LIVE, rate)
    seen.look(HELD)
    assert seen.item.over_since is None
    assert seen.look(row).list_again == {SHOP}
    assert seen.item.state is A.RUNNING, "the list between the two showed it"
    seen.look(row)
    assert not seen.item.state.counts


def test_nothing_is_believed_of_a_host_that_could_not_be_read() -> None:
    world = world_with(A.RUNNING)
    for minutes in (1, 2, 600):
        at = NOW + minutes * MINUTE
        plan = reconcile(world, listing(instance(S.GONE), at=NOW), {}, at)
        assert plan.list_again == {SHOP}
        world = applied(world, plan)
    assert world.attempts[FIRST].machine is MachineState.LIVE


def test_what_was_noted_by_a_clock_that_ran_ahead_is_noted_anew() -> None:
    back = Beating(over_since=NOW + 9 * MINUTE)
    back.look(instance(S.PAUSED))
    assert back.item.state.counts
    back.look(instance(S.PAUSED))
    assert not back.item.state.counts


def test_a_machine_that_is_still_to_be_ended_is_not_forgotten_for_one_row() -> None:
    world = world_with(A.ENDING)
    owed = Intent(
        id=terminate_intent_id(REF),
        kind=IntentKind.TERMINATE,
        provider=SHOP,
        key=world.attempts[FIRST].key,
        state=IntentState.OPEN,
        created_at=NOW,
        attempt=FIRST,
        ref=REF,
    )
    world = replace(world, intents={owed.id: owed})
    first = reconcile(world, listing(instance(S.GONE)), {}, NOW)
    assert first.list_again == {SHOP}
    world = applied(world, first)
    assert world.intents[owed.id].state is IntentState.OPEN
    assert world.attempts[FIRST].state is A.ENDING
    second = reconcile(world, listing(instance(S.GONE), at=NOW + SECOND), {}, NOW + SECOND)
    assert second.attempts[FIRST].state is A.ENDED


def two_jobs(rename: Callable[[Instance], Instance]) -> tuple[World, dict[Any, Listing]]:
    """Two machines that run, and a list in which the row of the second one is wrong."""
    world = world_with(A.RUNNING)
    [item], [owner] = world.attempts.values(), world.jobs.values()
    other = AttemptId(job=JobId("j2"), number=1)
    key = attempt_key(INSTALL, other.job, 1)
    world = replace(
        world,
        attempts={FIRST: item, other: replace(item, id=other, key=key, ref=OTHER)},
        jobs={owner.id: owner, other.job: replace(owner, id=other.job, name="job2")},
    )
    return world, listing(RUNS, rename(instance(S.RUNNING, ident="m2", key=key)))


@every(
    "rename",
    [
        pytest.param(lambda row: replace(row, key=RUNS.key), id="with the key of another attempt"),
        pytest.param(lambda row: replace(row, key=attempt_key(INSTALL, JobId("j7"), 1)), id="with a key of no attempt"),
        pytest.param(lambda row: replace(row, key=AttemptKey("spotd-lab-x")), id="with no key at all"),
    ],
)
def test_the_machine_of_an_attempt_that_counts_is_never_a_double_or_a_stray(
    rename: Callable[[Instance], Instance],
) -> None:
    world, shown = two_jobs(rename)
    plan = reconcile(world, shown, report(seq=6), NOW)
    assert [t for t in plan.intents.values() if t.kind is IntentKind.TERMINATE] == []


def test_a_lost_launch_does_not_take_the_machine_of_another_attempt() -> None:
    world, shown = two_jobs(lambda row: replace(row, key=RUNS.key))
    lost = replace(world_with(A.INTENDED).attempts[FIRST], intended_at=NOW - 20 * MINUTE)
    world = replace(world, attempts={**world.attempts, FIRST: lost})
    [row] = [i for i in shown[SHOP].instances if i.ref == OTHER]
    after = applied(world, reconcile(world, listing(row), report(), NOW))
    assert after.attempts[FIRST].ref is None
    assert [t for t in after.intents.values() if t.kind is IntentKind.TERMINATE] == []


@every("state", [state for state in S if state is not S.GONE])
def test_a_double_beside_our_own_machine_is_ended_whatever_it_does(state: InstanceState) -> None:
    seen = Beating()
    seen.look(RUNS, replace(RUNS, ref=OTHER, state=state))
    assert [t.ref for t in seen.ends] == [OTHER]
