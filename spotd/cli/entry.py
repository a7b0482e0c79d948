"""Runs a command line and turns every way it can end into an exit code and, at most, a sentence.

Nothing a user types ends in a traceback. A defect of ours shows its name and where to get more; `SPOTD_DEBUG=1` prints
the whole of it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from importlib import import_module
from typing import TYPE_CHECKING, Any, overload

import click

from spotd.cli import stderr, stdout

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from spotd_jobs.spec.problems import FileProblems


# Ends of a command: its exit code, and the failures that its own code decides on.


class ExitCode(IntEnum):
    """Exit codes of `spotctl` and `spotd`. The first seven are a promise to scripts."""

    OK = 0
    JOB_FAILED = 1
    """The job ended without success (`logs -f`, `submit --wait`), or `doctor` found something."""
    USAGE = 2
    """The command, the job file or a flag is wrong, or the job is in no state for it."""
    NOTHING_UNDER_CEILING = 3
    BUDGET = 4
    UNREACHABLE = 5
    """The daemon does not run, does not answer, or cannot do this now."""
    NOT_FOUND = 6
    SOFTWARE = 70
    """A defect of spotctl itself."""
    LOCAL_IO = 74
    """A file of this machine could not be read or written."""
    INTERRUPTED = 130
    OUTPUT_CLOSED = 141
    """The reader of stdout went away; what shells report for SIGPIPE."""


_BY_REFUSAL = {
    "not_found": ExitCode.NOT_FOUND,
    "ambiguous": ExitCode.USAGE,
    "invalid": ExitCode.USAGE,
    "conflict": ExitCode.USAGE,
    "budget": ExitCode.BUDGET,
    "forbidden": ExitCode.USAGE,
}

_BY_STATE = {"SUCCEEDED": ExitCode.OK, "EXPIRED": ExitCode.BUDGET}


def of_refusal(code: str) -> ExitCode:
    """Return the exit code for a refusal of the daemon; what it cannot do now counts as unreachable."""
    return _BY_REFUSAL.get(code, ExitCode.UNREACHABLE)


def of_state(state: str) -> ExitCode:
    """Return the exit code for the final state of a job that was waited for."""
    return _BY_STATE.get(state, ExitCode.JOB_FAILED)


class CommandFailed(Exception):
    """The command ends with this code after saying why and naming a way out.

    `rows` are several errors with a hint each.
    """

    @overload
    def __init__(self, message: str, *, code: ExitCode = ..., hint: str) -> None: ...
    @overload
    def __init__(self, message: str, *, code: ExitCode = ..., rows: Sequence[tuple[str, str]]) -> None: ...
    def __init__(
        self, message: str, *, code: ExitCode = ExitCode.USAGE, hint: str = "", rows: Sequence[tuple[str, str]] = ()
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.hint = hint
        self.rows = tuple(rows)


def unusable(message: str, refused: FileProblems) -> CommandFailed:
    """Return the refusal of a file, with every mistake and its place in it."""
    rows = [(problem.sentence(refused.source), problem.hint) for problem in refused.problems]
    return CommandFailed(message, rows=rows)


def run(group: click.Group, name: str, arguments: Sequence[str] | None = None) -> int:
    """Run the command line; print each error, and return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if f"_{name.upper()}_COMPLETE" in os.environ:
        # A shell asks for completions; the call ends the process. What goes wrong stays out of the person's line.
        with contextlib.suppress(Exception):
            group.main(args=words, prog_name=name)
        return ExitCode.SOFTWARE
    try:
        # Not `group.main`: it writes an empty line on Ctrl-C, also where stdout is no terminal.
        with _notices_as_sentences(), group.make_context(name, words) as ctx:
            code = group.invoke(ctx)
        sys.stdout.flush()
        return int(code) if isinstance(code, int) else ExitCode.OK
    except click.exceptions.Exit as exc:
        return exc.exit_code
    except CommandFailed as failed:
        stderr.error(failed.message, hint=failed.hint, rows=failed.rows)
        return failed.code
    except click.exceptions.NoArgsIsHelpError as exc:
        stderr.line(exc.format_message())
        return ExitCode.USAGE
    except click.UsageError as exc:
        return _usage(exc, name)

    except click.ClickException as exc:
        stderr.error(_sentence(exc.format_message()))
        return ExitCode.USAGE
    except (KeyboardInterrupt, click.Abort):
        if stderr.is_terminal():
            stderr.line()
        return ExitCode.INTERRUPTED
    except (stdout.OutputClosed, BrokenPipeError):
        stdout.abandon()
        return ExitCode.OUTPUT_CLOSED
    except stdout.OutputFailed as exc:
        stdout.abandon()
        stderr.error(f"cannot write the output: {exc}")
        return ExitCode.LOCAL_IO
    except Exception as exc:  # noqa: BLE001 - the outermost frame: whatever is left is ours to explain, not to show raw
        return _report_defect(exc)


