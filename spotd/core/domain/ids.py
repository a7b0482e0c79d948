"""What names a job, an attempt and an intent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

JobId = NewType("JobId", str)
IntentId = NewType("IntentId", str)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptId:
    """Which try of which job; attempts count from 1."""

    job: JobId
    number: int
