"""A job's log as one stream over all its attempts, read from the object store: it outlives every machine.

A log object is named by the instant it was begun and a counter, so key order is time order. The cursor of a record is
the attempt and that name; a reader who comes back with it goes on right behind it, in whatever attempt the job then is.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import islice
from typing import Final

import anyio

from spotd.api.handlers.context import DaemonAnswers, HandlerContext
from spotd.api.handlers.render import event_response
from spotd.api.requests import EventQuery, LogQuery, instant
from spotd.api.responses import Invalid, NotFound
from spotd.api.schemas.answers import EventResponse, LogKind, LogResponse
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.intents import AttemptId, JobId
from spotd.core.pricing import machine_words
from spotd.daemon import object_keys
from spotd.daemon.hosts.limits import HostTransfer
from spotd.store import EventView, JobView, Reads
from spotd_jobs.objects.api import ObjectMissing, StoreError, StoreUnavailable
from spotd_jobs.wire.reports import LOG_OBJECT_BYTES_MAX

FOLLOW_PAUSE_S: Final = 0.5
OBJECTS_MAX: Final = 100_000
TAIL_BYTES_MAX: Final = 64 * 1024 * 1024
BATCH: Final = 32
WORTH_REPORTING_S: Final = 5.0
POLLS_BETWEEN: Final = 20
"""A transfer under way is reported again after so many polls, about ten seconds."""
LAST_POLLS: Final = 2
"""How many empty polls after a job's end it takes to conclude that nothing more is coming."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Behind which object of which attempt to go on; an empty name is the attempt's beginning."""

    attempt: int
    name: str = ""

    def __str__(self) -> str:
        return f"{self.attempt}/{self.name}"


def parse_cursor(text: str) -> Cursor:
    """Return the cursor in a text that an earlier record gave.

    Raises:
        Invalid: no record ever gave it.
    """
    attempt, _, name = text.partition("/")
    if not attempt.isascii() or not attempt.isdecimal() or len(attempt) > 9 or "/" in name:
        raise Invalid("the parameter after must be the cursor of a log record")
    return Cursor(attempt=int(attempt), name=name)


class LogHandlers(DaemonAnswers):
    async def require(self, ref: str, query: LogQuery) -> JobId:
        """Return the job whose log is meant.

        Raises:
            NotFound: there is no such job, or it has no such attempt.
            Invalid: there is no such cursor.
        """
        if query.after is not None:
            parse_cursor(query.after)
        job = await self._context.find(ref)
        if query.attempt is not None and query.attempt not in await self._numbers(job):
            raise NotFound(f"job {job} has no attempt {query.attempt}", hint=f"spotctl show {job}")
        return job

    async def stream(self, ref: str, query: LogQuery) -> AsyncGenerator[LogResponse, None]:
        """Yield records from where the query begins to the end of what is there, or of the job when it is followed.

        The last is of kind `end`.

        Raises:
            NotFound: at the first step, before any record.
        """
        job = await self.require(ref, query)
        start = parse_cursor(query.after) if query.after is not None else None
        skip_text: dict[tuple[int, str], int] = {}
        if query.tail is not None and start is None:
            start, skip_text = await self._tail_start(job, query)
        reader = _Reader(self._context, job, query.attempt, start, skip_text)
        quiet = 0
        reports = _TransferReports()
        while True:
            view = await self._view(job)
            records = await reader.more()
            for record in records:
                yield record
            if records:
                quiet = 0
                continue
            quiet += 1
            over = view.state.is_final and quiet >= LAST_POLLS
            if (
                not query.follow
                or over
                or (query.attempt is not None and await self._has_ended(job, query.attempt, quiet))
            ):
                yield reader.end(view, sums_up=query.follow and query.attempt is None)
                return
            note = reports.sentence(self._transfer(job))
            if note:
                yield reader.transfer(note)
            await anyio.sleep(FOLLOW_PAUSE_S)

    def _transfer(self, job: JobId) -> HostTransfer | None:
        state = self._context.control_loop.state
        attempt = None if state is None else state.world.counting_attempt(job)
        return None if attempt is None else self._context.host_monitor.transfer(attempt.id)

    async def _view(self, job: JobId) -> JobView:
        view = await self._context.read(lambda reads: reads.job_view(job))
        if view is None:
            raise NotFound(f"job {job} is not there any more")
        return view

    async def _numbers(self, job: JobId) -> set[int]:
        return {a.id.number for a in await self._context.read(lambda reads: reads.attempts_of(job))}

    async def _has_ended(self, job: JobId, number: int, quiet: int) -> bool:
        attempts = await self._context.read(lambda reads: reads.attempts_of(job))
        return quiet >= LAST_POLLS and any(a.id.number == number and not a.state.counts for a in attempts)

    async def _tail_start(self, job: JobId, query: LogQuery) -> tuple[Cursor, dict[tuple[int, str], int]]:
        """Return the cursor before the object in which the last lines begin, and how much of it to leave out."""
        wanted, taken = query.tail or 0, 0
        attempts = await self._context.read(lambda reads: reads.attempts_of(job))
        first = Cursor(attempt=0)
        for attempt in reversed([a for a in attempts if query.attempt in (None, a.id.number)]):
            names = await self._context.stored(partial(_names, self._context, attempt.id))
            if wanted == 0:
                return Cursor(attempt=attempt.id.number, name=names[-1] if names else ""), {}
            for index in range(len(names) - 1, -1, -1):
                name = names[index]
                data = await self._context.stored(partial(_data, self._context, attempt.id, name))
                taken += len(data)
                lines = data.count(b"\n")
                if lines >= wanted or taken > TAIL_BYTES_MAX:
                    before = Cursor(attempt=attempt.id.number, name=names[index - 1] if index else "")
                    return before, {(attempt.id.number, name): _offset_of_last(data, wanted)}
                wanted -= lines
        return first, {}


def _offset_of_last(data: bytes, lines: int) -> int:
    """Return where the last so many lines begin."""
    position = len(data) - 1 if data.endswith(b"\n") else len(data)
    for _ in range(lines):
        position = data.rfind(b"\n", 0, position)
        if position < 0:
            return 0
    return position + 1


class _Reader:
    """One reading of one job's log; remembers how far it has come."""

    def __init__(
        self,
        context: HandlerContext,
        job: JobId,
        only: int | None,
        start: Cursor | None,
        skip_text: dict[tuple[int, str], int],
    ) -> None:
        self._context = context
        self._job = job
        self._only = only
        self._at = start or Cursor(attempt=0)
        self._skip_text = skip_text
        self._marked = self._at.attempt if self._at.name else 0
        self._decoder = _decoder()

    async def more(self) -> list[LogResponse]:
        """Return the next records, none when there is nothing new now."""
        attempts = await self._context.read(self._attempts)
        records: list[LogResponse] = []
        for attempt in attempts:
            if attempt.id.number > self._at.attempt:
                self._at = Cursor(attempt=attempt.id.number)
                self._decoder = _decoder()
            after = self._at.name
            names = await self._context.stored(partial(_names, self._context, attempt.id, after=after, limit=BATCH))
            for name in names:
                records.extend(await self._record(attempt, name))
            if records:
                return records
            if attempt.state.counts:
                break
        return records

    def _attempts(self, reads: Reads) -> tuple[Attempt, ...]:
        found = reads.attempts_of(self._job)
        return tuple(a for a in found if a.id.number >= self._at.attempt and self._only in (None, a.id.number))

    async def _record(self, attempt: Attempt, name: str) -> list[LogResponse]:
        records = []
        if self._marked != attempt.id.number:
            self._marked = attempt.id.number
            launched_at = attempt.launched_at or attempt.intended_at
            records.append(self._response("attempt", _where(attempt), at=launched_at))
        self._at = Cursor(attempt=attempt.id.number, name=name)
        try:
            data = await self._context.stored(lambda: _data(self._context, attempt.id, name, strict=True))
        except NotFound:
            return [*records, self._response("gap", "a piece of the log is missing or not readable")]
        data = data[self._skip_text.pop((attempt.id.number, name), 0) :]
        text = self._decoder.decode(data)
        return [*records, self._response("log", text)] if text else records

    def transfer(self, text: str) -> LogResponse:
        """Return a record about a checkpoint on its way; a reader that continues behind it misses nothing."""
        return self._response("transfer", text, at=self._context.clock.now())

    def end(self, view: JobView, *, sums_up: bool) -> LogResponse:
        """Return the last record, which may sum a job up that is over."""
        now = self._context.clock.now()
        return {
            **self._response("end", view.closing_words(now) if sums_up else "", at=now),
            "state": view.state.value,
            "exit_code": view.exit_code,
        }

    def _response(self, kind: LogKind, text: str, *, at: datetime | None = None) -> LogResponse:
        return LogResponse(
            kind=kind,
            cursor=str(self._at),
            attempt=self._at.attempt,
            at=instant(at),
            text=text,
            state=None,
            exit_code=None,
        )


