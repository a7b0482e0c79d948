"""A job waits for its owner's machines for as long as is stated before one is rented, where one can be expected."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from spotd.core.decide import decide
from spotd.core.domain.attempts import MachineState
from spotd.core.domain.cooldowns import Cooldown, CooldownScope
from spotd.core.domain.intents import JobId
from spotd.core.domain.jobs import ArrayTask, Job, Pacing
from spotd.core.domain.market import MarketSnapshot, ProviderOffers, build_offer_index
from spotd.core.domain.plan import Plan, applied
from spotd.core.domain.policy import Policy
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.domain.world import VerdictKind, World
from spotd.core.own_first import EXPECTED_FOR
from spotd.core.plan_builder import PlanBuilder
from spotd.core.requests import retry
from spotd.core.timeline import redated
from spotd_jobs.spec.model import Deadline, GpuAlternative, MarketChoice, Resources, Schedule, Window, Work
from spotd_providers.contract.values import (
    HostId,
    Interruption,
    Market,
    MicroUsdPerHour,
    Offer,
    OfferId,
    PoolId,
    ProviderName,
)
from tests.cases import every
from tests.unit.core.builders import MINUTE, NOW, SHOP, job, offer, shop_policy, world_with
from tests.unit.core.decision.test_moves import is_moved, move, running
from tests.unit.core.ranking.test_remaining_work import saved

HOUR = timedelta(hours=1)
HOME = ProviderName("home")
KIND = ("RTX_4090", 1)
FIRST = job().id
RENTED = offer("rented", price=300_000)


def titan(price: int = 0, **changes: Any) -> Offer:
    """An own machine."""
    return replace(
        offer("titan", price=price),
        provider=HOME,
        host_id=HostId("titan"),
        pool=PoolId("titan"),
        market=Market.ON_DEMAND,
        interruption=Interruption.NOTICE,
        on_demand_price=MicroUsdPerHour(price),
        **changes,
    )


def policy(**changes: Any) -> Policy:
    base = shop_policy()
    own = replace(base.providers[SHOP], name=HOME, is_own=True)
    return replace(base, providers={SHOP: base.providers[SHOP], HOME: own}, **({"rent_after": 2 * HOUR} | changes))


def shown(
    *offers: Offer,
    at: datetime = NOW,
    seen: timedelta | None = HOUR,
    kind: tuple[str, int] = KIND,
    home_at: datetime | None = None,
    error: str = "",
) -> MarketSnapshot:
    """What both providers offer; an own machine of this kind was seen so long before."""
    by_name = {name: [one for one in offers if one.provider == name] for name in (SHOP, HOME)}
    return MarketSnapshot(
        by_provider={
            name: ProviderOffers(
                provider=name,
                offer_index=build_offer_index(tuple(found)),
                at=home_at if name == HOME and home_at is not None else at,
                error=error if name == HOME else "",
                sells_spot=name == SHOP,
            )
            for name, found in by_name.items()
        },
        seen={} if seen is None else {HOME: {kind: NOW - seen}},
    )


def wanting(rent_after: timedelta | None = None, market: MarketChoice | None = None, **changes: Any) -> Job:
    wanted = Resources(gpu=(GpuAlternative(name="RTX_4090", count=1),), rent_after=rent_after, market=market)
    return job(resources=wanted, **changes)


def alone(owner: Job, rules: Policy | None = None) -> World:
    return World(policy=rules or policy(), jobs={owner.id: owner}, attempts={}, intents={})


def decided(world: World, *offers: Offer, after: timedelta = timedelta(0), **more: Any) -> tuple[World, Plan]:
    now = NOW + after
    plan = decide(world, shown(*offers, at=now, **more), now)
    return applied(world, plan), plan


def taken(plan: Plan) -> list[str]:
    new = (item for item in plan.attempts.values() if item.state is AttemptState.INTENDED)
    return [item.quote.offer.provider for item in new]


def test_a_free_own_machine_is_taken_at_once_although_a_rented_one_is_cheaper() -> None:
    _, plan = decided(alone(wanting()), RENTED, titan(400_000))
    assert taken(plan) == [HOME]
    assert plan.verdicts[FIRST].sentence.startswith(
        "taking 1 x RTX_4090 at home, own, $0.4000/GPU-h, ceiling $0.5000/GPU-h: the best that fits now"
    )
    [item] = plan.attempts.values()
    assert item.quote.is_own
    assert item.quote.on_demand == 300_000, "what renting would have cost"


def test_one_is_rented_once_the_job_has_waited_for_so_long_and_not_a_moment_sooner() -> None:
    world, plan = decided(alone(wanting()), RENTED)
    verdict = plan.verdicts[FIRST]
    assert taken(plan) == []
    assert (verdict.kind, verdict.until) == (VerdictKind.OWN, NOW + 2 * HOUR)
    assert verdict.sentence == (
        "waits for an own machine: 1 x RTX_4090 at home, last free 2026-03-02 11:00 UTC; one is rented from"
        " 2026-03-02 14:00 UTC on, after 2 h 0 min (rent_after)"
    )
    assert world.jobs[FIRST].pacing.own_wanted_since == NOW
    world, plan = decided(world, RENTED, after=2 * HOUR - timedelta(seconds=1))
    assert taken(plan) == []
    world, plan = decided(world, RENTED, after=2 * HOUR)
    assert taken(plan) == [SHOP]
    assert plan.verdicts[FIRST].sentence.endswith("it waited 2 h 0 min for an own machine, so one may be rented")


def test_a_decision_comes_when_the_wait_is_over() -> None:
    _, plan = decided(alone(wanting(20 * timedelta(seconds=1))), RENTED)
    assert plan.wake_at == NOW + timedelta(seconds=20)


def test_the_jobs_own_time_goes_before_that_of_the_config() -> None:
    assert taken(decided(alone(wanting(timedelta(0))), RENTED)[1]) == [SHOP]
    world, plan = decided(alone(wanting(HOUR), policy(rent_after=timedelta(0))), RENTED)
    assert taken(plan) == []
    assert taken(decided(world, RENTED, after=HOUR)[1]) == [SHOP]


def test_without_a_time_the_cheapest_is_taken_whoever_owns_it() -> None:
    rules = policy(rent_after=timedelta(0))
    assert taken(decided(alone(wanting(), rules), RENTED, titan(400_000))[1]) == [SHOP]
    assert taken(decided(alone(wanting(), rules), RENTED, titan(200_000))[1]) == [HOME]


@every("market", list(MarketChoice))
def test_an_own_machine_is_taken_whatever_market_the_job_asks_for(market: MarketChoice) -> None:
    for rules in (policy(), policy(rent_after=timedelta(0))):
        assert taken(decided(alone(wanting(market=market), rules), RENTED, titan())[1]) == [HOME]


def test_after_the_wait_an_own_machine_is_still_taken_where_it_is_cheaper() -> None:
    world, _ = decided(alone(wanting()), RENTED)
    assert taken(decided(world, RENTED, titan(), after=3 * HOUR)[1]) == [HOME]


@every(
    "more",
    [
        pytest.param({"seen": None}, id="never seen"),
        pytest.param({"seen": EXPECTED_FOR + MINUTE}, id="not seen for long"),
        pytest.param({"kind": ("H100_SXM", 1)}, id="another GPU"),
        pytest.param({"kind": ("RTX_4090", 2)}, id="another number of them"),
    ],
)
def test_a_machine_that_cannot_be_expected_is_not_waited_for(more: dict[str, Any]) -> None:
    _, plan = decided(alone(wanting()), RENTED, **more)
    assert taken(plan) == [SHOP]
    assert plan.verdicts[FIRST].sentence.endswith("no own machine that it could use was seen, so none is waited for")


@every(
    "own",
    [
        pytest.param(titan(disk_gb_max=1), id="too little disk"),
        pytest.param(titan(500_001), id="above the ceiling"),
    ],
)
def test_an_own_machine_on_offer_that_the_job_cannot_use_is_not_waited_for(own: Offer) -> None:
    assert taken(decided(alone(wanting()), RENTED, own)[1]) == [SHOP]


def test_a_provider_that_the_job_excludes_or_the_config_disables_is_not_waited_for() -> None:
    owner = wanting()
    only = replace(owner, spec=replace(owner.spec, resources=replace(owner.spec.resources, providers=(SHOP,))))
    assert taken(decided(alone(only), RENTED)[1]) == [SHOP]
    rules = policy()
    off = replace(rules, providers={**rules.providers, HOME: replace(rules.providers[HOME], unusable="disabled")})
    assert taken(decided(alone(owner, off), RENTED)[1]) == [SHOP]
    rented = replace(rules, providers={**rules.providers, HOME: replace(rules.providers[HOME], is_own=False)})
    assert taken(decided(alone(owner, rented), RENTED)[1]) == [SHOP]


@every("why", ["named alone", "nothing else is enabled"])
def test_a_job_that_can_rent_nothing_is_not_said_to_rent_later(why: str) -> None:
    owner, rules = wanting(), policy()
    if why == "named alone":
        owner = replace(owner, spec=replace(owner.spec, resources=replace(owner.spec.resources, providers=(HOME,))))
    else:
        shut = replace(rules.providers[SHOP], unusable="shop is disabled in the config")
        rules = replace(rules, providers={**rules.providers, SHOP: shut})
    for after in (timedelta(0), 3 * HOUR):
        world, plan = decided(alone(owner, rules), RENTED, after=after)
        assert taken(plan) == []
        assert "rented" not in plan.verdicts[FIRST].sentence
        assert world.jobs[FIRST].state is JobState.WAITING_PRICE
    assert taken(decided(alone(owner, rules), RENTED, titan())[1]) == [HOME]


def test_a_provider_that_does_not_answer_is_waited_for_and_named() -> None:
    _, plan = decided(alone(wanting()), RENTED, titan(), home_at=NOW - HOUR, error="no route to host")
    assert taken(plan) == []
    assert "at home, prices are 3600 s old: no route to host; one is rented" in plan.verdicts[FIRST].sentence


def test_a_provider_that_never_answered_is_waited_for_since_nothing_is_known_of_it() -> None:
    """As at the first start, where a market answers before the own host does."""
    _, plan = decided(alone(wanting()), RENTED, seen=None, home_at=NOW - HOUR, error="no route to host")
    assert taken(plan) == []
    assert "waits for an own machine: home, of which nothing is known yet: prices are" in plan.verdicts[FIRST].sentence
    assert taken(decided(alone(wanting()), RENTED, seen=None)[1]) == [SHOP], "it answers, and has none"


def test_an_own_machine_that_cools_down_is_waited_for() -> None:
    cooling = Cooldown(
        provider=HOME,
        scope=CooldownScope.OFFER,
        subject="titan",
        until=NOW + 5 * MINUTE,
        reason="refused",
    )
    world = replace(alone(wanting()), cooldowns=(cooling,))
    _, plan = decided(world, RENTED, titan())
    assert taken(plan) == []
    assert "at home, offer was refused a moment ago; one is rented" in plan.verdicts[FIRST].sentence


def test_a_machine_that_another_job_has_is_waited_for_although_it_was_never_seen_free() -> None:
    base = world_with(AttemptState.RUNNING)
    [item] = base.attempts.values()
    item = replace(item, quote=replace(item.quote, offer=titan(), is_own=True), machine=MachineState.LIVE)
    owner = replace(wanting(), id=JobId("j9"))
    world = replace(base, policy=policy(), attempts={item.id: item}, jobs={**base.jobs, owner.id: owner})
    _, plan = decided(world, RENTED, seen=None)
    assert taken(plan) == []
    assert "1 x RTX_4090 at home, where job1 runs; one is rented" in plan.verdicts[owner.id].sentence


def test_a_machine_that_another_job_has_is_waited_for_although_a_dear_one_of_its_kind_is_free() -> None:
    """Found by the world of seed 5000001."""
    base = world_with(AttemptState.RUNNING)
    [item] = base.attempts.values()
    item = replace(item, quote=replace(item.quote, offer=titan(), is_own=True), machine=MachineState.LIVE)
    owner = replace(wanting(), id=JobId("j9"))
    world = replace(base, policy=policy(), attempts={item.id: item}, jobs={**base.jobs, owner.id: owner})
    dear = replace(titan(9_000_000), offer_id=OfferId("dear"), host_id=HostId("dear"))
    _, plan = decided(world, RENTED, dear)
    assert taken(plan) == []
    assert "1 x RTX_4090 at home, where job1 runs; one is rented" in plan.verdicts[owner.id].sentence


def test_a_machine_is_waited_for_of_which_another_job_has_a_part_although_a_dear_one_of_its_kind_is_free() -> None:
    """Drawn world 8000186: one card of four was taken, and the others of that host left the list with it."""
    base = world_with(AttemptState.RUNNING)
    [item] = base.attempts.values()
    item = replace(item, quote=replace(item.quote, offer=titan(), is_own=True), machine=MachineState.LIVE)
    four = Resources(gpu=(GpuAlternative(name="RTX_4090", count=4),))
    owner = replace(job(resources=four), id=JobId("j9"))
    world = replace(base, policy=policy(), attempts={item.id: item}, jobs={**base.jobs, owner.id: owner})
    dear = replace(titan(9_000_000), offer_id=OfferId("dear"), host_id=HostId("dear"), gpu_count=4)
    rented = offer("rented", price=800_000, gpu_count=4)
    for host, waits in (("titan", True), ("another", False)):
        kinds = frozenset({("RTX_4090", 1), ("RTX_4090", 4)})
        page = replace(shown(rented, dear, kind=("RTX_4090", 4)), of_hosts={(HOME, HostId(host)): kinds})
        plan = decide(world, page, NOW)
        assert (taken(plan) == []) is waits
        assert ("4 x RTX_4090 at home, where job1 runs; one is rented" in plan.verdicts[owner.id].sentence) is waits


def test_a_reload_counts_at_once_and_keeps_since_when_the_job_waits() -> None:
    world, _ = decided(alone(wanting()), RENTED)
    longer = replace(world, policy=policy(rent_after=5 * HOUR))
    longer, plan = decided(longer, RENTED, after=3 * HOUR)
    assert (taken(plan), plan.verdicts[FIRST].until) == ([], NOW + 5 * HOUR)
    shorter = replace(longer, policy=policy(rent_after=HOUR))
    assert taken(decided(shorter, RENTED, after=3 * HOUR + MINUTE)[1]) == [SHOP]


# Deadlines.


def due(hours: float, work: timedelta | None = 2 * HOUR, market: MarketChoice | None = None) -> Job:
    schedule = Schedule(deadline=Deadline(at=NOW + hours * HOUR))
    return wanting(market=market, spec={"schedule": schedule, "work": Work(time=work)})


@every("market", [None, *MarketChoice])
def test_a_deadline_that_would_be_missed_overrules_the_wait(market: MarketChoice | None) -> None:
    fixed = replace(RENTED, offer_id=OfferId("f"), host_id=HostId("f"), market=Market.ON_DEMAND)
    _, plan = decided(alone(due(2.2, market=market)), RENTED, fixed)
    assert taken(plan) == [SHOP]
    assert "its deadline leaves no time to wait for an own machine" in plan.verdicts[FIRST].sentence


def test_a_deadline_shortens_the_wait_and_says_so() -> None:
    world, plan = decided(alone(due(3.5)), RENTED)
    verdict = plan.verdicts[FIRST]
    assert verdict.kind is VerdictKind.OWN
    assert verdict.until is not None
    assert NOW + 30 * MINUTE < verdict.until < NOW + 1.5 * HOUR
    assert "when its deadline leaves no more time" in verdict.sentence
    assert taken(decided(world, RENTED, after=verdict.until - NOW)[1]) == [SHOP]


def test_a_deadline_that_is_far_changes_nothing() -> None:
    assert decided(alone(due(48)), RENTED)[1].verdicts[FIRST].until == NOW + 2 * HOUR


def test_a_deadline_of_unknown_work_cannot_be_judged_so_nothing_is_waited_for() -> None:
    assert taken(decided(alone(due(48, work=None)), RENTED)[1]) == [SHOP]


# Losses, retries, clocks, windows, arrays.


def ended(*, is_own: bool, has_saved: bool = True) -> Pacing:
    base = world_with(AttemptState.RUNNING)
    [item] = base.attempts.values()
    points = (saved(1, at=NOW - MINUTE),) if has_saved else ()
    owner = replace(
        wanting(),
        state=JobState.RUNNING,
        attempts_made=1,
        pacing=Pacing(own_wanted_since=NOW - 5 * HOUR),
        checkpoints=points,
    )
    item = replace(item, quote=replace(item.quote, is_own=is_own))
    world = replace(base, policy=policy(), jobs={owner.id: owner}, attempts={item.id: item})
    builder = PlanBuilder(world, NOW)
    builder.end_attempt(item.id, EndReason.PREEMPTED)
    return builder.plan().jobs[owner.id].pacing


def test_a_job_waits_anew_after_its_own_machine_got_it_further_and_only_then() -> None:
    assert ended(is_own=True).own_wanted_since is None
    assert ended(is_own=False).own_wanted_since == NOW - 5 * HOUR, "each lost spot machine would cost the wait again"
    assert ended(is_own=True, has_saved=False).own_wanted_since == NOW - 5 * HOUR


def test_a_job_that_is_tried_again_waits_anew() -> None:
    owner = replace(wanting(), state=JobState.FAILED, ended_at=NOW, pacing=Pacing(own_wanted_since=NOW - 9 * HOUR))
    found = retry(alone(owner), owner, NOW)
    assert isinstance(found, Plan)
    assert found.jobs[owner.id].pacing.own_wanted_since is None


def test_a_clock_that_was_set_changes_no_wait() -> None:
    world, _ = decided(alone(wanting()), RENTED)
    for step in (-400 * timedelta(days=1), 8 * HOUR):
        moved = applied(world, redated(world, step, NOW + HOUR))
        seen = {"seen": -step}
        assert taken(decided(moved, RENTED, after=step + 1.9 * HOUR, **seen)[1]) == []
        assert taken(decided(moved, RENTED, after=step + 2 * HOUR, **seen)[1]) == [SHOP]


def test_a_wait_that_began_in_the_future_begins_now() -> None:
    owner = wanting(pacing=Pacing(own_wanted_since=NOW + 7000 * timedelta(days=365)))
    world, plan = decided(alone(owner), RENTED)
    assert taken(plan) == []
    assert world.jobs[owner.id].pacing.own_wanted_since == NOW


def test_only_time_in_windows_counts() -> None:
    """It opens for forty minutes each day."""
    daily = Schedule(windows=(Window(days=tuple(range(7)), start_min=720, end_min=760),), timezone="UTC")
    world, plan = decided(alone(wanting(45 * MINUTE, spec={"schedule": daily})), RENTED)
    assert plan.verdicts[FIRST].until is None
    assert "within its windows, of which 45 min are left" in plan.verdicts[FIRST].sentence
    assert taken(decided(world, RENTED, after=24 * HOUR + 4 * MINUTE)[1]) == []
    assert taken(decided(world, RENTED, after=24 * HOUR + 5 * MINUTE)[1]) == [SHOP]


def test_the_wait_begins_once_nothing_but_the_market_holds_the_job_back() -> None:
    world, _ = decided(alone(wanting(not_before=NOW + 5 * MINUTE, attempts_made=1)), RENTED)
    assert world.jobs[FIRST].pacing.own_wanted_since is None


def test_the_jobs_of_an_array_wait_together() -> None:
    tasks = [
        replace(wanting(), id=JobId(f"j{n}"), name=f"a-{n}", array=ArrayTask(id=JobId("a"), name="a", index=n, count=3))
        for n in range(3)
    ]
    world = World(policy=policy(), jobs={one.id: one for one in tasks}, attempts={}, intents={})
    own = [replace(titan(), offer_id=OfferId("t0"))]
    world, plan = decided(world, RENTED, *own)
    assert taken(plan) == [HOME]
    others = [replace(RENTED, offer_id=OfferId(f"f{n}"), host_id=HostId(f"h{n}")) for n in range(3)]
    assert sorted(taken(decided(world, *others, after=2 * HOUR)[1])) == [SHOP, SHOP]


# What runs on an own machine is not left for a rented one.


@every("is_own", [True, False])
def test_a_job_on_an_own_machine_never_moves_to_a_rented_one(*, is_own: bool) -> None:
    world = running()
    [item] = world.attempts.values()
    item = replace(item, quote=replace(item.quote, is_own=is_own))
    world = replace(world, policy=replace(world.policy, rent_after=HOUR), attempts={item.id: item})
    assert is_moved(move(world)) is not is_own
    world = replace(world, policy=replace(world.policy, rent_after=timedelta(0)))
    assert is_moved(move(world)), "without rent_after a price is a price"


@every("rent_after", [HOUR, timedelta(0)])
def test_a_job_with_a_deadline_leaves_its_own_machine_for_no_spot_machine(rent_after: timedelta) -> None:
    world = running(hours=5, schedule=Schedule(deadline=Deadline(at=NOW + 90 * HOUR)), work=Work(time=20 * HOUR))
    [item], [owner] = world.attempts.values(), world.jobs.values()
    wanted = replace(owner.spec.resources, market=MarketChoice.AUTO)
    owner = replace(owner, spec=replace(owner.spec, resources=wanted), pacing=Pacing(up_since=NOW - 9 * HOUR))
    item = replace(item, quote=replace(item.quote, offer=titan(400_000), is_own=True))
    rules = policy(rent_after=rent_after)
    world = replace(world, policy=rules, attempts={item.id: item}, jobs={owner.id: owner})
    plan = decide(world, shown(offer("o2", price=20_000)), NOW)
    stops = [one.stop is not None for one in plan.attempts.values()] or [False]
    assert stops == [rent_after == timedelta(0)]


@every(("starts", "expected"), [(0, SHOP), (2, SHOP), (3, None)])
def test_own_machines_that_start_no_several_at_once_are_not_waited_for(
    starts: int, expected: ProviderName | None
) -> None:
    several = wanting()
    several = replace(several, spec=replace(several.spec, resources=replace(several.spec.resources, nodes=3)))
    market = shown(RENTED)
    sellers = {
        SHOP: replace(market.by_provider[SHOP], no_gangs=""),
        HOME: replace(market.by_provider[HOME], no_gangs="" if starts else "no", nodes_max=max(1, starts)),
    }
    plan = decide(alone(several), replace(market, by_provider=sellers), NOW)
    assert taken(plan) == ([] if expected is None else [expected])


@every("starts", [2, 3, 4])
def test_fewer_own_machines_of_a_range_come_before_more_rented_ones(starts: int) -> None:
    ranged = wanting()
    wanted = replace(ranged.spec.resources, nodes=2, nodes_max=4)
    ranged = replace(ranged, spec=replace(ranged.spec, resources=wanted))

    def selling(*offers: Offer, at: datetime = NOW) -> MarketSnapshot:
        market = shown(*offers, at=at)
        sellers = {
            SHOP: replace(market.by_provider[SHOP], no_gangs=""),
            HOME: replace(market.by_provider[HOME], no_gangs="", nodes_max=starts),
        }
        return replace(market, by_provider=sellers)

    (item,) = decide(alone(ranged), selling(RENTED, titan()), NOW).attempts.values()
    assert (item.provider, item.quote.offer.nodes) == (HOME, starts)
    waits = decide(alone(ranged), selling(RENTED), NOW)
    assert taken(waits) == []
    assert waits.verdicts[FIRST].kind is VerdictKind.OWN
    later = NOW + 3 * HOUR
    (item,) = decide(applied(alone(ranged), waits), selling(RENTED, at=later), later).attempts.values()
    assert (item.provider, item.quote.offer.nodes) == (SHOP, 4)


def test_an_own_gang_is_compared_with_as_many_rented_machines() -> None:
    ranged = wanting()
    wanted = replace(ranged.spec.resources, nodes=2, nodes_max=4)
    ranged = replace(ranged, spec=replace(ranged.spec, resources=wanted))
    market = shown(RENTED, titan())
    able = {name: replace(one, no_gangs="", nodes_max=4) for name, one in market.by_provider.items()}
    (own,) = decide(alone(ranged), replace(market, by_provider=able), NOW).attempts.values()
    assert (own.provider, own.quote.offer.nodes) == (HOME, 4)
    four = replace(ranged, spec=replace(ranged.spec, resources=wanted.of(4)))
    rented = replace(market, by_provider={SHOP: able[SHOP]})
    (beside,) = decide(alone(four, policy(rent_after=timedelta(0))), rented, NOW).attempts.values()
    assert own.quote.on_demand == beside.quote.price.total
