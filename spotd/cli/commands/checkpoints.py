"""`checkpoints`: what a job resumes from, and what its owner can do with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from spotd.cli import stderr, stdout
from spotd.cli.failures import CommandFailed, ExitCode
from spotd.cli.inputs.options import ID, JSON, TABLE, job_argument, output, require_yes, show_data
from spotd.cli.views.table import Cell, Column
from spotd.cli.views.table import show as show_table
from spotd.client.daemon import Daemon
from spotd.words import NOTHING, clean, count, local_text, size_text

if TYPE_CHECKING:
    from spotd.api.schemas.answers import CheckpointsAnswer
    from spotd.api.schemas.checkpoints import KeptCheckpointResponse, VerificationResponse

ACTIONS: Final = ("list", "verify", "pull", "pin", "unpin", "rm")
_COLUMNS: Sequence[Column[KeptCheckpointResponse]] = (
    Column("NAME", lambda row: row["name"], least=10),
    Column("STEP", lambda row: NOTHING if row["step"] is None else str(row["step"]), right=True),
    Column("SIZE", lambda row: size_text(row["bytes"]), right=True),
    Column("BY", lambda row: str(row["attempt"]) if row["attempt"] else f"job {row['job']}", right=True),
    Column("METRIC", lambda row: NOTHING if row["metric"] is None else f"{row['metric']:.6g}", right=True, drop=1),
    Column("KEPT", lambda row: ", ".join(_reasons_to_keep(row)) or NOTHING, least=4),
    Column("AT", lambda row: local_text(row["at"])),
)
_VERIFIED_COLUMNS: Sequence[Column[VerificationResponse]] = (
    Column("NAME", lambda row: row["name"], least=10),
    Column("BY", lambda row: str(row["attempt"] or NOTHING), right=True),
    Column("READ", lambda row: size_text(row["bytes_done"]), right=True),
    Column("FOUND", lambda row: _finding(row), least=10),
)


def _reasons_to_keep(row: KeptCheckpointResponse) -> list[str]:
    return [word for word, holds in (("pinned", row["pinned"]), ("best", row["best"])) if holds]


@click.command()
@job_argument
@click.argument("action", metavar="[verify|pull|pin|unpin|rm]", type=click.Choice(ACTIONS), default="list")
@click.argument("names", metavar="[CHECKPOINT]...", nargs=-1)
@click.option("--all", "every", is_flag=True, help="With verify: every checkpoint of the list.")
@click.option("--to", "folder", type=click.Path(path_type=Path), metavar="DIR", help="With pull: into this folder.")
@click.option("--force", is_flag=True, help="With pull: replace files that are there with other content.")
@click.option("-y", "--yes", is_flag=True, help="With rm: do not ask.")
@output(TABLE, JSON, ID)
@click.pass_context
def checkpoints(
    ctx: click.Context,
    /,
    *,
    ref: str,
    action: str,
    names: tuple[str, ...],
    every: bool,
    folder: Path | None,
    force: bool,
    yes: bool,
    output: str,
) -> int | None:
    """The complete, verified checkpoints of a job, newest first; it resumes from the first.

    \b
    spotctl checkpoints JOB                    list them
    spotctl checkpoints JOB verify [--all]     read every byte and compare; the newest, unless others are named
    spotctl checkpoints JOB pull [CHECKPOINT]  fetch one into a folder; the newest, unless another is named
    spotctl checkpoints JOB pin CHECKPOINT     keep it, whatever [checkpoint] keep says; unpin undoes it
    spotctl checkpoints JOB rm CHECKPOINT      never resume from it, and delete what only it needs

    CHECKPOINT is a name, NAME@ATTEMPT where attempts share a name, newest or best.
    """
    _refuse_strays(ctx, action, every=every, folder=folder, force=force, yes=yes)
    if action == "list" or (action in {"pin", "unpin", "rm"} and not names):
        if action != "list":
            raise click.UsageError(f"name the checkpoint to {action}", ctx)
        _list(ref, output)
    elif action == "verify":
        return _verify(ref, names, every=every, output=output)
    elif action == "pull":
        from spotd.cli.commands.files import fetch

        if len(names) > 1:
            raise click.UsageError("pull fetches one checkpoint at a time", ctx)
        fetch(ref, names[0] if names else "newest", folder=folder, force=force, output=output)
    elif action == "rm":
        _remove(ref, names, yes=yes, output=output)
    else:
        answer = Daemon().pin_checkpoints(ref, names, pinned=action == "pin")
        _show_changed(answer, output, "pinned" if action == "pin" else "not pinned any more")
    return None


def _refuse_strays(
    ctx: click.Context, action: str, *, every: bool, folder: Path | None, force: bool, yes: bool
) -> None:
    """Refuse options that do not belong to the action: one that would be ignored misleads."""
    for flag, given, belongs in (
        ("--all", every, "verify"),
        ("--to", folder is not None, "pull"),
        ("--force", force, "pull"),
        ("--yes", yes, "rm"),
    ):
        if given and action != belongs:
            raise click.UsageError(f"{flag} goes with {belongs}", ctx)


def _list(ref: str, output: str) -> None:
    answer = Daemon().checkpoints(ref)
    rows: list[KeptCheckpointResponse] = answer["checkpoints"]
    if show_data(answer, output, [row["name"] for row in rows]):
        return
    if rows:
        show_table(_COLUMNS, rows)
    else:
        stderr.note("no checkpoint yet")


def _verify(ref: str, names: Sequence[str], *, every: bool, output: str) -> int:
    """Verify the checkpoints; return the exit code: whether every byte is what was saved."""
    verified: list[VerificationResponse] = []
    unfinished = ""
    query: dict[str, Any] = {"checkpoint": [*names], "all": int(every)}
    with stderr.ProgressLine("verify", None) as progress:
        done = 0
        shape: VerificationResponse
        for shape in Daemon().verify_checkpoints(ref, query):
            done = 0 if shape["bytes_done"] < done else done
            progress.add(shape["bytes_done"] - done)
            done = shape["bytes_done"]
            unfinished = shape["name"]
            if shape["kind"] == "verified":
                unfinished, done = "", 0
                verified.append(shape)
    rows = [{key: value for key, value in row.items() if key not in {"schema", "kind"}} for row in verified]
    answer = {"schema": 1, "ok": not unfinished and all(row["ok"] for row in verified), "verified": rows}
    if not show_data(answer, output, [row["name"] for row in verified if row["ok"]]) and verified:
        show_table(_VERIFIED_COLUMNS, verified)
    if unfinished:
        raise CommandFailed(
            f"the daemon ended before it had read all of {unfinished}",
            code=ExitCode.UNREACHABLE,
            hint=f"start it again and repeat: spotctl checkpoints {ref} verify",
        )
    damaged = [row["name"] for row in verified if not row["ok"]]
    if damaged:
        stderr.line()
        stderr.line(f"hint: a damaged checkpoint is passed over on restore; spotctl checkpoints {ref} rm {damaged[0]}")
    return ExitCode.JOB_FAILED if damaged else ExitCode.OK


def _finding(row: VerificationResponse) -> Cell:
    return Cell("every byte is what was saved", "green") if row["ok"] else Cell(_problem_text(row), "red")


def _problem_text(row: VerificationResponse) -> str:
    chunks = f"{count(row['damaged'], 'damaged chunk')}; " if row["damaged"] else ""
    return f"{chunks}{row['problem']}"


def _remove(ref: str, names: Sequence[str], *, yes: bool, output: str) -> None:
    if not yes and stderr.can_ask():
        words = ", ".join(clean(name) for name in names)
        question = f"remove {words}? The job will not resume from it, and its content is deleted"
        require_yes(question, otherwise="nothing was removed")
    _show_changed(Daemon().remove_checkpoints(ref, names), output, "removed")


def _show_changed(answer: CheckpointsAnswer, output: str, words: str) -> None:
    rows = answer["checkpoints"]
    if not show_data(answer, output, [row["name"] for row in rows]):
        stdout.write("".join(f"{clean(row['name'])} ({size_text(row['bytes'])}) is {words}\n" for row in rows))
