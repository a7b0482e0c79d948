"""A job that gets nowhere is launched less and less often, and is given up if it may be at fault itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest

from spotd.core.decide import decide
from spotd.core.domain.attempts import HostStatus
from spotd.core.domain.cooldowns import (
    BOUGHT_PER_HOUR_MAX,
    COOLDOWNS_REMEMBERED,
    LAUNCHES_PER_HOUR_MAX,
    CooldownScope,
    Setback,
    setback,
    words_of_giving_up,
)
from spotd.core.domain.intents import AttemptId, JobId
from spotd.core.domain.jobs import Checkpoint
from spotd.core.domain.market import MarketSnapshot, ProviderOffers, build_offer_index
from spotd.core.domain.plan import Plan, applied
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.domain.world import VerdictKind, World
from spotd.core.kernel.outcomes import LaunchFailure, launch_refused, launched
from spotd.core.kernel.reconcile import reconcile
from spotd.core.plan_builder import PlanBuilder
from spotd.core.requests import retry
from spotd_providers.contract.values import Instance, InstanceId, InstanceRef, InstanceState, Listing, Loss, Offer
from tests.cases import every
from tests.unit.core.builders import MINUTE, NOW, SHOP, job, market, offer, shop_policy, world_with

JOB = JobId("j1")
SECOND = timedelta(seconds=1)
LOOK_EVERY = timedelta(seconds=30)
"""While nothing happens, a job is looked at this often, and besides when a pause ends that the world knows of."""
MANY = tuple(offer(f"o{n}", price=300_000 + n) for n in range(60))
Answer = Callable[[World, AttemptId, datetime], World]


def stage(**spec: int) -> World:
    return World(policy=shop_policy(), jobs={JOB: job(spec=spec)}, attempts={}, intents={})


def lived(
    world: World, hours: float, answer: Answer, *offers: Offer, step: timedelta = SECOND
) -> tuple[World, list[datetime]]:
    """The world after so long, in which every launch is answered at once; and when the launches were."""
    now, calls = NOW, []
    listed = market(*offers).by_provider[SHOP]
    while now < NOW + timedelta(hours=hours):
        cooling = tuple(c for c in world.cooldowns if c.until > now - COOLDOWNS_REMEMBERED)
        world = replace(world, cooldowns=cooling)
        job_ended = JOB not in world.jobs or world.jobs[JOB].state.is_final
        if job_ended:
            break
        plan = decide(world, MarketSnapshot(by_provider={SHOP: replace(listed, at=now)}), now)
        world = applied(world, plan)
        for identity, item in plan.attempts.items():
            if item.state is AttemptState.INTENDED:
                calls.append(now)
                world = answer(world, identity, now)
        now += step if plan.attempts else max(step, min([LOOK_EVERY, *(at - now for at in _pauses(world) if at > now)]))
    return world, calls


def _pauses(world: World) -> list[datetime]:
    ends = [one.not_before for one in world.jobs.values() if one.not_before is not None]
    return ends + [one.until for one in world.cooldowns]


def refusing(failure: LaunchFailure, wait: timedelta | None = None) -> Answer:
    return lambda world, attempt, now: applied(world, launch_refused(world, attempt, failure, "no", now, wait))


def machine(number: int, at: datetime, state: InstanceState = InstanceState.RUNNING) -> Instance:
    return Instance(
        ref=InstanceRef(provider=SHOP, instance_id=InstanceId(f"m{number}")),
        key=f"spotd-lab-j1-{number}",  # type: ignore[arg-type]  # spelled out
        state=state,
        created_at=at,
    )


def ending(reason: EndReason, **report: Any) -> Answer:
    """The machine comes up, its runner ends for this reason, and the machine is gone."""

    def answer(world: World, attempt: AttemptId, now: datetime) -> World:
        made = machine(attempt.number, now)
        world = applied(world, launched(world, attempt, made, now))
        told = HostStatus(attempt=attempt, read_at=now, seq=1, phase="done", exit_reason=reason, **report)
        seen = Listing(instances=(made,), complete=True, at=now)
        world = applied(world, reconcile(world, {SHOP: seen}, {attempt: told}, now))
        rows = (machine(attempt.number, now, InstanceState.GONE),)
        for at in (now, now + timedelta(microseconds=1)):  # two lists that say it
            gone = Listing(instances=rows, complete=True, at=at)
            world = applied(world, reconcile(world, {SHOP: gone}, {}, at))
        return world

    return answer


@pytest.mark.long
@pytest.mark.parametrize("failure", list(LaunchFailure))
@pytest.mark.parametrize("wait", [None, timedelta(0), timedelta(microseconds=1), timedelta(days=1)])
def test_however_launches_are_refused_they_are_few_in_any_hour(failure: LaunchFailure, wait: timedelta | None) -> None:
    _, calls = lived(stage(retry_starts=100), 1.5, refusing(failure, wait), *MANY, step=5 * SECOND)
    busiest = max(sum(1 for c in calls if start <= c < start + timedelta(hours=1)) for start in calls)
    assert busiest <= LAUNCHES_PER_HOUR_MAX


@pytest.mark.long
@pytest.mark.parametrize("failure", list(LaunchFailure))
@pytest.mark.parametrize("answers_after", [15, 45, 90])
def test_launches_are_as_few_if_each_refusal_takes_its_time(failure: LaunchFailure, answers_after: int) -> None:
    step = answers_after * SECOND
    _, calls = lived(stage(retry_starts=100), 1.5, refusing(failure), *MANY, step=step)
    busiest = max(sum(1 for c in calls if start <= c < start + timedelta(hours=1)) for start in calls)
    assert busiest <= LAUNCHES_PER_HOUR_MAX


def test_a_refused_launch_goes_to_the_next_offer_at_once_for_the_first_times() -> None:
    _, calls = lived(stage(), 0.01, refusing(LaunchFailure.NO_CAPACITY), *MANY)
    assert [c - NOW for c in calls[:4]] == [0 * SECOND, SECOND, 2 * SECOND, 3 * SECOND]
    assert len(calls) < 7


@every("reason", [EndReason.CODE_ERROR, EndReason.INPUT_ERROR, EndReason.DISK_FULL, EndReason.HOST_LOST])
def test_a_job_that_cannot_start_has_failed_after_as_many_starts_as_it_may_have(reason: EndReason) -> None:
    world, calls = lived(stage(), 4, ending(reason, exit_detail="no shell"), *MANY)
    assert len(calls) == 5
    assert JOB not in world.jobs  # final, and its last machine is gone
    world, calls = lived(stage(retry_starts=2), 4, ending(reason, exit_detail="no shell"), *MANY)
    assert len(calls) == 2
    pauses = [b - a for a, b in pairwise(calls)]
    assert all(pause >= 5 * SECOND for pause in pauses)
    assert reason.traits.is_failed_start


@every("reason", [EndReason.HOST_LOST, EndReason.PROVISION_TIMEOUT])
def test_a_machine_that_was_never_seen_is_no_failed_start(reason: EndReason) -> None:
    world = world_with(AttemptState.INTENDED)
    (item,), waiting = world.attempts.values(), replace(world.jobs[JOB], failed_starts=4)
    assert item.launched_at is None
    unseen = setback(waiting, item, reason, NOW)
    assert (unseen.failed_starts, unseen.gives_up, unseen.idle_launches) == (4, False, 1)
    for seen in (replace(item, launched_at=NOW), replace(item, heartbeat_seen_at=NOW)):
        assert setback(waiting, seen, reason, NOW).gives_up
    assert setback(waiting, item, EndReason.IMAGE_ERROR, NOW).gives_up, "a launch that is refused for its image"


HOUR = timedelta(hours=1)


def taken_after(span: timedelta, loss: Loss = Loss.PREEMPTED, saves: bool = False) -> Answer:
    """The machine comes up, may save, and is taken back so long after its launch; the world's time goes on besides."""

    def answer(world: World, attempt: AttemptId, now: datetime) -> World:
        world = applied(world, launched(world, attempt, machine(attempt.number, now), now))
        at = now + span
        name, number = f"c{attempt.number}", attempt.number
        made = Checkpoint(name=name, attempt=number, step=number, bytes=1, at=at, manifest_key=name, sha256="0" * 64)
        told = HostStatus(attempt=attempt, read_at=at, seq=1, phase="run", checkpoints=(made,) if saves else ())
        taken = replace(machine(attempt.number, now, InstanceState.GONE), loss=loss)
        first = Listing(instances=(taken,), complete=True, at=at - SECOND)
        seen = replace(first, at=at)  # of a host that spoke a moment ago, two lists must say it
        for one in (first, seen):
            world = applied(world, reconcile(world, {SHOP: one}, {attempt: told}, at))
        return applied(world, reconcile(world, {SHOP: seen}, {}, at))

    return answer


