"""`ls`, `show`, `why`, `cancel` and `retry`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spotd import words
from spotd.cli import stderr, stdout
from spotd.cli.inputs import options
from spotd.cli.views.table import Cell, Column, state_cell
from spotd.cli.views.table import show as show_table
from spotd.client.daemon import Daemon
from spotd.client.transport import DaemonRefused

if TYPE_CHECKING:
    from spotd.api.schemas import jobs as schemas
    from spotd.api.schemas.answers import WhyResponse
    from spotd.api.schemas.costs import PollResponse, QuoteResponse

WARNINGS_MAX = 5
FAILURES_MAX = 3
WAITING = frozenset({"QUEUED", "WAITING_PRICE", "RECOVERING"})
"""States in which a job can wait for a lower price."""
DAY_S = 86_400


def ls_columns(now: str) -> Sequence[Column[schemas.JobResponse]]:
    return (
        Column("ID", lambda job: job["id"]),
        Column("NAME", lambda job: job["name"], least=8),
        Column("STATE", lambda job: _state_cell(job, now), least=10),
        Column("GPU", words.gpu_text, least=5, drop=3),
        Column("WHERE", words.where_text, least=5, drop=2),
        Column("$/H", lambda job: _rate_text(job["effective_usd_h"]), right=True),
        Column("SPENT", words.spent_text, right=True, drop=1),
        Column("SAVED", words.saved_text, right=True, drop=5),
        Column("PREEMPT", lambda job: str(job["recoveries"]), right=True, drop=6),
        Column("CKPT", _checkpoint_text, least=5, drop=4),
        Column("AGE", lambda job: words.short_span(words.seconds_between(job["submitted_at"], now) or 0), right=True),
    )


def _attempt_columns(now: str) -> Sequence[Column[schemas.AttemptResponse]]:
    return (
        Column("TRY", lambda attempt: str(attempt["attempt"]), right=True),
        Column("WHERE", words.where_text, least=10),
        Column("GPU", words.gpu_text, least=6, drop=3),
        Column("$/H", lambda attempt: words.price(attempt["effective_usd_h"]), right=True),
        Column("SPENT", words.spent_text, right=True, drop=2),
        Column("STARTED", lambda attempt: words.local_text(_began(attempt)), drop=5),
        Column(
            "RAN",
            lambda attempt: words.run_span(_began(attempt), attempt["ended_at"] or now),
            right=True,
            drop=1,
        ),
        Column("RESUMED FROM", lambda attempt: attempt["resumed_from"] or words.NOTHING, least=8, drop=4),
        Column("END", lambda attempt: attempt["detail"] or attempt["reason"] or attempt["state"], least=8),
    )


def _state_cell(job: schemas.JobResponse, now: str) -> Cell:
    """Return the state, and what its machine is busy with while the command does not run."""
    if job["array"] is not None:
        from spotd.lists import states_of

        if len(states := states_of(job)) > 1:
            return Cell(", ".join(f"{many} {name}" for name, many in states.items()), state_cell(job["state"]).style)
    stage = job.get("stage")
    known = state_cell(job["state"])
    return known if stage is None else Cell(f"{known.text} {words.stage_word(stage, now)}", known.style)


def _rate_text(usd_h: float | None) -> str:
    return words.money(usd_h) if (usd_h or 0) >= 1 else words.price(usd_h)


def _began(attempt: schemas.AttemptResponse) -> str:
    return attempt["launched_at"] or attempt["intended_at"]


@click.command()
@click.option("--active", is_flag=True, help="Only jobs that have not ended.")
@click.option("--state", "states", multiple=True, metavar="STATE", help="Only jobs in this state; may be repeated.")
@options.shown_option(
    "-n", "--limit", type=click.IntRange(1, 1_000_000), default=1000, help="At most so many ended jobs."
)
@click.option("--array", default="", metavar="ARRAY", help="The jobs of this array, each on a line of its own.")
@click.option("--watch", "is_watched", is_flag=True, help="Draw it anew as it changes; q ends it.")
@options.output(options.TABLE, options.JSON, options.ID)
def ls(*, active: bool, states: tuple[str, ...], limit: int, array: str, is_watched: bool, output: str) -> None:
    """List jobs, newest first; the jobs of an array are one line.

    With --watch a terminal shows what fits on it until q or Ctrl-C. Elsewhere the list is printed anew each time that
    a job has another state, machine or checkpoint.
    """
    query: dict[str, Any] = {"limit": limit, "active": int(active), "state": [state.upper() for state in states]}
    if array:
        query["array"] = array
    if is_watched:
        from spotd.cli.watching import watch_jobs

        watch_jobs(Daemon(), query, output, ls_columns)
        return
    if output == options.JSON:
        stdout.document_bytes(Daemon().jobs_bytes(query))
        return
    answer = Daemon().jobs(query)
    jobs: list[schemas.JobResponse] = answer["jobs"]
    if options.show_data(answer, output, [job["id"] for job in jobs]):
        return
    if paused := answer.get("paused", ""):
        stderr.warning(f"nothing is launched now: {paused}")
    if not jobs:
        stderr.note("no job matches" if active or states else "no jobs; queue one with spotctl submit")
        return
    lines = jobs
    if not array and any(job["array"] is not None for job in jobs):
        from spotd.lists import with_arrays_as_one

        lines = with_arrays_as_one(jobs, answer.get("arrays", ()))
    show_table(ls_columns(answer["now"]), lines)
    for job in [job for job in jobs if has_failed_lately(job, answer["now"])][:FAILURES_MAX]:
        show_failure(job)
    for job, words in [(job, words) for job in jobs if (words := warning_of(job))][:WARNINGS_MAX]:
        stderr.warning(f"{job['name']} ({job['id']}): {words}")
    if answer["more"]:
        stderr.note(f"only the newest ended jobs are read, {limit} of them; spotctl ls --limit {limit * 10} shows more")


def has_failed_lately(job: schemas.JobResponse, now: str) -> bool:
    """Whether it failed within a day."""
    passed = words.seconds_between(job["ended_at"], now)
    return job["failure"] is not None and passed is not None and passed < DAY_S


def show_failure(job: schemas.JobResponse) -> None:
    """Print why a job failed, the last line of its output and the next step, beside the data."""
    failure = job["failure"]
    if failure is not None:
        first, *others, step = words.failure_lines(failure)
        stderr.warning(f"{job['name']} ({job['id']}) failed: {first}")
        for line in (*others[-1:], step):
            stderr.note(line)


def warning_of(job: schemas.JobResponse) -> str:
    """Return what is wrong with a job: its checkpoints are late, or, behind how it ended, what it could not store."""
    if late := job.get("checkpoint_late", ""):
        return late
    return job["reason"].partition("; ")[2] if job["state"] == "SUCCEEDED" else ""


def _gpu_use_text(gpu: schemas.GpuResponse, now: str) -> str:
    """Return what one GPU does, as far as its driver states it, and how old that is."""
    parts = [gpu["name"]]
    if gpu["util_pct"] is not None:
        parts.append(f"{gpu['util_pct']:.0f} % busy")
    if gpu["mem_used_mb"] is not None and gpu["mem_total_mb"] is not None:
        # What `nvidia-smi` calls MB are 1,048,576 bytes.
        parts.append(f"{gpu['mem_used_mb'] / 1024:.1f} of {gpu['mem_total_mb'] / 1024:.1f} GiB")
    if gpu["power_w"] is not None:
        parts.append(f"{gpu['power_w']:.0f} W")
    if gpu["temp_c"] is not None:
        parts.append(f"{gpu['temp_c']:.0f} C")
    return ", ".join([*parts, f"{words.short_span(words.seconds_between(gpu['at'], now) or 0)} ago"])


def _checkpoint_text(job: schemas.JobResponse) -> str:
    """Return the step of the newest checkpoint, or its name where no step is known, and what is on its way now."""
    newest, moving = job["checkpoint"], job["transfer"]
    text = words.NOTHING if newest is None else newest["name"] if newest["step"] is None else str(newest["step"])
    if job.get("checkpoint_late", ""):
        text += " late"
    return text if moving is None else f"{text} {_moving_text(moving)}"


def _moving_text(moving: schemas.TransferResponse) -> str:
    """Return a transfer for a narrow column: `up 30% 80 MB/s 35s`."""
    parts = ["up" if moving["kind"] == "upload" else "down", f"{_percent(moving)}%"]
    if moving["failing"]:
        return " ".join([*parts, "failing"])
    if moving["bytes_per_s"] is not None:
        parts.append(f"{words.size_text(moving['bytes_per_s'])}/s")
    if moving["seconds_left"] is not None:
        parts.append(words.short_span(moving["seconds_left"]))
    return " ".join(parts)


def _percent(moving: schemas.TransferResponse) -> int:
    return 100 * moving["bytes_done"] // moving["bytes_total"] if moving["bytes_total"] else 100


def _transfer_text(moving: schemas.TransferResponse | None) -> str:
    """Return a transfer in a sentence, with rate and time left where they are known."""
    if moving is None:
        return ""
    parts = [
        f"{moving['kind']} of {moving['checkpoint']}",
        f"{words.size_text(moving['bytes_done'])} of {words.size_text(moving['bytes_total'])} ({_percent(moving)} %)",
    ]
    if moving["bytes_per_s"] is not None:
        parts.append(f"{words.size_text(moving['bytes_per_s'])}/s")
    if moving["seconds_left"] is not None:
        parts.append(f"{words.span_text(moving['seconds_left'])} left")
    if moving["queued"]:
        parts.append(f"{moving['queued']} more waiting")
    if moving["failing"]:
        parts.append(f"failing: {moving['failing']}")
    return ", ".join(parts)


@click.command()
@options.job_argument
@options.plot_option("Draw its attempts across hosts, with prices, checkpoints and preemptions.")
@options.output(options.TABLE, options.JSON, options.ID)
def show(*, ref: str, plot: Path | None, output: str) -> None:
    """Everything about one job: its state, money, attempts and settings."""
    daemon = Daemon()
    detail = daemon.job(ref)
    if plot is not None:
        from spotd.cli.views.pictures import draw_timeline

        ref = detail["job"]["id"]
        changes = [*daemon.events({"job": ref, "kind": ["bid.raised", "bid.lowered"], "limit": 10_000})]
        draw_timeline(detail, daemon.checkpoints(ref)["checkpoints"], changes, detail["now"], plot)
    if options.show_data(detail, output, [detail["job"]["id"]]):
        return
    for sentence in detail["set_aside"]:
        stderr.warning(sentence)
    if detail["job"]["failure"] is not None:
        for line in words.failure_lines(detail["job"]["failure"]):
            stdout.line(line, indent=2)
        stdout.line("")
    missing = words.missing_text(daemon.why(detail["job"]["id"])["why"]) if detail["job"]["state"] in WAITING else ""
    for key, value in _facts(detail, detail["now"], missing):
        stdout.line(f"{key + ':':<12}{words.clean(value)}", indent=12)
    if detail["job"]["attempts"]:
        stdout.line("")
        show_table(_attempt_columns(detail["now"]), detail["job"]["attempts"])


def _facts(detail: schemas.JobDetailResponse, now: str, missing: str = "") -> list[tuple[str, str]]:
    """Return the facts in reading order; what does not apply is left out."""
    job = detail["job"]
    facts = [
        ("id", job["id"]),
        ("name", job["name"]),
        ("state", f"{job['state']}: {job['reason']}"),
        ("summary", job.get("summary", "")),
        ("verdict", "" if job["verdict"] == job["reason"] else job["verdict"]),
        ("missing", missing),
        ("gpu", words.gpu_text(job)),
        *((f"gpu {gpu['index']}", _gpu_use_text(gpu, now)) for gpu in job["gpus"]),
        ("where", words.where_text(job)),
        ("price", _price_text(job["effective_usd_h"], "per hour for the machine")),
        ("bid", _bid_text(job, now)),
        ("ceiling", "" if detail["ceiling_usd_gpu_h"] is None else f"{words.ceiling_text(detail)} per GPU-hour"),
        ("spent", _spent_text(detail)),
        ("saved", _saved_text(job)),
        ("moves", f"{job['moves']}, to cheaper machines" if job.get("moves") else ""),
        ("preempted", _preempted_text(detail)),
        ("checkpoint", _newest_text(job)),
        ("late", job.get("checkpoint_late", "")),
        ("transfer", _transfer_text(job["transfer"])),
        ("phase", detail["phase"] if (stage := job.get("stage")) is None else words.stage_text(stage, now)),
        ("saving", detail.get("checkpoint_advice", "")),
        ("submitted", words.local_text(job["submitted_at"])),
        ("started", words.local_text(job["started_at"])),
        ("ended", words.local_text(job["ended_at"])),
        ("exit code", "" if job["exit_code"] is None else str(job["exit_code"])),
        ("deadline", _deadline_text(detail)),
        ("priority", str(detail["priority"]) if detail["priority"] else ""),
        ("code", _code_text(detail)),
    ]
    spec = detail["spec"]
    facts += [(key, _value_text(spec[key])) for key in ("image", "run", "setup", "secrets", "outputs") if spec.get(key)]
    return [(key, value) for key, value in facts if value and value != words.NOTHING]


def _price_text(usd: float | None, unit: str) -> str:
    return "" if usd is None else f"${words.price(usd)} {unit}"


def _preempted_text(detail: schemas.JobDetailResponse) -> str:
    times = detail["job"]["recoveries"]
    return f"{words.count(times, 'time')}, {words.span_text(detail['lost_s'])} lost" if times else "0 times"


def _bid_text(job: schemas.JobResponse, now: str) -> str:
    """Return what is bid for the machine that the job has now."""
    bid = next((one.get("bid") for one in job["attempts"] if one["ended_at"] is None), None)
    if bid is None:
        return ""
    parts = [_price_text(bid["usd_h"], "per hour for its GPUs")]
    if bid["changes"]:
        parts.append(words.count(bid["changes"], "change"))
    if bid["floor_usd_h"] is not None:
        parts.append(f"lowest winning bid ${words.price(bid['floor_usd_h'])}")
    if bid["held_since"] is not None:
        parts.append(
            f"outbid for {words.short_span(words.seconds_between(bid['held_since'], now) or 0)}, and waited for"
        )
    return ", ".join(parts)


def _newest_text(job: schemas.JobResponse) -> str:
    newest = job["checkpoint"]
    if newest is None:
        return "none yet"
    size, at = words.size_text(newest["bytes"]), words.local_text(newest["at"])
    return f"{newest['name']}, {size}, {at}, by attempt {newest['attempt']}"


def _deadline_text(detail: schemas.JobDetailResponse) -> str:
    """Return the deadline as the job file has it, and the policy that is to meet it."""
    schedule = detail["spec"].get("schedule", {})
    if not schedule.get("deadline"):
        return ""
    return f"{schedule['deadline']}, by policy {schedule.get('policy') or 'slack-pacing'}"


def _code_text(detail: schemas.JobDetailResponse) -> str:
    sha256 = detail["code_sha256"]
    return "" if sha256 is None else f"{words.size_text(detail['code_bytes'])}, sha256 {sha256[:12]}"


def _spent_text(detail: schemas.JobDetailResponse) -> str:
    spent = words.spent_words(detail["job"])
    return spent if detail["budget_usd"] is None else f"{spent} of {words.dollars(detail['budget_usd'])}"


def _saved_text(job: schemas.JobResponse) -> str:
    """Return what was saved against on-demand; nothing where no on-demand price is known."""
    if job["state"] == "FAILED":
        return ""
    uncompared = job.get("uncompared_usd", 0)
    on_demand = job["on_demand_usd"] - uncompared
    if on_demand <= 0 and (uncompared or not job["spent_usd"]):
        return ""
    return f"{words.dollars(job['saved_usd'])} against {words.dollars(on_demand)} on demand"


def _value_text(value: object) -> str:
    """Return a setting as one line; a command's argv is shown as a shell would take it."""
    if isinstance(value, list):
        from shlex import join

        items = [str(item) for item in value]
        return items[2] if items[:2] == ["/bin/sh", "-c"] and len(items) == 3 else join(items)
    return str(value)


