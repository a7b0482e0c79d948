"""Ours against theirs: every cell of the matrix, then the rules that cut across it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from spotd.core.domain.attempts import MachineState
from spotd.core.domain.cooldowns import CooldownScope
from spotd.core.domain.intents import IntentKind, IntentState, JobId, Meter
from spotd.core.domain.jobs import Checkpoint
from spotd.core.domain.plan import Plan, applied
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.domain.world import World
from spotd.core.kernel.outcomes import REFUSES_FIRST, LaunchFailure, launch_refused, launch_unknown
from spotd.core.kernel.reconcile import reconcile
from spotd.core.metering import STOPPED
from spotd.core.pricing import halted_rate
from spotd_providers.contract.values import Instance, InstanceState, Loss, Market, MicroUsdPerHour
from tests.cases import every
from tests.unit.core.builders import MINUTE, NOW, REF, instance, listing, report, shop_policy, world_with

J = JobId("j1")
A, S = AttemptState, InstanceState


@dataclass(frozen=True)
class Cell:
    ours: AttemptState
    theirs: Instance | None
    attempt: AttemptState
    job: JobState
    reason: EndReason | None = None
    owes_end: bool = False


CELLS = {
    "intended, runs: adopted": Cell(A.INTENDED, instance(S.RUNNING), A.STARTING, JobState.STARTING),
    "intended, pending: adopted": Cell(A.INTENDED, instance(S.PENDING), A.STARTING, JobState.STARTING),
    "intended, unknown: adopted": Cell(A.INTENDED, instance(S.UNKNOWN), A.STARTING, JobState.STARTING),
    "intended, paused: adopted and lost": Cell(
        A.INTENDED, instance(S.PAUSED, loss=Loss.OUTBID), A.ENDING, JobState.RECOVERING, EndReason.OUTBID, True
    ),
    "intended, ending: adopted and lost": Cell(
        A.INTENDED, instance(S.ENDING, loss=Loss.PREEMPTED), A.ENDING, JobState.RECOVERING, EndReason.PREEMPTED, True
    ),
    "intended, gone: lost": Cell(
        A.INTENDED, instance(S.GONE, loss=Loss.PREEMPTED), A.ENDED, JobState.RECOVERING, EndReason.PREEMPTED
    ),
    "intended, absent: never launched": Cell(A.INTENDED, None, A.ENDED, JobState.QUEUED, EndReason.NEVER_LAUNCHED),
    "starting, runs: goes on": Cell(A.STARTING, instance(S.RUNNING), A.STARTING, JobState.STARTING),
    "starting, paused: lost": Cell(
        A.STARTING, instance(S.PAUSED, loss=Loss.OUTBID), A.ENDING, JobState.RECOVERING, EndReason.OUTBID, True
    ),
    "starting, ending: lost": Cell(
        A.STARTING, instance(S.ENDING), A.ENDING, JobState.RECOVERING, EndReason.HOST_LOST, True
    ),
    "starting, gone with a bad image": Cell(
        A.STARTING, instance(S.GONE, loss=Loss.IMAGE_ERROR), A.ENDED, JobState.RECOVERING, EndReason.IMAGE_ERROR
    ),
    "running, runs: goes on": Cell(A.RUNNING, instance(S.RUNNING), A.RUNNING, JobState.RUNNING),
    "running, unknown: goes on": Cell(A.RUNNING, instance(S.UNKNOWN), A.RUNNING, JobState.RUNNING),
    "running, paused: outbid": Cell(
        A.RUNNING, instance(S.PAUSED, loss=Loss.OUTBID), A.ENDING, JobState.RECOVERING, EndReason.OUTBID, True
    ),
    "running, ending: preempted": Cell(
        A.RUNNING, instance(S.ENDING, loss=Loss.PREEMPTED), A.ENDING, JobState.RECOVERING, EndReason.PREEMPTED, True
    ),
    "running, gone: preempted": Cell(
        A.RUNNING, instance(S.GONE, loss=Loss.PREEMPTED), A.ENDED, JobState.RECOVERING, EndReason.PREEMPTED
    ),
    "running, gone for want of money": Cell(
        A.RUNNING, instance(S.GONE, loss=Loss.BALANCE), A.ENDED, JobState.RECOVERING, EndReason.PROVIDER_BALANCE
    ),
    "stopping, runs: waits": Cell(A.STOPPING, instance(S.RUNNING), A.STOPPING, JobState.CANCELLING),
    "stopping, paused: stopped": Cell(
        A.STOPPING, instance(S.PAUSED), A.ENDING, JobState.CANCELLED, EndReason.CANCELLED, True
    ),
    "stopping, gone: stopped": Cell(A.STOPPING, instance(S.GONE), A.ENDED, JobState.CANCELLED, EndReason.CANCELLED),
    "ending, runs: is being ended": Cell(
        A.ENDING, instance(S.RUNNING), A.ENDING, JobState.RECOVERING, EndReason.OUTBID
    ),
    "ending, paused: waits": Cell(A.ENDING, instance(S.PAUSED), A.ENDING, JobState.RECOVERING, EndReason.OUTBID),
    "ending, gone: over": Cell(A.ENDING, instance(S.GONE), A.ENDED, JobState.RECOVERING, EndReason.OUTBID),
    "ending, absent: over": Cell(A.ENDING, None, A.ENDED, JobState.RECOVERING, EndReason.OUTBID),
}


def former(cell: Cell) -> datetime | None:
    """When a former list said the same of a machine that runs: one row alone ends none."""
    is_over = cell.theirs is not None and cell.theirs.state in STOPPED
    return NOW - MINUTE if is_over and cell.ours is not A.ENDING else None


def after(world: World, plan: Plan) -> tuple[AttemptState, JobState]:
    attempt = next(iter(plan.attempts.values()), next(iter(world.attempts.values())))
    job = plan.jobs.get(J, world.jobs[J])
    return attempt.state, job.state


def ends(plan: Plan) -> list[str]:
    return [t.id for t in plan.intents.values() if t.kind is IntentKind.TERMINATE and t.state is IntentState.OPEN]


@every("cell", CELLS.values(), ids=CELLS.keys())
def test_each_cell_of_ours_against_theirs(cell: Cell) -> None:
    # Of a launch without an answer absence means that two lists lack it: this one, and one a minute ago.
    lacked = {"missing_since": NOW - timedelta(minutes=1)} if cell.reason is EndReason.NEVER_LAUNCHED else {}
    world = world_with(cell.ours, over_since=former(cell), **lacked)
    shown = listing() if cell.theirs is None else listing(cell.theirs)
    plan = reconcile(world, shown, report(), NOW)
    assert after(world, plan) == (cell.attempt, cell.job)
    attempt = next(iter({**world.attempts, **plan.attempts}.values()))
    assert attempt.end_reason is cell.reason
    assert bool(ends(plan)) is cell.owes_end
    if attempt.state is A.ENDED:
        assert attempt.machine is MachineState.GONE
        assert attempt.meter.since is None


@every("ours", [A.STARTING, A.RUNNING, A.STOPPING])
def test_absence_of_the_only_machine_is_believed_at_the_second_reading_once_it_is_silent(ours: AttemptState) -> None:
    silent = None if ours is A.STARTING else NOW - MINUTE
    world = world_with(ours, heartbeat_seen_at=silent)
    first = reconcile(world, listing(), report(), NOW)
    assert after(world, first)[0] is ours
    assert first.list_again == {REF.provider}
    world = applied(world, first)
    same = reconcile(world, listing(), report(), NOW)
    assert after(world, same)[0] is ours, "the same reading is not a second one"
    later = NOW + (3 * MINUTE if ours is A.STARTING else MINUTE / 60)
    looked = {i: r.__class__(attempt=i, read_at=NOW + 3 * MINUTE) for i, r in report().items()}
    second = reconcile(world, listing(at=later), looked, later)
    assert after(world, second)[0] is A.ENDING
    assert ends(second), "even what is believed to be gone is ended for certain"


@every("ours", list(A)[:-1])
def test_an_incomplete_or_missing_listing_proves_no_loss(ours: AttemptState) -> None:
    world = world_with(ours, launched_at=NOW - MINUTE if ours is not A.INTENDED else None)
    for shown in (listing(complete=False), {}):
        plan = reconcile(world, shown, report(), NOW + timedelta(seconds=1))
        assert after(world, plan)[0] is ours


def test_an_incomplete_listing_proves_what_it_shows() -> None:
    world = world_with(A.RUNNING, over_since=NOW - MINUTE)
    plan = reconcile(world, listing(instance(S.PAUSED, loss=Loss.OUTBID), complete=False), report(), NOW)
    assert after(world, plan)[0] is A.ENDING


@every(("later", "doubted"), [(timedelta(0), NOW), (timedelta(seconds=1), None)])
def test_only_a_newer_list_withdraws_that_a_machine_is_over(later: timedelta, doubted: datetime | None) -> None:
    world = world_with(A.RUNNING, over_since=NOW)
    plan = reconcile(world, listing(instance(S.RUNNING), at=NOW + later), report(), NOW + later)
    (item,) = applied(world, plan).attempts.values()
    assert item.over_since == doubted


@every(("read_at", "state"), [(NOW - timedelta(seconds=1), A.RUNNING), (NOW, A.ENDING)])
def test_a_machine_that_is_over_is_read_after_the_list_that_says_so(read_at: datetime, state: AttemptState) -> None:
    world = world_with(A.RUNNING, over_since=NOW - MINUTE)
    looked = {i: replace(r, read_at=read_at) for i, r in report().items()}
    plan = reconcile(world, listing(instance(S.PAUSED, loss=Loss.OUTBID)), looked, NOW)
    assert after(world, plan)[0] is state


def test_a_lost_launch_is_not_given_up_before_the_window_has_passed() -> None:
    world = world_with(A.INTENDED, intended_at=NOW - timedelta(minutes=2))
    plan = reconcile(world, listing(), report(), NOW)
    assert after(world, plan) == (A.INTENDED, JobState.PROVISIONING)


def test_one_empty_list_does_not_end_a_machine_that_no_list_has_shown_yet() -> None:
    world = world_with(A.STARTING, ever_listed=False)
    plan = reconcile(world, listing(), report(), NOW)
    assert after(world, plan)[0] is A.STARTING
    assert plan.list_again


@every("ours", [A.STARTING, A.RUNNING], ids=str)
@every("shown", [(instance(S.PAUSED, loss=Loss.OUTBID),), ()], ids=["paused", "absent"])
def test_no_machine_is_given_up_without_a_look_at_what_it_wrote(
    ours: AttemptState, shown: tuple[Instance, ...]
) -> None:
    world = world_with(ours)
    first = reconcile(world, listing(*shown), {}, NOW)
    world = applied(world, first)
    second = reconcile(world, listing(*shown, at=NOW + MINUTE), {}, NOW + MINUTE)
    assert next(iter(applied(world, second).attempts.values())).state is ours


def test_a_machine_that_ended_itself_after_success_is_done_not_lost() -> None:
    world = world_with(A.RUNNING)
    heard = report(seq=9, phase="done", exit_reason=EndReason.DONE, exit_code=0)
    shown = instance(S.GONE, loss=Loss.SELF)
    plan = reconcile(world, listing(shown), heard, NOW)
    assert after(world, plan) == (A.ENDING, JobState.SUCCEEDED), "its host may have failed to end it"
    assert ends(plan)
    world = applied(world, plan)
    plan = reconcile(world, listing(shown, at=NOW + MINUTE), heard, NOW + MINUTE)
    assert [a.state for a in plan.attempts.values()] == [A.ENDED]


def test_a_job_that_was_cancelled_too_late_has_succeeded() -> None:
    world = world_with(A.STOPPING)
    assert [owner.cancel_requested for owner in world.jobs.values()] == [True]
    heard = report(seq=9, phase="done", exit_reason=EndReason.DONE, exit_code=0)
    assert after(world, reconcile(world, listing(instance(S.RUNNING)), heard, NOW)) == (A.ENDING, JobState.SUCCEEDED)


@every(("reason", "code"), [(EndReason.PREEMPTED, None), (EndReason.USER_ERROR, 143)])
def test_the_exit_code_of_a_job_is_that_of_a_command_which_ended_by_itself(reason: EndReason, code: int | None) -> None:
    world = world_with(A.RUNNING)
    heard = report(seq=9, phase="done", exit_reason=reason, exit_code=143)
    world = applied(world, reconcile(world, listing(instance(S.RUNNING)), heard, NOW))
    assert [owner.exit_code for owner in world.jobs.values()] == [code]


EXITS = {
    "success": (EndReason.DONE, 0, JobState.SUCCEEDED),
    "failure with a retry left": (EndReason.USER_ERROR, 1, JobState.RECOVERING),
    "saved on notice": (EndReason.PREEMPTED, 143, JobState.RECOVERING),
    "lease ran out": (EndReason.LEASE_EXPIRED, 143, JobState.RECOVERING),
    "runner failed": (EndReason.HOST_LOST, None, JobState.RECOVERING),
}


@every(("reason", "code", "job"), EXITS.values(), ids=EXITS.keys())
def test_the_runners_own_word_decides(reason: EndReason, code: int | None, job: JobState) -> None:
    world = world_with(A.RUNNING)
    plan = reconcile(world, listing(instance(S.RUNNING)), report(seq=9, exit_reason=reason, exit_code=code), NOW)
    assert after(world, plan) == (A.ENDING, job)
    assert next(iter(plan.attempts.values())).end_reason is reason
    assert ends(plan) == ["terminate:shop::m1"]


def test_a_second_failure_of_the_users_code_is_final() -> None:
    world = world_with(A.RUNNING)
    world = replace(world, jobs={J: replace(world.jobs[J], errors=1)})
    plan = reconcile(
        world,
        listing(instance(S.RUNNING)),
        report(seq=9, exit_reason=EndReason.USER_ERROR, exit_answers_stop=True, exit_code=1),
        NOW,
    )
    assert plan.jobs[J].state is JobState.FAILED
    assert plan.jobs[J].exit_code == 1


def test_a_machine_that_does_not_come_up_in_time_is_given_up() -> None:
    late = NOW + timedelta(minutes=10)
    world = world_with(A.STARTING)
    plan = reconcile(world, listing(instance(S.RUNNING)), report(), late)
    assert after(world, plan) == (A.ENDING, JobState.RECOVERING)
    assert next(iter(plan.attempts.values())).end_reason is EndReason.PROVISION_TIMEOUT


def test_a_machine_that_got_no_place_is_no_failed_start_of_its_job_however_often() -> None:
    world = world_with(A.STARTING)
    world = replace(world, jobs={J: replace(world.jobs[J], failed_starts=100)})
    shown = instance(S.PAUSED, loss=Loss.NO_CAPACITY)
    world = applied(world, reconcile(world, listing(shown), {}, NOW))
    later = NOW + MINUTE
    read = {key: replace(one, read_at=later) for key, one in report().items()}
    plan = reconcile(world, listing(shown, at=later), read, later)
    assert after(world, plan) == (A.ENDING, JobState.QUEUED), "nothing of it ever ran"
    assert next(iter(plan.attempts.values())).end_reason is EndReason.NO_CAPACITY
    assert ends(plan) == ["terminate:shop::m1"]
    assert {c.scope for c in plan.cooldowns} == {CooldownScope.POOL}


def test_silence_alone_is_a_lost_host_only_after_the_lease() -> None:
    assert shop_policy().silence_limit > shop_policy().lease
    world = world_with(A.RUNNING, heartbeat_seen_at=NOW - shop_policy().silence_limit)
    plan = reconcile(world, listing(instance(S.RUNNING)), report(seq=5), NOW)
    assert after(world, plan) == (A.ENDING, JobState.RECOVERING)
    assert plan.attempts[next(iter(plan.attempts))].end_reason is EndReason.HOST_LOST


@every("saved", [False, True])
def test_the_loss_of_a_host_without_a_name_cools_its_pool_down_only_if_the_attempt_had_saved_nothing(
    saved: bool,
) -> None:
    world = world_with(A.RUNNING, heartbeat_seen_at=NOW - shop_policy().silence_limit)
    (lost,) = world.attempts.values()
    unnamed = replace(lost, quote=replace(lost.quote, offer=replace(lost.quote.offer, host_id=None)))
    kept = Checkpoint(
        name="c", attempt=int(saved), step=1, bytes=10, at=NOW - MINUTE, manifest_key="k", sha256="0" * 64
    )
    world = replace(world, attempts={lost.id: unnamed}, jobs={J: replace(world.jobs[J], checkpoints=(kept,))})
    plan = reconcile(world, listing(instance(S.RUNNING)), report(seq=5), NOW)
    assert plan.attempts[next(iter(plan.attempts))].end_reason is EndReason.HOST_LOST
    assert [cooldown.scope for cooldown in plan.cooldowns] == ([] if saved else [CooldownScope.POOL])


@every(
    ("failure", "scope", "span"),
    [
        (LaunchFailure.NO_CAPACITY, CooldownScope.POOL, timedelta(minutes=3)),
        (LaunchFailure.RATE_LIMITED, CooldownScope.PROVIDER, timedelta(seconds=12)),
        (LaunchFailure.PRICE_MOVED, CooldownScope.OFFER, timedelta(seconds=30)),
    ],
)
def test_a_refused_launch_cools_down_what_was_refused_and_nothing_more(
    failure: LaunchFailure, scope: CooldownScope, span: timedelta
) -> None:
    world = world_with(A.INTENDED)
    (attempt,) = world.attempts
    plan = launch_refused(world, attempt, failure, "no", NOW, timedelta(seconds=12))
    noted = [(CooldownScope.JOB, timedelta(0)), (CooldownScope.TARGET, REFUSES_FIRST)]
    held_back = [] if scope is CooldownScope.PROVIDER else noted
    assert [(c.scope, c.until - NOW) for c in plan.cooldowns] == [(scope, span), *held_back]


def test_silence_is_ours_while_the_store_does_not_answer() -> None:
    world = world_with(A.RUNNING, heartbeat_seen_at=NOW - MINUTE)
    plan = reconcile(world, listing(instance(S.RUNNING)), {}, NOW)
    assert after(world, plan)[0] is A.RUNNING


def test_checkpoints_published_before_the_loss_are_taken_in_with_it() -> None:
    world = world_with(A.RUNNING, over_since=NOW - MINUTE)
    saved = Checkpoint(name="step-2", attempt=1, step=2, bytes=10, at=NOW - MINUTE, manifest_key="k", sha256="0" * 64)
    plan = reconcile(world, listing(instance(S.PAUSED, loss=Loss.OUTBID)), report(seq=6, checkpoints=(saved,)), NOW)
    assert plan.jobs[J].checkpoints == (saved,)
    assert plan.jobs[J].lost == MINUTE


def test_a_stopping_machine_is_ended_at_its_deadline() -> None:
    world = world_with(A.STOPPING)
    at = NOW + timedelta(minutes=3)
    plan = reconcile(world, listing(instance(S.RUNNING)), report(seq=9), at)
    assert after(world, plan) == (A.ENDING, JobState.CANCELLED)


def test_a_woken_machine_of_an_ended_attempt_is_ended_again_when_the_provider_forgot() -> None:
    world = world_with(A.ENDING)
    soon = reconcile(world, listing(instance(S.RUNNING)), {}, NOW)
    assert ends(soon) == [], "the order is half a minute old"
    later = reconcile(world, listing(instance(S.RUNNING), at=NOW + MINUTE), {}, NOW + MINUTE)
    assert ends(later) == ["terminate:shop::m1"]


def test_a_machine_kept_stopped_after_its_end_was_accepted_is_ended_again_and_its_disk_booked() -> None:
    world = world_with(A.ENDING, machine=MachineState.HALTED, meter=Meter())
    kept = instance(S.PAUSED, loss=Loss.OUTBID)
    assert ends(reconcile(world, listing(kept), {}, NOW)) == [], "the order is half a minute old"
    later = reconcile(world, listing(kept, at=NOW + MINUTE), {}, NOW + MINUTE)
    assert ends(later) == ["terminate:shop::m1"]
    [item] = applied(world, later).attempts.values()
    assert item.machine is MachineState.HALTED, "its end was accepted: the job need not wait for it once more"
    assert item.meter.rate == halted_rate(item.quote)


def test_machines_of_ours_that_nobody_owns_are_ended_and_others_never_touched() -> None:
    world = world_with(A.RUNNING)
    shown = listing(
        instance(S.RUNNING),
        instance(S.RUNNING, ident="m2", key="spotd-lab-j9-4"),
        instance(S.RUNNING, ident="m3", key="spotd-other-j1-1"),
        instance(S.RUNNING, ident="m4", key="spotd-lab-x"),
        instance(S.GONE, ident="m5", key="spotd-lab-j8-1"),
    )
    assert ends(reconcile(world, shown, report(), NOW)) == ["terminate:shop::m2"]


def test_a_second_machine_under_one_key_is_ended() -> None:
    for ours in (A.INTENDED, A.RUNNING):
        plan = reconcile(world_with(ours), listing(instance(S.RUNNING), instance(S.RUNNING, ident="m2")), report(), NOW)
        assert ends(plan) == ["terminate:shop::m2"]


def test_a_machine_sold_in_another_market_than_agreed_is_ended() -> None:
    for ours in (A.INTENDED, A.RUNNING):
        sold = replace(instance(S.RUNNING), market=Market.ON_DEMAND)
        plan = reconcile(world_with(ours, over_since=NOW - MINUTE), listing(sold), report(), NOW)
        assert next(iter(plan.attempts.values())).end_reason is EndReason.CONTRACT_BROKEN
        assert ends(plan) == ["terminate:shop::m1"]


def test_a_price_that_moved_is_booked_from_now_on() -> None:
    world = world_with(A.RUNNING)
    moved = replace(instance(S.RUNNING), price=MicroUsdPerHour(250_000))
    plan = reconcile(world, listing(moved), report(), NOW)
    meter = next(iter(plan.attempts.values())).meter
    assert (meter.rate, meter.settled, meter.since) == (250_000, 66_667, NOW)
    assert [c.amount for c in plan.charges] == [66_667]


def test_every_changed_state_has_its_event() -> None:
    for cell in CELLS.values():
        world = world_with(cell.ours, over_since=former(cell))
        shown = listing() if cell.theirs is None else listing(cell.theirs)
        plan = reconcile(world, shown, report(), NOW)
        if any(j.state is not world.jobs[i].state for i, j in plan.jobs.items()):
            assert [e for e in plan.events if e.job == J and e.kind.startswith("job.")]
        if any(a.state is not world.attempts[i].state for i, a in plan.attempts.items()):
            assert [e for e in plan.events if e.attempt == 1]


def test_a_launch_that_is_still_under_way_here_is_not_judged_by_its_absence() -> None:
    world = world_with(A.INTENDED)
    under_way = {i: replace(t, state=IntentState.OPEN) for i, t in world.intents.items()}
    plan = reconcile(replace(world, intents=under_way), listing(), report(), NOW)
    assert after(world, plan) == (A.INTENDED, JobState.PROVISIONING)


def test_the_window_begins_when_the_answer_was_lost_and_not_when_the_launch_was_planned() -> None:
    world = world_with(A.INTENDED)
    waiting = {i: replace(t, state=IntentState.OPEN) for i, t in world.intents.items()}
    lost = launch_unknown(replace(world, intents=waiting), next(iter(world.attempts)), "time-out", NOW)
    world = applied(replace(world, intents=waiting), lost)
    owner = next(iter(world.jobs.values()))
    assert owner.reason.startswith("the answer to the launch was lost (time-out); for 180 s shop is searched")
    soon = NOW + timedelta(minutes=2)
    assert after(world, reconcile(world, listing(at=soon), report(), soon))[0] is A.INTENDED
    later = NOW + timedelta(minutes=3, seconds=1)
    looked = {i: replace(r, read_at=later + timedelta(seconds=9)) for i, r in report().items()}
    world = applied(world, reconcile(world, listing(at=later), looked, later))
    later += timedelta(seconds=9)
    assert after(world, reconcile(world, listing(at=later), looked, later))[0] is A.ENDED
