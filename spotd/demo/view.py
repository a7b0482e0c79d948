"""What the demo shows while it runs: a live screen on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Final, Self

from spotd.demo.script import NIGHT_TARIFF_S, TIME_SCALE

SHOWN: Final = frozenset(
    {
        "attempt.intended",
        "attempt.running",
        "attempt.resumed",
        "attempt.notice",
        "attempt.outbid",
        "attempt.preempted",
        "attempt.host_lost",
        "attempt.launch_failed",
        "attempt.done",
        "attempt.user_error",
        "job.waiting_price",
        "job.succeeded",
        "job.failed",
        "job.expired",
        "job.closed",
    }
)
EVENTS_ON_SCREEN: Final = 14


def clock_words(instant: str) -> str:
    """`20:45:10`, the market's time."""
    return datetime.fromisoformat(instant).strftime("%H:%M:%S")


def event_words(event: Mapping[str, Any]) -> str:
    attempt = f" #{event['attempt']}" if event["attempt"] else ""
    return f"{clock_words(event['at'])}  {(event['job_name'] or '') + attempt:14} {event['message']}"


class Lines:
    """One line per event, for pipes and files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def event(self, event: Mapping[str, Any]) -> None:
        if event["kind"] in SHOWN:
            sys.stdout.write(event_words(event) + "\n")
            sys.stdout.flush()

    def jobs(self, now: str, jobs: Sequence[Mapping[str, Any]]) -> None:
        """Print nothing: events are enough here."""


class Screen:
    """A table of the jobs and the newest events, redrawn in place."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console()
        self._live = Live(console=self._console, refresh_per_second=8, transient=False)
        self._events: deque[Mapping[str, Any]] = deque(maxlen=EVENTS_ON_SCREEN)
        self._now = ""
        self._jobs: Sequence[Mapping[str, Any]] = []

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, exc, trace)

    def event(self, event: Mapping[str, Any]) -> None:
        if event["kind"] in SHOWN:
            self._events.append(event)
            self._draw()

    def jobs(self, now: str, jobs: Sequence[Mapping[str, Any]]) -> None:
        self._now, self._jobs = now, jobs
        self._draw()

    def _draw(self) -> None:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        title = f"market time {clock_words(self._now)} UTC, {TIME_SCALE} x the wall" if self._now else "starting"
        table = Table(title=title, title_justify="left", expand=True, title_style="bold")
        for name in ("NAME", "STATE", "GPU", "WHERE", "$/H", "SPENT", "SAVED", "PREEMPT", "CHECKPOINT"):
            table.add_column(name, justify="right" if name in {"$/H", "SPENT", "SAVED", "PREEMPT"} else "left")
        for job in self._jobs:
            saved = job["checkpoint"]
            table.add_row(
                job["name"],
                Text(job["state"], style=_STYLES.get(job["state"], "")),
                job["gpu"] or "",
                job["host"] or "",
                "" if job["effective_usd_h"] is None else f"{job['effective_usd_h']:.3f}",
                f"{job['spent_usd']:.4f}",
                f"{job['saved_usd']:.4f}",
                str(job["recoveries"]),
                "" if saved is None else saved["name"],
            )
        lines = Text("\n".join(event_words(e) for e in self._events), overflow="ellipsis", no_wrap=True)
        self._live.update(Group(table, lines))


_STYLES: Final = {
    "RUNNING": "green",
    "SUCCEEDED": "bold green",
    "RECOVERING": "yellow",
    "WAITING_PRICE": "cyan",
    "FAILED": "bold red",
}


def opening(jobs: list[str]) -> str:
    """Return the introduction that is printed before the demo begins."""
    night_s = NIGHT_TARIFF_S // TIME_SCALE
    return "\n".join(
        [
            "spotd demo: a market of virtual hosts on this machine, real processes, no account, nothing left behind",
            f"an evening at {TIME_SCALE} times the speed of the wall; the night price comes after {night_s} seconds",
            *jobs,
            "",
        ]
    )