@click.command()
@options.job_argument
@options.output(options.TABLE, options.JSON)
def why(*, ref: str, output: str) -> None:
    """Why a job waits, why it runs where it does, or why it stopped."""
    answer = Daemon().why(ref)
    if options.show_data(answer, output):
        return
    shape: WhyResponse = answer["why"]
    best, ceiling = shape["best"], shape["ceiling_usd_gpu_h"]
    state = "HELD" if shape["kind"] == "held" else shape["state"]
    lines = [words.clean(f"{shape['name']} ({shape['id']}) is {state}: {shape['sentence']}")]
    if shape["failure"] is not None:
        lines = lines if shape["state"] in WAITING else [words.clean(f"{shape['name']} ({shape['id']}) is {state}:")]
        lines += [f"  {line}" for line in words.failure_lines(shape["failure"])]
    lines += [f"  ran there {words.clean(sentence)}" for sentence in shape["placed"]]
    if missing := words.missing_text(shape):
        lines.append(f"  missing   {missing}")
    if (stage := shape.get("stage")) is not None:
        lines.append(f"  machine   {words.clean(words.stage_text(stage, answer['now']))}")
    if ceiling is not None:
        lines.append(f"  ceiling   ${words.price(ceiling)} per GPU-hour")
    if best is not None:
        lines.append(f"  best now  {words.clean(_quote_text(best))}")
    lines += [f"  cost      {words.clean(sentence)}" for sentence in shape.get("costs", [])]
    if shape["passed_over"]:
        lines.append("  passed over:")
        lines += [
            f"    {row['offers']:>5} {'offer' if row['offers'] == 1 else 'offers'}: {words.clean(row['reason'])}"
            for row in shape["passed_over"]
        ]
    if shape["until"] is not None:
        lines.append(f"  decides again by {words.local_text(shape['until'])}")
    lines += [f"  {_last_error(row)}" for row in shape["offers"] if row["error"] or row["note"]]
    if shape["events"]:
        from spotd.lists import steps

        lines.append("  lately:")
        for step in steps(shape["events"]):
            said = ", ".join(part for part in (step.message, step.local_span) if part)
            lines.append(f"    {words.local_text(step.event['at'])}  {said}")
    for line in lines:
        stdout.line(line, indent=12 if line.startswith(" ") else 2)


