"""The line that sums a finished job up: what it claims of savings is what was known at each launch."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from spotd.core.bills import Bill, Sharer, compared
from spotd.core.domain.attempts import MachineState
from spotd.core.domain.jobs import HOSTS_MAX, RunTotals
from spotd.core.domain.plan import Plan, applied
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.domain.world import World
from spotd.core.kernel.reconcile import reconcile
from spotd.core.metering import closing_words, is_estimate, settled, spent
from spotd.core.plan_builder import PlanBuilder
from spotd.core.requests import cancel
from spotd_providers.contract.values import MicroUsd, MicroUsdPerHour
from tests.cases import every
from tests.unit.core.builders import NOW, report, world_with


def hosts(count: int) -> tuple[str, ...]:
    return tuple(f"vast/h{n}" for n in range(count))


LONG = RunTotals(ran=timedelta(hours=31.4), hosts=hosts(4), preemptions=3)
SHORT = RunTotals(ran=timedelta(minutes=14.4), hosts=hosts(1))
NEVER = timedelta(0)
LINES = {
    "the whole line": (
        (LONG, 41_200_000, 118_600_000, 3, timedelta(minutes=14)),
        (
            "ran 31.4 h on 4 hosts, $41.20 instead of $118.60 on demand for the same machine hours: saved 65 %, "
            "3 preemptions, 14 min repeated"
        ),
    ),
    "one host, no loss": (
        (SHORT, 1_000_000, 4_000_000, 0, NEVER),
        "ran 14 min on 1 host, $1.00 instead of $4.00 on demand for the same machine hours: saved 75 %",
    ),
    "a machine that was lost": (
        (replace(SHORT, preemptions=1), 1_000_000, 2_000_000, 2, timedelta(seconds=40)),
        (
            "ran 14 min on 1 host, $1.00 instead of $2.00 on demand for the same machine hours: saved 50 %, "
            "2 preemptions, 40 s repeated"
        ),
    ),
    "no on-demand price is known": (
        (replace(SHORT, uncompared=MicroUsd(1_000_000)), 1_000_000, 1_000_000, 0, NEVER),
        "ran 14 min on 1 host, $1.00",
    ),
    "known for a part": (
        (replace(SHORT, uncompared=MicroUsd(1_000_000)), 3_000_000, 9_000_000, 0, NEVER),
        "ran 14 min on 1 host, $3.00, $2.00 of it instead of $8.00 on demand for the same machine hours: saved 75 %",
    ),
    "more than on-demand": (
        (SHORT, 5_000_000, 4_000_000, 0, NEVER),
        "ran 14 min on 1 host, $5.00 instead of $4.00 on demand for the same machine hours: 25 % more",
    ),
    "no bill is known": (
        (replace(SHORT, estimated=2), 1_000_000, 4_000_000, 0, NEVER),
        "ran 14 min on 1 host, $1.00 (estimated) instead of $4.00 on demand for the same machine hours: saved 75 %",
    ),
    "bought on-demand": ((SHORT, 4_000_000, 4_000_000, 0, NEVER), "ran 14 min on 1 host, $4.00 as on demand"),
    "a few cents": (
        (SHORT, 16_100, 23_400, 0, NEVER),
        "ran 14 min on 1 host, $0.016 instead of $0.023 on demand for the same machine hours: saved 31 %",
    ),
    "all of it free": (
        (SHORT, 0, 4_000_000, 0, NEVER),
        "ran 14 min on 1 host, $0.00 instead of $4.00 on demand for the same machine hours: saved 100 %",
    ),
    "it never ran": (
        (RunTotals(), 500_000, 1_000_000, 0, NEVER),
        "its command never ran, $0.50 instead of $1.00 on demand for the same machine hours: saved 50 %",
    ),
    "it ran for less than a second": (
        (replace(SHORT, ran=timedelta(milliseconds=400)), 1_000_000, 1_000_000, 1, timedelta(milliseconds=300)),
        "ran less than 1 s on 1 host, $1.00 as on demand, 1 preemption, less than 1 s repeated",
    ),
    "nothing happened": ((RunTotals(), 0, 0, 0, NEVER), ""),
    "very many hosts": (
        (RunTotals(ran=timedelta(hours=9), hosts=hosts(HOSTS_MAX)), 1_000_000, 2_000_000, 0, NEVER),
        "ran 9.0 h on 100 or more hosts, $1.00 instead of $2.00 on demand for the same machine hours: saved 50 %",
    ),
}


@every("case", LINES)
def test_the_line(case: str) -> None:
    (totals, spent_in_all, on_demand, recoveries, lost), line = LINES[case]
    assert closing_words(totals, MicroUsd(spent_in_all), MicroUsd(on_demand), recoveries, lost) == line


def ended(world: World, reason: EndReason = EndReason.DONE) -> tuple[World, Plan]:
    """The world after its one attempt ended for this reason and its machine is gone, and the plan of all that."""
    builder = PlanBuilder(world, NOW)
    [number] = world.attempts
    builder.end_attempt(number, reason)
    builder.machine_gone(number)
    return applied(world, builder.plan()), builder.plan()


def test_a_finished_job_ends_with_the_line_in_its_last_event() -> None:
    _, plan = ended(world_with(AttemptState.RUNNING))
    [job] = plan.jobs.values()
    assert (job.state, plan.events[-1].kind, plan.events[-1].job) == (JobState.SUCCEEDED, "job.closed", job.id)
    assert job.totals == RunTotals(ran=timedelta(minutes=9), hosts=("shop/host-o1",), estimated=1)
    assert plan.events[-1].data["estimated"] is True
    assert plan.events[-1].message.startswith("ran 9 min on 1 host, $")
    assert plan.events[-1].data["spent_microusd"] == job.spent


def test_a_failed_job_ends_with_a_line_that_claims_no_savings() -> None:
    world = world_with(AttemptState.RUNNING)
    _, plan = ended(world, EndReason.USER_ERROR)
    [job] = plan.jobs.values()
    while job.state is not JobState.FAILED:  # its retries
        [before] = world.jobs.values()
        spec = replace(before.spec, retry_errors=0)
        world = replace(world, jobs={before.id: replace(before, spec=spec)})
        _, plan = ended(world, EndReason.USER_ERROR)
        [job] = plan.jobs.values()
    closed = plan.events[-1]
    assert closed.kind == "job.closed"
    assert job.on_demand > job.spent > 0
    assert "saved" not in closed.message
    assert "on demand" not in closed.message


def test_a_job_that_goes_on_is_not_summed_up() -> None:
    world, plan = ended(world_with(AttemptState.RUNNING), EndReason.PREEMPTED)
    [job] = plan.jobs.values()
    assert (job.state, job.totals.preemptions) == (JobState.RECOVERING, 1)
    assert "job.closed" not in {event.kind for event in plan.events}
    assert cancel(replace(world, attempts={}), job.id, NOW).events[-1].kind == "job.closed"


def test_the_line_waits_for_the_last_machine() -> None:
    world = world_with(AttemptState.RUNNING)
    builder = PlanBuilder(world, NOW)
    [number] = world.attempts
    builder.end_attempt(number, EndReason.DONE)
    assert "job.closed" not in {event.kind for event in builder.plan().events}


def test_time_that_nothing_proves_is_not_part_of_it() -> None:
    world = world_with(AttemptState.RUNNING)
    [item] = world.attempts.values()
    known = replace(item, meter=replace(item.meter, until=NOW - timedelta(minutes=4)))
    _, plan = ended(replace(world, attempts={item.id: known}))
    assert next(iter(plan.jobs.values())).totals.ran == timedelta(minutes=5)


def whole_bill(amount: MicroUsd) -> Bill:
    return Bill(amount=amount, since=NOW - timedelta(days=1), until=NOW)


def without_on_demand(world: World) -> World:
    [item] = world.attempts.values()
    unknown = replace(item, quote=replace(item.quote, on_demand=None), meter=replace(item.meter, on_demand_rate=None))
    return replace(world, attempts={item.id: unknown})


def test_where_no_on_demand_price_is_known_nothing_is_said_of_savings() -> None:
    _, plan = ended(without_on_demand(world_with(AttemptState.RUNNING)))
    [job] = plan.jobs.values()
    assert job.totals.uncompared == job.spent == job.on_demand > 0
    assert "on demand" not in plan.events[-1].message
    assert {charge.on_demand for charge in plan.charges} == {None}


@every("known", [True, False])
def test_a_bill_that_is_lower_invents_no_savings(known: bool) -> None:
    before = world_with(AttemptState.RUNNING)
    world, plan = ended(before if known else without_on_demand(before))
    [item], [job] = plan.attempts.values(), plan.jobs.values()
    billed = MicroUsd(1_000)
    bill = whole_bill(billed)
    item = replace(item, bill=replace(item.bill, read=billed))
    corrected = compared(
        replace(world, jobs={job.id: job}), [Sharer(job=job, item=item, booked=plan.charges)], bill, NOW
    )
    assert [event.kind for event in corrected.events] == ["attempt.billed", "job.closed"]
    [after] = corrected.jobs.values()
    assert after.spent == billed
    assert after.on_demand == (job.on_demand if known else billed)
    assert after.totals.uncompared == (0 if known else billed)
    assert after.totals.estimated == 0
    assert "estimated" not in corrected.events[-1].message
    assert ("saved" in corrected.events[-1].message) is known


def test_a_credit_invents_no_savings_either() -> None:
    world = without_on_demand(world_with(AttemptState.RUNNING))
    [item] = world.attempts.values()
    paused, _ = settled(item, NOW, MicroUsdPerHour(0), None)
    builder = PlanBuilder(replace(world, attempts={item.id: paused}), NOW)
    builder.credit(item.id, spent(paused, NOW), "it was taken")
    after = builder.attempt(item.id)
    assert (after.meter.settled, after.on_demand_settled) == (0, 0)
    assert after.machine is not MachineState.GONE


@every(("billed", "cost", "estimated"), [(None, 1, True), (None, 0, False), (1, 1, False)])
def test_what_cost_nothing_or_is_billed_is_no_estimate(billed: int | None, cost: int, *, estimated: bool) -> None:
    [item] = world_with(AttemptState.RUNNING).attempts.values()
    item = replace(item, bill=replace(item.bill, believed=None if billed is None else MicroUsd(billed)))
    assert is_estimate(item, MicroUsd(cost)) is estimated


def test_a_job_whose_command_ended_between_two_reads_did_run() -> None:
    world = world_with(AttemptState.STARTING)
    said = report(seq=6, phase="done", exit_reason=EndReason.DONE, exit_code=0)
    after = applied(world, reconcile(world, {}, said, NOW))
    (job,) = after.jobs.values()
    assert job.state is JobState.SUCCEEDED
    words = closing_words(job.totals, MicroUsd(500_000), MicroUsd(0), 0, NEVER)
    assert words == "ran on 1 host, $0.50"
