"""The shop as a provider."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic import ValidationError

from spotd_providers.contract.errors import NotSupported, ProviderError, RequestRejected, Unavailable
from spotd_providers.contract.provider import NO_PRIVATE_IMAGES, Services
from spotd_providers.contract.values import (
    AttemptKey,
    Balance,
    Capability,
    CheckLine,
    Instance,
    InstanceRef,
    Launched,
    LaunchRequest,
    Listing,
    MicroUsd,
    Offer,
    OfferPage,
    OfferQuery,
    Power,
    ProviderName,
    Rejected,
    as_usd,
    micro_usd,
)
from spotd_providers.kit.shapes import listed_reasons
from spotd_shelf.client import ShelfClient
from spotd_shelf.translate import NAME, instance_of, offer_of
from spotd_shelf.wire import RentalRow

START_SCRIPT_BYTES_MAX: Final = 16_384

CAPABILITIES: Final[Mapping[Power, Capability]] = {
    Power.SPOT: Capability(available=True),
    Power.BALANCE: Capability(available=True),
    Power.HOST_IDENTITY: Capability(available=True),
    Power.BID_CHANGE: Capability(available=False, reason="the shop has fixed prices and takes no bids"),
    Power.NOTICES: Capability(available=False, reason="the shop reclaims machines without notice"),
    Power.LOGS: Capability(available=False, reason="the shop keeps no logs of its machines"),
    Power.BILLING: Capability(available=False, reason="the shop sends its bills on paper"),
    Power.SHELL: Capability(available=False, reason="machines of the shop have no door"),
    Power.PORTS: Capability(available=False, reason="machines of the shop have no door"),
    Power.PRICE_HISTORY: Capability(available=False, reason="the shop keeps no list of its old prices"),
    Power.GANG: Capability(available=False, reason="the shop sells machines one by one"),
    Power.REPLACE: Capability(available=False, reason="the shop sells machines one by one"),
    Power.STOP_RESUME: Capability(available=False, reason="machines of the shop cannot be stopped and kept"),
    Power.CAPACITY_SCORES: Capability(available=False, reason="what stands on the shelf can be bought"),
    Power.SELF_TERMINATE: Capability(available=False, reason="machines of the shop cannot give themselves back"),
}


class ShelfProvider:
    """One account at the shop."""

    def __init__(self, client: ShelfClient, services: Services) -> None:
        self._client = client
        self._clock = services.clock
        self._prefix = f"spotd-{services.install}-"
        self._known: set[str] = set()

    @property
    def name(self) -> ProviderName:
        return NAME

    @property
    def capabilities(self) -> Mapping[Power, Capability]:
        return CAPABILITIES

    async def offers(self, query: OfferQuery) -> OfferPage:
        """What stands on the shelf. The shop knows no filters, so they are applied here."""
        rows = [offer_of(raw) for raw in await self._client.slots()]
        return OfferPage(
            offers=tuple(
                row
                for row in rows
                if isinstance(row, Offer) and row.market in query.markets and (not query.gpus or row.gpu in query.gpus)
            ),
            rejected=listed_reasons([row for row in rows if isinstance(row, Rejected)]),
            at=self._clock.now(),
        )

    async def launch(self, request: LaunchRequest) -> Launched:
        """One machine is ours under the request's key; one request was sent."""
        if request.login is not None:
            raise NotSupported(NO_PRIVATE_IMAGES.reason)
        if len(request.start_script.encode()) > START_SCRIPT_BYTES_MAX:
            limit = f"longer than {START_SCRIPT_BYTES_MAX} bytes"
            raise RequestRejected(f"the start script is {limit}", field="start_script", reason=limit)
        order = {
            "slot": request.offer.offer_id,
            "name": request.key,
            "usd_per_hour_max": as_usd(request.price_max),
            "image": request.image,
            "disk_gb": request.disk_gb,
            "start": request.start_script,
        }
        instance = instance_of(await self._client.rent(order, key=request.key))
        self._known.add(instance.ref.instance_id)
        return Launched(instance=instance)

    async def find(self, key: AttemptKey) -> tuple[Instance, ...]:
        """Every machine under the key that is not gone."""
        if not key.startswith(self._prefix):
            return ()
        rows, complete = self._ours(await self._client.rentals(name=key))
        found = tuple(instance for instance in rows if instance.key == key)
        if not found and not complete:
            raise Unavailable("the shop's list has rows that cannot be read, so it proves no machine absent")
        return found

    async def instances(self) -> Listing:
        """Every machine under our install label that the shop still lists."""
        rows, complete = self._ours(await self._client.rentals())
        return Listing(instances=rows, complete=complete, at=self._clock.now())

    async def terminate(self, ref: InstanceRef) -> None:
        """The shop has the machine back. One that was listed under another name than ours is not given back."""
        if ref.instance_id not in self._known:
            rows = [row for row in await self._client.rentals() if _number(row) == ref.instance_id]
            if rows and not self._ours(rows)[0]:
                raise RequestRejected(f"rental {ref.instance_id} is another's", field="ref", reason="not ours")
        await self._client.give_back(ref.instance_id)

    async def check(self) -> Sequence[CheckLine]:
        """Whether the shop answers, accepts the key, and has money of ours."""
        try:
            account = await self._client.account()
        except ProviderError as exc:
            hint = "check [providers.shelf] base_url and api_key"
            return (CheckLine(name="account", ok=False, detail=str(exc), hint=hint),)
        money = CheckLine(
            name="balance",
            ok=account.balance_usd > 0,
            detail=f"${account.balance_usd:.2f} left",
            hint="" if account.balance_usd > 0 else "pay the shop",
        )
        return (CheckLine(name="key", ok=True, detail="accepted"), money)

    async def balance(self) -> Balance:
        """What the shop owes us in machines."""
        account = await self._client.account()
        return Balance(available=MicroUsd(micro_usd(max(0.0, account.balance_usd))))

    def _ours(self, raw_rows: Sequence[Any]) -> tuple[tuple[Instance, ...], bool]:
        """Our machines, and whether every row could be read: an unreadable one may be ours."""
        ours: list[Instance] = []
        complete = True
        for raw in raw_rows:
            try:
                row = RentalRow.model_validate(raw)
            except ValidationError:
                complete = False
                continue
            if row.name.startswith(self._prefix):
                ours.append(instance_of(row))
        self._known.update(instance.ref.instance_id for instance in ours)
        return tuple(ours), complete


def _number(raw: object) -> object:
    return raw.get("number") if isinstance(raw, dict) else None
