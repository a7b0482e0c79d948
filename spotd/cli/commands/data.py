"""`data`: datasets that jobs read, stored once by their content."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from spotd.cli import stderr, stdout
from spotd.cli.failures import CommandFailed, ExitCode
from spotd.cli.inputs.options import ID, JSON, TABLE, output, require_yes, show_data
from spotd.cli.views.table import Column
from spotd.cli.views.table import show as show_table
from spotd.client.daemon import Daemon
from spotd.words import NOTHING, clean, count, local_text, size_text

if TYPE_CHECKING:
    from spotd.api.schemas.data import DatasetResponse

TRIES: Final = 3
"""What the store had at the beginning of an upload can be gone at its end; then it is sent again."""
_COLUMNS: Sequence[Column[DatasetResponse]] = (
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
    from spotd_jobs.dataset_pack import DatasetError, pack_dataset
    from spotd_jobs.wire.client.dataset import is_dataset_name

    if not is_dataset_name(name):
        raise CommandFailed(f"{name!r} is no name of a dataset", hint="use a-z, 0-9, '.', '_' and '-'")
    daemon = Daemon()
    for _ in range(TRIES):
        sink = _Uploading(daemon)
        try:
            with stderr.ProgressLine("read", None) as progress:
                root = pack_dataset(folder, sink, follow=follow, progress=progress.add)
        except DatasetError as exc:
            raise CommandFailed(str(exc), hint=exc.hint) from exc
        answer = daemon.name_dataset(name, root.decode("ascii"))
        if "dataset" in answer:
            made = answer["dataset"]
            if not show_data(answer, output, [name]):
                stdout.line(
                    f"{clean(name)}: {count(made['files'], 'file')}, {size_text(made['bytes'])};"
                    f" sent {size_text(sink.sent)}, the rest was stored before"
                    if sink.sent < made["bytes"]
                    else f"{clean(name)}: {count(made['files'], 'file')}, {size_text(made['bytes'])}"
                )
            return ExitCode.OK
    raise CommandFailed("what was sent did not stay in the store", hint="spotctl doctor")


@data.command()
@output(TABLE, JSON, ID)
def ls(*, output: str) -> int:
    """List the datasets, and the jobs that have not ended and read them."""
    answer = Daemon().datasets()
    rows = answer["datasets"]
    if not show_data(answer, output, [row["name"] for row in rows]):
        if rows:
            show_table(_COLUMNS, rows)
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


class _Uploading:
    """Sends what the store lacks, and counts it. Called from several threads."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self.sent = 0

    def put_chunk(self, sha256: str, data: bytes | bytearray) -> None:
        if not self._daemon.has_data_chunk(sha256):
            self._daemon.put_data_chunk(sha256, io.BytesIO(data), len(data))
            self.sent += len(data)

    def put_part(self, sha256: str, text: bytes) -> None:
        self._daemon.put_data_part(sha256, io.BytesIO(text), len(text))
