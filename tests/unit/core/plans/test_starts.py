"""What is held back of a deadline for a start follows from how starts went, and how many came to nothing."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotd.core.deadlines import careful_overhead
from spotd.core.domain.states import AttemptState, EndReason
from spotd.core.domain.world import COUNT_MAX, ONE, Experience, Record, RecordId, RecordKind, added, with_records
from spotd.core.plan_builder import PlanBuilder
from spotd.core.starts import (
    FAILED_MAX,
    PRIOR,
    RATIOS,
    SHARES,
    START_MAX,
    careful_start,
    failure_record,
    ratio_record,
    start_record,
    usual_start,
)
from spotd_providers.contract.values import Interruption, Market, ProviderName
from tests.cases import every
from tests.unit.core.builders import MINUTE, NOW, SHOP, job, offer, shop_policy, world_with
from tests.unit.core.experiences import record

DAY = timedelta(days=1)
IMAGE = "scratch"
LIMIT = 20 * MINUTE
"""The provider's time for a start."""


def seen(
    starts: int = 0, took: float = 4, *, failed: int = 0, gave_up: float = 20, market: Market = Market.ON_DEMAND,
    ago: timedelta = timedelta(0), known: Experience | None = None,
) -> dict[RecordId, Record]:  # fmt: skip
    """What is on record of so many starts that took so many minutes, and of failed ones."""
    found = dict(known or {start_record(SHOP, IMAGE): record(RecordKind.STARTS, IMAGE, 100, 100 * 4 / 60)})
    rows = (
        (ratio_record(found, SHOP, IMAGE, market, took * MINUTE), starts, took),
        (failure_record(SHOP, market, gave_up * MINUTE, LIMIT), failed, gave_up),
    )
    for identity, count, minutes in rows:
        if count:
            found[identity] = added(found.get(identity), identity, count * ONE, count * minutes * MINUTE, NOW - ago)
    return found


def minutes(known: Experience, usual: float = 4) -> float:
    return careful_start(known, SHOP, Market.ON_DEMAND, IMAGE, usual * MINUTE, LIMIT, NOW) / MINUTE


def test_before_three_starts_of_an_image_a_whole_time_for_a_start_and_twice_the_usual_are_held_back() -> None:
    usual = PRIOR / MINUTE
    assert minutes({}, usual) == 20 + 2 * usual
    others = {one: rows for one, rows in seen(400).items() if one.kind is RecordKind.START_TIMES}
    two = record(RecordKind.STARTS, IMAGE, 2, 2 * 4 / 60)
    assert minutes({**others, two.id: two}, usual) == 20 + 2 * usual


def test_without_starts_of_the_provider_the_prior_says_the_same() -> None:
    assert minutes(seen()) == pytest.approx(20 + 2 * 4, abs=0.1)


def test_where_ninety_starts_came_up_no_failure_is_held_back() -> None:
    assert minutes(seen(60)) >= 20
    assert minutes(seen(100)) == pytest.approx(3 * 4, abs=0.1)
    assert minutes(seen(1000)) == pytest.approx(1.5 * 4, abs=0.1)


def test_failures_are_held_back_for_as_long_as_they_took() -> None:
    early, whole = minutes(seen(970, failed=30, gave_up=10)), minutes(seen(970, failed=30))
    assert 10 < early < whole
    assert whole >= 20 + 4
    assert minutes(seen(50, failed=50)) > minutes(seen(80, failed=20)) > whole


def test_slow_starts_are_held_back() -> None:
    mixed = seen(30, 11, known=seen(970))
    assert minutes(mixed) == pytest.approx(3 * 4, abs=0.1), "three in a hundred took less than three times the usual"
    assert minutes(seen(1000, 11)) == pytest.approx(3 * 4, abs=0.1)


def test_starts_on_spot_say_that_on_demand_comes_up_until_its_own_do() -> None:
    quiet = seen(400, market=Market.SPOT)
    assert minutes(quiet) < 20
    failing = seen(9, failed=1, known=quiet)
    assert minutes(failing) > 20, "one of its own ten starts failed"


def test_another_provider_says_nothing() -> None:
    mine = start_record(SHOP, IMAGE)
    other = {replace(i, provider=ProviderName("pod")): one for i, one in seen(400).items() if i != mine}
    assert minutes({**other, mine: seen()[mine]}) == minutes(seen())


def test_what_was_seen_fades() -> None:
    assert minutes(seen(200, ago=200 * DAY)) == minutes(seen())
    assert minutes(seen(200, ago=-200 * DAY)) == minutes(seen(200)), "a clock that was ahead"


