"""RunPod as a spotd provider.

The base is REST v2: catalogue, pods, billing. GraphQL is asked for what v2 has no word for, the balance and spot pods,
and each of the two is declared missing once it is gone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final

from spotd_providers.contract.errors import (
    AuthFailed,
    ContractViolation,
    NotSupported,
    OutcomeUnknown,
    PriceMoved,
    ProviderError,
    RequestRejected,
    Unavailable,
)
from spotd_providers.contract.money import HOURS_PER_STORAGE_MONTH, MICRO, MicroUsdPerHour, micro_usd
from spotd_providers.contract.provider import Services
from spotd_providers.contract.values import (
    AttemptKey,
    Balance,
    Capability,
    Charge,
    CheckLine,
    Instance,
    InstanceRef,
    InstanceState,
    Launched,
    LaunchRequest,
    Listing,
    Market,
    Offer,
    OfferPage,
    OfferQuery,
    Power,
    ProviderName,
    Rejected,
)
from spotd_providers.kit.keys import key_of
from spotd_providers.kit.text import clean
from spotd_providers.runpod import doctor
from spotd_providers.runpod.answers import RunpodRefused
from spotd_providers.runpod.books import account, as_balance, charges_between
from spotd_providers.runpod.catalogue import GpuCatalogue
from spotd_providers.runpod.client import RunpodClient
from spotd_providers.runpod.graphql import Graph
from spotd_providers.runpod.launching import DISK_GB_MIN, UntrustedLabels, refusal_of_create, request_body
from spotd_providers.runpod.listing import PodListing
from spotd_providers.runpod.memory import PodMemory
from spotd_providers.runpod.offers import DISK_PRICE, PROVIDER
from spotd_providers.runpod.pods import as_instance, ref_of
from spotd_providers.runpod.settings import RunpodSettings
from spotd_providers.runpod.spot import INTERRUPTIBLE, SpotMarket
from spotd_providers.runpod.wire import PodRow, pod_row

LOOKS_AFTER_DELETION: Final = 3
LOOK_WAIT: Final = timedelta(seconds=2)
_POD_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")
_ALWAYS: Final[Mapping[Power, Capability]] = {
    Power.LOGS: Capability(available=True),
    Power.BILLING: Capability(available=True),
    Power.SELF_TERMINATE: Capability(available=True),
    Power.CAPACITY_SCORES: Capability(
        available=False, reason="RunPod says whether a pod can be had now, not how likely a launch is to succeed"
    ),
    Power.HOST_IDENTITY: Capability(available=False, reason="RunPod does not say on which host a pod runs"),
    Power.NOTICES: Capability(available=False, reason="RunPod stops pods without warning, so checkpoint regularly"),
    Power.STOP_RESUME: Capability(
        available=False,
        reason="a stopped RunPod pod keeps its host but not its GPU and may never start again, so spotd deletes it",
    ),
}


class RunpodProvider:
    """The Protocol over one open client."""

    def __init__(self, client: RunpodClient, settings: RunpodSettings, services: Services) -> None:
        self._client = client
        self._settings = settings
        self._services = services
        self._graph = Graph(client, rng=services.rng, log=services.log)
        self._spot = SpotMarket(self._graph, settings, services.log)
        self._catalogue = GpuCatalogue(client, settings, services)
        self._strangers = UntrustedLabels()
        self._memory = PodMemory(services.state_dir, services.log)
        self._sightings = PodListing(client, services, self._memory, out_of_money=self._is_out_of_money)

    @property
    def name(self) -> ProviderName:
        return PROVIDER

    @property
    def capabilities(self) -> Mapping[Power, Capability]:
        spot = Capability(available=self._spot.is_open, reason=self._spot.closed)
        balance = Capability(available=not self._graph.gone, reason=self._graph.gone)
        return {**_ALWAYS, Power.SPOT: spot, Power.BID_CHANGE: spot, Power.BALANCE: balance}

    @property
    def requests_sent(self) -> int:
        """HTTP requests since it was opened."""
        return self._client.requests_sent

    async def offers(self, query: OfferQuery) -> OfferPage:
        """Every size on every cloud, priced or rejected; a failure after the first answer makes it incomplete.

        What could then not be asked is told from an earlier poll, if that is not long ago.
        """
        offers: list[Offer] = []
        rejected: list[Rejected] = []
        missing: ProviderError | None = None
        answered = Market.ON_DEMAND in query.markets
        if answered:
            missing = await self._catalogue.asked()
            offers, rejected = self._catalogue.told()
        if Market.SPOT in query.markets:
            try:
                good, bad = await self._spot.offers(key_is_good=answered)
                offers.extend(good)
                rejected.extend(bad)
            except AuthFailed:
                raise
            except ProviderError as exc:
                if not answered:
                    raise
                missing = missing or exc
        if missing is not None:
            self._services.log.warning("runpod.offers_incomplete", reason=str(missing))
        return OfferPage(offers=tuple(offers), rejected=tuple(rejected), complete=missing is None, at=self._now())

    async def launch(self, request: LaunchRequest) -> Launched:
        """A pod exists, was made by one request, and costs no more than agreed."""
        spot = request.offer.market is Market.SPOT
        body = {} if spot else request_body(request, self._settings)
        if not spot and request.offer.gpu_price > request.price_max:
            raise PriceMoved("RunPod sells at list price only, and that is above what was agreed")
        self._memory.ordered(request.key, request.offer.market)
        row = await self._rented(request) if spot else await self._created(request, body)
        instance = as_instance(row, request.key, market=request.offer.market)
        self._sightings.own(instance)
        await self._checked_price(row, request)
        return Launched(instance=instance)

    async def find(self, key: AttemptKey) -> tuple[Instance, ...]:
        """Every machine that carries the key. Emptiness is believed only of a whole list."""
        if key_of(key, self._services.install) is None:
            return ()
        listing = await self._sightings.listed()
        found = tuple(i for i in listing.instances if i.key == key and i.state is not InstanceState.GONE)
        if not found and not listing.complete:
            raise Unavailable(f"RunPod's list of pods is incomplete, so it does not prove that {key} is absent")
        return found

    async def instances(self) -> Listing:
        """Every machine under our install label."""
        return await self._sightings.listed()

    async def terminate(self, ref: InstanceRef) -> None:
        """RunPod deleted this pod and no longer shows it, or it did not exist. Another's is refused, whoever asks."""
        pod_id = _pod_id(ref)
        if ref.instance_id not in self._sightings.ours:
            raw = await self._client.pod(pod_id)
            if raw is not None and (
                not isinstance(raw, dict) or key_of(raw.get("name"), self._services.install) is None
            ):
                raise RequestRejected(
                    f"RunPod pod {pod_id} does not carry the name of this installation", field="ref", reason="not ours"
                )
        await self._deleted(pod_id)

    async def change_bid(self, ref: InstanceRef, price: MicroUsdPerHour) -> None:
        """The spot pod's bid is `price` for all its GPUs."""
        pod_id = _pod_id(ref)
        if not self._spot.is_open:
            raise NotSupported(self._spot.closed)
        row = pod_row(await self._client.pod(pod_id))
        gpus = (row.gpu.count if row and row.gpu else None) or 0
        if row is None or gpus < 1 or not 0 < price <= 1000 * MICRO:
            raise RequestRejected(
                f"RunPod cannot take this bid for pod {pod_id}",
                field="ref" if row is None else "price",
                reason="no such pod" if row is None else "out of range",
            )
        try:
            await self._spot.rebid(pod_id, price, gpus)
        except RunpodRefused as exc:
            raise RequestRejected(
                f"RunPod did not change the bid of pod {pod_id}: {exc.detail or exc.status}",
                field="price",
                reason=exc.detail or str(exc.status),
            ) from exc

    async def logs(self, ref: InstanceRef, *, lines: int) -> Sequence[str]:
        """The container's last lines, or the host's where the container said nothing; no secrets."""
        pod_id = _pod_id(ref)
        told = await self._client.log_lines(pod_id, source="container", lines=lines)
        if not told:
            told = await self._client.log_lines(pod_id, source="system", lines=lines)
        return tuple(clean(line, chars_max=4096) for line in told)

    async def balance(self) -> Balance:
        """What is left in the account, and what it burns per hour."""
        return as_balance(await account(self._graph))

    async def charges(self, since: datetime, until: datetime) -> Sequence[Charge]:
        """What RunPod's books say of our pods, hour by hour."""
        return await charges_between(self._client, self._memory, self._services.log, since, until)

    async def check(self) -> Sequence[CheckLine]:
        """Key, clock, catalogue, billing and balance, one line each."""
        return await doctor.examine(self._client, self._graph, self._spot, self._settings, self._services)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _now(self) -> datetime:
        return self._services.clock.now()

    async def _is_out_of_money(self) -> bool:
        return (await account(self._graph)).balance <= 0

    async def _created(self, request: LaunchRequest, body: Mapping[str, object]) -> PodRow:
        try:
            row = await self._client.create(body, key=request.key)
        except RunpodRefused as exc:
            raise refusal_of_create(exc, request, self._strangers) from exc
        self._strangers.forget()
        return row

    async def _rented(self, request: LaunchRequest) -> PodRow:
        rented = await self._spot.rent(request)
        row = PodRow(id=rented.id, name=request.key, status="PROVISIONING", cost=rented.cost)
        if rented.kind is not None and rented.kind not in INTERRUPTIBLE:
            await self._undo(rented.id, request.key, f"sold as {clean(rented.kind)}")
            raise ContractViolation(f"RunPod sold pod {rented.id} on-demand though a bid was made")
        return row

    async def _checked_price(self, row: PodRow, request: LaunchRequest) -> None:
        """Returns if the new pod costs no more than agreed. A create names no price, so it is looked at afterwards.

        Whether `cost` holds the container disk is not documented, so that much more is let pass.
        """
        if row.cost is None:
            return
        disk = DISK_PRICE * max(request.disk_gb, DISK_GB_MIN) // HOURS_PER_STORAGE_MONTH
        if micro_usd(row.cost) <= request.price_max + disk + request.offer.gpu_count:
            return
        moved = f"RunPod charges ${row.cost:.4f}/h where ${request.price_max / MICRO:.4f}/h was agreed"
        await self._undo(row.id, request.key, moved)
        raise PriceMoved(moved)

    async def _undo(self, pod_id: str, key: AttemptKey, reason: str) -> None:
        self._services.log.error("runpod.wrong_purchase", key=key, pod=pod_id, reason=reason)
        try:
            await self._deleted(pod_id)
        except ProviderError as exc:
            raise OutcomeUnknown(f"{reason}; deleting pod {pod_id} failed", key=key) from exc

    async def _deleted(self, pod_id: str) -> None:
        """RunPod accepted the deletion, and does not show the pod as alive.

        Pods were seen to run and bill on after an accepted deletion, so it is looked at, and asked for once more.
        """
        for _ in range(2):
            await self._client.delete(pod_id)
            for look in range(LOOKS_AFTER_DELETION):
                if look:
                    await self._services.clock.sleep(LOOK_WAIT)
                try:
                    raw = await self._client.pod(pod_id)
                except ProviderError:
                    return  # accepted; the next listing tells
                row = pod_row(raw)
                if raw is None or (row is not None and row.status == "TERMINATED"):
                    return
        raise Unavailable(f"RunPod accepted the end of pod {pod_id} and still shows it")


def _pod_id(ref: InstanceRef) -> str:
    text = str(ref.instance_id)
    if _POD_ID.fullmatch(text) is None:
        raise RequestRejected(f"{clean(text)!r} is no RunPod pod id", field="ref", reason="not a pod id")
    return ref_of(text).instance_id
