"""From AWS's price rows to offers: one per type, zone and market, lost together as the pool `type:zone`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import anyio

from spotd_providers.aws.answers import family_quota, region_quota
from spotd_providers.aws.prices import AwsOnDemandPrices, Band
from spotd_providers.aws.region import IMAGE_GB, LINUX_PRODUCTS, Pool, Region
from spotd_providers.aws.sdk import AwsSettings
from spotd_providers.aws.wire import (
    INSTALL_TAG,
    KEY_TAG,
    WHO,
    AwsInstanceRow,
    Hardware,
    PriceRow,
    SpotRequestRow,
    spot_price,
)
from spotd_providers.contract.errors import ProviderError
from spotd_providers.contract.provider import OfferPriceHistory, PriceHistoryPage, Services
from spotd_providers.contract.values import (
    HOURS_PER_STORAGE_MONTH,
    AttemptKey,
    Billing,
    InstallId,
    Instance,
    InstanceId,
    InstanceRef,
    InstanceState,
    Interruption,
    Loss,
    Market,
    MicroUsdPerGb,
    MicroUsdPerGbMonth,
    MicroUsdPerHour,
    Offer,
    OfferId,
    PoolId,
    ProviderName,
    Rejected,
    micro_usd,
)
from spotd_providers.kit.calls import past_page
from spotd_providers.kit.shapes import row_or_none
from spotd_providers.kit.text import clean, key_of

PROVIDER: Final = ProviderName("aws")
GP3_PRICE: Final = MicroUsdPerGbMonth(80_000)
"""Of a general purpose disk in us-east-1; other regions cost up to half more, a cent per hour for 100 GB."""
GP3_MB_PER_S_FREE: Final = 125
THROUGHPUT_PRICE: Final = 40_000
"""Micro-dollars per MB/s and month beyond what is free."""
ADDRESS_PRICE: Final = 5_000
"""Micro-dollars per hour of a public IPv4 address, which each machine has."""
DISK_GB_MAX: Final = 16_000
PRICES_AGAIN: Final = timedelta(minutes=15)
PRICE_AGAIN: Final = timedelta(minutes=1)
"""How often past prices are read, and how often one that differs from the price of now."""
PRICES_WITHIN_S: Final = 20.0
"""A list of machines does not wait longer for past prices."""
PRICES_MAX: Final = 200
"""Of each pool: more than a week of hourly changes."""
_OLDEST: Final = datetime.min.replace(tzinfo=UTC)


def storage_fixed(image_gb: int, mb_per_s: int) -> MicroUsdPerHour:
    """Compute what AWS bills per hour for each machine besides the disk that its job asked for, rounded up."""
    monthly = GP3_PRICE * image_gb + THROUGHPUT_PRICE * max(0, mb_per_s - GP3_MB_PER_S_FREE)
    return MicroUsdPerHour(-(-monthly // HOURS_PER_STORAGE_MONTH) + ADDRESS_PRICE)


def current_prices(rows: Iterable[Any]) -> tuple[dict[Pool, MicroUsdPerHour], list[Rejected]]:
    """Return the price in force of each pool: that of its newest Linux row. If that is invalid, the pool has none."""
    newest: dict[Pool, PriceRow] = {}
    rejected: list[Rejected] = []
    for raw in rows:
        row = row_or_none(PriceRow, raw)
        if row is None:
            rejected.append(Rejected(offer_id="unreadable", reason="a price row lacks type, zone, product or price"))
            continue
        if row.ProductDescription not in LINUX_PRODUCTS:
            continue
        pool = (row.InstanceType, row.AvailabilityZone)
        known = newest.get(pool)
        if known is None or _began(known) <= _began(row):
            newest[pool] = row
    prices: dict[Pool, MicroUsdPerHour] = {}
    for pool, row in newest.items():
        try:
            prices[pool] = spot_price(row.SpotPrice)
        except ValueError as exc:
            rejected.append(Rejected(offer_id=offer_id(pool, Market.SPOT), reason=str(exc)))
    return prices, rejected


def price_changes(rows: Iterable[Any], kind: str) -> tuple[dict[Pool, dict[datetime, MicroUsdPerHour]], int]:
    """Return since when each pool of this type had which price, and how many rows cannot be read."""
    found: defaultdict[Pool, dict[datetime, MicroUsdPerHour]] = defaultdict(dict)
    rejected = 0
    for raw in rows:
        row = row_or_none(PriceRow, raw)
        if row is None or row.Timestamp is None or row.Timestamp.tzinfo is None:
            rejected += 1
        elif row.ProductDescription in LINUX_PRODUCTS and row.InstanceType == kind:
            try:
                price = spot_price(row.SpotPrice)
            except ValueError:
                rejected += 1
            else:
                found[kind, row.AvailabilityZone][row.Timestamp.astimezone(UTC)] = price
    return found, rejected


class PastPrices:
    """What EC2 states of the spot price of a pool since the launch of our oldest machine there.

    It is read when a machine is seen first, as after the daemon was dead, and again when the price differs, or after a
    while, in which it may have changed and changed back.
    """

    def __init__(self, region: Region, services: Services) -> None:
        self._region = region
        self._services = services
        self._known: dict[Pool, dict[datetime, MicroUsdPerHour]] = {}
        self._read_at: dict[Pool, datetime] = {}
        self._tried_at: dict[Pool, datetime] = {}

    async def of(
        self, launched: Mapping[Pool, datetime], prices: dict[Pool, MicroUsdPerHour]
    ) -> Mapping[Pool, tuple[tuple[datetime, MicroUsdPerHour], ...]]:
        """Return the prices of these pools, oldest first, and put the newest that was read now into `prices`.

        `launched`: the first launch of a machine in each.

        A pool whose prices cannot be read keeps those that were read before: that costs a cent, and no machine.
        """
        for gone in self._tried_at.keys() - launched.keys():
            for memory in (self._known, self._read_at, self._tried_at):
                memory.pop(gone, None)
        for pool, since in launched.items():
            now, tried_at = self._services.clock.now(), self._tried_at.get(pool)
            own = self._known.get(pool, {})
            differs = own and pool in prices and own[max(own)] != prices[pool]
            if tried_at is not None and now - tried_at < (PRICE_AGAIN if differs else PRICES_AGAIN):
                continue
            self._tried_at[pool] = now
            try:
                with anyio.fail_after(PRICES_WITHIN_S):
                    rows = await self._region.price_rows(pool, since=self._read_at.get(pool, since))
            except (ProviderError, TimeoutError) as exc:
                self._services.log.warning("aws.past_prices_unknown", pool=":".join(pool), detail=str(exc))
                continue
            changes = price_changes(rows, pool[0])[0].get(pool, {})
            self._known[pool] = own = dict(sorted({**own, **changes}.items())[-PRICES_MAX:])
            self._read_at[pool] = now
            if own:
                prices[pool] = own[max(own)]
        return {pool: tuple(own.items()) for pool, own in self._known.items()}


HISTORY_KEPT: Final = timedelta(days=90)
"""What AWS states of the past, type by type."""


class AwsPriceHistory:
    """`Power.PRICE_HISTORY` for a provider with regions. A page is one type in one region; its name is the cursor."""

    _regions: Mapping[str, Region]
    _services: Services

    async def price_history(self, since: datetime, *, after: str) -> PriceHistoryPage:
        """Return what one type has cost in each zone of a region.

        The newest change before `since` comes with the rows, and is the price that held then.
        """
        sold = {
            f"{name}/{kind}": (region, hardware)
            for name, region in sorted(self._regions.items())
            for kind, hardware in sorted((await region.kinds()).usable.items())
            if hardware.gpu_count
        }
        page = past_page(list(sold), since, self._services.clock.now(), after=after, kept=HISTORY_KEPT, who=WHO)
        if not page.names:
            return page.answer()
        region, hardware = sold[page.names[0]]
        rows = await region.history_rows(hardware.instance_type, page.since)
        return page.answer(*offers_of_past(rows, hardware))


def offers_of_past(rows: Iterable[Any], hardware: Hardware) -> tuple[tuple[OfferPriceHistory, ...], int]:
    """Return the changes of each zone, and how many rows cannot be used."""
    found, rejected = price_changes(rows, hardware.instance_type)
    offers = tuple(
        OfferPriceHistory(
            provider=PROVIDER,
            offer_id=offer_id(pool, Market.SPOT),
            pool=PoolId(":".join(pool)),
            market=Market.SPOT,
            gpu=hardware.gpu,
            gpu_count=hardware.gpu_count,
            storage_price=GP3_PRICE,
            changes=tuple(sorted(changes.items())),
        )
        for pool, changes in sorted(found.items())
    )
    return offers, rejected


def on_demand_prices(
    pools: Iterable[Pool], on_demand: AwsOnDemandPrices
) -> tuple[dict[Pool, MicroUsdPerHour], list[Rejected]]:
    """Return the list price of each pool, and the pools of which none is known."""
    prices: dict[Pool, MicroUsdPerHour] = {}
    rejected: list[Rejected] = []
    for pool in pools:
        price = on_demand.price(pool[0])
        if price is None:
            rejected.append(Rejected(offer_id=offer_id(pool, Market.ON_DEMAND), reason=on_demand.absence()))
        else:
            prices[pool] = price
    return prices, rejected


def offer_id(pool: Pool, market: Market) -> OfferId:
    """Name an offer, the same as long as the type is sold in the zone."""
    return OfferId(f"{pool[0]}:{pool[1]}:{market.value}")


def offers_of(
    prices: Mapping[Pool, MicroUsdPerHour],
    market: Market,
    kinds: Mapping[str, Hardware],
    zones: Collection[str],
    on_demand: AwsOnDemandPrices,
    settings: AwsSettings,
    *,
    scores: Mapping[Pool, int],
    bands: Mapping[tuple[str, str], Band],
    image_gb: int = IMAGE_GB,
) -> tuple[list[Offer], list[Rejected]]:
    """Offer every priced pool, or reject it with a reason: `zones` are those that machines can be launched in.

    `scores` say how likely AWS gives a machine there, `bands` how often types are interrupted in their regions.
    """
    offers: list[Offer] = []
    rejected: list[Rejected] = []
    egress = MicroUsdPerGb(micro_usd(settings.egress_usd_per_gb))
    for pool, price in prices.items():
        kind, zone = kinds.get(pool[0]), pool[1]
        identity = offer_id(pool, market)
        if kind is None:
            rejected.append(Rejected(offer_id=identity, reason="what this instance type holds is not known"))
            continue
        if market.value not in kind.sold_as:
            rejected.append(Rejected(offer_id=identity, reason=f"the type is not sold {market.value}"))
            continue
        if zone not in zones:
            reason = f"there is no subnet with free addresses in {zone}; see subnets"
            rejected.append(Rejected(offer_id=identity, reason=reason))
            continue
        band = bands.get((on_demand.region, pool[0]))
        offers.append(
            Offer(
                provider=PROVIDER,
                offer_id=identity,
                pool=PoolId(f"{pool[0]}:{zone}"),
                quotas=(family_quota(pool[0], on_demand.region, market), region_quota(on_demand.region)),
                market=market,
                interruption=Interruption.NOTICE if market is Market.SPOT else Interruption.NEVER,
                gpu=kind.gpu,
                gpu_count=kind.gpu_count,
                gpu_vram_mb=kind.gpu_vram_mb,
                gpu_price=price,
                pays_bid=False,
                on_demand_price=on_demand.price(pool[0]),
                storage_price=GP3_PRICE,
                storage_fixed=storage_fixed(image_gb, settings.volume_mb_per_s),
                upload_price=egress,
                region=on_demand.region,
                cpus=float(kind.cpus) if kind.cpus is not None else None,
                memory_mb=kind.memory_mb,
                disk_gb_max=DISK_GB_MAX,
                capacity_score=scores.get(pool),
                hazard_ppm=None if band is None else band.hazard_ppm,
                extra={"region": on_demand.region, "zone": zone, "type": pool[0]},
            )
        )
    return offers, rejected


def _began(row: PriceRow) -> datetime:
    at = row.Timestamp
    return _OLDEST if at is None or at.tzinfo is None else at


# From rows of DescribeInstances, and their spot requests, to instances.


NOTICE: Final = timedelta(minutes=2)
STATES: Final[Mapping[str, InstanceState]] = {
    "pending": InstanceState.PENDING,
    "running": InstanceState.RUNNING,
    "shutting-down": InstanceState.ENDING,
    "terminated": InstanceState.GONE,
    "stopping": InstanceState.PAUSED,
    "stopped": InstanceState.PAUSED,
}
# On an interruption the request says so at once, while the machine still runs for two minutes.
ANNOUNCED: Final = frozenset(
    {
        "marked-for-termination",
        "marked-for-stop",
        "instance-terminated-no-capacity",
        "instance-terminated-by-price",
        "instance-terminated-by-service",
        "instance-terminated-by-schedule",
        "instance-terminated-launch-group-constraint",
        "instance-stopped-no-capacity",
        "instance-stopped-by-price",
    }
)
BY_PRICE: Final = frozenset({"instance-terminated-by-price", "instance-stopped-by-price"})
LOSSES: Final[Mapping[str, Loss]] = {
    "Server.SpotInstanceTermination": Loss.PREEMPTED,
    "Server.SpotInstanceShutdown": Loss.PREEMPTED,
    "Client.InstanceInitiatedShutdown": Loss.SELF,
    "Server.InsufficientInstanceCapacity": Loss.NO_CAPACITY,
    "Client.VolumeLimitExceeded": Loss.PROVISION_FAILED,
    "Client.InvalidSnapshot.NotFound": Loss.PROVISION_FAILED,
    "Client.InternalError": Loss.PROVISION_FAILED,
    "Server.InternalError": Loss.HOST_LOST,
    "Server.ScheduledStop": Loss.HOST_LOST,
}
_BILLED: Final = {
    InstanceState.PENDING: Billing.DISK,
    InstanceState.RUNNING: Billing.FULL,
    InstanceState.PAUSED: Billing.DISK,
}
_WHEN: Final = re.compile(r"\((\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.\d+)?(?: GMT|Z)\)\s*$")
"""The instant at the end of a transition's reason: `User initiated (2026-03-02 12:00:00 GMT)`."""
_RUNS: Final = frozenset({InstanceState.PENDING, InstanceState.RUNNING, InstanceState.UNKNOWN})


