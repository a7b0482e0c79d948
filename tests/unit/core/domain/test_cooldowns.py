"""A refused launch keeps exactly that from being tried again which would be refused again."""

from __future__ import annotations

from datetime import timedelta

import pytest

from spotd.core.decide import decide
from spotd.core.domain.cooldowns import Cooldown, CooldownEnd, CooldownScope, cooling_until
from spotd.core.domain.market import ProviderOffers
from spotd.core.domain.plan import applied
from spotd.core.domain.world import VerdictKind, World
from spotd.core.kernel.outcomes import LaunchFailure, launch_refused
from spotd_providers.contract.values import Offer, PoolId, QuotaId
from tests.unit.core.builders import MINUTE, NOW, SHOP, job, market, offer, shop_policy

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
    return world, [(c.scope, c.subject, c.until - NOW) for c in world.cooldowns]


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


@pytest.mark.parametrize(
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
