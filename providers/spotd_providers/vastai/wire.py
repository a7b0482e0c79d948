"""vast.ai's answers, validated at the edge: strict, finite, bounded, and one row at a time.

Offers are parsed strictly, instances leniently. An *offer* row with anything odd in it is refused with a reason,
since a price that is not understood must not become a bid. An *instance* row is a machine that bills us:
whatever can be read of it is kept, since a row that is dropped is a machine that is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final

from pydantic import FailFast, Field, TypeAdapter, ValidationError

from spotd_providers.contract.errors import Unavailable
from spotd_providers.contract.values import Rejected
from spotd_providers.kit.inflate import require_few_values
from spotd_providers.kit.shapes import ROWS_MAX, Lenient, Row, Rows, decode, distinct_rows, first_fault, is_small

# Bounds are generous multiples of what the market has ever shown; beyond them a figure is a mistake or an attack.
UsdPerHour = Annotated[float, Field(gt=0, lt=10_000, allow_inf_nan=False)]
UsdPerUnit = Annotated[float, Field(ge=0, lt=1_000, allow_inf_nan=False)]
Measure = Annotated[float, Field(ge=0, lt=1e12, allow_inf_nan=False)]
Id = Annotated[int, Field(gt=0, lt=2**53)]
Text = Annotated[str, Field(max_length=512)]

WHO: Final = "vast.ai"


class OfferRow(Row):
    """One ask of a search answer; prices are for all GPUs of the offer. Odd fields of `_NICE_TO_KNOW` are unknown."""

    id: Id
    machine_id: Id
    gpu_name: Annotated[str, Field(min_length=1, max_length=128)]
    num_gpus: Annotated[int, Field(gt=0, le=1024)]
    gpu_ram: Annotated[float, Field(gt=0, lt=1e8, allow_inf_nan=False)]
    dph_base: UsdPerHour
    dph_total: Measure | None = None
    min_bid: Annotated[float, Field(ge=0, lt=10_000, allow_inf_nan=False)] | None = None
    storage_cost: UsdPerUnit
    inet_up_cost: UsdPerUnit
    inet_down_cost: UsdPerUnit
    duration: Annotated[float, Field(allow_inf_nan=False)] | None = None
    geolocation: Text | None = None
    cpu_arch: Text | None = None
    cpu_cores_effective: Measure | None = None
    cpu_ram: Measure | None = None
    disk_space: Measure | None = None
    cuda_max_good: Measure | None = None
    reliability2: Measure | None = None
    reliability: Measure | None = None
    inet_up: Measure | None = None
    inet_down: Measure | None = None
    direct_port_count: Annotated[int, Field(lt=2**31)] | None = None
    hosting_type: Annotated[int, Field(lt=2**31)] | None = None
    verification: Text | None = None
    rentable: bool | None = None
    rented: bool | None = None
    external: bool | None = None


class InstanceRow(Row):
    """One of the account's machines. The label decides whose it is; states that are not text are unknown states."""

    id: Id
    label: str | None = None
    actual_status: Annotated[str | None, Lenient] = None
    cur_state: Annotated[str | None, Lenient] = None
    next_state: Annotated[str | None, Lenient] = None
    intended_status: Annotated[str | None, Lenient] = None
    status_msg: Annotated[str | None, Lenient] = None
    is_bid: Annotated[bool | None, Lenient] = None
    machine_id: Annotated[Id | None, Lenient] = None
    num_gpus: Annotated[int | None, Lenient] = None
    dph_base: Annotated[UsdPerHour | None, Lenient] = None
    min_bid: Annotated[UsdPerHour | None, Lenient] = None
    start_date: Annotated[Measure | None, Lenient] = None
    end_date: Annotated[Measure | None, Lenient] = None


class CreateReply(Row):
    """The answer to a purchase, good or bad: `new_contract` may come with either."""

    new_contract: Annotated[Id | None, Lenient] = None


class InstancePage(Row):
    """One page of the v1 listing, its rows not yet parsed."""

    instances: list[Any]
    next_token: str | None = None
    total_instances: Annotated[int | None, Lenient] = None


