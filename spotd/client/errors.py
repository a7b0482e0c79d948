"""The two ways a call to the daemon fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientProblem:
    """One thing wrong in what the user wrote; `key` is dotted, empty for the whole."""

    key: str
    message: str
    hint: str


class ClientError(Exception):
    """A request that was not fulfilled. The message ends without a full stop; `hint` is a way out or empty.

    As text it is all three on lines of their own, so that a notebook's traceback says what to change.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.rows: Sequence[tuple[str, str]] = ()
        """What is wrong in what the user wrote, a sentence and its way out each."""

    def __str__(self) -> str:
        rows = [f"  {sentence}{f' ({way_out})' if way_out else ''}" for sentence, way_out in self.rows]
        return "\n".join([self.message, *rows, *([f"hint: {self.hint}"] if self.hint else [])])


class DaemonUnreachable(ClientError):
    """No answer, or none that can be understood. Whether the request arrived is unknown."""


class DaemonRefused(ClientError):
    """A refusal of the daemon; `code` is one of the API's closed set."""

    def __init__(self, message: str, *, code: str, hint: str = "", problems: Sequence[ClientProblem] = ()) -> None:
        super().__init__(message, hint=hint)
        self.code = code
        self.problems = tuple(problems)
        self.rows = [(f"{one.key}: {one.message}" if one.key else one.message, one.hint) for one in problems]


UNKNOWN_KEY = "holds the unknown key"
OLDER = "the daemon is older than this client: restart it, and it is the version that is installed now"


def refused(error: Mapping[str, Any]) -> DaemonRefused:
    """Return the refusal in an answer's `error` object, however incomplete that object is."""
    rows = error.get("problems")
    problems = [
        ClientProblem(key=str(row.get("key", "")), message=str(row.get("message", "")), hint=str(row.get("hint", "")))
        for row in (rows if isinstance(rows, list) else [])
        if isinstance(row, dict)
    ]
    message = str(error.get("message") or "the daemon refused without saying why")
    return DaemonRefused(
        message,
        code=str(error.get("code", "internal")),
        hint=OLDER if UNKNOWN_KEY in message else str(error.get("hint", "")),
        problems=problems,
    )
