"""`checkpoints` and `pull`: what a job saved."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from spotd.cli import stderr, stdout
from spotd.cli.options import ID, JSON, TABLE, job_argument, output
from spotd.cli.pulling import choose, pull_into
from spotd.cli.table import Column
from spotd.cli.table import show as show_table
from spotd.cli.words import NOTHING, clean, count, local_text, size_text
from spotd.client.daemon import Daemon

if TYPE_CHECKING:
    from spotd.api.shapes import CheckpointShape, FilesShape

_CHECKPOINT_COLUMNS = (
    Column(title="NAME", least=10),
    Column(title="STEP", right=True),
    Column(title="SIZE", right=True),
    Column(title="BY ATTEMPT", right=True),
    Column(title="AT"),
)
_FILE_COLUMNS = (Column(title="PATH", least=20), Column(title="SIZE", right=True))


@click.command()
@job_argument
@output(TABLE, JSON, ID)
def checkpoints(*, ref: str, output: str) -> None:
    """The complete, verified checkpoints of a job, newest first; it resumes from the first."""
    answer = Daemon().checkpoints(ref)
    rows: list[CheckpointShape] = answer["checkpoints"]
    if output == JSON:
        stdout.document(answer)
    elif output == ID:
        stdout.write("".join(f"{clean(row['name'])}\n" for row in rows))
    elif rows:
        show_table(
            _CHECKPOINT_COLUMNS,
            [
                (
                    row["name"],
                    NOTHING if row["step"] is None else str(row["step"]),
                    size_text(row["bytes"]),
                    str(row["attempt"]),
                    local_text(row["at"]),
                )
                for row in rows
            ],
        )
    else:
        stderr.note("no checkpoint yet")


@click.command()
@job_argument
@click.argument("patterns", metavar="[PATH|GLOB]...", nargs=-1)
@click.option("--to", "folder", type=click.Path(path_type=Path), metavar="DIR", help="Folder; default: the job's name.")
@click.option("--checkpoint", metavar="NAME", help="Not the outputs but this checkpoint; newest is the newest.")
@click.option("--list", "list_only", is_flag=True, help="Only list the files.")
@click.option("--force", is_flag=True, help="Replace files that are there with other content.")
@output(TABLE, JSON)
def pull(
    *,
    ref: str,
    patterns: tuple[str, ...],
    folder: Path | None,
    checkpoint: str | None,
    list_only: bool,
    force: bool,
    output: str,
) -> None:
    """Fetch a job's outputs, or one of its checkpoints, into a folder. Each file appears complete or not at all."""
    daemon = Daemon()
    answer = daemon.files(ref, checkpoint)
    shape: FilesShape = answer  # type: ignore[assignment]  # the answer is the shape plus `schema` and `now`
    files = choose(shape["files"], patterns)
    if list_only:
        if output == JSON:
            stdout.document({**answer, "files": files})
        else:
            show_table(_FILE_COLUMNS, [(entry["path"], size_text(entry["bytes"])) for entry in files])
        return
    if folder is None:
        folder = Path(daemon.job(shape["id"])["job"]["name"])
    # From here on the job is named by its id: a new job may take over its name while the files come.
    name = None if shape["kind"] == "outputs" else shape["name"]
    with stderr.Progress("pull", sum(entry["bytes"] for entry in files)) as progress:
        pulled = pull_into(
            folder,
            files,
            lambda path: daemon.read_file(shape["id"], name, path),
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
            }
        )
    else:
        stdout.write("".join(f"{clean(str(folder / entry['path']))}\n" for entry in files))
        size = size_text(sum(entry["bytes"] for entry in files))
        kept = f", {pulled.kept} of them there already" if pulled.kept else ""
        stderr.note(f"{count(len(files), 'file')}, {size}{kept}, in {folder}")
