"""Options and parameters that commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

TABLE, JSON, ID = "table", "json", "id"


def output(*choices: str) -> Callable[[F], F]:
    """Return the option `-o`; the first choice is the default. stdout holds nothing but what it asks for."""
    return click.option(
        "-o",
        "--format",
        "output",
        type=click.Choice(choices),
        default=choices[0],
        show_default=True,
        help="What to print on stdout.",
    )


def job_argument(function: F) -> F:
    """Add the argument `JOB`."""
    return click.argument("ref", metavar="JOB")(function)
