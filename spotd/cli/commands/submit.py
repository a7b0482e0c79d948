"""`submit`: the plan, the question, the code, the job."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from spotd import words
from spotd.cli import stderr, stdout
from spotd.cli.commands.jobs import job_or_array, show_changed
from spotd.cli.commands.logs import TextPrinter, follow_to_end
from spotd.cli.entry import CommandFailed, ExitCode
from spotd.cli.inputs.draft import WrittenJob, collect, nested, read_draft
from spotd.cli.inputs.options import ID, JSON, TABLE, complete_file, job_argument, output, require_yes, show_data
from spotd.cli.transfers import measure_folders, store_folders
from spotd.cli.views.table import Column, per_gpu_cell
from spotd.cli.views.table import text as table_text
from spotd.client.daemon import Daemon
from spotd.client.transport import DaemonRefused, DaemonUnreachable, Json
from spotd_jobs.spec.keys import FLAGS, KEYS
from spotd_jobs.spec.parse import parse_array
from spotd_jobs.spec.problems import BadValue

if TYPE_CHECKING:
    from spotd.api.schemas.answers import LogResponse, PlannedDataResponse, PlanResponse, ResumeSourceResponse
    from spotd.api.schemas.costs import QuoteResponse
    from spotd.api.schemas.jobs import ForgottenResponse, JobResponse
    from spotd_jobs.pack import Packed


# The plan of a job, as a person reads it before money is spent.


_COLUMNS: Sequence[Column[QuoteResponse]] = (
    Column("WHERE", words.where_text, least=8),
    Column("GPU", words.gpu_text, least=6),
    Column("MARKET", lambda quote: quote["market"], least=4, drop=3),
    Column("GPU$/H", lambda quote: words.price(quote["breakdown"]["gpu_usd_h"]), right=True, drop=4),
    Column("+DISK", lambda quote: words.price(quote["breakdown"]["storage_usd_h"]), right=True, drop=6),
    Column("+FEE", lambda quote: words.price(quote["breakdown"]["fee_usd_h"]), right=True, drop=7),
    Column("+TRAFFIC", lambda quote: words.price(_traffic_usd_h(quote)), right=True, drop=8),
    Column("=$/H", lambda quote: words.price(quote["breakdown"]["total_usd_h"]), right=True, drop=2),
    Column("$/GPU-H", per_gpu_cell, right=True),
    Column("BID", lambda quote: words.price(quote["bid_usd_gpu_h"]), right=True, drop=9),
    Column("CEILING", lambda quote: words.price(quote["ceiling_usd_gpu_h"]), right=True, drop=1),
    Column("VERDICT", words.verdict_text, least=8),
)


def plan_text(plan: PlanResponse, *, drawn_for: int | None, colour: bool) -> str:
    """Return the whole plan, ending in its verdict."""
    ceilings = ", ".join(f"{gpu} ${words.price(usd)}" for gpu, usd in plan["ceilings"].items())
    facts = [
        ("image", plan["image"]),
        ("code", plan["workdir"] or "none: nothing of this folder travels (--workdir . packs it)"),
        ("ceiling", f"{ceilings} per GPU-hour" if ceilings else "none set"),
        ("budget", "" if plan["budget_usd"] is None else f"{words.dollars(plan['budget_usd'])} for the whole job"),
        ("secrets", ", ".join(plan["secrets"])),
        *(("data", _data_text(one)) for one in plan.get("data", [])),
        ("", plan.get("data_cost", "")),
        ("resume", _origin_text(plan["resume_from"])),
    ]
    lines = [f"{words.clean(plan['name'])}: {words.clean(plan['run'])}"]
    lines += [f"  {key:<8}{words.clean(value)}" for key, value in facts if value]
    text = _fit(lines, drawn_for, 10) + "\n"
    if plan["candidates"]:
        text += table_text(_COLUMNS, plan["candidates"], drawn_for=drawn_for, colour=colour) + "\n"
    tail = [f"{words.count(row['offers'], 'offer')} passed over: {row['reason']}" for row in plan["passed_over"]]
    tail += [f"cost: {sentence}" for sentence in plan.get("costs", [])]
    tail += words.silence_texts(plan)
    tail += [f"warning: {sentence}" for sentence in plan["warnings"]]
    tail.append(f"verdict: {plan['verdict']}")
    return text + _fit(map(words.clean, tail), drawn_for, 2)


def _fit(lines: Iterable[str], room: int | None, indent: int) -> str:
    return "".join(f"{line if room is None else words.folded(line, room, indent)}\n" for line in lines)


def _origin_text(origin: ResumeSourceResponse | None) -> str:
    return (
        "" if origin is None else f"from {origin['name']} ({words.size_text(origin['bytes'])}) of job {origin['job']}"
    )


def _data_text(one: PlannedDataResponse) -> str:
    commit = f", commit {one['revision'][:12]}" if one.get("revision") else ""
    size, files = words.size_text(one["bytes"]), words.count(one["files"], "file")
    return f"{one['source']}: {size}, {files}, at {one['path']}{commit}"


def _traffic_usd_h(quote: QuoteResponse) -> float:
    return quote["breakdown"]["upload_usd_h"] + quote["breakdown"]["restore_usd_h"]


CODE_BYTES_MAX: Final = 500_000_000
"""Code, not data: more than this in a workdir is a forgotten .gitignore."""
UNPROTECTED_HINT: Final = (
    'let it save to $SPOTD_CHECKPOINT_DIR and state [checkpoint] every = "15m", or give --market on-demand,'
    " or --i-know to submit it all the same"
)
_COMMAND_KEY: Final = "spotd.command"
F = TypeVar("F", bound=Callable[..., Any])


class _WithCommand(click.Command):
    """A command that keeps what stands behind the first `--`, so that job file and command can be distinguished."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            place = args.index("--")
            command = args[place + 1 :]
            args = args[:place]
            if not command:
                raise click.UsageError("there is no command behind --", ctx)
            ctx.meta[_COMMAND_KEY] = command
        return super().parse_args(ctx, args)


