"""The answers of the market's server: values of the contract as JSON, parsed strictly."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Annotated, Any, Final

from pydantic import AwareDatetime, FailFast, TypeAdapter, ValidationError

from spotd_providers.contract.errors import (
    AuthFailed,
    NoCapacity,
    OfferGone,
    PriceMoved,
    ProviderError,
    QuotaExceeded,
    RateLimited,
    RequestRejected,
)
from spotd_providers.contract.values import (
    Instance,
    InstanceState,
    Listing,
    Offer,
    OfferPage,
    OfferQuery,
    ProviderCharge,
    ProviderName,
    Rejected,
)
from spotd_providers.kit.calls import PAGED_ROWS_MAX
from spotd_providers.kit.http import HttpAnswer
from spotd_providers.kit.shapes import ROWS_MAX, Row, first_fault, is_small
from spotd_providers.kit.text import begins_like_ours
from spotd_providers.local.settings import Refusal

PROVIDER: Final = ProviderName("local")
OFFER: Final = TypeAdapter(Offer)
INSTANCE: Final = TypeAdapter(Instance)


class OfferAnswer(Row):
    now: AwareDatetime
    offers: list[Any]


class MachineAnswer(Row):
    """`count` is how many rows the server meant to send."""

    now: AwareDatetime
    count: int
    machines: list[Any]


class ChargeAnswer(Row):
    charges: Annotated[tuple[ProviderCharge, ...], FailFast()]


class LogAnswer(Row):
    lines: Annotated[list[str], FailFast()]


class StatusAnswer(Row):
    now: AwareDatetime
    spec_hash: str
    hosts: int
    machines: int


class ErrorAnswer(Row):
    error: str
    message: str
    field: str = ""


# From the market server's answers to the contract's values and errors. Pure.


_RETRY_AFTER: Final = timedelta(seconds=5)


def as_page(answer: OfferAnswer, query: OfferQuery) -> OfferPage:
    """Return every valid row that was asked for, and the others with their reason."""
    offers: list[Offer] = []
    rejected: list[Rejected] = []
    for row in answer.offers[:ROWS_MAX]:
        if not is_small(row):
            rejected.append(Rejected(offer_id=_name_of(row), reason="it holds more values than any row has"))
            continue
        try:
            offer = OFFER.validate_json(json.dumps(row), strict=True)
        except ValidationError as exc:
            rejected.append(Rejected(offer_id=_name_of(row), reason=first_fault(exc)))
            continue
        if min(offer.gpu_price - 1, offer.storage_price, offer.upload_price, offer.download_price) < 0:
            rejected.append(Rejected(offer_id=_name_of(row), reason="a price is zero or negative"))
        elif offer.market in query.markets:
            offers.append(offer)
    complete = len(answer.offers) <= ROWS_MAX
    return OfferPage(offers=tuple(offers), rejected=tuple(rejected), complete=complete, at=answer.now)


def as_listing(answer: MachineAnswer, install: str) -> Listing:
    """Return the machines of this install; incomplete if a row is missing or invalid."""
    instances: list[Instance] = []
    complete = answer.count == len(answer.machines) <= PAGED_ROWS_MAX
    for row in answer.machines[:PAGED_ROWS_MAX]:
        try:
            instance = as_instance(row)
        except ValidationError:
            complete = False
            continue
        if begins_like_ours(instance.key, install):
            instances.append(instance)
    return Listing(instances=tuple(instances), complete=complete, at=answer.now)


def as_instance(row: Any) -> Instance:
    """Parse a machine. One in an unknown state stays readable, since it costs money all the same.

    Raises:
        ValidationError: the row is no machine.
    """
    try:
        return INSTANCE.validate_json(json.dumps(row), strict=True)
    except ValidationError:
        if not isinstance(row, dict) or not isinstance(row.get("state"), str):
            raise
        detail = f"the market calls its state {row['state'][:40]!r}"
        unknown = {**row, "state": InstanceState.UNKNOWN, "loss": None, "detail": detail}
        return INSTANCE.validate_json(json.dumps(unknown), strict=True)


def as_error(answer: HttpAnswer) -> ProviderError | None:
    """Translate a refusal; `None` where the answer does not state what happened."""
    if answer.status == 401:
        return AuthFailed("the local market refuses this token")
    if answer.status == 429:
        return RateLimited("the local market is asked too often", retry_after=answer.retry_after or _RETRY_AFTER)
    try:
        error = ErrorAnswer.model_validate_json(answer.body)
    except ValidationError:
        return None
    if error.error == Refusal.REJECTED:
        return RequestRejected(f"{error.field}: {error.message}", field=error.field, reason=error.message)
    leaf = _LEAVES.get(error.error)
    return leaf(error.message) if leaf is not None else None


_LEAVES: Final[dict[str, type[OfferGone | NoCapacity | PriceMoved | QuotaExceeded]]] = {
    Refusal.NO_OFFER: OfferGone,
    Refusal.NO_CAPACITY: NoCapacity,
    Refusal.PRICE_MOVED: PriceMoved,
    Refusal.QUOTA: QuotaExceeded,
}


def _name_of(row: Any) -> str:
    name = row.get("offer_id") if isinstance(row, dict) else None
    return name[:100] if isinstance(name, str) else "(without a name)"
