"""Deadlines over the API: what is refused at the submission and at a retry."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from spotd.api.requests import Submission
from spotd.api.responses import Invalid, StateConflict
from spotd.core.domain.states import JobState
from spotd.core.pricing import age_words
from tests.unit.api.handlers.test_handlers import draft, submitted
from tests.unit.core.builders import NOW
from tests.unit.daemon.rig import Rig

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("ago", "words"),
    [
        (timedelta(hours=47), "47 h 0 min"),
        (timedelta(hours=49), "2 days"),
        (timedelta(days=729), "729 days"),
        (timedelta(hours=60_431), "6.9 years"),
    ],
)
def test_how_long_ago_something_was_is_said_in_a_unit_of_its_size(ago: timedelta, words: str) -> None:
    assert age_words(ago) == words


async def test_a_deadline_that_has_passed_is_refused_before_anything_is_queued(rig: Rig) -> None:
    async with rig.ready():
        request = draft(schedule={"deadline": (NOW - timedelta(hours=3)).isoformat()})
        for call in (
            rig.handlers().submissions.plan(request),
            rig.handlers().submissions.submit(Submission(draft=request)),
        ):
            with pytest.raises(Invalid) as caught:
                await call
            [problem] = caught.value.problems
            assert problem.key == "schedule.deadline"
            assert problem.message.startswith("2026-03-02 09:00 UTC passed 3 h 1 min ago")
            assert "36h" in problem.hint
        assert rig.store.read(lambda reads: reads.jobs()) == ()


async def test_a_job_that_was_due_at_an_instant_is_not_retried_after_it(rig: Rig) -> None:
    async with rig.ready():
        due = (NOW + timedelta(minutes=10)).isoformat()
        job = await submitted(rig, schedule={"deadline": due}, price={"max_price": 0.01})
        await rig.until_state(job, JobState.EXPIRED)
        assert "it was due 2026-03-02 12:10 UTC" in rig.job(job).reason
        with pytest.raises(StateConflict, match="was due 2026-03-02 12:10 UTC") as caught:
            await rig.handlers().jobs.retry(job)
        assert f"--resume-from {job}" in caught.value.hint


async def test_a_job_with_a_span_is_retried_and_has_all_of_it_again(rig: Rig) -> None:
    async with rig.ready():
        job = await submitted(rig, schedule={"deadline": "10m"}, price={"max_price": 0.01})
        await rig.until_state(job, JobState.EXPIRED)
        assert (await rig.handlers().jobs.retry(job))["state"] == "QUEUED"
        before = rig.clock.now()
        await rig.until_state(job, JobState.EXPIRED)
        assert rig.clock.now() - before >= timedelta(minutes=9, seconds=59)


@pytest.mark.parametrize(
    ("changes", "key", "words", "hint"),
    [
        (
            {"schedule": {"deadline": "20h"}, "work": {"time": "24h"}},
            "schedule.deadline",
            "24 h 0 min of work on 1 x RTX_4090, the fastest that fits, take 24 h 3 min with the start, and until then",
            "the earliest deadline that can be met is 2026-03-03 12:0",
        ),
        (
            {"schedule": {"deadline": "9h"}, "work": {"time": "24h"}, "speed": {"RTX_4090": 2.0}},
            "schedule.deadline",
            "12 h 0 min of work on 1 x RTX_4090",
            "2026-03-03 00:0",
        ),
        (
            {"schedule": {"max_duration": "10h"}, "work": {"time": "24h"}},
            "schedule.max_duration",
            "max_duration is 10 h 0 min, and there are 24 h 0 min of work on 1 x RTX_4090",
            "raise it",
        ),
        (
            {
                "schedule": {"deadline": "40h", "windows": ["00:00-08:00"], "timezone": "UTC"},
                "work": {"time": "20h"},
            },
            "schedule.deadline",
            "within its windows",
            "wider windows",
        ),
    ],
)
async def test_what_cannot_be_met_is_refused_with_figures(
    rig: Rig, changes: dict[str, Any], key: str, words: str, hint: str
) -> None:
    async with rig.ready():
        submissions = rig.handlers().submissions
        for call in (submissions.plan(draft(**changes)), submissions.submit(Submission(draft=draft(**changes)))):
            with pytest.raises(Invalid) as caught:
                await call
            [problem] = caught.value.problems
            assert problem.key == key
            assert words in problem.message
            assert hint in problem.hint


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schedule": {"deadline": "9h"}}, "[work] says neither time nor steps"),
        ({"schedule": {"deadline": "9h"}, "work": {"time": "8h"}}, 'its market is not "auto"'),
    ],
)
async def test_a_plan_warns_of_what_weakens_a_deadline(rig: Rig, changes: dict[str, Any], words: str) -> None:
    async with rig.ready():
        assert words in (await rig.handlers().submissions.plan(draft(**changes)))["warnings"][0]


async def test_a_budget_of_zero_is_refused(rig: Rig) -> None:
    async with rig.ready():
        request = draft(budget={"job": 0}, schedule={"deadline": "9h"}, work={"time": "8h"})
        with pytest.raises(Invalid) as caught:
            await rig.handlers().submissions.submit(Submission(draft=request))
        [problem] = caught.value.problems
        assert (problem.key, problem.message) == ("budget.job", "must be above 0")
