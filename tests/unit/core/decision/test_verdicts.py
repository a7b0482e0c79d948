"""What a verdict says of the offers that were passed over, and of when the wait ends."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from spotd.core.decide import decide
from spotd.core.domain.cooldowns import Cooldown, CooldownScope
from spotd.core.domain.jobs import Job
from spotd.core.domain.market import MarketSnapshot
from spotd.core.domain.policy import Policy
from spotd.core.domain.world import Verdict, VerdictKind, World
from spotd_jobs.spec.model import GpuAlternative, Resources
from spotd_providers.contract.values import MicroUsd
from tests.cases import every
from tests.unit.core.builders import NOW, SHOP, job, market, offer, shop_policy

COOLING = Cooldown(
    provider=SHOP, scope=CooldownScope.HOST, subject="host-a", until=NOW + timedelta(minutes=1), reason="lost"
)
COOLS = "host avoided for now after a preemption"


def verdict(
    one: Job, sold: MarketSnapshot, *cooldowns: Cooldown, policy: Policy | None = None, spent: int = 0
) -> Verdict:
    stage = World(
        policy=policy or shop_policy(),
        jobs={one.id: one},
        attempts={},
        intents={},
        cooldowns=cooldowns,
        spent_by_day={NOW.date(): MicroUsd(spent)},
    )
    return decide(stage, sold, NOW).verdicts[one.id]


def test_offers_that_do_not_fit_are_counted_by_reason_and_the_most_frequent_comes_first() -> None:
    wanted = Resources(gpu=(GpuAlternative(name="4090", count=1),), regions=("eu",))
    sold = market(*(offer(f"o{n}", region="us", host_id=None) for n in range(2)), offer("big", gpu_count=8))
    found = verdict(job(1, resources=wanted), sold)
    assert found.kind is VerdictKind.NO_MATCH
    assert found.passed_over == (("another region", 2), ("another GPU or count", 1))
    assert found.until is None


def test_a_wait_for_a_cool_down_lasts_until_its_first_end() -> None:
    later = replace(COOLING, subject="host-b", until=NOW + timedelta(minutes=9))
    found = verdict(job(1), market(offer("a"), offer("b"), offer("big", gpu_count=8)), later, COOLING)
    assert found.kind is VerdictKind.COOLING
    assert found.passed_over == ((COOLS, 2), ("another GPU or count", 1))
    assert found.until == COOLING.until


def test_the_cool_down_of_a_machine_that_the_job_cannot_use_ends_no_wait() -> None:
    other = replace(COOLING, subject="elsewhere", until=NOW + timedelta(seconds=1))
    assert verdict(job(1), market(offer("a")), other, COOLING).until == COOLING.until


def test_offers_above_the_ceiling_are_told_from_those_that_cool_down_and_those_not_compared() -> None:
    sold = market(
        offer("a", price=500_001), offer("b", price=500_002), *(offer(f"o{n}", price=9_000_000) for n in range(7))
    )
    found = verdict(job(1, ceiling=500_000), sold, COOLING)
    assert found.kind is VerdictKind.ABOVE_CEILING
    assert sum(count for _, count in found.passed_over) == 9
    assert dict(found.passed_over)[COOLS] == 1
    assert dict(found.passed_over)["above the ceiling"] >= 1
    assert set(dict(found.passed_over)) <= {COOLS, "above the ceiling", "ranked behind those, not compared"}


def test_a_wait_for_the_budget_of_a_day_lasts_until_the_next_day_and_of_a_month_until_the_next_month() -> None:
    spent = 5_000_000
    day = verdict(job(1), market(offer()), policy=shop_policy(budget_day=MicroUsd(spent)), spent=spent)
    assert (day.kind, day.until) == (
        VerdictKind.BUDGET_DAY,
        datetime(NOW.year, NOW.month, NOW.day, tzinfo=UTC) + timedelta(days=1),
    )
    month = verdict(job(1), market(offer()), policy=shop_policy(budget_month=MicroUsd(spent)), spent=spent)
    first = (NOW.replace(day=1) + timedelta(days=32)).replace(day=1)
    assert (month.kind, month.until) == (VerdictKind.BUDGET_MONTH, datetime(first.year, first.month, 1, tzinfo=UTC))


@every("budget", ["budget_day", "budget_month"])
@every("spent", [0, 1])
def test_no_time_ends_the_wait_for_a_budget_that_is_smaller_than_a_launch_needs(budget: str, spent: int) -> None:
    found = verdict(job(1), market(offer()), policy=shop_policy(**{budget: MicroUsd(1)}), spent=spent)
    assert found.kind in {VerdictKind.BUDGET_DAY, VerdictKind.BUDGET_MONTH}
    assert "a larger budget" in found.sentence
    assert found.until is None


def test_a_job_that_backs_off_waits_until_its_pause_is_over() -> None:
    at = NOW + timedelta(minutes=7)
    found = verdict(replace(job(1), not_before=at), market(offer()))
    assert (found.kind, found.until) == (VerdictKind.BACKING_OFF, at)