@pytest.mark.long
@pytest.mark.parametrize("loss", [Loss.PREEMPTED, Loss.OUTBID, Loss.HOST_LOST])
@pytest.mark.parametrize("pooled", [True, False], ids=["pools", "hosts"])
def test_a_machine_that_is_taken_after_every_launch_is_bought_ever_less_often(loss: Loss, *, pooled: bool) -> None:
    offers = [replace(one, host_id=None) for one in MANY] if pooled else MANY
    # Every five seconds, as the control loop reads hosts: one that buys too often does so at this pace as well.
    world, calls = lived(stage(retry_starts=100_000), 4, taken_after(20 * SECOND, loss), *offers, step=5 * SECOND)
    assert not world.jobs[JOB].state.is_final, "it is not the job's fault"
    if loss is not Loss.HOST_LOST:  # which may be the job's own doing
        assert calls[2] - calls[0] <= 45 * SECOND, "the first ones are replaced at once"
    steady = [sum(1 for c in calls if NOW + h * HOUR <= c < NOW + (h + 1) * HOUR) for h in (1, 2, 3)]
    assert max(steady) <= BOUGHT_PER_HOUR_MAX, f"{len(calls)} in 4 h, {steady}"
    assert min(steady) >= 5, "it goes on trying"
    if world.jobs[JOB].not_before is not None:
        verdict = decide(world, market(*offers, at=NOW + 4 * HOUR), calls[-1] + 21 * SECOND).verdicts[JOB]
        assert verdict.kind is VerdictKind.BACKING_OFF
        assert "launches in a row came to nothing" in verdict.sentence


