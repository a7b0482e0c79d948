"""`providers --hosts` and `--forget`: what is remembered of hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from spotd.cli import stderr, stdout
from spotd.cli.inputs.options import show_data
from spotd.cli.views.table import Column
from spotd.cli.views.table import show as show_table
from spotd.client.daemon import Daemon
from spotd.words import NOTHING, clean, local_text

if TYPE_CHECKING:
    from spotd.api.schemas.health import ForgottenHostResponse, HostResponse

_COLUMNS: Sequence[Column[HostResponse]] = (
    Column("HOST", lambda row: clean(f"{row['provider']}/{row['host']}"), least=10),
    Column("BEHIND", lambda row: f"{row['ranks_behind']:.1%}", right=True),
    Column("FAILED", lambda row: _count(row["failed_starts"]), right=True),
    Column("SLOW", lambda row: _count(row["slow_starts"]), right=True),
    Column("EARLY", lambda row: _count(row["early_losses"]), right=True),
    Column("LOST", lambda row: _count(row["losses"]), right=True),
    Column("HOURS", lambda row: f"{row['machine_h']:.1f}", right=True),
    Column("LAST", lambda row: local_text(row["at"]), drop=2),
    Column("AVOIDED UNTIL", lambda row: local_text(row["cools_until"]), drop=1),
)
_NOTE = (
    "a host ranks BEHIND by a share of its price for starts that FAILED or were SLOW and machines lost EARLY;"
    " these fade by half in 3 days, machines LOST and HOURS in 14"
)


def show_hosts(output: str) -> None:
    answer = Daemon().hosts()
    rows: list[HostResponse] = answer["hosts"]
    if show_data(answer, output, [f"{row['provider']}/{row['host']}" for row in rows]):
        return
    if not rows:
        stderr.note("no host is remembered: none that has a name was used, or all of it has faded")
        return
    show_table(_COLUMNS, rows)
    stderr.note(_NOTE)
    if answer["more"]:
        stderr.note("hosts that rank no further behind are left out")


def forget_host(host: str, output: str) -> None:
    answer = Daemon().forget_host(host)
    gone: list[ForgottenHostResponse] = answer["forgotten"]
    names = [f"{row['provider']}/{row['host']}" for row in gone]
    if not show_data(answer, output, names):
        for name in names:
            stdout.line(clean(f"{name} is forgotten: it ranks by its price again"))


def _count(value: float) -> str:
    return f"{value:.1f}" if value else NOTHING