def test_the_usual_start_is_no_less_than_the_starts_that_were_seen() -> None:
    slow = {start_record(SHOP, IMAGE): record(RecordKind.STARTS, IMAGE, 100, 100 * 40 / 60)}
    assert minutes(slow, usual=30) >= 20 + 2 * 40


@given(
    counts=st.lists(
        st.tuples(
            st.sampled_from([*(f"started {step}" for step in RATIOS), *(f"failed {step}" for step in SHARES)]),
            st.sampled_from(list(Market)),
            st.sampled_from([0, 1, 40, 10**6, COUNT_MAX // ONE]),
        )
    ),
    usual=st.timedeltas(timedelta(0), START_MAX),
    limit=st.timedeltas(timedelta(seconds=1), DAY),
)
def test_whatever_is_on_record_it_is_bounded_and_no_less_than_half_a_usual_start(
    counts: list[tuple[str, Market, int]], usual: timedelta, limit: timedelta
) -> None:
    rows = [record(RecordKind.START_TIMES, f"{market.value} {what}", count) for what, market, count in counts]
    known = {**seen(), **{one.id: one for one in rows}}
    found = careful_start(known, SHOP, Market.ON_DEMAND, IMAGE, usual, limit, NOW)
    longest = FAILED_MAX * SHARES[-1] * limit / 1000 + RATIOS[-1] * max(usual, 4 * MINUTE) / 1000
    assert usual / 2 <= found <= longest + timedelta(minutes=1)


def test_it_is_exceeded_as_seldom_as_it_says_by_starts_of_the_same_kind() -> None:
    rng = Random(7)

    def start() -> tuple[float, bool]:
        """Minutes, and whether it failed."""
        return (rng.uniform(5, 20), True) if rng.random() < 0.05 else (4 * rng.lognormvariate(0, 0.5), False)

    known: dict[RecordId, Record] = {}
    for _ in range(1_500):
        took, failed = start()
        rows = [failure_record(SHOP, Market.ON_DEMAND, took * MINUTE, LIMIT)]
        if not failed:
            rows = [start_record(SHOP, IMAGE), ratio_record(known, SHOP, IMAGE, Market.ON_DEMAND, took * MINUTE)]
        for one in rows:
            known[one] = added(known.get(one), one, ONE, took * MINUTE, NOW)
    held_back = minutes(known, usual_start(known, SHOP, IMAGE) / MINUTE)

    def until_started() -> float:
        total, failed = start()
        while failed:
            took, failed = start()
            total += took
        return total

    spans = sorted(until_started() for _ in range(20_000))
    assert sum(span > held_back for span in spans) <= 0.006 * len(spans)
    assert held_back <= 1.3 * spans[-len(spans) // 200], "and it holds back little more than needed"


@every("host", ["h1", None])
def test_a_start_that_comes_to_nothing_is_counted_with_the_time_that_it_took(host: str | None) -> None:
    sold = offer(host_id=host, market=Market.ON_DEMAND, interruption=Interruption.NEVER)
    counted = failure_record(SHOP, Market.ON_DEMAND, 18 * MINUTE, shop_policy().providers[SHOP].provision_timeout)
    for reason, heard in ((EndReason.PROVISION_TIMEOUT, None), (EndReason.HOST_LOST, NOW - MINUTE)):
        world = world_with(AttemptState.STARTING)
        [item] = world.attempts.values()
        item = replace(
            item,
            quote=replace(item.quote, offer=sold),
            launched_at=NOW - 18 * MINUTE,
            heartbeat_seen_at=heard,
        )
        builder = PlanBuilder(replace(world, attempts={item.id: item}), NOW)
        builder.end_attempt(item.id, reason)
        known = with_records({}, builder.plan().experience)
        assert (known[counted].count, known[counted].span) == (ONE, 18 * MINUTE), reason


def test_a_spot_machine_that_is_taken_while_it_starts_is_no_failed_start() -> None:
    world = world_with(AttemptState.STARTING)
    [item] = world.attempts.values()
    item = replace(item, launched_at=NOW - 8 * MINUTE, heartbeat_seen_at=NOW - MINUTE)
    builder = PlanBuilder(replace(world, attempts={item.id: item}), NOW)
    builder.end_attempt(item.id, EndReason.PREEMPTED)
    assert RecordKind.START_TIMES not in {one.kind for one in builder.plan().experience}


def test_the_shield_holds_back_less_once_starts_were_seen_to_go_well() -> None:
    base = replace(world_with(AttemptState.RUNNING), policy=shop_policy())
    before = careful_overhead(job(), offer(), base, NOW)
    after = careful_overhead(job(), offer(), replace(base, experience=seen(200)), NOW)
    assert before > timedelta(minutes=50)
    assert after < before / 2
