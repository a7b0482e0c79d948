"""What can be bought now: the offers of each provider, each with an index sorted for the search.

Theory. The offers are the last value of one provider's poll. Building the index costs one sort per poll; after that a
decision for a thousand jobs touches only the offers of the GPUs that the jobs name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from itertools import chain
from typing import Final

from spotd.core.domain.copies import replace
from spotd_providers.contract import gpus
from spotd_providers.contract.values import (
    Benchmark,
    HostId,
    MicroUsd,
    MicroUsdPerGb,
    MicroUsdPerGbMonth,
    MicroUsdPerGpuHour,
    MicroUsdPerHour,
    Offer,
    ProviderName,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferIndex:
    """A provider's offers by canonical GPU and count, each list in order of its GPU price.

    Attributes:
        by_gpu: of single machines.
        gangs_by_gpu: of what is sold as several machines only, by the GPUs of each and at the price of each.
    """

    by_gpu: Mapping[tuple[str, int], Sequence[Offer]] = field(default_factory=dict)
    gangs_by_gpu: Mapping[tuple[str, int], Sequence[Offer]] = field(default_factory=dict)
    size: int = 0

    def groups(self, nodes: int) -> Iterator[tuple[tuple[str, int], Sequence[Offer]]]:
        """Yield the kinds of machine with the offers of so many as one; a kind may come twice."""
        if nodes == 1:
            yield from self.by_gpu.items()
            return
        for kind, group in chain(self.by_gpu.items(), self.gangs_by_gpu.items()):
            yield kind, [offer for offer in group if offer.nodes_min <= nodes <= (offer.nodes_max or nodes)]


def build_offer_index(offers: tuple[Offer, ...]) -> OfferIndex:
    """Return the offers, findable by what jobs ask for."""
    alone = (offer for offer in offers if offer.nodes_min == 1)
    gangs = (offer for offer in offers if offer.nodes_min > 1)
    return OfferIndex(by_gpu=_by_gpu(alone), gangs_by_gpu=_by_gpu(gangs), size=len(offers))


def _by_gpu(offers: Iterable[Offer]) -> dict[tuple[str, int], Sequence[Offer]]:
    groups: dict[tuple[str, int], list[Offer]] = {}
    for offer in offers:
        groups.setdefault((offer.gpu, offer.gpu_count), []).append(offer)
    return {key: tuple(sorted(group, key=lambda o: (o.gpu_price, o.offer_id))) for key, group in sorted(groups.items())}


def gang_of(offer: Offer, nodes: int) -> Offer:
    """Return the offer of so many such machines as one: what is counted and what is billed is that of all of them.

    Each of them reads what the job resumes from, and the first alone writes to the store.
    """
    return replace(
        offer,
        nodes=nodes,
        gpu_count=offer.gpu_count * nodes,
        gpu_price=MicroUsdPerHour(offer.gpu_price * nodes),
        on_demand_price=None if offer.on_demand_price is None else MicroUsdPerHour(offer.on_demand_price * nodes),
        storage_price=MicroUsdPerGbMonth(offer.storage_price * nodes),
        storage_fixed=MicroUsdPerHour(offer.storage_fixed * nodes),
        download_price=MicroUsdPerGb(offer.download_price * nodes),
    )


NO_GANGS: Final = "its adapter starts no machines that reach each other"
NODES_MAX: Final = 1024
"""Of a provider that does not say how many machines it starts at once, which is more than a job may ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderOffers:
    """The last value of one provider's offers, and its error if it has one.

    Attributes:
        at: when the offers on the shelf were asked for; `None` before the first answer.
        error: why the newest poll failed, empty when it did not.
        sells_spot: the provider has a spot market at all, be it sold out at the moment: what a job without a market
            waits for. Where there is none, it takes on-demand.
        changes_bids: the bid for a machine that runs there can be changed.
        credit_at: when the account's balance was last seen to have risen.
        key_at: when the provider last took the key, or was given another one.
        balance, balance_at: what is left of money paid in advance, and when the provider stated it.
        no_gangs: why the provider starts no machines that reach each other; empty where it does.
        nodes_max: how many of them it starts at once at most.
        benchmarks: what it measured of GPUs, beside the scores of its offers.
    """

    provider: ProviderName
    offer_index: OfferIndex = field(default_factory=OfferIndex)
    at: datetime | None = None
    error: str = ""
    error_since: datetime | None = None
    sells_spot: bool = True
    changes_bids: bool = False
    credit_at: datetime | None = None
    key_at: datetime | None = None
    balance: MicroUsd | None = None
    balance_at: datetime | None = None
    no_gangs: str = NO_GANGS
    nodes_max: int = NODES_MAX
    benchmarks: tuple[Benchmark, ...] = ()

    def words_against_nodes(self, nodes: int) -> str:
        """Why the provider does not start so many machines that reach each other; empty where it does."""
        if nodes == 1 or self.no_gangs:
            return "" if nodes == 1 else self.no_gangs
        return "" if nodes <= self.nodes_max else f"it starts {self.nodes_max} machines at once at most"


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """How new what is known is, and what cannot be reached at the moment.

    Attributes:
        listed_at: of each provider, the instant of its newest list of our machines.
        away: of providers whose newest list failed, why.
        store_away: why an order to a host would not reach it, empty while the store takes and gives all it should.
        stored_at: when the store took a grant for the newest time, if it took one since the start.
    """

    listed_at: Mapping[ProviderName, datetime] = field(default_factory=dict)
    away: Mapping[ProviderName, str] = field(default_factory=dict)
    store_away: str = ""
    stored_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MarketSnapshot:
    """The offers of all providers at one time.

    Attributes:
        lows: the lowest price of the GPU part of the last days, by canonical GPU and count.
        seen: when each provider last offered each kind of machine.
        of_hosts: the kinds that hosts offered on which a machine was bought, whatever is left of them now.
        readings: `None` where the prices are a record: none of them can be wrong, and nothing can be away.
    """

    by_provider: Mapping[ProviderName, ProviderOffers] = field(default_factory=dict)
    lows: Mapping[tuple[str, int], MicroUsdPerHour] = field(default_factory=dict)
    seen: Mapping[ProviderName, Mapping[tuple[str, int], datetime]] = field(default_factory=dict)
    of_hosts: Mapping[tuple[ProviderName, HostId], frozenset[tuple[str, int]]] = field(default_factory=dict)
    readings: Readings | None = None