def test_after_a_loss_with_progress_the_next_machine_is_bought_at_once_however_many_were_lost_before() -> None:
    world, _ = lived(stage(retry_starts=100), 1, taken_after(20 * SECOND), *MANY, step=5 * SECOND)
    assert world.jobs[JOB].idle_launches > 5
    world = replace(world, jobs={JOB: replace(world.jobs[JOB], not_before=None)}, cooldowns=())
    fresh = market(*MANY, at=NOW + HOUR)
    plan = decide(world, fresh, NOW + HOUR)
    (identity,) = plan.attempts
    world = taken_after(6 * MINUTE, saves=True)(applied(world, plan), identity, NOW + HOUR)
    assert (world.jobs[JOB].idle_launches, world.jobs[JOB].not_before) == (0, None)
    assert decide(world, replace(fresh), NOW + HOUR + 6 * MINUTE).verdicts[JOB].kind is not VerdictKind.BACKING_OFF


def test_the_reason_of_the_last_failure_is_in_the_jobs_own() -> None:
    world = stage(retry_starts=1)
    plan = decide(world, market(*MANY), NOW)
    (attempt,) = plan.attempts
    world = applied(world, plan)
    plan = launch_refused(world, attempt, LaunchFailure.NOT_PREPARED, "job j1 has no value for TOKEN", NOW)
    assert plan.jobs[JOB].state is JobState.FAILED
    assert "no value for TOKEN" in plan.jobs[JOB].reason
    assert "[retry] starts" in plan.jobs[JOB].reason


@every(
    ("failed_starts", "words"),
    [(5, "5 starts in a row failed, [retry] starts allows 5"), (20, "4 times [retry] starts")],
)
def test_the_reason_names_the_bound_that_ended_the_job(failed_starts: int, words: str) -> None:
    back = Setback(idle_launches=9, failed_starts=failed_starts, not_before=None, gives_up=True)
    assert words in words_of_giving_up(stage().jobs[JOB], back)


def test_starts_without_a_sign_of_life_of_a_job_that_has_saved_are_counted_apart_from_the_others() -> None:
    """Its provider was away while machines were taken back, and then a host that had spoken was lost."""
    saved = Checkpoint(name="c", attempt=1, step=1, bytes=1, at=NOW, manifest_key="c", sha256="0" * 64)
    owner, (silent,) = job(checkpoints=(saved,), attempts_made=9), world_with(AttemptState.STARTING).attempts.values()
    silent = replace(silent, id=AttemptId(job=JOB, number=9), running_at=None, heartbeat_seen_at=None)
    heard = replace(silent, heartbeat_seen_at=NOW)
    for number, item in enumerate([silent] * 4 + [heard] * 5):
        starting = replace(owner, state=JobState.STARTING)
        builder = PlanBuilder(replace(stage(), jobs={JOB: starting}, attempts={item.id: item}), NOW)
        builder.end_attempt(item.id, EndReason.HOST_LOST, "")
        owner = builder.plan().jobs[JOB]
        assert (owner.state is JobState.FAILED) == (number == 8), owner.reason
    assert (owner.failed_starts, owner.mute_starts) == (9, 4)
    assert "5 starts in a row failed, beside 4 without a sign of life, [retry] starts allows 5" in owner.reason
    assert retry(stage(), owner, NOW).jobs[JOB].mute_starts is None


