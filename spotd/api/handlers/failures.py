"""Why a job failed: its reason, what its exit code usually means, the last lines of its output, the next step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Final

from spotd.api.errors import ApiUnavailable, NotFound
from spotd.api.handlers.context import ContextHandlers, HandlerContext
from spotd.api.schemas.jobs import FailureResponse, JobResponse
from spotd.core.domain.ids import AttemptId, JobId
from spotd.core.domain.states import JobState
from spotd.core.machines.exit_words import explain_exit
from spotd.daemon.hosts.last_lines import last_lines
from spotd.store import JobView

LISTED_MAX: Final = 5
"""Of so many failed jobs a list shows the output."""
_KNOWN_MAX: Final = 256


def failure_response(view: JobView, output: Sequence[str] = ()) -> FailureResponse | None:
    """Return why a job failed; `None` for one that did not."""
    if view.state is not JobState.FAILED:
        return None
    return _response(view.reason, view.attempts_made, view.exit_code, output, view.name)


def _response(reason: str, attempt: int, exit_code: int | None, output: Sequence[str], name: str) -> FailureResponse:
    known = explain_exit(exit_code, output, name)
    return FailureResponse(
        attempt=attempt,
        reason=reason,
        exit_code=exit_code,
        meaning=known.meaning,
        output=list(output),
        next_step=known.step,
    )


class FailureHandlers(ContextHandlers):
    """Adds the last lines of output, which are in the object store, to the answers about failed jobs."""

    def __init__(self, context: HandlerContext) -> None:
        super().__init__(context)
        self._known: OrderedDict[AttemptId, list[str]] = OrderedDict()

    async def complete(self, jobs: Sequence[JobResponse]) -> None:
        """Add the output to the newest failed ones of these."""
        failed = [job for job in jobs if job["failure"] is not None]
        for job in failed[:LISTED_MAX]:
            failure = job["failure"]
            if failure is not None and failure["attempt"]:
                output = await self.output_of(AttemptId(job=JobId(job["id"]), number=failure["attempt"]))
                job["failure"] = _response(
                    failure["reason"], failure["attempt"], failure["exit_code"], output, job["name"]
                )

    async def output_of(self, attempt: AttemptId) -> list[str]:
        """Return the last lines that an ended attempt wrote; none where they cannot be read now."""
        if (known := self._known.get(attempt)) is not None:
            return known
        context = self._context
        try:
            lines = await context.stored(partial(last_lines, context.objects, attempt))
        except (ApiUnavailable, NotFound):
            return []
        if lines:
            self._known[attempt] = lines
            if len(self._known) > _KNOWN_MAX:
                self._known.popitem(last=False)
        return lines
