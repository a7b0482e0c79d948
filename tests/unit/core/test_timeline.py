"""Spans are measured on one timeline; what the wall clock is set to changes dates and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from spotd.core.budgets import hold
from spotd.core.domain.cooldowns import Cooldown, CooldownScope
from spotd.core.domain.plan import applied
from spotd.core.domain.states import AttemptState
from spotd.core.domain.world import VerdictKind, World
from spotd.core.metering import spent
from spotd.core.plan_builder import PlanBuilder
from spotd.core.timeline import OLDEST, Anchor, Dated, dated, redated, wants_new_date
from spotd_providers.contract.values import MicroUsd
from tests.cases import every
from tests.unit.core.builders import MINUTE, NOW, SHOP, world_with

HOUR = timedelta(hours=1)
HERE = Anchor(boot_id="one", boot_s=1000.0, at=NOW)


def after(seconds: float, step: timedelta, anchor: Anchor = HERE) -> Dated:
    """So long after the anchor in the same uptime, with a wall clock that was set by the step."""
    at = anchor.at + timedelta(seconds=seconds)
    return dated(anchor, None, anchor.boot_id, anchor.boot_s + seconds, at + step)


@every("seconds", [0.0, 1.0, 8 * 3600.0], ids=["at once", "a second", "slept for eight hours"])
@every("step", [-9, -1, 0, 1, 9])
def test_a_clock_that_is_nearly_right_moves_nothing(seconds: float, step: int) -> None:
    found = after(seconds, timedelta(seconds=step))
    assert found.step == timedelta(0)
    assert found.anchor.at == NOW + timedelta(seconds=seconds), "the timeline goes on as the uptime does"


@every(
    "step",
    [HOUR, -HOUR, 8 * HOUR, -8 * HOUR, timedelta(days=400), timedelta(days=-400), timedelta(seconds=11)],
    ids=str,
)
def test_a_clock_that_was_set_moves_every_date_by_as_much(step: timedelta) -> None:
    found = after(100, step)
    assert found.step == step
    assert found.only_after is None
    assert found.anchor.at == NOW + timedelta(seconds=100) + step
    assert not wants_new_date(found.anchor, found.anchor.at + HOUR, found.anchor.at + HOUR)
    assert wants_new_date(HERE, NOW + MINUTE, NOW + MINUTE + step)


def test_grants_are_issued_later_and_later_whatever_the_clock_is_set_to() -> None:
    anchor, last = HERE, NOW
    for step in (-2 * HOUR, 8 * HOUR, timedelta(days=-400), timedelta(days=3), -HOUR):
        anchor = after(600, step, anchor).anchor
        issued = anchor.at + anchor.issued_ahead
        assert issued > last
        last = issued
    again = dated(anchor, anchor.at, "two", 5.0, anchor.at + HOUR).anchor
    assert again.at + again.issued_ahead > last


def test_after_a_restart_of_the_computer_the_wall_clock_is_taken() -> None:
    found = dated(HERE, NOW + HOUR, "two", 30.0, NOW + 9 * HOUR)
    assert (found.step, found.anchor.at, found.anchor.unset_since) == (timedelta(0), NOW + 9 * HOUR, None)


@every("wall", [datetime(1970, 1, 1, tzinfo=UTC), NOW - HOUR, NOW + HOUR / 2], ids=str)
def test_a_clock_that_was_not_set_yet_dates_nothing_before_what_is_known(wall: datetime) -> None:
    known = NOW + HOUR
    found = dated(HERE, known, "two", 30.0, wall)
    assert (found.step, found.anchor.at, found.anchor.unset_since) == (timedelta(0), known, known)
    assert not wants_new_date(found.anchor, known + MINUTE, wall + MINUTE)


def test_once_that_clock_is_set_only_what_came_since_gets_another_date() -> None:
    known = NOW + HOUR
    unset = dated(HERE, known, "two", 30.0, datetime(1970, 1, 1, tzinfo=UTC)).anchor
    found = dated(unset, known, "two", 90.0, NOW + 9 * HOUR)
    assert found.only_after == known
    assert found.anchor == Anchor(boot_id="two", boot_s=90.0, at=NOW + 9 * HOUR)
    assert found.step == 8 * HOUR - MINUTE


@every(("wall", "believed"), [(NOW - HOUR, True), (OLDEST - HOUR, False)], ids=["a date", "never set"])
def test_a_clock_that_stays_behind_was_ahead_before(wall: datetime, believed: bool) -> None:
    unset = dated(HERE, NOW, "two", 30.0, wall).anchor
    assert not wants_new_date(unset, NOW + 9 * MINUTE, wall + 9 * MINUTE)
    assert wants_new_date(unset, NOW + 11 * MINUTE, wall + 11 * MINUTE) is believed


def test_without_an_anchor_the_timeline_begins_at_the_wall_clock() -> None:
    assert dated(None, None, "one", 5.0, NOW).anchor == Anchor(boot_id="one", boot_s=5.0, at=NOW)
    assert dated(HERE, NOW, "", 5.0, NOW + HOUR).anchor.at == NOW + HOUR, "nothing tells this uptime from another"


# --- what is stored ---


def worlds() -> World:
    world = world_with(AttemptState.STOPPING, missing_since=NOW - MINUTE, notice_at=NOW + MINUTE)
    cool = Cooldown(provider=SHOP, scope=CooldownScope.HOST, subject="h", until=NOW + 5 * MINUTE, reason="")
    return replace(world, cooldowns=(cool,))


@every("step", [timedelta(seconds=-1), 8 * HOUR, -8 * HOUR, timedelta(days=400)], ids=str)
def test_every_span_of_what_is_open_is_what_it_was(step: timedelta) -> None:
    before = worlds()
    plan = redated(before, step, NOW)
    world = applied(replace(before, cooldowns=()), plan)
    then = NOW + step
    (was,), (item,) = before.attempts.values(), world.attempts.values()
    assert item.stop is not None
    assert was.stop is not None
    for name in ("intended_at", "launched_at", "running_at", "missing_since", "heartbeat_seen_at", "notice_at"):
        assert getattr(item, name) - then == getattr(was, name) - NOW, name
    assert item.stop.deadline - then == was.stop.deadline - NOW
    assert spent(item, then) == spent(was, NOW), "what it has cost"
    assert spent(item, then + HOUR) == spent(was, NOW) + 400_000, "and what it goes on to cost"
    assert [c.until - then for c in world.cooldowns] == [5 * MINUTE]
    assert [charge.day for charge in plan.charges] == [NOW.date()], "booked on the day on which it was thought to be"
    (told,) = plan.events
    assert (told.kind, told.at) == ("clock.stepped", then)
    assert str(abs(step)).split(",")[0] in told.message


@every(
    ("kind", "step", "ends"),
    [
        (VerdictKind.BUDGET_DAY, 8 * HOUR, datetime(2026, 3, 3, tzinfo=UTC)),
        (VerdictKind.BUDGET_DAY, -8 * HOUR, datetime(2026, 3, 3, tzinfo=UTC)),
        (VerdictKind.BUDGET_DAY, 20 * HOUR, datetime(2026, 3, 3, tzinfo=UTC)),
        (VerdictKind.BUDGET_DAY, -20 * HOUR, datetime(2026, 3, 2, tzinfo=UTC)),
        (VerdictKind.BUDGET_MONTH, 8 * HOUR, datetime(2026, 4, 1, tzinfo=UTC)),
        (VerdictKind.BUDGET_MONTH, -40 * 24 * HOUR, datetime(2026, 2, 1, tzinfo=UTC)),
    ],
    ids=str,
)
def test_a_stop_for_a_budget_holds_until_its_day_or_month_is_over_whatever_the_clock_is_set_to(
    kind: VerdictKind, step: timedelta, ends: datetime
) -> None:
    builder = PlanBuilder(world_with(AttemptState.RUNNING), NOW)
    hold(builder, kind, MicroUsd(5_000_000), "it is spent")
    world = applied(world_with(AttemptState.RUNNING), builder.plan())
    (held,) = redated(world, step, NOW).cooldowns
    assert held.until == ends


def test_an_open_intent_waits_for_as_long_as_before() -> None:
    before = world_with(AttemptState.INTENDED)
    (intent,) = before.intents.values()
    before = replace(before, intents={intent.id: replace(intent, not_before=NOW + 3 * MINUTE)})
    (moved,) = redated(before, -8 * HOUR, NOW).intents.values()
    assert moved.not_before == NOW + 3 * MINUTE - 8 * HOUR
    ending = world_with(AttemptState.ENDING)
    (moved,) = redated(ending, HOUR, NOW).intents.values()
    assert moved.accepted_at == NOW + HOUR - timedelta(seconds=30)


def test_what_has_its_date_already_keeps_it() -> None:
    before = worlds()
    plan = redated(before, 8 * HOUR, NOW, only_after=NOW - 30 * timedelta(seconds=1))
    (item,) = plan.attempts.values()
    assert item.launched_at == NOW - 10 * MINUTE
    assert item.meter.since == NOW - 10 * MINUTE
    assert item.heartbeat_seen_at == NOW - timedelta(seconds=10) + 8 * HOUR
    assert not plan.charges


def test_no_instant_of_a_row_is_left_behind() -> None:
    for state in AttemptState:
        if state is AttemptState.ENDED:
            continue
        before = worlds() if state is AttemptState.STOPPING else world_with(state)
        plan = redated(before, 8 * HOUR, NOW)
        moved: list[tuple[Mapping[Any, Any], Mapping[Any, Any]]] = [
            (before.jobs, plan.jobs),
            (before.attempts, plan.attempts),
            (before.intents, plan.intents),
        ]
        for old, new in moved:
            for identity, row in old.items():
                for field in fields(row):
                    was, now = getattr(row, field.name), getattr(new[identity], field.name)
                    if isinstance(was, datetime):
                        assert now == was + 8 * HOUR, field.name


def test_a_machine_that_lists_lack_is_charged_up_to_the_first_of_them_when_the_clock_is_set() -> None:
    before = world_with(AttemptState.STARTING)
    (item,) = before.attempts.values()
    since = NOW - 3 * HOUR
    missing = replace(item, meter=replace(item.meter, since=since), missing_since=since + 6 * MINUTE)
    before = replace(before, attempts={item.id: missing})
    plan = redated(before, -HOUR, NOW)
    assert [(charge.start, charge.end) for charge in plan.charges] == [(since, since + 6 * MINUTE)]
    (moved,) = plan.attempts.values()
    assert moved.meter.since == moved.missing_since == since + 6 * MINUTE - HOUR, "what it may have run since is kept"
    assert spent(moved, NOW - HOUR) == spent(missing, NOW)
