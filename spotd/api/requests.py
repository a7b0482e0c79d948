"""What a request asks for, as values that the handlers take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, Final

from spotd.api.queries import Between, OneOf
from spotd.core.domain.states import JobState
from spotd.store import CostGrouping
from spotd_jobs.spec.arrays import INDEX_MAX
from spotd_providers.contract.values import Market


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequest:
    """A job as the user wrote it, not validated: a `DraftBody` with all of its keys."""

    data: Mapping[str, Any]
    flags: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    base_dir: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A job to be queued: a `SubmitBody` with all of its keys."""

    draft: JobRequest
    code_sha256: str | None = None
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    resume_from: str = ""
    i_know: bool = False
    agent: bool = False
    array: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetChange:
    """What a job may cost: so many micro-dollars, or so many more than before."""

    amount: int
    is_added: bool = False


COUNT_MAX: Final = 1_000_000
EVERY_S_MAX: Final = 366 * 86_400
Count = Annotated[int, Between(least=1, most=COUNT_MAX)]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobQuery:
    """Which jobs `ls` shows: none of the filters means all. Jobs that are not final are never cut off by `limit`.

    Attributes:
        array: only jobs of this array, by its id or name.
    """

    state: Annotated[tuple[JobState, ...], OneOf("no job is ever in a state")] = ()
    array: str = ""
    active: bool = False
    limit: Count = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryQuery:
    """How a job, or some of the jobs of an array, are queued again.

    Attributes:
        anyway: also a job that succeeded.
        start: the index of an array to go on from.
    """

    anyway: bool = False
    start: Annotated[int, Between(least=0, most=INDEX_MAX + 1)] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CostQuery:
    """What costs are added up by; receipts are wanted where that is not given."""

    by: Annotated[CostGrouping | None, OneOf("costs are not added up by")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationQuery:
    """Which checkpoints are read and checked: those named, or all, else the newest."""

    checkpoint: tuple[str, ...] = ()
    all: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesQuery:
    """Of which checkpoint the files are meant; the outputs where none is given."""

    checkpoint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FileQuery:
    """Which file of a checkpoint, or of the outputs."""

    path: str
    checkpoint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentsQuery:
    """Which files of a manifest, by their places in its list.

    Attributes:
        manifest: SHA-256 of the manifest whose list is meant.
        files: spans of the list such as `0-17,20-20`.
    """

    manifest: str
    files: str
    checkpoint: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceQuery:
    """Which quotes `prices` shows. `gpu` is as the user spelled it; priced for one GPU-hour with `disk_gb`.

    Attributes:
        job: one for which the expected cost to finish is stated besides.
    """

    gpu: str | None = None
    provider: str | None = None
    job: str | None = None
    limit: Count = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryQuery:
    """Which prices of the past `history` shows. `gpu` is as the user spelled it.

    Attributes:
        since, until: the last seven days where they are not given.
        every_s: length of a bucket; chosen to suit the range where it is not given.
    """

    gpu: str | None = None
    provider: str | None = None
    market: Annotated[Market | None, OneOf("there is no market")] = None
    offer: str | None = None
    pool: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    every_s: Annotated[int | None, Between(least=60, most=EVERY_S_MAX)] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogQuery:
    """Which part of a job's log.

    Attributes:
        after: a cursor of an earlier record; nothing before or at it is sent again.
        tail: begin so many lines before the end instead of at the beginning, where it is given.
        attempt: only this attempt.
        follow: go on until the job is final and everything it wrote was sent.
    """

    after: str | None = None
    tail: Annotated[int | None, Between(least=0, most=COUNT_MAX)] = None
    attempt: Annotated[int | None, Between(least=1, most=COUNT_MAX)] = None
    follow: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EventQuery:
    """Which events, oldest first.

    Attributes:
        after: only those with a greater id.
        since: only those at or after this instant.
        kind: only these kinds; a word without a dot, such as `checkpoint`, means each that begins with it.
        limit: the newest so many of those that match, before following begins.
    """

    after: Annotated[int | None, Between(least=0, most=10**18)] = None
    since: datetime | None = None
    job: str | None = None
    kind: tuple[str, ...] = ()
    limit: Annotated[int, Between(least=0, most=COUNT_MAX)] = 1000
    follow: bool = False
