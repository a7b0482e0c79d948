"""Runs a command line and turns every way it can end into an exit code and, at most, a sentence.

Nothing a user types ends in a traceback. A defect of ours shows its name and where to get more; `SPOTD_DEBUG=1` prints
the whole of it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

import click

from spotd.cli import stderr, stdout
from spotd.cli.failures import CommandFailed, ExitCode, of_refusal


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
        with group.make_context(name, words) as ctx:
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
        return _unexpected(exc)


def _unexpected(exc: Exception) -> int:
    # Imported here: only commands that spoke to the daemon can have failed this way, and those loaded it already.
    from spotd.client.errors import ClientError, DaemonRefused

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
        hint = f"did you mean {' or '.join(sorted(exc.possibilities))}?"
        stderr.error(f"{command} has no option {exc.option_name}", hint=hint)
    else:
        stderr.error(_sentence(exc.format_message()), hint=hint)
    return ExitCode.USAGE


def _sentence(message: str) -> str:
    """Return click's message in the form of ours: no capital for its own sake, no full stop."""
    text = message.strip().removesuffix(".")
    first, _, rest = text.partition(" ")
    return f"{first.lower()} {rest}" if first in {"Missing", "Invalid", "Got", "No", "Option"} else text
