"""JSON of untrusted origin: decoded without losing a whole page to one bad value, and put into shape at the edge."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, ValidatorFunctionWrapHandler, WrapValidator
from pydantic_core import from_json

from spotd_providers.contract.errors import Unavailable
from spotd_providers.contract.values import Rejected
from spotd_providers.kit.inflate import require_few_values

REASON_CHARS_MAX: Final = 200
ROWS_MAX: Final = 20_000
"""Rows of one list that are judged; no marketplace has shown more than a few thousand."""
REASONS_MAX: Final = 2_000
"""Reasons of rejected rows that are kept; of the others only how many there are."""
ROW_VALUES_MAX: Final = 5_000
"""Values in one row. A row has a hundred; each that does not fit costs an error in memory."""
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
    """Parse one row; `None` if it is not valid, or holds more values than any row has."""
    if not is_small(raw):
        return None
    try:
        return model.model_validate(raw)
    except ValidationError:
        return None


@dataclass(frozen=True, slots=True)
class Rows(Generic[_R]):
    """The rows of one answer that can be understood, and the others with their reasons."""

    rows: tuple[_R, ...]
    rejected: tuple[Rejected, ...]
    judged: int = 0
    """How many rows were judged, those without a reason that is kept among them."""
    is_cut: bool = False
    """Whether there were more."""

    @property
    def count(self) -> int:
        return max(self.judged, len(self.rows) + len(self.rejected))


def is_small(raw: Any) -> bool:
    """Whether one row holds no more values than can be judged."""
    count, waiting = 0, [raw]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict | list):
            count += len(value)
            if count > ROW_VALUES_MAX:
                return False
            waiting.extend(
                one for one in (value.values() if isinstance(value, dict) else value) if isinstance(one, dict | list)
            )
    return True


def listed_reasons(rejected: Sequence[Rejected]) -> tuple[Rejected, ...]:
    """Return the reasons that are kept; the last says how many are not."""
    if len(rejected) <= REASONS_MAX:
        return tuple(rejected)
    more = f"and {len(rejected) - REASONS_MAX + 1:,} more rows that cannot be used"
    return (*rejected[: REASONS_MAX - 1], Rejected(offer_id="more", reason=more))


def distinct_rows(found: Iterable[_R | Rejected], *, what: str) -> Rows[_R]:
    """Sort out what was rejected, and what is there twice; no more than `ROWS_MAX` rows are taken."""
    good: list[_R] = []
    rejected: list[Rejected] = []
    seen: set[Any] = set()
    judged, is_cut = 0, False
    for row in found:
        if judged == ROWS_MAX:
            is_cut = True
            rejected.insert(0, Rejected(offer_id="more", reason=f"rows after the first {ROWS_MAX:,} are not judged"))
            break
        judged += 1
        if isinstance(row, Rejected):
            rejected.append(row)
        elif row.id in seen:
            rejected.append(Rejected(offer_id=str(row.id), reason=f"the same {what} twice in one answer"))
        else:
            seen.add(row.id)
            good.append(row)
    return Rows(tuple(good), listed_reasons(rejected), judged=judged, is_cut=is_cut)


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
