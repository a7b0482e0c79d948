"""What a channel is sent next, and when.

Theory. A few are sent one by one. Many at once, what came while a channel was quiet or failed, and what comes faster
than a person reads, is one summary: a thousand failures are one message. Whatever waits for longer than `KEPT_FOR` is
no news any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from spotd.core.notifications.values import (
    TITLE_MAX,
    ChannelRules,
    Notification,
    Queued,
    Severity,
    plain_line,
    plain_text,
)
from spotd.core.schedule.windows import open_spans

GATHERED_FOR: Final = timedelta(seconds=5)
"""What comes within so short a time is judged together."""
SINGLES_MAX: Final = 3
"""More that wait at a time are one summary."""
PACE: Final = timedelta(minutes=10)
SENT_MAX: Final = 6
"""So many messages within the pace; then the rest of it is gathered."""
KEPT_FOR: Final = timedelta(days=3)
LINES_SHOWN: Final = 15
QUEUE_MAX: Final = 1_000
"""So many may wait for one channel; more are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What is sent in one piece, of the queued ones with these ids."""

    ids: tuple[int, ...]
    key: str
    topic: str
    severity: Severity
    at: datetime
    title: str
    text: str
    job: str | None = None
    uncounted: int = 0
    """How many it speaks of beside these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What to do now: drop these, send this; and come back in so long."""

    dropped: tuple[int, ...] = ()
    message: Message | None = None
    wait: timedelta | None = None
    """`None` where nothing is known for which to wait."""


def next_step(rules: ChannelRules, queue: Sequence[Queued], now: datetime, *, uncounted: int = 0) -> Step:
    """Return the next step of one channel.

    Args:
        queue: what waits, and what was sent lately.
        uncounted: how many more came for which the queue had no room.
    """
    waiting = sorted((one for one in queue if one.sent_at is None), key=lambda one: (one.notification.at, one.id))
    dropped = tuple(one.id for one in waiting if now - one.notification.at > KEPT_FOR)
    waiting = [one for one in waiting if one.id not in set(dropped)]
    quiet_for = quiet_left(rules, now)
    due = waiting if quiet_for is None else [one for one in waiting if _passes(rules, one.notification)]
    if not due:
        return Step(dropped=dropped, wait=quiet_for if waiting else None)
    young = GATHERED_FOR - (now - due[0].notification.at)
    if timedelta(0) < young <= GATHERED_FOR:
        return Step(dropped=dropped, wait=young)
    recent = sorted(
        {one.sent_at for one in queue if one.sent_at is not None and timedelta(0) <= now - one.sent_at < PACE}
    )
    if len(recent) >= SENT_MAX and not any(one.notification.severity is Severity.URGENT for one in due):
        return Step(dropped=dropped, wait=PACE - (now - recent[-SENT_MAX]))
    single = len(due) <= SINGLES_MAX and not uncounted
    return Step(dropped=dropped, message=_single(due[0]) if single else _summary(due, uncounted))


def _passes(rules: ChannelRules, one: Notification) -> bool:
    return rules.urgent_passes and one.severity is Severity.URGENT


def quiet_left(rules: ChannelRules, now: datetime) -> timedelta | None:
    """Return for how long the channel is quiet from now on; `None` while it is not."""
    spans = open_spans(rules.quiet, rules.zone, now) if rules.quiet else ()
    if not spans or spans[0].opens > now:
        return None
    return min(spans[0].left(now), timedelta(days=15))


def _single(one: Queued) -> Message:
    said = one.notification
    return Message(
        ids=(one.id,),
        key=said.key,
        topic=said.topic.value,
        severity=said.severity,
        at=said.at,
        title=said.title,
        text=said.text,
        job=said.job,
    )


def _summary(due: Sequence[Queued], uncounted: int) -> Message:
    said = [one.notification for one in due]
    counts = Counter(one.topic.value for one in said)
    total = len(said) + uncounted
    title = f"{total:,} notifications: " + ", ".join(f"{number:,} {topic}" for topic, number in counts.most_common())
    worst = sorted(said, key=lambda one: (-one.severity.rank, one.at))
    lines = [plain_line(f"{one.at:%Y-%m-%d %H:%M} UTC {one.title}", 200) for one in worst[:LINES_SHOWN]]
    if total > LINES_SHOWN:
        lines.append(f"and {total - LINES_SHOWN:,} more: spotctl events")
    return Message(
        ids=tuple(one.id for one in due),
        key=f"summary:{due[0].id}-{due[-1].id}",
        topic="summary",
        severity=worst[0].severity,
        at=max(one.at for one in said),
        title=plain_line(title, TITLE_MAX),
        text=plain_text("\n".join(lines)),
        uncounted=uncounted,
    )


def fresh(
    rules: Iterable[ChannelRules], known: Collection[Queued], found: Sequence[Notification], now: datetime
) -> list[tuple[str, Notification]]:
    """Return what is to be queued, by channel: what each wants, and has neither waiting nor had lately."""
    added: list[tuple[str, Notification]] = []
    for one in rules:
        mine = {q.notification.key: q for q in known if q.channel == one.name}
        for said in found:
            before = mine.get(said.key)
            if not one.wants(said) or now - said.at > KEPT_FOR:
                continue
            if before is not None and (before.sent_at is None or now - before.sent_at < said.repeat_after):
                continue
            mine[said.key] = Queued(id=0, channel=one.name, notification=said)
            added.append((one.name, said))
    return added
