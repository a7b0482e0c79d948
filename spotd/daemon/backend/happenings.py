"""The event log as a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

import anyio

from spotd.api.backend import EventQuery
from spotd.api.shapes.told import EventShape
from spotd.core.model import JobId
from spotd.daemon.backend.parts import Parts
from spotd.daemon.backend.render import event_shape
from spotd.store import EventView, Reads

FOLLOW_PAUSE_S: Final = 0.5
BATCH: Final = 1000


class Happenings:
    """The part of the backend that knows events."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def stream(self, query: EventQuery) -> AsyncIterator[EventShape]:
        job = None if query.job is None else await self._parts.find(query.job)
        names: dict[JobId, str] = {}
        first, last = await self._parts.read(lambda reads: self._first(reads, query, job))
        for item in first:
            yield event_shape(item, await self._name(names, item.event.job))
        while query.follow:
            fresh = await self._after(last, job)
            for item in fresh:
                last = item.seq
                if query.since is None or item.event.at >= query.since:
                    yield event_shape(item, await self._name(names, item.event.job))
            if len(fresh) < BATCH:
                await anyio.sleep(FOLLOW_PAUSE_S)

    async def _after(self, last: int, job: JobId | None) -> tuple[EventView, ...]:
        return await self._parts.read(lambda reads: reads.events(since=last, job_id=job, limit=BATCH))

    def _first(self, reads: Reads, query: EventQuery, job: JobId | None) -> tuple[list[EventView], int]:
        """The newest of those that match, and the number from which to follow."""
        last = reads.last_event()
        found = reads.newest_events(job_id=job, limit=query.limit) if query.limit else ()
        kept = [
            item
            for item in found
            if (query.after is None or item.seq > query.after) and (query.since is None or item.event.at >= query.since)
        ]
        return kept, last

    async def _name(self, names: dict[JobId, str], job: JobId | None) -> str | None:
        if job is None:
            return None
        if job not in names:
            view = await self._parts.read(lambda reads: reads.job_view(job))
            names[job] = view.name if view is not None else ""
        return names[job] or None
