"""Exit codes of `spotctl` and `spotd`. The first seven are a promise to scripts."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
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
