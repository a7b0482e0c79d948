"""What a job accepts to pay for a machine, and what is agreed or bid within that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from spotd.core.domain.gpu_names import resolve_gpu
from spotd.core.domain.jobs import Job
from spotd.core.domain.policy import Policy
from spotd.core.domain.quotes import Quote
from spotd.core.pricing.effective_price import gpu_price_limit, gpu_price_within, repriced, usual_bid
from spotd.core.ranking.machine_speed import Kind
from spotd.core.ranking.ranked_offers import RankedOffers
from spotd_jobs.spec.model import PriceLimit, Resources
from spotd_providers.contract.money import MicroUsdPerGpuHour, MicroUsdPerHour, per_gpu, shares, whole_machine
from spotd_providers.contract.values import Market


def ceiling_for(gpu: str, gpu_count: int, limit: PriceLimit | None, policy: Policy) -> MicroUsdPerGpuHour | None:
    """Return the highest effective price per GPU-hour for this GPU: the job's own, else the config's, else `None`.

    The GPU may be spelled in any way. A name that leaves its form open has the lowest ceiling of what it may be.
    """
    if limit is not None and limit.per_gpu_hour is not None:
        return MicroUsdPerGpuHour(limit.per_gpu_hour)
    if limit is not None and limit.machine_hour is not None:
        return per_gpu(MicroUsdPerHour(limit.machine_hour), gpu_count)
    if gpu in policy.ceilings or not policy.ceilings:
        return policy.ceilings.get(gpu, policy.ceiling_default)
    found = [policy.ceilings.get(name, policy.ceiling_default) for name in resolve_gpu(gpu)]
    known = [ceiling for ceiling in found if ceiling is not None]
    return min(known) if len(known) == len(found) else None


def ceilings_of(wanted: Resources, limit: PriceLimit | None, policy: Policy) -> Mapping[str, MicroUsdPerGpuHour]:
    """Return the ceiling of each GPU that a job names, by canonical name; those without one are left out."""
    found: dict[str, MicroUsdPerGpuHour] = {}
    for one in wanted.gpu:
        for name in sorted(resolve_gpu(one.name)):
            ceiling = ceiling_for(name, one.count, limit, policy)
            if ceiling is not None:
                found[name] = max(ceiling, found.get(name, ceiling))
    return found


def total_ceiling(ceiling: MicroUsdPerGpuHour, gpu_count: int, limit: PriceLimit | None) -> MicroUsdPerHour:
    """Return the same for the whole machine, exact where the job states it so: its share of a GPU is rounded up."""
    total = whole_machine(ceiling, gpu_count)
    if limit is None or limit.per_gpu_hour is not None or limit.machine_hour is None:
        return total
    return MicroUsdPerHour(min(total, limit.machine_hour))


def is_admissible(candidate: Quote, ceiling: MicroUsdPerGpuHour | None, limit: PriceLimit | None) -> bool:
    """Whether the machine costs no more than the job accepts."""
    if ceiling is None:
        return False
    return candidate.price.total <= total_ceiling(ceiling, candidate.offer.gpu_count, limit)


def ceilings_of_kinds(job: Job, offers: RankedOffers, policy: Policy) -> Iterator[tuple[Kind, int]]:
    """Yield the ceiling of a whole machine of each kind, where the speed of machines is known for the job."""
    if offers.terms.speeds.is_known:
        for kind in offers.kinds:
            ceiling = ceiling_for(*kind, job.spec.price, policy)
            yield kind, 0 if ceiling is None else total_ceiling(ceiling, kind[1], job.spec.price)


def highest_ceiling(job: Job, policy: Policy) -> int:
    """Return what no machine that the job accepts costs more than, whatever its GPU."""
    price = job.spec.price
    counts = [shares(g.count) for g in job.spec.resources.gpu] or [shares(job.spec.resources.gpu_count)]
    if price is not None and price.machine_hour is not None:
        return price.machine_hour
    if price is not None and price.per_gpu_hour is not None:
        return price.per_gpu_hour * max(counts)
    return max([*policy.ceilings.values(), policy.ceiling_default or 0]) * max(counts)


def agree(
    job: Job, chosen: Quote, ceiling: MicroUsdPerGpuHour, next_best: int | None, policy: Policy
) -> tuple[Quote, MicroUsdPerHour]:
    """Return what to bid or at most to pay for the GPU part, and the quote at that price where we pay what we bid.

    A bid is no higher than leaves this offer the best choice beside the next best: up to `next_best` for the machine.
    """
    offer = chosen.offer
    allowed = total_ceiling(ceiling, offer.gpu_count, job.spec.price)
    limit = gpu_price_limit(chosen, ceiling)
    if allowed < whole_machine(ceiling, offer.gpu_count):
        limit = min(limit, gpu_price_within(chosen, allowed))
    if offer.market is Market.ON_DEMAND or not offer.pays_bid:
        return chosen, MicroUsdPerHour(max(limit, offer.gpu_price))
    wanted = min(limit, usual_bid(offer, policy.bid_headroom_ppm))
    if next_best is not None:
        wanted = min(wanted, gpu_price_within(chosen, next_best))
    bid = MicroUsdPerHour(max(offer.gpu_price, wanted))
    return repriced(chosen, bid), bid
