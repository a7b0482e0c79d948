"""Options and parameters that commands share."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from spotd.cli import stderr, stdout
from spotd.cli.entry import CommandFailed, ExitCode
from spotd.words import clean

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

F = TypeVar("F", bound=Callable[..., Any])

shown_option = partial(click.option, show_default=True)
"""An option whose default stands in the help."""
TABLE, JSON, ID, CSV, CHART = "table", "json", "id", "csv", "chart"
WAIT_S: Final = 0.2
"""Longest that the completion of a shell may take."""
_HARMLESS: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Words that no shell acts on."""


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


class Parsed(click.ParamType[Any]):
    """A value that a function parses, refused with the function's own sentence and way out."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from spotd_jobs.spec.problems import BadValue

        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except BadValue as exc:
            self.fail(f"{exc}; {exc.hint}" if exc.hint else str(exc), param, ctx)


def require_here(what: str) -> None:
    """Refuse what needs the disk of the daemon's computer where that may be another one."""
    if os.environ.get("SPOTCTL_URL"):
        raise CommandFailed(f"{what} on the daemon's computer", hint="run this there, without --url")


def require_extra(extra: str, module: str, sentence: str, *, way_round: str = "") -> None:
    """Refuse to go on without an optional library."""
    if find_spec(module) is None:
        from spotd_providers.kit.boundary import install_command

        raise CommandFailed(f"{sentence}, which is not installed", hint=f"{install_command(extra)}{way_round}")


def plot_option(text: str = "Draw it too.") -> Callable[[F], F]:
    kind = click.Path(path_type=Path, dir_okay=False)
    return click.option("--plot", type=kind, metavar="FILE.svg|png", help=text, callback=_require_plotting)


def _require_plotting(_ctx: click.Context, _param: click.Parameter, path: Path | None) -> Path | None:
    """Refuse at once what could not be drawn at the end."""
    if path is None:
        return None
    if path.suffix.lower() not in {".svg", ".png"}:
        raise CommandFailed(f"{path} ends neither in .svg nor in .png", hint=f"--plot {path.stem or 'out'}.svg")
    if not path.absolute().parent.is_dir():
        raise CommandFailed(f"the folder of {path} does not exist", hint="make it, or name another")
    require_extra("plot", "matplotlib", "pictures need matplotlib", way_round=", or leave out --plot")
    return path


def require_yes(question: str, *, otherwise: str) -> None:
    """Ask; anything but a yes ends the command, with a note on what was not done."""
    if not stderr.ask(question):
        stderr.note(otherwise)
        raise click.exceptions.Exit(ExitCode.INTERRUPTED)


def complete_job(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of jobs that begin so, newest first; ids where no name does. Silent without a daemon."""
    from spotd.client.daemon import Daemon
    from spotd.client.transport import ClientError

    del ctx, param
    try:
        jobs = Daemon().jobs({"limit": 300}, timeout_s=WAIT_S)["jobs"]
    except ClientError:
        return []
    for words in (dict.fromkeys(job["name"] for job in jobs), dict.fromkeys(job["id"] for job in jobs)):
        found = [word for word in words if word.startswith(incomplete) and _HARMLESS.fullmatch(word)]
        if found:
            return found
    return []


def complete_file(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Have the shell complete names of files."""
    from click.shell_completion import CompletionItem

    del ctx, param
    return [CompletionItem(incomplete, type="file")]


def job_argument(function: F) -> F:
    return click.argument("ref", metavar="JOB", shell_complete=complete_job)(function)
