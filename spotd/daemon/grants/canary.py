"""By which figures a rented machine is measured before its job starts: the least that it must show.

Theory. What a host measures can only end its own attempt: it buys nothing and stops no other machine, and a host that
lies ends as one that was lost. The least is generous, so that a card which its owner runs cooler passes, and a figure
that is wrong here must not keep a job from running: after a few machines of a job were refused its measurements
are only shown. Own machines, gangs, slices of a card and machines that are taken over are not measured.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Final

from spotd.core.canary import may_refuse, measuring_time
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.jobs import Job
from spotd.core.domain.policy import Policy
from spotd_jobs.wire.grant import CanaryRules
from spotd_providers.contract.gpus import gpu_info

_MEMORY_SHARE: Final = 0.85
"""Of what is stated: error correction takes up to 7 percent, and units differ by as much."""
_SPEED_SHARE: Final = 0.25
"""Of the data sheet's figure: a plain multiply reaches half to three quarters, on cards of little power less."""
_WHOLE_CARD: Final = 0.9
"""A machine with less memory than this share of its card's has a part of one, whose speed is not known."""
_GB: Final = 1000**3 / 1024**2


def canary_rules(
    attempt: Attempt, job: Job, policy: Policy, on_host: Callable[[timedelta], float]
) -> CanaryRules | None:
    """Return how the machine of this attempt is to be measured; `None` where it is not, or not any more.

    Args:
        on_host: how many seconds a host is given for a span.
    """
    offer, time = attempt.quote.offer, measuring_time(attempt, policy)
    is_first = attempt.running_at is None and attempt.stop is None
    if not (time and is_first):
        return None
    known = gpu_info(offer.gpu)
    nominal = None if known is None else min(known.vram_gb) * _GB
    memory = offer.gpu_vram_mb if offer.gpu_vram_mb is not None else nominal
    is_whole = memory is None or nominal is None or memory >= _WHOLE_CARD * nominal
    speed = known.tflops if known is not None and is_whole else None
    return CanaryRules(
        time_s=on_host(time),
        may_refuse=may_refuse(job),
        gpus=offer.gpu_count,
        gpu_memory_mb_min=None if memory is None else int(_MEMORY_SHARE * memory),
        tflops=speed,
        tflops_min=None if speed is None else _SPEED_SHARE * speed,
        download_mbps=offer.download_mbps,
    )
