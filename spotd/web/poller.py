"""One asker for all pages: what any of them watches is asked for once, at a bounded pace, and kept for all.

Theory. A page renews what it watches every second or so; what was not renewed for some seconds is not asked for any
more. One thread asks, one question at a time, with a pause after each, so the daemon's share of work for dashboards
has a bound whatever number of tabs is open. A question that took long is asked less often. When the daemon does not
answer, one short question is tried again and again, ever more seldom, and the last answers stay. A search of a log is
the one question that is asked at once, by the page itself.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

import anyio
import anyio.to_thread

from spotd.client.daemon import Daemon
from spotd.client.transport import ClientError, DaemonUnreachable
from spotd.web.markup import LogTail
from spotd.words import ControlFilter

# What pages may watch: each topic is one question to the daemon and how often it is worth asking.


EVENTS_MAX: Final = 1_000
JOB_EVENTS_MAX: Final = 300
OFFERS_MAX: Final = 2_000
JOBS_MAX: Final = 2_000
HEAT_DAYS: Final = 7
"""Older prices are kept by quarters of a day, which is too coarse for hours."""
_EVERY_S: Final[Mapping[int, int]] = {1: 900, 7: 3600, 28: 21_600}
"""Length of a span in a chart of so many days: about a hundred, or two."""
_INSIDE: Final = timedelta(minutes=5)
"""So that a question about the last days is none about the time before, which is kept more coarsely."""


@dataclass(frozen=True, slots=True)
class WatchTopic:
    """A question; `args` say of what."""

    name: str
    args: tuple[str, ...] = ()


Fetch = Callable[[Daemon, tuple[str, ...], Any, datetime], Any]
"""Asks the daemon; it gets the topic's arguments, its last answer or `None`, and the daemon's time."""


def _events(daemon: Daemon, args: tuple[str, ...], before: Any, _now: datetime) -> list[Any]:
    """Return the newest events, the newest last; only those that came since are asked for.

    Args:
        daemon: what is asked.
        args: the job, empty for all, and the family of kinds if only that is wanted.
        before: the answer to the question before.
    """
    known: list[Any] = before or []
    query: dict[str, Any] = {"limit": JOB_EVENTS_MAX if args and args[0] else EVENTS_MAX}
    if args and args[0]:
        query["job"] = args[0]
    if len(args) > 1:
        query["kind"] = args[1]
    if known:
        query["after"] = str(known[-1]["id"])
    fresh = [event for event in daemon.events(query) if not known or event["id"] > known[-1]["id"]]
    return [*known, *fresh][-query["limit"] :] if fresh else known


def _history(daemon: Daemon, args: tuple[str, ...], _before: Any, now: datetime) -> Any:
    gpu, provider, days = args
    since = now - timedelta(days=int(days)) + _INSIDE
    query: dict[str, Any] = {"gpu": gpu, "since": since.isoformat(), "every_s": _EVERY_S[int(days)]}
    return daemon.history({**query, **({"provider": provider} if provider else {})})


def _week(daemon: Daemon, args: tuple[str, ...], _before: Any, now: datetime) -> Any:
    since = now - timedelta(days=HEAT_DAYS) + _INSIDE
    return daemon.history({"gpu": args[0], "since": since.isoformat(), "every_s": 3600})


def _log(daemon: Daemon, args: tuple[str, ...], before: Any, _now: datetime) -> LogTail:
    tail: LogTail = before or LogTail()
    return tail.read(daemon, args[0])


TOPICS: Final[Mapping[str, tuple[float, Fetch]]] = {
    "status": (2.0, lambda daemon, _args, _before, _now: daemon.status()),
    "jobs": (2.0, lambda daemon, _args, _before, _now: daemon.jobs({"limit": JOBS_MAX})),
    "array": (2.0, lambda daemon, args, _before, _now: daemon.jobs({"array": args[0]})),
    "events": (2.0, _events),
    "cost": (10.0, lambda daemon, _args, _before, _now: daemon.cost(None)),
    "days": (60.0, lambda daemon, _args, _before, _now: daemon.cost_by("day")["groups"]),
    "providers": (5.0, lambda daemon, _args, _before, _now: daemon.providers()["providers"]),
    "hosts": (30.0, lambda daemon, _args, _before, _now: daemon.hosts()),
    "prices": (10.0, lambda daemon, _args, _before, _now: daemon.prices({"limit": OFFERS_MAX})),
    "history": (60.0, _history),
    "week": (300.0, _week),
    "job": (2.0, lambda daemon, args, _before, _now: daemon.job(args[0])),
    "why": (4.0, lambda daemon, args, _before, _now: daemon.why(args[0])["why"]),
    "receipt": (10.0, lambda daemon, args, _before, _now: daemon.cost(args[0])),
    "checkpoints": (10.0, lambda daemon, args, _before, _now: daemon.checkpoints(args[0])["checkpoints"]),
    "gpus": (10.0, lambda daemon, args, _before, _now: daemon.gpu_history(args[0])),
    "log": (3.0, _log),
}
"""By name: seconds between two questions at the least, and the question."""


T = TypeVar("T")

WATCHED_S: Final = 8.0
TOPICS_MAX: Final = 96
GAP_S: Final = 0.12
"""Between two questions: eight a second at the most."""
SHARE: Final = 8.0
"""A question is not asked again before so many times what it took have passed."""
RETRIES_S: Final = (1.0, 1.0, 2.0, 4.0, 8.0, 15.0)
SLOW_S: Final = 10.0
ACTIONS: Final = 2
"""What users order goes past the queue, so many at a time."""
_IDLE_S: Final = 0.1
STATUS: Final = WatchTopic("status")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownAnswer:
    """The newest answer to a question; `error` says why a newer one was refused."""

    value: Any
    now: datetime
    error: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """Whether the daemon answers. `seen_at` is when it last did, by the wall clock; `None` for never."""

    is_up: bool = True
    reason: str = ""
    seen_at: datetime | None = None


@dataclass(slots=True)
class _Watch:
    until: float
    due: float
    answer: KnownAnswer | None = None


class SharedPoller:
    """Asks the daemon on behalf of all pages."""

    def __init__(
        self,
        daemon: Daemon,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.daemon = daemon
        self.connection = Connection()
        self._clock, self._wall = clock, wall
        self._watches: dict[WatchTopic, _Watch] = {}
        self._failures = 0
        self._retry_at = 0.0
        self._asked_at: float | None = None
        self._daemon_now = wall()
        self._clock_scale = 1.0
        self._clock_at: float | None = None
        """When the daemon's time was stated last."""
        self._limiter: anyio.CapacityLimiter | None = None

    def watch(self, topic: WatchTopic) -> KnownAnswer | None:
        """Return the newest answer, and have it kept fresh for some seconds."""
        now = self._clock()
        watch = self._watches.get(topic)
        if watch is None:
            self._make_room()
            watch = self._watches[topic] = _Watch(until=now, due=now)
        watch.until = now + WATCHED_S
        return watch.answer

    def refresh(self, *names: str) -> None:
        """Ask anew soon, since something was changed."""
        now = self._clock()
        for topic, watch in self._watches.items():
            if topic.name in names:
                watch.due = now

    def state(self) -> Connection:
        """Return whether the daemon answers; one that leaves a question open for long does not."""
        asked_at = self._asked_at
        if self.connection.is_up and asked_at is not None and self._clock() - asked_at > SLOW_S:
            return Connection(
                is_up=False,
                reason=f"the daemon has not answered for {self._clock() - asked_at:.0f} s",
                seen_at=self.connection.seen_at,
            )
        return self.connection

    def now(self) -> datetime:
        """Return the daemon's time, which may run ahead of ours, as of its newest answer and since."""
        if self._clock_at is None:
            return self._wall()
        return self._daemon_now + timedelta(seconds=(self._clock() - self._clock_at) * self._clock_scale)

    def next_topic(self) -> WatchTopic | None:
        """Return what is to be asked now, the longest overdue first; `None` while nothing is."""
        now = self._clock()
        if not self.connection.is_up:
            return STATUS if now >= self._retry_at and self._is_watched(now) else None
        if self._clock_at is None and self._is_watched(now):
            return STATUS
        due = [
            (watch.due, topic.name, topic) for topic, watch in self._watches.items() if watch.due <= now < watch.until
        ]
        return min(due, key=lambda row: row[:2])[2] if due else None

    def ask(self, topic: WatchTopic) -> None:
        """Ask one question and keep what came of it. Blocks; called in the one thread that asks."""
        every_s, fetch = TOPICS[topic.name]
        watch = self._watches.setdefault(topic, _Watch(until=0.0, due=0.0))
        began = self._asked_at = self._clock()
        before = None if watch.answer is None else watch.answer.value
        now = self.now()
        try:
            value = fetch(self.daemon, topic.args, before, now)
        except DaemonUnreachable as exc:
            self._note_failure(exc)
            return
        except ClientError as exc:
            watch.answer = KnownAnswer(value=before, now=now, error=exc.message, hint=exc.hint)
        except Exception as exc:  # noqa: BLE001 - a daemon of another version: the other answers may be understood
            watch.answer = KnownAnswer(
                value=before, now=now, error=f"the answer cannot be understood ({type(exc).__name__})"
            )
        else:
            watch.answer = KnownAnswer(value=value, now=self._time_of(topic, value, now))
        finally:
            self._asked_at = None
        ended = self._clock()
        watch.due = ended + max(every_s, SHARE * (ended - began))
        self._note_success()

    async def run(self) -> None:
        """Ask until cancelled."""
        limiter = anyio.CapacityLimiter(1)
        while True:
            topic = self.next_topic()
            if topic is None:
                await anyio.sleep(_IDLE_S)
                continue
            await anyio.to_thread.run_sync(self.ask, topic, limiter=limiter, abandon_on_cancel=True)
            await anyio.sleep(GAP_S)

    async def act(self, call: Callable[[Daemon], T]) -> T:
        """Return the result of what a user ordered.

        Raises:
            ClientError
        """
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(ACTIONS)
        return await anyio.to_thread.run_sync(call, self.daemon, limiter=self._limiter, abandon_on_cancel=True)

    def _is_watched(self, now: float) -> bool:
        return any(now < watch.until for watch in self._watches.values())

    def _make_room(self) -> None:
        if len(self._watches) < TOPICS_MAX:
            return
        oldest = min(self._watches, key=lambda topic: self._watches[topic].until)
        del self._watches[oldest]

    def _time_of(self, topic: WatchTopic, value: Any, now: datetime) -> datetime:
        """Return the daemon's time of an answer, and learn how it goes on from the answers that state it."""
        text = value.get("now") if isinstance(value, dict) else None
        if isinstance(text, str):
            now = datetime.fromisoformat(text)
            self._daemon_now, self._clock_at = now, self._clock()
        if topic == STATUS:
            self._clock_scale = float(value["status"]["clock_scale"])
        return now

    def _note_failure(self, exc: DaemonUnreachable) -> None:
        self._retry_at = self._clock() + RETRIES_S[min(self._failures, len(RETRIES_S) - 1)]
        self._failures += 1
        self._asked_at = None
        self.connection = Connection(is_up=False, reason=exc.message, seen_at=self.connection.seen_at)

    def _note_success(self) -> None:
        if not self.connection.is_up:
            for watch in self._watches.values():
                watch.due = min(watch.due, self._clock())
        self._failures = 0
        self.connection = Connection(is_up=True, seen_at=self._wall())


