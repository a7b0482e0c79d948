"""`top`: a live view of the daemon on a terminal."""

from __future__ import annotations

import os

import click

from spotd.cli import stderr, stdout
from spotd.cli.failures import CommandFailed
from spotd.cli.inputs.options import require_extra
from spotd.client.daemon import Daemon


@click.command()
def top() -> None:
    """Jobs, machines, market and events, live. Keys cancel a job, open its log and change its ceiling; ? lists them.

    The daemon may go and come back meanwhile. Its jobs go on when you leave.
    """
    way_round = ", or use spotctl ls and spotctl events -f"
    require_extra("tui", "textual", "this view needs textual", way_round=way_round)
    if not (stdout.is_terminal() and stderr.can_ask()):
        raise CommandFailed("this view needs a terminal", hint="spotctl ls")
    if os.environ.get("TERM") == "dumb":
        raise CommandFailed("this terminal cannot move its cursor (TERM=dumb)", hint="spotctl ls")
    from spotd.top.app import Top

    Top(Daemon()).run()
