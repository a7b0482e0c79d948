"""The closed set of ways in which the API refuses a request."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from spotd_jobs.spec.problems import Problem, listed_problems

TEXT_CHARS_MAX: Final = 8_000
"""Of what a refusal says: it may name what the request named, which may be very much."""


class RefusalCode(StrEnum):
    """Why a request was refused. The strings are part of the JSON output."""

    NOT_FOUND = "not_found"
    AMBIGUOUS = "ambiguous"
    INVALID = "invalid"
    CONFLICT = "conflict"
    BUDGET = "budget"
    UNAVAILABLE = "unavailable"


class ApiRefusal(Exception):
    """A request was refused, and nothing changed. The message is for the user and ends without a full stop."""

    code: RefusalCode

    def __init__(self, message: str, *, hint: str = "", problems: tuple[Problem, ...] = ()) -> None:
        super().__init__(message[:TEXT_CHARS_MAX])
        self.message = message[:TEXT_CHARS_MAX]
        self.hint = hint[:TEXT_CHARS_MAX]
        self.problems = listed_problems(problems)


class NotFound(ApiRefusal):
    """No job, checkpoint or file of this name."""

    code = RefusalCode.NOT_FOUND


class Ambiguous(ApiRefusal):
    """The reference means several jobs; the hint lists them."""

    code = RefusalCode.AMBIGUOUS


class Invalid(ApiRefusal):
    """A job or a parameter that is wrong; `problems` names the places."""

    code = RefusalCode.INVALID


class StateConflict(ApiRefusal):
    """The job is in no state for this (cancel of an ended one, retry of a running one, a name in use)."""

    code = RefusalCode.CONFLICT


class OverBudget(ApiRefusal):
    """A budget forbids it."""

    code = RefusalCode.BUDGET


class ApiUnavailable(ApiRefusal):
    """Something the daemon needs does not answer; the same request may succeed later."""

    code = RefusalCode.UNAVAILABLE
