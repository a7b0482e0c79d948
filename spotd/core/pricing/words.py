"""Money and machines in words, for the sentences that explain decisions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Final

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.policy import Policy
from spotd.core.domain.quotes import Quote
from spotd.core.domain.verdicts import PassedOver
from spotd.core.pricing.effective_price import repriced
from spotd_jobs.spec.model import PriceLimit, Resources
from spotd_providers.contract.money import MicroUsd, MicroUsdPerGpuHour, as_usd

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
        f"{machine_words(offer.gpu, offer.gpu_count)} at {offer.provider}{place}, {offer.market.value},"
        f" {bidding}{per_gpu_words(quote.price.per_gpu)}{wins}"
    )


def machine_words(gpu: str, gpu_count: int) -> str:
    """`8 x H100`, or that it has none."""
    return f"{gpu_count} x {gpu}" if gpu_count else "a machine without a GPU"


def lowest_winning(quote: Quote) -> MicroUsdPerGpuHour | None:
    """Return the effective price at the lowest bid that wins, where more than that is bid."""
    if not quote.offer.pays_bid or quote.price.gpu <= quote.offer.gpu_price:
        return None
    return repriced(quote, quote.offer.gpu_price).price.per_gpu


def wanted_words(wanted: Resources) -> str:
    """`8 x H100 or 4 x A100_80GB`, or what stands for names."""
    if wanted.gpu:
        return " or ".join(f"{one.count} x {one.name}" for one in wanted.gpu)
    if wanted.min_vram_mb is not None:
        return f"{wanted.gpu_count} x any GPU with {wanted.min_vram_mb / 1000:g} GB"
    if wanted.gpu_count == 0:
        least = [f"{wanted.cpus} CPUs"] if wanted.cpus else []
        least += [f"{wanted.memory_mb / 1000:g} GB of memory"] if wanted.memory_mb else []
        return f"a machine without a GPU that has {' and '.join(least)}"
    return f"{wanted.gpu_count} x any GPU"


def most_frequent_first(counts: Mapping[str, int]) -> PassedOver:
    """Return the reasons and their counts in the order in which they are shown."""
    return tuple(sorted(counts.items(), key=lambda row: (-row[1], row[0])))


def passed_over_words(mismatches: Mapping[str, int]) -> str:
    """`3 too little disk, 1 another region`, most frequent first."""
    return ", ".join(f"{count} {why}" for why, count in most_frequent_first(mismatches))


def witness_words(item: Attempt, policy: Policy, now: datetime) -> str:
    """Return what speaks against the machine and does not end it yet; empty where nothing does."""
    seen_at = item.heartbeat_seen_at
    silence = timedelta(0) if seen_at is None else now - seen_at
    # What is on record may be as old as one such span although heartbeats arrive.
    is_silent = silence >= 2 * policy.silence_max
    if item.missing_since is not None and not is_silent:
        return f"{item.provider} does not list the machine, but its heartbeats arrive, so it is kept"
    if not is_silent:
        return ""
    minutes, limit = int(silence.total_seconds() // 60), int(policy.silence_limit.total_seconds() // 60)
    return (
        f"no sign of life for {minutes} min, and {item.provider} does not say that it is gone:"
        f" it is given up after {limit} min, or later if most hosts are silent"
    )