def _last_error(provider_offers: PollResponse) -> str:
    name, error, note = provider_offers["provider"], provider_offers["error"], provider_offers["note"]
    if not error:
        return words.clean(f"{name}: {note}")
    return words.clean(f"{name} shows no prices: {error}" + (f"; {note}" if note else ""))


def _quote_text(quote: QuoteResponse) -> str:
    where = words.where_text(quote) + (f" ({quote['region']})" if quote["region"] else "")
    floor, bid = quote["floor_usd_gpu_h"], quote["bid_usd_gpu_h"]
    wins = "" if floor is None else f"; lowest winning bid ${words.price(floor)}, ours ${words.price(bid)}"
    rate, gpu = words.price(quote["effective_usd_gpu_h"]), words.gpu_text(quote)
    return f"${rate} per GPU-hour: {gpu} {quote['market']} at {where}{wins}"


@click.command()
@options.job_argument
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@options.output(options.TABLE, options.JSON, options.ID)
def cancel(*, ref: str, yes: bool, output: str) -> None:
    """Stop a job and destroy its machine. Its checkpoints stay, and `spotctl retry` goes on from them."""
    daemon = Daemon()
    if not yes and stderr.can_ask():
        ref, question = cancel_question(daemon, ref)
        if question:
            options.require_yes(question, otherwise="nothing was cancelled")
    show_changed(daemon.cancel(ref), output)


def job_or_array(daemon: Daemon, ref: str) -> tuple[schemas.JobDetailResponse | None, list[schemas.JobResponse]]:
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
        question = f"stop {words.count(len(jobs), 'job')} of {words.clean(ref)}, {machines} of them on a machine?"
        return ref, question if machines else ""
    job = detail["job"]
    on_machine = job["provider"] is not None
    return job["id"], f"stop {words.clean(job['name'])} on {words.clean(words.where_text(job))}?" if on_machine else ""


@click.command()
@options.job_argument
@click.option("--anyway", is_flag=True, help="Also a job that succeeded, for instance without its outputs.")
@options.output(options.TABLE, options.JSON, options.ID)
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
    array: schemas.ArrayResponse | None = answer.get("array")
    if array is not None:
        if not options.show_data(answer, output, [array["id"]]):
            states = ", ".join(f"{many} {state}" for state, many in sorted(array["states"].items()))
            stdout.line(words.clean(f"{array['name']} ({array['id']}), {words.count(array['jobs'], 'job')}: {states}"))
        return
    job = answer["job"]
    if not options.show_data(answer, output, [job["id"]]):
        stdout.line(words.clean(f"{job['name']} ({job['id']}) {about()}is {job['state']}: {job['reason']}"))
