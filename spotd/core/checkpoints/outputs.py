"""Which outputs are a job's: those of the attempt that ended well, as they were when its end was read."""

from __future__ import annotations

from dataclasses import replace

from spotd.core.domain.host_status import HostStatus
from spotd.core.domain.ids import AttemptId
from spotd.core.domain.jobs import Outputs
from spotd.core.plans.plan_builder import PlanBuilder


def pin_outputs(builder: PlanBuilder, attempt: AttemptId, report: HostStatus) -> Outputs:
    """Record on the job which manifest its outputs are, and what of them is not there."""
    job = builder.job(attempt.job)
    problem = report.outputs_problem
    if report.outputs_sha256 is None and not job.spec.outputs and not report.outputs_lost:
        problem = ""  # none were asked for
    outputs = Outputs(attempt=attempt.number, sha256=report.outputs_sha256, bytes=report.outputs_bytes, problem=problem)
    builder.put_job(replace(job, outputs=outputs))
    return outputs


def note_outputs(builder: PlanBuilder, attempt: AttemptId, outputs: Outputs) -> None:
    """Say in the job's history, and in its reason, what of the outputs is missing."""
    job = builder.job(attempt.job)
    if outputs.sha256 is not None:
        builder.event(
            "outputs.stored", f"{outputs.bytes} bytes of outputs are stored", attempt=attempt, bytes=outputs.bytes
        )
    if outputs.problem:
        sentence = outputs_warning(outputs)
        builder.event("outputs.missing", sentence, attempt=attempt, problem=outputs.problem)
        builder.put_job(replace(job, reason=f"{job.reason}; {sentence}"))


def outputs_warning(outputs: Outputs | None) -> str:
    """Return what a user has to know about the outputs of a job, empty where all is well."""
    if outputs is None or not outputs.problem:
        return ""
    missing = "some" if outputs.sha256 is not None else "none"
    return f"{missing} of its outputs {'are missing' if missing == 'some' else 'is stored'}: {outputs.problem}"
