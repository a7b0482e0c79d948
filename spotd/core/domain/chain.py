"""What connects a job with others: the jobs that come before it, what it reads of theirs, and its array."""

from __future__ import annotations

from dataclasses import dataclass

from spotd.core.domain.ids import JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInput:
    """Outputs of another job that this one reads: a manifest, known by the hash of its bytes.

    Attributes:
        name: of the other job, and of the folder in which its outputs are read.
    """

    job: JobId
    name: str
    attempt: int
    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The jobs that must have succeeded before this one runs.

    Attributes:
        inputs: what they left, known from the moment at which all of them had succeeded; `None` until then.
    """

    after: tuple[JobId, ...]
    inputs: tuple[JobInput, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayTask:
    """The place of a job in its array.

    Attributes:
        id, name: of the array; the job's own name is this one and its index.
        count: how many jobs the array has.
        at_once: how many of them may have a machine at one time; `None` for no limit.
    """

    id: JobId
    name: str
    index: int
    count: int
    at_once: int | None = None