class _TransferReports:
    """Occasional reports of how far a checkpoint has come, where that takes a while."""

    def __init__(self) -> None:
        self._reported: tuple[str, str] | None = None
        self._polls = 0

    def sentence(self, at: HostTransfer | None) -> str:
        """Return what is worth reporting at this poll, if anything."""
        if at is None or at.left_s is None or at.rate is None:
            return ""
        self._polls += 1
        is_new = self._reported != (at.kind, at.name)
        if is_new and at.left_s < WORTH_REPORTING_S:
            return ""
        if not is_new and self._polls < POLLS_BETWEEN:
            return ""
        self._reported, self._polls = (at.kind, at.name), 0
        mb, left = f"{at.done / 1e6:.0f} of {at.total / 1e6:.0f} MB", f"{at.left_s:.0f} s left"
        return f"{at.kind} of {at.name}: {mb}, {at.rate / 1e6:.1f} MB/s, {left}"


def _decoder() -> codecs.IncrementalDecoder:
    """Return a decoder that keeps a character which is cut in two by the end of an object."""
    return codecs.getincrementaldecoder("utf-8")(errors="replace")


def _where(attempt: Attempt) -> str:
    offer = attempt.quote.offer
    place = f" ({offer.region})" if offer.region else ""
    resumed = f", resumed from {attempt.resumed_from}" if attempt.resumed_from else ""
    host = offer.host_id or offer.offer_id
    machine = machine_words(offer.gpu, offer.gpu_count, offer.nodes)
    return f"attempt {attempt.id.number} on {machine} at {offer.provider} {host}{place}{resumed}"


