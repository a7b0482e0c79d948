"""Money is spent on machines that get somewhere, and a budget ends a job only when none could."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from spotd.core.decide import decide
from spotd.core.domain.attempts import MachineState
from spotd.core.domain.intents import JobId
from spotd.core.domain.jobs import Checkpoint, Job
from spotd.core.domain.plan import applied
from spotd.core.domain.policy import Policy
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.domain.world import VerdictKind, World
from spotd.core.requests import set_budget
from spotd_providers.contract.values import MicroUsd, MicroUsdPerHour, Offer
from tests.cases import every
from tests.unit.core.builders import NOW, job, market, offer, shop_policy, world_with

JOB = JobId("j1")
USD = 1_000_000


def poor(left_usd: float, **changes: object) -> Job:
    """A job that has $120 and has spent all of it but so much; it was launched before."""
    known: dict[str, object] = {"attempts_made": 3, "spent": MicroUsd(int((120 - left_usd) * USD)), **changes}
    return replace(job(ceiling=20 * USD, budget=120 * USD), **known)  # type: ignore[arg-type]  # fields of Job


def world(*jobs: Job, policy: Policy | None = None) -> World:
    return World(policy=policy or shop_policy(), jobs={j.id: j for j in jobs}, attempts={}, intents={})


def at_usd(price: float, name: str = "o1") -> Offer:
    return offer(name, price=int(price * USD))


@every("low", [None, 2 * USD])
def test_a_momentary_price_does_not_end_a_job_that_could_work_at_another(low: int | None) -> None:
    owner = poor(2.0, rate_low=low)
    stage = world(owner)
    plan = decide(stage, market(at_usd(19)), NOW)
    assert plan.verdicts[JOB].kind is VerdictKind.BUDGET_JOB
    assert "waits for a lower price" in plan.verdicts[JOB].sentence
    assert "spotctl budget job1 +" in plan.verdicts[JOB].sentence
    stage = applied(stage, plan)
    assert stage.jobs[JOB].state is JobState.QUEUED
    assert decide(stage, market(at_usd(2)), NOW).attempts, "an hour of work is to be had"


def test_a_job_for_which_nothing_useful_is_left_at_any_plausible_price_ends() -> None:
    plan = decide(world(poor(0.05, rate_low=MicroUsdPerHour(2 * USD))), market(at_usd(2)), NOW)
    assert plan.jobs[JOB].state is JobState.EXPIRED
    assert "spotctl budget" in plan.jobs[JOB].reason
    assert decide(world(poor(0.0)), market(), NOW).jobs[JOB].state is JobState.EXPIRED


def test_prices_of_the_last_days_count_as_plausible() -> None:
    owner, shown = poor(1.0, rate_low=MicroUsdPerHour(19 * USD)), market(at_usd(19))
    assert decide(world(owner), shown, NOW).jobs[JOB].state is JobState.EXPIRED
    lately = replace(shown, lows={("RTX_4090", 1): MicroUsdPerHour(1 * USD)})
    assert JobState.EXPIRED not in {j.state for j in decide(world(owner), lately, NOW).jobs.values()}


def test_an_empty_market_ends_no_job_that_has_something_left() -> None:
    plan = decide(world(poor(0.5)), market(), NOW)
    assert JobState.EXPIRED not in {j.state for j in plan.jobs.values()}


def test_a_machine_that_is_stopped_for_its_jobs_budget_leaves_the_job_waiting() -> None:
    assert EndReason.OVER_BUDGET.traits.next_state is JobState.QUEUED


@every("size", [10**9, 10**11, 10**13, 10**14])
def test_a_launch_pays_for_boot_restore_and_at_least_as_much_work(size: int) -> None:
    saved = Checkpoint(name="c", attempt=1, step=1, bytes=size, at=NOW, manifest_key="k", sha256="s")
    owner = poor(0.0, checkpoints=(saved,))
    restore_h = size / 25e6 / 3600
    for left_h, is_made in ((1.9 * restore_h + 0.2, False), (2.1 * restore_h + 0.5, True)):
        has = replace(owner, budget_set=MicroUsd(int(owner.spent + left_h * USD)), disk_gb_seen=0)
        # Free disk and traffic, so that an hour costs exactly a dollar.
        plan = decide(world(has), market(at_usd(1)), NOW)
        assert bool(plan.attempts) is is_made


def day_world(jobs: int, *, spent_usd: float, day_usd: float = 10.0) -> World:
    policy = shop_policy(budget_day=MicroUsd(int(day_usd * USD)), machines_max=100, launches_per_cycle_max=100)
    spent = {NOW.date(): MicroUsd(int(spent_usd * USD))}
    return replace(world(*(job(n, ceiling=2 * USD) for n in range(1, jobs + 1)), policy=policy), spent_by_day=spent)


def test_the_last_money_of_a_day_buys_no_more_machines_than_can_each_do_something() -> None:
    stage = day_world(40, spent_usd=9.0)
    offers = [at_usd(1, f"o{n}") for n in range(40)]
    plan = decide(stage, market(*offers), NOW)
    useful = timedelta(minutes=3 + 5)
    assert 0 < len(plan.attempts) * (useful / timedelta(hours=1)) <= 1.0
    bought = applied(stage, plan)
    later = NOW + timedelta(seconds=1)
    assert not decide(bought, market(*offers, at=later), later).attempts, "nor does the next decision"


def stopped_for_the_day() -> World:
    """A machine was stopped for the budget of the day, and its end has freed what had been set aside for it."""
    stage = world_with(AttemptState.RUNNING)
    stage = replace(
        stage,
        policy=shop_policy(budget_day=MicroUsd(1 * USD)),
        spent_by_day={NOW.date(): MicroUsd(900_000)},
    )
    plan = decide(stage, market(), NOW)
    (stopping,) = plan.attempts.values()
    assert stopping.stop is not None
    assert stopping.stop.reason is EndReason.BUDGET_PAUSED
    after = applied(stage, plan)
    queued = replace(after.jobs[JOB], state=JobState.QUEUED)
    return replace(
        after,
        attempts={},
        jobs={JOB: queued, JobId("j2"): job(2)},
        spent_by_day={NOW.date(): MicroUsd(500_000)},
    )


def test_a_stop_for_the_budget_of_the_day_holds_until_the_day_is_over_or_the_budget_rises() -> None:
    stage, shown = stopped_for_the_day(), market(offer())
    plan = decide(stage, shown, NOW)
    assert not plan.attempts
    assert {v.kind for v in plan.verdicts.values()} == {VerdictKind.BUDGET_DAY}
    assert "machines were stopped for it" in plan.verdicts[JOB].sentence
    evening = datetime(2026, 3, 2, 23, 59, 59, tzinfo=UTC)
    assert not decide(stage, market(offer(), at=evening), evening).attempts
    morning = datetime(2026, 3, 3, tzinfo=UTC)
    assert decide(stage, market(offer(), at=morning), morning).attempts
    for more, is_admitted in ((1_000_001, False), (1_010_000, False), (2_000_000, True)):
        raised = replace(stage, policy=shop_policy(budget_day=MicroUsd(more)))
        assert bool(decide(raised, shown, NOW).attempts) is is_admitted


def test_a_stop_for_the_budget_of_a_month_holds_until_the_next() -> None:
    stage = world_with(AttemptState.RUNNING)
    stage = replace(
        stage,
        policy=shop_policy(budget_month=MicroUsd(1 * USD)),
        spent_by_day={NOW.date(): MicroUsd(990_000)},
    )
    plan = decide(stage, market(), NOW)
    (held,) = plan.cooldowns
    assert held.until == datetime(2026, 4, 1, tzinfo=UTC)


# --- the budget of a job changes ---


def test_a_raised_budget_lets_a_waiting_job_go_on() -> None:
    stage = world(poor(0.1, rate_low=MicroUsdPerHour(USD // 10)))
    assert not decide(stage, market(at_usd(2)), NOW).attempts
    stage = applied(stage, set_budget(stage, stage.jobs[JOB], MicroUsd(140 * USD), NOW))
    assert stage.jobs[JOB].budget == 140 * USD
    assert decide(stage, market(at_usd(2)), NOW).attempts


def test_a_changed_budget_is_an_event_and_the_same_one_is_none() -> None:
    stage = world(poor(5.0))
    plan = set_budget(stage, stage.jobs[JOB], MicroUsd(140 * USD), NOW)
    assert [(e.kind, e.data["budget_microusd"]) for e in plan.events] == [("job.budget", 140 * USD)]
    assert "from $120.00 to $140.00" in plan.events[0].message
    assert set_budget(stage, stage.jobs[JOB], MicroUsd(120 * USD), NOW).is_empty


def test_a_lowered_budget_stops_the_machine() -> None:
    stage = world_with(AttemptState.RUNNING)
    stage = applied(stage, set_budget(stage, stage.jobs[JOB], MicroUsd(10_000), NOW))
    (item,) = decide(stage, market(), NOW).attempts.values()
    assert item.stop is not None
    assert item.stop.reason is EndReason.OVER_BUDGET
    assert item.machine is MachineState.LIVE


def test_the_budget_of_an_ended_job_can_be_raised_before_a_retry() -> None:
    ended = poor(0.0, state=JobState.EXPIRED)
    plan = set_budget(world(), ended, MicroUsd(140 * USD), NOW)
    assert plan.jobs[JOB].state is JobState.EXPIRED
    assert plan.jobs[JOB].budget == 140 * USD
