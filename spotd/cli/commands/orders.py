"""`cancel` and `retry`: orders about a job or an array."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from spotd.cli import stderr, stdout
from spotd.cli.inputs.options import (
    ID,
    JSON,
    TABLE,
    job_argument,
    output,
    require_yes,
    show_data,
)
from spotd.client.daemon import Daemon
from spotd.client.transport import DaemonRefused
from spotd.words import (
    clean,
    count,
    where_text,
)

if TYPE_CHECKING:
    from spotd.api.schemas.jobs import (
        ArrayResponse,
        JobDetailResponse,
        JobResponse,
    )


@click.command()
@job_argument
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@output(TABLE, JSON, ID)
def cancel(*, ref: str, yes: bool, output: str) -> None:
    """Stop a job and destroy its machine. Its checkpoints stay, and `spotctl retry` goes on from them."""
    daemon = Daemon()
    if not yes and stderr.can_ask():
        ref, question = cancel_question(daemon, ref)
        if question:
            require_yes(question, otherwise="nothing was cancelled")
    show_changed(daemon.cancel(ref), output)


def job_or_array(daemon: Daemon, ref: str) -> tuple[JobDetailResponse | None, list[JobResponse]]:
    """Return the job that is meant, or the jobs of an array that have not ended.

    Raises:
        DaemonRefused: neither is there.
    """
    try:
        return daemon.job(ref), []
    except DaemonRefused as exc:
        if exc.code != "not_found":
            raise
        try:
            return None, daemon.jobs({"array": ref, "active": 1})["jobs"]
        except DaemonRefused:
            raise exc from None


def cancel_question(daemon: Daemon, ref: str) -> tuple[str, str]:
    """Return what is cancelled, by its id, and what to ask before; nothing where no machine stops."""
    detail, jobs = job_or_array(daemon, ref)
    if detail is None:
        machines = sum(job["provider"] is not None for job in jobs)
        question = f"stop {count(len(jobs), 'job')} of {clean(ref)}, {machines} of them on a machine?"
        return ref, question if machines else ""
    job = detail["job"]
    on_machine = job["provider"] is not None
    return job["id"], f"stop {clean(job['name'])} on {clean(where_text(job))}?" if on_machine else ""


@click.command()
@job_argument
@click.option("--anyway", is_flag=True, help="Also a job that succeeded, for instance without its outputs.")
@output(TABLE, JSON, ID)
def retry(*, ref: str, anyway: bool, output: str) -> None:
    """Queue a job again that failed, expired or was cancelled; it resumes from its newest checkpoint."""
    daemon = Daemon()
    answer = daemon.retry(ref, anyway=anyway)
    while (array := answer.get("array")) is not None:
        for refusal in array["refusals"]:
            stderr.warning(refusal)
        if array["next_index"] is None:
            break
        stderr.note(f"queued {array['retried']:,} jobs again, and goes on from index {array['next_index']}")
        answer = daemon.retry(ref, anyway=anyway, start=array["next_index"])
    show_changed(answer, output)


def show_changed(answer: Mapping[str, Any], output: str, about: Callable[[], str] = str) -> None:
    """Print the job or the array that was changed; `about` is said of a job before its state."""
    array: ArrayResponse | None = answer.get("array")
    if array is not None:
        if not show_data(answer, output, [array["id"]]):
            states = ", ".join(f"{many} {state}" for state, many in sorted(array["states"].items()))
            stdout.line(clean(f"{array['name']} ({array['id']}), {count(array['jobs'], 'job')}: {states}"))
        return
    job = answer["job"]
    if not show_data(answer, output, [job["id"]]):
        stdout.line(clean(f"{job['name']} ({job['id']}) {about()}is {job['state']}: {job['reason']}"))
