"""How long a machine must run before it is worth its launch: it boots, it restores, and only then it works."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from spotd.core.domain.bounds import bytes_within
from spotd.core.domain.jobs import Job
from spotd.core.domain.policy import Policy
from spotd_providers.contract.values import Offer

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
    waiting = startup(job, offer)
    return waiting + max(policy.useful_run, waiting)


def shortest_run(policy: Policy) -> timedelta:
    """Return what no useful run is shorter than, whatever the job restores."""
    return BOOT + max(policy.useful_run, BOOT)
