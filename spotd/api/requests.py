"""What a request asks for, as values that the handlers take."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

from starlette.requests import Request

from spotd.api.responses import Invalid
from spotd.core.domain.states import JobState
from spotd.store import CostGrouping
from spotd_jobs.spec.parse import INDEX_MAX
from spotd_providers.contract.values import Market

# Instants as the API writes and reads them.


def utc_text(instant: datetime) -> str:
    """Return ISO 8601 in UTC, ending in `Z`, to the millisecond.

    Raises:
        ValueError: the instant names no time zone.
    """
    if instant.tzinfo is None:
        raise ValueError("an instant without a time zone")
    return instant.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def instant(at: datetime | None) -> str | None:
    return None if at is None else utc_text(at)


def utc_instant(text: str) -> datetime:
    """Return the aware instant of an ISO 8601 text that names its zone.

    Raises:
        ValueError: not one.
    """
    instant = datetime.fromisoformat(text)
    if instant.tzinfo is None:
        raise ValueError("an instant without a time zone")
    return instant.astimezone(UTC)


# The parameters of a query, read as the fields of a value, which alone state their names, bounds and defaults.


Parameters = Mapping[str, "QueryParameter"]
Q = TypeVar("Q")
_FLAGS: Final = {"0": False, "1": True}
_UNIONS: Final = (Union, types.UnionType)


@dataclass(frozen=True, slots=True, kw_only=True)
class Between:
    """The bounds of a whole number."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class OneOf:
    """How a value that is none of an enum's is refused; the value follows these words."""

    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryParameter:
    """One parameter of a query.

    Attributes:
        kind: `str`, `int`, `bool`, `datetime` or a `StrEnum`.
        is_repeated: it may be given several times.
        refusal: the words for a value that is none of the enum's.
    """

    name: str
    kind: type
    is_required: bool
    is_repeated: bool
    bounds: Between | None
    refusal: str

    def value(self, text: str) -> object:
        """Return what this text means.

        Raises:
            Invalid: it means nothing here.
        """
        if self.bounds is not None:
            least, most = self.bounds.least, self.bounds.most
            if not text.isascii() or not text.isdecimal() or not least <= int(text[:20]) <= most:
                raise Invalid(f"the parameter {self.name} must be a whole number from {least} to {most}")
            return int(text)
        if self.kind is bool:
            if text not in _FLAGS:
                raise Invalid(f"the parameter {self.name} must be 0 or 1")
            return _FLAGS[text]
        if self.kind is datetime:
            try:
                return utc_instant(text)
            except (ValueError, OverflowError) as exc:
                raise Invalid(f"the parameter {self.name} must be an instant such as 2026-11-21T10:00:00Z") from exc
        if issubclass(self.kind, StrEnum) and text not in set(self.kind):
            raise Invalid(f"{self.refusal} {text!r}", hint=f"one of {', '.join(self.kind)}")
        return self.kind(text)


def read_query(request: Request, kind: type[Q]) -> Q:
    """Return the query of a request as this dataclass.

    Raises:
        Invalid: a parameter is unknown, missing, given twice, or means nothing.
    """
    hashable: Any = kind  # mypy does not take a type[Q] for one
    parameters = query_parameters(hashable)
    require_known(request, parameters)
    given: dict[str, Any] = {}
    for name, parameter in parameters.items():
        texts = request.query_params.getlist(name)
        if parameter.is_required and not any(texts):
            raise Invalid(f"the parameter {name} is missing")
        if parameter.is_repeated:
            given[name] = tuple(dict.fromkeys(parameter.value(text) for text in texts))
        elif len(texts) > 1:
            raise Invalid(f"the parameter {name} is given twice")
        elif texts:
            given[name] = parameter.value(texts[0])
    return kind(**given)


def require_known(request: Request, known: Mapping[str, object]) -> None:
    """Require that the request has no other query parameters.

    Raises:
        Invalid: it has one.
    """
    for name in request.query_params:
        if name not in known:
            raise Invalid(f"unknown parameter {name!r}")


@cache
def query_parameters(kind: Any) -> Parameters:
    """Return the parameters that the fields of a dataclass stand for, by name."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        field.name: _parameter(field.name, hints[field.name], is_required=field.default is MISSING)
        for field in fields(kind)
    }


def _parameter(name: str, hint: Any, *, is_required: bool) -> QueryParameter:
    marks: tuple[object, ...] = ()
    if get_origin(hint) is Annotated:
        hint, *rest = get_args(hint)
        marks = tuple(rest)
    is_repeated = get_origin(hint) is tuple
    kinds = get_args(hint) if is_repeated or get_origin(hint) in _UNIONS else (hint,)
    return QueryParameter(
        name=name,
        kind=kinds[0],
        is_required=is_required,
        is_repeated=is_repeated,
        bounds=next((mark for mark in marks if isinstance(mark, Between)), None),
        refusal=next((mark.words for mark in marks if isinstance(mark, OneOf)), ""),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderContent:
    """What a folder of the submitting machine holds; `sha256` once that is in the store."""

    bytes: int
    files: int
    sha256: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDraft:
    """A job as the user wrote it, not validated: a `DraftBody` with all of its keys."""

    data: Mapping[str, Any]
    flags: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    base_dir: str = ""
    folders: Mapping[str, FolderContent] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A job to be queued: a `SubmitBody` with all of its keys."""

    draft: JobDraft
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
