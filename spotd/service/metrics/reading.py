"""What the metrics are made of: references to frozen values of the running daemon, and sums of its state.

References are taken on the event loop, which costs next to nothing. Sums are read by the state's reader, and all that
is computed from both is computed in a thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from spotd.api.handlers.context import HandlerContext
from spotd.api.handlers.health import HealthHandlers
from spotd.api.schemas.health import ProviderResponse
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.charges import CostSums
from spotd.core.domain.ids import AttemptId
from spotd.core.domain.market import MarketSnapshot
from spotd.core.domain.policy import Policy
from spotd.core.domain.states import EndReason, JobState
from spotd.core.domain.world import World
from spotd.daemon.controllers import Controller
from spotd.daemon.controllers import Metrics as ControllerFigures
from spotd.daemon.hosts.gpu_use import HostUse, use_of
from spotd.daemon.market.pollers import Poller
from spotd.store import Reads
from spotd_providers.contract.values import ProviderName

JOBS_MAX: Final = 200
"""So many running jobs have series of their own, the oldest; the others are counted."""
TRIES: Final = 3
_Ends = Mapping[tuple[ProviderName, EndReason], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSums:
    """What only the state knows: it survives a restart."""

    jobs: Mapping[JobState, int]
    costs: Mapping[ProviderName, CostSums]
    ends: _Ends
    quarantined: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PollFigures:
    """Requests and failures of one provider since it was opened."""

    requests: int
    offers_errors: int
    machines_errors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Everything that one answer to a scraper is made of."""

    now: datetime
    version: str
    world: World | None
    decided_at: datetime | None
    market: MarketSnapshot
    policy: Policy
    is_held: bool
    contained: int
    sums: StoredSums
    providers: Sequence[ProviderResponse]
    polls: Mapping[ProviderName, PollFigures]
    controllers: Mapping[str, ControllerFigures]
    running: Sequence[Attempt]
    running_total: int
    uses: Mapping[AttemptId, HostUse]
    channels: Mapping[str, tuple[int, bool]]
    """How many notifications wait for each channel, and whether it works."""


class MetricsReader:
    """Reads the running daemon."""

    def __init__(self, context: HandlerContext, controllers: Sequence[Controller]) -> None:
        self._context = context
        self._controllers = controllers
        self._ends: tuple[object, _Ends] | None = None

    async def read(self) -> Reading:
        """Return what is true now.

        Raises:
            ApiUnavailable: the state cannot be read now.
        """
        context = self._context
        sums = await self._consistent_sums()
        providers = await HealthHandlers(context).providers()
        state = context.control_loop.state
        world = None if state is None else state.world
        running = [] if world is None else _running(world)
        shown = running[:JOBS_MAX]
        notifier, now = context.notifier, context.clock.now()
        return Reading(
            now=now,
            version=str(context.facts.get("version", "")),
            world=world,
            decided_at=None if state is None else state.at,
            market=context.offer_cache.snapshot(),
            policy=context.policy.current,
            is_held=bool(context.control_loop.held),
            contained=len(context.control_loop.contained),
            sums=sums,
            providers=providers,
            polls={name: _polls(entry.poller) for name, entry in context.providers.items() if entry.poller is not None},
            controllers={one.name: one.metrics for one in self._controllers},
            running=shown,
            running_total=len(running),
            channels={}
            if notifier is None
            else {name: (notifier.waiting[name], not status.error) for name, status in notifier.status.items()},
            uses={item.id: use_of(context.host_monitor, item.id, now) for item in shown},
        )

    async def _consistent_sums(self) -> StoredSums:
        """Return sums of the state that the newest decision has left, unless one follows the other too quickly."""
        loop = self._context.control_loop
        tries = 0
        while True:
            state, tries = loop.state, tries + 1
            sums = await self._read_sums(None if state is None else _ends_key(state.world))
            if loop.state is state or tries == TRIES:
                return sums

    async def _read_sums(self, key: object) -> StoredSums:
        known = self._ends[1] if self._ends is not None and self._ends[0] == key else None
        sums = await self._context.read(lambda reads: _sums(reads, known))
        self._ends = (key, sums.ends)
        return sums


def _ends_key(world: World) -> object:
    """Return what changes whenever an attempt ends: to count all that ever ended reads every one of them."""
    ends = frozenset((a.id, a.end_reason) for a in world.attempts.values())
    return ends, frozenset((job.id, job.attempts_made) for job in world.jobs.values())


def _running(world: World) -> list[Attempt]:
    """Return the machines whose command runs, the oldest first."""
    found = [a for a in world.attempts.values() if a.state.counts and a.running_at is not None]
    return sorted(found, key=lambda a: (a.intended_at, a.id.job, a.id.number))


def _polls(poller: Poller) -> PollFigures:
    return PollFigures(
        requests=poller.request_counts.total,
        offers_errors=poller.offers.metrics.errors,
        machines_errors=poller.machines.metrics.errors,
    )


def _sums(reads: Reads, ends: _Ends | None) -> StoredSums:
    return StoredSums(
        jobs=reads.counts_by_state(),
        costs=reads.costs_of_providers(),
        ends=reads.ends_of_attempts() if ends is None else ends,
        quarantined=reads.count_quarantined(),
    )
