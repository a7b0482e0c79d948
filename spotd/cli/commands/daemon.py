"""`run`, `demo`, `migrate` and `config`: thin doors to the daemon's own modules, imported when they are used."""

from __future__ import annotations

from pathlib import Path

import click

_CONFIG = click.option(
    "--config",
    "config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Configuration; default: $SPOTD_CONFIG, then the user's, then /etc/spotd/config.toml.",
)
