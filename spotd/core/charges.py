"""Running cost: what accrues on a meter, and what is settled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date, datetime
from typing import Final

from spotd.core.ids import AttemptId
from spotd_providers.contract.money import MicroUsd, MicroUsdPerHour
from spotd_providers.contract.values import ProviderName

NOTHING: Final = MicroUsd(0)
FREE: Final = MicroUsdPerHour(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meter:
    """Running cost: `settled` is closed and booked, the rest accrues at `rate` since `since`.

    Attributes:
        on_demand_rate: what the same hardware would have cost on-demand over the same time; `None` where unknown.
        until: time is booked up to here and no further, until something shows that the machine exists after it;
            `None` where it bills until its end is confirmed.
        traffic: measured traffic that is not in `settled` yet.
    """

    settled: MicroUsd = NOTHING
    rate: MicroUsdPerHour = FREE
    on_demand_rate: MicroUsdPerHour | None = None
    since: datetime | None = None
    until: datetime | None = None
    traffic: MicroUsd = NOTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """A settled piece of running cost, never across a UTC midnight; or what of it is taken back, which has no length.

    What is taken back is negative, and would have cost on-demand all the same.

    Attributes:
        on_demand: what it would have cost on-demand; `None` where that price was not known at the launch.
    """

    attempt: AttemptId
    provider: ProviderName
    day: date
    start: datetime
    end: datetime
    amount: MicroUsd
    on_demand: MicroUsd | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """Settled spending of this UTC month by day, over all jobs."""

    by_day: Mapping[date, MicroUsd] = field(default_factory=dict)
