"""Ends of a command: its exit code, and the failures that its own code decides on."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spotd_jobs.spec.problems import FileProblems


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
}

_BY_STATE = {"SUCCEEDED": ExitCode.OK, "EXPIRED": ExitCode.BUDGET}


def of_refusal(code: str) -> ExitCode:
    """Return the exit code for a refusal of the daemon; what it cannot do now counts as unreachable."""
    return _BY_REFUSAL.get(code, ExitCode.UNREACHABLE)


def of_state(state: str) -> ExitCode:
    """Return the exit code for the final state of a job that was waited for."""
    return _BY_STATE.get(state, ExitCode.JOB_FAILED)


class CommandFailed(Exception):
    """The command ends with this code after saying why. `rows` are several errors with a hint each."""

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
