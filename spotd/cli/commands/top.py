"""`top`: a live view of the daemon on a terminal."""

from __future__ import annotations

import os
from importlib.util import find_spec

import click

from spotd.cli import stderr, stdout
from spotd.cli.codes import ExitCode
from spotd.cli.failures import CommandFailed
from spotd.client.daemon import Daemon


@click.command()
def top() -> None:
    """Jobs, machines, market and events, live. Keys cancel a job, open its log and change its ceiling; ? lists them.

    The daemon may go and come back meanwhile. Its jobs go on when you leave.
    """
    if find_spec("textual") is None:
        raise CommandFailed(
            "this view needs textual, which is not installed",
            code=ExitCode.USAGE,
            hint="pip install 'spotd[tui]', or use spotctl ls and spotctl events -f",
        )
    if not (stdout.is_terminal() and stderr.can_ask()):
        raise CommandFailed("this view needs a terminal", code=ExitCode.USAGE, hint="spotctl ls")
    if os.environ.get("TERM") == "dumb":
        raise CommandFailed("this terminal cannot move its cursor (TERM=dumb)", code=ExitCode.USAGE, hint="spotctl ls")
    from spotd.top.app import Top

    Top(Daemon()).run()
