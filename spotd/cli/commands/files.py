"""`pull`: what a job saved, onto this machine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from spotd.cli import stderr, stdout
from spotd.cli.entry import CommandFailed, ExitCode
from spotd.cli.inputs.options import ID, JSON, TABLE, job_argument, output, require_yes, show_data
from spotd.cli.transfers import choose, pull_into, store_folder
from spotd.cli.views.table import Cell, Column
from spotd.cli.views.table import show as show_table
from spotd.client.daemon import Daemon
from spotd.words import NOTHING, clean, count, local_text, size_text

if TYPE_CHECKING:
    from spotd.api.schemas import jobs as schemas
    from spotd.api.schemas.answers import CheckpointsAnswer


_FILE_COLUMNS: Sequence[Column[schemas.FileResponse]] = (
    Column("PATH", lambda entry: entry["path"], least=20),
    Column("SIZE", lambda entry: size_text(entry["bytes"]), right=True),
)


@click.command()
@job_argument
@click.argument("patterns", metavar="[PATH|GLOB]...", nargs=-1)
@click.option("--to", "folder", type=click.Path(path_type=Path), metavar="DIR", help="Folder; default: the job's name.")
@click.option("--checkpoint", metavar="NAME", help="Not the outputs but this checkpoint; newest is the newest.")
@click.option("--list", "list_only", is_flag=True, help="Only list the files.")
@click.option("--force", is_flag=True, help="Replace files that are there with other content.")
@output(TABLE, JSON)
def pull(*, ref: str, checkpoint: str | None, **given: Any) -> int | None:
    """Fetch a job's outputs, or one of its checkpoints, into a folder. Each file appears complete or not at all."""
    return fetch(ref, checkpoint, **given)


def fetch(
    ref: str,
    checkpoint: str | None,
    *,
    patterns: Sequence[str] = (),
    folder: Path | None,
    list_only: bool = False,
    force: bool,
    output: str,
) -> int | None:
    """Fetch the files into the folder, or list them; return the exit code, which shows whether any are missing.

    Raises:
        CommandFailed: one is in the way, or the disk refuses.
    """
    daemon = Daemon()
    shape: schemas.FilesResponse = daemon.files(ref, checkpoint)
    places = choose(shape["files"], patterns)
    files = [shape["files"][place] for place in places]
    code = _code_of(shape)
    if list_only:
        if not show_data({**shape, "files": files}, output):
            show_table(_FILE_COLUMNS, files)
        return code
    if folder is None:
        folder = Path(daemon.job(shape["id"])["job"]["name"])
    # From here on job and checkpoint are named for good: new ones may take over their names while the files come.
    name = None if shape["kind"] == "outputs" else f"{shape['name']}@{shape['attempt']}"
    with stderr.ProgressLine("pull", sum(entry["bytes"] for entry in files)) as progress:
        pulled = pull_into(
            folder,
            shape["files"],
            places,
            lambda spans: daemon.read_files(shape["id"], name, shape["manifest_sha256"], spans),
            force=force,
            on_bytes=progress.add,
        )
    if output == JSON:
        stdout.document(
            {
                "schema": 1,
                "id": shape["id"],
                "kind": shape["kind"],
                "name": shape["name"],
                "folder": str(folder.absolute()),
                "files": [entry["path"] for entry in files],
                "written": pulled.written,
                "kept": pulled.kept,
                "failed": [{"path": path, "reason": reason} for path, reason in pulled.failed],
            }
        )
    else:
        lost = {path for path, _ in pulled.failed}
        here = [entry["path"] for entry in files if entry["path"] not in lost]
        stdout.write("".join(f"{clean(str(folder / path))}\n" for path in here))
        size = size_text(sum(entry["bytes"] for entry in files))
        kept = f", {pulled.kept} of them there already" if pulled.kept else ""
        stderr.note(f"{count(len(files), 'file')}, {size}{kept}, in {folder}")
    if pulled.failed:
        path, reason = pulled.failed[0]
        raise CommandFailed(
            f"{count(len(pulled.failed), 'file')} could not be written here; the first is {path}: {reason}",
            code=ExitCode.LOCAL_IO,
            hint="pull it into another folder with --to, on a disk that can hold such names",
        )
    return code


def _code_of(shape: schemas.FilesResponse) -> int | None:
    """Return the exit code. What is there is fetched in any case; what is missing is on the terminal too."""
    warning = shape.get("warning", "")
    if not warning:
        return None
    stderr.warning(warning)
    return ExitCode.JOB_FAILED


# `checkpoints`: what a job resumes from, and what its owner can do with it.


ACTIONS: Final = ("list", "verify", "pull", "pin", "unpin", "rm")
_COLUMNS: Sequence[Column[schemas.KeptCheckpointResponse]] = (
    Column("NAME", lambda row: row["name"], least=10),
    Column("STEP", lambda row: NOTHING if row["step"] is None else str(row["step"]), right=True),
    Column("SIZE", lambda row: size_text(row["bytes"]), right=True),
    Column("BY", lambda row: str(row["attempt"]) if row["attempt"] else f"job {row['job']}", right=True),
    Column("METRIC", lambda row: NOTHING if row["metric"] is None else f"{row['metric']:.6g}", right=True, drop=1),
    Column("KEPT", lambda row: ", ".join(_reasons_to_keep(row)) or NOTHING, least=4),
    Column("AT", lambda row: local_text(row["at"])),
)
_VERIFIED_COLUMNS: Sequence[Column[schemas.VerificationResponse]] = (
    Column("NAME", lambda row: row["name"], least=10),
    Column("BY", lambda row: str(row["attempt"] or NOTHING), right=True),
    Column("READ", lambda row: size_text(row["bytes_done"]), right=True),
    Column("FOUND", lambda row: _finding(row), least=10),
)


