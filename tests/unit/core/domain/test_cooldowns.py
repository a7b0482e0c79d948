"""A refused launch keeps exactly that from being tried again which would be refused again."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest

from spotd.core.decide import decide
from spotd.core.domain.cooldowns import (
    REFUSED_AT_ONCE,
    REFUSED_MAX,
    UNABLE_AT_ONCE,
    UNABLE_FIRST,
    Cooldown,
    CooldownEnd,
    CooldownScope,
    cooling_until,
    refusal_subject,
)
from spotd.core.domain.market import MarketSnapshot, ProviderOffers, build_offer_index
from spotd.core.domain.plan import applied
from spotd.core.domain.world import VerdictKind, World
from spotd.core.kernel.outcomes import LaunchFailure, launch_refused, launched
from spotd_jobs.spec.model import MarketChoice
from spotd_providers.contract.values import InstanceState, Market, Offer, PoolId, ProviderName, QuotaId
from tests.cases import every
from tests.unit.core.builders import MINUTE, NOW, SHOP, instance, job, market, offer, shop_policy

EAST_G = QuotaId("east spot G")
EAST = QuotaId("east volumes")


def empty() -> World:
    return World(policy=shop_policy(), jobs={job().id: job()}, attempts={}, intents={})


def refused(
    first: Offer, failure: LaunchFailure, *, wait: timedelta | None = None, quota: str = ""
) -> tuple[World, list[tuple[CooldownScope, str, timedelta]]]:
    """The world after this offer was tried and refused, and what cools down in it."""
    world = empty()
    world = applied(world, decide(world, market(first), NOW))
    (tried,) = world.attempts
    world = applied(world, launch_refused(world, tried, failure, "no", NOW, wait, quota))
    of_job = CooldownScope.JOB
    return world, [(c.scope, c.subject, c.until - NOW) for c in world.cooldowns if c.scope is not of_job]


def next_offers(world: World, *offers: Offer, after: timedelta = timedelta(0)) -> list[str]:
    plan = decide(world, market(*offers, at=NOW + after), NOW + after)
    return [item.quote.offer.offer_id for item in plan.attempts.values()]


def test_a_used_up_quota_keeps_every_offer_that_counts_against_it_from_being_tried() -> None:
    first = offer("o1", quotas=(EAST_G, EAST))
    world, cooling = refused(first, LaunchFailure.QUOTA)
    assert cooling == [(CooldownScope.QUOTA, EAST_G, MINUTE)]
    kin, stranger = offer("o2", price=300_000, quotas=(EAST_G, EAST)), offer("o3", quotas=(EAST,))
    assert next_offers(world, first, kin, stranger) == ["o3"]
    plan = decide(world, market(first, kin), NOW)
    (verdict,) = plan.verdicts.values()
    assert verdict.kind is VerdictKind.COOLING
    assert "a quota of the account is used up" in verdict.sentence
    assert next_offers(world, first, kin, after=2 * MINUTE) == ["o2"]


def test_the_provider_may_name_another_quota_than_the_nearest() -> None:
    world, cooling = refused(offer("o1", quotas=(EAST_G, EAST)), LaunchFailure.QUOTA, quota=EAST)
    assert cooling == [(CooldownScope.QUOTA, EAST, MINUTE)]
    assert next_offers(world, offer("o3", quotas=(QuotaId("east spot P"), EAST)), offer("o4")) == ["o4"]


def test_without_a_named_quota_the_pool_is_what_cools_down() -> None:
    world, cooling = refused(offer("o1"), LaunchFailure.QUOTA, quota="of some kind")
    assert cooling == [(CooldownScope.POOL, "pool-o1", MINUTE)]
    assert next_offers(world, offer("o1"), offer("o2")) == ["o2"]


@every(
    ("failure", "wait", "scope", "span"),
    [
        (LaunchFailure.NO_CAPACITY, None, CooldownScope.POOL, 3 * MINUTE),
        (LaunchFailure.OFFER_GONE, None, CooldownScope.OFFER, 10 * MINUTE),
        (LaunchFailure.OFFER_GONE, timedelta(days=1), CooldownScope.OFFER, timedelta(days=1)),
        (LaunchFailure.OFFER_GONE, timedelta(seconds=1), CooldownScope.OFFER, timedelta(seconds=1)),
        (LaunchFailure.PRICE_MOVED, None, CooldownScope.OFFER, timedelta(seconds=30)),
        (LaunchFailure.RATE_LIMITED, timedelta(seconds=7), CooldownScope.PROVIDER, timedelta(seconds=7)),
        (LaunchFailure.UNAVAILABLE, None, CooldownScope.PROVIDER, timedelta(seconds=30)),
    ],
)
def test_each_refusal_cools_down_one_thing_and_notes_its_target(
    failure: LaunchFailure, wait: timedelta | None, scope: CooldownScope, span: timedelta
) -> None:
    _, cooling = refused(offer("o1", pool=PoolId("p")), failure, wait=wait)
    noted = [(CooldownScope.TARGET, timedelta(minutes=15))] if failure in OF_THE_OFFER else []
    assert [(s, t) for s, _, t in cooling] == [(scope, span), *noted]


OF_THE_OFFER = (LaunchFailure.NO_CAPACITY, LaunchFailure.OFFER_GONE, LaunchFailure.PRICE_MOVED)
"""No stop is made for an offer that refused so a moment ago."""


def filled(seen_at: timedelta, refused_at: timedelta) -> timedelta:
    """When a launch is tried again that was refused for the fifth time, where credit was seen before or after that."""
    since = NOW + refused_at
    cooling = Cooldown(
        provider=SHOP,
        scope=CooldownScope.PROVIDER,
        subject="",
        until=since + 15 * MINUTE,
        reason="no credit",
        since=since,
        strikes=4,
        ends=CooldownEnd.CREDIT,
    )
    return cooling_until(cooling, ProviderOffers(provider=SHOP, credit_at=NOW + seen_at)) - since


def test_an_account_that_was_filled_a_moment_before_it_was_refused_is_asked_again_soon() -> None:
    second = timedelta(seconds=1)
    assert filled(timedelta(0), -second) == timedelta(0)
    assert filled(timedelta(0), 5 * second) == 15 * second
    assert filled(timedelta(0), 2 * MINUTE) == 2 * MINUTE
    assert filled(timedelta(0), 11 * MINUTE) == 15 * MINUTE


# --- ever new offers, each of which is refused -----------------------------------------------------------------------

OTHER = ProviderName("other")
REFUSALS = [
    LaunchFailure.NO_CAPACITY,
    LaunchFailure.OFFER_GONE,
    LaunchFailure.PRICE_MOVED,
    LaunchFailure.QUOTA,
    LaunchFailure.CONTRACT,
]


def baited(count: int, at: datetime, *others: Offer, **sold: Any) -> MarketSnapshot:
    """A list of one offer that no list had before, and what another provider sells."""
    bait = offer(f"bait{count}", price=100_000, quotas=(QuotaId(f"q{count}"),), **sold)
    shown = market(bait, at=at)
    known = ProviderOffers(provider=OTHER, offer_index=build_offer_index(others), at=at, sells_spot=True)
    return replace(shown, by_provider={**shown.by_provider, OTHER: known})


def two_shops() -> World:
    policy = shop_policy()
    rules = replace(policy.providers[SHOP], name=OTHER)
    return replace(empty(), policy=replace(policy, providers={**policy.providers, OTHER: rules}))


def refusing_all(
    world: World, failure: LaunchFailure, hours: float, *others: Offer, **sold: Any
) -> tuple[World, list[tuple[timedelta, str]]]:
    """Every launch at SHOP is refused, and there is another offer each time; when which provider was asked."""
    asked: list[tuple[timedelta, str]] = []
    for count in range(int(hours * 120)):
        now = NOW + count * MINUTE / 2
        plan = decide(world, baited(count, now, *others, **sold), now)
        world = applied(world, replace(plan, verdicts={}))
        for identity, item in plan.attempts.items():
            asked.append((now - NOW, item.provider))
            if item.provider == OTHER:
                return world, asked
            world = applied(world, launch_refused(world, identity, failure, "no", now))
    return world, asked


@pytest.mark.long
@pytest.mark.parametrize("failure", REFUSALS)
def test_ever_new_offers_that_are_refused_are_asked_for_ever_more_seldom(failure: LaunchFailure) -> None:
    asked = [at for at, _ in refusing_all(empty(), failure, 12)[1]]
    gaps = [b - a for a, b in pairwise(asked)]
    assert max(gaps[: REFUSED_AT_ONCE - 1]) <= 3 * MINUTE, "a few may be refused, and the next one sold"
    assert min(gaps[REFUSED_AT_ONCE + 3 :]) >= REFUSED_MAX
    assert len(asked) < 60


def test_what_another_provider_sells_is_had_as_soon_as_one_has_refused_often_enough() -> None:
    dear = offer("well", price=450_000, provider=OTHER)
    _, asked = refusing_all(two_shops(), LaunchFailure.OFFER_GONE, 12, dear)
    assert [name for _, name in asked] == [SHOP] * REFUSED_AT_ONCE + [OTHER]
    assert asked[-1][0] - asked[-2][0] <= 3 * MINUTE


def test_why_names_the_provider_that_refuses_and_when_it_is_asked_again() -> None:
    world, asked = refusing_all(empty(), LaunchFailure.NO_CAPACITY, 0.5)
    now = NOW + timedelta(minutes=30)
    assert len(asked) < 14
    [verdict] = decide(world, baited(999, now), now).verdicts.values()
    assert verdict.kind is VerdictKind.COOLING
    assert f"shop has refused {REFUSED_AT_ONCE} launches of it in a row or more (spot): no; asked again in" in (
        verdict.sentence
    )


def test_another_job_and_another_market_are_not_kept_from_it() -> None:
    world, _ = refusing_all(empty(), LaunchFailure.NO_CAPACITY, 0.5)
    now = NOW + timedelta(minutes=30)
    second = job(2)
    beside = replace(world, jobs={**world.jobs, second.id: second})
    assert [i.job for i in decide(beside, baited(998, now), now).attempts] == [second.id]
    wanted = replace(job().spec.resources, market=MarketChoice.AUTO)
    asked = world.jobs[job().id]
    both = replace(world, jobs={asked.id: replace(asked, spec=replace(asked.spec, resources=wanted))})
    assert decide(both, baited(998, now, market=Market.ON_DEMAND), now).attempts


def unable_in(hours: float, *offers: Offer) -> list[tuple[timedelta, str]]:
    """Which offers are asked for, and when, where only the one named `well` can do what the job asks."""
    world, asked = empty(), []
    for count in range(int(hours * 120)):
        now = NOW + count * MINUTE / 2
        plan = decide(world, market(*offers, at=now), now)
        world = applied(world, replace(plan, verdicts={}))
        for identity, item in plan.attempts.items():
            asked.append((now - NOW, str(item.quote.offer.offer_id)))
            if item.quote.offer.offer_id == "well":
                return asked
            world = applied(world, launch_refused(world, identity, LaunchFailure.NOT_SUPPORTED, "no gangs", now))
    return asked


def test_an_offer_that_cannot_do_what_a_job_asks_keeps_it_from_no_other() -> None:
    asked = unable_in(1, offer("odd", price=100_000), offer("well", price=110_000))
    assert [name for _, name in asked] == ["odd", "well"]
    assert asked[-1][0] <= MINUTE


@every(("kinds", "hours"), [(3, 0.1), (5, 0.6), (8, 8)])
def test_a_market_of_which_many_offers_cannot_do_it_sells_the_one_that_can(kinds: int, hours: float) -> None:
    odd = [offer(f"odd{number}", price=100_000 + number) for number in range(kinds)]
    asked = unable_in(12, *odd, offer("well", price=110_000))
    assert asked[-1][1] == "well"
    assert asked[-1][0] <= 60 * hours * MINUTE
    assert len(asked) <= 3 * kinds


@every("kinds", [1, 2, 3, 9])
def test_a_market_none_of_whose_offers_can_do_it_is_asked_each_of_them_once_in_hours(kinds: int) -> None:
    asked = unable_in(6, *(offer(f"odd{number}", price=100_000 + number) for number in range(kinds)))
    assert {name for _, name in asked[:UNABLE_AT_ONCE]} == {f"odd{number}" for number in range(min(kinds, 3))}
    assert {name for _, name in asked} == {f"odd{number}" for number in range(kinds)}
    for number in range(kinds):
        gaps = [b - a for a, b in pairwise(at for at, name in asked if name == f"odd{number}")]
        assert all(gap >= UNABLE_FIRST for gap in gaps)
    assert len(asked) <= 3 * kinds


def test_what_a_market_cannot_do_and_what_it_does_not_sell_are_counted_apart() -> None:
    world, _ = refusing_all(empty(), LaunchFailure.NO_CAPACITY, 0.1)
    [refused] = [one for one in world.cooldowns if one.scope is CooldownScope.JOB][-1:]
    now = NOW + 10 * MINUTE
    plan = decide(world, baited(55, now), now)
    [identity] = plan.attempts
    world = applied(world, plan)
    world = applied(world, launch_refused(world, identity, LaunchFailure.NOT_SUPPORTED, "no", now))
    fresh = [one for one in world.cooldowns if one.scope is CooldownScope.JOB and one.since == now]
    assert {one.strikes for one in fresh} == {0}
    assert refused.subject not in {one.subject for one in fresh}


def test_a_machine_that_is_sold_ends_the_row() -> None:
    world, _ = refusing_all(empty(), LaunchFailure.NO_CAPACITY, 0.3)
    owner = world.jobs[job().id]
    plan = decide(world, baited(77, NOW + 90 * MINUTE), NOW + 90 * MINUTE)
    [identity] = plan.attempts
    world = applied(world, plan)
    made = replace(instance(InstanceState.PENDING), key=plan.attempts[identity].key)
    world = applied(world, launched(world, identity, made, NOW + 90 * MINUTE))
    [row] = [c for c in world.cooldowns if c.scope is CooldownScope.JOB][-1:]
    assert (row.subject, row.strikes, row.since) == (refusal_subject(owner.id, Market.SPOT), 0, None)
    assert row.until <= NOW + 90 * MINUTE
