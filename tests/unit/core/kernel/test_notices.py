"""An interruption notice that does not come true counts no more after minutes, whatever instant it names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from spotd.core.domain.attempts import Attempt, HostStatus, LapsedNotices
from spotd.core.domain.intents import AttemptId, JobId
from spotd.core.domain.plan import applied
from spotd.core.domain.states import AttemptState, EndReason
from spotd.core.domain.world import World
from spotd.core.host_reports import AHEAD_MAX, LAPSED_MAX, LAPSES_AFTER
from spotd.core.kernel.reconcile import reconcile
from spotd.daemon.grants.builder import order_of
from spotd_providers.contract.values import InstanceState, Loss
from tests.cases import every
from tests.unit.core.builders import MINUTE, NOW, instance, listing, report, world_with

FIRST = AttemptId(job=JobId("j1"), number=1)
HOUR = timedelta(hours=1)
NEVER = datetime(9999, 12, 31, tzinfo=UTC)


class Noticed:
    """A machine that runs and beats, with what a provider or a host states of its end."""

    def __init__(self, **changes: object) -> None:
        self.world: World = world_with(AttemptState.RUNNING, **changes)
        self.now, self.seq = NOW, 5
        self.kinds: list[str] = []
        self.held_back = timedelta(0)

    def run(
        self, span: timedelta, at: Callable[[datetime], datetime | None], *, by_host: bool = False, beats: bool = True
    ) -> Attempt:
        until = self.now + span
        while self.now < until:
            self.now += MINUTE
            self.seq += int(beats)
            row = replace(instance(InstanceState.RUNNING), notice_at=None if by_host else at(self.now))
            stated = report(seq=self.seq, phase="run", notice_at=at(self.now) if by_host else None)
            heard = {i: replace(one, read_at=self.now) for i, one in stated.items()}
            plan = reconcile(self.world, listing(row, at=self.now), heard, self.now)
            self.kinds += [event.kind for event in plan.events]
            self.world = applied(self.world, plan)
            self.held_back += MINUTE * (self.item.notice_at is not None)
        return self.item

    @property
    def item(self) -> Attempt:
        return self.world.attempts[FIRST]


@every("by_host", [False, True], ids=["listed", "by its host"])
def test_a_notice_lapses_minutes_after_its_instant_if_its_host_still_beats(by_host: bool) -> None:
    due = NOW + 3 * MINUTE
    seen = Noticed()
    assert seen.run(2 * MINUTE, lambda _now: due, by_host=by_host).notice_at == due
    assert order_of(seen.item)[1]
    assert seen.run(5 * MINUTE, lambda _now: due, by_host=by_host).notice_at == due, "it may be late"
    item = seen.run(HOUR, lambda _now: due, by_host=by_host)
    assert (item.notice_at, item.lapsed) == (None, LapsedNotices(count=1, named=due))
    assert seen.held_back <= timedelta(minutes=3) + LAPSES_AFTER
    assert seen.kinds.count("attempt.notice") == seen.kinds.count("attempt.notice_lapsed") == 1
    assert item.state is AttemptState.RUNNING


INSTANTS: dict[str, Callable[[datetime], datetime | None]] = {
    "in the past": lambda _now: NOW - 3 * HOUR,
    "in the year 1": lambda _now: datetime(1, 1, 1, tzinfo=UTC),
    "in the year 9999": lambda _now: NEVER,
    "tomorrow": lambda _now: NOW + 24 * HOUR,
    "always in 2 minutes": lambda now: now + 2 * MINUTE,
    "always now": lambda now: now,
    "always in half an hour": lambda now: now + AHEAD_MAX,
    "twice": lambda now: NOW + 2 * MINUTE if now < NOW + HOUR else NOW + HOUR + 2 * MINUTE,
    "to and fro": lambda now: NOW + 2 * MINUTE if now.minute % 2 else NOW + 4 * MINUTE,
    "a second later each time": lambda now: NOW + 2 * MINUTE + (now - NOW) / 60,
    "now and then": lambda now: now + MINUTE if now.minute == 0 else None,
}


@every("by_host", [False, True], ids=["listed", "by its host"])
@every("at", INSTANTS.values(), ids=INSTANTS)
def test_no_notice_keeps_its_machine_as_it_is_for_long(
    at: Callable[[datetime], datetime | None], by_host: bool
) -> None:
    seen = Noticed()
    item = seen.run(4 * HOUR, at, by_host=by_host)
    assert item.state is AttemptState.RUNNING
    assert item.notice_at is None
    assert seen.held_back <= LAPSED_MAX * (AHEAD_MAX + LAPSES_AFTER + MINUTE)
    assert seen.kinds.count("attempt.notice") <= LAPSED_MAX


def test_a_true_notice_after_one_that_lapsed_is_taken_and_its_order_is_a_new_one() -> None:
    seen = Noticed()
    seen.run(HOUR, lambda _now: NOW + 2 * MINUTE)
    due = seen.now + 3 * MINUTE
    item = seen.run(MINUTE, lambda _now: due)
    assert (item.notice_at, item.lapsed.count) == (due, 1)


def test_a_notice_far_ahead_is_taken_once_it_is_near() -> None:
    due = NOW + 6 * HOUR
    seen = Noticed()
    assert seen.run(5 * HOUR, lambda _now: due).notice_at is None
    assert seen.run(HOUR, lambda _now: due).notice_at == due


def test_a_machine_that_is_silent_since_its_notice_was_preempted_however_late_that_is_seen() -> None:
    seen = Noticed()
    due = NOW + 2 * MINUTE
    seen.run(2 * MINUTE, lambda _now: due)
    assert seen.run(20 * MINUTE, lambda _now: due, beats=False).notice_at == due
    gone = reconcile(seen.world, listing(instance(InstanceState.PAUSED), at=seen.now), _read(seen), seen.now)
    assert gone.attempts[FIRST].end_reason is EndReason.PREEMPTED


def test_a_machine_that_is_lost_hours_after_a_notice_lapsed_was_not_preempted_for_it() -> None:
    seen = Noticed()
    seen.run(HOUR, lambda _now: NOW + 2 * MINUTE)
    seen.run(2 * MINUTE, lambda _now: None, beats=False)
    gone = reconcile(seen.world, listing(instance(InstanceState.PAUSED), at=seen.now), _read(seen), seen.now)
    assert gone.attempts[FIRST].end_reason is EndReason.HOST_LOST
    taken = listing(instance(InstanceState.PAUSED, loss=Loss.PREEMPTED), at=seen.now)
    said = reconcile(seen.world, taken, _read(seen), seen.now)
    assert said.attempts[FIRST].end_reason is EndReason.PREEMPTED, "unless its provider says so"


def test_a_notice_that_a_clock_which_was_set_back_leaves_far_ahead_lapses() -> None:
    seen = Noticed(notice_at=NOW + 9 * HOUR)
    assert seen.run(MINUTE, lambda _now: None).notice_at is None


def _read(seen: Noticed) -> dict[AttemptId, HostStatus]:
    return {i: replace(one, read_at=seen.now) for i, one in report(seq=seen.seq, phase="run").items()}
