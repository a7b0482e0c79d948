"""Deadlines over the API: what is refused at the submission and at a retry."""

from __future__ import annotations

from datetime import timedelta

import pytest

from spotd.api.errors import Invalid, StateConflict
from spotd.api.requests import Submission
from spotd.core.states import JobState
from tests.unit.api.handlers.test_handlers import draft, submitted
from tests.unit.core.builders import NOW
from tests.unit.daemon.rig import Rig

pytestmark = pytest.mark.anyio


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
