"""A notification, and what a channel wants to have."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final
from zoneinfo import ZoneInfo

from spotd.core.domain.ids import JobId
from spotd.words import clean
from spotd_jobs.spec.model import Window

TITLE_MAX: Final = 120
TEXT_MAX: Final = 2_000
LINES_MAX: Final = 40
_MENTION: Final = re.compile(r"@(?=everyone|here|channel)|<(?=[!@#])", re.IGNORECASE)
"""What chat services take for a call of all their members."""


class Severity(StrEnum):
    """How much a notification matters. The strings are part of the config."""

    INFO = "info"
    WARNING = "warning"
    URGENT = "urgent"

    @property
    def rank(self) -> int:
        return list(Severity).index(self)


class Topic(StrEnum):
    """What a notification is about. The strings are part of the config and of what is sent."""

    PREEMPTED = "preempted"
    RESUMED = "resumed"
    FINISHED = "finished"
    FAILED = "failed"
    BUDGET = "budget"
    BALANCE = "balance"
    CHECKPOINT = "checkpoint"
    GPU = "gpu"
    PROVIDER = "provider"
    QUARANTINED = "quarantined"
    STRAY = "stray"
    TEST = "test"


CHOICES: Final = tuple(topic for topic in Topic if topic is not Topic.TEST)
"""What a channel can ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notification:
    """One thing that a person may want to know; title and text are harmless and bounded, whatever they were made of.

    Attributes:
        key: two of one key are about the same thing.
        repeat_after: how long after one was sent another of its key may be.
    """

    key: str
    topic: Topic
    severity: Severity
    at: datetime
    title: str
    text: str = ""
    job: JobId | None = None
    repeat_after: timedelta = timedelta(days=1)


def notification(
    key: str,
    topic: Topic,
    severity: Severity,
    at: datetime,
    title: str,
    text: str = "",
    *,
    job: JobId | None = None,
    repeat_after: timedelta = timedelta(days=1),
) -> Notification:
    """Return a notification whose words cannot be taken for anything but text."""
    return Notification(
        key=key,
        topic=topic,
        severity=severity,
        at=at,
        title=plain_line(title, TITLE_MAX),
        text=plain_text(text),
        job=job,
        repeat_after=repeat_after,
    )


def plain_line(text: str, most: int) -> str:
    """Return one line without control sequences and mentions, of no more than so many characters."""
    line = _MENTION.sub(lambda found: found.group() + " ", clean(text[: 4 * most]))
    return line if len(line) <= most else f"{line[: most - 3]}..."


def plain_text(text: str) -> str:
    """Return the same of several lines."""
    lines = text[: 4 * TEXT_MAX].split("\n")[:LINES_MAX]
    return "\n".join(plain_line(line, TEXT_MAX) for line in lines)[:TEXT_MAX].strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelRules:
    """What one channel is sent.

    Attributes:
        quiet: weekly times in which nothing is sent.
        urgent_passes: urgent ones are sent in these, too.
    """

    name: str
    topics: frozenset[Topic] = frozenset(CHOICES)
    least: Severity = Severity.INFO
    quiet: tuple[Window, ...] = ()
    zone: ZoneInfo = field(default_factory=lambda: ZoneInfo("UTC"))
    urgent_passes: bool = False

    def wants(self, one: Notification) -> bool:
        return one.topic is Topic.TEST or (one.topic in self.topics and one.severity.rank >= self.least.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """A notification in the queue of a channel; `sent_at` is `None` while it waits."""

    id: int
    channel: str
    notification: Notification
    sent_at: datetime | None = None
