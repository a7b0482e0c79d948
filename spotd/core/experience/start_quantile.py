"""How long it takes at the worst, but for one time in a hundred, until a machine of a provider runs the command.

Theory. A start takes R times what is usual for its image there, and with a share p no machine comes up: then it is
given up after a while, and the next one is launched. So the time until one runs is

    T = k failed starts, each as long as they took, + R x the usual start,    with P(k) = p^k (1 - p)

Both R, in steps (`RATIOS`), and p are counted by provider and market, and shrunk towards a prior of `PRIOR_STARTS`
starts. What is held back of a deadline is the smallest T that is exceeded once in a hundred times. Without evidence
that is about a whole time-out and twice the usual start; where some forty starts came up, a failure is rarer than that,
and no time-out is held back.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from spotd.core.domain.records import ONE, Experience, RecordId, RecordKind, faded
from spotd.core.experience.starts import START_MAX
from spotd_providers.contract.values import Market, ProviderName

RATIOS: Final = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0)
"""Up to how many times the usual start one took; a longer one counts as the last."""
PRIOR: Final = {1.0: 5.0, 1.5: 3.0, 2.0: 1.5, 3.0: 0.5}
"""How many of the starts of the prior took so long."""
PRIOR_STARTS: Final = sum(PRIOR.values())
PRIOR_FAILED: Final = 0.5
EXCEEDED: Final = 0.01
FAILED_MAX: Final = 4
"""So many failed starts in a row are counted at most."""
FAILED: Final = "failed"
_SECOND: Final = timedelta(seconds=1)


def ratio_record(provider: ProviderName, market: Market, took: timedelta, usual: timedelta) -> RecordId:
    """Return the record to which a start that took so long is added."""
    ratio = took / max(usual, _SECOND)
    step = next((one for one in RATIOS if ratio <= one), RATIOS[-1])
    return RecordId(kind=RecordKind.START_RATIOS, provider=provider, subject=f"{market.value} {step:g}")


def failed_record(provider: ProviderName, market: Market) -> RecordId:
    """Return the record to which a start is added after which no machine came up."""
    return RecordId(kind=RecordKind.START_RATIOS, provider=provider, subject=f"{market.value} {FAILED}")


def time_until_started(
    experience: Experience, provider: ProviderName, market: Market, usual: timedelta, gives_up: timedelta, now: datetime
) -> timedelta:
    """Return the time that is exceeded once in a hundred times.

    Args:
        usual: how long a start takes.
        gives_up: after which time a machine that does not come up is given up, where none was seen to.
    """
    counts = {step: PRIOR.get(step, 0.0) for step in RATIOS}
    for step in RATIOS:
        subject = f"{market.value} {step:g}"
        counts[step] += _seen(experience, provider, subject, now)[0]
    failed, span = _seen(experience, provider, failed_record(provider, market).subject, now)
    started, failed = sum(counts.values()), failed + PRIOR_FAILED
    each = min(START_MAX, (span + PRIOR_FAILED * gives_up) / failed)
    share = failed / (started + failed)

    def exceeded(limit: timedelta) -> float:
        total, likely = 0.0, 1.0
        for number in range(FAILED_MAX):
            left = limit - number * each
            slower = sum(count for step, count in counts.items() if step * usual > left)
            total += likely * (1 - share) * slower / started
            likely *= share
        return total + likely

    spans = sorted(number * each + step * usual for number in range(FAILED_MAX) for step in RATIOS)
    return next((one for one in spans if exceeded(one) <= EXCEEDED), spans[-1])


def _seen(experience: Experience, provider: ProviderName, subject: str, now: datetime) -> tuple[float, timedelta]:
    """Return how many are on record as of now, and how long they took in all."""
    known = experience.get(RecordId(kind=RecordKind.START_RATIOS, provider=provider, subject=subject))
    if known is None:
        return 0.0, timedelta(0)
    record = faded(known, now)
    return record.count / ONE, record.span
