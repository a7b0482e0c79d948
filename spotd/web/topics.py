"""What pages may watch: each topic is one question to the daemon and how often it is worth asking."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from spotd.client.daemon import Daemon
from spotd.web.figures import LogTail

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