def _job_options(function: F) -> F:
    """Add the flags that stand for keys of a job file; the parameter's name is the key with `__` for its dot."""
    for key in reversed([key for key in KEYS if key.metavar]):
        name = key.path.replace(".", "__")
        function = click.option(
            key.flag, name, type=key.type, multiple=key.repeated, metavar=key.metavar, help=key.help
        )(function)
    return function


@click.command(cls=_WithCommand)
@click.argument("file", metavar="[JOB.toml] [-- COMMAND...]", required=False, shell_complete=complete_file)
@_job_options
@click.option("-e", "--env", "env", multiple=True, metavar="NAME=VALUE", help="Variable of the job; may be repeated.")
@click.option("--secret", "secret", multiple=True, metavar="NAME", help="Secret, read from this environment.")
@click.option("--secret-file", type=click.Path(path_type=Path), metavar="FILE", help="Secrets as NAME=value lines.")
@click.option(
    "--include", multiple=True, metavar="PATH", help="Send this file of the workdir although it may be a key."
)
@click.option("--resume-from", default="", metavar="JOB[:CHECKPOINT]", help="Begin from another job's checkpoint.")
@click.option("--preempt", is_flag=True, help="Stop jobs of lower priority, saved, where it could start at once.")
@click.option("--no-reuse", is_flag=True, help="Take over no machine of a job that is done, and leave none to others.")
@click.option("--array", default="", metavar="INDEXES", help="One job for each index, say 0-15 or 0-99%4.")
@click.option("--i-know", is_flag=True, help="Submit a spot job that saves nothing and outlasts a machine.")
@click.option("--dry-run", is_flag=True, help="Stop after the plan and a check of what would be packed.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--no-wait-price", is_flag=True, help="Exit 3 instead of queueing if nothing is under the ceiling now.")
@click.option("--wait", is_flag=True, help="Show the job's output and exit 1 if it fails.")
@click.option("-d", "--detach", is_flag=True, help="Print the id only.")
@output(TABLE, JSON, ID)
@click.pass_context
def submit(ctx: click.Context, /, *, file: str | None, output: str, **given: Any) -> int:
    """Queue a job: from a file, from flags, or from both, where flags win.

    \b
    spotctl submit train.toml
    spotctl submit task.yaml --image IMAGE        (a task of SkyPilot or dstack)
    spotctl submit train.toml --max-price 1.80 -- python train.py --lr 3e-4
    spotctl submit --gpu H100 --max-price 2.40 --image IMAGE --workdir . -- python train.py
    """
    if given["wait"] and given["array"]:
        raise click.UsageError("--wait follows one job, and --array makes many", ctx)
    if given["wait"] and given["detach"]:
        raise click.UsageError("--wait and --detach exclude each other", ctx)
    draft = read_draft(file, _flags(ctx, given))
    draft = _with_secrets(draft, given["secret"])
    spec = draft.check()
    array = _checked_array(given["array"])
    secrets: Mapping[str, str] = {}
    if not given["dry_run"]:
        secrets = collect(spec.secrets, file=given["secret_file"], environ=os.environ)
    if spec.workdir is not None:
        _require_workdir(Path(spec.workdir), given["include"])
    draft = replace(draft, folders=measure_folders(spec))
    daemon = Daemon()
    resume_from: str = given["resume_from"]
    answer = _ask_daemon(draft, lambda: daemon.plan(draft.as_json(), resume_from=resume_from, array=array))
    plan: PlanResponse = answer["plan"]
    if given["include"] and plan["workdir"] is None:
        raise CommandFailed(
            "--include names files of the workdir, and this job has none",
            hint="give --workdir ., or leave --include out",
        )
    _show_plan(plan, answer, output, dry_run=given["dry_run"], quiet=given["detach"])
    if given["no_wait_price"] and not plan["fits"]:
        raise CommandFailed(
            f"nothing is under the ceiling now{_lowest(plan)}",
            code=ExitCode.NOTHING_UNDER_CEILING,
            hint="raise --max-price, or leave --no-wait-price out and let the job wait",
        )
    if plan.get("unprotected") and not given["i_know"]:
        raise CommandFailed(plan["unprotected"], hint=UNPROTECTED_HINT)
    if given["dry_run"]:
        if plan["workdir"] is not None:
            _pack_workdir(Path(plan["workdir"]), given["include"])
        return ExitCode.OK
    if not given["yes"] and stderr.can_ask():
        require_yes("submit this job?", otherwise="nothing was submitted")
    draft = replace(draft, folders=store_folders(daemon, draft.folders))
    code = None if plan["workdir"] is None else _upload(daemon, Path(plan["workdir"]), given["include"])
    job = _submit(daemon, draft, code, secrets, resume_from, array, i_know=given["i_know"])
    return _after(daemon, job, output, wait=given["wait"], detach=given["detach"])


