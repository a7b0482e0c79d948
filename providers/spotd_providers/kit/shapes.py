"""JSON of untrusted origin: decoded without losing a whole page to one bad value, and put into shape at the edge."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import from_json

from spotd_providers.contract.errors import Unavailable
from spotd_providers.contract.values import Rejected
from spotd_providers.kit.inflate import require_few_values

REASON_CHARS_MAX: Final = 200
_M = TypeVar("_M", bound=BaseModel)


class HasId(Protocol):
    """A row with an id."""

    @property
    def id(self) -> Any: ...


_R = TypeVar("_R", bound=HasId)


def _none_if_odd(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    try:
        return handler(value)
    except ValidationError:
        return None


Lenient: Final = WrapValidator(_none_if_odd)
"""In an annotation: a value that does not fit is unknown (`None`), not an error."""


class Row(BaseModel):
    """One object of an answer: strict, immutable; fields that are not used are ignored."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


def row_or_none(model: type[_M], raw: Any) -> _M | None:
    """Parse one row; `None` if it is not valid."""
    try:
        return model.model_validate(raw)
    except ValidationError:
        return None


@dataclass(frozen=True, slots=True)
class Rows(Generic[_R]):
    """The rows of one answer that can be understood, and the others with their reasons."""

    rows: tuple[_R, ...]
    rejected: tuple[Rejected, ...]

    @property
    def count(self) -> int:
        return len(self.rows) + len(self.rejected)


def distinct_rows(found: Iterable[_R | Rejected], *, what: str) -> Rows[_R]:
    """Sort out what was rejected, and what is there twice."""
    good: list[_R] = []
    rejected: list[Rejected] = []
    seen: set[Any] = set()
    for row in found:
        if isinstance(row, Rejected):
            rejected.append(row)
        elif row.id in seen:
            rejected.append(Rejected(offer_id=str(row.id), reason=f"the same {what} twice in one answer"))
        else:
            seen.add(row.id)
            good.append(row)
    return Rows(tuple(good), tuple(rejected))


def decode_or_none(body: bytes, *, who: str) -> Any:
    """Decode the JSON of a body; `None` if it is none."""
    try:
        return decode(body, who=who)
    except Unavailable:
        return None


def decode(body: bytes, *, who: str) -> Any:
    """Decode the JSON of a body. NaN and infinities survive this step, so that they cost their row only.

    Raises:
        Unavailable: not JSON, or too much of it.
    """
    try:
        require_few_values(body)
    except ValueError as exc:
        raise Unavailable(f"{who} answered {exc}, which is no answer that makes sense") from exc
    try:
        return from_json(body, cache_strings="keys")
    except ValueError:
        pass
    try:
        # The strict parser refuses a whole page for one lone surrogate; this one lets the row's validator see it.
        return json.loads(body)
    except (ValueError, RecursionError) as exc:
        raise Unavailable(f"{who} answered {len(body)} bytes that are not JSON") from exc


def as_model(model: type[_M], value: Any, *, who: str, what: str) -> _M:
    """Validate the value as this model.

    Raises:
        Unavailable: it has another shape, so it proves nothing.
    """
    try:
        return model.model_validate(value)
    except ValidationError as exc:
        raise Unavailable(f"{who}'s answer about {what} has an unknown shape: {first_fault(exc)}") from exc


def first_fault(exc: ValidationError) -> str:
    """Return the first invalid field and its error; never the value, which may be anything."""
    fault = exc.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in fault["loc"]) or "row"
    return f"{where}: {fault['msg']}"[:REASON_CHARS_MAX]
