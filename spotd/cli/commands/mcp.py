"""`spotctl mcp`: tools for an agent."""

from __future__ import annotations

from pathlib import Path

import click

from spotd.cli.inputs.options import require_extra
from spotd.client.daemon import Daemon


@click.command()
@click.option(
    "--root",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=Path(),
    metavar="DIR",
    help="Folder below which jobs may have their workdirs; the current one unless given.",
)
def mcp(*, root: Path) -> None:
    """Serve tools to an agent over stdin and stdout (Model Context Protocol): watch jobs, and queue some.

    Agents queue jobs only within [mcp] job_budget and day_budget of the daemon's config, and cancel only what they
    queued.
    """
    require_extra("mcp", "mcp", "agents need the mcp package")
    from spotd.agents.server import make_server  # loads the whole protocol

    make_server(Daemon(), root).run("stdio")
