"""Whole arrays: cancel and retry every job of one, and change their ceiling."""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from typing import Final

import anyio

from spotd.api.handlers.context import ContextHandlers, HandlerContext
from spotd.api.handlers.jobs import JobHandlers
from spotd.api.schemas.jobs import ArrayResponse
from spotd.core import requests
from spotd.core.domain.ids import JobId
from spotd.core.domain.states import JobState
from spotd.core.domain.world import World
from spotd.core.plans.plan import Plan
from spotd.daemon.crash import CrashPoint
from spotd.store import JobView, Reads
from spotd_jobs.spec.model import PriceLimit
from spotd_providers.contract.money import as_usd

RETRIES_AT_ONCE: Final = 250
"""In one transaction."""
RETRIES_LAST_S: Final = 5.0
"""Each asks the store; after so long the client asks again with the index behind the last."""
REFUSALS_MAX: Final = 5


class ArrayHandlers(ContextHandlers):
    """Changes the jobs of an array together. Each method returns `None` where the reference means no array."""

    def __init__(self, context: HandlerContext, jobs: JobHandlers) -> None:
        super().__init__(context)
        self._jobs = jobs

    async def cancel(self, ref: str) -> ArrayResponse | None:
        """Cancel all jobs of the array that have not ended, in one transaction."""
        array = await self._context.find_array(ref)
        if array is None:
            return None

        def decide(_reads: Reads, world: World, now: datetime) -> Plan:
            mine = [job.id for job in world.jobs.values() if job.array is not None and job.array.id == array]
            return requests.cancel_all(world, mine, now)

        await self._context.commit(decide, (CrashPoint.BEFORE_COMMIT_CANCEL, CrashPoint.AFTER_COMMIT_CANCEL))
        self._context.log.info("array.cancel_requested", array=array)
        return await self._response(array)

    async def set_ceiling(self, ref: str, limit: PriceLimit | None) -> ArrayResponse | None:
        """Set what a machine of each job of the array may cost, in one transaction; those that ended keep theirs."""
        array = await self._context.find_array(ref)
        if array is None:
            return None

        def decide(_reads: Reads, world: World, now: datetime) -> Plan:
            mine = [job for job in world.jobs.values() if job.array is not None and job.array.id == array]
            return requests.set_ceiling(world, mine, limit, now)

        await self._context.commit(decide)
        self._context.log.info("array.ceiling_changed", array=array)
        return await self._response(array)

    async def retry(self, ref: str, *, start: int = 0) -> ArrayResponse | None:
        """Queue the jobs of the array that ended without success again, some of them, from this index on."""
        array = await self._context.find_array(ref)
        if array is None:
            return None
        views = await self._context.read(lambda reads: reads.array_jobs(array))
        ended = [view for view in views if view.state.is_final and view.state is not JobState.SUCCEEDED]
        due = [view for view in ended if _index(view) >= start]
        refusals: list[str] = []
        retried, until = 0, anyio.current_time() + RETRIES_LAST_S
        while due:
            some, due = due[:RETRIES_AT_ONCE], due[RETRIES_AT_ONCE:]
            queued, refused = await self._jobs.retry_all([view.id for view in some])
            retried += queued
            refusals += [refusal.message for refusal in refused]
            if anyio.current_time() >= until:
                break
        following = _index(due[0]) if due else None
        return await self._response(array, retried=retried, refusals=refusals[:REFUSALS_MAX], following=following)

    async def _response(
        self, array: JobId, *, retried: int = 0, refusals: list[str] | None = None, following: int | None = None
    ) -> ArrayResponse:
        views = await self._context.read(lambda reads: reads.array_jobs(array))
        now = self._context.clock.now()
        first = views[0].array
        return ArrayResponse(
            id=array,
            name="" if first is None else first.name,
            jobs=len(views),
            states=dict(Counter(view.state.value for view in views)),
            spent_usd=as_usd(sum(view.spent_at(now) for view in views)),
            estimated=any(view.is_estimated and view.spent_at(now) for view in views),
            retried=retried,
            refusals=refusals or [],
            next_index=following,
        )


def _index(view: JobView) -> int:
    return 0 if view.array is None else view.array.index