def _reasons_to_keep(row: schemas.KeptCheckpointResponse) -> list[str]:
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
        if len(names) > 1:
            raise click.UsageError("pull fetches one checkpoint at a time", ctx)
        fetch(ref, names[0] if names else "newest", folder=folder, force=force, output=output)
    elif action == "rm":
        _remove(ref, names, yes=yes, output=output)
    else:
        answer = Daemon().pin_checkpoints(ref, names, pinned=action == "pin")
        _show_changes(answer, output, "pinned" if action == "pin" else "not pinned any more")
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
    rows: list[schemas.KeptCheckpointResponse] = answer["checkpoints"]
    if show_data(answer, output, [row["name"] for row in rows]):
        return
    if rows:
        show_table(_COLUMNS, rows)
    else:
        stderr.note("no checkpoint yet")


def _verify(ref: str, names: Sequence[str], *, every: bool, output: str) -> int:
    """Verify the checkpoints; return the exit code: whether every byte is what was saved."""
    verified: list[schemas.VerificationResponse] = []
    unfinished = ""
    query: dict[str, Any] = {"checkpoint": [*names], "all": int(every)}
    with stderr.ProgressLine("verify", None) as progress:
        done = 0
        shape: schemas.VerificationResponse
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


def _finding(row: schemas.VerificationResponse) -> Cell:
    return Cell("every byte is what was saved", "green") if row["ok"] else Cell(_problem_text(row), "red")


def _problem_text(row: schemas.VerificationResponse) -> str:
    chunks = f"{count(row['damaged'], 'damaged chunk')}; " if row["damaged"] else ""
    return f"{chunks}{row['problem']}"


def _remove(ref: str, names: Sequence[str], *, yes: bool, output: str) -> None:
    if not yes and stderr.can_ask():
        words = ", ".join(clean(name) for name in names)
        question = f"remove {words}? The job will not resume from it, and its content is deleted"
        require_yes(question, otherwise="nothing was removed")
    _show_changes(Daemon().remove_checkpoints(ref, names), output, "removed")


def _show_changes(answer: CheckpointsAnswer, output: str, words: str) -> None:
    rows = answer["checkpoints"]
    if not show_data(answer, output, [row["name"] for row in rows]):
        stdout.write("".join(f"{clean(row['name'])} ({size_text(row['bytes'])}) is {words}\n" for row in rows))


# `data`: datasets that jobs read, stored once by their content.


_SET_COLUMNS: Sequence[Column[schemas.DatasetResponse]] = (
    Column("NAME", lambda row: row["name"], least=8),
    Column("SIZE", lambda row: size_text(row["bytes"]), right=True),
    Column("FILES", lambda row: f"{row['files']:,}", right=True),
    Column("SHA256", lambda row: row["sha256"][:12]),
    Column("READ BY", lambda row: ", ".join(row["jobs"]) or NOTHING, least=7),
    Column("STORED", lambda row: local_text(row["created_at"])),
)


@click.group()
def data() -> None:
    """Datasets that jobs read: stored once by their content, named in a job file's [[data]]."""


@data.command()
@click.argument("name", metavar="NAME")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--follow", is_flag=True, help="Store what links out of the folder lead to, in their place.")
@output(TABLE, JSON, ID)
def put(*, name: str, folder: Path, follow: bool, output: str) -> int:
    """Store the folder DIR as NAME. Run it again to go on after a break: only what is missing is sent.

    \b
    spotctl data put imagenet ./imagenet
    spotctl data put llama ~/.cache/huggingface/hub/models--ORG--MODEL/snapshots/REVISION --follow
    """
    from spotd_jobs.wire.client.dataset import is_dataset_name

    if not is_dataset_name(name):
        raise CommandFailed(f"{name!r} is no name of a dataset", hint="use a-z, 0-9, '.', '_' and '-'")
    daemon = Daemon()
    made, sent = store_folder(folder, daemon, partial(daemon.name_dataset, name), follow=follow)
    answer = {"schema": 1, "dataset": made}
    if not show_data(answer, output, [name]):
        stdout.line(
            f"{clean(name)}: {count(made['files'], 'file')}, {size_text(made['bytes'])}"
            + (f"; sent {size_text(sent)}, the rest is in the store" if sent < made["bytes"] else "")
        )
    return ExitCode.OK


@data.command()
@output(TABLE, JSON, ID)
def ls(*, output: str) -> int:
    """List the datasets, and the jobs that have not ended and read them."""
    answer = Daemon().datasets()
    rows = answer["datasets"]
    if not show_data(answer, output, [row["name"] for row in rows]):
        if rows:
            show_table(_SET_COLUMNS, rows)
        else:
            stderr.note("no dataset is stored; spotctl data put NAME DIR stores a folder")
    return ExitCode.OK


@data.command()
@click.argument("name", metavar="NAME")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@output(TABLE, JSON, ID)
def rm(*, name: str, yes: bool, output: str) -> int:
    """Forget the dataset NAME. Refused while a job that has not ended reads it."""
    daemon = Daemon()
    if not yes and stderr.can_ask():
        require_yes(f"remove the dataset {name}?", otherwise="nothing was removed")
    answer = daemon.remove_dataset(name)
    if not show_data(answer, output, [name]):
        stdout.line(f"{clean(name)} is removed; content that no other dataset has is deleted after a day")
    return ExitCode.OK