SEARCHED_MAX: Final = 100_000
"""Lines from the end of the log."""
READ_MAX: Final = 64_000_000
"""Characters; a log of longer lines is searched no further."""
HITS_MAX: Final = 200
LINE_MAX: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class LogHits:
    """The newest hits, oldest first, each with the number of its attempt.

    Attributes:
        total: how many there are in what was read.
        lines: how many lines were read.
        is_cut: the log is longer than what was read.
    """

    hits: tuple[tuple[int, str], ...]
    total: int
    lines: int
    is_cut: bool


def search_log(daemon: Daemon, ref: str, text: str) -> LogHits:
    """Search the last lines of the log; capital letters are the same as small ones.

    Raises:
        ClientError
    """
    wanted = text.casefold()
    hits: deque[tuple[int, str]] = deque(maxlen=HITS_MAX)
    total = lines = read = attempt = 0
    rest = ""
    filtering = ControlFilter()

    def take(found: list[str]) -> None:
        nonlocal total, lines
        for line in found:
            lines += 1
            if wanted in line.casefold():
                total += 1
                hits.append((attempt, line[:LINE_MAX]))

    for record in daemon.logs(ref, {"tail": SEARCHED_MAX}):
        if record["kind"] != "log":
            continue
        if record["attempt"] != attempt and rest:
            take([rest])
            rest = ""
        attempt = record["attempt"]
        read += len(record["text"])
        *whole, rest = (rest + filtering.feed(record["text"])).split("\n")
        take(whole)
        rest = rest[-READ_MAX // 100 :]
        if read >= READ_MAX:
            break
    if rest := rest + filtering.end():
        take([rest])
    return LogHits(hits=tuple(hits), total=total, lines=lines, is_cut=lines >= SEARCHED_MAX or read >= READ_MAX)
