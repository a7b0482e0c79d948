"""Which checkpoints of another job a new one begins from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from spotd.api.errors import Invalid, NotFound
from spotd.api.handlers.checkpoints import get_checkpoint
from spotd.api.handlers.context import HandlerContext, get_job
from spotd.api.schemas.plans import ResumeSourceResponse
from spotd.api.timestamps import utc_text
from spotd.core.checkpoints.pins import borrowed
from spotd.core.checkpoints.retention import FALLBACKS
from spotd.core.domain.checkpoints import Checkpoint
from spotd.core.domain.ids import JobId
from spotd.core.domain.jobs import Job
from spotd.core.domain.world import World
from spotd.daemon.checkpoints.contents import checkpoint_manifest
from spotd.store import Reads


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeSource:
    """The job, and what of it was chosen: one checkpoint by name, or the newest with a few older ones to fall back to.

    Attributes:
        checkpoint: the name as the user wrote it, empty for the newest.
    """

    job: JobId
    checkpoint: str

    def checkpoints(self, reads: Reads, world: World) -> tuple[Checkpoint, ...]:
        """Return what the new job's list begins with, as far as it is on the other list in this very transaction.

        Raises:
            NotFound: it is not, or not any more.
        """
        return tuple(borrowed(one) for one in self._chosen(get_job(reads, self.job, world)))

    def _chosen(self, job: Job) -> tuple[Checkpoint, ...]:
        if self.checkpoint:
            return (get_checkpoint(job, self.checkpoint),)
        if not job.checkpoints:
            raise NotFound(f"{job.name} has no checkpoint to resume from", hint=f"spotctl show {job.id}")
        return job.checkpoints[:FALLBACKS]


async def find_resume_source(context: HandlerContext, text: str) -> ResumeSource | None:
    """Return the source that a user means by `JOB` or `JOB:CHECKPOINT`; `None` for an empty text.

    Raises:
        NotFound, Ambiguous: no such job or checkpoint.
        Invalid: the first choice is damaged.
    """
    if not text:
        return None
    ref, _, name = text.partition(":")
    source = ResumeSource(job=await context.find(ref), checkpoint=name)
    world = context.world()
    first = (await context.read(lambda reads: source.checkpoints(reads, world)))[0]
    _, problem = await context.stored(partial(checkpoint_manifest, context.objects, first))
    if problem:
        raise Invalid(
            f"checkpoint {first.name} of {ref} cannot be resumed from: {problem}",
            hint=f"choose another: spotctl checkpoints {source.job}",
        )
    return source


def resume_source_response(source: ResumeSource, first: Checkpoint) -> ResumeSourceResponse:
    """Return the source as a plan shows it."""
    return ResumeSourceResponse(
        job=source.job, name=first.name, step=first.step, bytes=first.bytes, at=utc_text(first.at)
    )