def key_in(row: AwsInstanceRow, install: InstallId) -> AttemptKey | None:
    """Return the key in the machine's tags, or in its launch's token while the tags are not visible yet."""
    tags = row.tags
    if tags.get(INSTALL_TAG, install) != install:
        return None
    return key_of(tags.get(KEY_TAG) or (row.ClientToken or "").partition("/")[0], install)


def state_of(row: AwsInstanceRow) -> InstanceState:
    """Return the state of a machine; one that is not documented, or not stated, is unknown, never gone."""
    return STATES.get(row.State.Name if row.State is not None else "", InstanceState.UNKNOWN)


def pool_of(row: AwsInstanceRow) -> Pool:
    """Return the type and the zone of a machine, empty where AWS does not state them."""
    return row.InstanceType or "", row.Placement.AvailabilityZone if row.Placement is not None else ""


def as_instance(
    row: AwsInstanceRow,
    key: AttemptKey,
    *,
    region: str,
    request: SpotRequestRow | None,
    prices: Mapping[tuple[str, str], MicroUsdPerHour],
    announced_at: datetime | None = None,
    past_prices: tuple[tuple[datetime, MicroUsdPerHour], ...] = (),
) -> Instance:
    """Translate a row to a machine.

    `announced_at` is when we first saw an announced interruption, for one whose own time cannot be read.
    """
    state = state_of(row)
    code = request.Status.Code if request is not None else ""
    decided_at = announced_at
    if request is not None and request.Status.UpdateTime is not None:
        decided_at = request.Status.UpdateTime.astimezone(UTC)
    notice_at = decided_at + NOTICE if decided_at is not None and is_announced(row, request) else None
    spot = row.InstanceLifecycle == "spot"
    return Instance(
        ref=InstanceRef(provider=PROVIDER, instance_id=InstanceId(row.InstanceId), scope=region),
        key=key,
        state=state,
        market=Market.SPOT if spot else Market.ON_DEMAND,
        price=prices.get(pool_of(row)) if spot else None,
        created_at=row.LaunchTime.astimezone(UTC) if row.LaunchTime is not None else None,
        notice_at=notice_at,
        loss=None if state in _RUNS else _loss(row, code),
        detail=clean(" ".join(part for part in (_said(row), code) if part)),
        billing=_BILLED.get(state, Billing.UNKNOWN),
        ended_at=None if state in _RUNS else _ended_at(row, request),
        past_prices=past_prices,
    )


