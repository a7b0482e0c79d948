"""What follows from a stall: save and stop, move a few times, or fail, and never while the job saves."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from spotd.core.decide import decide
from spotd.core.domain.attempts import Attempt, HostSample, Watch
from spotd.core.domain.intents import AttemptId
from spotd.core.domain.jobs import Job
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.domain.world import World
from spotd.core.plan_builder import PREPARATION, STALLS_MAX, WORTH, PlanBuilder, stall_words, watch_every
from spotd_jobs.spec.model import StallAction, WatchdogPolicy
from tests.cases import every
from tests.unit.core.builders import MINUTE, NOW, job, market, world_with

RULES = WatchdogPolicy(min_gpu_util=5, window=20 * MINUTE, no_progress=60 * MINUTE)
FIRST = AttemptId(job=job().id, number=1)
SAMPLE = HostSample(boot=0, up=timedelta(hours=5), phase="run", printed=7, writes=0)


def watch(**changes: Any) -> Watch:
    return replace(Watch(at=NOW, sample=SAMPLE, has_begun=True), **changes)


def stalled_world(rules: WatchdogPolicy = RULES, *, stalls: int = 0, **changes: Any) -> World:
    """A running job that was watched; by default it has printed nothing for an hour."""
    changes.setdefault("watch", watch(quiet=60 * MINUTE))
    world = world_with(AttemptState.RUNNING, **changes)
    owner = world.jobs[FIRST.job]
    owner = replace(owner, spec=replace(owner.spec, watchdog=rules), stalls=stalls)
    return replace(world, jobs={owner.id: owner})


def parts(world: World) -> tuple[Attempt, Job]:
    return world.attempts[FIRST], world.jobs[FIRST.job]


def test_a_stalled_job_is_ordered_to_save_and_stop() -> None:
    plan = decide(stalled_world(), market(), NOW)
    item = plan.attempts[FIRST]
    assert item.state is AttemptState.STOPPING
    assert item.stop is not None
    assert (item.stop.reason, item.stop.flush) == (EndReason.STALLED, True)
    assert item.stop.detail == ("no new output, step or checkpoint for 1 h 0 min, [watchdog] no_progress is 1 h 0 min")


def test_an_idle_gpu_is_named_with_its_use() -> None:
    item, owner = parts(stalled_world(watch=watch(idle=20 * MINUTE, idle_busy=0.06 * MINUTE)))
    assert stall_words(item, owner) == (
        "its busiest GPU was used 0.3 % for 20 min, [watchdog] asks for 5 % over 20 min"
    )


@every(
    "known",
    [
        pytest.param(watch(quiet=59 * MINUTE, idle=19 * MINUTE), id="not long enough"),
        pytest.param(watch(quiet=PREPARATION * 60 * MINUTE - MINUTE, has_begun=False), id="it still prepares"),
        pytest.param(watch(idle=PREPARATION * 20 * MINUTE - MINUTE, has_begun=False), id="it still prepares data"),
        pytest.param(None, id="nothing is known"),
    ],
)
def test_a_job_that_gets_on_is_left_alone(known: Watch | None) -> None:
    assert decide(stalled_world(watch=known), market(), NOW).attempts == {}


def test_a_job_that_prepares_for_too_long_has_stalled_too() -> None:
    item, owner = parts(stalled_world(watch=watch(idle=PREPARATION * 20 * MINUTE, has_begun=False)))
    assert stall_words(item, owner).endswith("over 20 min, 3 times as long before its own work begins")


def test_a_job_that_is_not_watched_is_never_stopped() -> None:
    assert decide(stalled_world(WatchdogPolicy()), market(), NOW).attempts == {}


def test_a_job_that_saves_because_it_was_told_to_is_left_alone() -> None:
    world = world_with(AttemptState.STOPPING, watch=watch(quiet=600 * MINUTE, idle=600 * MINUTE))
    item, owner = world.attempts[FIRST], world.jobs[FIRST.job]
    assert stall_words(item, replace(owner, spec=replace(owner.spec, watchdog=RULES))) == ""
    noticed, owner = parts(stalled_world(notice_at=NOW + 2 * MINUTE))
    assert stall_words(noticed, owner) == ""


def ended(world: World) -> Job:
    builder = PlanBuilder(world, NOW)
    builder.end_attempt(FIRST, EndReason.STALLED, stall_words(*parts(world)))
    return builder.job(FIRST.job)


def test_it_moves_to_another_host() -> None:
    world = stalled_world()
    builder = PlanBuilder(world, NOW)
    builder.end_attempt(FIRST, EndReason.STALLED, "x")
    after = builder.job(FIRST.job)
    assert (after.state, after.stalls, after.recoveries) == (JobState.RECOVERING, 1, 1)
    assert after.reason.endswith("it moves to another machine, after 1 of 3 stalls in a row")
    assert [c.subject for c in builder.plan().cooldowns] == ["host-o1"]


def test_it_stops_where_its_owner_wants_that() -> None:
    after = ended(stalled_world(replace(RULES, action=StallAction.STOP)))
    assert after.state is JobState.FAILED
    assert after.reason == (
        "the job made no progress: no new output, step or checkpoint for 1 h 0 min, [watchdog] no_progress is"
        ' 1 h 0 min; [watchdog] action is "stop"; spotctl retry job1 goes on from its newest checkpoint'
    )


def test_a_job_that_stalls_everywhere_has_failed() -> None:
    after = ended(stalled_world(stalls=STALLS_MAX - 1))
    assert (after.state, after.stalls) == (JobState.FAILED, STALLS_MAX)
    assert "; it stalled on 3 machines in a row; spotctl retry job1 goes on" in after.reason


def test_a_machine_on_which_the_job_got_on_for_long_ends_the_row() -> None:
    known = watch(quiet=60 * MINUTE, active=WORTH * 60 * MINUTE)
    after = ended(stalled_world(stalls=STALLS_MAX - 1, watch=known))
    assert (after.state, after.stalls) == (JobState.RECOVERING, 1)


def test_a_cancelled_job_is_cancelled_all_the_same() -> None:
    world = stalled_world(stalls=STALLS_MAX - 1)
    owner = replace(world.jobs[FIRST.job], cancel_requested=True)
    assert ended(replace(world, jobs={owner.id: owner})).state is JobState.CANCELLED


@every(
    ("rules", "every"),
    [
        (WatchdogPolicy(), None),
        (RULES, 2 * MINUTE),
        (WatchdogPolicy(no_progress=timedelta(days=7)), 5 * MINUTE),
        (WatchdogPolicy(no_progress=timedelta(seconds=1)), timedelta(seconds=1)),
    ],
)
def test_progress_is_read_several_times_before_it_is_judged(rules: WatchdogPolicy, every: timedelta | None) -> None:
    assert watch_every(rules) == every
