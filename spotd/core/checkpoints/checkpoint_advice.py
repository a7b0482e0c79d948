"""How often a job should save: the interval of Young and Daly, from the time that a save takes and the hazard.

Theory. Saving takes time C each time, and a loss repeats what was done since the last save. With a mean time M = 1 / h
between losses the best interval is, to first order (Young 1974), sqrt(2 C M), and with Daly's higher order (2006)

    sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + C / 18M) - C     for C < 2 M, else M

The prior of a loss in a usual stay is no more than that: where machines were lost in minutes, the hazard that those
losses prove by themselves (`Hazards.proved_of`) counts.

The hazard falls with the age of a machine: `AGES` states by how much in recorded traces of spot machines, relative to
the mean over the first six hours. For an attempt that begins, the mean over a usual stay counts; what a running one is
advised follows its age. C is what the host states its uploads to take, which is more than the job stands still, and so
an upper bound: a job is never advised to save more often than every 20 C, an overhead of five percent, nor more seldom
than every hour; where 20 C is more than an hour, every hour, and never before the last upload is over. A job that was
seen to save more often by itself has shown that it costs it less than C, and is not advised to save less often.

C is a host's word, held to `SAVE_TIME_MAX`; a wrong one moves the advice between its bounds and does nothing else.
"""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.jobs import Job
from spotd.core.domain.policy import Policy
from spotd.core.domain.world import World
from spotd.core.experience.hazards import PPM, Hazards
from spotd.core.pricing.effective_price import own_interval
from spotd.core.pricing.words import span_words
from spotd_jobs.spec.model import JobSpec
from spotd_providers.contract.values import Offer

LEAST_SAVES: Final = 20
"""An interval is at least so many times what a save takes."""
INTERVAL_MAX: Final = timedelta(hours=1)
INTERVAL_MIN: Final = timedelta(seconds=10)
SAVE_TIME_MAX: Final = timedelta(hours=1)
AGES: Final = (
    (timedelta(minutes=15), 4.2),
    (timedelta(minutes=30), 3.8),
    (timedelta(hours=1), 1.9),
    (timedelta(hours=2), 1.1),
    (timedelta(hours=4), 0.59),
    (timedelta(hours=8), 0.38),
)
"""Up to which age of a machine its hazard is how many times the mean; the means of recorded traces of three clouds."""
OLD: Final = 0.27
_SECOND: Final = timedelta(seconds=1)


def prior_hazard_ppm(policy: Policy) -> int:
    """Return the losses in a million hours of a spot machine of which nothing is known: one in a usual stay."""
    stay = max(policy.expected_stay, timedelta(minutes=1))
    return math.ceil(PPM * (timedelta(hours=1) / stay))


def hazard_at(hazard_ppm: int, age: timedelta) -> int:
    """Return the hazard of a machine of this age, given the mean over a usual stay."""
    factor = next((factor for limit, factor in AGES if age < limit), OLD)
    return round(hazard_ppm * factor)


def advised_interval(save_time: timedelta | None, hazard_ppm: int) -> timedelta | None:
    """Return how often to save; `None` where it is not known how long a save takes."""
    if save_time is None:
        return None
    cost = min(max(save_time, timedelta(0)), SAVE_TIME_MAX)
    best = INTERVAL_MAX
    if hazard_ppm > 0:
        best = timedelta(seconds=min(_daly(cost / _SECOND, 3600 * PPM / hazard_ppm), INTERVAL_MAX / _SECOND))
    bounded = min(INTERVAL_MAX, max(best, LEAST_SAVES * cost, INTERVAL_MIN))
    return timedelta(seconds=round(max(bounded, cost) / _SECOND))


def save_interval(job: Job, hazard_ppm: int) -> timedelta | None:
    """Return how often this job should save: as advised, or as it was seen to do by itself where that is more often."""
    advised, own = advised_interval(job.save_time, hazard_ppm), _shown_interval(job)
    return advised if advised is None or own is None else min(advised, own)


