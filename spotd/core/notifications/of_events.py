"""Which event gives which notification: one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from spotd.core.domain.states import EndKind, EndReason
from spotd.core.notifications.values import Notification, Severity, Topic, notification
from spotd.core.plans.plan import Event

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
