"""How long a machine takes from its launch until the job's command runs: usually, and at worst but for rare cases.

Theory of the usual start. Machines of one provider with one image take alike: renting, pulling the image, restoring,
the job's own setup. The mean over the starts that were seen is shrunk towards that of all images at the provider, and
this towards a prior, each with `WEIGHT` starts.

Theory of the careful start, which is held back of a deadline. With probability p no machine comes up and it is given
up after F, then the next one is launched; one that comes up takes R times the usual start. The time until one runs is

    T = F1 + ... + Fk + R * usual,    with P(k) = p^k (1 - p)

and what is held back is the least time that T exceeds once in `1 / EXCEEDED` times. R and F are counted in steps at a
provider, in both markets; a value counts as the upper end of its step. p is counted by market, shrunk towards that of
the other market, and this towards a prior, each with the weight of `PRIOR_STARTS`. The prior is chosen so that without
evidence T is one whole time for a start and twice the usual one. An image of which fewer than `KNOWN` starts were seen
at the provider has no usual start to multiply, and is held to that, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Final

from spotd.core.domain.world import ONE, Experience, RecordId, RecordKind, kept_share
from spotd_providers.contract.values import Market, ProviderName

PRIOR: Final = timedelta(minutes=14, seconds=30)
"""From the launch until the command runs, where nothing was measured."""
WEIGHT: Final = 3 * ONE
START_MAX: Final = timedelta(hours=2)
"""A longer start counts as one of this length: a clock may have leapt, or a setup may download for a day."""
SLOW_FACTOR: Final = 3
SLOW_LEAST: Final = timedelta(minutes=10)
KNOWN: Final = 3 * ONE
"""So many starts must be known before one can be compared with them."""
ANY_IMAGE: Final = ""
_TICK: Final = timedelta(microseconds=1)


def start_record(provider: ProviderName, image: str) -> RecordId:
    """Return the record of this provider's starts with an image, `ANY_IMAGE` for all of them."""
    return RecordId(kind=RecordKind.STARTS, provider=provider, subject=image)


def usual_start(experience: Experience, provider: ProviderName, image: str) -> timedelta:
    """Return how long a start takes."""
    of_provider = _shrunk(experience, start_record(provider, ANY_IMAGE), PRIOR)
    return min(START_MAX, _shrunk(experience, start_record(provider, image), of_provider))


def is_slow(experience: Experience, provider: ProviderName, image: str, took: timedelta) -> bool:
    """Whether this start took much longer than those of the same image at this provider do."""
    known = experience.get(start_record(provider, image))
    if known is None or known.count < KNOWN:
        return False
    return took >= max(SLOW_LEAST, SLOW_FACTOR * usual_start(experience, provider, image))


