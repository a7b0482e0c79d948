"""What a machine could not store of a job's outputs is told with the job, not only with the machine's events."""

from __future__ import annotations

from typing import Any

import pytest

from spotd.core.domain.states import JobState
from tests.unit.api.handlers.test_handlers import submitted
from tests.unit.daemon.rig import Rig

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("wanted", "stored", "lost", "words"),
    [
        (["out/**"], True, 0, ""),
        (["out/**"], True, 2, "some of its outputs are missing: 2 files could not be stored by the machine"),
        ([], False, 1, "none of its outputs is stored: 1 file could not be stored by the machine"),
        ([], False, 0, ""),
    ],
)
async def test_outputs_that_could_not_be_stored_are_told_in_the_job_s_reason(
    rig: Rig, wanted: list[str], stored: bool, lost: int, words: str
) -> None:
    async with rig.ready():
        draft: dict[str, Any] = {"outputs": wanted} if wanted else {}
        job = await submitted(rig, **draft)
        host = await rig.until_running(job, 1)
        if stored:
            host.outputs("out/a", b"a")
        if lost:
            host.event("outputs_lost", files=lost, reason="out/b: Input/output error")
        host.event(
            "exit", outcome="succeeded", phase="run", exit_code=0, signal=None, oom=None, reason="done",
            outputs_lost=lost,
        )  # fmt: skip
        await rig.until_state(job, JobState.SUCCEEDED)
        outputs = rig.job(job).outputs
        assert outputs is not None
        assert bool(outputs.problem) is bool(lost)
        reason = rig.job(job).reason
        assert reason.endswith(words)
        assert ("could not be stored" in reason) is bool(words)