def is_announced(row: AwsInstanceRow, request: SpotRequestRow | None) -> bool:
    """Whether EC2 has said that it takes this machine, which still runs."""
    return state_of(row) in _RUNS and request is not None and request.Status.Code in ANNOUNCED


def _ended_at(row: AwsInstanceRow, request: SpotRequestRow | None) -> datetime | None:
    """When it stopped, as its last transition states it, or the end of its spot request by EC2."""
    found = _WHEN.search(row.StateTransitionReason or "")
    if found is not None:
        try:
            return datetime.fromisoformat(f"{found[1]}T{found[2]}+00:00")
        except ValueError:
            return None
    if request is not None and request.Status.Code.startswith(("instance-terminated-", "instance-stopped-")):
        at = request.Status.UpdateTime
        return None if at is None or at.tzinfo is None else at.astimezone(UTC)
    return None


def _loss(row: AwsInstanceRow, code: str) -> Loss | None:
    reason = row.StateReason
    if reason is None or not reason.Code:
        return Loss.PREEMPTED if code in ANNOUNCED else None
    if reason.Code == "Server.InternalError" and "launch" in reason.Message.lower():
        return Loss.PROVISION_FAILED
    loss = LOSSES.get(reason.Code)
    if loss is None and reason.Code.startswith("Server.SpotInstance"):
        loss = Loss.PREEMPTED
    return Loss.OUTBID if loss is Loss.PREEMPTED and code in BY_PRICE else loss


def _said(row: AwsInstanceRow) -> str:
    if row.StateReason is not None and row.StateReason.Message:
        return row.StateReason.Message
    return row.StateTransitionReason or ""
