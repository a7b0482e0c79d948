"""A bad host's checkpoints push no good one out before something has shown that they are worth anything."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from spotd.core.checkpoints import REMEMBERED, in_reach, kept, offered, trim, with_fresh
from spotd.core.domain.attempts import HostStatus
from spotd.core.domain.intents import AttemptId
from spotd.core.domain.jobs import Checkpoint, Job
from spotd.core.domain.lineage import DOUBTS
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.domain.world import World
from spotd.core.kernel.reconcile import reconcile
from spotd_jobs.spec.model import CheckpointPolicy
from spotd_providers.contract.values import HostId
from tests.cases import every
from tests.unit.core.builders import MINUTE, NOW, job, offer, world_with

HOUR = timedelta(hours=1)


def saved(number: int, attempt: int, **changes: Any) -> Checkpoint:
    base = Checkpoint(
        name=f"c{number}",
        attempt=attempt,
        step=number,
        bytes=1,
        at=NOW,
        manifest_key=f"jobs/j1/attempts/{attempt}/checkpoints/c{number}.json",
        sha256=f"{number:064x}",
        host=f"shop/host-{attempt}",
    )
    return replace(base, **changes)


def row(attempt: int, *numbers: int, **changes: Any) -> tuple[Checkpoint, ...]:
    return tuple(saved(n, attempt, **changes) for n in numbers)


def names(some: Any) -> list[str]:
    return [c.name for c in some]


def a_job(*checkpoints: Checkpoint, keep: int = 3, errors: int = 3, **changes: Any) -> Job:
    spec = {"checkpoint": CheckpointPolicy(keep=keep), "retry_errors": errors}
    return job(checkpoints=checkpoints, spec=spec, **changes)


class Story:
    """One job and its attempts one after the other, each on a host of its own, through the core's own rules."""

    def __init__(self, keep: int = 3, errors: int = 3) -> None:
        self.job = a_job(keep=keep, errors=errors)
        self.now = NOW
        self.number = 0
        self.events: list[tuple[str, str]] = []
        self.world: World | None = None

    def begin(self, resumed: str | None = None, *, host: str | None = None) -> Story:
        self.number += 1
        base = world_with(AttemptState.RUNNING)
        (item,) = base.attempts.values()
        placed = replace(offer(), host_id=HostId(host or f"host-{self.number}"))
        item = replace(
            item,
            id=AttemptId(job=self.job.id, number=self.number),
            quote=replace(item.quote, offer=placed),
            running_at=self.now,
            resumed_from=resumed,
        )
        self.job = replace(self.job, attempts_made=self.number, state=JobState.RUNNING)
        self.world = replace(base, jobs={self.job.id: self.job}, attempts={item.id: item})
        return self

    def tell(self, **told: Any) -> Story:
        assert self.world is not None
        (item,) = self.world.attempts.values()
        report = HostStatus(attempt=item.id, read_at=self.now, seq=item.heartbeat_seq + 1, phase="run", **told)
        plan = reconcile(self.world, {}, {item.id: report}, self.now)
        self.events += [(e.kind, e.message) for e in plan.events]
        jobs = {**self.world.jobs, **plan.jobs}
        self.world = replace(self.world, jobs=jobs, attempts={**self.world.attempts, **plan.attempts})
        self.job = jobs[self.job.id]
        return self

    def save(self, *numbers: int, after: timedelta = HOUR, **changes: Any) -> Story:
        self.now += after
        return self.tell(checkpoints=row(self.number, *numbers, host=self._host(), **changes))

    def fail(self, *, after: timedelta = MINUTE) -> Story:
        self.now += after
        self.tell(exit_reason=EndReason.USER_ERROR, exit_answers_stop=True, exit_code=1, exit_detail="loss is NaN")
        return self._gone()

    def lose(self) -> Story:
        return self._gone()

    def _host(self) -> str:
        assert self.world is not None
        (item,) = self.world.attempts.values()
        return f"shop/{item.quote.offer.host_id}"

    def _gone(self) -> Story:
        """The machine is gone and the list is made as short as it may be, as between any two attempts."""
        self.job = replace(self.job, checkpoints=kept(self.job, frozenset()))
        return self

    def offer(self) -> list[str]:
        return names(offered(self.job))[:3]


