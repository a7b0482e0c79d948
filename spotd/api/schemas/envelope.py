"""What each answer of the API holds."""

from __future__ import annotations

from typing import TypedDict


class Answer(TypedDict, total=False):
    """What each answer holds: the version of its schema, and the daemon's time. Handlers leave both out."""

    schema: int
    now: str
