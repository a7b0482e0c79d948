"""A checkpoint as the daemon accepted it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

OF_ANOTHER_JOB: Final = 0
"""The number of no attempt: a checkpoint that the job did not write itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint whose manifest the daemon verified and accepted.

    Attributes:
        attempt: which try of the job wrote it; `OF_ANOTHER_JOB` where the job begins from another job's.
        sha256: of the manifest's bytes.
        metric: what the job measured with it, where the job names a metric and the checkpoint holds it.
        pinned: its owner keeps it, whatever `keep` is.
        worked: the work in it, as time on a machine of speed 1.0, where the job's owner states how much there is.
        host: where it was written, if the provider names hosts.
        proven_by: the attempt that resumed from it and got further.
        doubted_by: attempts that resumed from it and failed without getting further, oldest first.
    """

    name: str
    attempt: int
    step: int | None
    bytes: int
    at: datetime
    manifest_key: str
    sha256: str
    metric: float | None = None
    pinned: bool = False
    host: str = ""
    proven_by: int | None = None
    doubted_by: tuple[int, ...] = ()
    worked: timedelta | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackRestore:
    """A checkpoint that an attempt should have begun from and could not. `next` is what came after it, if anything."""

    name: str
    reason: str
    next: str | None
