"""What a loss repeats is the work after the newest checkpoint: not the time in which its machine stood still."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.lineage import repeated_time
from spotd.core.domain.states import AttemptState, EndReason
from spotd.core.plan_builder import PlanBuilder
from tests.cases import every
from tests.unit.core.builders import NOW, world_with

MINUTE, SECOND = timedelta(minutes=1), timedelta(seconds=1)
SAVED = NOW - 15 * MINUTE - 2 * SECOND


def an_attempt(seen_at: datetime | None, held_since: datetime | None = None) -> Attempt:
    world = world_with(AttemptState.RUNNING)
    (item,) = world.attempts.values()
    held = replace(item.bidding, held_since=held_since)
    return replace(item, running_at=SAVED, heartbeat_seen_at=seen_at, bidding=held)


@every(
    ("seen_at", "held_since", "repeated"),
    [
        (NOW - 15 * MINUTE, None, 2 * SECOND),
        (NOW - 15 * MINUTE, NOW - 15 * MINUTE - SECOND, SECOND),
        (NOW - SECOND, NOW - 15 * MINUTE, 2 * SECOND),
        (NOW - SECOND, None, 15 * MINUTE + 2 * SECOND),
        (None, None, 15 * MINUTE + 2 * SECOND),
        (SAVED - MINUTE, None, timedelta(0)),
    ],
    ids=["silent", "held and silent", "held", "it worked on", "never heard", "silent before"],
)
def test_time_without_a_sign_of_work_is_not_repeated(
    seen_at: datetime | None, held_since: datetime | None, repeated: timedelta
) -> None:
    (job,) = world_with(AttemptState.RUNNING).jobs.values()
    assert repeated_time(job, an_attempt(seen_at, held_since), NOW, 45 * SECOND) == repeated


def test_a_loss_counts_it() -> None:
    world = world_with(AttemptState.RUNNING)
    item = an_attempt(NOW - 15 * MINUTE)
    builder = PlanBuilder(replace(world, attempts={item.id: item}), NOW)
    builder.end_attempt(item.id, EndReason.HOST_LOST)
    assert builder.job(item.id.job).lost == 2 * SECOND