def test_worthless_checkpoints_of_one_bad_host_leave_two_good_ones() -> None:
    story = Story().begin().save(1).save(2).save(3).lose()
    story.begin("c3").save(4, 5, 6).lose()
    assert names(story.job.checkpoints) == ["c6", "c5", "c4", "c3", "c2"]


def test_fifty_of_them_do_so_too() -> None:
    story = Story().begin().save(1, 2, 3).lose()
    story.begin("c3").save(*range(4, 4 + 2 * REMEMBERED)).lose()
    assert names(story.job.checkpoints)[-2:] == ["c3", "c2"]
    assert len(story.job.checkpoints) == 5


def test_a_job_that_fails_soon_after_each_resume_is_offered_the_older_attempts_and_says_so() -> None:
    story = Story().begin().save(1, 2, 3).lose()
    story.begin("c3").save(4, 5, 6).lose()
    story.begin("c6").fail()
    assert story.offer()[0] == "c6", "one failure may be anything"
    story.begin("c6").fail()
    assert story.offer() == ["c3", "c2", "c6"]
    (said,) = [message for kind, message in story.events if kind == "checkpoint.doubted"]
    assert "attempt 2 failed before" in said
    assert "c3 of attempt 1" in said
    assert "c3 of attempt 1" in story.job.reason


def test_the_last_try_of_all_begins_with_the_older_one_after_a_single_failure() -> None:
    story = Story(errors=1).begin().save(1, 2, 3).lose()
    story.begin("c3").save(4, 5, 6).lose()
    story.begin("c6").fail()
    assert story.job.state is JobState.RECOVERING
    assert story.offer()[0] == "c3"


def test_three_bad_hosts_in_a_row_lose_nothing_of_the_good_one() -> None:
    story = Story(errors=9).begin().save(1, 2, 3).lose()
    for first in (10, 20, 30):
        story.begin("c3").save(first, first + 1, first + 2).lose()
        assert {"c3", "c2"} <= {*names(story.job.checkpoints)}
    assert len(story.job.checkpoints) <= 3 + 2 + 2
    for bad in ("c32", "c22", "c12"):
        for _ in range(DOUBTS):
            assert story.offer()[0] == bad
            story.begin(bad).fail()
    assert story.offer()[0] == "c3"


def test_what_is_proven_lets_the_older_ones_go() -> None:
    story = Story().begin().save(1, 2, 3).lose()
    story.begin("c3").save(4, 5, 6).lose()
    story.begin("c6").save(7).lose()
    assert names(story.job.checkpoints) == ["c7", "c6", "c5"]


def test_the_host_that_wrote_a_checkpoint_does_not_vouch_for_it() -> None:
    story = Story().begin().save(1, 2, 3).lose()
    story.begin("c3", host="bad").save(4, 5, 6).lose()
    story.begin("c6", host="bad").save(7, 8, 9).lose()
    assert names(story.job.checkpoints)[-2:] == ["c3", "c2"]


def test_a_checkpoint_without_a_step_is_progress_only_after_a_while() -> None:
    story = Story().begin().save(1, 2, 3, step=None).lose()
    story.begin("c3").save(4, step=None).lose()
    story.begin("c4").save(5, after=MINUTE, step=None).lose()
    assert "c3" in names(story.job.checkpoints)
    story.begin("c5").save(6, after=HOUR, step=None).lose()
    assert "c3" not in names(story.job.checkpoints), "attempt 3 is proven"


def test_a_step_that_does_not_rise_is_no_progress() -> None:
    story = Story().begin().save(1, 2, 3).lose()
    story.begin("c3").save(4, 5, 6).lose()
    story.begin("c6").save(7, step=6).lose()
    assert "c3" in names(story.job.checkpoints)


def test_progress_ends_the_doubts() -> None:
    story = Story(errors=9).begin().save(1, 2, 3).lose()
    story.begin("c3").save(4, 5, 6).lose()
    story.begin("c6").fail()
    story.begin("c6").save(7).lose()
    story.begin("c7").lose()
    assert story.offer()[0] == "c7"
    story.begin("c7").fail()
    assert story.offer()[0] == "c7"