def test_lost_secrets_of_one_job_do_not_keep_another_from_its_machine() -> None:
    sick, well = stage(), job(2)
    plan = decide(sick, market(*MANY), NOW)
    (attempt,) = plan.attempts
    world = applied(sick, plan)
    world = applied(world, launch_refused(world, attempt, LaunchFailure.NOT_PREPARED, "secrets are lost", NOW))
    assert world.cooldowns == ()
    world = replace(world, jobs={**world.jobs, well.id: well})
    plan = decide(world, market(*MANY), NOW)
    assert [a.job for a in plan.attempts] == [well.id]
    verdict = plan.verdicts[JOB]
    assert verdict.kind is VerdictKind.BACKING_OFF
    assert "secrets are lost" in verdict.sentence


def test_a_store_that_takes_no_grant_makes_every_job_wait_and_none_fail() -> None:
    world, calls = lived(stage(), 1, refusing(LaunchFailure.STORE_AWAY), *MANY)
    assert world.jobs[JOB].state is JobState.QUEUED
    assert len(calls) <= LAUNCHES_PER_HOUR_MAX
    assert {c.scope for c in world.cooldowns} == {CooldownScope.STORE}


def test_data_that_is_away_is_no_failed_start_of_a_job_and_each_machine_for_it_comes_later() -> None:
    away = ending(EndReason.INPUT_AWAY, exit_detail="hf://org/model: the answer was 503")
    world, calls = lived(stage(retry_starts=2), 24, away, *MANY, step=MINUTE)
    kept = world.jobs[JOB]
    assert (kept.state, kept.failed_starts, world.cooldowns) == (JobState.RECOVERING, 0, ())
    assert "the place of its data does not answer: hf://org/model: the answer was 503" in kept.reason
    gaps = [later - earlier for earlier, later in pairwise(calls)]
    assert gaps[0] > timedelta(0)
    assert gaps[:4] == sorted(set(gaps[:4])), gaps
    assert 4 < len(calls) < 40


def test_a_hub_that_is_away_at_the_launch_keeps_no_other_job_waiting() -> None:
    sick, well = stage(), job(2)
    plan = decide(sick, market(*MANY), NOW)
    (attempt,) = plan.attempts
    world = applied(sick, plan)
    world = applied(world, launch_refused(world, attempt, LaunchFailure.INPUT_AWAY, "hf://org/model: 503", NOW))
    assert (world.cooldowns, world.jobs[JOB].failed_starts) == ((), 0)
    world = replace(world, jobs={**world.jobs, well.id: well})
    assert well.id in {identity.job for identity in decide(world, market(*MANY), NOW).attempts}


def test_a_job_that_fails_on_machine_after_machine_does_not_use_up_the_hosts() -> None:
    world, _ = lived(stage(), 0.02, ending(EndReason.HOST_LOST), *MANY)
    spans = [c.until - c.since for c in world.cooldowns if c.since is not None]
    assert spans[0] == 30 * MINUTE
    assert set(spans[1:]) == {3 * MINUTE}


def lost_after(span: timedelta) -> Plan:
    """The plan of the loss of a machine whose command had run for so long."""
    stage = world_with(AttemptState.RUNNING, running_at=NOW - span)
    owner = replace(stage.jobs[JOB], failed_starts=4, idle_launches=9, not_before=NOW - MINUTE)
    stage = replace(stage, jobs={JOB: owner})
    told = HostStatus(attempt=AttemptId(job=JOB, number=1), read_at=NOW, exit_reason=EndReason.HOST_LOST, seq=9)
    seen = Listing(instances=(machine(1, NOW),), complete=True, at=NOW)
    return reconcile(stage, {SHOP: seen}, {told.attempt: told}, NOW)


def test_a_command_that_ran_for_a_while_did_start_and_one_that_ran_for_long_was_worth_it() -> None:
    short = lost_after(MINUTE).jobs[JOB]
    assert (short.state, short.failed_starts) == (JobState.FAILED, 5)
    while_ = lost_after(6 * MINUTE).jobs[JOB]
    assert (while_.state, while_.failed_starts, while_.idle_launches) == (JobState.RECOVERING, 0, 10)
    long = lost_after(31 * MINUTE).jobs[JOB]
    assert (long.failed_starts, long.idle_launches, long.not_before) == (0, 0, None)


