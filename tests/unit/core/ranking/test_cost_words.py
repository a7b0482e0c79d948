"""What a job is expected to cost is stated in sentences whose figures are those by which offers rank."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from spotd.core.domain.states import AttemptState
from spotd.core.domain.world import RecordKind
from spotd.core.ranking.cost_words import NOTHING_KNOWN, cost_words
from spotd_jobs.spec.model import Work
from spotd_providers.contract.values import MicroUsdPerHour
from tests.unit.core.builders import NOW, job, market, offer, world_with
from tests.unit.core.experiences import experience, record
from tests.unit.core.ranking.test_expected_cost import FAST_DEAR, SLOW_CHEAP, THREE_TIMES, one_provider, two_kinds
from tests.unit.core.ranking.test_remaining_work import saved

HOUR = timedelta(hours=1)
UNKNOWN = (
    "the speed of machines is not known for this job, so all count alike:"
    " [speed] states it, or steps in its checkpoints show it once it ran on two kinds"
)


def test_two_kinds_are_compared_by_time_and_money() -> None:
    wanted = two_kinds(speed=THREE_TIMES, work=Work(time=96 * HOUR))
    words = cost_words(wanted, one_provider(wanted), market(SLOW_CHEAP, FAST_DEAR), NOW)
    assert words == (
        "4 x H100_SXM at $14.00/h finishes in 24 h for about $336; 4 x A100_SXM_80 at $5.20/h in 72 h for about $374",
        "left are 96 h of work at speed 1.0, by [work] time less what its checkpoints hold",
    )


def test_what_is_not_known_is_said() -> None:
    wanted = two_kinds()
    assert cost_words(wanted, one_provider(wanted), market(SLOW_CHEAP, FAST_DEAR), NOW) == (NOTHING_KNOWN,)
    wanted = two_kinds(work=Work(time=96 * HOUR))
    words = cost_words(wanted, one_provider(wanted), market(SLOW_CHEAP, FAST_DEAR), NOW)
    assert words[0] == (
        "4 x A100_SXM_80 at $5.20/h finishes in 96 h for about $499; 4 x H100_SXM at $14.00/h in 96 h for about $1,344"
    )
    assert words[1] == UNKNOWN
    wanted = two_kinds(speed=THREE_TIMES)
    words = cost_words(wanted, one_provider(wanted), market(SLOW_CHEAP, FAST_DEAR), NOW)
    assert words == (
        (
            "4 x H100_SXM at $14.00/h counts as $3.50 for an hour of work at speed 1.0;"
            " 4 x A100_SXM_80 at $5.20/h counts as $3.90 for an hour of work"
        ),
        "how much of the job is left is not known: [work] time or steps states it",
    )


def test_what_a_canary_costs_at_most_is_stated_beforehand() -> None:
    wanted = two_kinds()
    world = one_provider(wanted)
    world = replace(world, policy=replace(world.policy, canary=timedelta(minutes=1)))
    said = "its canary takes 60 s and $0.09 at most before the job starts"
    assert cost_words(wanted, world, market(SLOW_CHEAP), NOW) == (NOTHING_KNOWN, said)
    free = replace(SLOW_CHEAP, gpu_price=MicroUsdPerHour(0))
    assert said not in cost_words(wanted, world, market(free), NOW)


def test_losses_raise_time_and_money_and_are_stated() -> None:
    wanted = two_kinds(speed=THREE_TIMES, work=Work(time=96 * HOUR))
    known = experience(
        record(RecordKind.LOSSES_PROVIDER, "spot", 30, 100), record(RecordKind.STARTS, "scratch", 10**6, 10**6)
    )
    words = cost_words(wanted, one_provider(wanted, known=known), market(SLOW_CHEAP), NOW)
    # 30 losses in 100 + 24 hours, each 60 + 7.5 minutes: 27 % more of everything
    assert words[0] == "4 x A100_SXM_80 at $5.20/h finishes in 92 h for about $476"
    assert words[2] == (
        "a preemption every 4.1 h is expected at shop (30.0 in 100 machine hours on record), each costs 1 h 8 min"
    )


def test_what_is_above_the_ceiling_or_of_unknown_speed_is_marked() -> None:
    wanted = replace(two_kinds(speed=THREE_TIMES[1:], work=Work(time=96 * HOUR)))
    wanted = replace(wanted, spec=replace(wanted.spec, price=job(ceiling=2_000_000).spec.price))
    [first, *_] = cost_words(wanted, one_provider(wanted), market(SLOW_CHEAP, FAST_DEAR), NOW)
    assert "4 x H100_SXM at $14.00/h in 24 h for about $336 (above the ceiling)" in first
    assert "for about $125 (its speed is not known: it counts like the slowest that is)" in first


def test_of_a_job_that_runs_the_rest_on_its_machine_is_stated() -> None:
    world = world_with(AttemptState.RUNNING)
    [item], [owner] = world.attempts.values(), world.jobs.values()
    owner = replace(
        owner, spec=replace(owner.spec, work=Work(time=10 * HOUR)), checkpoints=(saved(worked=4 * HOUR, attempt=0),)
    )
    item = replace(item, running_at=NOW - HOUR)
    world = replace(world, jobs={owner.id: owner}, attempts={item.id: item})
    [words, *_] = cost_words(owner, world, market(offer()), NOW)
    assert words == (
        "on its 1 x RTX_4090 at $0.40/h the rest takes 5.0 h and about $2.00;"
        " its speed is not known, so that it counts as one of speed 1.0"
    )


def test_where_nothing_is_for_sale_nothing_is_said() -> None:
    wanted = two_kinds()
    assert cost_words(wanted, one_provider(wanted), market(), NOW) == ()


def test_machine_hours_without_a_loss_are_stated() -> None:
    wanted = two_kinds()
    known = experience(record(RecordKind.LOSSES_PROVIDER, "spot", 0, 61))
    words = cost_words(wanted, one_provider(wanted, known=known), market(SLOW_CHEAP), NOW)
    assert words == (NOTHING_KNOWN, "no preemption at shop in 61 machine hours so far, so none is counted")