def expected_hazard(offer: Offer, hazards: Hazards) -> int:
    """Return the hazard for which a job on this offer should save: what is expected, or more where that is proved."""
    return max(hazards.of(offer), hazards.proved_of(offer))


def hazards_with_prior(world: World, now: datetime) -> Hazards:
    """Return the losses that are to be expected of offers, where nothing is known a prior."""
    return Hazards(world.experience, now, world.attempts.values(), prior_ppm=prior_hazard_ppm(world.policy))


def advice_at_launch(job: Job, offer: Offer, world: World, now: datetime) -> timedelta | None:
    """Return how often an attempt on this offer is advised to save, where its owner states nothing."""
    if job.spec.checkpoint.every is not None or job.save_time is None:
        return None
    return save_interval(job, expected_hazard(offer, hazards_with_prior(world, now)))


def advice_words(job: Job, item: Attempt | None, world: World, now: datetime) -> str:
    """Return how often the job should save and why, in a sentence; empty where nothing is known of its saves."""
    if job.save_time is None:
        return ""
    offer = None if item is None else item.quote.offer
    hazard = prior_hazard_ppm(world.policy)
    if offer is not None:
        hazard = expected_hazard(offer, hazards_with_prior(world, now))
    advised, own = advised_interval(job.save_time, hazard), _shown_interval(job)
    if advised is None:
        return ""
    losses = f"a preemption every {_between_losses(hazard)} is expected" if hazard else "no preemption is expected"
    words = f"a save takes {span_words(job.save_time)} and {losses}: "
    if own is not None and own < advised:
        words += f"it saves every {span_words(own)} by itself, which is often enough"
        advised = own
    else:
        words += f"saving every {span_words(advised)} costs least"
    if item is not None and item.launched_at is not None:
        age = max(timedelta(0), now - item.launched_at)
        at_age = save_interval(job, hazard_at(hazard, age))
        if at_age is not None and at_age != advised:
            words += f", and every {span_words(at_age)} while its machine is {span_words(age)} old"
    if job.spec.checkpoint.every is not None:
        return f"{words}; the job states every {span_words(job.spec.checkpoint.every)}"
    if item is not None and item.save_every is not None:
        words += f"; SPOTD_CHECKPOINT_INTERVAL_S is {item.save_every.total_seconds():.0f} on this machine"
    return words


def _shown_interval(job: Job) -> timedelta | None:
    """Return how often the job was seen to save; `None` where that is not known, or the host's clock stands."""
    own = own_interval(job)
    return None if own is None or own <= timedelta(0) else timedelta(seconds=max(1, round(own / _SECOND)))


def _between_losses(hazard_ppm: int) -> str:
    hours = PPM / hazard_ppm
    return f"{hours:.1f} h" if hours >= 1 else span_words(timedelta(hours=hours))


def _daly(cost_s: float, mean_s: float) -> float:
    if cost_s >= 2 * mean_s:
        return mean_s
    ratio = cost_s / (2 * mean_s)
    return math.sqrt(2 * cost_s * mean_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def with_save_time(job: Job, stated: timedelta | None) -> Job:
    """Return the job with what its host states a save to take; a fourth of each new figure counts."""
    if stated is None:
        return job
    held = min(max(stated, timedelta(0)), SAVE_TIME_MAX)
    mean = held if job.save_time is None else (3 * job.save_time + held) / 4
    return job if mean == job.save_time else replace(job, save_time=mean)


def states_checkpoints(spec: JobSpec) -> bool:
    """Whether anything in the job file says that the job saves.

    That is `[checkpoint] path`, `every` or `metric`, or the name of the checkpoint folder's variable in `run`, `setup`
    or `env`. A program that reads the variable itself says nothing; one line `every = "15m"` does.
    """
    rules = spec.checkpoint
    texts = (*spec.run, spec.setup or "", *(value for _, value in spec.env))
    return (
        rules.path is not None
        or rules.every is not None
        or rules.metric is not None
        or any("SPOTD_CHECKPOINT_DIR" in text for text in texts)
    )
