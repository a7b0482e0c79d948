"""A list and a silence end a machine only together; a silence that most hosts share is the store's."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from spotd.core.domain.attempts import HostStatus
from spotd.core.domain.intents import AttemptId, JobId
from spotd.core.domain.plan import Plan, applied
from spotd.core.domain.policy import attempt_key
from spotd.core.domain.states import AttemptState, EndReason
from spotd.core.domain.world import World
from spotd.core.kernel.reconcile import reconcile
from spotd_providers.contract.values import HostId, Instance, InstanceId, InstanceRef, InstanceState, Listing, Loss
from tests.cases import every
from tests.unit.core.builders import INSTALL, MINUTE, NOW, SHOP, instance, listing, world_with

SECOND = timedelta(seconds=1)


def number(n: int) -> AttemptId:
    return AttemptId(job=JobId(f"j{n}"), number=1)


def fleet(machines: int, *, state: AttemptState = AttemptState.RUNNING, one_host: bool = False) -> World:
    """So many jobs, each on a machine of its own."""
    world = world_with(state)
    [item], [owner] = world.attempts.values(), world.jobs.values()
    attempts, jobs = {}, {}
    for n in range(1, machines + 1):
        offer = replace(item.quote.offer, host_id=HostId("host" if one_host else f"host-{n}"))
        attempts[number(n)] = replace(
            item,
            id=number(n),
            key=attempt_key(INSTALL, number(n).job, 1),
            ref=InstanceRef(provider=SHOP, instance_id=InstanceId(f"m{n}")),
            quote=replace(item.quote, offer=offer),
        )
        jobs[number(n).job] = replace(owner, id=number(n).job, name=f"job{n}")
    return replace(world, attempts=attempts, jobs=jobs)


def machines(world: World, *numbers: int, **changes: Any) -> list[Instance]:
    rows = [instance(InstanceState.RUNNING, ident=f"m{n}", key=attempt_key(INSTALL, number(n).job, 1)) for n in numbers]
    return [replace(row, **changes) for row in rows]


class Watch:
    """A daemon that looks every ten seconds, in virtual time; hosts beat every five seconds until they are silent."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.now = NOW
        self.silent: dict[int, datetime] = {}
        self.unheard: set[int] = set()
        """They have never spoken."""
        self.lists: Listing | None = None
        self.store_takes_no_writes = False
        self.plans: list[Plan] = []

    def look(self, *, liveness_check: bool = False) -> Plan:
        reports = {}
        for identity in self.world.attempts:
            n = int(identity.job[1:])
            marker_at = min(self.now, self.silent.get(n, self.now))
            seq = int((marker_at - NOW).total_seconds() // 5) + 10
            reports[identity] = HostStatus(
                attempt=identity,
                read_at=self.now,
                seq=-1 if n in self.unheard else seq,
                phase="" if n in self.unheard else "run",
                liveness_check=liveness_check,
                store_takes_no_writes=self.store_takes_no_writes,
            )
        plan = reconcile(self.world, {} if self.lists is None else {SHOP: self.lists}, reports, self.now)
        self.world = applied(self.world, plan)
        self.plans.append(plan)
        return plan

    def run(self, span: timedelta, *rows: Instance, every: timedelta = timedelta(seconds=10)) -> None:
        """Time passes, with a complete list of these rows before each look."""
        until = self.now + span
        while self.now < until:
            self.now += every
            self.lists = listing(*rows, at=self.now - SECOND)[SHOP]
            self.look()

    @property
    def alive(self) -> set[int]:
        return {int(i.job[1:]) for i, item in self.world.attempts.items() if item.state.counts}


@pytest.mark.long
def test_empty_lists_end_no_machine_whose_heartbeats_arrive_however_many_there_are() -> None:
    watch = Watch(fleet(4))
    watch.run(timedelta(seconds=3), every=SECOND)
    watch.run(timedelta(hours=3))
    assert watch.alive == {1, 2, 3, 4}
    kinds = [e.kind for plan in watch.plans for e in plan.events]
    assert kinds.count("machine.missing") == 4, "it is told once for each"
    assert sum(len(plan.list_again) for plan in watch.plans) < 20, "and asked again only when it matters"


def test_a_list_that_lacks_one_row_ends_no_machine_whose_heartbeats_arrive() -> None:
    watch = Watch(fleet(8))
    watch.run(MINUTE, *machines(watch.world, 1, 2, 3, 4, 5, 6, 7))
    watch.run(MINUTE, *machines(watch.world, 1, 2, 3, 4, 5, 6, 7, 8))
    assert watch.alive == set(range(1, 9))
    assert all(item.missing_since is None for item in watch.world.attempts.values())


def test_a_list_that_was_begun_before_the_last_sign_of_a_silent_host_proves_nothing() -> None:
    watch = Watch(fleet(4))
    watch.run(MINUTE, *machines(watch.world, 1, 2, 3, 4))
    watch.run(20 * SECOND, *machines(watch.world, 1, 2, 3))
    watch.silent = {4: watch.now + 10 * SECOND}
    for _ in range(8):  # its provider lists nothing any more
        watch.now += 10 * SECOND
        watch.look()
    assert watch.alive == {1, 2, 3, 4}
    watch.run(10 * SECOND, *machines(watch.world, 1, 2, 3))
    assert watch.alive == {1, 2, 3}


@every(("silent", "is_shared"), [(2, False), (3, True)])
def test_a_silence_of_up_to_a_third_of_the_hosts_is_their_own(silent: int, *, is_shared: bool) -> None:
    watch = Watch(fleet(6))
    watch.run(MINUTE, *machines(watch.world, 1, 2, 3, 4, 5, 6))
    watch.silent = dict.fromkeys(range(1, silent + 1), watch.now)
    others = set(range(silent + 1, 7))
    watch.run(MINUTE, *machines(watch.world, *others))
    assert watch.alive == ({1, 2, 3, 4, 5, 6} if is_shared else others)


def test_a_machine_that_is_missing_and_silent_is_lost_within_a_minute() -> None:
    watch = Watch(fleet(8))
    watch.run(MINUTE, *machines(watch.world, *range(1, 9)))
    watch.silent[8] = watch.now
    since = watch.now
    watch.run(timedelta(seconds=50), *machines(watch.world, *range(1, 8)))
    assert watch.alive == set(range(1, 8))
    [reason] = [a.end_reason for plan in watch.plans for a in plan.attempts.values() if not a.state.counts][-1:]
    assert reason is EndReason.HOST_LOST
    assert watch.now - since <= MINUTE


def test_the_only_machine_that_is_missing_and_silent_is_lost_within_a_minute() -> None:
    watch = Watch(fleet(1))
    watch.run(MINUTE, *machines(watch.world, 1))
    watch.silent[1] = watch.now
    watch.run(MINUTE)
    assert watch.alive == set()


@every("count", [2, 6, 40])
def test_hosts_that_cannot_write_for_70_s_are_all_kept(count: int) -> None:
    watch = Watch(fleet(count))
    rows = machines(watch.world, *range(1, count + 1))
    watch.run(MINUTE, *rows)
    watch.silent = dict.fromkeys(range(1, count + 1), watch.now)
    watch.run(timedelta(seconds=70), *rows)
    assert watch.plans[-1].shared_silence
    watch.silent = {}
    watch.run(MINUTE, *rows)
    assert watch.alive == set(range(1, count + 1))
    assert not watch.plans[-1].shared_silence


def test_a_list_that_is_empty_while_the_store_takes_no_writes_of_hosts_ends_nobody_before_it_may_lag_no_more() -> None:
    watch = Watch(fleet(6))
    watch.run(MINUTE, *machines(watch.world, *range(1, 7)))
    watch.silent = dict.fromkeys(range(1, 7), watch.now)
    watch.run(timedelta(minutes=2, seconds=50))
    assert len(watch.alive) == 6
    watch.run(timedelta(minutes=2))
    assert watch.alive == set(), "a provider that lost all of them is believed in the end"


@every("state", [InstanceState.RUNNING, InstanceState.PENDING])
def test_silence_alone_ends_nothing_before_the_limit_and_then_it_does(state: InstanceState) -> None:
    watch = Watch(fleet(3))
    rows = machines(watch.world, 1, 2, 3, state=state)
    watch.silent = {3: watch.now}
    watch.run(timedelta(minutes=34), *rows)
    assert watch.alive == {1, 2, 3}
    watch.run(timedelta(minutes=2), *rows)
    assert watch.alive == {1, 2}


def test_silence_alone_ends_nothing_while_the_provider_is_away() -> None:
    watch = Watch(fleet(3))
    watch.silent = {3: watch.now}
    for _ in range(30 * 6):
        watch.now += timedelta(seconds=10)
        watch.look()
    assert watch.alive == {1, 2, 3}


def test_a_silent_machine_whose_provider_lost_sight_of_it_is_lost_after_its_lists_may_lag() -> None:
    watch = Watch(fleet(3))
    rows = [*machines(watch.world, 1, 2), *machines(watch.world, 3, state=InstanceState.UNKNOWN)]
    watch.silent = {3: watch.now}
    watch.run(timedelta(minutes=2, seconds=50), *rows)
    assert watch.alive == {1, 2, 3}
    watch.run(timedelta(seconds=20), *rows)
    assert watch.alive == {1, 2}


def test_most_hosts_that_are_silent_together_are_borne_four_times_as_long() -> None:
    watch = Watch(fleet(3))
    rows = machines(watch.world, 1, 2, 3)
    watch.silent = {2: watch.now, 3: watch.now}
    watch.run(timedelta(minutes=139), *rows, every=timedelta(seconds=30))
    assert watch.alive == {1, 2, 3}
    watch.run(timedelta(minutes=2), *rows)
    assert watch.alive == {1}


@every("silent", [1, 4])
def test_a_silence_that_most_hosts_share_confirms_no_row_that_states_a_machine_as_over(silent: int) -> None:
    watch = Watch(fleet(4))
    rows = machines(watch.world, 1, 2, 3, 4)
    watch.run(MINUTE, *rows)
    watch.silent = dict.fromkeys(range(1, silent + 1), watch.now)
    watch.run(timedelta(seconds=70), *rows)
    watch.run(10 * SECOND, replace(rows[0], state=InstanceState.PAUSED), *rows[1:])
    assert watch.alive == ({2, 3, 4} if silent == 1 else {1, 2, 3, 4})


def test_two_machines_of_one_host_that_fall_silent_are_no_outage_of_the_store() -> None:
    watch = Watch(fleet(2, one_host=True))
    rows = machines(watch.world, 1, 2)
    watch.silent = {1: watch.now, 2: watch.now}
    watch.run(timedelta(minutes=36), *rows, every=timedelta(seconds=30))
    assert watch.alive == set()


def test_a_lone_host_is_kept_while_the_daemon_itself_cannot_write() -> None:
    watch = Watch(fleet(1))
    rows = machines(watch.world, 1)
    watch.silent = {1: watch.now}
    watch.store_takes_no_writes = True
    watch.run(timedelta(minutes=100), *rows, every=timedelta(seconds=30))
    assert watch.alive == {1}
    assert watch.plans[-1].shared_silence


@every("loss", [Loss.PREEMPTED, Loss.OUTBID, None])
def test_a_provider_that_says_so_twice_ends_a_machine_at_once(loss: Loss | None) -> None:
    watch = Watch(fleet(3))
    rows = [*machines(watch.world, 1, 2), *machines(watch.world, 3, state=InstanceState.PAUSED, loss=loss)]
    watch.run(timedelta(seconds=10), *rows)
    assert watch.alive == {1, 2, 3}
    watch.run(timedelta(seconds=10), *rows)
    assert watch.alive == {1, 2}


def test_a_clock_that_jumps_ahead_makes_nobody_silent() -> None:
    watch = Watch(fleet(4))
    rows = machines(watch.world, 1, 2, 3, 4)
    watch.run(MINUTE, *rows)
    watch.silent = dict.fromkeys(range(1, 5), watch.now)
    watch.now += timedelta(hours=8)
    watch.lists = listing(at=watch.now - SECOND)[SHOP]
    watch.look()
    watch.silent = {}
    watch.run(MINUTE, *rows)
    assert watch.alive == {1, 2, 3, 4}


def test_a_machine_that_starts_and_was_never_heard_must_be_missing_for_as_long_as_lists_may_lag() -> None:
    world = fleet(1, state=AttemptState.STARTING)
    world = replace(world, attempts={i: replace(a, heartbeat_seq=10**6) for i, a in world.attempts.items()})
    watch = Watch(world)
    watch.run(3 * MINUTE - timedelta(seconds=5))
    assert watch.alive == {1}
    watch.run(timedelta(seconds=30))
    assert watch.alive == set()


def test_a_machine_that_beats_is_kept_where_a_list_shows_only_another_machine_with_its_key() -> None:
    watch = Watch(fleet(3))
    double = machines(watch.world, 1, ref=InstanceRef(provider=SHOP, instance_id=InstanceId("double")))
    watch.run(MINUTE, *double, *machines(watch.world, 2, 3))
    assert watch.alive == {1, 2, 3}
    assert {i.ref for i in watch.world.intents.values()} == {double[0].ref}, "the double is ended"


def test_a_machine_whose_label_was_changed_is_no_stray_while_its_attempt_counts() -> None:
    watch = Watch(fleet(2))
    other = machines(watch.world, 1, key=attempt_key(INSTALL, JobId("j1"), 19))
    watch.run(MINUTE, *other, *machines(watch.world, 2))
    assert watch.alive == {1, 2}
    assert not watch.world.intents
    watch.silent = {1: watch.now}
    watch.run(MINUTE, *other, *machines(watch.world, 2))
    assert watch.alive == {2}
    assert [i.ref for i in watch.world.intents.values()] == [other[0].ref], "it is ended with its attempt"


# --- a machine that starts while hosts cannot write ---


def with_newcomer(watch: Watch, running: int) -> None:
    """The last of the fleet has just been launched and has not spoken."""
    late = number(running + 1)
    newcomer = replace(
        watch.world.attempts[late],
        state=AttemptState.STARTING,
        intended_at=watch.now,
        launched_at=watch.now,
        running_at=None,
        heartbeat_seen_at=None,
        heartbeat_seq=-1,
    )
    watch.world = replace(watch.world, attempts={**watch.world.attempts, late: newcomer})
    watch.unheard.add(running + 1)


@every("told_by", ["the silence of most hosts", "a write of its own"])
def test_a_machine_that_starts_while_hosts_cannot_write_is_given_up_only_once_it_could_be_heard(told_by: str) -> None:
    watch = Watch(fleet(4))
    rows = machines(watch.world, *range(1, 5))
    with_newcomer(watch, 3)
    if told_by == "a write of its own":
        watch.store_takes_no_writes = True
    else:
        watch.silent = dict.fromkeys(range(1, 4), watch.now)
    watch.run(timedelta(minutes=50), *rows)
    assert watch.alive == {1, 2, 3, 4}
    told = [e for plan in watch.plans for e in plan.events if e.kind == "attempt.unheard"]
    assert len(told) == 1
    moved = {plan.attempts[number(4)].start_deadline for plan in watch.plans if number(4) in plan.attempts}
    assert len(moved) < 60, "not at each look"
    watch.silent, watch.store_takes_no_writes = {}, False
    watch.run(timedelta(seconds=40), *rows)
    assert 4 in watch.alive, "it may need a moment to be heard"
    watch.run(timedelta(minutes=2), *rows)
    assert watch.alive == {1, 2, 3}, "it was not heard although it could have been"


def test_one_list_ends_no_launch_of_unknown_outcome_while_no_host_can_be_heard() -> None:
    watch = Watch(world_with(AttemptState.INTENDED))
    watch.unheard, watch.store_takes_no_writes = {1}, True
    watch.run(timedelta(seconds=30))
    assert watch.alive == {1}, "its host cannot speak against a list that lacks it"
    found = machines(watch.world, 1)
    watch.run(timedelta(seconds=10), *found)
    assert watch.world.attempts[number(1)].ref == found[0].ref


@every("starts", [1, 5, 500])
def test_a_machine_that_is_found_long_after_its_launch_has_a_whole_start_from_then_on(starts: int) -> None:
    watch = Watch(world_with(AttemptState.INTENDED, outcome_unknown=True))
    watch.unheard = {1}
    rules = watch.world.policy.providers[SHOP]
    found = machines(watch.world, 1)
    watch.now += starts * rules.provision_timeout - MINUTE
    watch.run(rules.provision_timeout - MINUTE, *found)
    assert watch.alive == {1}, "its provider was away: it may have been paused until then"
    watch.run(2 * MINUTE, *found)
    assert watch.alive == set()


@every("takes_no_writes", [True, False])
def test_a_launch_that_lists_lack_for_as_long_as_they_may_lag_never_took_effect(*, takes_no_writes: bool) -> None:
    watch = Watch(world_with(AttemptState.INTENDED))
    watch.unheard, watch.store_takes_no_writes = {1}, takes_no_writes
    lag = watch.world.policy.providers[SHOP].reconcile_window
    watch.run(lag + timedelta(seconds=30) if takes_no_writes else timedelta(seconds=20))
    assert watch.alive == set()
    reasons = {item.end_reason for plan in watch.plans for item in plan.attempts.values()}
    assert EndReason.NEVER_LAUNCHED in reasons


def test_a_machine_that_is_heard_after_the_outage_goes_on() -> None:
    watch = Watch(fleet(4))
    rows = machines(watch.world, *range(1, 5))
    with_newcomer(watch, 3)
    watch.silent = dict.fromkeys(range(1, 4), watch.now)
    watch.run(timedelta(minutes=45), *rows)
    watch.silent, watch.unheard = {}, set()
    watch.run(timedelta(minutes=30), *rows)
    assert watch.alive == {1, 2, 3, 4}


def test_no_outage_keeps_a_machine_that_never_spoke_for_longer_than_the_limit() -> None:
    watch = Watch(fleet(4))
    rows = machines(watch.world, *range(1, 5))
    with_newcomer(watch, 3)
    watch.store_takes_no_writes = True
    watch.run(timedelta(minutes=79), *rows, every=MINUTE / 2)
    assert 4 in watch.alive
    watch.run(timedelta(minutes=2), *rows)
    assert 4 not in watch.alive


def test_a_machine_that_is_gone_is_replaced_in_an_outage_as_well() -> None:
    watch = Watch(fleet(4))
    with_newcomer(watch, 3)
    watch.store_takes_no_writes = True
    gone = machines(watch.world, 4, state=InstanceState.GONE, loss=Loss.PREEMPTED)
    watch.run(MINUTE, *machines(watch.world, 1, 2, 3), *gone)
    assert watch.alive == {1, 2, 3}


def test_one_list_that_lacks_a_silent_machine_ends_it_only_if_the_next_one_lacks_it_as_well() -> None:
    watch = Watch(fleet(4))
    every, others = machines(watch.world, 1, 2, 3, 4), machines(watch.world, 1, 2, 3)
    watch.silent = {4: watch.now}
    watch.run(timedelta(minutes=5), *every)
    watch.run(timedelta(seconds=10), *others)
    assert SHOP in watch.plans[-1].list_again
    watch.run(timedelta(minutes=1), *every)
    assert watch.alive == {1, 2, 3, 4}, "one list lacked its row, and nothing that it wrote could arrive"
    watch.run(timedelta(seconds=20), *others)
    assert watch.alive == {1, 2, 3}