@contextlib.contextmanager
def _notices_as_sentences() -> Iterator[None]:
    """Print the first notice of the daemon as a sentence, and no more of one command that asks again and again."""
    shown: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if category.__name__ != "DaemonNotice":
            before(message, category, *place, **more)
        elif not shown:
            shown.add(str(message))
            stderr.warning(str(message))

    with warnings.catch_warnings():
        warnings.filterwarnings("always", module=r"spotd\.client\.transport")
        before, warnings.showwarning = warnings.showwarning, show
        yield


def _report_defect(exc: Exception) -> int:
    # Imported here: only commands that spoke to the daemon can have failed this way, and those loaded it already.
    from spotd.client.transport import ClientError, DaemonRefused

    if isinstance(exc, ClientError):
        stderr.error(exc.message, hint=exc.hint, rows=exc.rows)
        return of_refusal(exc.code) if isinstance(exc, DaemonRefused) else ExitCode.UNREACHABLE
    if os.environ.get("SPOTD_DEBUG"):
        raise exc
    if isinstance(exc, OSError) and exc.filename:
        stderr.error(f"{exc.filename}: {exc.strerror}")
        return ExitCode.LOCAL_IO
    stderr.error(
        f"a defect of spotd itself: {type(exc).__name__}: {exc}",
        hint="run it again with SPOTD_DEBUG=1 and report what it prints",
    )
    return ExitCode.SOFTWARE


def _usage(exc: click.UsageError, name: str) -> int:
    command = exc.ctx.command_path if exc.ctx is not None else name
    hint = f"{command} --help"
    if isinstance(exc, click.NoSuchOption) and exc.possibilities:
        begun = [name for name in exc.possibilities if name.startswith(exc.option_name)] or exc.possibilities
        hint = f"did you mean {' or '.join(sorted(begun))}?"
        stderr.error(f"{command} has no option {exc.option_name}", hint=hint)
    else:
        stderr.error(_sentence(exc.format_message()), hint=hint)
    return ExitCode.USAGE


def _sentence(message: str) -> str:
    """Return click's message in the form of ours: no capital for its own sake, no full stop."""
    text = message.strip().removesuffix(".")
    first, _, rest = text.partition(" ")
    return f"{first.lower()} {rest}" if first in {"Missing", "Invalid", "Got", "No", "Option"} else text


# A command group that imports a command only when it is called or asked for its own help.


@dataclass(frozen=True, slots=True, kw_only=True)
class Lazy:
    """Where a command lives (`module:attribute`) and the line that the group's help shows for it."""

    target: str
    help: str
    aliases: tuple[str, ...] = ()


class LazyGroup(click.Group):
    """Commands from a table of `Lazy`, in the table's order."""

    def __init__(self, *args: Any, lazy: Mapping[str, Lazy], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = lazy
        self._names = {alias: name for name, entry in lazy.items() for alias in (name, *entry.aliases)}

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        name = self._names.get(cmd_name)
        if name is None:
            return None
        module, _, attribute = self._lazy[name].target.partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        del ctx
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        word = args[0]
        if word not in self._names and not word.startswith("-"):
            from difflib import get_close_matches  # costs as much as half of --help, and only a typo needs it

            close = get_close_matches(word.lower(), self._names, n=1)
            suggestion = f", did you mean {close[0]!r}?" if close else ""
            raise click.UsageError(f"there is no command {word!r}{suggestion}", ctx)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands that begin so, without importing any, and the options."""
        from click.shell_completion import CompletionItem

        names = [name for name in self._lazy if name.startswith(incomplete)]
        found = [CompletionItem(name, help=self._lazy[name].help) for name in names]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        rows = [(", ".join((name, *entry.aliases)), entry.help) for name, entry in self._lazy.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
