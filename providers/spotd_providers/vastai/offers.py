"""From search rows to offers, and from settings to a search: pure translation, no calls.

Prices. An ask is for all its GPUs. In the bid market the price is `min_bid`, the lowest bid that wins now; it holds
no storage and no traffic. On-demand it is `dph_base`. `dph_total` is of no use: it mixes in storage for a disk of the
search's size. One ask in ten has a `min_bid` above its own `dph_base`: there a bid buys an interruptible machine for
more than the uninterruptible one costs, so it is never offered as spot.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, Final

from spotd_providers.contract.gpus import canonical, gpu_info
from spotd_providers.contract.values import (
    MICRO,
    HostId,
    Interruption,
    LaunchRequest,
    Market,
    MicroUsdPerGb,
    MicroUsdPerGbMonth,
    MicroUsdPerHour,
    Offer,
    OfferId,
    PoolId,
    ProviderName,
    RegistryLogin,
    Rejected,
    micro_usd,
)
from spotd_providers.kit.calls import rejected
from spotd_providers.kit.template import require_launchable
from spotd_providers.vastai.wire import WHO, OfferRow, VastSettings

PROVIDER: Final = ProviderName("vast")
DISK_GB_MIN: Final = 8
DURATION_SHORTEST: Final = timedelta(minutes=10)
_DURATION_LONGEST_S: Final = 100 * 365 * 86400.0
_SUFFIX: Final = {Market.SPOT: "bid", Market.ON_DEMAND: "od"}
_TYPE: Final = {Market.SPOT: "bid", Market.ON_DEMAND: "on-demand"}


def search_body(settings: VastSettings, disk_gb: int, market: Market) -> dict[str, Any]:
    """Build the search for every offer of one market under these settings."""
    body: dict[str, Any] = {
        "external": {"eq": False},
        "rentable": {"eq": True},
        "order": [["dph_total", "asc"]],
        "type": _TYPE[market],
        "limit": settings.offers_max,
        "allocated_storage": float(max(disk_gb, DISK_GB_MIN)),
    }
    if market is Market.ON_DEMAND:
        # Not in the bid market: what somebody rents there now can be had for a higher bid.
        body["rented"] = {"eq": False}
    if settings.verified:
        body["verified"] = {"eq": True}
    if settings.datacenter:
        body["datacenter"] = {"eq": True}
    if settings.reliability_min is not None:
        body["reliability"] = {"gte": settings.reliability_min}
    if settings.cuda_min is not None:
        body["cuda_max_good"] = {"gte": settings.cuda_min}
    if settings.direct_ports_min:
        body["direct_port_count"] = {"gte": settings.direct_ports_min}
    if settings.duration_min is not None:
        body["duration"] = {"gte": settings.duration_min.total_seconds()}
    if settings.bandwidth_price_max is not None:
        body["inet_up_cost"] = {"lte": settings.bandwidth_price_max}
        body["inet_down_cost"] = {"lte": settings.bandwidth_price_max}
    return body


def names_of(gpu: str) -> tuple[str, ...]:
    """Return vast.ai's spellings of one canonical id; an id that has none known is spelled in vast.ai's way."""
    row = gpu_info(gpu)
    return tuple(sorted(row.vast if row is not None else ())) or (gpu.replace("_", " "),)


class _Rounded(dict[float, int]):
    """Micro-dollars of dollar figures, each worked out once: hosts repeat theirs over all their asks."""

    def __missing__(self, usd: float) -> int:
        self[usd] = amount = micro_usd(usd)
        return amount


class OnDemandPrices:
    """Prices of the same hardware without interruption, by ask and by machine and GPU count."""

    def __init__(self, rows: Iterable[OfferRow] = ()) -> None:
        self._by_ask: dict[int, float] = {}
        self._by_machine: dict[tuple[int, int], float] = {}
        for row in rows:
            self._by_ask[row.id] = row.dph_base
            place = (row.machine_id, row.num_gpus)
            self._by_machine[place] = min(row.dph_base, self._by_machine.get(place, row.dph_base))

    def of(self, row: OfferRow) -> float | None:
        """Return the known on-demand price of this hardware, if any."""
        price = self._by_ask.get(row.id)
        return self._by_machine.get((row.machine_id, row.num_gpus)) if price is None else price


def offers_of(
    rows: Iterable[OfferRow], market: Market, settings: VastSettings, *, on_demand: OnDemandPrices
) -> tuple[list[Offer], list[Rejected]]:
    """Translate every row to a priced offer, or reject it with the reason that a user reads."""
    offers: list[Offer] = []
    rejected: list[Rejected] = []
    gpu_ids: dict[tuple[str, float], str] = {}
    usd = _Rounded()
    for row in rows:
        reason = _unwanted(row, settings) or _not_sold(row, market, on_demand)
        if reason is not None:
            rejected.append(Rejected(offer_id=_offer_id(row, market), reason=reason))
            continue
        kind = (row.gpu_name, row.gpu_ram)
        gpu = gpu_ids.get(kind)
        if gpu is None:
            gpu = gpu_ids[kind] = canonical(PROVIDER, row.gpu_name, round(row.gpu_ram))
        offers.append(_offer(row, market, gpu, on_demand, usd))
    return offers, rejected


def _offer(row: OfferRow, market: Market, gpu: str, on_demand: OnDemandPrices, usd: _Rounded) -> Offer:
    machine = str(row.machine_id)
    spot = market is Market.SPOT
    # `_not_sold` has refused rows without a bid.
    price = row.min_bid if spot and row.min_bid is not None else row.dph_base
    return Offer(
        provider=PROVIDER,
        offer_id=OfferId(_offer_id(row, market)),
        host_id=HostId(machine),
        pool=PoolId(machine),
        market=market,
        interruption=Interruption.SUDDEN if spot else Interruption.NEVER,
        gpu=gpu,
        gpu_count=row.num_gpus,
        gpu_vram_mb=round(row.gpu_ram),
        gpu_price=MicroUsdPerHour(usd[price]),
        pays_bid=spot,
        on_demand_price=_on_demand_price(row, market, on_demand, usd),
        storage_price=MicroUsdPerGbMonth(usd[row.storage_cost]),
        upload_price=MicroUsdPerGb(usd[row.inet_up_cost]),
        download_price=MicroUsdPerGb(usd[row.inet_down_cost]),
        region=country(row.geolocation),
        cpus=row.cpu_cores_effective,
        memory_mb=None if row.cpu_ram is None else round(row.cpu_ram),
        disk_gb_max=None if row.disk_space is None else int(row.disk_space),
        cuda_max=None if row.cuda_max_good is None else f"{row.cuda_max_good:.1f}",
        reliability=_reliability(row),
        upload_mbps=row.inet_up,
        download_mbps=row.inet_down,
        duration_max=_duration(row),
        speed_score=row.dlperf or None,
        extra=_extra(row),
    )


def _extra(row: OfferRow) -> Mapping[str, str]:
    location = (row.geolocation or "").strip(" ,")
    return {"ask": str(row.id), "location": location} if location else {"ask": str(row.id)}


def _on_demand_price(row: OfferRow, market: Market, on_demand: OnDemandPrices, usd: _Rounded) -> MicroUsdPerHour | None:
    seen = row.dph_base if market is Market.ON_DEMAND else on_demand.of(row)
    if seen is None and row.min_bid is not None and row.dph_base > row.min_bid:
        seen = row.dph_base  # a bid row whose base price is not just its bid states the on-demand price
    return None if seen is None else MicroUsdPerHour(usd[seen])


def _not_sold(row: OfferRow, market: Market, on_demand: OnDemandPrices) -> str | None:
    """Return why this row cannot be had in this market, or should not."""
    if market is Market.ON_DEMAND:
        return "already rented" if row.rented is True else None
    bid = row.min_bid
    if not bid:
        return "min_bid: no bid price, so it is not sold by bid"
    if bid > row.dph_base:
        return f"the lowest bid (${bid:.4f}/h) is above the on-demand price (${row.dph_base:.4f}/h)"
    price = on_demand.of(row)
    if price is not None and bid > price:
        return f"the lowest bid (${bid:.4f}/h) is above the on-demand price (${price:.4f}/h)"
    return None


def _unwanted(row: OfferRow, settings: VastSettings) -> str | None:
    """Return the setting or fact that keeps this row out, if any; vast.ai is not trusted to have filtered."""
    if row.rentable is False:
        return "not rentable now"
    if row.external is True:
        return "an external offer, not vast.ai's own market"
    if settings.verified and row.verification is not None and row.verification != "verified":
        return f"the host is {row.verification} (providers.vast.verified)"
    if settings.datacenter and not (row.hosting_type or 0) >= 1:
        return "not in a datacentre (providers.vast.datacenter)"
    if settings.cpu_arch != "any" and row.cpu_arch not in (None, settings.cpu_arch):
        return f"the processor is {row.cpu_arch} (providers.vast.cpu_arch)"
    if not settings.laptops and "laptop" in row.gpu_name.lower():
        return "a laptop GPU (providers.vast.laptops)"
    return _below(row, settings)


def _below(row: OfferRow, settings: VastSettings) -> str | None:
    reliability = _reliability(row)
    if settings.reliability_min is not None and (reliability is None or reliability < settings.reliability_min):
        return f"reliability {reliability} is too low (providers.vast.reliability_min)"
    if settings.cuda_min is not None and (row.cuda_max_good is None or row.cuda_max_good < settings.cuda_min):
        return f"the driver supports CUDA {row.cuda_max_good} only (providers.vast.cuda_min)"
    if settings.direct_ports_min and (row.direct_port_count or 0) < settings.direct_ports_min:
        return f"{row.direct_port_count or 0} direct ports (providers.vast.direct_ports_min)"
    costliest = max(row.inet_up_cost, row.inet_down_cost)
    if settings.bandwidth_price_max is not None and costliest > settings.bandwidth_price_max:
        return f"traffic costs ${costliest:.4f}/GB (providers.vast.bandwidth_price_max)"
    shortest = settings.duration_min or DURATION_SHORTEST
    if row.duration is not None and row.duration < shortest.total_seconds():
        return f"the host is on offer for {row.duration / 3600:.1f} h more only (providers.vast.duration_min)"
    return None


def _duration(row: OfferRow) -> timedelta | None:
    if row.duration is None:
        return None
    return timedelta(seconds=min(max(row.duration, 0.0), _DURATION_LONGEST_S))


def _reliability(row: OfferRow) -> float | None:
    value = row.reliability if row.reliability2 is None else row.reliability2
    return None if value is None else min(value, 1.0)


def _offer_id(row: OfferRow, market: Market) -> str:
    # One ask is sold in both markets at different prices: two offers.
    return f"{row.id}:{_SUFFIX[market]}"


def country(geolocation: str | None) -> str:
    """Return the country code of `City, CC`, else the text itself."""
    text = (geolocation or "").strip(" ,")
    code = text.rpartition(",")[2].strip()
    return code.upper() if len(code) == 2 and code.isalpha() else text


# The body of a purchase.


SHELL: Final = "/bin/sh"
_PLAIN_WORD: Final = re.compile(r"[A-Za-z0-9._~+/=:@%!][A-Za-z0-9._~+/=:@%!-]*")
ARGUMENTS_CHARS_MAX: Final = 4096
SCRIPT_CHARS_MAX: Final = ARGUMENTS_CHARS_MAX - len(SHELL) - len("-c")
LABEL_CHARS_MAX: Final = 256
IMAGE_CHARS_MAX: Final = 1024
BID_USD_MIN: Final = 0.001
BID_USD_MAX: Final = 128.0


def request_body(request: LaunchRequest) -> tuple[int, dict[str, Any]]:
    """Build the purchase: the ask to buy, and the body.

    `price` makes it a bid; without it vast.ai silently sells on-demand. `cancel_unavail` makes an unavailable GPU an
    error where the default for bids is a stopped contract that bills. `onstart` carries the entrypoint in this style.

    Raises:
        RequestRejected: it can not be asked for.
    """
    require_launchable(
        request,
        who=WHO,
        extra=("ask",),
        script_bytes_max=SCRIPT_CHARS_MAX,
        key_chars_max=LABEL_CHARS_MAX,
        image_chars_max=IMAGE_CHARS_MAX,
    )
    ask = request.offer.extra["ask"]
    if not ask.isdecimal():
        raise rejected(WHO, "offer", "it is not an offer of vast.ai")
    body: dict[str, Any] = {
        "client_id": "me",
        "image": request.image,
        "disk": max(request.disk_gb, DISK_GB_MIN),
        "label": request.key,
        "runtype": "args",
        "onstart": SHELL,
        "args": ["-c", request.start_script],
        "user": "root",
        "env": {},
        "cancel_unavail": True,
    }
    if request.offer.market is Market.SPOT:
        price = request.price_max / MICRO
        if not BID_USD_MIN <= price <= BID_USD_MAX:
            raise rejected(WHO, "price_max", f"vast.ai takes bids from ${BID_USD_MIN} to ${BID_USD_MAX:.0f} per hour")
        body["price"] = price
    if request.login is not None:
        body["image_login"] = _image_login(request.login)
    return int(ask), body


def _image_login(login: RegistryLogin) -> str:
    """Return the login as vast.ai's documented create takes it: `-u USER -p PASS registry`.

    How vast.ai splits that text is not documented, so only characters are sent that no shell or splitter changes.

    Raises:
        RequestRejected: a part holds another one.
    """
    parts = {"username": login.username, "password": login.password.reveal(), "server": login.server}
    for name, part in parts.items():
        if _PLAIN_WORD.fullmatch(part) is None:
            allowed = "letters, digits and . _ ~ + / = : @ % ! -, and does not begin with -"
            raise rejected(WHO, f"login.{name}", f"for vast.ai the {name} of a registry holds only {allowed}")
    return f"-u {login.username} -p {parts['password']} {login.server}"
