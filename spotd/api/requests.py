"""What a request asks for, as values that the handlers take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """A job as the user wrote it, not validated.

    Attributes:
        data: the job file as parsed from TOML (dates as ISO strings); empty without a file.
        flags: what was given by flags, in the same shape; a value here replaces the file's value of that key.
        source: the job file's path as the user wrote it, empty without one.
        base_dir: absolute folder that a relative `workdir` is relative to.
    """

    data: Mapping[str, Any]
    flags: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    base_dir: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A job to be queued.

    Attributes:
        code_sha256: of a code archive that `put_code` stored, `None` for a job without a workdir.
        secrets: values by name; they go to the secret store and nowhere else.
        resume_from: `JOB` or `JOB:CHECKPOINT` of another job to begin from, empty to begin afresh.
        i_know: its owner knows that it may lose everything.
        array: indexes of an array of such jobs, as in `0-15%4`; empty for one job.
    """

    draft: JobRequest
    code_sha256: str | None = None
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    resume_from: str = ""
    i_know: bool = False
    array: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetChange:
    """What a job may cost: so many micro-dollars, or so many more than before."""

    amount: int
    is_added: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobQuery:
    """Which jobs `ls` shows: none of the filters means all. Jobs that are not final are never cut off by `limit`."""

    states: frozenset[str] = frozenset()
    array: str = ""
    """Only jobs of this array, by its id or name."""
    active_only: bool = False
    limit: int = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceQuery:
    """Which quotes `prices` shows. `gpu` is as the user spelled it; priced for one GPU-hour with `disk_gb`.

    `job` is one for which the expected cost to finish is stated besides.
    """

    gpu: str | None = None
    provider: str | None = None
    job: str | None = None
    limit: int = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryQuery:
    """Which prices of the past `history` shows. `gpu` is as the user spelled it.

    Attributes:
        since, until: the last seven days where they are not given.
        every_s: length of a bucket; chosen to suit the range where it is not given.
    """

    gpu: str | None = None
    provider: str | None = None
    market: str | None = None
    offer: str | None = None
    pool: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    every_s: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogQuery:
    """Which part of a job's log.

    Attributes:
        after: a cursor of an earlier record; nothing before or at it is sent again.
        tail: begin so many lines before the end instead of at the beginning (`None` is the beginning).
        attempt: only this attempt.
        follow: go on until the job is final and everything it wrote was sent.
    """

    after: str | None = None
    tail: int | None = None
    attempt: int | None = None
    follow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EventQuery:
    """Which events, oldest first.

    Attributes:
        after: only those with a greater id.
        since: only those at or after this instant.
        limit: the newest so many of those that match, before following begins.
    """

    after: int | None = None
    since: datetime | None = None
    job: str | None = None
    limit: int = 1000
    follow: bool = False
