"""The effective price of an offer for one job: what the hour will really cost, term by term.

    total = fee x (gpu + disk_GB x storage / 720 + what is fixed of it) + upload + restore

`upload` is the checkpoint traffic a job makes per hour, `restore` the one-time download spread over the stay that is
expected. Every term is rounded up to a micro-dollar.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Final

from spotd.core.canary import canary_time
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.copies import replace
from spotd.core.domain.jobs import GB, MOVED_COST_MAX, Job, bytes_within, disk_gb_for, hourly_within, per_hour
from spotd.core.domain.lineage import unsaved_time
from spotd.core.domain.market import NO_CHARGE, NOTHING, Elsewhere, PriceBreakdown, Quote
from spotd.core.domain.policy import Policy
from spotd.core.domain.world import PassedOver
from spotd_jobs.spec.model import PriceLimit, Resources
from spotd_providers.contract.values import (
    HOURS_PER_STORAGE_MONTH,
    Market,
    MicroUsd,
    MicroUsdPerGb,
    MicroUsdPerGbMonth,
    MicroUsdPerGpuHour,
    MicroUsdPerHour,
    Offer,
    as_usd,
    cost,
    per_gpu,
    shares,
    whole_machine,
)

PPM: Final = 1_000_000
OWN: Final = "own"
"""Stands for the market of a machine that is the user's own."""
DEFAULT_CHECKPOINT_INTERVAL: Final = timedelta(minutes=15)
_MINUTE: Final = timedelta(minutes=1)
INTERVALS_MIN: Final = 2
"""Between so many checkpoints of one attempt it shows how often it saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What of a job enters a price: disk, and traffic in bytes.

    Attributes:
        url_bytes: what each machine reads elsewhere than of the store, a part of what it restores.
        data_bytes: how large the datasets are that each machine waits for; 0 where it does not matter how long.
    """

    disk_gb: int
    upload_bytes_per_hour: int
    restore_bytes_per_hour: int
    store_bytes_per_hour: int | None = None
    """Of what is restored; `None` is all."""
    url_bytes: int = 0
    data_bytes: int = 0
    elsewhere: tuple[Elsewhere, ...] = ()
    """Those of the url_bytes that an owner is paid for."""


def needs_of(job: Job, policy: Policy) -> Needs:
    """Return what the job's newest checkpoint shows about its traffic; none is known before the first."""
    size = bytes_within(job.checkpoints[0].bytes) if job.checkpoints else 0
    restored = size + bytes_within(job.delivered_bytes)
    stay = max(policy.expected_stay, _MINUTE)
    needs = Needs(
        disk_gb=disk_gb_for(job),
        upload_bytes_per_hour=per_hour(size, checkpoint_interval(job)) if size else 0,
        restore_bytes_per_hour=per_hour(restored, stay) if restored else 0,
    )
    return _with_data(needs, job, restored, stay) if job.spec.data else needs


def _with_data(needs: Needs, job: Job, restored: int, stay: timedelta) -> Needs:
    """Return the needs with what the job's datasets add to them."""
    elsewhere = min(restored, bytes_within(job.url_bytes))
    return replace(
        needs,
        store_bytes_per_hour=per_hour(restored - elsewhere, stay) if elsewhere else None,
        url_bytes=elsewhere,
        data_bytes=bytes_within(job.data_bytes),
        elsewhere=tuple(
            Elsewhere(
                bytes=bytes_within(one.bytes),
                bytes_per_hour=per_hour(bytes_within(one.bytes), stay),
                egress=one.egress,
                near=one.near,
            )
            for one in job.spec.data
            if one.is_listed and one.egress
        ),
    )


def checkpoint_interval(job: Job) -> timedelta:
    """How often the job saves: as it states, or oftener where its newest attempt did; a quarter of it at the least.

    The instants are the host's own, which must not make a job unaffordable everywhere.
    """
    stated = max(job.spec.checkpoint.every or DEFAULT_CHECKPOINT_INTERVAL, _MINUTE)
    own = own_interval(job)
    return stated if own is None else min(stated, max(stated / 4, own, _MINUTE))


