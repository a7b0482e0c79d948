"""From what the market's server says to the contract's words. Pure."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from pydantic import ValidationError

from spotd_providers.contract.errors import (
    AuthFailed,
    NoBalance,
    NoCapacity,
    OfferGone,
    PriceMoved,
    ProviderError,
    QuotaExceeded,
    RateLimited,
    RequestRejected,
    Unavailable,
)
from spotd_providers.contract.money import MicroUsd, MicroUsdPerGb, MicroUsdPerGbMonth, MicroUsdPerHour
from spotd_providers.contract.values import (
    AttemptKey,
    HostId,
    Instance,
    InstanceId,
    InstanceRef,
    InstanceState,
    Interruption,
    Listing,
    Market,
    Offer,
    OfferId,
    OfferPage,
    OfferQuery,
    PoolId,
    ProviderCharge,
    ProviderName,
    Rejected,
)
from spotd_providers.kit.http import HttpAnswer
from spotd_providers.kit.keys import begins_like_ours
from spotd_providers.local.market.machine import State
from spotd_providers.local.market.refusals import Refusal
from spotd_providers.local.settings import Flavour
from spotd_providers.local.wire import (
    ErrorAnswer,
    LocalChargeRow,
    LocalOfferRow,
    MachineAnswer,
    MachineRow,
    OfferAnswer,
)

PROVIDER: Final = ProviderName("local")
_RETRY_AFTER: Final = timedelta(seconds=5)
_STATES: Final = {
    State.PENDING: InstanceState.PENDING,
    State.RUNNING: InstanceState.RUNNING,
    State.PAUSED: InstanceState.PAUSED,
    State.GONE: InstanceState.GONE,
}


def as_page(answer: OfferAnswer, query: OfferQuery) -> OfferPage:
    """Every readable row that was asked for; the unreadable ones with their reason."""
    offers: list[Offer] = []
    rejected: list[Rejected] = []
    for row in answer.offers:
        try:
            offer = as_offer(LocalOfferRow.model_validate(row))
        except ValidationError as exc:
            first = exc.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            rejected.append(Rejected(offer_id=_name_of(row), reason=f"{where}: {first['msg']}"))
            continue
        if offer.market in query.markets:
            offers.append(offer)
    return OfferPage(offers=tuple(offers), rejected=tuple(rejected), at=answer.now)


def as_offer(row: LocalOfferRow) -> Offer:
    """One offer."""
    is_spot = row.market is Market.SPOT
    is_bid = is_spot and row.flavour is Flavour.SUDDEN
    taken_away = Interruption.SUDDEN if is_bid else Interruption.NOTICE
    return Offer(
        provider=PROVIDER,
        offer_id=OfferId(row.offer_id),
        host_id=HostId(row.host),
        pool=PoolId(row.host),
        market=row.market,
        interruption=taken_away if is_spot else Interruption.NEVER,
        gpu=row.gpu,
        gpu_count=row.gpu_count,
        gpu_vram_mb=row.vram_mb,
        gpu_price=MicroUsdPerHour(row.price),
        pays_bid=is_bid,
        on_demand_price=MicroUsdPerHour(row.on_demand) if row.on_demand else None,
        storage_price=MicroUsdPerGbMonth(row.storage_gb_month),
        upload_price=MicroUsdPerGb(row.upload_gb),
        download_price=MicroUsdPerGb(row.download_gb),
        region=row.region,
        cpus=row.cpus,
        memory_mb=row.memory_mb,
        disk_gb_max=row.disk_gb_max,
        cuda_max=row.cuda_max,
        reliability=row.reliability,
        upload_mbps=row.upload_mbps,
        download_mbps=row.download_mbps,
    )


def as_listing(answer: MachineAnswer, install: str) -> Listing:
    """Translate the machines of this install; incomplete if a row is missing or invalid."""
    instances: list[Instance] = []
    complete = answer.count == len(answer.machines)
    for row in answer.machines:
        try:
            machine = MachineRow.model_validate(row)
        except ValidationError:
            complete = False
            continue
        if is_ours(machine, install):
            instances.append(as_instance(machine))
    return Listing(instances=tuple(instances), complete=complete, at=answer.now)


def is_ours(row: MachineRow, install: str) -> bool:
    """Whether the machine carries our label."""
    return row.install == install and begins_like_ours(row.key, install)


def as_instance(row: MachineRow) -> Instance:
    """One machine."""
    state = row.known_state
    return Instance(
        ref=InstanceRef(provider=PROVIDER, instance_id=InstanceId(row.machine_id)),
        key=AttemptKey(row.key),
        state=InstanceState.UNKNOWN if state is None else _STATES[state],
        market=row.market,
        host_id=HostId(row.host),
        price=MicroUsdPerHour(row.price),
        created_at=row.created_at,
        notice_at=row.doomed_at,
        loss=row.known_loss if state in (State.PAUSED, State.GONE) else None,
        detail=row.detail if state is not None else f"the market calls its state {row.state[:40]!r}",
    )


def as_charge(row: LocalChargeRow) -> ProviderCharge:
    """One line of the market's ledger."""
    return ProviderCharge(
        key=AttemptKey(row.key),
        instance_id=InstanceId(row.machine_id),
        start=row.start,
        end=row.end,
        amount=MicroUsd(row.amount),
        kind=row.kind,
    )


def as_error(answer: HttpAnswer) -> ProviderError | None:
    """Translate a refusal; `None` where the answer does not state what happened."""
    if answer.status == 401:
        return AuthFailed("the local market refuses this token")
    if answer.status == 429:
        text = answer.headers.get("retry-after", "")
        wait = timedelta(seconds=int(text)) if text.isdecimal() and len(text) < 7 else _RETRY_AFTER
        return RateLimited("the local market is asked too often", retry_after=wait)
    try:
        error = ErrorAnswer.model_validate(answer.json())
    except (ValidationError, Unavailable):
        return None
    if error.error == Refusal.REJECTED:
        return RequestRejected(f"{error.field}: {error.message}", field=error.field, reason=error.message)
    leaf = _LEAVES.get(error.error)
    return leaf(error.message) if leaf is not None else None


_LEAVES: Final[dict[str, type[OfferGone | NoCapacity | PriceMoved | QuotaExceeded | NoBalance]]] = {
    Refusal.NO_OFFER: OfferGone,
    Refusal.NO_CAPACITY: NoCapacity,
    Refusal.PRICE_MOVED: PriceMoved,
    Refusal.QUOTA: QuotaExceeded,
    Refusal.NO_BALANCE: NoBalance,
}


def _name_of(row: Any) -> str:
    name = row.get("offer_id") if isinstance(row, dict) else None
    return name[:100] if isinstance(name, str) else "(without a name)"
