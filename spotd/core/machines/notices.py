"""Interruption notices: which are recorded, and when one that did not come true counts no more.

Theory. While a machine has a notice, its watchdog, its bids and its moves wait: what they would do is overtaken. So a
notice must not last. It lapses once the host gives a sign of life `LAPSES_AFTER` beyond the instant that it named; a
host that is silent by then was most likely taken, and the notice says why. What names an instant further ahead than
`AHEAD_MAX` is recorded when it is near, since a machine that is taken tomorrow is an ordinary one today. The same
notice counts once, and of one machine so many are recorded: a provider that names a later instant each time would else
keep the others off for good.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.bounds import notice_within
from spotd.core.domain.ids import AttemptId
from spotd.core.plans.plan_builder import PlanBuilder
from spotd.core.pricing.words import span_words

LAPSES_AFTER: Final = timedelta(minutes=5)
AHEAD_MAX: Final = timedelta(minutes=30)
LAPSED_MAX: Final = 3


def note_notice(builder: PlanBuilder, attempt_id: AttemptId, at: datetime) -> None:
    """Record that the machine will be taken at this instant, unless that is known, far away, or not believed."""
    item = builder.attempt(attempt_id)
    at = notice_within(at, builder.now)
    if item.notice_at is not None or at - builder.now > AHEAD_MAX or _is_known(item, at):
        return
    builder.put_attempt(replace(item, notice_at=at))
    seconds = max(0, int((at - builder.now).total_seconds()))
    builder.event("attempt.notice", f"the provider will take the machine in {seconds} s", attempt=attempt_id)
    builder.list_again(item.provider)


def _is_known(item: Attempt, at: datetime) -> bool:
    """Whether it is a notice that has lapsed, or one of more than are recorded of a machine."""
    lapsed_at = item.notice_lapsed_at
    if item.notices_lapsed >= LAPSED_MAX or (lapsed_at is not None and at <= lapsed_at + LAPSES_AFTER):
        return True
    return item.heartbeat_seen_at is not None and item.heartbeat_seen_at >= at + LAPSES_AFTER


def drop_lapsed_notice(builder: PlanBuilder, attempt_id: AttemptId) -> None:
    """Forget a notice whose instant has passed by minutes on a host that lives.

    One that lies further ahead than any that is recorded was noted before the clock was set back.
    """
    item = builder.attempt(attempt_id)
    at, seen_at = item.notice_at, item.heartbeat_seen_at
    if at is None or seen_at is None or not item.state.counts:
        return
    if seen_at < at + LAPSES_AFTER and at - builder.now <= AHEAD_MAX:
        return
    lapsed = replace(item, notice_at=None, notices_lapsed=item.notices_lapsed + 1, notice_lapsed_at=at)
    builder.put_attempt(lapsed)
    late = span_words(max(timedelta(0), seen_at - at))
    why = f"the machine was to be taken {late} ago, and its host gives signs of life: the notice counts no more"
    builder.event("attempt.notice_lapsed", why, attempt=attempt_id)
