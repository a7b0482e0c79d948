"""Refusals, as JSON."""

from __future__ import annotations

from typing import TypedDict


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