class UserReply(Row):
    """The money of the account, and whether it is trusted. The answer may hold the key: nothing else of it is kept."""

    id: Annotated[int | None, Lenient] = None
    credit: Annotated[float, Field(allow_inf_nan=False, gt=-1e9, lt=1e9)] | None = None
    balance: Annotated[float, Field(allow_inf_nan=False, gt=-1e9, lt=1e9)] | None = None
    email_verified: Annotated[bool | int | None, Lenient] = None


class ChargeItem(Row):
    type: Text
    amount: Annotated[float, Field(allow_inf_nan=False, gt=-1e9, lt=1e9)]


class ChargeMetadata(Row):
    label: Text | None = None


class ChargeRow(Row):
    """A bill of one contract over a span of days, the last of which `end` begins where the description counts it in."""

    start: Measure
    end: Measure
    type: Text | None = None
    description: Annotated[Text | None, Lenient] = None
    currency: Annotated[str, Field(min_length=1, max_length=8)] | None = None
    source: Text
    amount: Annotated[float, Field(allow_inf_nan=False, gt=-1e9, lt=1e9)]
    metadata: ChargeMetadata | None = None
    items: list[ChargeItem] = Field(default_factory=list)


class ChargePage(Row):
    results: list[Any]
    next_token: str | None = None


class LogReply(Row):
    result_url: Annotated[str, Field(min_length=8, max_length=8192)]


OfferRows = Rows[OfferRow]


class _FlawlessSearch(Row):
    offers: Annotated[list[OfferRow], Field(max_length=ROWS_MAX), FailFast()]
    """The first error ends it: seven hundred thousand empty rows would be seven million errors."""


# Fields whose shape vast.ai has changed before and no price depends on: an odd one is unknown, not a reason to refuse
# the row. Where a filter needs it, unknown is not good enough and the row is refused by the filter.
_NICE_TO_KNOW: Final = frozenset(
    {
        "dph_total",
        "geolocation",
        "cpu_cores_effective",
        "cpu_ram",
        "cuda_max_good",
        "reliability",
        "reliability2",
        "inet_up",
        "inet_down",
        "direct_port_count",
        "hosting_type",
    }
)

_OFFER_ROW: Final = TypeAdapter(OfferRow)


def offer_rows(body: bytes) -> OfferRows:
    """Parse every row of a search answer, or reject it.

    Raises:
        Unavailable: there is no list of offers in it.
    """
    return distinct_rows(_each_offer(body), what="offer")


def _each_offer(body: bytes) -> Iterator[OfferRow | Rejected]:
    try:
        require_few_values(body)
    except ValueError as exc:
        raise Unavailable(f"vast.ai's search answer holds {exc}") from exc
    try:
        # One pass from bytes to rows, twice as fast as building every field first; most answers are flawless.
        yield from _FlawlessSearch.model_validate_json(body).offers
        return
    except ValidationError:
        pass
    value = decode(body, who=WHO)
    rows = value.get("offers") if isinstance(value, dict) else None
    if not isinstance(rows, list):
        raise Unavailable("vast.ai's search answer holds no list of offers")
    validate = _OFFER_ROW.validator.validate_python
    for row in rows:
        if not is_small(row):
            yield Rejected(offer_id="unreadable", reason="it holds more values than any row has")
            continue
        try:
            yield validate(row)
            continue
        except ValidationError as exc:
            odd = {fault["loc"][0] for fault in exc.errors(include_url=False, include_input=False) if fault["loc"]}
            if not odd or not odd <= _NICE_TO_KNOW:
                yield Rejected(offer_id=_id_of(row), reason=first_fault(exc))
                continue
        yield validate({name: value for name, value in row.items() if name not in odd})


def instant(epoch_s: float | None) -> datetime | None:
    """Convert seconds since 1970; `None` where there are none, or too many."""
    if not epoch_s:
        return None
    try:
        return datetime.fromtimestamp(epoch_s, UTC)
    except (ValueError, OverflowError, OSError):
        return None


def single_instance(value: Any) -> Any:
    """Unwrap a single-instance answer: one object under the *plural* key, or `None` when it is gone."""
    if isinstance(value, Mapping) and "instances" in value:
        inner = value["instances"]
        if isinstance(inner, Sequence) and not isinstance(inner, str):
            return inner[0] if inner else None
        return inner
    return value


def _id_of(row: Any) -> str:
    identity = row.get("id") if isinstance(row, dict) else None
    return str(identity) if isinstance(identity, int) and 0 < identity < 2**53 else "unreadable"
