"""The local market as a provider."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final

from pydantic import ValidationError

from spotd_providers.contract.errors import ContractViolation, OutcomeUnknown, ProviderError, Unavailable
from spotd_providers.contract.money import MicroUsdPerHour
from spotd_providers.contract.provider import Services
from spotd_providers.contract.values import (
    AttemptKey,
    Capability,
    CheckLine,
    Instance,
    InstanceRef,
    InstanceState,
    Launched,
    LaunchRequest,
    Listing,
    OfferPage,
    OfferQuery,
    Power,
    ProviderCharge,
)
from spotd_providers.kit.plugin import capabilities
from spotd_providers.kit.threads import judge_apart
from spotd_providers.local.client import MarketClient
from spotd_providers.local.translate import as_instance, as_listing, as_page
from spotd_providers.local.wire import PROVIDER, ChargeAnswer, LogAnswer, MachineAnswer, OfferAnswer, StatusAnswer

CAPABILITIES: Final[Mapping[Power, Capability]] = capabilities(
    Power.BID_CHANGE,
    Power.NOTICES,
    Power.LOGS,
    Power.BILLING,
    Power.SPOT,
    Power.HOST_IDENTITY,
    Power.SELF_TERMINATE,
    missing={
        Power.BALANCE: "the local market has no account: its machines cost nothing",
        Power.SHELL: "a machine of the local market is a process of this computer",
        Power.STOP_RESUME: "machines of the local market are stopped by being outbid only, not at will",
        Power.CAPACITY_SCORES: "whatever the local market lists can be had",
    },
)
_SKEW_REAL_S: Final = 5.0


class LocalProvider:
    """One market on this computer."""

    name = PROVIDER
    capabilities = CAPABILITIES

    def __init__(self, client: MarketClient, services: Services) -> None:
        self._client = client
        self._services = services
        self._install = services.install

    async def offers(self, query: OfferQuery) -> OfferPage:
        answer = await self._client.read(OfferAnswer, "/v1/offers")
        return await judge_apart(lambda: as_page(answer, query), rows=len(answer.offers))

    async def launch(self, request: LaunchRequest) -> Launched:
        """Buy a machine that carries the key. The market itself would sell a second one under the same key."""
        answer = await self._client.buy(
            {
                "key": request.key,
                "install": request.install,
                "offer_id": request.offer.offer_id,
                "price_max": request.price_max,
                "image": request.image,
                "disk_gb": request.disk_gb,
                "start_script": request.start_script,
            },
            key=request.key,
        )
        try:
            machine = as_instance(answer)
        except ValidationError as exc:
            raise OutcomeUnknown("the answer to a launch describes no machine", key=request.key) from exc
        if machine.key != request.key or machine.market is not request.offer.market:
            raise ContractViolation(f"machine {machine.ref.instance_id} is not what was bought")
        return Launched(instance=machine)

    async def find(self, key: AttemptKey) -> tuple[Instance, ...]:
        """Return every machine that carries the key and is not gone.

        Raises:
            Unavailable: the answer was not complete, so that nothing found proves nothing.
        """
        answer = await self._client.read(MachineAnswer, "/v1/machines", {"install": self._install, "key": key})
        listing = as_listing(answer, self._install)
        if not listing.complete:
            raise Unavailable("the local market's list is not complete")
        return tuple(found for found in listing.instances if found.key == key and found.state is not InstanceState.GONE)

    async def instances(self) -> Listing:
        answer = await self._client.read(MachineAnswer, "/v1/machines", {"install": self._install})
        return await judge_apart(lambda: as_listing(answer, self._install), rows=len(answer.machines))

    async def terminate(self, ref: InstanceRef) -> None:
        await self._client.change("DELETE", f"/v1/machines/{ref.instance_id}", params={"install": self._install})

    async def check(self) -> Sequence[CheckLine]:
        """Check that the market runs and has our time."""
        try:
            status = await self._client.read(StatusAnswer, "/v1/status")
        except ProviderError as exc:
            hint = f"see {self._client.folder / 'server.log'}"
            return (CheckLine(name="market", ok=False, detail=str(exc), hint=hint),)
        skew_s = abs(self._services.clock.real_seconds(status.now - self._services.clock.now()))
        is_near = skew_s < _SKEW_REAL_S
        skew = f"within {_SKEW_REAL_S:.0f} s of ours" if is_near else f"{skew_s:.0f} s away from ours"
        hint = "" if is_near else "stop the market; it starts again with the daemon's clock"
        return (
            CheckLine(name="market", ok=True, detail=f"hosts: {status.hosts}, machines: {status.machines}"),
            CheckLine(name="account", ok=True, detail="no key, balance or quota: nothing is paid here"),
            CheckLine(name="clock", ok=is_near, detail=f"the market's time is {skew}", hint=hint),
        )

    async def change_bid(self, ref: InstanceRef, price: MicroUsdPerHour) -> None:
        await self._client.change(
            "PUT", f"/v1/machines/{ref.instance_id}/bid", params={"install": self._install}, body={"price": price}
        )

    async def logs(self, ref: InstanceRef, *, lines: int) -> Sequence[str]:
        path = f"/v1/machines/{ref.instance_id}/log"
        answer = await self._client.read(LogAnswer, path, {"install": self._install, "lines": max(0, lines)})
        return answer.lines

    async def charges(self, since: datetime, until: datetime) -> Sequence[ProviderCharge]:
        """Return the charges of our machines in the market's own ledger."""
        span = {"since": since.isoformat(), "until": until.isoformat()}
        return (await self._client.read(ChargeAnswer, "/v1/charges", {"install": self._install, **span})).charges