LEAP: Final = 2
"""So many times the agreed price is more likely a wrong row than a market."""
NOTHING_KNOWN: Final = MarketSnapshot()
"""No offer and no balance."""


# What the owner of the checkpoint store asks for each gigabyte that a host reads from it.
#
# Theory. A bucket's owner bills what leaves it, by where it goes: nothing or little inside the owner's own cloud,
# most to the internet. A host of a marketplace is the internet. What is written into a bucket costs nothing. This
# price is no part of a machine's effective price, which is what its provider bills and what ceilings are compared
# with: a job with a large checkpoint pays it wherever it goes on, and a ceiling that it broke could never be met
# again. It counts where machines are ranked and compared, in what budgets set aside, and in what is booked.


ELSEWHERE: Final = ""
"""Stands for every region of a provider that has no price of its own."""
NO_CHARGE: Final = MicroUsdPerGb(0)
NOTHING: Final = MicroUsd(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreEgress:
    """Prices of reading the store.

    Attributes:
        per_gb: for hosts anywhere.
        near: for hosts of a provider in a region, or in all others (`ELSEWHERE`), where that differs.
    """

    per_gb: MicroUsdPerGb = NO_CHARGE
    near: Mapping[tuple[ProviderName, str], MicroUsdPerGb] = field(default_factory=dict)

    def price_for(self, offer: Offer) -> MicroUsdPerGb:
        """Return the price for a host of this offer; of several machines, for each of which reads the same."""
        price = self.per_gb
        if self.near:
            elsewhere = self.near.get((offer.provider, ELSEWHERE), self.per_gb)
            price = self.near.get((offer.provider, offer.region), elsewhere)
        return price if offer.nodes == 1 else MicroUsdPerGb(price * offer.nodes)

    @property
    def highest(self) -> MicroUsdPerGb:
        return max([self.per_gb, *self.near.values()])


FREE_EGRESS: Final = StoreEgress()
AWS: Final = ProviderName("aws")
UNKNOWN_REGION: Final = "?"
S3_TO_OTHER_REGION: Final = MicroUsdPerGb(20_000)
S3_BETWEEN_US_EAST: Final = MicroUsdPerGb(10_000)
_US_EAST: Final = frozenset({"us-east-1", "us-east-2"})


@lru_cache(maxsize=256)
def bucket_egress(per_gb: int, near: str) -> StoreEgress:
    """Return the prices of reading a bucket.

    Hosts at AWS pay nothing in the bucket's own region, and less than the internet in every other.

    Args:
        near: the AWS region, `UNKNOWN_REGION` where it is not known, empty where the bucket is not AWS's.
    """
    price = MicroUsdPerGb(per_gb)
    if not near or not price:
        return StoreEgress(per_gb=price)
    at_aws = {(AWS, ELSEWHERE): min(price, S3_TO_OTHER_REGION)}
    if near in _US_EAST:
        at_aws |= {(AWS, one): min(price, S3_BETWEEN_US_EAST) for one in _US_EAST}
    if near != UNKNOWN_REGION:
        at_aws[AWS, near] = NO_CHARGE
    return StoreEgress(per_gb=price, near=at_aws)


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """What of a job's data each machine reads of one bucket beside the store.

    Attributes:
        bytes_per_hour: spread over the usual stay.
        egress: what the bucket's owner asks, by where the machine is.
    """

    bytes: int
    bytes_per_hour: int
    egress: int
    near: str

    def price_for(self, offer: Offer) -> MicroUsdPerGb:
        """Return the price of a gigabyte for a machine of this offer."""
        return bucket_egress(self.egress, self.near).price_for(offer)


# An offer with its effective price.


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceBreakdown:
    """Every term of an effective price, whole machine per hour; `total` is what ceilings are compared with.

    total = fee x (gpu + storage) + upload + restore, each term rounded up.
    """

    gpu: MicroUsdPerHour
    storage: MicroUsdPerHour
    fee: MicroUsdPerHour
    """What the multiplier adds to gpu + storage."""
    upload: MicroUsdPerHour
    restore: MicroUsdPerHour
    total: MicroUsdPerHour
    per_gpu: MicroUsdPerGpuHour
    fee_ppm: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Quote:
    """An offer with its effective price for one job at one time.

    Attributes:
        is_own: the machine is the user's own, and not rented.
    """

    offer: Offer
    price: PriceBreakdown
    on_demand: MicroUsdPerHour | None
    """Effective price of the same hardware on-demand, the receipt's comparison; of an own machine that was taken, what
    the best machine to rent would have cost at that moment for the same work."""
    at: datetime
    egress_price: MicroUsdPerGb = NO_CHARGE
    """What the owner of the checkpoint store asks for what a host there reads; in no effective price."""
    url_bytes: int = 0
    """What the job's machine reads elsewhere than of that store."""
    url_cost: MicroUsd = NOTHING
    """What the owners of those places ask for reading all of it from this offer's machine."""
    is_own: bool = False


# What a user's spelling of a GPU stands for.


@lru_cache(maxsize=4096)
def resolve_gpu(name: str) -> frozenset[str]:
    """Canonical names a user's spelling stands for; an unknown one stands for itself."""
    try:
        return gpus.resolve(name)
    except gpus.UnknownGpu:
        return frozenset({name})
