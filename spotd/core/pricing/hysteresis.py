"""When a price a little above the ceiling is worth a restart, and when it is borne for a while.

Theory. A spot price moves around any ceiling. To stop a machine costs what a restart costs: booting, restoring, and the
work since the newest checkpoint. So a price that is above the ceiling by no more than a margin is borne until what it
costs above the ceiling has grown to what the restart would, and never for longer than a dwell time. What is paid
beyond the ceiling is thus at most `MARGIN_PERCENT` of it for `DWELL_MAX`. A launch is never admitted above the ceiling.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.jobs import Job
from spotd.core.domain.lineage import unsaved_time
from spotd.core.pricing.usefulness import startup
from spotd_providers.contract.money import MicroUsdPerGpuHour, MicroUsdPerHour, cost, shares

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
