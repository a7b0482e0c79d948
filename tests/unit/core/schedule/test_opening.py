"""What windows decide: when a machine is bought, when it must save, and what users read of it."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from spotd.core.decide import decide
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.jobs import Checkpoint, Job
from spotd.core.domain.plan import applied
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.domain.world import Verdict, VerdictKind, World
from spotd.core.schedule import save_instant, save_lead
from spotd_jobs.spec.fields import parse_window
from spotd_jobs.spec.model import CheckpointPolicy, Schedule
from tests.cases import every
from tests.unit.core.builders import MINUTE, NOW, job, market, offer, shop_policy, world_with

HOUR = 60 * MINUTE
LEAD = save_lead(job(), None, shop_policy())


def windowed(*windows: str, zone: str = "Europe/Kyiv", **changes: object) -> Job:
    schedule = Schedule(windows=tuple(map(parse_window, windows)), timezone=zone)
    return job(spec={"schedule": schedule}, **changes)  # type: ignore[arg-type]  # passed on as they are


def waiting(one: Job, at: datetime = NOW) -> tuple[Verdict, JobState, datetime | None]:
    world = World(policy=shop_policy(), jobs={one.id: one}, attempts={}, intents={})
    plan = decide(world, market(offer(), at=at), at)
    return plan.verdicts[one.id], plan.jobs.get(one.id, one).state, plan.wake_at


def running(*windows: str, zone: str = "Europe/Kyiv") -> tuple[World, Attempt]:
    """A job of these windows that runs since some minutes before noon."""
    world = world_with(AttemptState.RUNNING)
    [owner] = world.jobs.values()
    owner = replace(owner, spec=windowed(*windows, zone=zone).spec)
    return replace(world, jobs={owner.id: owner}), next(iter(world.attempts.values()))


def test_outside_of_its_windows_a_job_is_queued_and_the_loop_wakes_when_one_opens() -> None:
    verdict, state, wake_at = waiting(windowed("Mon-Fri 22:00-08:00"), NOW + timedelta(hours=4, minutes=50))
    assert verdict.kind is VerdictKind.WINDOW
    assert verdict.sentence == "waits for its window, opens Mon 22:00 Europe/Kyiv (in 3 h 10 min)"
    assert verdict.until == NOW + 8 * HOUR
    assert state is JobState.QUEUED
    soon = NOW + 8 * HOUR - timedelta(seconds=20)
    assert waiting(windowed("Mon-Fri 22:00-08:00"), soon)[2] == NOW + 8 * HOUR
    assert wake_at is not None  # the usual look at prices comes first


def test_a_window_days_ahead_is_named_with_its_date() -> None:
    verdict, _, _ = waiting(windowed("Mon 10:00-12:00", zone="UTC"), NOW + HOUR)
    assert verdict.sentence == "waits for its window, opens Mon 2026-03-09 10:00 UTC (in 165 h 0 min)"


def test_inside_of_one_it_is_launched() -> None:
    assert waiting(windowed("Mon 14:00-16:00"))[1] is JobState.PROVISIONING


def test_nothing_is_bought_shortly_before_the_end_of_a_window() -> None:
    evening = windowed("Mon 14:00-15:00", "Tue 14:00-15:00")
    assert waiting(evening, NOW + 40 * MINUTE)[1] is JobState.PROVISIONING
    verdict, state, _ = waiting(evening, NOW + 50 * MINUTE)
    assert state is JobState.QUEUED
    assert verdict.sentence == (
        "its window closes in 10 min, too soon for a useful run; the next opens Tue 14:00 Europe/Kyiv (in 23 h 10 min)"
    )


def test_windows_that_are_all_too_short_are_said_to_be() -> None:
    verdict, _, _ = waiting(windowed("14:30-14:40"))
    assert verdict.until is None
    assert verdict.sentence == (
        "waits for a window in which it can run: the longest that comes lasts 10 min,"
        " a useful run and its save take 12 min"
    )


def test_a_zone_that_is_unknown_here_makes_it_wait_and_names_the_way_out() -> None:
    verdict, _, _ = waiting(windowed("14:00-16:00", zone="Mars/Olympus"))
    assert verdict.sentence == "the time zone Mars/Olympus of its windows is unknown on this computer: install tzdata"
    world, item = running("Tue", zone="Mars/Olympus")
    assert decide(world, market(), NOW).attempts.get(item.id, item).stop is None


def test_a_job_that_lost_its_machine_waits_for_its_window_as_queued() -> None:
    lost = windowed("Tue", state=JobState.RECOVERING, attempts_made=1)
    assert waiting(lost)[1] is JobState.QUEUED


def test_a_machine_is_ordered_to_save_before_its_window_closes_and_the_loop_wakes_for_it() -> None:
    world, item = running("Mon 12:00-14:10")
    closes = NOW + 10 * MINUTE
    early = decide(world, market(), closes - LEAD - timedelta(seconds=5))
    assert early.attempts.get(item.id, item).stop is None
    assert early.wake_at == closes - LEAD
    assert "; its window closes Mon 14:10 Europe/Kyiv (in 4 min)" in early.verdicts[item.id.job].sentence
    plan = decide(world, market(), closes - LEAD)
    stop = plan.attempts[item.id].stop
    assert stop is not None
    assert stop.reason is EndReason.WINDOW_CLOSED
    assert stop.flush
    assert stop.deadline <= closes
    assert plan.events[-1].message == "ordered to save and stop: its window ends: closes Mon 14:10 Europe/Kyiv"
    verdict = decide(applied(world, plan), market(), closes - LEAD).verdicts[item.id.job]
    assert verdict.kind is VerdictKind.STOPPING
    assert "; it saves and stops: its window ends: closes Mon 14:10 Europe/Kyiv" in verdict.sentence


@every("asleep", [timedelta(minutes=30), timedelta(hours=8), timedelta(days=4)])
def test_after_a_sleep_of_the_computer_it_is_stopped_at_once(asleep: timedelta) -> None:
    world, item = running("Mon 12:00-14:10")
    stop = decide(world, market(), NOW + asleep).attempts[item.id].stop
    assert stop is not None
    assert stop.detail == "it is outside of Mon 12:00-14:10 Europe/Kyiv"


def test_a_clock_that_is_set_back_buys_again_only_what_the_window_still_holds() -> None:
    world, _ = running("Mon 12:00-14:10")
    assert not decide(world, market(), NOW - HOUR).attempts
    assert waiting(windowed("Mon 12:00-14:10"), NOW - HOUR)[1] is JobState.PROVISIONING


def test_always_open_windows_stop_nothing_and_say_nothing() -> None:
    world, item = running("Mon-Sun")
    plan = decide(world, market(), NOW)
    assert item.id not in plan.attempts
    assert "window" not in plan.verdicts[item.id.job].sentence


def test_the_end_of_a_window_is_no_failure_and_needs_no_pause() -> None:
    traits = EndReason.WINDOW_CLOSED.traits
    assert (traits.next_state, traits.is_recovery, traits.is_failed_start) == (JobState.QUEUED, False, False)


def test_a_large_checkpoint_is_saved_earlier_but_never_for_more_than_half_of_the_window() -> None:
    big = Checkpoint(name="c", attempt=1, bytes=45_000_000_000, at=NOW, manifest_key="k", sha256="0" * 64, step=None)
    owner = job(checkpoints=(big,), spec={"checkpoint": CheckpointPolicy(stop_grace=timedelta(seconds=60))})
    assert save_lead(owner, None, shop_policy()) == 3 * MINUTE + 30 * MINUTE
    assert save_lead(owner, offer(upload_mbps=800.0), shop_policy()) == 3 * MINUTE + 15 * MINUTE
    huge = replace(big, bytes=10**13)
    most = save_lead(replace(owner, checkpoints=(huge,)), None, shop_policy())
    assert most == 3 * MINUTE + shop_policy().save_limit
    assert save_instant(replace(owner, checkpoints=(huge,)), None, shop_policy(), NOW, NOW + HOUR) == NOW + HOUR / 2


def test_a_machine_that_only_uploads_is_left_to_finish_for_as_long_as_a_save() -> None:
    world, item = running("Mon 08:00-14:10")
    uploading = replace(world, attempts={item.id: replace(item, phase="upload")})
    save_at, limit = NOW + 10 * MINUTE - LEAD, world.policy.save_limit
    plan = decide(uploading, market(), save_at)
    assert plan.attempts.get(item.id, item).stop is None
    last = save_at + limit - timedelta(seconds=5)
    plan = decide(uploading, market(), last)
    assert plan.attempts.get(item.id, item).stop is None
    assert plan.wake_at == save_at + limit
    assert decide(uploading, market(), save_at + limit).attempts[item.id].stop is not None
    assert decide(world, market(), save_at).attempts[item.id].stop is not None