def _shrunk(experience: Experience, identity: RecordId, prior: timedelta) -> timedelta:
    known = experience.get(identity)
    if known is None:
        return prior
    # Both sums fade alike, so that their ratio needs no instant.
    total = (prior // _TICK) * WEIGHT + (known.span // _TICK) * ONE
    return min(START_MAX, timedelta(microseconds=total // (WEIGHT + known.count)))


# The careful start.

RATIOS: Final = (500, 750, 1_000, 1_250, 1_500, 2_000, 2_500, 3_000, 4_000, 6_000, 10_000)
"""Steps of R in thousandths; a slower start counts as the last."""
SHARES: Final = (250, 500, 750, 1_000, 2_000, 4_000)
"""Steps of F in thousandths of the provider's time for a start."""
EXCEEDED: Final = 0.005
PRIOR_RATIOS: Final[Mapping[int, float]] = {1_000: 5.0, 1_500: 3.0, 2_000: 1.5, 3_000: 0.5}
PRIOR_STARTS: Final = 10.0
PRIOR_FAILED: Final = 0.5
"""Of the starts of the prior, so many failed; each took the whole time for a start."""
FAILED_MAX: Final = 4
"""So many failures in a row are counted at the most."""
COUNTED_MAX: Final = 10_000
"""In tenths: more starts of one step than a thousand say nothing new."""
_FAILED: Final = "failed"
_STARTED: Final = "started"


def ratio_record(
    experience: Experience, provider: ProviderName, image: str, market: Market, took: timedelta
) -> RecordId:
    """Return the record of starts that took as many times the usual as this one; the usual one is that seen so far.

    A start of an image that is not known yet took the usual time: nothing can be said of it but that it came up.
    """
    usual = _mean_seen(experience, provider, image)
    ratio = 1_000 if usual is None else -(-1_000 * took // max(usual, _TICK))
    return _record(provider, market, _STARTED, _step(RATIOS, ratio))


def failure_record(provider: ProviderName, market: Market, took: timedelta, start_limit: timedelta) -> RecordId:
    """Return the record of starts that came to nothing after such a part of the provider's time for a start."""
    return _record(provider, market, _FAILED, _step(SHARES, -(-1_000 * took // max(start_limit, _TICK))))


def careful_start(
    experience: Experience,
    provider: ProviderName,
    market: Market,
    image: str,
    usual: timedelta,
    start_limit: timedelta,
    now: datetime,
) -> timedelta:
    """Return the time from a launch until the command runs, there or on the next machine, that is rarely exceeded.

    Args:
        usual: how long a start takes, with what this job has to restore.
        start_limit: the provider's time for a start.
    """
    seen = _mean_seen(experience, provider, image)
    if seen is None:
        return start_limit + 2 * usual
    started = {kind: _counts(experience, provider, kind, _STARTED, RATIOS, now) for kind in Market}
    failed = {kind: _counts(experience, provider, kind, _FAILED, SHARES, now) for kind in Market}
    share, weight = PRIOR_FAILED / PRIOR_STARTS, PRIOR_STARTS
    for kind in sorted(Market, key=lambda kind: kind is market):  # its own comes last
        failures = sum(failed[kind]) / 10
        share = (failures + share * weight) / (failures + sum(started[kind]) / 10 + weight)
    ratios = tuple(map(sum, zip(*started.values(), strict=True)))
    shares = tuple(map(sum, zip(*failed.values(), strict=True)))
    limits = start_limit // _SECOND + 1, max(usual, seen) // _SECOND + 1
    return _SECOND * _quantile_s(ratios, shares, round(share, 4), *limits)


_SECOND: Final = timedelta(seconds=1)


@lru_cache(maxsize=256)
def _quantile_s(
    ratios: tuple[int, ...], shares: tuple[int, ...], failing: float, start_limit_s: int, usual_s: int
) -> int:
    """Return the least time, in seconds, that T exceeds with no more than `EXCEEDED`.

    Args:
        ratios, shares: how many starts lie in each step of R and of F, in tenths.
        failing: p.
    """
    works = {step: count / 10 + PRIOR_RATIOS.get(step, 0.0) for step, count in zip(RATIOS, ratios, strict=True)}
    works = {step: count for step, count in works.items() if count}
    fails = {step: count / 10 for step, count in zip(SHARES, shares, strict=True) if count}
    fails[1_000] = fails.get(1_000, 0.0) + PRIOR_FAILED
    of_works, of_fails = sum(works.values()), sum(fails.values())
    likely: dict[int, float] = {}
    before = {0: 1.0}
    for _ in range(FAILED_MAX + 1):
        for lost, chance in before.items():
            for step, count in works.items():
                at = lost + -(-step * usual_s // 1_000)
                likely[at] = likely.get(at, 0.0) + chance * (1 - failing) * count / of_works
        after: dict[int, float] = {}
        for lost, chance in before.items():
            for step, count in fails.items():
                at = lost + -(-step * start_limit_s // 1_000)
                after[at] = after.get(at, 0.0) + chance * failing * count / of_fails
        before = after
    exceeded, least = sum(before.values()), max(likely)
    for at in sorted(likely, reverse=True):
        if exceeded > EXCEEDED:
            return least
        least = at
        exceeded += likely[at]
    return least


def _mean_seen(experience: Experience, provider: ProviderName, image: str) -> timedelta | None:
    """Return the mean of the starts that were seen of this image; `None` where those are too few."""
    known = experience.get(start_record(provider, image))
    if known is None or known.count < KNOWN:
        return None
    return known.span * ONE // known.count


def _counts(
    experience: Experience, provider: ProviderName, market: Market, what: str, steps: tuple[int, ...], now: datetime
) -> tuple[int, ...]:
    """Return how many starts are on record in each step as of now, in tenths."""
    records = (experience.get(one) for one in _records(provider, market, what, steps))
    return tuple(
        0 if known is None else min(COUNTED_MAX, round(10 * known.count * kept_share(known, now) / ONE))
        for known in records
    )


@lru_cache(maxsize=256)
def _records(provider: ProviderName, market: Market, what: str, steps: tuple[int, ...]) -> tuple[RecordId, ...]:
    return tuple(_record(provider, market, what, step) for step in steps)


def _record(provider: ProviderName, market: Market, what: str, step: int) -> RecordId:
    return RecordId(kind=RecordKind.START_TIMES, provider=provider, subject=f"{market.value} {what} {step}")


def _step(steps: tuple[int, ...], value: int) -> int:
    return next((step for step in steps if value <= step), steps[-1])
