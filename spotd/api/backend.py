"""What the API needs of the daemon, and the closed set of ways it can say no.

Theory. The application in `app` turns HTTP into these calls and their results into JSON; it adds `schema` and `now`,
and holds no state. A `Backend` returns the shapes of `shapes` (JSON-ready) and raises nothing but `ApiRefusal` leaves
for what it expects. While `last_error()` is not empty, the application answers 503 by itself instead of waiting.

The iterators that `logs`, `events` and `read_file` return are stepped from one task after another and closed when the
reader goes: a generator behind them must not yield inside a task group or a cancel scope.

A job reference (`ref`) is an id, a name or a unique prefix of an id; `refs.resolve` is the one rule for it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Protocol

from spotd.api.schemas.checkpoints import KeptCheckpointResponse, VerificationResponse
from spotd.api.schemas.costs import CostResponse
from spotd.api.schemas.files import FilesResponse
from spotd.api.schemas.health import DoctorResponse, ProviderResponse, ReconcileResponse, StatusResponse
from spotd.api.schemas.jobs import ForgottenResponse, JobDetailResponse, JobPageResponse, JobResponse
from spotd.api.schemas.plans import CodeResponse, PlanResponse, WhyResponse
from spotd.api.schemas.prices import HistoryResponse, PricesResponse
from spotd.api.schemas.streams import EventResponse, LogResponse


class RefusalCode(StrEnum):
    """Why a wish was not fulfilled. The strings are part of the JSON output."""

    NOT_FOUND = "not_found"
    AMBIGUOUS = "ambiguous"
    INVALID = "invalid"
    CONFLICT = "conflict"
    BUDGET = "budget"
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True, kw_only=True)
class InputProblem:
    """One thing wrong in what the user wrote; `key` is dotted (`resources.gpu`), empty for the whole."""

    key: str
    message: str
    hint: str = ""


class ApiRefusal(Exception):
    """A wish was not fulfilled, and nothing changed. The message is for the user and ends without a full stop."""

    code: RefusalCode

    def __init__(self, message: str, *, hint: str = "", problems: tuple[InputProblem, ...] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.problems = problems


class NotFound(ApiRefusal):
    """No job, checkpoint or file of this name."""

    code = RefusalCode.NOT_FOUND


class Ambiguous(ApiRefusal):
    """The reference means several jobs; the hint lists them."""

    code = RefusalCode.AMBIGUOUS


class Invalid(ApiRefusal):
    """The job or a parameter is wrong; `problems` says where."""

    code = RefusalCode.INVALID


class StateConflict(ApiRefusal):
    """The job is in no state for this (cancel of an ended one, retry of a running one, a name in use)."""

    code = RefusalCode.CONFLICT


class OverBudget(ApiRefusal):
    """A budget forbids it."""

    code = RefusalCode.BUDGET


class ApiUnavailable(ApiRefusal):
    """Something the daemon needs does not answer; the same wish may be fulfilled later."""

    code = RefusalCode.UNAVAILABLE


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
        code_sha256: of a code archive that `put_code` took, `None` for a job without a workdir.
        secrets: values by name; they go to the secret store and nowhere else.
        resume_from: `JOB` or `JOB:CHECKPOINT` of another job to begin from, empty to begin afresh.
    """

    draft: JobRequest
    code_sha256: str | None = None
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    resume_from: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetChange:
    """What a job may cost: so many micro-dollars, or so many more than before."""

    amount: int
    is_added: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class JobQuery:
    """Which jobs `ls` shows: none of the filters means all. Jobs that are not final are never cut off by `limit`."""

    states: frozenset[str] = frozenset()
    active_only: bool = False
    limit: int = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceQuery:
    """Which quotes `prices` shows. `gpu` is as the user spelled it; priced for one GPU-hour with `disk_gb`."""

    gpu: str | None = None
    provider: str | None = None
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