def _names(context: HandlerContext, attempt: AttemptId, *, after: str = "", limit: int = OBJECTS_MAX) -> list[str]:
    """Return the names of the next log objects; what lies before them is not listed again."""
    prefix = object_keys.log_prefix(attempt)
    listed = islice(context.objects.list_after(prefix, prefix + after), OBJECTS_MAX)
    names = (info.key.removeprefix(prefix) for info in listed)
    return list(islice((name for name in names if name.isascii() and name.isdecimal()), limit))


def _data(context: HandlerContext, attempt: AttemptId, name: str, *, strict: bool = False) -> bytes:
    """Return the bytes of one log object; one that a host made unreadable is missing, or empty where permitted."""
    try:
        return context.objects.get(object_keys.log_prefix(attempt) + name, bytes_max=LOG_OBJECT_BYTES_MAX)
    except StoreUnavailable:
        raise
    except StoreError as exc:
        if strict:
            raise ObjectMissing(str(exc)) from exc
        return b""


# The event log as a stream.


EVENTS_AT_ONCE: Final = 1000
KINDS_MAX: Final = 50
_KIND: Final = re.compile(r"[a-z]{1,40}(\.[a-z_]{1,60})?")
NAMES_MAX: Final = 2_000
"""Names of jobs that one stream remembers."""


class EventHandlers(DaemonAnswers):
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
            if len(fresh) < EVENTS_AT_ONCE:
                await anyio.sleep(FOLLOW_PAUSE_S)

    async def _after(self, last: int, job: JobId | None, kinds: Sequence[str]) -> tuple[EventView, ...]:
        return await self._context.read(
            lambda reads: reads.events(since=last, job_id=job, kinds=kinds, limit=EVENTS_AT_ONCE)
        )

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
