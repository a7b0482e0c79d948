"""JSON of untrusted origin: decoded without losing a whole page to one bad value, and put into shape at the edge."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Final, Generic, Protocol, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import from_json

from spotd_providers.contract.errors import Unavailable
from spotd_providers.contract.values import AttemptKey, InstanceId, MicroUsd, ProviderCharge, Rejected, micro_usd

# Packed answers, unpacked within a bound: a thousandth of the bytes on the line is enough to fill a small computer.
#
# An unpacked answer costs more once it is parsed: an empty list takes three bytes of JSON and sixty of memory. So the
# number of values is bounded, too, before any parser sees it.


PIECE_BYTES: Final = 256 * 1024
VALUES_MAX: Final = 1_500_000
"""Three times what a market of five thousand offers of a hundred fields has."""
_GZIP_OR_ZLIB: Final = zlib.MAX_WBITS | 32


class BodyTooLarge(Exception):
    """An answer that is larger than any that makes sense, or packed in a way that was not asked for."""


def require_few_values(body: bytes) -> None:
    """Require that a JSON text holds no more values than can be parsed.

    Raises:
        ValueError: it has more.
    """
    if body.count(b",") + body.count(b"[") + body.count(b"{") > VALUES_MAX:
        raise ValueError(f"more than {VALUES_MAX} values")


class Inflate:
    """A converter from pieces of the line to pieces of the body, of which there may be `bytes_max` bytes.

    Raises:
        BodyTooLarge: at once for an unknown packing, later beyond `bytes_max` or for a torn body.
    """

    def __init__(self, encoding: str, *, bytes_max: int) -> None:
        word = encoding.strip().lower()
        if word not in ("", "identity", "gzip", "x-gzip", "deflate"):
            raise BodyTooLarge("the answer is packed in a way that was not asked for")
        self._is_packed = word not in ("", "identity")
        self._left = bytes_max
        self._fed = False
        self._one = zlib.decompressobj(_GZIP_OR_ZLIB)

    def __call__(self, raw: bytes) -> Iterator[bytes]:
        for piece in self._unpacked(raw) if self._is_packed else (raw,):
            self._left -= len(piece)
            if self._left < 0:
                raise BodyTooLarge("the answer is larger than any that makes sense")
            if piece:
                yield piece

    def finish(self) -> None:
        """Raise `BodyTooLarge` if a packed body ended in the middle; of a plain one HTTP itself states the length."""
        if self._fed and not self._one.eof:
            raise BodyTooLarge("the packed answer ends in the middle")

    def _unpacked(self, raw: bytes) -> Iterator[bytes]:
        rest = raw
        self._fed = self._fed or bool(raw)
        while rest:
            if self._one.eof:
                self._one = zlib.decompressobj(_GZIP_OR_ZLIB)  # a gzip body may have several members
            try:
                piece = self._one.decompress(rest, PIECE_BYTES)
            except zlib.error as exc:
                raise BodyTooLarge("the answer cannot be unpacked") from exc
            rest = self._one.unused_data if self._one.eof else self._one.unconsumed_tail
            yield piece


REASON_CHARS_MAX: Final = 200
ROWS_MAX: Final = 20_000
"""Rows of one list that are judged; no marketplace has shown more than a few thousand."""
REASONS_MAX: Final = 2_000
"""Reasons of rejected rows that are kept; of the others only how many there are."""
TIME_CHARS_MAX: Final = 40
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


def parse_instant(value: Any) -> datetime:
    """Parse a time with its zone, written as ISO 8601.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, str) or len(value) > TIME_CHARS_MAX:
        raise ValueError("not a time")
    instant = datetime.fromisoformat(value)
    if instant.tzinfo is None:
        raise ValueError("a time without a zone")
    return instant


Instant = Annotated[datetime, BeforeValidator(parse_instant)]


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


def readable_rows(model: type[_M], raw: Iterable[Any]) -> list[_M]:
    """Parse rows of which those that are not valid may be left out: never those of machines, which bill on."""
    return [row for row in (row_or_none(model, one) for one in raw) if row is not None]


def row_or_reason(model: type[_M], raw: Any, *, offer_id: str) -> _M | Rejected:
    """Parse one row of what is sold, or say what is wrong with it."""
    if not is_small(raw):
        return Rejected(offer_id=offer_id, reason="it holds more values than any row has")
    try:
        return model.model_validate(raw)
    except ValidationError as exc:
        return Rejected(offer_id=offer_id, reason=first_fault(exc))


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


# Charges from a provider's own records.


DOLLARS: Final = "USD"
"""What a row is in that names no currency."""
CHARGE_ROWS_MAX: Final = 50_000
TOTAL: Final = "total"


def require_few_charges(rows: int, *, who: str) -> None:
    """Require that a bill has no more rows than are judged: of a part of it nothing could be concluded.

    Raises:
        Unavailable: it has more.
    """
    if rows > CHARGE_ROWS_MAX:
        raise Unavailable(f"{who} answered with a bill of more than {CHARGE_ROWS_MAX:,} rows, which no account has")


def signed_micro_usd(amount: float) -> int:
    """Convert a figure that may be a debt or a refund to micro-dollars, rounded away from zero."""
    return micro_usd(amount) if amount >= 0 else -micro_usd(-amount)


def charges_of(
    key: AttemptKey,
    machine: str,
    start: datetime,
    end: datetime,
    *,
    total: float,
    parts: Sequence[tuple[str, float]],
    rounding: float,
    currency: str | None = None,
) -> list[ProviderCharge]:
    """Return one charge per kind of part, or one `total` where there are no parts or they do not add up to it."""
    adds_up = abs(sum(amount for _, amount in parts) - total) <= max(rounding, abs(total) / 1000)
    by_kind: dict[str, float] = {}
    for kind, amount in parts:
        by_kind[kind] = by_kind.get(kind, 0.0) + amount
    return [
        ProviderCharge(
            key=key,
            instance_id=InstanceId(machine),
            start=start,
            end=end,
            amount=MicroUsd(signed_micro_usd(amount)),
            kind=kind,
            currency=(currency or DOLLARS).upper(),
        )
        for kind, amount in (by_kind.items() if parts and adds_up else [(TOTAL, total)])
    ]
