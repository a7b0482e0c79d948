"""The controller that deletes what no dataset consists of any more. What that is, `spotd.daemon.datasets` says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Final

from spotd.core.domain.world import World
from spotd.daemon.commits import Threads
from spotd.daemon.controllers import Controller, Outage
from spotd.daemon.datasets import Datasets
from spotd_jobs.objects.api import StoreError
from spotd_jobs.spec.model import DataSource
from spotd_providers.contract.provider import Clock, Logger

EVERY: Final = timedelta(hours=1)
"""On the wall: what is deleted is a day old by the clock of the store, which is the wall's."""
DEADLINE_S: Final = 1800.0


class DatasetGarbage:
    """Garbage collection of datasets. `reconcile_once` is one pass."""

    def __init__(
        self,
        datasets: Datasets,
        *,
        world: Callable[[], World | None],
        wall: Clock,
        log: Logger,
        inline: bool = False,
        may_delete: Callable[[], bool] = lambda: True,
    ) -> None:
        self._datasets = datasets
        self._world = world
        self._wall = wall
        self._log = log
        self._threads = Threads(inline=inline)
        self._may_delete = may_delete
        self.controller = Controller(
            "dataset-garbage",
            self.reconcile_once,
            interval_s=EVERY.total_seconds(),
            expected=(StoreError,),
            outage=Outage(log, "data.held", "data.back"),
            deadline_s=DEADLINE_S,
            is_first_run_late=True,
        )

    async def reconcile_once(self) -> None:
        """Delete what nothing has needed for a day, unless it is not known for certain what is needed.

        The world of the newest cycle may lack a job that was queued a moment ago: what it reads had a name then.

        Raises:
            StoreError: nothing is deleted.
        """
        world = self._world()
        if world is None or world.unreadable or not self._may_delete():
            return
        needed, listings = read_by_jobs(world), listings_read_by_jobs(world)
        now = self._wall.now()
        done = await self._threads.run(lambda: self._datasets.collect(needed, now, listings=listings))
        if done.objects:
            self._log.info("data.swept", objects=done.objects, bytes=done.bytes)


def read_by_jobs(world: World) -> frozenset[str]:
    """Return the hashes of the datasets that jobs read which have not ended."""
    return frozenset(one.sha256 for one in _sources(world) if one.sha256 is not None and not one.is_elsewhere)


def listings_read_by_jobs(world: World) -> frozenset[str]:
    """Return the hashes of the lists of files elsewhere that jobs read which have not ended."""
    return frozenset(one.sha256 for one in _sources(world) if one.sha256 is not None and one.is_listed)


def _sources(world: World) -> Iterator[DataSource]:
    return (one for job in world.jobs.values() if not job.state.is_final for one in job.spec.data)
