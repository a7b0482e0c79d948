"""The effective price of an offer for one job: what the hour will really cost, term by term.

    total = fee x (gpu + disk_GB x storage / 720 + what is fixed of it) + upload + restore

`upload` is the checkpoint traffic a job makes per hour, `restore` the one-time download spread over the stay that is
expected. Every term is rounded up to a micro-dollar.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Final

from spotd.core.domain.bounds import MOVED_COST_MAX, bytes_within, hourly_within, per_hour
from spotd.core.domain.disk import GB, disk_gb_for
from spotd.core.domain.egress import NO_CHARGE
from spotd.core.domain.jobs import Job
from spotd.core.domain.policy import Policy
from spotd.core.domain.quotes import PriceBreakdown, Quote
from spotd_providers.contract.money import (
    HOURS_PER_STORAGE_MONTH,
    MicroUsd,
    MicroUsdPerGb,
    MicroUsdPerGpuHour,
    MicroUsdPerHour,
    per_gpu,
    whole_machine,
)
from spotd_providers.contract.values import Market, Offer

PPM: Final = 1_000_000
DEFAULT_CHECKPOINT_INTERVAL: Final = timedelta(minutes=15)
_MINUTE: Final = timedelta(minutes=1)
INTERVALS_MIN: Final = 2
"""Between so many checkpoints of one attempt it shows how often it saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What of a job enters a price: disk, and traffic in bytes."""

    disk_gb: int
    upload_bytes_per_hour: int
    restore_bytes_per_hour: int


def needs_of(job: Job, policy: Policy) -> Needs:
    """Return what the job's newest checkpoint shows about its traffic; none is known before the first."""
    size = bytes_within(job.checkpoints[0].bytes) if job.checkpoints else 0
    restored = size + bytes_within(job.delivered_bytes)
    return Needs(
        disk_gb=disk_gb_for(job),
        upload_bytes_per_hour=per_hour(size, checkpoint_interval(job)) if size else 0,
        restore_bytes_per_hour=per_hour(restored, max(policy.expected_stay, _MINUTE)) if restored else 0,
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


def quote(offer: Offer, needs: Needs, fee_ppm: int, at: datetime, egress_price: MicroUsdPerGb = NO_CHARGE) -> Quote:
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
    )


def repriced(agreed: Quote, gpu_price: MicroUsdPerHour) -> Quote:
    """Return the same quote at another price of its GPU part."""
    return replace(agreed, price=_at_gpu_price(agreed.price, gpu_price, agreed.offer.gpu_count))


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
    """Return what the owner of the checkpoint store asks for so many bytes that this host reads, rounded up."""
    return MicroUsd(min(_up(restored_bytes * quote.egress_price, GB), MOVED_COST_MAX))


def moved_cost(quote: Quote, uploaded_bytes: int, restored_bytes: int) -> MicroUsd:
    """Return what so many bytes cost in all: at the host's prices, and at that of the store's owner."""
    moved = traffic_cost(quote.offer, uploaded_bytes, restored_bytes)
    return MicroUsd(min(moved + egress_cost(quote, restored_bytes), MOVED_COST_MAX))


def egress_per_hour(price: MicroUsdPerGb, needs: Needs) -> MicroUsdPerHour:
    """Return what reading the store for the one restore in each usual stay costs per hour."""
    return _traffic(needs.restore_bytes_per_hour, price)


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
