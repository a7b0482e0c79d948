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
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import FailFast, Field, TypeAdapter, ValidationError

from spotd_providers.contract.errors import RateLimited, Unavailable
from spotd_providers.contract.values import Rejected
from spotd_providers.kit.boundary import ApiSettings, Span
from spotd_providers.kit.calls import too_often
from spotd_providers.kit.http import HttpAnswer
from spotd_providers.kit.rest import Dialect, Meaning, Pace, RefusalWords
from spotd_providers.kit.shapes import (
    ROWS_MAX,
    Lenient,
    Row,
    Rows,
    decode,
    distinct_rows,
    first_fault,
    is_small,
    require_few_values,
)
from spotd_providers.kit.text import TEXT_CHARS_MAX

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
    dlperf: Measure | None = None
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

    @property
    def money(self) -> float | None:
        return self.balance if self.credit is None else self.credit


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
        "dlperf",
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


_THRESHOLD: Final = re.compile(r"threshold\s*=\s*([0-9]+(?:\.[0-9]+)?)")
_ABOUT_THE_KEY: Final = re.compile(r"api key|user key|permission|scope|login|log in|auth|access denied")
_TWO_FACTOR: Final = re.compile(r"(?i)lacks proper privileges|two[ -]factor")
"""Said of a key that may search and nothing else, since it is older than the account's second factor."""
_NEW_KEY: Final = "it wants a key that was made in a session with two-factor login; make a new one after such a login"
_WORD: Final = re.compile(r"[a-z][a-z0-9_]{2,40}")
_BY_ITS_WORDS: Final = (
    (re.compile("no_such_ask|no longer available|is not available"), Meaning.OFFER_GONE),
    (re.compile("spend[_ ]rate"), Meaning.QUOTA),
    (re.compile("credit|balance"), Meaning.NO_BALANCE),
    (re.compile("bid.*low|low.*bid"), Meaning.PRICE_MOVED),
)
"""What the words of a refused purchase mean, the first that occurs."""
_BY_STATUS: Final = {
    200: Meaning.NO_CAPACITY,
    404: Meaning.OFFER_GONE,
    409: Meaning.NO_CAPACITY,
    410: Meaning.OFFER_GONE,
}


def problem_of(body: Any) -> RefusalWords | None:
    """Return vast.ai's error word, in lower case, and its sentence."""
    if not isinstance(body, dict):
        return None
    word = _text(body.get("error")).lower()
    code = word if _WORD.fullmatch(word) else ""
    said = _text(body.get("msg")) or _text(body.get("detail")) or ("" if code else word)
    if _TWO_FACTOR.search(said):
        return RefusalWords(code="two_factor", text=f"{_NEW_KEY}: {said}")
    return RefusalWords(code=code, text=said)


def _refusal_in_text(text: str) -> RefusalWords | None:
    """Return the words of a refusal that is no JSON; one that is not about the key is no word of vast.ai's."""
    said = text[:TEXT_CHARS_MAX]
    return None if said.lstrip().startswith("<") or not _ABOUT_THE_KEY.search(said.lower()) else RefusalWords(text=said)


class VastDialect(Dialect):
    """What vast.ai says depends on words and status together, and on whether something was bought."""

    def meaning(self, status: int, problem: RefusalWords | None, *, is_purchase: bool) -> Meaning:
        """Return what a refusal means.

        On a purchase, a 403 may be about the account or the offer (hosts may rent only their own, new accounts may
        spend only so fast) and says so in its words; elsewhere it is the key. Where the words are not known, a refused
        purchase of an ask that vast.ai has is a lack of capacity, or a bid that is too low.
        """
        code = "" if problem is None else problem.code
        known = self.codes.get(code)
        if known is not None or problem is None or status in (401, 402, 408, 429) or status >= 500:
            return known or super().meaning(status, problem, is_purchase=is_purchase)
        words = f"{code} {problem.text}".lower()
        if is_purchase:
            explained = status != 403 or (words.strip() and not _ABOUT_THE_KEY.search(words))
            bought = (meaning for pattern, meaning in _BY_ITS_WORDS if pattern.search(words))
            return next(bought, _BY_STATUS.get(status, Meaning.REJECTED)) if explained else Meaning.AUTH
        if code.startswith("no_such") or "no_such_instance" in words:
            return Meaning.ABSENT
        return super().meaning(status, problem, is_purchase=is_purchase)

    def throttle(
        self, answer: HttpAnswer, what: str, rng: Random, problem: RefusalWords | None, now: datetime, /
    ) -> RateLimited:
        """Build the error of a 429: its wait is the header, else the threshold in its text, else the penalty."""
        if problem is not None and problem.code == "search_quota_exceeded":
            midnight = (now + timedelta(days=1)).replace(hour=0, minute=0, second=0, microsecond=0)
            return RateLimited(
                "vast.ai's daily search quota is used up until 00:00 UTC; raise poll_every to stay below it",
                retry_after=midnight - now,
            )
        threshold = _THRESHOLD.search(answer.text)
        if answer.retry_after is not None or threshold is None:
            return super().throttle(answer, what, rng, problem, now)
        wait = max(self.penalty_of(what), timedelta(seconds=min(float(threshold[1]), 3600.0)))
        return too_often(self.who, what, wait, rng)


SEARCH, SHOW, LIST, DESTROY = "search", "show instance", "list instances", "destroy"
BID, LOGS, ACCOUNT, CHARGES = "change bid", "request logs", "account", "charges"
METRICS: Final = "metrics"
INCREASES: Final = "price increases"
BENCHMARKS: Final = "benchmarks"


def _pace(interval_s: float, penalty_s: float, rest_max: timedelta = timedelta(minutes=4)) -> Pace:
    return Pace(interval=timedelta(seconds=interval_s), penalty=timedelta(seconds=penalty_s), rest_max=rest_max)


DIALECT: Final = VastDialect(
    who=WHO,
    problem_of=problem_of,
    text_of=_refusal_in_text,
    is_refusal=lambda body: body.get("success") is False,
    codes={
        **dict.fromkeys(
            ("auth_error", "unauthorized", "not_authorized", "invalid_api_key", "forbidden", "two_factor"), Meaning.AUTH
        ),
        "spend_rate_limit": Meaning.QUOTA,
        "invalid_price": Meaning.PRICE_MOVED,
    },
    # The intervals are a little above vast.ai's own thresholds, since requests arrive unevenly.
    buy_interval=timedelta(seconds=4.6),
    paces={
        SEARCH: _pace(0.0, 6.0),
        SHOW: _pace(2.1, 2.1),
        LIST: _pace(1.1, 1.1),
        DESTROY: _pace(3.1, 3.1, timedelta(seconds=20)),
        BID: _pace(5.6, 5.6),
        LOGS: _pace(1.1, 1.5),
        ACCOUNT: _pace(1.1, 1.1),
        CHARGES: _pace(1.1, 3.0),
        METRICS: _pace(3.1, 3.1),
        INCREASES: _pace(2.1, 2.1),
        BENCHMARKS: _pace(3.1, 3.1),
    },
    buy_timeout_s=60.0,
)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


# The settings under `[providers.vast]`: which untrusted hosts are good enough to bid on.


class VastSettings(ApiSettings):
    """Filters of the search and where to ask. Every filter is sent to vast.ai and checked again on each row."""

    version: ClassVar = "/api/v0"

    base_url: str = Field(
        default="https://console.vast.ai", description="Where vast.ai's API answers, without /api/v0."
    )
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
    duration_min: Span | None = Field(
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
