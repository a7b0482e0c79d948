"""What is held back for a start of a deadline follows from how starts went, and how many failed."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotd.core.deadlines.outlook import careful_overhead
from spotd.core.domain.records import ONE, Experience, Record, RecordKind, added, with_records
from spotd.core.domain.states import AttemptState, EndReason
from spotd.core.experience.start_quantile import FAILED, RATIOS, failed_record, ratio_record, time_until_started
from spotd.core.experience.starts import PRIOR, START_MAX
from spotd.core.plans.plan_builder import PlanBuilder
from spotd_providers.contract.values import Interruption, Market, ProviderName
from tests.unit.core.builders import MINUTE, NOW, SHOP, job, offer, shop_policy, world_with
from tests.unit.core.experiences import experience, record

DAY = timedelta(days=1)
K = RecordKind


def seen(
    starts: int = 0, took: timedelta = 4 * MINUTE, *, failed: int = 0, gave_up: timedelta = 20 * MINUTE,
    market: Market = Market.ON_DEMAND, ago: timedelta = timedelta(0),
) -> Experience:  # fmt: skip
    """What is on record of so many starts that took so long where four minutes are usual, and of failed ones."""
    known: dict[object, Record] = {}
    rows = (
        (ratio_record(SHOP, market, took, 4 * MINUTE), starts, took),
        (failed_record(SHOP, market), failed, gave_up),
    )
    for identity, count, span in rows:
        if count:
            known[identity] = added(None, identity, count * ONE, count * span, NOW - ago)
    return known  # type: ignore[return-value]  # the keys are those of records


def minutes(known: Experience, usual: timedelta = 4 * MINUTE, gives_up: timedelta = 20 * MINUTE) -> float:
    return time_until_started(known, SHOP, Market.ON_DEMAND, usual, gives_up, NOW) / MINUTE


def test_without_evidence_a_whole_time_out_and_twice_a_usual_start_are_held_back() -> None:
    assert minutes({}, PRIOR) == 20 + 2 * 14.5


def test_where_forty_starts_came_up_no_time_out_is_held_back() -> None:
    assert minutes(seen(10)) >= 20
    assert minutes(seen(60)) == 12
    assert minutes(seen(400)) == 6, "one in a hundred takes no longer than one and a half times the usual"


def test_one_start_in_ten_that_fails_costs_as_long_as_failures_took() -> None:
    assert minutes(seen(90, failed=10, gave_up=10 * MINUTE)) == pytest.approx(20, abs=4)
    assert minutes(seen(90, failed=10, gave_up=20 * MINUTE)) > 25
    assert minutes(seen(50, failed=50)) > minutes(seen(90, failed=10))


def test_slow_starts_are_held_back() -> None:
    assert minutes(seen(400, 11 * MINUTE)) == 12
    assert minutes(seen(400, 90 * MINUTE)) == 32, "eight times the usual at the most"


def test_another_market_and_another_provider_say_nothing() -> None:
    assert minutes(seen(400, market=Market.SPOT)) == minutes({})
    other = {replace(i, provider=ProviderName("pod")): one for i, one in seen(400).items()}
    assert minutes(other) == minutes({})


def test_what_was_seen_fades() -> None:
    assert minutes(seen(60, ago=200 * DAY)) == minutes({})
    assert minutes(seen(60, ago=-200 * DAY)) == minutes(seen(60)), "a clock that was ahead"


@settings(max_examples=100, deadline=None)
@given(
    counts=st.lists(st.tuples(st.sampled_from([*(f"{step:g}" for step in RATIOS), FAILED]), st.integers(0, 10**6))),
    hours=st.floats(0, 10**6),
    usual=st.timedeltas(timedelta(0), START_MAX),
    gives_up=st.timedeltas(timedelta(0), DAY),
)
def test_whatever_is_on_record_it_is_bounded(
    counts: list[tuple[str, int]], hours: float, usual: timedelta, gives_up: timedelta
) -> None:
    known = experience(*(record(K.START_RATIOS, f"on-demand {what}", count, hours) for what, count in counts))
    found = time_until_started(known, SHOP, Market.ON_DEMAND, usual, gives_up, NOW)
    assert timedelta(0) <= found <= 3 * START_MAX + RATIOS[-1] * usual


@pytest.mark.parametrize("host", ["h1", None])
def test_a_start_that_fails_is_counted_with_the_time_that_it_took(host: str | None) -> None:
    sold = offer(host_id=host, market=Market.ON_DEMAND, interruption=Interruption.NEVER)
    world = world_with(AttemptState.STARTING)
    [item] = world.attempts.values()
    item = replace(item, quote=replace(item.quote, offer=sold), launched_at=NOW - 18 * MINUTE)
    builder = PlanBuilder(replace(world, attempts={item.id: item}), NOW)
    builder.end_attempt(item.id, EndReason.PROVISION_TIMEOUT)
    known = with_records({}, builder.plan().experience)
    assert known[failed_record(SHOP, Market.ON_DEMAND)].count == ONE
    assert known[failed_record(SHOP, Market.ON_DEMAND)].span == 18 * MINUTE


def test_the_shield_holds_back_less_once_starts_were_seen_to_go_well() -> None:
    base = world_with(AttemptState.RUNNING)
    before = careful_overhead(job(), offer(), replace(base, policy=shop_policy()), NOW)
    started = record(K.STARTS, "", 60, 4)
    well = {**seen(60), started.id: started, replace(started.id, subject="scratch"): replace(started)}
    after = careful_overhead(job(), offer(), replace(base, policy=shop_policy(), experience=well), NOW)
    assert before > timedelta(minutes=50)
    assert after < before / 2
