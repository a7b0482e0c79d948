"""What the API shows of the state, as frozen values without a row behind them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum

from spotd.core.domain.intents import AttemptId, CostSums, JobId, Meter
from spotd.core.domain.jobs import ArrayTask, Checkpoint, Moves, Outputs, PaceSample, RunTotals
from spotd.core.domain.plan import Event
from spotd.core.domain.states import AttemptState, JobState
from spotd.core.metering import accrued, closing_words, compared_cost, on_demand_accrued
from spotd_providers.contract.values import AttemptKey, MicroUsd, MicroUsdPerHour, ProviderName


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptView:
    """One machine in a list of jobs.

    Attributes:
        price: effective, whole machine, as agreed at commit.
        on_demand: the same of this hardware on-demand; `None` where it was not known.
    """

    id: AttemptId
    state: AttemptState
    provider: ProviderName
    offer_id: str
    host_id: str | None
    gpu: str
    gpu_count: int
    price: MicroUsdPerHour
    on_demand: MicroUsdPerHour | None
    meter: Meter
    on_demand_settled: MicroUsd

    def spent_at(self, now: datetime) -> MicroUsd:
        """Return what it has cost by now."""
        return MicroUsd(self.meter.settled + accrued(self.meter, now))

    def on_demand_at(self, now: datetime) -> MicroUsd:
        """Return what its time would have cost on-demand; its own cost where that price is unknown."""
        return MicroUsd(self.on_demand_settled + on_demand_accrued(self.meter, now))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """One line of the list of jobs.

    Attributes:
        gpu_wanted: what the user asked for, before any machine is known.
        open: attempts that have not ended; their cost is not in `settled` yet.
        settled, on_demand_settled: of attempts that have ended.
    """

    id: JobId
    name: str
    state: JobState
    reason: str
    submitted_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    exit_code: int | None
    gpu_wanted: str
    attempts_made: int
    recoveries: int
    lost: timedelta
    settled: MicroUsd
    on_demand_settled: MicroUsd
    open: tuple[AttemptView, ...]
    checkpoint: Checkpoint | None
    outputs: Outputs | None = None
    totals: RunTotals = field(default_factory=RunTotals)
    array: ArrayTask | None = None
    moves: Moves = field(default_factory=Moves)
    submitted_by: str = ""

    def uncompared_at(self, now: datetime) -> MicroUsd:
        """Return what of the cost is compared with nothing: no on-demand price is known, or the job failed."""
        running = sum(a.spent_at(now) for a in self.open if a.on_demand is None)
        return compared_cost(self.state, self.spent_at(now), MicroUsd(self.totals.uncompared + running))

    @property
    def is_estimated(self) -> bool:
        """Whether what it cost follows from what was observed, with no bill for all of it."""
        return self.totals.estimated > 0 or any(a.meter.settled or a.meter.rate for a in self.open)

    def closing_words(self, now: datetime) -> str:
        """Return what sums the job up, empty before its end; the machine of its last attempt may cost more by then."""
        if not self.state.is_final:
            return ""
        totals = replace(self.totals, uncompared=self.uncompared_at(now), estimated=int(self.is_estimated))
        return closing_words(totals, self.spent_at(now), self.on_demand_at(now), self.recoveries, self.lost)

    def spent_at(self, now: datetime) -> MicroUsd:
        """Return what the job has cost by now, over all attempts."""
        return MicroUsd(self.settled + sum(a.spent_at(now) for a in self.open))

    def on_demand_at(self, now: datetime) -> MicroUsd:
        """Return what the same time would have cost on-demand, and its own cost where it is compared with nothing."""
        on_demand = MicroUsd(self.on_demand_settled + sum(a.on_demand_at(now) for a in self.open))
        return compared_cost(self.state, self.spent_at(now), on_demand)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPaces:
    """What the steps of one job show of machines."""

    paces: tuple[PaceSample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayView:
    """An array, by its id."""

    id: JobId
    submitted_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayTotals:
    """What all jobs of an array come to. What attempts cost that have not ended is not in it."""

    states: Mapping[JobState, int]
    spent: MicroUsd
    on_demand: MicroUsd
    uncompared: MicroUsd
    estimated: int
    recoveries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineView:
    """A machine that the state owns or may own. `instance` is the provider's name for it, once it is known."""

    key: AttemptKey
    provider: ProviderName
    instance: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EventView:
    """An event with its number."""

    seq: int
    event: Event


class CostGrouping(StrEnum):
    """By what costs are added up. The strings are part of the command line."""

    JOB = "job"
    DAY = "day"
    PROVIDER = "provider"
    GPU = "gpu"
    HOST = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class CostGroup:
    """What one job, day, provider, GPU or host cost.

    Attributes:
        name: of a job; empty for the others.
        attempts: how many machines it were; `None` by day, since one may run for days.
        is_estimated: whether the provider's own bill of one of them is not known.
    """

    key: str
    name: str = ""
    attempts: int | None = None
    is_estimated: bool = False
    sums: CostSums


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What all jobs together cost. What still runs on a meter is not in it.

    Attributes:
        estimated: of how many machines that cost something the provider's own bill is not known.
    """

    jobs: int
    spent: MicroUsd
    on_demand: MicroUsd
    uncompared: MicroUsd
    estimated: int
    recoveries: int
    lost: timedelta
