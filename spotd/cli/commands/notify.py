"""`notify test`: does a notification arrive."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from spotd.cli import stdout
from spotd.cli.failures import ExitCode
from spotd.cli.inputs.options import ID, JSON, TABLE, output, show_data
from spotd.client.daemon import Daemon
from spotd.words import clean

if TYPE_CHECKING:
    from spotd.api.schemas.health import ChannelTestResponse


@click.group()
def notify() -> None:
    """Notifications, by the channels of the config's [notify.NAME]."""


@notify.command()
@click.argument("channel", required=False)
@output(TABLE, JSON, ID)
def test(*, channel: str | None, output: str) -> int:
    """Send one message by CHANNEL, or by each. Exits 1 if one was not taken."""
    answer = Daemon().test_notifications(channel)
    rows: list[ChannelTestResponse] = answer["channels"]
    if not show_data(answer, output, [row["channel"] for row in rows]):
        for row in rows:
            detail = "was taken" if row["ok"] else row["error"]
            stdout.line(f"{'ok  ' if row['ok'] else 'FAIL'}  {clean(row['channel'])}: {clean(detail)}")
    return ExitCode.OK if all(row["ok"] for row in rows) else ExitCode.JOB_FAILED