def test_a_machine_that_is_taken_away_proves_nothing_against_a_checkpoint() -> None:
    story = Story().begin().save(1, 2, 3).lose()
    story.begin("c3").save(4, 5, 6).lose()
    for _ in range(5):
        story.begin("c6").tell(exit_reason=EndReason.PREEMPTED).lose()
    assert story.offer()[0] == "c6"


def test_the_last_choice_is_of_another_attempt() -> None:
    """All that one attempt wrote may hang on what only it could write."""
    item = a_job(*row(2, 9, 8, 7, 6), *row(1, 3, 2, 1))
    assert names(offered(item)) == ["c9", "c8", "c3"]


def test_pinned_best_and_borrowed_ones_stay_what_they_are() -> None:
    lent = row(0, 3, 2, 1)
    item = a_job(*row(2, 9, 8, 7, 6, 5), saved(4, 1, pinned=True), *lent, keep=1)
    assert names(kept(item, frozenset())) == ["c9", "c4", "c3", "c2"]


@every("keep", [1, 2, 5])
def test_what_a_machine_was_offered_stays_in_reach_whatever_becomes_known_since(keep: int) -> None:
    story = Story(keep=keep, errors=9).begin().save(1, 2, 3).lose()
    story.begin("c3").save(4, 5, 6).lose()
    for _ in range(3):
        before = {c.manifest_key for c in offered(story.job)}
        story.begin(story.offer()[0])
        story.now += MINUTE
        story.tell(exit_reason=EndReason.USER_ERROR, exit_answers_stop=True, exit_code=1)
        reach = {c.manifest_key for c in in_reach(story.job, {story.number})}
        assert before <= reach, "its machine is not gone yet"
        story.lose()


def test_the_list_of_a_job_that_is_moved_again_and_again_does_not_grow() -> None:
    story = Story(errors=9).begin().save(1).lose()
    longest = 0
    for number in range(2, 80):
        newest = story.job.checkpoints[0].name
        story.begin(newest if number % 3 else None).save(number * 10, number * 10 + 1, number * 10 + 2)
        open_ = frozenset({story.number, story.number - 1})
        story.job = replace(story.job, checkpoints=kept(story.job, open_))
        longest = max(longest, len(story.job.checkpoints))
    assert longest <= 16


def test_many_checkpoints_of_one_attempt_are_bounded_before_they_are_trimmed() -> None:
    item = a_job(*row(1, 1))
    assert len(with_fresh(item, 2, row(2, *range(2, 500)))) == REMEMBERED + 1


def test_many_that_go_at_once_are_told_in_one_line() -> None:
    base = world_with(AttemptState.RUNNING)
    item = a_job(*row(1, *range(60, 0, -1)), attempts_made=1, state=JobState.RUNNING)
    plan = trim(replace(base, jobs={item.id: item}), [], NOW)
    (line,) = plan.events
    assert (line.kind, line.data["count"]) == ("checkpoint.dropped", 57)


@every("errors", [pytest.param(1, id="at its last try"), pytest.param(0, id="with tries left")])
def test_what_a_grant_offered_stays_in_reach_when_tries_are_added_or_used_up(errors: int) -> None:
    """A grant at the job's last try offers the older generation first; one with tries left the newer one."""
    written = a_job(*row(2, 9, 8, 7, doubted_by=(3,)), *row(1, 3, 2, 1), keep=1, errors=1)
    written = replace(written, errors=errors)
    offer_then = offered(written)
    assert names(offer_then) == (["c3", "c2", "c9"] if errors else ["c9", "c8", "c3"])
    later = replace(written, errors=1 - errors, checkpoints=(*row(5, 20, 19, 18), *written.checkpoints))
    assert set(offer_then) <= in_reach(later, {4}), "the machine of attempt 4 is not gone yet"
    assert set(offer_then) <= set(kept(later, {4}))
    assert not in_reach(later, ())


def test_what_a_grant_offers_now_is_in_reach_of_an_older_machine_that_is_not_gone() -> None:
    item = a_job(*row(4, 20, 19, 18), *row(2, 9, 8, 7), *row(1, 3, 2, 1), keep=1)
    assert names(offered(item)) == ["c20", "c19", "c9"]
    assert sorted(names(in_reach(item, {2}))) == ["c1", "c18", "c19", "c2", "c20", "c3", "c9"]