class Backend(Protocol):
    """The daemon as its API sees it."""

    def now(self) -> datetime:
        """The daemon's clock, aware UTC; ages on screen are measured against it."""
        ...

    def last_error(self) -> str:
        """Empty while the state store answers, else one sentence. Never blocks."""
        ...

    async def status(self) -> StatusResponse: ...

    async def plan(self, draft: JobRequest, resume_from: str = "") -> PlanResponse:
        """What submitting would do; changes nothing.

        Raises:
            Invalid: with every problem found, not only the first.
            NotFound: there is no such job or checkpoint to resume from.
        """
        ...

    async def has_code(self, sha256: str) -> bool:
        """Whether the store holds this archive already."""
        ...

    async def put_code(self, sha256: str, stream: AsyncIterator[bytes]) -> CodeResponse:
        """The archive is in the store under its hash; stored once however often it comes.

        Raises:
            Invalid: the bytes have another hash.
            Unavailable: the store does not answer or is full.
        """
        ...

    async def submit(self, submission: Submission) -> JobDetailResponse:
        """The job is queued, durably.

        Raises:
            Invalid: the draft is wrong, a secret is missing, or the code was not put before.
            NotFound: there is no such job or checkpoint to resume from.
            StateConflict: an unfinished job has this name.
            OverBudget: it can never run within the budgets.
        """
        ...

    async def jobs(self, query: JobQuery) -> JobPageResponse: ...

    async def job(self, ref: str) -> JobDetailResponse: ...

    async def why(self, ref: str) -> WhyResponse: ...

    def logs(self, ref: str, query: LogQuery) -> AsyncIterator[LogResponse]:
        """The records, the last of kind `end`. Raises `NotFound` at the first step, before any record."""
        ...

    async def cancel(self, ref: str) -> JobResponse:
        """The job is cancelled or being cancelled; a second cancel changes nothing and succeeds.

        Raises:
            StateConflict: it ended otherwise already.
        """
        ...

    async def retry(self, ref: str, *, anyway: bool = False) -> JobResponse:
        """A final job is queued again and will resume from its newest checkpoint.

        Args:
            anyway: also where it succeeded, or where its machine said so.

        Raises:
            StateConflict: it is not final, or succeeded and `anyway` is not set, or its secrets are gone.
        """
        ...

    async def set_budget(self, ref: str, change: BudgetChange) -> JobResponse:
        """All attempts of the job together may cost so much; it may have ended, and go on after a retry.

        Raises:
            Invalid: there is no budget to add to.
        """
        ...

    async def forget(self, machine: str) -> ForgottenResponse:
        """The machine, by its id, its key or `JOB-NUMBER`, is given up although its end was not seen.

        Raises:
            NotFound: no such machine is known.
            StateConflict: it can be seen, and therefore ended.
        """
        ...

    async def prices(self, query: PriceQuery) -> PricesResponse: ...

    async def history(self, query: HistoryQuery) -> HistoryResponse:
        """What prices were.

        Raises:
            Invalid: an unknown GPU or provider, an empty range, too many buckets.
            Unavailable: the file of prices cannot be read now.
        """
        ...

    def events(self, query: EventQuery) -> AsyncIterator[EventResponse]:
        """The events; with `follow` it never ends by itself."""
        ...

    async def cost(self, ref: str | None) -> CostResponse:
        """The receipt of one job, or of all."""
        ...

    async def checkpoints(self, ref: str) -> list[KeptCheckpointResponse]:
        """Accepted checkpoints, newest first."""
        ...

    def verify_checkpoints(self, ref: str, names: Sequence[str], *, every: bool) -> AsyncIterator[VerificationResponse]:
        """Every byte of these is read and compared; the newest without names. Raises `NotFound` at the first step."""
        ...

    async def pin_checkpoints(self, ref: str, names: Sequence[str], *, pinned: bool) -> list[KeptCheckpointResponse]:
        """These stay whatever `keep` says, or do not any more; returns them as they are now.

        Raises:
            NotFound: no such checkpoint, and nothing was changed.
        """
        ...

    async def remove_checkpoints(self, ref: str, names: Sequence[str]) -> list[KeptCheckpointResponse]:
        """The job never resumes from these, and what only they need is deleted soon; returns what they were.

        Raises:
            NotFound: no such checkpoint, and nothing was changed.
            StateConflict: one is pinned, or a machine may still read it.
        """
        ...

    async def files(self, ref: str, checkpoint: str | None) -> FilesResponse:
        """What `pull` can fetch: the outputs, or one checkpoint by name (`newest` is the newest).

        Raises:
            NotFound: there is no such checkpoint, or there are no outputs (yet).
        """
        ...

    def read_file(self, ref: str, checkpoint: str | None, path: str) -> AsyncIterator[bytes]:
        """The bytes of one of these files, verified. Raises `NotFound` at the first step, before any byte."""
        ...

    def read_files(
        self, ref: str, checkpoint: str | None, manifest: str, spans: Sequence[tuple[int, int]]
    ) -> AsyncIterator[bytes]:
        """The bytes of many of these files one behind the other, verified; of what is no file there are none.

        Args:
            manifest: the hash of the list that is meant.
            spans: places in the list, first and last.

        Raises:
            NotFound: at the first step: there is no such file.
            StateConflict: at the first step: there is another list by now.
        """
        ...

    async def providers(self) -> list[ProviderResponse]: ...

    async def doctor(self) -> DoctorResponse:
        """Every check, each within its own time limit; a finding is a row, never an exception."""
        ...

    async def reconcile(self) -> ReconcileResponse:
        """Every provider was asked for its machines now, and what follows is committed."""
        ...
