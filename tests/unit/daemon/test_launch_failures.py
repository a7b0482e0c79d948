"""Every leaf of the providers' error tree has a meaning for a launch."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from spotd.core.decide import decide
from spotd.core.domain.plan import applied
from spotd.core.domain.world import World
from spotd.core.kernel.outcomes import LaunchFailure, launch_refused
from spotd.daemon.calls import refusal_of
from spotd_providers.contract import errors
from spotd_providers.contract.errors import (
    OfferGone,
    OutcomeUnknown,
    ProviderError,
    QuotaExceeded,
    RateLimited,
    RequestRejected,
)
from tests.cases import every
from tests.unit.core.builders import NOW, job, market, offer, shop_policy

LEAVES = sorted(
    (
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, ProviderError) and value is not ProviderError
    ),
    key=lambda leaf: leaf.__name__,
)


def made(leaf: type[ProviderError]) -> ProviderError:
    if leaf is RateLimited:
        return RateLimited("why", retry_after=timedelta(seconds=7))
    if leaf is RequestRejected:
        return RequestRejected("why", field="image", reason="unknown")
    if leaf is OutcomeUnknown:
        return OutcomeUnknown("why", key="k")
    return leaf("why")


@every("leaf", LEAVES, ids=lambda leaf: leaf.__name__)
def test_only_an_unknown_outcome_is_no_refusal(leaf: type[ProviderError]) -> None:
    refusal = refusal_of(made(leaf))
    if leaf is OutcomeUnknown:
        assert refusal is None
    else:
        assert refusal is not None
        assert refusal.detail == "why"


def test_every_failure_of_the_core_but_our_own_is_reached() -> None:
    reached = {refusal.failure for leaf in LEAVES if (refusal := refusal_of(made(leaf))) is not None}
    assert reached == set(LaunchFailure) - {
        LaunchFailure.NOT_PREPARED,
        LaunchFailure.INPUT_AWAY,
        LaunchFailure.STORE_AWAY,
    }


def test_what_a_provider_cannot_do_is_a_refusal_of_its_market_for_that_job_and_fails_none() -> None:
    found = refusal_of(errors.NotSupported("it starts one machine at a time"))
    assert found is not None
    owner = job(1)
    world = World(policy=shop_policy(image_errors_max=1), jobs={owner.id: owner}, attempts={}, intents={})
    now, asked = NOW, []
    for _ in range(60):
        plan = decide(world, market(offer(), at=now), now)
        world = applied(world, plan)
        for identity in plan.attempts:
            asked.append(now)
            world = applied(world, launch_refused(world, identity, found.failure, found.detail, now))
        now += timedelta(minutes=30)
    assert 5 <= len(asked) < 10, "it is asked again, and ever more seldom"
    left = world.jobs[owner.id]
    assert (left.state.is_final, left.image_errors, left.failed_starts) == (False, 0, 0)
    other = job(2)
    world = replace(world, jobs={**world.jobs, other.id: other})
    plan = decide(world, market(offer(), at=now), now)
    assert [item.job for item in plan.attempts] == [other.id]
    assert "it starts one machine at a time" in plan.verdicts[owner.id].sentence


def test_a_rate_limit_carries_its_wait() -> None:
    refusal = refusal_of(made(RateLimited))
    assert refusal is not None
    assert refusal.retry_after == timedelta(seconds=7)


def test_a_bare_error_of_no_leaf_is_unknown() -> None:
    assert refusal_of(ProviderError("odd")) is None


def test_an_offer_that_is_gone_says_for_how_long_and_a_quota_which() -> None:
    gone = refusal_of(OfferGone("not in this zone", lasts=timedelta(days=1)))
    full = refusal_of(QuotaExceeded("used up", quota="east spot G"))
    assert gone is not None
    assert full is not None
    assert (gone.retry_after, full.quota) == (timedelta(days=1), "east spot G")
