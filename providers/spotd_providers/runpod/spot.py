"""Spot pods through the old GraphQL API: a market that RunPod is closing, used as long as it answers.

RunPod took spot out of its documents in May 2026 and out of v2 altogether; its staff announced that the mutation is
being removed and found that it only ever answers "no instances". So this is off unless asked for; and once RunPod
refuses it as such, or has had nothing to sell several times in a row, it is switched off with one message until spotd
starts anew.

Prices: `lowestPrice` is for all GPUs of the request together, a bid is per GPU. In every recorded answer the lowest
bid equals the on-demand price; bidding that for an interruptible machine is refused here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from spotd_providers.contract.errors import (
    AuthFailed,
    NoCapacity,
    NotSupported,
    OutcomeUnknown,
    ProviderError,
    Unavailable,
)
from spotd_providers.contract.gpus import canonical
from spotd_providers.contract.money import MICRO, MicroUsdPerHour, micro_usd
from spotd_providers.contract.provider import Logger
from spotd_providers.contract.values import (
    Interruption,
    LaunchRequest,
    Market,
    Offer,
    OfferId,
    PoolId,
    Rejected,
)
from spotd_providers.kit.shapes import Lenient, first_fault
from spotd_providers.runpod.answers import GONE_WORDS, RunpodRefused, says
from spotd_providers.runpod.graphql import Graph, GraphRefused
from spotd_providers.runpod.launching import DISK_GB_MIN, arguments, checked, refusal_in_words, rejected
from spotd_providers.runpod.offers import DISK_PRICE, PROVIDER, create_id, offer_id
from spotd_providers.runpod.settings import RunpodSettings
from spotd_providers.runpod.wire import UsdPerHour

MISSES_MAX: Final = 5
NOT_ASKED_FOR: Final = "RunPod is closing its spot market; spot = true in [providers.runpod] tries what is left"
INTERRUPTIBLE: Final = frozenset({"INTERRUPTABLE", "BID"})
_RENT: Final = (
    "mutation rent($input: PodRentInterruptableInput!) "
    "{ podRentInterruptable(input: $input) { id desiredStatus costPerHr podType } }"
)
_REBID: Final = (
    "mutation rebid($input: PodBidResumeInput!) { podBidResume(input: $input) { id desiredStatus costPerHr } }"
)


class SpotQuote(BaseModel):
    """What some GPUs of one type cost together, on one cloud."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    bid: UsdPerHour | None = Field(default=None, alias="minimumBidPrice")
    on_demand: Annotated[UsdPerHour | None, Lenient] = Field(default=None, alias="uninterruptablePrice")


