"""What each answer of the API holds, and each refusal."""

from __future__ import annotations

from typing import TypedDict


class Answer(TypedDict, total=False):
    """What each answer holds: the version of its schema, and the daemon's time. Handlers leave both out."""

    schema: int
    now: str


class Spending(TypedDict):
    """What something cost by now.

    Attributes:
        estimated: for a part of it no provider's own bill is known: it follows from what was observed.
    """

    spent_usd: float
    estimated: bool


class ProblemResponse(TypedDict):
    """One thing wrong in what the user wrote. `key` is the dotted key of the job file, empty for the whole."""

    key: str
    message: str
    hint: str


class ErrorResponse(TypedDict):
    code: str
    message: str
    hint: str
    problems: list[ProblemResponse]