def own_interval(job: Job) -> timedelta | None:
    """Return how often the newest attempt that saved does so; `None` before it has saved three times.

    It is the median, since a best checkpoint that is kept may be far older than the others. The instants are the host's
    own: the result may be zero or less.
    """
    if len(job.checkpoints) < INTERVALS_MIN + 1:
        return None
    own = job.saved_by(job.checkpoints[0].attempt)
    if len(own) < INTERVALS_MIN + 1:
        return None
    gaps = sorted(newer - older for newer, older in pairwise(own))
    return (gaps[(len(gaps) - 1) // 2] + gaps[len(gaps) // 2]) / 2


def _up(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def storage_per_hour(offer: Offer, disk_gb: int) -> MicroUsdPerHour:
    return MicroUsdPerHour(_up(offer.storage_price * disk_gb, HOURS_PER_STORAGE_MONTH) + offer.storage_fixed)


def _traffic(bytes_per_hour: int, price: MicroUsdPerGb) -> MicroUsdPerHour:
    return MicroUsdPerHour(hourly_within(_up(bytes_per_hour * price, GB)))


def upload_per_hour(offer: Offer, job: Job, policy: Policy) -> MicroUsdPerHour:
    """Return what the checkpoints that a job saves cost per hour at this host, by what it is known to save."""
    if not offer.upload_price:
        return MicroUsdPerHour(0)
    return _traffic(needs_of(job, policy).upload_bytes_per_hour, offer.upload_price)


def restore_per_hour(offer: Offer, needs: Needs) -> MicroUsdPerHour:
    """Return what the one restore in each usual stay costs per hour."""
    return _traffic(needs.restore_bytes_per_hour, offer.download_price)


def usual_bid(offer: Offer, headroom_ppm: int) -> MicroUsdPerHour:
    """Return the price of the GPU part that would be agreed if nothing limits it: above the lowest bid that wins."""
    if not offer.pays_bid or offer.market is Market.ON_DEMAND:
        return offer.gpu_price
    bid = offer.gpu_price + offer.gpu_price * headroom_ppm // PPM
    if offer.on_demand_price is not None and bid >= offer.on_demand_price:
        bid = max(offer.gpu_price, offer.on_demand_price - 1)  # for as much, no bid can win it from us
    return MicroUsdPerHour(bid)


def total_per_hour(offer: Offer, needs: Needs, fee_ppm: int, gpu_price: int) -> int:
    """Return the effective price alone, in micro-dollars per hour; equals `breakdown(...).total` but builds nothing."""
    base = gpu_price + _up(offer.storage_price * needs.disk_gb, HOURS_PER_STORAGE_MONTH) + offer.storage_fixed
    total = base + _up(base * (fee_ppm - PPM), PPM)
    if needs.upload_bytes_per_hour:
        total += _traffic(needs.upload_bytes_per_hour, offer.upload_price)
    if needs.restore_bytes_per_hour:
        total += _traffic(needs.restore_bytes_per_hour, offer.download_price)
    return total


def breakdown(offer: Offer, gpu_price: MicroUsdPerHour, needs: Needs, fee_ppm: int) -> PriceBreakdown:
    """Every term, for this price of the GPU part."""
    storage = storage_per_hour(offer, needs.disk_gb)
    fee = _fee(gpu_price + storage, fee_ppm)
    upload = _traffic(needs.upload_bytes_per_hour, offer.upload_price)
    restore = _traffic(needs.restore_bytes_per_hour, offer.download_price)
    total = MicroUsdPerHour(gpu_price + storage + fee + upload + restore)
    return PriceBreakdown(
        gpu=gpu_price,
        storage=storage,
        fee=fee,
        upload=upload,
        restore=restore,
        total=total,
        per_gpu=per_gpu(total, offer.gpu_count),
        fee_ppm=fee_ppm,
    )


def _at_gpu_price(price: PriceBreakdown, gpu: MicroUsdPerHour, gpu_count: int) -> PriceBreakdown:
    fee = _fee(gpu + price.storage, price.fee_ppm)
    total = MicroUsdPerHour(gpu + price.storage + fee + price.upload + price.restore)
    return replace(price, gpu=gpu, fee=fee, total=total, per_gpu=per_gpu(total, gpu_count))


def _fee(base: int, fee_ppm: int) -> MicroUsdPerHour:
    return MicroUsdPerHour(_up(base * (fee_ppm - PPM), PPM))


def quote(
    offer: Offer,
    needs: Needs,
    fee_ppm: int,
    at: datetime,
    egress_price: MicroUsdPerGb = NO_CHARGE,
    *,
    is_own: bool = False,
) -> Quote:
    """Return the offer with its effective price for these needs."""
    on_demand = offer.on_demand_price
    if on_demand is None and offer.market is Market.ON_DEMAND:
        on_demand = offer.gpu_price
    return Quote(
        offer=offer,
        price=breakdown(offer, offer.gpu_price, needs, fee_ppm),
        on_demand=None if on_demand is None else MicroUsdPerHour(total_per_hour(offer, needs, fee_ppm, on_demand)),
        at=at,
        egress_price=egress_price,
        url_bytes=needs.url_bytes,
        url_cost=_elsewhere_cost(needs, offer) if needs.elsewhere else NOTHING,
        is_own=is_own,
    )


def _elsewhere_cost(needs: Needs, offer: Offer) -> MicroUsd:
    """Return what reading all data once costs that lies in buckets beside the store, rounded up."""
    exact = sum(_up(one.bytes * one.price_for(offer), GB) for one in needs.elsewhere)
    return MicroUsd(min(exact, MOVED_COST_MAX))


def repriced(agreed: Quote, gpu_price: MicroUsdPerHour) -> Quote:
    """Return the same quote at another price of its GPU part."""
    return replace(agreed, price=_at_gpu_price(agreed.price, gpu_price, agreed.offer.gpu_count))


def for_fewer(agreed: Quote, nodes: int) -> Quote:
    """Return what was agreed for several machines as it is for so many of them; their uploads stay what they are."""
    offer, price, before = agreed.offer, agreed.price, agreed.offer.nodes
    fewer = replace(
        offer,
        nodes=nodes,
        gpu_count=offer.gpu_count // before * nodes,
        gpu_price=MicroUsdPerHour(offer.gpu_price // before * nodes),
        on_demand_price=None if offer.on_demand_price is None else part_of(offer.on_demand_price, nodes, before),
        storage_price=MicroUsdPerGbMonth(offer.storage_price // before * nodes),
        storage_fixed=part_of(offer.storage_fixed, nodes, before),
        download_price=MicroUsdPerGb(offer.download_price // before * nodes),
    )
    rest = replace(price, storage=part_of(price.storage, nodes, before), restore=part_of(price.restore, nodes, before))
    return replace(
        agreed,
        offer=fewer,
        price=_at_gpu_price(rest, part_of(price.gpu, nodes, before), fewer.gpu_count),
        on_demand=None if agreed.on_demand is None else part_of(agreed.on_demand, nodes, before),
    )


def part_of(price: MicroUsdPerHour, nodes: int, before: int) -> MicroUsdPerHour:
    """Return the price of so many of equal machines, of what all of them cost before."""
    return MicroUsdPerHour(price * nodes // before)


def with_fee(agreed: Quote, fee_ppm: int) -> Quote:
    """Return the same quote with another fee, of the machine and of the same hardware on-demand."""
    gpu_count = agreed.offer.gpu_count
    price = _at_gpu_price(replace(agreed.price, fee_ppm=fee_ppm), agreed.price.gpu, gpu_count)
    on_demand = agreed.on_demand
    if on_demand is not None:
        # The fee is all that differs: what it was, as a part of the whole without traffic, is taken out first.
        traffic = price.upload + price.restore
        base = (on_demand - traffic) * PPM // agreed.price.fee_ppm
        on_demand = MicroUsdPerHour(base + _fee(base, fee_ppm) + traffic)
    return replace(agreed, price=price, on_demand=on_demand)


def gpu_price_limit(agreed: Quote, ceiling: MicroUsdPerGpuHour) -> MicroUsdPerHour:
    """Return the highest price of the GPU part at which the whole stays within the ceiling; 0 when none does."""
    return _highest(agreed, whole_machine(ceiling, agreed.offer.gpu_count), lambda price: price.per_gpu <= ceiling)


def gpu_price_within(agreed: Quote, total: int) -> MicroUsdPerHour:
    """Return the highest price of the GPU part at which the whole machine costs no more than this; 0 when none does."""
    return _highest(agreed, total, lambda price: price.total <= total)


def _highest(agreed: Quote, total: int, fits: Callable[[PriceBreakdown], bool]) -> MicroUsdPerHour:
    old = agreed.price
    limit = (total - old.upload - old.restore) * PPM // old.fee_ppm - old.storage
    while limit > 0 and not fits(_at_gpu_price(old, MicroUsdPerHour(limit), agreed.offer.gpu_count)):
        limit -= 1
    return MicroUsdPerHour(max(0, limit))


def metered_rate(agreed: Quote) -> MicroUsdPerHour:
    """Return what the machine's time costs: all of the price but the traffic, which is measured."""
    price = agreed.price
    return MicroUsdPerHour(price.total - price.upload - price.restore)


def listed_rate(agreed: Quote, gpu_price: MicroUsdPerHour) -> tuple[MicroUsdPerHour, MicroUsdPerGpuHour]:
    """Return what the machine's time costs at this price of its GPU part, and all of it per GPU, as `repriced` does."""
    price = agreed.price
    if gpu_price == price.gpu:
        return metered_rate(agreed), price.per_gpu
    base = gpu_price + price.storage
    rate = MicroUsdPerHour(base + _fee(base, price.fee_ppm))
    whole = MicroUsdPerHour(rate + price.upload + price.restore)
    return rate, per_gpu(whole, agreed.offer.gpu_count)


def on_demand_rate(agreed: Quote) -> MicroUsdPerHour | None:
    """Return what the time of the same hardware would cost on-demand, without the traffic either."""
    if agreed.on_demand is None:
        return None
    return MicroUsdPerHour(max(0, agreed.on_demand - agreed.price.upload - agreed.price.restore))


def traffic_cost(offer: Offer, uploaded_bytes: int, restored_bytes: int) -> MicroUsd:
    """Return what so many bytes cost at the prices of the offer, rounded up."""
    exact = _up(uploaded_bytes * offer.upload_price, GB) + _up(restored_bytes * offer.download_price, GB)
    return MicroUsd(min(exact, MOVED_COST_MAX))


def egress_cost(quote: Quote, restored_bytes: int) -> MicroUsd:
    """Return what the owners of the store and of other buckets ask for so many bytes that this host reads, rounded up.

    What it reads elsewhere counts as read first.
    """
    stored = max(0, restored_bytes - quote.url_bytes)
    elsewhere = 0
    if quote.url_cost and quote.url_bytes:
        elsewhere = _up(quote.url_cost * min(max(0, restored_bytes), quote.url_bytes), quote.url_bytes)
    return MicroUsd(min(_up(stored * quote.egress_price, GB) + elsewhere, MOVED_COST_MAX))


def moved_cost(quote: Quote, uploaded_bytes: int, restored_bytes: int) -> MicroUsd:
    """Return what so many bytes cost in all: at the host's prices, and at that of the store's owner."""
    moved = traffic_cost(quote.offer, uploaded_bytes, restored_bytes)
    return MicroUsd(min(moved + egress_cost(quote, restored_bytes), MOVED_COST_MAX))


def egress_per_hour(price: MicroUsdPerGb, needs: Needs, offer: Offer | None = None) -> MicroUsdPerHour:
    """Return what reading the store and other buckets for the one restore in each usual stay costs per hour.

    Args:
        offer: whose machine reads; `None`: the one that pays most for other buckets.
    """
    stored = needs.restore_bytes_per_hour if needs.store_bytes_per_hour is None else needs.store_bytes_per_hour
    prices = ((one, MicroUsdPerGb(one.egress) if offer is None else one.price_for(offer)) for one in needs.elsewhere)
    elsewhere = sum(_traffic(one.bytes_per_hour, asked) for one, asked in prices)
    return MicroUsdPerHour(hourly_within(_traffic(stored, price) + elsewhere))


def save_cost(job: Job, offer: Offer) -> MicroUsd:
    """Return what the upload of the job's next checkpoint costs, as far as those that are kept show its size."""
    return traffic_cost(offer, bytes_within(max((saved.bytes for saved in job.checkpoints), default=0)), 0)


def restore_cost(job: Job, there: Quote) -> MicroUsd:
    """Return what a new machine of this quote costs for what it reads before it works."""
    return moved_cost(there, 0, restored_bytes(job))


def restored_bytes(job: Job) -> int:
    """Return what a new machine reads before it works."""
    newest = bytes_within(job.checkpoints[0].bytes) if job.checkpoints else 0
    return newest + bytes_within(job.delivered_bytes)


def halted_rate(agreed: Quote) -> MicroUsdPerHour:
    """Return what a machine that does not run still costs: its disk, with the fee."""
    storage = agreed.price.storage
    return MicroUsdPerHour(storage + _fee(storage, agreed.price.fee_ppm))


# How long a machine must run before it is worth its launch: it boots, it restores, and only then it works.


BOOT: Final = timedelta(minutes=3)
"""From the launch until the runner speaks: renting, image and start script."""
BYTES_PER_S: Final = 25_000_000
"""Where an offer states no bandwidth, and at the least: what hosts of marketplaces do on a bad day."""
BYTES_PER_S_MAX: Final = 250_000_000
_BYTES_PER_MBIT: Final = 125_000
_MBPS_MAX: Final = 1e6


def restore_time(job: Job, offer: Offer | None) -> timedelta:
    """How long the newest checkpoint and the code take to arrive."""
    newest = job.checkpoints[0].bytes if job.checkpoints else 0
    stored = bytes_within(newest) + bytes_within(job.delivered_bytes)
    return transfer_time(stored, None if offer is None else offer.download_mbps)


def transfer_time(size: int, stated_mbps: float | None) -> timedelta:
    """Return how long so many bytes take to or from a machine whose offer states this bandwidth."""
    rate = BYTES_PER_S
    if stated_mbps is not None and 0 < stated_mbps < _MBPS_MAX:
        # Half of what is stated: it is shared, and measured on a good day.
        rate = max(rate, min(BYTES_PER_S_MAX, int(stated_mbps * _BYTES_PER_MBIT / 2)))
    return timedelta(seconds=size // rate)


def startup(job: Job, offer: Offer | None) -> timedelta:
    """Return what passes on a new machine before the job's own work begins."""
    return BOOT + restore_time(job, offer)


def useful_run(job: Job, offer: Offer | None, policy: Policy) -> timedelta:
    """Return the shortest run that is worth a launch: at least as much work as there is waiting before it."""
    waiting = startup(job, offer) + (timedelta(0) if offer is None else canary_time(offer, policy))
    return waiting + max(policy.useful_run, waiting)


def shortest_run(policy: Policy) -> timedelta:
    """Return what no useful run is shorter than, whatever the job restores."""
    return BOOT + max(policy.useful_run, BOOT)


# When a price a little above the ceiling is worth a restart, and when it is borne for a while.
#
# Theory. A spot price moves around any ceiling. To stop a machine costs what a restart costs: booting, restoring, and
# the work since the newest checkpoint. So a price that is above the ceiling by no more than a margin is borne until
# what it costs above the ceiling has grown to what the restart would, and never for longer than a dwell time. What is
# paid beyond the ceiling is thus at most `MARGIN_PERCENT` of it for `DWELL_MAX`. A launch is never admitted above the
# ceiling.


MARGIN_PERCENT: Final = 5
DWELL_MAX: Final = timedelta(minutes=10)


def borne_until(item: Attempt, job: Job, price: MicroUsdPerGpuHour, now: datetime) -> datetime | None:
    """Until when this price above the ceiling is borne, as far as is known now; `None` if it is not."""
    since, excess = item.over_ceiling_at, price - item.ceiling_now
    if since is None or since > now or excess * 100 > item.ceiling_now * MARGIN_PERCENT:
        return None
    ends_at = since + DWELL_MAX
    count = shares(item.quote.offer.gpu_count)
    paid = cost(MicroUsdPerHour(excess * count), now - since)
    lost = startup(job, item.quote.offer) + unsaved_time(job, item, now)  # what a restart costs
    return ends_at if now < ends_at and paid < cost(MicroUsdPerHour(price * count), lost) else None


# Money and machines in words, for the sentences that explain decisions.


_CENT: Final = 10_000
_DAY: Final = timedelta(days=1)
_YEAR: Final = timedelta(days=365.25)


def dollar_words(amount: MicroUsd) -> str:
    """Dollars and cents; a sum below one cent as it is, so that it never reads as nothing."""
    return f"${as_usd(amount):.6f}" if 0 < amount < _CENT else f"${as_usd(amount):.2f}"


def span_words(span: timedelta) -> str:
    """`8 s`, `33 min`, `2 h 5 min`: what is left, rounded up."""
    seconds = max(1, math.ceil(span.total_seconds()))
    if seconds < 120:
        return f"{seconds} s"
    hours, minutes = divmod(math.ceil(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def age_words(span: timedelta) -> str:
    """`33 min`, `2 h 5 min`, `3 days`, `6.9 years`: how long ago something was."""
    if span < 2 * _DAY:
        return span_words(span)
    return f"{span // _DAY} days" if span < 2 * _YEAR else f"{span / _YEAR:.1f} years"


def per_gpu_words(price: MicroUsdPerGpuHour) -> str:
    return f"${as_usd(price):.4f}/GPU-h"


def limit_words(limit: PriceLimit | None) -> str:
    """Return a job's ceiling in the unit in which it is stated."""
    if limit is not None and limit.machine_hour is not None:
        return f"${as_usd(limit.machine_hour):.4f}/h for the machine"
    if limit is not None and limit.per_gpu_hour is not None:
        return per_gpu_words(MicroUsdPerGpuHour(limit.per_gpu_hour))
    return "that of the config"


def quote_words(quote: Quote) -> str:
    """`1 x H100_SXM at vast (Texas, US), spot, $2.1000/GPU-h`; of a bid, the lowest that wins now besides."""
    offer = quote.offer
    place = f" ({offer.region})" if offer.region else ""
    floor = lowest_winning(quote)
    bidding = "" if floor is None else "bidding "
    wins = "" if floor is None else f" (lowest winning bid {per_gpu_words(floor)})"
    return (
        f"{machine_words(offer.gpu, offer.gpu_count, offer.nodes)} at {offer.provider}{place}, {market_word(quote)},"
        f" {bidding}{per_gpu_words(quote.price.per_gpu)}{wins}"
    )


def market_word(quote: Quote) -> str:
    """Return how the machine is sold: `spot`, `on-demand`, or `own`."""
    return OWN if quote.is_own else quote.offer.market.value


def machine_words(gpu: str, gpu_count: int, nodes: int = 1) -> str:
    """`8 x H100`, or that it has none; `2 machines with 4 x H100` of several."""
    if nodes > 1:
        return f"{nodes} machines with {machine_words(gpu, gpu_count // nodes)}"
    return f"{gpu_count} x {gpu}" if gpu_count else "a machine without a GPU"


def lowest_winning(quote: Quote) -> MicroUsdPerGpuHour | None:
    """Return the effective price at the lowest bid that wins, where more than that is bid."""
    if not quote.offer.pays_bid or quote.price.gpu <= quote.offer.gpu_price:
        return None
    return repriced(quote, quote.offer.gpu_price).price.per_gpu


def wanted_words(wanted: Resources) -> str:
    """`8 x H100 or 4 x A100_80GB`, or what stands for names; `2 machines with 8 x H100` of several."""
    if wanted.nodes > 1:
        return f"{wanted.nodes_words} machines with {wanted_words(replace(wanted, nodes=1, nodes_max=None))}"
    if wanted.gpu:
        return " or ".join(f"{one.count} x {one.name}" for one in wanted.gpu)
    if wanted.min_vram_mb is not None:
        return f"{wanted.gpu_count} x any GPU with {wanted.min_vram_mb / 1000:g} GB"
    if wanted.gpu_count == 0:
        least = [f"{wanted.cpus} CPUs"] if wanted.cpus else []
        least += [f"{wanted.memory_mb / 1000:g} GB of memory"] if wanted.memory_mb else []
        return "a machine without a GPU" + (f" that has {' and '.join(least)}" if least else "")
    return f"{wanted.gpu_count} x any GPU"


def most_frequent_first(counts: Mapping[str, int]) -> PassedOver:
    """Return the reasons and their counts in the order in which they are shown."""
    return tuple(sorted(counts.items(), key=lambda row: (-row[1], row[0])))


def passed_over_words(mismatches: Mapping[str, int]) -> str:
    """`3 too little disk, 1 another region`, most frequent first."""
    return ", ".join(f"{count} {why}" for why, count in most_frequent_first(mismatches))