class SpotGpu(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    id: Annotated[str, Field(min_length=1, max_length=128)]
    memory: Annotated[float, Field(ge=0, lt=100_000, allow_inf_nan=False)] = Field(alias="memoryInGb")


class Rented(BaseModel):
    """The pod a spot purchase made."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")

    id: Annotated[str, Field(min_length=1, max_length=128)]
    cost: Annotated[UsdPerHour | None, Lenient] = Field(default=None, alias="costPerHr")
    kind: Annotated[str | None, Lenient] = Field(default=None, alias="podType")


_QUOTE: Final = TypeAdapter(SpotQuote)
_GPU: Final = TypeAdapter(SpotGpu)
_RENTED: Final = TypeAdapter(Rented)


class SpotMarket:
    """The spot half of RunPod, while there is one.

    Attributes:
        closed: why nothing is bought here; empty while something can be.
    """

    def __init__(self, graph: Graph, settings: RunpodSettings, log: Logger) -> None:
        self._graph = graph
        self._settings = settings
        self._log = log
        self._misses = 0
        self.closed = "" if settings.spot else NOT_ASKED_FOR
        if settings.spot and len(settings.data_centers) > 1:
            self.closed = "RunPod's spot pods can be bound to one data centre at most; name one, or none"

    @property
    def is_open(self) -> bool:
        return not self.closed

    async def offers(self, *, key_is_good: bool) -> tuple[list[Offer], list[Rejected]]:
        """What can be bid on now; nothing once the market is closed.

        A key that REST took and the old API refuses (`key_is_good`) closes this market, not the whole provider.

        Raises:
            RateLimited, Unavailable, AuthFailed: nothing can be told this time.
        """
        if not self.is_open:
            return [], []
        asked = quotes_asked(self._settings)
        try:
            data = await self._graph.ask(_prices(asked))
        except NotSupported as exc:
            self._close(str(exc))
            return [], []
        except AuthFailed as exc:
            if not key_is_good:
                raise
            self._close(f"RunPod's old GraphQL API refuses the key: {exc}")
            return [], []
        except RunpodRefused as exc:
            if says(exc.detail, GONE_WORDS):
                self._close(f"RunPod no longer quotes spot prices: {exc.detail}")
                return [], []
            raise Unavailable(f"RunPod quotes no spot prices: {exc.detail or exc.status}") from exc
        rows = data.get("gpuTypes")
        if not isinstance(rows, list):
            raise Unavailable("RunPod's spot prices hold no list of GPUs")
        return spot_offers(rows, asked)

    async def rent(self, request: LaunchRequest) -> Rented:
        """One spot pod was bought, at this bid for all its GPUs together; one mutation was sent.

        Raises:
            OutcomeUnknown: it may exist. Other leaves: it certainly does not.
        """
        self._refuse_if_closed()
        checked(request)
        bid = request.price_max // request.offer.gpu_count
        if bid <= 0:
            raise rejected("price_max", "no bid is that low")
        try:
            data = await self._graph.order(_RENT, {"input": _rent_input(request, bid, self._settings)}, key=request.key)
        except NotSupported as exc:
            self._close(str(exc))
            raise NoCapacity(f"RunPod's spot market is closed: {exc}") from exc
        except GraphRefused as exc:
            raise self._refusal(exc, request) from exc
        except RunpodRefused as exc:
            self._close(f"RunPod refuses spot purchases: {exc.detail or exc.status}")
            raise NoCapacity(f"RunPod's spot market is closed: {self.closed}") from exc
        self._misses = 0
        try:
            return _RENTED.validate_python(data.get("podRentInterruptable"))
        except ValidationError as exc:
            raise OutcomeUnknown("RunPod's answer to a spot purchase names no pod", key=request.key) from exc

    async def rebid(self, pod_id: str, price: MicroUsdPerHour, gpus: int) -> None:
        """The pod's bid is `price` for all its GPUs; a stopped one runs again if that wins.

        Raises:
            NotSupported: there is no spot market. Refused: RunPod did not take it.
        """
        self._refuse_if_closed()
        bid = price // gpus / MICRO
        values = {"input": {"podId": pod_id, "bidPerGpu": bid, "gpuCount": gpus}}
        # Setting the same bid again changes nothing, so a lost answer is only a failed call.
        try:
            data = await self._graph.order(_REBID, values, key=pod_id)
        except OutcomeUnknown as exc:
            raise Unavailable("RunPod's answer to a bid was lost") from exc
        if not data.get("podBidResume"):
            raise RunpodRefused(status=200, detail="RunPod did not confirm the bid")

    def _refuse_if_closed(self) -> None:
        if self.closed:
            raise NotSupported(self.closed)

    def _refusal(self, refused: GraphRefused, request: LaunchRequest) -> ProviderError:
        said = refused.detail or "no reason given"
        if says(refused.detail, GONE_WORDS):
            self._close(f"RunPod no longer sells spot pods: {said}")
            return NoCapacity(f"RunPod's spot market is closed: {said}")
        known = refusal_in_words(refused.detail, said)
        if known is None and refused.internal:
            return OutcomeUnknown(f"RunPod failed inside a spot purchase: {said}", key=request.key)
        if known is not None and not isinstance(known, NoCapacity):
            return known
        self._misses += 1
        if self._misses >= MISSES_MAX:
            self._close(f"RunPod had no spot pod to sell {self._misses} times in a row: {said}")
        return known or NoCapacity(f"RunPod did not sell the spot pod: {said}")

    def _close(self, reason: str) -> None:
        if not self.closed:
            self.closed = reason
            self._log.warning("runpod.spot_closed", reason=reason)


def quotes_asked(settings: RunpodSettings) -> dict[str, tuple[int, str]]:
    """The names under which machines of each size and cloud are quoted."""
    return {f"q{count}{cloud.lower()}": (count, cloud) for cloud in settings.clouds for count in settings.gpu_counts}


def spot_offers(rows: Iterable[Any], asked: Mapping[str, tuple[int, str]]) -> tuple[list[Offer], list[Rejected]]:
    """Every quote of these rows as an offer, or rejected with the reason a user reads."""
    offers: list[Offer] = []
    refused: list[Rejected] = []
    for raw in rows:
        try:
            gpu = _GPU.validate_python(raw)
        except ValidationError as exc:
            refused.append(Rejected(offer_id="unreadable", reason=first_fault(exc)))
            continue
        for name, (count, cloud) in asked.items():
            identity = offer_id(gpu.id, count, cloud) + ":spot"
            try:
                quote = _QUOTE.validate_python(raw.get(name) or {})
            except ValidationError as exc:
                refused.append(Rejected(offer_id=identity, reason=first_fault(exc)))
                continue
            reason = _not_sold(gpu, quote)
            if reason is not None or quote.bid is None:
                refused.append(Rejected(offer_id=identity, reason=reason or ""))
            else:
                offers.append(_offer(gpu, count, cloud, quote.bid, quote.on_demand, identity))
    return offers, refused


def _not_sold(gpu: SpotGpu, quote: SpotQuote) -> str | None:
    if gpu.id == "unknown":
        return "RunPod does not know which GPU this is"
    if quote.bid is None:
        return "minimumBidPrice: no spot price"
    if quote.on_demand is not None and quote.bid >= quote.on_demand:
        return f"the lowest bid (${quote.bid:.4f}/h) is not below the on-demand price (${quote.on_demand:.4f}/h)"
    return None


def _offer(gpu: SpotGpu, count: int, cloud: str, bid: float, on_demand: float | None, identity: str) -> Offer:
    memory_mb = round(gpu.memory * 1024) or None
    return Offer(
        provider=PROVIDER,
        offer_id=OfferId(identity),
        pool=PoolId(identity),
        market=Market.SPOT,
        interruption=Interruption.SUDDEN,
        gpu=canonical(PROVIDER, create_id(gpu.id), memory_mb),
        gpu_count=count,
        gpu_vram_mb=memory_mb,
        gpu_price=MicroUsdPerHour(micro_usd(bid)),
        pays_bid=True,
        on_demand_price=None if on_demand is None else MicroUsdPerHour(micro_usd(on_demand)),
        storage_price=DISK_PRICE,
        extra={"gpu": create_id(gpu.id), "cloud": cloud},
    )


def _prices(asked: Mapping[str, tuple[int, str]]) -> str:
    quotes = " ".join(
        f"{name}: lowestPrice(input: {{gpuCount: {count}, secureCloud: {json.dumps(cloud == 'SECURE')}}}) "
        "{ minimumBidPrice uninterruptablePrice }"
        for name, (count, cloud) in asked.items()
    )
    return f"query {{ gpuTypes {{ id memoryInGb {quotes} }} }}"


def _rent_input(request: LaunchRequest, bid: int, settings: RunpodSettings) -> dict[str, Any]:
    script = request.start_script
    replaced = json.dumps({"entrypoint": ["/bin/sh", "-c"], "cmd": [script]})
    values: dict[str, Any] = {
        "bidPerGpu": bid / MICRO,
        "cloudType": request.offer.extra["cloud"],
        "gpuTypeId": request.offer.extra["gpu"],
        "gpuCount": request.offer.gpu_count,
        "name": request.key,
        "imageName": request.image,
        "containerDiskInGb": max(request.disk_gb, DISK_GB_MIN),
        "volumeInGb": 0,
        "dockerArgs": replaced if settings.override_entrypoint else arguments(script),
    }
    if settings.cuda_min is not None:
        values["minCudaVersion"] = settings.cuda_min
    if settings.data_centers:
        values["dataCenterId"] = settings.data_centers[0]
    if settings.registry is not None:
        values["containerRegistryAuthId"] = settings.registry
    return values
