"""`pull`: what a job saved, onto this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spotd.cli import stderr, stdout
from spotd.cli.failures import CommandFailed, ExitCode
from spotd.cli.inputs.options import JSON, TABLE, job_argument, output, show_data
from spotd.cli.pulling import choose, pull_into
from spotd.cli.views.table import Column
from spotd.cli.views.table import show as show_table
from spotd.client.daemon import Daemon
from spotd.words import clean, count, size_text

if TYPE_CHECKING:
    from spotd.api.schemas.files import FileResponse, FilesResponse

_FILE_COLUMNS: Sequence[Column[FileResponse]] = (
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
    shape: FilesResponse = daemon.files(ref, checkpoint)
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


def _code_of(shape: FilesResponse) -> int | None:
    """Return the exit code. What is there is fetched in any case; what is missing is on the terminal too."""
    warning = shape.get("warning", "")
    if not warning:
        return None
    stderr.warning(warning)
    return ExitCode.JOB_FAILED
