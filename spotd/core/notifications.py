"""A notification, and what a channel wants to have."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Final
from zoneinfo import ZoneInfo

from spotd.core.author import has_ended_nothing
from spotd.core.domain.intents import AttemptId, IntentKind, JobId
from spotd.core.domain.market import MarketSnapshot, ProviderOffers
from spotd.core.domain.plan import Event
from spotd.core.domain.states import EndKind, EndReason
from spotd.core.domain.world import World
from spotd.core.metering import spent, spent_in_month, spent_on_day
from spotd.core.prepaid import current_balance, spending_rate
from spotd.core.pricing import dollar_words, span_words
from spotd.core.schedule import open_spans
from spotd.words import clean
from spotd_jobs.spec.model import Window
from spotd_providers.contract.values import MicroUsd

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


# Which event gives which notification: one table.


REMEMBERED: Final = timedelta(minutes=10)
"""An event has a key of its own; what was sent is remembered for the pace of sending."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The line that an event gives; `{name}` is the job's name."""

    topic: Topic
    severity: Severity
    title: str


_LOST: Final = Rule(Topic.PREEMPTED, Severity.INFO, "{name} lost its machine")
RULES: Final[Mapping[str, Rule]] = {
    **{
        f"attempt.{reason.value}": Rule(Topic.PREEMPTED, Severity.INFO, f"{{name}} was {reason.value}")
        for reason in EndReason
        if reason.traits.kind is EndKind.TAKEN
    },
    **{f"attempt.{reason.value}": _LOST for reason in EndReason if reason.traits.kind is EndKind.LOST},
    "attempt.running": Rule(Topic.RESUMED, Severity.INFO, "{name} runs again"),
    "job.succeeded": Rule(Topic.FINISHED, Severity.INFO, "{name} has finished"),
    "job.failed": Rule(Topic.FAILED, Severity.WARNING, "{name} has failed"),
    "job.expired": Rule(Topic.FAILED, Severity.WARNING, "{name} has expired"),
    "job.quarantined": Rule(Topic.QUARANTINED, Severity.URGENT, "{name} is quarantined"),
    "checkpoint.late": Rule(Topic.CHECKPOINT, Severity.WARNING, "{name} has not saved for long"),
    "machine.ending": Rule(Topic.STRAY, Severity.WARNING, "a machine that no job owns is being ended"),
    "clock.wrong": Rule(Topic.PROVIDER, Severity.URGENT, "this computer's clock is wrong"),
}


def notification_of(event: Event, number: int, *, name: str, receipt: str, failure: str = "") -> Notification | None:
    """Return what a person is notified of; `None` where the event is not such news.

    Args:
        number: of the event, which makes two of one job different.
        receipt: the line that sums up a job that is over.
        failure: what the end of a job that failed means, and what to do.
    """
    rule = RULES.get(event.kind)
    if rule is None:
        return None
    if rule.topic is Topic.RESUMED and (event.attempt or 0) < 2:
        return None  # its first start
    if rule.topic is Topic.STRAY and event.job is not None:
        return None  # the usual end of a machine of a job
    text = "\n".join(part for part in (event.message, receipt if rule.topic is Topic.FINISHED else failure) if part)
    key = f"{event.kind}:{event.job or ''}:{number}"
    title = rule.title.replace("{name}", name)
    return notification(key, rule.topic, rule.severity, event.at, title, text, job=event.job, repeat_after=REMEMBERED)


# What is so rather than happens: budgets, balances, providers that are away, and GPUs that are hardly used.
#
# Each is stated as long as it is so, always by the same key. That a person hears of it once is the queue's affair.


BUDGET_PERCENT: Final = ((100, Severity.URGENT), (80, Severity.WARNING))
RUNWAYS: Final = ((timedelta(hours=1), Severity.URGENT), (timedelta(hours=6), Severity.WARNING))
AWAY_FOR: Final = timedelta(minutes=10)
NOT_ENDED_FOR: Final = timedelta(minutes=15)
LOW_USE: Final = 0.1
LOW_FOR: Final = timedelta(minutes=30)
_MONTH: Final = timedelta(days=32)
_DAY: Final = timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LowUse:
    """Since when the GPUs of a machine are hardly used, and how much they are used now."""

    since: datetime
    use: float


def low_uses(
    known: Mapping[AttemptId, LowUse], uses: Mapping[AttemptId, float | None], now: datetime
) -> dict[AttemptId, LowUse]:
    """Return which machines are hardly used now; where the use is not known, what was known of it stays."""
    found: dict[AttemptId, LowUse] = {}
    for attempt, use in uses.items():
        before = known.get(attempt)
        if use is None and before is not None:
            found[attempt] = before
        elif use is not None and use < LOW_USE:
            since = now if before is None or before.since > now else before.since
            found[attempt] = LowUse(since=since, use=use)
    return found


def conditions(
    world: World, market: MarketSnapshot, low: Mapping[AttemptId, LowUse], now: datetime
) -> Iterator[Notification]:
    """Yield everything that a person should know of at this moment."""
    yield from _budgets(world, now)
    for shown in market.by_provider.values():
        yield from _balance(world, shown, now)
        yield from _away(shown, now)
    yield from _overdue_ends(world, now)
    yield from _hardly_used(world, low, now)