def _checked_array(text: str) -> str:
    """Return the indexes of an array as they were given.

    Raises:
        CommandFailed: they are none, or too many.
    """
    if text:
        try:
            count_text = words.count(len(parse_array(text).indexes), "job")
        except BadValue as exc:
            raise CommandFailed("the job was refused", rows=[(f"--array: {exc}", exc.hint)]) from exc
        stderr.note(f"an array of {count_text}; each sees its index as SPOTD_ARRAY_INDEX")
    return text


def _flags(ctx: click.Context, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags in the shape of a job file."""
    values = {name.replace("__", "."): value for name, value in given.items() if name in _KEYS}
    values["resources.gpu"] = [part for text in given["resources__gpu"] for part in text.split(",")] or None
    if given["workdir"] is not None:
        values["workdir"] = str(Path(given["workdir"]).expanduser().absolute())
    values["schedule.preempt"] = True if given["preempt"] else None
    values["reuse"] = False if given["no_reuse"] else None
    values["env"] = dict(_variable(ctx, text) for text in given["env"])
    values["run"] = ctx.meta.get(_COMMAND_KEY)
    return nested(values)


def _variable(ctx: click.Context, text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise click.UsageError(f"--env {text!r} is not of the form NAME=VALUE", ctx)
    return name, value


def _with_secrets(draft: WrittenJob, names: tuple[str, ...]) -> WrittenJob:
    """Return the draft with these secrets beside those of its file."""
    if not names:
        return draft
    filed = draft.data.get("secrets", [])
    known = [name for name in filed if isinstance(name, str)] if isinstance(filed, list) else []
    flags = {**draft.flags, "secrets": list(dict.fromkeys([*known, *names]))}
    return replace(draft, flags=flags)


def _ask_daemon(draft: WrittenJob, call: Callable[[], Json]) -> Json:
    """Return the daemon's answer; what it finds wrong in the job is shown at its place in the draft."""
    try:
        return call()
    except DaemonRefused as exc:
        if exc.code == "invalid" and exc.problems:
            raise draft.refusal(exc.problems, message=exc.message) from exc
        raise


def _show_plan(plan: PlanResponse, answer: Mapping[str, Any], output: str, *, dry_run: bool, quiet: bool) -> None:
    """Show the plan: as data when it is all that was asked for, else as something to read before the answer."""
    if dry_run and output == JSON:
        stdout.document(answer)
    elif dry_run:
        width = stdout.width() if stdout.is_terminal() else None
        stdout.write(plan_text(plan, drawn_for=width, colour=stdout.colour()))
    elif not quiet:
        width = stderr.width() if stderr.is_terminal() else None
        stderr.block(plan_text(plan, drawn_for=width, colour=stderr.colour()))


def _lowest(plan: PlanResponse) -> str:
    prices = [quote["effective_usd_gpu_h"] for quote in plan["candidates"]]
    return f": the lowest is ${words.price(min(prices))} per GPU-hour" if prices else f": {plan['verdict']}"


def _require_workdir(workdir: Path, include: tuple[str, ...]) -> None:
    """Refuse a workdir that cannot be packed, before the plan is made and read.

    Raises:
        CommandFailed: it is no folder, too large, or holds what must not be sent.
    """
    from spotd_jobs.pack import PackError, require_packable

    try:
        require_packable(workdir, bytes_max=CODE_BYTES_MAX, include=include)
    except PackError as exc:
        raise CommandFailed(str(exc), hint=exc.hint) from exc


def _pack_workdir(workdir: Path, include: tuple[str, ...]) -> Packed:
    """Pack the workdir as it would be sent.

    Raises:
        CommandFailed: it cannot be packed, or holds what must not be sent.
    """
    from spotd_jobs.pack import PackError, pack

    if stderr.is_terminal():
        stderr.note(f"packing {workdir}")
    try:
        packed = pack(workdir, bytes_max=CODE_BYTES_MAX, include=include)
    except PackError as exc:
        raise CommandFailed(str(exc), hint=exc.hint) from exc
    if packed.skipped:
        stderr.note(f"not packed, since they are no files: {', '.join(packed.skipped[:5])}")
    return packed


def _upload(daemon: Daemon, workdir: Path, include: tuple[str, ...]) -> str:
    """Upload the packed workdir; return the hash under which the store holds it."""
    packed = _pack_workdir(workdir, include)
    if daemon.has_code(packed.sha256):
        return packed.sha256
    with stderr.ProgressLine("upload", packed.size) as progress:
        daemon.put_code(packed.sha256, _Watched(packed.data, progress), packed.size)
    stderr.note(f"packed {words.count(packed.file_count, 'file')}, {words.size_text(packed.size)}")
    return packed.sha256


class _Watched(io.BytesIO):
    """A stream that reports how far it was read."""

    def __init__(self, data: bytes, progress: stderr.ProgressLine) -> None:
        super().__init__(data)
        self._progress = progress

    def read(self, size: int | None = -1, /) -> bytes:
        chunk = super().read(size)
        self._progress.add(len(chunk))
        return chunk


def _submit(
    daemon: Daemon,
    draft: WrittenJob,
    code: str | None,
    secrets: Mapping[str, str],
    resume_from: str,
    array: str,
    *,
    i_know: bool,
) -> JobResponse:
    def call() -> Json:
        return daemon.submit(
            draft.as_json(),
            code_sha256=code,
            secrets=secrets,
            resume_from=resume_from,
            array=array,
            i_know=i_know,
        )

    try:
        answer = _ask_daemon(draft, call)
    except DaemonUnreachable as exc:
        raise DaemonUnreachable(exc.message, hint="the job may or may not be queued; see spotctl ls") from exc
    job: JobResponse = answer["job"]
    return job


def _after(daemon: Daemon, job: JobResponse, output: str, *, wait: bool, detach: bool) -> int:
    """Print the id and, where that was asked for, wait for the job."""
    task = job["array"]
    name = job["id"] if task is None else task["id"]
    if output == JSON and not wait:
        stdout.document(daemon.job(job["id"]))
    elif output != JSON:
        stdout.line(name)
    if not wait:
        if output == TABLE and not detach:
            for command in ("why", "logs -f", "cancel") if task is None else ("ls --array", "cost", "cancel"):
                stderr.line(f"  spotctl {command} {name}")
        return ExitCode.OK
    printer = TextPrinter(raw=False) if output == TABLE else _Quiet(raw=False)
    code = follow_to_end(daemon, job["id"], {}, printer)
    if output == JSON:
        stdout.document(daemon.job(job["id"]))
    return code


class _Quiet(TextPrinter):
    """Waits without a word."""

    def show(self, record: LogResponse) -> None:
        """Ignore the record."""


_KEYS: Final = frozenset(key.replace(".", "__") for key in FLAGS)
"""Parameters that stand for keys of a job file."""


# `spotctl budget`, `ceiling` and `forget`: what owners change about jobs and machines that exist.


# An amount below zero is no option: the daemon says what an amount is.
@click.command(context_settings={"ignore_unknown_options": True})
@job_argument
@click.argument("amount", metavar="+USD|=USD")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@output(TABLE, JSON, ID)
def budget(*, ref: str, amount: str, yes: bool, output: str) -> None:
    """Change what a job may cost in all: `+20` adds dollars, `=140` or `140` sets them. It may have expired already."""
    daemon = Daemon()
    if not yes and stderr.can_ask():
        detail = daemon.job(ref)
        job: JobResponse = detail["job"]
        limit: float | None = detail["budget_usd"]
        before = "no limit" if limit is None else words.dollars(limit)
        change = (
            f"by {words.clean(amount)}" if amount.startswith("+") else f"to ${words.clean(amount.removeprefix('='))}"
        )
        question = f"change the budget of {words.clean(job['name'])} from {before} {change}"
        require_yes(f"{question} ({words.dollars(job['spent_usd'])} is spent)?", otherwise="nothing was changed")
        ref = job["id"]
    answer = daemon.set_budget(ref, amount)
    changed = answer["job"]

    def about() -> str:
        usd = daemon.job(changed["id"])["budget_usd"]
        return f"may cost {words.dollars(usd)} in all, {words.dollars(changed['spent_usd'])} of it is spent; it "

    show_changed(answer, output, about)
    if changed["state"] == "EXPIRED":
        stderr.note(f"spotctl retry {changed['id']} queues it again with this budget")


@click.command()
@job_argument
@click.argument("limit", metavar="USD")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@output(TABLE, JSON, ID)
def ceiling(*, ref: str, limit: str, yes: bool, output: str) -> None:
    """Change the ceiling of a job, or of each job of an array: 2.40 per GPU-hour, 19.20/h for the machine.

    `config` takes the ceiling of the config again. A running machine that costs more is given up in order.
    """
    daemon = Daemon()
    if not yes and stderr.can_ask():
        detail, jobs = job_or_array(daemon, ref)
        usd = None if detail is None else detail["ceiling_usd_gpu_h"]
        name = f"{words.count(len(jobs), 'job')} of {ref}" if detail is None else detail["job"]["name"]
        before = "" if usd is None else f" from ${words.price(usd)} per GPU-hour"
        require_yes(words.clean(f"change the ceiling of {name}{before} to {limit}?"), otherwise="nothing was changed")
        ref = ref if detail is None else detail["job"]["id"]
    answer = daemon.set_ceiling(ref, limit)

    def about() -> str:
        usd = daemon.job(answer["job"]["id"])["ceiling_usd_gpu_h"]
        return "has no ceiling; it " if usd is None else f"accepts up to ${words.price(usd)} per GPU-hour; it "

    show_changed(answer, output, about)


@click.command()
@click.argument("machine", metavar="MACHINE")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@output(TABLE, JSON, ID)
def forget(*, machine: str, yes: bool, output: str) -> None:
    """Give up a machine that can neither be seen nor ended: its account is dead, or it is listed no more.

    MACHINE is its id at the provider, its key, or JOB-NUMBER. Nothing more is booked for it, and its slot is free.
    """
    if not yes:
        if not stderr.can_ask():
            raise CommandFailed(
                "a machine is given up only with a confirmation", hint=f"spotctl forget {machine} --yes"
            )
        stderr.note("spotd does not end this machine: if it still exists, its provider goes on to bill it unseen")
        stderr.note("end it in the provider's own console first; spotd ends it if it is ever listed again")
        require_yes(f"give up {words.clean(machine)}?", otherwise="nothing was changed")
    answer = Daemon().forget(machine)
    gone: ForgottenResponse = answer["forgotten"]
    name = gone["machine"] or gone["key"]
    if not show_data(answer, output, [name]):
        owner = "" if gone["job"] is None else f", attempt {gone['attempt']} of job {gone['job']}"
        stdout.line(words.clean(f"{name} at {gone['provider']}{owner} is given up"))
