"""Why a job was or was not placed."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final

from spotd.core.domain.ids import JobId
from spotd.core.domain.quotes import Quote
from spotd_providers.contract.money import MicroUsdPerGpuHour

PassedOver = tuple[tuple[str, int], ...]
"""Why offers were not taken, and how many, most frequent first."""


RENTING: Final = "renting "
"""How the sentence of a placed job begins."""


class VerdictKind(StrEnum):
    PLACED = "placed"
    RUNNING = "running"
    STOPPING = "stopping"
    HELD = "held"
    """Its machine is outbid, and waited for."""
    ABOVE_CEILING = "above_ceiling"
    NO_CEILING = "no_ceiling"
    NO_MATCH = "no_match"
    NO_OFFERS = "no_offers"
    COOLING = "cooling"
    BACKING_OFF = "backing_off"
    BUDGET_JOB = "budget_job"
    BUDGET_DAY = "budget_day"
    BUDGET_MONTH = "budget_month"
    BALANCE = "balance"
    MACHINES = "machines"
    LAUNCH_LIMIT = "launch_limit"
    PAUSED = "paused"
    RECONCILING = "reconciling"
    WINDOW = "window"
    DEADLINE = "deadline"
    PACED = "paced"
    AFTER = "after"
    ARRAY = "array"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Why a job was or was not placed in one decision.

    Attributes:
        sentence: what `spotctl why` prints.
        passed_over: why offers were not taken and how many, most frequent first; empty where none were compared.
        until: when what the job waits for ends by itself; `None` where no time is known.
    """

    job: JobId
    kind: VerdictKind
    sentence: str
    at: datetime
    best: Quote | None = None
    ceiling: MicroUsdPerGpuHour | None = None
    passed_over: PassedOver = ()
    until: datetime | None = None
