"""Options and parameters that commands share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from spotd.cli import stdout
from spotd.words import clean

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

F = TypeVar("F", bound=Callable[..., Any])

TABLE, JSON, ID, CSV, CHART = "table", "json", "id", "csv", "chart"


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


def show_data(answer: Mapping[str, Any], output: str, ids: Iterable[str] = ()) -> bool:
    """Print the answer as data, if that was asked for; return whether it was."""
    if output == JSON:
        stdout.document(answer)
    elif output == ID:
        stdout.write("".join(f"{clean(one)}\n" for one in ids))
    return output != TABLE


def complete_job(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of jobs that begin so, for a shell."""
    from spotd.cli.job_names import job_names  # only a shell that completes needs them

    return job_names(ctx, param, incomplete)


def complete_file(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Have the shell complete names of files."""
    from click.shell_completion import CompletionItem

    del ctx, param
    return [CompletionItem(incomplete, type="file")]


def job_argument(function: F) -> F:
    """Add the argument `JOB`."""
    return click.argument("ref", metavar="JOB", shell_complete=complete_job)(function)
