"""How long a machine takes from its launch until the job's command runs, by provider and image.

Theory. Machines of one provider with one image take alike: renting, pulling the image, restoring, the job's own setup.
The mean over the starts that were seen is shrunk towards that of all images at the provider, and this towards a prior,
each with `WEIGHT` starts.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from spotd.core.domain.records import ONE, Experience, RecordId, RecordKind
from spotd_providers.contract.values import ProviderName

PRIOR: Final = timedelta(minutes=14, seconds=30)
"""From the launch until the command runs, where nothing was measured."""
WEIGHT: Final = 3 * ONE
START_MAX: Final = timedelta(hours=2)
"""A longer start counts as one of this length: a clock may have leapt, or a setup may download for a day."""
SLOW_FACTOR: Final = 3
SLOW_LEAST: Final = timedelta(minutes=10)
SLOW_KNOWN: Final = 3 * ONE
"""So many starts must be known before one can be called slow."""
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
    if known is None or known.count < SLOW_KNOWN:
        return False
    return took >= max(SLOW_LEAST, SLOW_FACTOR * usual_start(experience, provider, image))


def _shrunk(experience: Experience, identity: RecordId, prior: timedelta) -> timedelta:
    known = experience.get(identity)
    if known is None:
        return prior
    # Both sums fade alike, so that their ratio needs no instant.
    total = (prior // _TICK) * WEIGHT + (known.span // _TICK) * ONE
    return min(START_MAX, timedelta(microseconds=total // (WEIGHT + known.count)))
