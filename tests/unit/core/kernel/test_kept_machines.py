"""Several machines of one attempt, of which one is lost: the others wait until it is replaced, left out, or all end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from spotd.core import gangs
from spotd.core.bids import may_change
from spotd.core.decide import decide
from spotd.core.domain.attempts import Attempt, StopOrder
from spotd.core.domain.intents import AttemptId, Intent, IntentState, JobId, bid_intent_id
from spotd.core.domain.jobs import Checkpoint
from spotd.core.domain.market import gang_of
from spotd.core.domain.members import Members
from spotd.core.domain.plan import Plan, applied, broken_rules
from spotd.core.domain.states import AttemptState, EndReason
from spotd.core.domain.world import World
from spotd.core.kernel.outcomes import after_restart, terminate_accepted
from spotd.core.kernel.reconcile import reconcile
from spotd.core.metering import spent
from spotd.core.plan_builder import PlanBuilder
from spotd.core.pricing import for_fewer, metered_rate, quote
from spotd_jobs.spec.model import GpuAlternative, Resources
from spotd_providers.contract.values import InstanceState, Loss, MicroUsd, MicroUsdPerGpuHour, MicroUsdPerHour
from tests.unit.core.builders import MINUTE, NOW, instance, job, listing, market, offer, report, world_with

ID = AttemptId(job=JobId("j1"), number=1)
WITHIN = 10 * MINUTE
HOUR = 60 * MINUTE
GPU = (GpuAlternative(name="RTX_4090", count=1),)


def running(*, most: int | None = None, within: timedelta = WITHIN, nodes: int = 4, **policy: Any) -> World:
    """A job on four machines, which accepts a range of two to `most` where that is given."""
    some = world_with(AttemptState.RUNNING)
    wanted = Resources(gpu=GPU, nodes=nodes if most is None else 2, nodes_max=most)
    item, owner = some.attempts[ID], some.jobs[ID.job]
    agreed = replace(item.quote, offer=gang_of(item.quote.offer, 4))
    price = replace(agreed.price, gpu=MicroUsdPerHour(1_600_000), total=MicroUsdPerHour(1_600_000))
    agreed = replace(agreed, price=price, on_demand=MicroUsdPerHour(4_000_000))
    meter = replace(item.meter, rate=MicroUsdPerHour(1_600_000), on_demand_rate=MicroUsdPerHour(4_000_000))
    item = replace(item, quote=agreed, price_max=MicroUsdPerHour(2_000_000), meter=meter)
    owner = replace(owner, spec=replace(owner.spec, resources=wanted, replace_within=within))
    policy_now = replace(some.policy, **policy)
    return replace(some, policy=policy_now, jobs={owner.id: owner}, attempts={ID: item})


def said(some: World, number: int, *lost: int, phase: str = "run", at: datetime = NOW, **more: Any) -> Plan:
    """What follows of a heartbeat of the first machine."""
    (known,) = report(
        **{"seq": 100 + int((at - NOW).total_seconds()), "phase": phase, "gang": (number, lost)} | more
    ).values()
    shown = listing(replace(instance(InstanceState.RUNNING)), at=at)
    return reconcile(some, shown, {ID: replace(known, read_at=at)}, at)


def after(some: World, *steps: Callable[[World], Plan]) -> World:
    for step in steps:
        some = applied(some, step(some))
        assert broken_rules(some) == ()
    return some


def item_of(some: World) -> Attempt:
    return some.attempts[ID]


def members(some: World) -> Members:
    found = item_of(some).members
    assert found is not None
    return found


def cost_of(some: World, at: datetime = NOW) -> MicroUsd:
    return spent(item_of(some), at)


def order_of(some: World) -> Intent | None:
    return some.intents.get(gangs.replace_intent_id(item_of(some).key))


def decided(some: World, at: datetime = NOW, *, is_read: bool = True) -> World:
    if is_read:
        some = replace(some, attempts={ID: replace(item_of(some), read_at=at)})
    return applied(some, decide(some, market(offer(), at=at), at))


def losing(*ranks: int, **changes: Any) -> World:
    """Machines of these ranks are lost, and it is decided what follows."""
    return decided(after(running(**changes), lambda some: said(some, 0, *ranks, phase="save")))


def sent(some: World, at: datetime = NOW) -> tuple[World, gangs.Mending]:
    some = replace(some, attempts={ID: replace(item_of(some), read_at=at)})
    some = after(some, lambda now: gangs.begin_mending(now, ID, at))
    found = gangs.mending_of(some, ID, at)
    assert found is not None
    return some, found


def test_the_others_are_kept_and_a_call_is_owed_that_replaces_what_is_lost() -> None:
    some = losing(2)
    assert members(some) == Members(since=(0, 0, 0, 0), lost=(2,), kept_since=NOW, kept_from=cost_of(some))
    order = order_of(some)
    assert order is not None
    assert (order.state, order.attempt, order.ref) == (IntentState.OPEN, ID, item_of(some).ref)
    assert item_of(some).state is AttemptState.RUNNING
    _, call = sent(some)
    assert (call.ranks, call.number, call.shrinks) == ((2,), 1, False)


def test_once_all_are_replaced_the_next_round_begins_and_the_wait_ends_when_they_run_again() -> None:
    some, call = sent(losing(1, 2))
    some = after(some, lambda now: gangs.record_mending(now, call, NOW + MINUTE))
    since = NOW + MINUTE
    assert members(some) == Members(
        since=(0, 1, 1, 0), round=1, kept_since=NOW, kept_from=cost_of(some), whole_since=since, replaced=2
    )
    assert order_of(some) is None
    # What the first one wrote before it knew of the round changes nothing.
    some = after(some, lambda now: said(now, 0, 1, 2, phase="save", at=NOW + MINUTE))
    assert members(some).round == 1
    some = after(some, lambda now: said(now, 1, phase="restore", at=NOW + 2 * MINUTE))
    assert members(some).kept_since == NOW
    some = after(some, lambda now: said(now, 1, at=NOW + 3 * MINUTE))
    assert members(some) == Members(
        since=(0, 1, 1, 0), round=1, replaced=2, kept_for=3 * MINUTE, kept_cost=members(some).kept_cost, newest=""
    )
    assert members(some).kept_cost == 80_000  # three minutes of four machines at 0.40 an hour
    assert order_of(decided(some, NOW + 3 * MINUTE)) is None


def test_what_was_not_saved_when_one_was_lost_counts_as_repeated() -> None:
    some = running()
    item = replace(item_of(some), running_at=NOW - 9 * MINUTE)
    at = NOW - 2 * MINUTE
    saved = Checkpoint(name="a", attempt=1, step=1, bytes=1, at=at, manifest_key="a", sha256="0" * 64)
    owner = replace(some.jobs[ID.job], checkpoints=(saved,))
    some = replace(some, attempts={ID: item}, jobs={owner.id: owner})
    some, call = sent(decided(after(some, lambda now: said(now, 0, 2, phase="save"))))
    some = after(some, lambda now: gangs.record_mending(now, call, NOW + MINUTE))
    assert some.jobs[ID.job].lost == timedelta(0)
    some = after(some, lambda now: said(now, 1, at=NOW + 3 * MINUTE))
    assert some.jobs[ID.job].lost == 2 * MINUTE


def test_one_that_is_lost_while_another_is_replaced_is_replaced_before_the_round_begins() -> None:
    some, call = sent(losing(1))
    some = after(some, lambda now: said(now, 0, 1, 3, phase="save", at=NOW + MINUTE))
    some = after(some, lambda now: gangs.record_mending(now, call, NOW + MINUTE))
    assert (members(some).round, members(some).lost, members(some).since) == (0, (3,), (0, 1, 0, 0))
    # The first one goes on to name both: the one that was replaced is of the next round.
    some = after(some, lambda now: said(now, 0, 1, 3, phase="save", at=NOW + 2 * MINUTE))
    assert members(some).lost == (3,)
    some, call = sent(decided(some, NOW + 2 * MINUTE), NOW + 2 * MINUTE)
    assert (call.ranks, call.number) == ((3,), 1)
    some = after(some, lambda now: gangs.record_mending(now, call, NOW + 2 * MINUTE))
    assert (members(some).round, members(some).since) == (1, (0, 1, 0, 1))


@pytest.mark.parametrize(
    ("most", "ranks", "shrinks"), [(4, (2,), True), (4, (1, 2), True), (4, (1, 2, 3), False), (None, (2,), False)]
)
def test_what_is_not_replaced_in_time_is_left_out_where_the_range_allows_that_and_ends_all_else(
    most: int | None, ranks: tuple[int, ...], shrinks: bool
) -> None:
    some, call = sent(losing(*ranks, most=most))
    some = after(some, lambda now: gangs.fail_mending(now, call, "no room", NOW, is_final=False))
    assert order_of(some) is not None
    before = decided(some, NOW + WITHIN - MINUTE)
    assert item_of(before).state is AttemptState.RUNNING
    assert not members(before).shrinks
    over = decided(some, NOW + WITHIN)
    if not shrinks:
        assert item_of(over).end_reason is EndReason.HOST_LOST
        assert item_of(over).state is AttemptState.ENDING
        assert members(over).kept_for == WITHIN
        return
    over, call = sent(over, NOW + WITHIN)
    assert (call.shrinks, call.ranks) == (True, ranks)
    over = after(over, lambda now: gangs.record_mending(now, call, NOW + WITHIN))
    left = 4 - len(ranks)
    item = item_of(over)
    assert (item.quote.offer.nodes, item.quote.offer.gpu_count) == (left, left)
    assert (item.quote.price.gpu, item.meter.rate, item.price_max) == (left * 400_000, left * 400_000, left * 500_000)
    assert [came is None for came in members(over).since] == [rank in ranks for rank in range(4)]
    assert (members(over).round, members(over).lost, members(over).healthy) == (1, (), left)
    over = after(over, lambda now: said(now, 1, at=NOW + WITHIN + MINUTE))
    assert members(over).kept_since is None


def test_what_is_not_left_out_in_time_ends_all() -> None:
    some = losing(2, most=4)
    some = decided(some, NOW + WITHIN)
    assert members(some).shrinks
    assert item_of(decided(some, NOW + WITHIN + gangs.SHRINKS_WITHIN - MINUTE)).state is AttemptState.RUNNING
    over = decided(some, NOW + WITHIN + gangs.SHRINKS_WITHIN)
    assert item_of(over).end_reason is EndReason.HOST_LOST


def test_a_clock_that_was_set_back_ends_the_wait() -> None:
    over = decided(losing(2), NOW - MINUTE)
    assert item_of(over).end_reason is EndReason.HOST_LOST


def test_a_provider_that_replaces_none_ends_all_as_ever_or_leaves_out_what_the_range_allows() -> None:
    def refused(some: World) -> tuple[World, gangs.Mending]:
        some, call = sent(some)
        return after(some, lambda now: gangs.fail_mending(now, call, "no power", NOW, is_final=True)), call

    some, _ = refused(losing(2))
    assert item_of(decided(some)).end_reason is EndReason.HOST_LOST
    some, _ = refused(losing(2, most=4))
    over, call = refused(decided(some))
    assert call.shrinks
    over = decided(over)
    assert item_of(over).end_reason is EndReason.HOST_LOST


def test_nothing_is_kept_without_the_key_and_a_lost_first_machine_is_never_named() -> None:
    assert item_of(losing(2, within=timedelta(0))).members is None
    some = after(running(), lambda now: said(now, 0, 0, 9, phase="save"))
    assert item_of(some).members is None


STOPPED = StopOrder(reason=EndReason.CANCELLED, detail="", ordered_at=NOW, deadline=NOW + 3 * MINUTE)


def test_what_is_to_stop_or_is_cancelled_is_not_replaced() -> None:
    some = losing(2)
    stopping = replace(item_of(some), stop=STOPPED)
    cancelled = replace(some.jobs[ID.job], cancel_requested=True)
    for other in (
        replace(some, attempts={ID: stopping}),
        replace(some, jobs={ID.job: cancelled}),
        replace(some, attempts={ID: replace(stopping, state=AttemptState.STOPPING)}),
    ):
        plan = gangs.begin_mending(other, ID, NOW)
        assert [one.state for one in plan.intents.values()] == [IntentState.FAILED]
        assert gangs.mending_of(applied(other, plan), ID, NOW) is None


def test_while_launches_are_paused_none_is_replaced_and_they_may_be_left_out() -> None:
    some = losing(2, most=4)
    some = replace(some, policy=replace(some.policy, launches_paused="no store"))
    waiting = after(some, lambda now: gangs.begin_mending(now, ID, NOW))
    assert gangs.mending_of(waiting, ID, NOW) is None
    over = after(decided(waiting, NOW + WITHIN), lambda now: gangs.begin_mending(now, ID, NOW + WITHIN))
    found = gangs.mending_of(over, ID, NOW + WITHIN)
    assert found is not None
    assert found.shrinks


def test_a_lost_answer_is_asked_for_again_with_the_same_number_after_a_restart_too() -> None:
    some, first = sent(losing(2))
    some = after(some, lambda now: gangs.fail_mending(now, first, "the answer was lost", NOW, is_final=False))
    assert gangs.mending_of(some, ID, NOW) is None
    later = NOW + MINUTE
    restarted = after(some, lambda now: after_restart(now, later))
    for other in (some, restarted):
        assert sent(other, later)[1] == replace(first, item=item_of(sent(other, later)[0]))


def test_an_answer_that_comes_late_changes_nothing() -> None:
    some, call = sent(losing(2))
    done = after(some, lambda now: gangs.record_mending(now, call, NOW))
    assert gangs.record_mending(done, call, NOW).is_empty
    ended = PlanBuilder(some, NOW)
    ended.end_attempt(ID, EndReason.CANCELLED)
    over = applied(some, ended.plan())
    assert gangs.record_mending(over, call, NOW).is_empty
    order = next(one for one in over.intents.values() if one.id.startswith("terminate"))
    over = applied(over, terminate_accepted(over, order.id, NOW))
    assert gangs.record_mending(over, call, NOW).is_empty


def test_machines_that_were_outbid_and_woke_wait_for_nothing() -> None:
    some = losing(2)
    item = item_of(some)
    held = replace(some, attempts={ID: replace(item, bidding=replace(item.bidding, held_since=NOW))})
    assert item_of(decided(held, NOW + 2 * WITHIN)).state is AttemptState.RUNNING
    woke = after(some, lambda now: said(now, 0, at=NOW + MINUTE))
    assert (members(woke).kept_since, members(woke).lost) == (None, ())
    assert order_of(decided(woke, NOW + MINUTE)) is not None
    assert gangs.mending_of(woke, ID, NOW + MINUTE) is None
    plan = gangs.begin_mending(woke, ID, NOW + MINUTE)
    assert [one.state for one in plan.intents.values()] == [IntentState.FAILED]


def test_no_bid_changes_while_they_wait_and_none_are_replaced_while_a_bid_does() -> None:
    some = losing(2)
    assert not may_change(item_of(some), PlanBuilder(some, NOW))
    before = after(running(), lambda now: said(now, 0, 2, phase="save"))
    order = order_of(losing(2))
    assert order is not None
    change = replace(order, id=bid_intent_id(order.key), state=IntentState.UNKNOWN)
    assert order_of(decided(replace(before, intents={change.id: change}))) is None


def test_fewer_machines_that_would_cost_too_much_per_gpu_are_not_gone_on_with() -> None:
    some = losing(2, most=4)
    item = item_of(some)
    upload = MicroUsdPerHour(390_000)
    price = replace(item.quote.price, upload=upload, total=MicroUsdPerHour(1_990_000))
    price = replace(price, per_gpu=MicroUsdPerGpuHour(497_500))
    dear = replace(some, attempts={ID: replace(item, quote=replace(item.quote, price=price))})
    assert item_of(decided(some, NOW + WITHIN)).state is AttemptState.RUNNING
    over = decided(dear, NOW + WITHIN)
    assert item_of(over).end_reason is EndReason.HOST_LOST
    assert "more per GPU" in item_of(over).end_detail


def test_a_host_that_names_losses_without_end_is_not_believed_for_ever() -> None:
    some = losing(2)
    many = replace(members(some), replaced=gangs.REPLACED_MAX)
    some = replace(some, attempts={ID: replace(item_of(some), members=many)})
    assert item_of(decided(some)).end_reason is EndReason.HOST_LOST


def test_what_was_agreed_for_several_is_the_same_for_fewer_as_if_it_had_been_agreed_for_them() -> None:
    owner = job(1)
    for price in (1, 7, 400_001):
        one = offer(price=price)
        from spotd.core.pricing import needs_of
        from tests.unit.core.builders import shop_policy

        needs = needs_of(owner, shop_policy())
        for before in range(2, 6):
            for nodes in range(1, before):
                fewer = for_fewer(quote(gang_of(one, before), needs, 1_050_000, NOW), nodes)
                direct = quote(gang_of(one, nodes) if nodes > 1 else one, needs, 1_050_000, NOW)
                assert fewer.offer == replace(direct.offer, nodes=nodes)
                assert abs(metered_rate(fewer) - metered_rate(direct)) <= 1


def test_no_wait_ends_before_all_is_read_that_its_host_wrote() -> None:
    some = losing(2)
    late = NOW + WITHIN + timedelta(hours=2)
    plan = decide(some, market(offer(), at=late), late)
    assert ID in plan.full_reads
    assert item_of(applied(some, plan)).state is AttemptState.RUNNING
    assert item_of(decided(some, late, is_read=False)).state is AttemptState.RUNNING
    assert item_of(decided(some, late)).end_reason is EndReason.HOST_LOST


def saving(some: World, name: str) -> World:
    """The job has saved this one besides."""
    job_now = some.jobs[ID.job]
    newest = Checkpoint(name=name, attempt=1, step=1, bytes=1, at=NOW, manifest_key=name, sha256="0" * 64)
    return replace(some, jobs={ID.job: replace(job_now, checkpoints=(newest, *job_now.checkpoints))})


def again(some: World, at: datetime) -> World:
    """The lost ones are replaced, and all run."""
    some, call = sent(some, at)
    some = after(some, lambda now: gangs.record_mending(now, call, at))
    return after(some, lambda now: said(now, members(now).round, at=at + MINUTE))


def test_they_are_kept_once_more_only_where_the_job_has_saved_something_since() -> None:
    some = again(saving(losing(2), "step-1"), NOW + MINUTE)
    later = NOW + 20 * MINUTE
    same = decided(after(some, lambda now: said(now, 1, 3, phase="save", at=later)), later)
    assert item_of(same).end_reason is EndReason.HOST_LOST
    assert "nothing was saved" in item_of(same).end_detail
    got_on = decided(after(saving(some, "step-2"), lambda now: said(now, 1, 3, phase="save", at=later)), later)
    assert item_of(got_on).state is AttemptState.RUNNING
    assert order_of(got_on) is not None


def test_nothing_is_ended_for_lack_of_progress_before_all_is_read() -> None:
    some = again(losing(2), NOW + MINUTE)
    later = NOW + 20 * MINUTE
    lost = after(some, lambda now: said(now, 1, 3, phase="save", at=later))
    plan = decide(lost, market(offer(), at=later + 2 * WITHIN), later + 2 * WITHIN)
    assert ID in plan.full_reads
    assert item_of(applied(lost, plan)).state is AttemptState.RUNNING


@pytest.mark.parametrize("phase", ["setup", "restore"])
def test_one_that_came_and_hangs_before_the_command_runs_ends_all_after_the_time_of_a_start(phase: str) -> None:
    some, call = sent(losing(2))
    some = replace(some, attempts={ID: replace(item_of(some), launched_at=NOW - HOUR, running_at=NOW - HOUR / 2)})
    some = after(some, lambda now: gangs.record_mending(now, call, NOW))
    usual = some.policy.providers[item_of(some).provider].provision_timeout + HOUR / 2
    some = after(some, lambda now: said(now, 1, phase=phase, at=NOW + usual, gang=None))
    early = decided(some, NOW + usual - MINUTE)
    assert item_of(early).state is AttemptState.RUNNING
    late = NOW + usual + 10 * MINUTE
    over = decided(after(early, lambda now: said(now, 1, phase=phase, at=late, gang=None)), late)
    assert item_of(over).end_reason is EndReason.HOST_LOST
    assert "did not run within" in item_of(over).end_detail
    gone = replace(some, policy=replace(some.policy, providers={}))
    assert item_of(decided(gone, late)).state is AttemptState.RUNNING


def outbid(some: World, at: datetime) -> World:
    """Their provider lists them as outbid; the job waits for such machines."""
    item = item_of(some)
    agreed = replace(item.quote, offer=replace(item.quote.offer, pays_bid=True))
    some = replace(some, attempts={ID: replace(item, quote=agreed)}, policy=replace(some.policy, hold_max=HOUR))
    some = saving(some, "step-1")
    return listed_as(some, at, InstanceState.PAUSED, Loss.OUTBID)


def listed_as(some: World, at: datetime, state: InstanceState, loss: Loss | None = None) -> World:
    """Two lists show that."""
    for later in (timedelta(0), MINUTE):
        row, seen_at = replace(instance(state), loss=loss), at + later
        (known,) = report(seq=item_of(some).heartbeat_seq, phase="save").values()
        reports = {ID: replace(known, read_at=seen_at)}
        some = applied(some, reconcile(some, listing(row, at=seen_at), reports, seen_at))
    return some


def test_those_that_are_outbid_while_some_are_lost_are_not_held_and_end_as_outbid() -> None:
    held = outbid(running(), NOW)
    assert item_of(held).bidding.held_since == NOW + MINUTE
    over = outbid(losing(2), NOW)
    assert item_of(over).end_reason is EndReason.OUTBID
    assert gangs.mending_of(over, ID, NOW) is None


def test_those_that_are_outbid_once_none_is_missing_are_held_and_no_more_is_waited_for() -> None:
    some, call = sent(losing(2))
    some = after(some, lambda now: gangs.record_mending(now, call, NOW + MINUTE))
    held = outbid(some, NOW + 2 * MINUTE)
    assert item_of(held).bidding.held_since == NOW + 3 * MINUTE
    assert (members(held).kept_since, members(held).whole_since, members(held).round) == (None, None, 1)
    assert members(held).kept_for == 3 * MINUTE


@pytest.mark.parametrize("phase", ["boot", "code", "setup", "restore"])
def test_those_that_woke_before_a_list_showed_that_they_were_outbid_are_not_replaced(phase: str) -> None:
    some, call = sent(losing(2, most=4))
    at = NOW + MINUTE
    woke = after(some, lambda now: said(now, 0, phase=phase, at=at, gang=None))
    assert (members(woke).lost, members(woke).kept_since, members(woke).whole_since) == ((), NOW, at)
    assert gangs.mending_of(woke, ID, at) is None
    assert gangs.record_mending(woke, call, at).is_empty
    assert item_of(decided(woke, at)).state is AttemptState.RUNNING
    ran = after(woke, lambda now: said(now, 0, at=at + MINUTE))
    assert members(ran).kept_since is None
    still = after(some, lambda now: said(now, 0, phase="save", at=at, gang=None))
    assert members(still).lost == (2,)


def test_a_wait_that_was_in_vain_counts_as_no_repeated_work() -> None:
    some = running()
    item = replace(item_of(some), running_at=NOW - 9 * MINUTE)
    some = decided(after(replace(some, attempts={ID: item}), lambda now: said(now, 0, 2, phase="save")))
    at = NOW + WITHIN
    ended = decided(after(some, lambda now: said(now, 0, 2, phase="save", at=at)), at)
    assert item_of(ended).end_reason is EndReason.HOST_LOST
    assert ended.jobs[ID.job].lost == 9 * MINUTE


def test_a_copy_of_the_state_from_before_ends_the_wait_and_replaces_nothing_any_more() -> None:
    some, call = sent(losing(2))
    some = after(some, lambda now: gangs.record_mending(now, call, NOW + MINUTE))
    at = NOW + 2 * MINUTE
    for older in (some, losing(2), running()):
        known = after(older, lambda now: said(now, 2, at=at))
        assert (members(known).kept_since, members(known).lost, members(known).is_outdated) == (None, (), True)
        lost = decided(after(known, lambda now: said(now, 2, 1, phase="save", at=at)), at)
        lost = decided(after(lost, lambda now: said(now, members(now).round, 1, phase="save", at=at)), at)
        assert members(lost).lost == ()
        assert gangs.mending_of(lost, ID, at) is None
        assert item_of(lost).state is AttemptState.RUNNING


def test_a_wait_costs_what_the_meter_ran_on_by_meanwhile_whatever_the_price_is_at_its_end() -> None:
    some = after(running(), lambda now: said(now, 0, 2, phase="save"))
    before = cost_of(some)
    builder = PlanBuilder(some, NOW + MINUTE)
    builder.set_rate(ID, MicroUsdPerHour(160_000), None)
    some = applied(some, builder.plan())
    at = NOW + 11 * MINUTE
    after_it = cost_of(some, at)
    ended = PlanBuilder(some, at)
    ended.end_attempt(ID, EndReason.CANCELLED)
    kept = members(applied(some, ended.plan()))
    assert kept.kept_cost == after_it - before == 2 * 26_667


def test_a_clock_that_was_set_forward_leaves_the_time_in_which_the_lost_ones_are_left_out() -> None:
    late = NOW + 8 * HOUR
    some = decided(losing(2, most=4), late)
    assert item_of(some).state is AttemptState.RUNNING
    assert members(some).shrinks_since == late
    over = decided(some, late + gangs.SHRINKS_WITHIN)
    assert item_of(over).end_reason is EndReason.HOST_LOST


def test_what_is_taken_away_by_its_notice_is_not_replaced_and_ends_as_preempted() -> None:
    some, call = sent(losing(2))
    some = replace(some, attempts={ID: replace(item_of(some), notice_at=NOW + MINUTE)})
    some = after(some, lambda now: gangs.fail_mending(now, call, "it is being taken away", NOW, is_final=False))
    plan = gangs.begin_mending(some, ID, NOW + MINUTE)
    assert all(one.state is not IntentState.OPEN or one.not_before is not None for one in plan.intents.values())
    some = decided(some, NOW + WITHIN)
    assert item_of(some).state is AttemptState.RUNNING
    gone = listed_as(some, NOW + WITHIN, InstanceState.ENDING)
    assert item_of(gone).end_reason is EndReason.PREEMPTED


def test_no_call_is_made_by_what_was_read_too_long_ago() -> None:
    some = losing(2)
    stale = NOW + some.policy.silence_max + MINUTE
    waiting = after(some, lambda now: gangs.begin_mending(now, ID, stale))
    assert gangs.mending_of(waiting, ID, stale) is None
    assert ID in decide(some, market(offer(), at=stale), stale).full_reads
