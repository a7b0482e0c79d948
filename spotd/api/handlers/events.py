"""The event log as a stream."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Final

import anyio

from spotd.api.errors import Invalid
from spotd.api.handlers.context import ContextHandlers
from spotd.api.handlers.render import event_response
from spotd.api.requests import EventQuery
from spotd.api.schemas.streams import EventResponse
from spotd.core.domain.ids import JobId
from spotd.store import EventView, Reads

FOLLOW_PAUSE_S: Final = 0.5
BATCH: Final = 1000
KINDS_MAX: Final = 50
_KIND: Final = re.compile(r"[a-z]{1,40}(\.[a-z_]{1,60})?")
NAMES_MAX: Final = 10_000
"""Names of jobs that one stream remembers."""


class EventHandlers(ContextHandlers):
    async def require(self, query: EventQuery) -> JobId | None:
        """Return the job whose events are meant, `None` for those of all.

        Raises:
            NotFound: there is no such job.
            Invalid: a kind is none that any event could have.
        """
        _kinds(query)
        return None if query.job is None else await self._context.find(query.job)

    async def stream(self, query: EventQuery) -> AsyncGenerator[EventResponse, None]:
        """Yield the events; with `follow` it never ends by itself."""
        job = await self.require(query)
        kinds = _kinds(query)
        names: dict[JobId, str] = {}
        first, last = await self._context.read(lambda reads: self._first(reads, query, job, kinds))
        await self._learn(names, first)
        for item in first:
            yield event_response(item, _name(names, item))
        while query.follow:
            fresh = await self._after(last, job, kinds)
            await self._learn(names, fresh)
            for item in fresh:
                last = item.seq
                if query.since is None or item.event.at >= query.since:
                    yield event_response(item, _name(names, item))
            if len(fresh) < BATCH:
                await anyio.sleep(FOLLOW_PAUSE_S)

    async def _after(self, last: int, job: JobId | None, kinds: Sequence[str]) -> tuple[EventView, ...]:
        return await self._context.read(lambda reads: reads.events(since=last, job_id=job, kinds=kinds, limit=BATCH))

    def _first(
        self, reads: Reads, query: EventQuery, job: JobId | None, kinds: Sequence[str]
    ) -> tuple[list[EventView], int]:
        """Return the newest of those that match, and the number from which to follow."""
        last = reads.last_event()
        found = reads.newest_events(job_id=job, kinds=kinds, limit=query.limit) if query.limit else ()
        kept = [
            item
            for item in found
            if (query.after is None or item.seq > query.after) and (query.since is None or item.event.at >= query.since)
        ]
        return kept, last

    async def _learn(self, names: dict[JobId, str], items: Sequence[EventView]) -> None:
        """Read the missing names of the jobs of these events, in one query."""
        missing = {item.event.job for item in items if item.event.job is not None} - names.keys()
        if missing:
            if len(names) + len(missing) > NAMES_MAX:
                names.clear()
                missing = {item.event.job for item in items if item.event.job is not None}
            found = await self._context.read(lambda reads: reads.names_of(missing))
            names.update({job: found.get(job, "") for job in missing})


def _kinds(query: EventQuery) -> Sequence[str]:
    """Return the kinds that are asked for.

    Raises:
        Invalid: one is none that any event could have.
    """
    if len(query.kind) > KINDS_MAX:
        raise Invalid(f"at most {KINDS_MAX} kinds are asked for at once")
    for kind in query.kind:
        if _KIND.fullmatch(kind) is None:
            raise Invalid(f"no event is ever of the kind {kind!r}", hint="attempt, job.failed, checkpoint")
    return query.kind


def _name(names: Mapping[JobId, str], item: EventView) -> str | None:
    return None if item.event.job is None else names[item.event.job] or None
