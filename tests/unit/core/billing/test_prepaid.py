"""A launch that the prepaid balance could not carry waits; a balance that is not known changes nothing."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotd.core.decide import decide
from spotd.core.domain.intents import JobId
from spotd.core.domain.market import MarketSnapshot, build_offer_index
from spotd.core.domain.states import AttemptState, JobState
from spotd.core.domain.world import VerdictKind, World
from spotd.core.prepaid import BALANCE_TTL, NO_BALANCE, PrepaidGuard, current_balance
from spotd.core.pricing import useful_run
from spotd_providers.contract.values import MicroUsd, MicroUsdPerHour, ProviderName, cost
from tests.cases import every
from tests.unit.core.builders import MINUTE, NOW, SHOP, job, market, offer, shop_policy, world_with

JOB = JobId("j1")
OTHER = ProviderName("other")
RUN = cost(MicroUsdPerHour(400_000), useful_run(job(), offer(), shop_policy()))
"""What a useful run of the offer costs."""


def waiting(*numbers: int) -> World:
    jobs = {found.id: found for found in map(job, numbers or (1,))}
    return World(policy=shop_policy(), jobs=jobs, attempts={}, intents={})


def with_balance(stage: MarketSnapshot, balance: int | None, age: timedelta = MINUTE) -> MarketSnapshot:
    stated = replace(
        stage.by_provider[SHOP], balance=None if balance is None else MicroUsd(balance), balance_at=NOW - age
    )
    return replace(stage, by_provider={**stage.by_provider, SHOP: stated})


def test_a_launch_that_the_balance_does_not_carry_waits_with_a_sentence() -> None:
    plan = decide(waiting(), with_balance(market(offer()), RUN - 1), NOW)
    verdict = plan.verdicts[JOB]
    assert not plan.attempts
    assert verdict.kind is VerdictKind.BALANCE
    assert verdict.sentence == (
        "the balance at shop leaves $0.05 for a launch: a useful run of 1 x RTX_4090 at shop, spot, $0.4000/GPU-h needs"
        " $0.05; add money there"
    )
    assert dict(verdict.passed_over) == {NO_BALANCE: 1}
    assert plan.jobs.get(JOB, waiting().jobs[JOB]).state is JobState.QUEUED


def test_a_balance_that_is_just_enough_launches() -> None:
    assert decide(waiting(), with_balance(market(offer()), RUN), NOW).attempts


def test_a_bid_is_carried_as_it_would_be_placed() -> None:
    bid = market(offer(pays_bid=True))
    policy = shop_policy(bid_headroom_ppm=100_000)
    world = replace(waiting(), policy=policy)
    needed = cost(MicroUsdPerHour(440_000), useful_run(job(), offer(), policy))
    assert not decide(world, with_balance(bid, needed - 1), NOW).attempts
    assert decide(world, with_balance(bid, needed), NOW).attempts


@every(
    ("balance", "age"),
    [(None, MINUTE), (0, BALANCE_TTL + MINUTE), (0, -MINUTE)],
    ids=["unknown", "stale", "stated in the future of a clock that was set back"],
)
def test_a_balance_that_is_not_known_now_changes_nothing(balance: int | None, age: timedelta) -> None:
    stage = market(offer())
    assert decide(waiting(), with_balance(stage, balance, age), NOW) == decide(waiting(), stage, NOW)
    assert current_balance(with_balance(stage, balance, age).by_provider[SHOP], NOW) is None


def test_a_balance_that_comes_while_a_decision_is_made_holds_in_it() -> None:
    """The decision has its instant before it takes its snapshot of the market."""
    stage = market(offer())
    plan = decide(waiting(), with_balance(stage, 0, timedelta(seconds=-3)), NOW)
    assert plan.verdicts[JOB].kind is VerdictKind.BALANCE


def test_what_is_launched_in_one_decision_shares_the_balance() -> None:
    offers = [offer(f"o{n}") for n in range(4)]
    plan = decide(waiting(1, 2, 3, 4), with_balance(market(*offers), 2 * RUN + RUN // 2), NOW)
    assert len(plan.attempts) == 2
    assert [plan.verdicts[JobId(f"j{n}")].kind for n in (3, 4)] == [VerdictKind.BALANCE] * 2


def test_machines_that_run_take_their_part_first() -> None:
    world = world_with(AttemptState.RUNNING)
    [item] = world.attempts.values()
    second = job(2)
    both = replace(world, jobs={**world.jobs, second.id: second})
    stage = with_balance(market(offer("o2")), RUN + 1, age=timedelta(minutes=10))
    assert decide(both, stage, NOW).verdicts[second.id].kind is VerdictKind.BALANCE
    taken = cost(item.quote.price.total, timedelta(minutes=10))
    stage = with_balance(market(offer("o2")), RUN + taken + RUN, age=timedelta(minutes=10))
    assert decide(both, stage, NOW).verdicts[second.id].kind is VerdictKind.PLACED


@pytest.mark.parametrize(("balance", "kind"), [(-10, VerdictKind.BALANCE), (10, VerdictKind.PLACED)])
def test_a_machine_that_was_just_launched_needs_a_useful_run_from_its_launch_on(
    balance: int, kind: VerdictKind
) -> None:
    """The balance is older than its launch."""
    world = world_with(AttemptState.RUNNING, intended_at=NOW - MINUTE)
    second = job(2)
    both = replace(world, jobs={**world.jobs, second.id: second})
    stage = with_balance(market(offer("o2")), 2 * RUN + balance, age=timedelta(minutes=10))
    assert decide(both, stage, NOW).verdicts[second.id].kind is kind


def test_another_provider_is_taken_where_one_has_no_money_left() -> None:
    policy = shop_policy()
    policy = replace(policy, providers={**policy.providers, OTHER: replace(policy.providers[SHOP], name=OTHER)})
    stage = with_balance(market(offer()), 0)
    costs_more = replace(offer("o9", price=450_000), provider=OTHER)
    elsewhere = replace(stage.by_provider[SHOP], provider=OTHER, balance=None, balance_at=None)
    elsewhere = replace(elsewhere, offer_index=build_offer_index((costs_more,)))
    stage = replace(stage, by_provider={**stage.by_provider, OTHER: elsewhere})
    plan = decide(replace(waiting(), policy=policy), stage, NOW)
    assert [item.provider for item in plan.attempts.values()] == [OTHER]
    sentence = plan.verdicts[JOB].sentence
    assert "the best that fits now, since the balance at shop leaves $0.00 for a launch" in sentence


@pytest.mark.parametrize("balance", [0, RUN // 2, RUN - 1, 2 * RUN + RUN // 2])
def test_many_jobs_walk_over_the_offers_of_an_empty_account_once(balance: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    carries = PrepaidGuard._carries

    def counted(self: PrepaidGuard, *args: Any) -> bool:
        asked.append(args)
        return carries(self, *args)

    monkeypatch.setattr(PrepaidGuard, "_carries", counted)
    stage = market(*[offer(f"o{n}", price=400_000 + n) for n in range(500)])
    plan = decide(waiting(*range(1, 101)), with_balance(stage, balance), NOW)
    assert len(plan.attempts) == balance // RUN
    assert {v.kind for v in plan.verdicts.values()} <= {VerdictKind.BALANCE, VerdictKind.PLACED}
    assert len(asked) <= 500 + 100


@given(st.integers(0, 10**13), st.integers(0, 60))
def test_a_larger_balance_never_keeps_a_job_waiting(balance: int, minutes: int) -> None:
    stage = with_balance(market(offer()), balance, timedelta(minutes=minutes))
    more = with_balance(market(offer()), balance + 1, timedelta(minutes=minutes))
    assert len(decide(waiting(), more, NOW).attempts) >= len(decide(waiting(), stage, NOW).attempts)