def _budgets(world: World, now: datetime) -> Iterator[Notification]:
    today = now.astimezone(UTC).date()
    policy = world.policy
    whole = (
        (f"day:{today}", "today's budget", policy.budget_day, spent_on_day(world, now)),
        (f"month:{today:%Y-%m}", "this month's budget", policy.budget_month, spent_in_month(world, now)),
    )
    for key, what, limit, amount in whole:
        yield from _budget(key, what, limit, amount, now, "at its end running jobs save and stop")
    running: Counter[JobId] = Counter()
    for item in world.attempts.values():
        running[item.id.job] += spent(item, now)
    for job in world.jobs.values():
        if job.budget is None or job.state.is_final:
            continue
        then = f"at its end the job saves and stops; spotctl budget {job.name} changes it"
        cost = MicroUsd(job.spent + running[job.id])
        yield from _budget(f"job:{job.id}", f"the budget of {job.name}", job.budget, cost, now, then)


def _budget(
    key: str, what: str, limit: MicroUsd | None, amount: MicroUsd, now: datetime, then: str
) -> Iterator[Notification]:
    for percent, severity in BUDGET_PERCENT if limit else ():
        if limit is not None and amount * 100 >= limit * percent:
            share = "all" if percent == 100 else f"{percent} %"
            title = f"{share} of {what} is spent"
            text = f"{dollar_words(amount)} of {dollar_words(limit)}: {then}"
            yield notification(f"budget:{key}:{limit}:{percent}", Topic.BUDGET, severity, now, title, text,
                               repeat_after=_MONTH)  # fmt: skip
            return


def _balance(world: World, shown: ProviderOffers, now: datetime) -> Iterator[Notification]:
    balance = current_balance(shown, now)
    name = shown.provider
    rate = sum(spending_rate(item) for item in world.attempts.values() if item.provider == name)
    if balance is None or rate <= 0:
        return
    left = timedelta(hours=min(balance / rate, 10_000.0)) if balance > 0 else timedelta(0)
    for runway, severity in RUNWAYS:
        if left < runway:
            title = f"the balance at {name} lasts {span_words(left)}"
            text = f"{dollar_words(MicroUsd(max(0, balance)))} are left; at its end {name} stops every machine"
            key = f"balance:{name}:{runway // timedelta(hours=1)}"
            yield notification(key, Topic.BALANCE, severity, now, title, text, repeat_after=_DAY)
            return


def _away(shown: ProviderOffers, now: datetime) -> Iterator[Notification]:
    since, name = shown.error_since, shown.provider
    if not shown.error or since is None or now - since < AWAY_FOR:
        return
    title = f"{name} has not answered for {span_words(now - since)}"
    text = f"{shown.error}\nits machines run on, and nothing is rented there; spotctl providers"
    yield notification(f"provider:{name}", Topic.PROVIDER, Severity.WARNING, now, title, text, repeat_after=_DAY)


def _overdue_ends(world: World, now: datetime) -> Iterator[Notification]:
    """Yield each machine that is ordered to end for long, without effect or without a provider to order it from."""
    for order in world.intents.values():
        is_lost = order.kind is IntentKind.TERMINATE and order.is_open and order.provider not in world.policy.providers
        since = order.created_at if order.tries else max(order.created_at, order.not_before or order.created_at)
        if order.ref is None or now - since < NOT_ENDED_FOR or not (is_lost or has_ended_nothing(order)):
            continue
        name, machine = order.provider, order.ref.instance_id
        why = f"{name} is not in the config any more" if is_lost else order.error or "it is listed after each order"
        title = f"a machine at {name} has not ended for {span_words(now - since)}"
        text = (
            f"{machine} ({order.key}): {why}\nit may be billed: end it at {name} by hand;"
            f" spotctl forget {machine} gives up one that can neither be seen nor ended"
        )
        job = None if order.attempt is None else order.attempt.job
        yield notification(f"ending:{order.id}", Topic.STRAY, Severity.URGENT, now, title, text, job=job)


def _hardly_used(world: World, low: Mapping[AttemptId, LowUse], now: datetime) -> Iterator[Notification]:
    for attempt, one in low.items():
        job = world.jobs.get(attempt.job)
        if job is None or now - one.since < LOW_FOR:
            continue
        title = f"{job.name} uses its GPUs at {100 * one.use:.0f} %"
        text = (
            f"for {span_words(now - one.since)}. It may wait for its data: more workers of the data loader, or the data"
            f" on the machine's own disk. spotctl logs {job.name}; [watchdog] min_gpu_util ends such a job by itself"
        )
        key = f"gpu:{attempt.job}:{attempt.number}"
        yield notification(key, Topic.GPU, Severity.WARNING, now, title, text, job=job.id, repeat_after=_MONTH)


# What a channel is sent next, and when.
#
# Theory. A few are sent one by one. Many at once, what came while a channel was quiet or failed, and what comes faster
# than a person reads, is one summary: a thousand failures are one message. Whatever waits for longer than `KEPT_FOR` is
# no news any more.


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
