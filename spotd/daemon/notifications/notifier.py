"""Turns events and conditions into notifications, and sends what each channel is owed.

Theory. What is to be sent is a row of the state, written in the transaction that moves the cursor over the events: a
crash loses and doubles nothing up to here. A row is marked only after its message was taken, so a crash in between
sends it once more, with the same key. One controller collects; each channel has one of its own, so that one that fails
or hangs delays neither another nor anything else of the daemon.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Final

import anyio

from spotd.core import notifications
from spotd.core.domain.intents import AttemptId, JobId
from spotd.core.domain.market import MarketSnapshot
from spotd.core.domain.world import World
from spotd.core.host_reports import explain_exit
from spotd.daemon.commits import Database
from spotd.daemon.controllers import Controller, Outage, Pause, backoff_s
from spotd.daemon.notifications.channels import Sender, SendFailed
from spotd.store import EventView, Reads, StateError, Tx
from spotd_providers.contract.provider import Clock, Logger

COLLECT_S: Final = 3.0
CONDITIONS_EVERY: Final = timedelta(minutes=1)
SLEPT_AFTER: Final = timedelta(minutes=5)
FAILED: Final = "job.failed"
OUTPUT_LINES: Final = 5
"""Of a failed job that a notification holds."""
OUTPUTS_MAX: Final = 5
"""Of so many failed jobs the output is read at a time."""
EVENTS_MAX: Final = 500
"""So many are read at a time."""
CURSOR: Final = "notify.cursor"
SEND_S: Final = 60.0
RETRY_FIRST_S: Final = 10.0
RETRY_MAX: Final = timedelta(hours=1)
IDLE_S: Final = 60.0
"""The longest pause of a channel: the clock may be set, and the computer sleep, meanwhile."""
GAP_S: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """One `[notify.NAME]`. `error`: why it can send nothing at all, empty where it can."""

    rules: notifications.ChannelRules
    sender: Sender | None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelStatus:
    """How one channel is doing; it is kept in the state.

    Attributes:
        uncounted: notifications for which its queue had no room.
        retry_at: microseconds since the epoch.
    """

    error: str = ""
    failures: int = 0
    retry_at: float = 0.0
    uncounted: int = 0


Outputs = Mapping[JobId, Sequence[str]]
"""The last lines of jobs that failed."""
_Stated = Callable[[], Iterable[notifications.Notification]]


def _nothing() -> Iterable[notifications.Notification]:
    return ()


class Notifier:
    """All channels of one daemon. `waiting`: how much waits for each."""

    def __init__(
        self,
        channels: Sequence[Channel],
        *,
        database: Database,
        clock: Clock,
        log: Logger,
        world: Callable[[], World | None],
        market: Callable[[], MarketSnapshot],
        use_of: Callable[[AttemptId], float | None],
        output_of: Callable[[AttemptId], Awaitable[Sequence[str]]] | None = None,
        collect_s: float = COLLECT_S,
    ) -> None:
        self._database = database
        self._clock = clock
        self._log = log
        self._world = world
        self._market = market
        self._use_of = use_of
        self._output_of = output_of
        self.channels = {one.rules.name: one for one in channels}
        self.status = {name: ChannelStatus(error=one.error) for name, one in self.channels.items()}
        self.waiting = dict.fromkeys(self.channels, 0)
        self._outages = {name: Outage(log, "notify.failing", "notify.works", each_error=True) for name in self.channels}
        self._cursor: int | None = None
        self._low: Mapping[AttemptId, notifications.LowUse] = {}
        self._checked_at: datetime | None = None
        self._collector = self._controller("notifications", self.collect, collect_s)
        self._senders = {
            name: self._controller(f"notify-{name}", partial(self.send_next, name), IDLE_S)
            for name, one in self.channels.items()
            if one.sender is not None
        }
        for name, one in self.channels.items():
            if one.error:
                self._outages[name].update(one.error, channel=name)

    def _controller(self, name: str, body: Callable[[], Awaitable[Pause | None]], interval_s: float) -> Controller:
        outage = Outage(self._log, "notify.held", "notify.back")

        async def contained() -> Pause | None:
            try:
                return await body()
            except StateError:
                raise
            except Exception as exc:  # noqa: BLE001 - the outermost frame: a defect here must not end the daemon
                self._log.error("notify.failed", controller=name, exc_info=exc)
                return Pause(seconds=IDLE_S, error=f"a defect of spotd itself: {type(exc).__name__}")

        return Controller(name, contained, interval_s=interval_s, expected=(StateError,), outage=outage)

    @property
    def last_error(self) -> str:
        """Why events are not read or channels not served, empty while they are."""
        return next((one.metrics.last_error for one in self.controllers if one.failures), "")

    @property
    def controllers(self) -> Sequence[Controller]:
        return (self._collector, *self._senders.values())

    async def collect(self) -> None:
        """Queue what events and conditions give since the last time.

        Raises:
            StateError: the state cannot be read or written; nothing is lost.
        """
        if self._cursor is None:
            await self._begin()
        now = self._clock.now()
        stated = self._conditions(now)
        more = True
        while more:
            since = self._cursor or 0
            outputs = await self._outputs(since)
            added, last, more = await self._database.read(partial(self._news, since, stated, outputs, now))
            stated = _nothing
            if added or last - since >= EVENTS_MAX:
                self.status |= await self._database.tx(partial(self._queue, added, last, now))
                for name in {channel for channel, _ in added}:
                    self._wake(name)
            self._cursor = last

    async def _outputs(self, since: int) -> Outputs:
        """Return the last lines of the jobs that failed since; a store that does not answer delays no notification."""
        if self._output_of is None:
            return {}

        def failed(reads: Reads) -> list[AttemptId]:
            events = reads.events(since=since, limit=EVENTS_MAX)
            jobs = [one.event.job for one in events if one.event.kind == FAILED and one.event.job is not None]
            views = (reads.job_view(job) for job in jobs[:OUTPUTS_MAX])
            return [AttemptId(job=view.id, number=view.attempts_made) for view in views if view and view.attempts_made]

        return {one.job: await self._output_of(one) for one in await self._database.read(failed)}

    async def _begin(self) -> None:
        """Go on where the last run stopped, or begin with what happens from now on."""

        def work(tx: Tx) -> int:
            known, last = tx.meta(CURSOR), tx.last_event()
            cursor = min(int(known), last) if known is not None and known.isdecimal() else last
            tx.set_meta(CURSOR, str(cursor))
            tx.outbox().forget_other_channels(list(self.channels))
            for name, one in self.channels.items():
                known_status = _status_in(tx.meta(_key(name)))
                # Tried at once: a person may have restarted the daemon because the channel failed.
                self.status[name] = replace(known_status, error=one.error or known_status.error, retry_at=0.0)
            return cursor

        self._cursor = await self._database.tx(work)

    def _conditions(self, now: datetime) -> _Stated:
        """Return what states the conditions of now, which the reader's thread calls: there may be very many."""
        world = self._world()
        age = CONDITIONS_EVERY if self._checked_at is None else now - self._checked_at
        if world is None or timedelta(0) <= age < CONDITIONS_EVERY:
            return _nothing
        self._checked_at = now
        if not timedelta(0) <= age <= SLEPT_AFTER:
            self._low = {}
            return _nothing  # what is known is of before the computer slept, or its clock was set
        running = [a.id for a in world.attempts.values() if a.state.counts and a.running_at is not None]
        self._low = notifications.low_uses(self._low, {attempt: self._use_of(attempt) for attempt in running}, now)
        return partial(notifications.conditions, world, self._market(), self._low, now)

    def _notifications_of(self, state: _Stated) -> list[notifications.Notification]:
        try:
            return list(state())
        except Exception as exc:  # noqa: BLE001 - one odd value must not end the other notifications, nor the daemon
            self._log.error("notify.conditions_failed", exc_info=exc)
            return []

    def _news(
        self, since: int, stated: _Stated, outputs: Outputs, now: datetime, reads: Reads
    ) -> tuple[list[tuple[str, notifications.Notification]], int, bool]:
        """Return what is to be queued, the number of the last event that was read, and whether there are more."""
        events = reads.events(since=since, limit=EVENTS_MAX)
        news = [view for view in events if view.event.kind in notifications.RULES]
        names = reads.names_of({view.event.job for view in news if view.event.job is not None})
        found = [
            *self._notifications_of(stated),
            *filter(None, (self._of_event(view, names, outputs, reads, now) for view in news)),
        ]
        last = events[-1].seq if events else since
        if not found:
            return [], last, len(events) == EVENTS_MAX
        rules = [one.rules for one in self.channels.values()]
        known = reads.outbox().queued([one.name for one in rules])
        return notifications.fresh(rules, known, found, now), last, len(events) == EVENTS_MAX

    def _of_event(
        self, view: EventView, names: Mapping[JobId, str], outputs: Outputs, reads: Reads, now: datetime
    ) -> notifications.Notification | None:
        event = view.event
        try:
            receipt = failure = ""
            name = "" if event.job is None else names.get(event.job, event.job)
            if event.job is not None and event.kind == FAILED:
                failure = self._failure_words(reads, event.job, name, outputs.get(event.job, ()))
            if event.job is not None and notifications.RULES[event.kind].topic is notifications.Topic.FINISHED:
                job = reads.job_view(event.job)
                receipt = "" if job is None else job.closing_words(now)
            return notifications.notification_of(event, view.seq, name=name, receipt=receipt, failure=failure)
        except Exception as exc:  # noqa: BLE001 - one odd event must not hold back all that follow
            self._log.error("notify.event_failed", event_number=view.seq, exc_info=exc)
            return None

    def _failure_words(self, reads: Reads, job: JobId, name: str, output: Sequence[str]) -> str:
        """Return the last lines that a failed job wrote, what its end means, and the next step, each on a line."""
        view = reads.job_view(job)
        if view is None:
            return ""
        known = explain_exit(view.exit_code, output, name)
        return "\n".join(part for part in (known.meaning, *output[-OUTPUT_LINES:], f"Try: {known.step}") if part)

    def _queue(
        self, added: Sequence[tuple[str, notifications.Notification]], cursor: int, now: datetime, tx: Tx
    ) -> dict[str, ChannelStatus]:
        """Write what is owed and how far events were read; return the status of channels that had no room for all."""
        outbox = tx.outbox()
        changed: dict[str, ChannelStatus] = {}
        for name, count in outbox.add(added, waiting_max=notifications.QUEUE_MAX).items():
            changed[name] = replace(self.status[name], uncounted=self.status[name].uncounted + count)
            tx.set_meta(_key(name), _text_of(changed[name]))
        outbox.forget_sent(now)
        tx.set_meta(CURSOR, str(cursor))
        return changed

    def _wake(self, name: str) -> None:
        if name in self._senders:
            self._senders[name].wake_event.notify()

    async def send_next(self, name: str) -> Pause:
        """Send the next message of a channel, if one is due.

        Raises:
            StateError: the state cannot be read or written.
        """
        channel = self.channels[name]
        if self._cursor is None or channel.sender is None:
            return Pause(seconds=COLLECT_S)  # its status is not read yet
        now, status = self._clock.now(), self.status[name]
        rest = timedelta(seconds=status.retry_at - now.timestamp())
        if timedelta(0) < rest <= RETRY_MAX:
            return self._pause(rest)
        queue = await self._database.read(lambda reads: reads.outbox().queued([name]))
        self.waiting[name] = sum(1 for one in queue if one.sent_at is None)
        step = notifications.next_step(channel.rules, queue, now, uncounted=status.uncounted)
        if step.dropped:
            await self._database.tx(lambda tx: tx.outbox().remove(step.dropped))
            self._log.warning("notify.dropped", channel=name, count=len(step.dropped), reason="too old")
        if step.message is None:
            return self._pause(step.wait)
        failure = await self._send(channel.sender, step.message)
        if failure is not None:
            return await self._note_failure(name, failure)
        await self._database.tx(partial(_mark_sent, name, step.message, now))
        self.status[name] = replace(
            ChannelStatus(), uncounted=max(0, self.status[name].uncounted - step.message.uncounted)
        )
        self._outages[name].update("")
        self.waiting[name] -= len(step.message.ids)
        self._log.info("notify.sent", channel=name, topic=step.message.topic, count=len(step.message.ids))
        return Pause(gap_s=GAP_S, seconds=0.0)

    def _pause(self, wait: timedelta | None) -> Pause:
        seconds = IDLE_S if wait is None else min(IDLE_S, self._clock.real_seconds(wait))
        return Pause(gap_s=GAP_S, seconds=seconds)

    async def _send(self, sender: Sender, message: notifications.Message) -> SendFailed | None:
        """Return why it was not sent, `None` where it was."""
        try:
            with anyio.fail_after(SEND_S):
                await sender(message)
        except SendFailed as exc:
            return exc
        except TimeoutError:
            return SendFailed(f"it was not sent within {SEND_S:.0f} s")
        except Exception as exc:  # noqa: BLE001 - whatever a channel does, the daemon goes on; its text may be a secret
            return SendFailed(f"it cannot be sent: {type(exc).__name__}")
        return None

    async def _note_failure(self, name: str, failure: SendFailed) -> Pause:
        now, status = self._clock.now(), self.status[name]
        failures = status.failures + 1
        usual = timedelta(seconds=backoff_s(RETRY_FIRST_S, failures, max_s=RETRY_MAX.total_seconds()))
        wait = min(RETRY_MAX, max(usual, failure.retry_after or usual))
        self.status[name] = replace(status, error=str(failure), failures=failures, retry_at=(now + wait).timestamp())
        self._outages[name].update(str(failure), channel=name)
        text = _text_of(self.status[name])
        await self._database.tx(lambda tx: tx.set_meta(_key(name), text))
        return self._pause(wait)

    async def test(self, name: str | None) -> dict[str, str]:
        """Send one message by this channel, or by each; return what is wrong with it, empty where it was taken."""
        found: dict[str, str] = {}
        now = self._clock.now()
        message = notifications.Message(
            ids=(),
            key=f"test:{now.timestamp():.3f}",
            topic=notifications.Topic.TEST.value,
            severity=notifications.Severity.INFO,
            at=now,
            title="a test of spotd",
            text="this channel works",
        )

        async def one(channel: Channel) -> None:
            failure = None if channel.sender is None else await self._send(channel.sender, message)
            name = channel.rules.name
            found[name] = channel.error or str(failure or "")
            if not found[name]:
                self.status[name] = replace(self.status[name], retry_at=0.0)
                self._wake(name)  # it works again: what waits need not wait longer

        async with anyio.create_task_group() as group:
            for channel in self.channels.values():
                if name in (None, channel.rules.name):
                    group.start_soon(one, channel, name=f"notify-test-{channel.rules.name}")
        return dict(sorted(found.items()))


def _key(name: str) -> str:
    return f"notify.channel.{name}"


def _text_of(status: ChannelStatus) -> str:
    return json.dumps(asdict(status))


def _mark_sent(name: str, message: notifications.Message, now: datetime, tx: Tx) -> None:
    tx.outbox().mark_sent(message.ids, now)
    before = _status_in(tx.meta(_key(name)))
    after = replace(ChannelStatus(), uncounted=max(0, before.uncounted - message.uncounted))
    if after != before:
        tx.set_meta(_key(name), _text_of(after))


def _status_in(text: str | None) -> ChannelStatus:
    """Return the status in a stored text; that of a new channel where it holds none."""
    try:
        found = json.loads(text or "{}")
        return ChannelStatus(
            error=str(found.get("error", "")),
            failures=max(0, int(found.get("failures", 0))),
            retry_at=float(found.get("retry_at", 0.0)),
            uncounted=max(0, int(found.get("uncounted", 0))),
        )
    except (ValueError, TypeError, AttributeError, OverflowError):
        return ChannelStatus()
