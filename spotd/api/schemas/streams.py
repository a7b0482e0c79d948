"""Log lines and events, as JSON."""

from __future__ import annotations

from typing import Literal, TypedDict

LogKind = Literal["log", "attempt", "gap", "transfer", "end"]


class LogResponse(TypedDict):
    """A piece of a job's log stream.

    Attributes:
        kind: `log` is output of the user's command (`text` as it was written, line ends included);
            `attempt` is a marker before the first output of an attempt (`text` a sentence, for instance where it runs);
            `gap`: output is missing here; `transfer` states in a sentence how far a checkpoint has come that
            takes a while, where the log is followed; `end` is the last record of an ended stream; its text
            sums a job up whose log was followed to its end.
        cursor: give it back as `after` to go on behind this record.
        state, exit_code: of the job, in `end` only, else null.
    """

    kind: LogKind
    cursor: str
    attempt: int
    at: str | None
    text: str
    state: str | None
    exit_code: int | None


class EventResponse(TypedDict):
    """Something happened, and why. `id` grows; give it back as `after`."""

    id: int
    at: str
    kind: str
    message: str
    job: str | None
    job_name: str | None
    attempt: int | None
    data: dict[str, str | int | float | bool | None]