def test_a_machine_that_lists_state_to_be_over_does_not_run_the_command_until_it_is_left() -> None:
    """An answer that was lost: the machine is known only once it is outbid, and its host wrote in time that it ran."""
    stage = world_with(AttemptState.RUNNING, running_at=NOW - 9 * MINUTE, over_since=NOW - 9 * MINUTE)
    stage = replace(stage, jobs={JOB: replace(stage.jobs[JOB], failed_starts=2)})
    builder = PlanBuilder(stage, NOW)
    builder.end_attempt(AttemptId(job=JOB, number=1), EndReason.OUTBID, "")
    after = builder.plan().jobs[JOB]
    assert (after.failed_starts, after.totals.ran) == (2, timedelta(0))


def test_a_pause_written_by_a_clock_that_ran_ahead_is_not_waited_for() -> None:
    ahead = replace(job(), not_before=NOW + timedelta(hours=8))
    plan = decide(replace(stage(), jobs={JOB: ahead}), market(*MANY), NOW)
    assert plan.attempts


def test_a_retry_forgets_the_failed_starts() -> None:
    failed = job(state=JobState.FAILED, failed_starts=5, idle_launches=9, not_before=NOW + MINUTE)
    again = retry(stage(), failed, NOW).jobs[JOB]
    assert (again.failed_starts, again.idle_launches, again.not_before) == (0, 0, None)


# --- what ends a cool-down before its time ---


def provider_offers(*offers: Offer, at: datetime, **seen: Any) -> MarketSnapshot:
    return MarketSnapshot(
        by_provider={SHOP: ProviderOffers(provider=SHOP, offer_index=build_offer_index(offers), at=at, **seen)}
    )


def refused_once(failure: LaunchFailure, only: Offer, strikes: int = 0) -> World:
    world = stage(retry_starts=100)
    now = NOW
    for _ in range(strikes + 1):
        world = replace(world, jobs={JOB: replace(world.jobs[JOB], not_before=None)})
        plan = decide(replace(world, cooldowns=()), provider_offers(only, at=now), now)
        world = replace(applied(world, plan), cooldowns=world.cooldowns)
        (attempt,) = plan.attempts
        world = applied(world, launch_refused(world, attempt, failure, "no", now))
    return replace(world, jobs={JOB: replace(world.jobs[JOB], not_before=None)})


def is_bought(world: World, market: MarketSnapshot, after: timedelta) -> bool:
    return bool(decide(world, market, NOW + after).attempts)


def test_the_only_offer_of_a_kind_is_tried_again_once_a_newer_list_shows_it() -> None:
    only = offer()
    world = refused_once(LaunchFailure.OFFER_GONE, only)
    assert not is_bought(world, provider_offers(only, at=NOW), 30 * SECOND), "the list is the one that was wrong"
    assert not is_bought(world, provider_offers(at=NOW + SECOND), 30 * SECOND), "it is gone"
    assert is_bought(world, provider_offers(only, at=NOW + SECOND), 2 * SECOND)


def test_an_offer_that_is_shown_and_refused_again_and_again_is_left_alone_for_longer_each_time() -> None:
    only = offer()
    for strikes, pause_s in ((1, 5), (2, 10), (3, 20), (9, 300)):
        world = refused_once(LaunchFailure.OFFER_GONE, only, strikes)
        fresh = provider_offers(only, at=NOW + SECOND)
        assert not is_bought(world, fresh, timedelta(seconds=pause_s - 1))
        assert is_bought(world, fresh, timedelta(seconds=pause_s)), strikes


@every("strikes", [0, 1, 9])
def test_an_account_that_was_filled_is_used_at_once_however_long_it_was_empty(strikes: int) -> None:
    only = offer()
    world = refused_once(LaunchFailure.NO_BALANCE, only, strikes)
    assert not is_bought(world, provider_offers(only, at=NOW + SECOND), 30 * SECOND)
    assert is_bought(world, provider_offers(only, at=NOW + SECOND, credit_at=NOW + 20 * SECOND), 30 * SECOND)
    assert not is_bought(world, provider_offers(only, at=NOW + SECOND, credit_at=NOW - 3600 * SECOND), 30 * SECOND)


def test_a_key_that_is_taken_again_ends_the_pause_after_a_refused_one() -> None:
    only = offer()
    world = refused_once(LaunchFailure.AUTH, only)
    assert not is_bought(world, provider_offers(only, at=NOW + SECOND), 45 * SECOND)
    assert is_bought(world, provider_offers(only, at=NOW + SECOND, key_at=NOW + 40 * SECOND), 45 * SECOND)
