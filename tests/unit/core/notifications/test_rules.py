"""Which event or condition gives which notification, and what the words of others can do in one."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotd.core.domain.intents import AttemptId, IntentState, JobId
from spotd.core.domain.market import MarketSnapshot, ProviderOffers
from spotd.core.domain.plan import Event
from spotd.core.domain.states import AttemptState, EndReason
from spotd.core.domain.world import World
from spotd.core.notifications import (
    AWAY_FOR,
    CHOICES,
    LINES_MAX,
    LOW_FOR,
    RULES,
    TEXT_MAX,
    TITLE_MAX,
    LowUse,
    Notification,
    Severity,
    Topic,
    conditions,
    low_uses,
    notification,
    notification_of,
)
from spotd_providers.contract.values import MicroUsd, MicroUsdPerHour
from tests.cases import every
from tests.unit.core.builders import NOW, SHOP, job, shop_policy, world_with

J = JobId("j1")


def given_event(kind: str, **changes: Any) -> Notification | None:
    event = Event(at=NOW, kind=kind, message="why", job=J, attempt=1)
    return notification_of(replace(event, **changes), 7, name="train", receipt="ran 3 h for $4.00")


@every(
    ("kind", "changes", "topic", "severity", "title"),
    [
        ("attempt.preempted", {}, Topic.PREEMPTED, Severity.INFO, "train was preempted"),
        ("attempt.outbid", {}, Topic.PREEMPTED, Severity.INFO, "train was outbid"),
        ("attempt.host_lost", {}, Topic.PREEMPTED, Severity.INFO, "train lost its machine"),
        ("attempt.running", {"attempt": 2}, Topic.RESUMED, Severity.INFO, "train runs again"),
        ("job.succeeded", {}, Topic.FINISHED, Severity.INFO, "train has finished"),
        ("job.failed", {}, Topic.FAILED, Severity.WARNING, "train has failed"),
        ("job.expired", {}, Topic.FAILED, Severity.WARNING, "train has expired"),
        ("job.quarantined", {}, Topic.QUARANTINED, Severity.URGENT, "train is quarantined"),
        ("checkpoint.late", {}, Topic.CHECKPOINT, Severity.WARNING, "train has not saved for long"),
        ("machine.ending", {"job": None}, Topic.STRAY, Severity.WARNING, "a machine that no job owns is being ended"),
    ],
)
def test_each_event_that_matters_gives_its_notification(
    kind: str, changes: dict[str, Any], topic: Topic, severity: Severity, title: str
) -> None:
    found = given_event(kind, **changes)
    assert found is not None
    assert (found.topic, found.severity, found.title) == (topic, severity, title)
    assert found.text.startswith("why")


@every(
    ("kind", "changes"),
    [
        ("attempt.running", {}),
        ("machine.ending", {}),
        ("attempt.done", {}),
        ("attempt.cancelled", {}),
        ("attempt.provision_timeout", {}),
        ("attempt.image_error", {}),
        ("job.cancelled", {}),
        ("checkpoint.accepted", {}),
        ("an.event.of.tomorrow", {}),
    ],
)
def test_other_events_give_none(kind: str, changes: dict[str, Any]) -> None:
    assert given_event(kind, **changes) is None


def test_the_receipt_comes_with_the_end_and_with_nothing_else() -> None:
    finished, failed = given_event("job.succeeded"), given_event("job.failed")
    assert finished is not None
    assert finished.text == "why\nran 3 h for $4.00"
    assert failed is not None
    assert failed.text == "why"


def test_only_ends_after_which_a_job_goes_on_elsewhere_are_losses() -> None:
    losses = {r for r in EndReason if f"attempt.{r.value}" in RULES}
    assert losses <= {r for r in EndReason if r.traits.is_recovery}
    assert {EndReason.PREEMPTED, EndReason.OUTBID, EndReason.HOST_LOST} <= losses


def test_every_topic_has_a_source() -> None:
    stated = {Topic.BUDGET, Topic.BALANCE, Topic.PROVIDER, Topic.GPU}
    assert {rule.topic for rule in RULES.values()} | stated == set(CHOICES)


@given(
    st.text(alphabet=st.characters(codec="utf-8")), st.text(alphabet="\x1b[2J\r\n\t@<!everyonehere\u202e\U000e0041a")
)
def test_no_text_of_others_is_more_than_text(one: str, other: str) -> None:
    found = notification("k", Topic.FAILED, Severity.INFO, NOW, one + other, other * 3000 + one)
    for text, most in ((found.title, TITLE_MAX), (found.text, TEXT_MAX)):
        assert len(text) <= most
        assert not any(char in text for char in "\x1b\r\u202e\U000e0041")
        assert "@everyone" not in text
        assert "<!" not in text
    assert "\n" not in found.title
    assert found.text.count("\n") < LINES_MAX


# --- conditions ---

BASE = world_with(AttemptState.RUNNING)
(ITEM,) = BASE.attempts.values()
RUNNING = ITEM.id


def world(*, day: int | None = None, budget: int | None = None, spent: int = 0) -> World:
    policy = replace(shop_policy(), budget_day=None if day is None else MicroUsd(day))
    own = job(1, budget=budget, spent=MicroUsd(spent))
    item = replace(ITEM, meter=replace(ITEM.meter, settled=MicroUsd(0), rate=MicroUsdPerHour(1_000_000), since=NOW))
    return replace(BASE, policy=policy, jobs={own.id: own}, attempts={item.id: item})


def stated(
    item: World, market: MarketSnapshot | None = None, low: dict[AttemptId, LowUse] | None = None, *, hours: float = 0
) -> dict[str, Notification]:
    return {
        one.key: one for one in conditions(item, market or MarketSnapshot(), low or {}, NOW + timedelta(hours=hours))
    }


@every(
    ("hours", "title", "severity"),
    [
        (7.9, None, None),
        (8, "80 % of today's budget is spent", Severity.WARNING),
        (9.9, "80 % of today's budget is spent", Severity.WARNING),
        (10, "all of today's budget is spent", Severity.URGENT),
    ],
)
def test_a_budget_is_stated_at_four_fifths_and_at_its_end(
    hours: float, title: str | None, severity: Severity | None
) -> None:
    found = list(stated(world(day=10_000_000), hours=hours).values())
    assert [(one.title, one.severity) for one in found] == ([] if title is None else [(title, severity)])


def test_another_day_another_limit_and_another_job_are_other_news() -> None:
    keys = {
        *stated(world(day=1_000_000), hours=2),
        *stated(world(day=2_000_000), hours=2),
        *stated(world(budget=1_000_000), hours=2),
    }
    assert len(keys) == 3
    assert [*stated(world(budget=1_000_000, spent=900_000))] == [*stated(world(budget=1_000_000, spent=950_000))]


def ending(state: IntentState, tries: int, *, error: str = "", stray: bool = False, **changes: Any) -> World:
    """A machine whose end was ordered first at NOW."""
    base = world_with(AttemptState.ENDING)
    [order] = base.intents.values()
    order = replace(order, state=state, tries=tries, error=error, created_at=NOW, accepted_at=None, **changes)
    return replace(base, intents={order.id: replace(order, attempt=None) if stray else order})


@every(
    ("world", "why"),
    [
        pytest.param(ending(IntentState.OPEN, 0), "", id="its turn has not come"),
        pytest.param(ending(IntentState.ACCEPTED, 1), "", id="accepted, and no list since"),
        pytest.param(ending(IntentState.DONE, 5), "", id="it is gone"),
        pytest.param(ending(IntentState.OPEN, 3, error="server error"), "server error", id="refused"),
        pytest.param(ending(IntentState.OPEN, 1), "it is listed after each order", id="accepted without effect"),
        pytest.param(ending(IntentState.ACCEPTED, 2), "it is listed after each order", id="accepted again"),
        pytest.param(ending(IntentState.OPEN, 3, error="no", stray=True), "no", id="of no attempt"),
    ],
)
def test_an_order_to_end_without_effect_is_stated_after_a_quarter_of_an_hour(world: World, why: str) -> None:
    assert not stated(world, hours=0.24)
    found = list(stated(world, hours=0.25).values())
    assert [one.topic for one in found] == ([Topic.STRAY] if why else [])
    for one in found:
        assert one.title == "a machine at shop has not ended for 15 min"
        assert why in one.text
        assert "spotctl forget m1" in one.text
        [order] = world.intents.values()
        assert one.job == (None if order.attempt is None else order.attempt.job)


def test_the_machine_of_a_provider_that_left_the_config_is_stated_although_it_was_never_ordered_to_end() -> None:
    item = ending(IntentState.OPEN, 0)
    item = replace(item, policy=replace(item.policy, providers={}))
    assert not stated(item, hours=0.24)
    [one] = stated(item, hours=0.25).values()
    assert "shop is not in the config any more" in one.text


def test_a_machine_that_waits_for_another_job_is_late_only_from_then_on() -> None:
    item = ending(IntentState.OPEN, 0, not_before=NOW + timedelta(hours=1))
    item = replace(item, policy=replace(item.policy, providers={}))
    assert not stated(item, hours=1.24)
    assert stated(item, hours=1.25)


def test_an_order_that_is_given_again_later_is_late_all_the_same() -> None:
    assert stated(ending(IntentState.OPEN, 3, not_before=NOW + timedelta(minutes=16)), hours=0.25)


def market_of(**changes: Any) -> MarketSnapshot:
    return MarketSnapshot(by_provider={SHOP: ProviderOffers(provider=SHOP, **changes)})


@every(
    ("balance", "titles"),
    [
        (7_000_000, []),
        (5_000_000, ["the balance at shop lasts 5 h 0 min"]),
        (500_000, ["the balance at shop lasts 30 min"]),
        (0, ["the balance at shop lasts 1 s"]),
        (-5, ["the balance at shop lasts 1 s"]),
    ],
)
def test_a_balance_that_does_not_last_is_stated(balance: int, titles: list[str]) -> None:
    found = stated(world(), market_of(balance=MicroUsd(balance), balance_at=NOW))
    assert [one.title for one in found.values()] == titles


def test_a_provider_is_stated_once_it_has_been_away_for_long() -> None:
    away = market_of(error="HTTP 500", error_since=NOW)
    assert stated(world(), away, hours=(AWAY_FOR.total_seconds() - 1) / 3600) == {}
    (found,) = stated(world(), away, hours=AWAY_FOR.total_seconds() / 3600).values()
    assert (found.title, found.text.split("\n")[0]) == ("shop has not answered for 10 min", "HTTP 500")
    assert stated(world(), market_of(error="", error_since=None), hours=9) == {}


def test_gpus_that_are_hardly_used_for_long_are_stated_with_a_hint() -> None:
    low = low_uses({}, {RUNNING: 0.02}, NOW)
    later = NOW + LOW_FOR
    assert low_uses(low, {RUNNING: None}, later) == low
    assert low_uses(low, {RUNNING: 0.5}, later) == {}
    assert low_uses(low, {}, later) == {}
    again = low_uses(low, {RUNNING: 0.03}, later)
    assert again[RUNNING].since == NOW
    (found,) = stated(world(), low=again, hours=0.5).values()
    assert found.title == "job1 uses its GPUs at 3 %"
    assert "data loader" in found.text
    assert low_uses({RUNNING: replace(again[RUNNING], since=later)}, {RUNNING: 0.0}, NOW)[RUNNING].since == NOW
