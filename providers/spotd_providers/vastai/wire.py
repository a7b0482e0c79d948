"""vast.ai's answers, validated at the edge: strict, finite, bounded, and one row at a time.

Offers are parsed strictly, instances leniently. An *offer* row with anything odd in it is refused with a reason,
since a price that is not understood must not become a bid. An *instance* row is a machine that bills us:
whatever can be read of it is kept, since a row that is dropped is a machine that is forgotten.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
)

from spotd_providers.contract.errors import AuthFailed, ProviderError, QuotaExceeded, RateLimited, Unavailable
from spotd_providers.contract.values import Rejected
from spotd_providers.kit.boundary import duration, safe_base_url
from spotd_providers.kit.calls import DefiniteRefusal, raise_for_status, too_often
from spotd_providers.kit.http import HttpAnswer
from spotd_providers.kit.shapes import (
    ROWS_MAX,
    Lenient,
    Row,
    Rows,
    decode,
    decode_or_none,
    distinct_rows,
    first_fault,
    is_small,
    require_few_values,
)
from spotd_providers.kit.text import TEXT_CHARS_MAX, quote_safely

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


# The meaning of vast.ai's answers: status codes, error words and plain texts to outcomes.
#
# Theory. vast.ai refuses in several forms: an HTTP status, a 200 with `success: false`, a 404 that really means
# "bad key", a 429 that is plain text. The body's `error` word is therefore read before the status is believed.
# What only the caller can judge (is a missing ask a lost offer or a finished deletion?) becomes `VastRefused`.


_THRESHOLD: Final = re.compile(r"threshold\s*=\s*([0-9]+(?:\.[0-9]+)?)")
_AUTH_WORDS: Final = frozenset({"auth_error", "unauthorized", "not_authorized", "invalid_api_key", "forbidden"})
_ABOUT_THE_KEY: Final = re.compile(r"api key|user key|permission|scope|login|log in|auth|access denied")
_TWO_FACTOR: Final = re.compile(r"(?i)lacks proper privileges|two[ -]factor")
"""Said of a key that may search and nothing else, since it is older than the account's second factor."""
_WORD: Final = re.compile(r"[a-z][a-z0-9_]{2,40}")


class VastRefused(DefiniteRefusal):
    """A definite "no" of vast.ai's; `code` is in lower case."""

    who = WHO

    @property
    def says_absent(self) -> bool:
        """The thing named in the call does not exist, in vast.ai's own words."""
        return self.code.startswith("no_such") or "no_such_instance" in self.detail


def body_of(answer: HttpAnswer) -> Any:
    """Decode the body; `None` if it is not JSON."""
    return decode_or_none(answer.body, who=WHO)


def raise_for(
    answer: HttpAnswer,
    body: Any,
    *,
    endpoint: str,
    penalty: timedelta,
    now: datetime,
    rng: Random,
    purchase: bool = False,
) -> None:
    """Raise the error that an answer stands for; return only if it is a success.

    On a purchase, a 403 may be about the account or the offer (hosts may rent only their own, new accounts may spend
    only so fast) and says so in its words; elsewhere it is the key.

    Raises:
        AuthFailed, RateLimited, Unavailable: whatever was asked, this is what it means.
        Refused: a definite no.
    """
    fields: Mapping[str, Any] = body if isinstance(body, dict) else {}
    word = _text(fields.get("error")).lower()
    code = word if _WORD.fullmatch(word) else ""
    said = _text(fields.get("msg")) or _text(fields.get("detail")) or ("" if code else word)
    detail = quote_safely(said or ("" if fields else answer.text[:TEXT_CHARS_MAX]))
    if _TWO_FACTOR.search(said):
        raise AuthFailed(
            "vast.ai wants a key that was made in a session with two-factor login; make a new one after such a login:"
            f" {detail}"
        )
    if answer.status == 429:
        raise too_many(answer, code=code, detail=detail, endpoint=endpoint, penalty=penalty, now=now, rng=rng)
    explained = purchase and bool(code or said) and _ABOUT_THE_KEY.search(f"{code} {said}".lower()) is None
    not_allowed = answer.status == 403 and not explained
    if answer.status == 401 or code in _AUTH_WORDS or not_allowed:
        raise AuthFailed(f"vast.ai refused the API key: {detail or code or answer.status}")
    if 200 <= answer.status < 300 and fields.get("success") is not False:
        return
    raise_for_status(answer, who=WHO, what=endpoint)
    raise VastRefused(status=answer.status, code=code, detail=detail)


def too_many(
    answer: HttpAnswer, *, code: str, detail: str, endpoint: str, penalty: timedelta, now: datetime, rng: Random
) -> ProviderError:
    """Build the error of a 429: its wait is the header, else the threshold in its text, else the endpoint's penalty."""
    if code == "search_quota_exceeded":
        midnight = (now + timedelta(days=1)).replace(hour=0, minute=0, second=0, microsecond=0)
        return RateLimited(
            "vast.ai's daily search quota is used up until 00:00 UTC; raise poll_every to stay below it",
            retry_after=midnight - now,
        )
    if code == "spend_rate_limit":
        return QuotaExceeded(f"vast.ai limits how fast this account may spend: {detail}")
    wait = penalty
    if (found := _THRESHOLD.search(answer.text)) is not None:
        wait = max(penalty, timedelta(seconds=min(float(found[1]), 3600.0)))
    header = answer.retry_after
    return too_often("vast.ai", endpoint, wait if header is None else header, rng)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


# The settings under `[providers.vast]`: which untrusted hosts are good enough to bid on.


DEFAULT_BASE_URL: Final = "https://console.vast.ai"


def _duration(value: Any) -> Any:
    return duration(value, example='"12h", "3d" or "1d12h"') if isinstance(value, str) else value


class VastSettings(BaseModel):
    """Filters of the search and where to ask. Every filter is sent to vast.ai and checked again on each row."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_url: str = Field(default=DEFAULT_BASE_URL, description="Where vast.ai's API answers, without /api/v0.")
    verified: bool = Field(default=True, description="Only hosts that vast.ai has verified.")
    datacenter: bool = Field(default=False, description="Only hosts in datacentres (vast.ai's secure cloud).")
    reliability_min: float | None = Field(
        default=None, ge=0, le=1, allow_inf_nan=False, description="Lowest reliability score, say 0.98."
    )
    cuda_min: float | None = Field(
        default=None,
        gt=0,
        lt=100,
        allow_inf_nan=False,
        description="Lowest CUDA version that the host's driver supports, say 12.4.",
    )
    direct_ports_min: int = Field(default=0, ge=0, le=65535, description="Fewest open ports on the host's router.")
    duration_min: Annotated[timedelta, BeforeValidator(_duration)] | None = Field(
        default=None, description='Shortest time the host must still be on offer, say "3d".'
    )
    bandwidth_price_max: float | None = Field(
        default=None,
        ge=0,
        lt=1000,
        allow_inf_nan=False,
        description="Highest traffic price in dollars per GB, either way, say 0.02.",
    )
    cpu_arch: Literal["amd64", "arm64", "any"] = Field(
        default="amd64", description="Processor your images are built for: amd64, arm64 or any."
    )
    laptops: bool = Field(default=False, description="Also laptop GPUs.")
    offers_max: int = Field(default=3000, gt=0, le=10_000, description="Rows asked for in one search.")

    @field_validator("base_url")
    @classmethod
    def _keeps_the_key_safe(cls, value: str) -> str:
        return safe_base_url(value, example=DEFAULT_BASE_URL).removesuffix("/api/v0")
