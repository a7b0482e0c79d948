"""Which market a job with a deadline uses, and when it changes: whole decisions over small worlds."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final

import pytest

from spotd.core.deadlines import with_spot
from spotd.core.decide import decide
from spotd.core.domain.jobs import Job, Pacing
from spotd.core.domain.plan import Plan, applied
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.domain.world import VerdictKind, World
from spotd.core.kernel.outcomes import LaunchFailure, launch_refused
from spotd.core.pacer import DWELL
from spotd_jobs.spec.model import (
    CheckpointPolicy,
    Deadline,
    GpuAlternative,
    GpuSpeed,
    MarketChoice,
    PolicyName,
    Resources,
    Schedule,
    Window,
    Work,
)
from spotd_providers.contract.values import NO_GPU, Interruption, Market, MicroUsd, MicroUsdPerHour, Offer
from tests.cases import every
from tests.unit.core.builders import NOW, job, market, offer, shop_policy, world_with

_HOUR: Final = timedelta(hours=1)
_SPOT: Final = offer("spot", price=100_000)


def _sold(name: str = "sold", *, price: int = 400_000, **changes: Any) -> Offer:
    plain = {"market": Market.ON_DEMAND, "interruption": Interruption.NEVER, "on_demand_price": MicroUsdPerHour(price)}
    return offer(name, price=price, **{**plain, **changes})


def _due(
    hours: float, work: float = 20, market: MarketChoice | None = MarketChoice.AUTO, **changes: Any
) -> dict[str, Any]:
    """A job that is due so many hours from now and has so many hours of work."""
    policy, windows = changes.pop("policy", None), changes.pop("windows", {})
    gpu = changes.pop("gpu", (GpuAlternative(name="RTX_4090", count=1),))
    deadline = Deadline(at=NOW + hours * _HOUR)
    spec = {
        "schedule": Schedule(deadline=deadline, policy=policy, **windows),
        "work": Work(time=work * _HOUR) if work else Work(),
        "checkpoint": CheckpointPolicy(every=timedelta(minutes=15)),
        **changes.pop("spec", {}),
    }
    return {"spec": spec, "resources": Resources(gpu=gpu, market=market), **changes}


def _world(item: Job, **policy: Any) -> World:
    return World(policy=shop_policy(**policy), jobs={item.id: item}, attempts={}, intents={})


def _placed(plan: Plan) -> Market | None:
    return next((item.quote.offer.market for item in plan.attempts.values()), None)


@every(
    ("hours", "offers", "expected"),
    [
        (40, (_SPOT, _sold()), Market.SPOT),
        (40, (_sold(),), None),
        (22, (_sold(),), Market.ON_DEMAND),
        (22, (_SPOT, _sold()), Market.SPOT),
        (20.5, (_SPOT, _sold()), Market.ON_DEMAND),
        (40, (offer("spot", price=450_000), _sold()), Market.ON_DEMAND),  # spot costs more
        (20.5, (_SPOT,), Market.SPOT),  # better than nothing
        (20.5, (_SPOT, _sold(price=600_000)), Market.SPOT),  # the ceiling is $0.50
    ],
)
def test_a_job_takes_spot_waits_or_pays_for_on_demand_as_its_slack_asks(
    hours: float, offers: tuple[Offer, ...], expected: Market | None
) -> None:
    assert _placed(decide(_world(job(**_due(hours))), market(*offers), NOW)) is expected


def test_a_job_that_waits_says_how_much_slack_it_has_and_when_it_is_due() -> None:
    owner = job(**_due(40))
    plan = decide(_world(owner), market(_sold()), NOW)
    verdict = plan.verdicts[owner.id]
    assert (verdict.kind, plan.jobs[owner.id].state) == (VerdictKind.PACED, JobState.WAITING_PRICE)
    assert verdict.sentence == (
        "waits for spot: slack is 19.6 h beside a reserve of 2.0 h;"
        " due 2026-03-04 04:00 UTC, in 40.0 h; 20.0 h of work are left"
    )


@every("choice", [None, MarketChoice.SPOT])
def test_a_job_that_takes_spot_only_never_gets_on_demand_and_is_warned_once(choice: MarketChoice | None) -> None:
    owner = job(**_due(21, market=choice))
    world = _world(owner)
    plan = decide(world, market(_sold()), NOW)
    assert _placed(plan) is None
    [event] = [e for e in plan.events if e.kind == "job.slipping"]
    assert 'its market is not "auto"' in event.message
    assert "only 50 min of slack are left" in event.message
    again = decide(applied(world, plan), market(_sold()), NOW)
    assert [e for e in again.events if e.kind == "job.slipping"] == []


@every("choice", [MarketChoice.AUTO, MarketChoice.SPOT])
def test_a_job_of_a_range_of_machines_is_warned_once_however_many_numbers_are_tried(choice: MarketChoice) -> None:
    owner = job(**_due(21, market=choice))
    gangs = replace(owner.spec.resources, nodes=2, nodes_max=4)
    owner = replace(owner, spec=replace(owner.spec, resources=gangs))
    dear = market(_sold(price=9_000_000))
    sold = replace(dear, by_provider={name: replace(one, no_gangs="") for name, one in dear.by_provider.items()})
    plan = decide(_world(owner), sold, NOW)
    assert [e.kind for e in plan.events].count("job.slipping") == 1


@every(
    ("changes", "policy", "words"),
    [
        ({}, {}, "the ceiling holds over the deadline: on-demand is 1 x RTX_4090 at shop, on-demand, $0.6000/GPU-h"),
        ({"ceiling": 700_000, "budget": 20_000, "spent": 100}, {}, "the budget holds over the deadline"),
        ({"ceiling": 700_000}, {"budget_day": 1}, "the budget holds over the deadline"),
    ],
)
def test_ceiling_and_budgets_hold_over_the_deadline_and_it_is_said(
    changes: dict[str, Any], policy: dict[str, Any], words: str
) -> None:
    owner = job(**_due(21, **changes))
    plan = decide(_world(owner, **policy), market(_sold(price=600_000)), NOW)
    assert _placed(plan) is None
    if plan.jobs.get(owner.id, owner).state is not JobState.EXPIRED:
        [event] = [e for e in plan.events if e.kind == "job.slipping"]
        assert words in event.message
        assert words in plan.verdicts[owner.id].sentence


def test_without_known_work_the_deadline_only_ends_the_job() -> None:
    owner = job(**_due(2, work=0))
    plan = decide(_world(owner), market(offer("spot", price=450_000), _sold()), NOW)
    assert _placed(plan) is Market.ON_DEMAND  # the cheapest, as without a deadline
    assert "so how much is left is not known" in plan.verdicts[owner.id].sentence


def test_the_faster_machine_is_bought_when_the_cheaper_one_would_be_late() -> None:
    gpu = (GpuAlternative(name="RTX_4090", count=1), GpuAlternative(name="H100_SXM", count=1))
    speeds = (GpuSpeed(name="RTX_4090", ppm=400_000), GpuSpeed(name="H100_SXM", ppm=1_000_000))
    fast = _sold("fast", price=490_000, gpu="H100_SXM")
    owner = job(**_due(22, gpu=gpu, spec={"speed": speeds}))
    [item] = decide(_world(owner), market(_sold(price=100_000), fast), NOW).attempts.values()
    assert item.quote.offer.offer_id == "fast"


def test_a_slow_spot_machine_costs_more_than_a_fast_one_on_demand() -> None:
    gpu = (GpuAlternative(name="RTX_4090", count=1), GpuAlternative(name="H100_SXM", count=1))
    speeds = (GpuSpeed(name="RTX_4090", ppm=200_000), GpuSpeed(name="H100_SXM", ppm=1_000_000))
    fast = _sold("fast", price=490_000, gpu="H100_SXM")
    for price, expected in ((97_000, Market.SPOT), (99_000, Market.ON_DEMAND)):
        owner = job(**_due(60, gpu=gpu, spec={"speed": speeds}))
        assert _placed(decide(_world(owner), market(offer("slow", price=price), fast), NOW)) is expected


def test_only_time_in_windows_counts() -> None:
    """40 hours away, but open for two nights of eight hours: too little even for on-demand."""
    nights = {"windows": (Window(days=tuple(range(7)), start_min=0, end_min=480),), "timezone": "UTC"}
    owner = job(**_due(40, windows=nights))
    plan = decide(_world(owner), market(_sold()), NOW)
    assert any(e.kind == "job.slipping" for e in plan.events)


def _running(item: Offer, hours: float, *, ran: timedelta = _HOUR, saved: bool = True, **changes: Any) -> World:
    """A job whose machine of this offer has run for so long, and saved a moment ago."""
    base = world_with(AttemptState.RUNNING)
    [old] = base.attempts.values()
    began = NOW - ran
    described = job(**_due(hours, **changes))
    owner = replace(described, state=JobState.RUNNING, attempts_made=1, pacing=changes.get("pacing", Pacing()))
    quoted = replace(old.quote, offer=item, price=replace(old.quote.price, total=item.gpu_price))
    held = replace(
        old,
        quote=quoted,
        launched_at=began,
        running_at=NOW if saved else began,
        meter=replace(old.meter, since=began, rate=item.gpu_price),
    )
    return replace(base, jobs={owner.id: owner}, attempts={held.id: held})


def _order(world: World, *offers: Offer, at: datetime = NOW) -> tuple[EndReason, str] | None:
    plan = decide(world, market(*offers, at=at), at)
    [item] = applied(world, plan).attempts.values()
    return None if item.stop is None else (item.stop.reason, item.stop.detail)


def test_a_spot_machine_is_kept_while_its_loss_could_be_borne_and_left_when_it_could_not() -> None:
    assert _order(_running(_SPOT, 22), _SPOT, _sold()) is None
    order = _order(_running(_SPOT, 20.5), _SPOT, _sold())
    assert order is not None
    assert order[0] is EndReason.MIGRATED
    assert "no time is left to lose" in order[1]
    # with nowhere to go to it stays
    assert _order(_running(_SPOT, 20.5), _SPOT) is None
    assert _order(_running(_SPOT, 20.5, market=MarketChoice.SPOT), _SPOT, _sold()) is None


@every(
    ("budget", "policy", "is_left"),
    [
        pytest.param(200_000, {}, False, id="half an hour of on-demand"),
        pytest.param(7_900_000, {}, False, id="nearly all of the work"),
        pytest.param(9_000_000, {}, True, id="all of the work"),
        pytest.param(None, {"budget_day": 4_000_000}, False, id="a day that ends in twelve hours"),
        pytest.param(None, {"budget_day": 5_500_000}, True, id="two days"),
        pytest.param(None, {"budget_month": 7_000_000}, False, id="a month"),
        pytest.param(None, {"budget_month": 9_000_000}, True, id="a month that carries it"),
    ],
)
def test_spot_is_not_left_for_on_demand_that_the_budget_carries_no_further_than_spot(
    budget: int | None, policy: dict[str, Any], is_left: bool
) -> None:
    world = _running(_SPOT, 20.5, budget=budget)
    world = replace(world, policy=replace(world.policy, **policy))
    assert (_order(world, _SPOT, _sold()) is not None) is is_left
    owner = job(**_due(20.5, budget=budget))
    assert _placed(decide(_world(owner, **policy), market(_SPOT, _sold()), NOW)) is (
        Market.ON_DEMAND if is_left else Market.SPOT
    )
    if not is_left:
        [verdict] = decide(world, market(_SPOT, _sold()), NOW).verdicts.values()
        assert "the budget holds over the deadline: 20.0 h of work on-demand cost about $8" in verdict.sentence
        dear = offer("spot", price=450_000)
        assert _order(_running(dear, 20.5, budget=budget), dear, _sold()) is not None or budget == 200_000


def test_no_spot_machine_is_launched_that_would_have_to_be_left_before_its_first_save() -> None:
    until_saved = timedelta(minutes=14.5 + 15)
    chosen = set()
    for tenth in range(205, 240):
        hours = tenth / 10
        placed = _placed(decide(_world(job(**_due(hours))), market(_SPOT, _sold()), NOW))
        chosen.add(placed)
        later = _running(_SPOT, hours - until_saved / _HOUR, ran=timedelta(minutes=15), saved=False)
        assert placed is not Market.SPOT or _order(later, _SPOT, _sold()) is None, hours
    assert chosen == {Market.SPOT, Market.ON_DEMAND}


def test_the_loss_of_a_machine_ends_a_run_of_spot_although_others_can_be_had() -> None:
    before = Pacing(up_since=NOW - _HOUR, losses=1)
    assert with_spot(before, NOW, is_up=True, recoveries=1) is before
    after = with_spot(before, NOW, is_up=True, recoveries=2)
    assert after == Pacing(up_since=NOW, past_up=_HOUR, past_runs=1, losses=2)
    stepped_back = with_spot(before, NOW - 9 * _HOUR, is_up=False, recoveries=1)
    assert (stepped_back.past_up, stepped_back.past_runs) == (timedelta(0), 1)


def test_an_outbid_machine_that_is_held_is_no_spot_that_is_up() -> None:
    world = _running(_SPOT, 22.2)
    world = replace(world, policy=replace(world.policy, hold_max=_HOUR))
    assert _order(world, _SPOT, _sold()) is None
    [item] = world.attempts.values()
    held = replace(item, bidding=replace(item.bidding, held_since=NOW - timedelta(minutes=1)))
    order = _order(replace(world, attempts={item.id: held}), _SPOT, _sold())
    assert order is not None
    assert (order[0], "spot is down" in order[1]) == (EndReason.MIGRATED, True)


def test_a_job_without_a_gpu_pays_for_on_demand_too() -> None:
    plain: dict[str, Any] = {"gpu": NO_GPU, "gpu_count": 0, "cpus": 8.0, "memory_mb": 32_000}
    owner = job(**{**_due(20.5), "resources": Resources(gpu_count=0, cpus=4, market=MarketChoice.AUTO)})
    assert _placed(decide(_world(owner), market(_sold(**plain)), NOW)) is Market.ON_DEMAND


def test_what_is_not_saved_counts_as_lost() -> None:
    """An hour that no checkpoint holds: on-demand would have to begin with it."""
    assert _order(_running(_SPOT, 20.5, ran=4 * _HOUR, saved=False), _SPOT, _sold()) is not None
    assert _order(_running(_SPOT, 24, ran=4 * _HOUR, saved=False), _SPOT, _sold()) is None


def test_on_demand_is_left_for_spot_that_seems_to_last_after_its_dwell() -> None:
    sold = _sold()
    long_up = Pacing(up_since=NOW - 5 * _HOUR)
    world = _running(sold, 40, ran=2 * _HOUR, saved=False, pacing=long_up)
    order = _order(world, _SPOT, sold)
    assert order is not None
    assert order[0] is EndReason.MIGRATED
    assert "back to spot" in order[1]
    young = _running(sold, 40, ran=DWELL - timedelta(seconds=1), saved=False, pacing=long_up)
    assert _order(young, _SPOT, sold) is None
    assert _order(world, sold) is None
    assert _order(world, offer("spot", price=400_000), sold) is None


@every(
    ("limits", "is_left"),
    [
        pytest.param({"budget": 860_000}, False, id="a job for which spot cannot begin"),
        pytest.param({"budget": 5_000_000}, True, id="a job"),
        pytest.param({"budget_day": 60_000}, False, id="a day for which spot cannot begin"),
        pytest.param({"budget_day": 400_000}, True, id="a day that carries the one in place of the other"),
    ],
)
def test_on_demand_is_left_only_for_spot_that_the_budgets_carry(limits: dict[str, Any], *, is_left: bool) -> None:
    """It cost $0.80 so far, of which the day began with nothing."""
    world = _running(
        _sold(), 40, ran=2 * _HOUR, saved=False, pacing=Pacing(up_since=NOW - 5 * _HOUR), budget=limits.get("budget")
    )
    [item], [owner] = world.attempts.values(), world.jobs.values()
    item = replace(item, meter=replace(item.meter, since=NOW))
    owner = replace(owner, spent=MicroUsd(800_000))
    policy = replace(world.policy, budget_day=limits.get("budget_day"))
    world = replace(world, attempts={item.id: item}, jobs={owner.id: owner}, policy=policy)
    order = _order(world, offer("spot", price=300_000), _sold())
    assert (order is not None) is is_left, order


def test_a_job_that_moves_is_neither_blamed_nor_counted_as_lost() -> None:
    traits = EndReason.MIGRATED.traits
    assert (traits.next_state, traits.is_recovery, traits.is_failed_start) == (JobState.RECOVERING, False, False)


def test_a_named_policy_decides() -> None:
    assert _placed(decide(_world(job(**_due(40, policy=PolicyName.ON_DEMAND))), market(_SPOT, _sold()), NOW)) is (
        Market.ON_DEMAND
    )
    assert _placed(decide(_world(job(**_due(22, policy=PolicyName.GREEDY))), market(_sold()), NOW)) is None


def test_up_runs_of_spot_are_remembered_on_the_job() -> None:
    owner = job(**_due(60))
    world, now = _world(owner), NOW
    for offers, lasts in (((_SPOT,), 30), ((), 10), ((_SPOT,), 5)):
        paused = replace(world, policy=replace(world.policy, machines_max=8, launches_paused=""))
        plan = decide(paused, market(*offers, _sold(), at=now), now)
        world = replace(world, jobs={owner.id: replace(owner, pacing=applied(paused, plan).jobs[owner.id].pacing)})
        now += timedelta(minutes=lasts)
    pacing = world.jobs[owner.id].pacing
    assert (pacing.up_since, pacing.past_up, pacing.past_runs) == (
        NOW + timedelta(minutes=40),
        timedelta(minutes=30),
        1,
    )


@every("hours", [-1e5, 1e-9, 1e6])
@every("work", [1e-3, 1e6])
def test_no_figure_quarantines_a_job(hours: float, work: float) -> None:
    for world in (_world(job(**_due(hours, work=work))), _running(_SPOT, hours, work=work), _running(_sold(), hours)):
        plan = decide(world, market(_SPOT, _sold()), NOW)
        assert not [e for e in plan.events if "quarantin" in e.kind or "contained" in e.kind]


def test_a_job_whose_command_has_ended_is_moved_nowhere() -> None:
    world = _running(_SPOT, 20.5, ran=4 * _HOUR, saved=False)
    assert _order(world, _SPOT, _sold()) is not None
    [item] = world.attempts.values()
    uploading = replace(world, attempts={item.id: replace(item, phase="upload")})
    assert _order(uploading, _SPOT, _sold()) is None


def _refused(*sold: Offer, at: datetime = NOW, hours: float = 20.5) -> World:
    """A job that has no time to lose, after launches of these machines that were refused."""
    world = _world(job(**_due(hours)))
    for one in sold:
        plan = decide(world, market(one, at=at), at)
        (attempt,) = plan.attempts
        world = applied(world, plan)
        world = applied(world, launch_refused(world, attempt, LaunchFailure.OFFER_GONE, "it is not for sale", at))
        gone = {i: item for i, item in world.attempts.items() if item.state.counts}
        owner = replace(world.jobs[attempt.job], not_before=None)
        world = replace(world, attempts=gone, intents={}, jobs={owner.id: owner})
    return world


def test_on_demand_that_is_listed_and_not_sold_keeps_no_job_from_spot() -> None:
    later = NOW + timedelta(minutes=4)
    refused = _refused(_sold())
    assert _placed(decide(_refused(), market(_SPOT, _sold(), at=later), later)) is Market.ON_DEMAND
    assert _placed(decide(refused, market(_SPOT, _sold(), at=later), later)) is Market.SPOT
    other = _sold("other", price=420_000)
    assert _placed(decide(refused, market(_SPOT, _sold(), other, at=later), later)) is Market.ON_DEMAND
    assert _placed(decide(refused, market(_sold(), at=later), later)) is Market.ON_DEMAND, "nothing else is left"


def test_spot_is_not_left_for_on_demand_that_refused_a_launch_minutes_ago() -> None:
    world = _running(_SPOT, 20.5)
    assert [a.stop is not None for a in decide(world, market(_SPOT, _sold()), NOW).attempts.values()] == [True]
    refused = replace(world, cooldowns=_refused(_sold(), at=NOW - timedelta(minutes=10)).cooldowns)
    assert [a for a in decide(refused, market(_SPOT, _sold()), NOW).attempts.values() if a.stop is not None] == []
