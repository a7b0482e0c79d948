"""Healthy machines are stopped on facts seen twice, and only where store, provider and target let that succeed."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest

from spotd.core.author import LIST_IS_RECENT, MachineVerdicts, order_stop
from spotd.core.decide import decide
from spotd.core.domain.attempts import Bidding, StopOrder
from spotd.core.domain.cooldowns import Cooldown, CooldownEnd, CooldownScope
from spotd.core.domain.intents import AttemptId, Intent, IntentId, IntentKind, IntentState, bid_intent_id
from spotd.core.domain.jobs import Checkpoint, Claim, Job, MachineVerdict, Moves, Pacing
from spotd.core.domain.market import MarketSnapshot, Readings
from spotd.core.domain.plan import Plan, applied
from spotd.core.domain.states import AttemptState, EndReason, InvariantBroken
from spotd.core.domain.world import World
from spotd.core.plan_builder import PlanBuilder
from spotd.core.running import (
    BID_CHANGES,
    BID_SETTLES,
    LASTS,
    PATIENCE_FIRST,
    RANK,
    VERDICTS,
    VOLUNTARY_STOPS,
    Need,
    patience_left,
)
from spotd.core.timeline import redated
from spotd_providers.contract.values import Market, MicroUsdPerHour, Offer, ProviderName
from tests.cases import every
from tests.unit.core.builders import MINUTE, NOW, SHOP, job, market, offer, shop_policy, world_with
from tests.unit.core.deadlines.test_pacer import _HOUR, _SPOT, _running, _sold
from tests.unit.core.decision.test_moves import FIRST, running
from tests.unit.core.kernel.test_raised_bids import bid_world, usd
from tests.unit.core.plans.test_stalls import stalled_world
from tests.unit.core.schedule.test_preemption import running as lower
from tests.unit.core.schedule.test_preemption import urgent, world_of

POLL: Final = 30 * timedelta(seconds=1)


def facts(*offers: Offer, at: datetime = NOW, listed_at: datetime | None = None, **away: Any) -> MarketSnapshot:
    """The market as the daemon reads it: offers of this instant, and a list of our machines."""
    shown = market(*offers, at=at)
    sold = replace(shown.by_provider[SHOP], changes_bids=True)
    return replace(shown, by_provider={SHOP: sold}, readings=Readings(listed_at={SHOP: listed_at or at}, **away))


def stops(plan: Plan) -> list[EndReason]:
    return [item.stop.reason for item in plan.attempts.values() if item.stop is not None]


def moving() -> tuple[World, tuple[Offer, ...]]:
    return running(), (offer("o1"), offer("o2", price=200_000))


def leaving() -> tuple[World, tuple[Offer, ...]]:
    saved = Checkpoint(name="s", attempt=1, step=1, bytes=1, at=NOW - 5 * MINUTE, manifest_key="k", sha256="0" * 64)
    some = bid_world(known=Bidding(placed=(usd(0.44),), held_since=NOW - MINUTE))
    owner = replace(some.jobs[FIRST.job], checkpoints=(saved,))
    policy = replace(some.policy, raise_bids=False, hold_max=90 * MINUTE)
    return replace(some, policy=policy, jobs={owner.id: owner}), (offer("o2", price=300_000),)


def far_behind() -> tuple[World, tuple[Offer, ...]]:
    return _running(_SPOT, 20.5), (_SPOT, _sold())


def preempting() -> tuple[World, tuple[Offer, ...]]:
    return world_of(lower(1), waiting=(urgent(),)), (offer("a"),)


def stalling() -> tuple[World, tuple[Offer, ...]]:
    return stalled_world(), ()


Scene = Callable[[], tuple[World, tuple[Offer, ...]]]
SCENES: Final[dict[MachineVerdict, tuple[Scene, EndReason]]] = {
    MachineVerdict.MOVE: (moving, EndReason.MIGRATED),
    MachineVerdict.LEAVE: (leaving, EndReason.OUTBID),
    MachineVerdict.GO_ON_DEMAND: (far_behind, EndReason.MIGRATED),
    MachineVerdict.MAKE_ROOM: (preempting, EndReason.MADE_ROOM),
    MachineVerdict.STALL: (stalling, EndReason.STALLED),
}
every_scene = every(("scene", "reason"), [pytest.param(*scene, id=verdict.value) for verdict, scene in SCENES.items()])


def beating(world: World, at: datetime) -> World:
    """The same world with another heartbeat of each host."""
    return replace(world, attempts={i: replace(a, heartbeat_seen_at=at) for i, a in world.attempts.items()})


def polls(scene: Scene, *readings: MarketSnapshot, beats: bool = True) -> list[list[EndReason]]:
    """Decide once for each of these readings, a poll after another, on what the one before left."""
    world, _ = scene()
    found, now = [], NOW
    for reading in readings:
        plan = decide(beating(world, now) if beats else world, reading, now)
        world = applied(world, plan)
        found.append(stops(plan))
        now += POLL
    return found


# --- facts of two polls ------------------------------------------------------------------------------------------


@every_scene
def test_one_reading_stops_nothing_and_the_second_that_says_the_same_does(scene: Scene, reason: EndReason) -> None:
    offers = scene()[1]
    assert polls(scene, facts(*offers), facts(*offers, at=NOW + POLL)) == [[], [reason]]


@every_scene
def test_the_same_reading_judged_again_is_no_second_one(scene: Scene, reason: EndReason) -> None:
    offers = scene()[1]
    assert reason is VERDICTS[next(v for v, (s, _) in SCENES.items() if s is scene)].reason
    assert polls(scene, *[facts(*offers)] * 4, beats=False) == [[]] * 4


def test_a_stall_is_read_in_two_heartbeats_however_many_lists_come_beside_one() -> None:
    readings = [facts(at=NOW + n * POLL) for n in range(3)]
    assert polls(stalling, *readings, beats=False) == [[]] * 3


@every_scene
def test_only_a_new_list_of_our_machines_beside_new_offers_is_a_second_reading(scene: Scene, reason: EndReason) -> None:
    offers, later = scene()[1], NOW + POLL
    old_list = facts(*offers, at=later, listed_at=NOW)
    both = facts(*offers, at=later + POLL, listed_at=later + POLL)
    assert polls(scene, facts(*offers), old_list, both) == [[], [], [reason]]
    if scene is moving:
        old_offers = facts(*offers, listed_at=later)
        assert polls(scene, facts(*offers), old_offers, both) == [[], [], [reason]]


@every("factor", [0.01, 100])
@every("scene", [pytest.param(s, id=v.value) for v, (s, _) in SCENES.items() if s is not stalling])
def test_one_page_of_other_prices_stops_nothing(scene: Scene, factor: float) -> None:
    """The prices of the pages before and behind it give no reason for a stop."""
    calm = {
        moving: (offer("o1"), offer("o2")),
        leaving: (offer("o2", price=495_000),),
        far_behind: (_SPOT,),
        preempting: (offer("a", price=600_000),),
    }[scene]
    wild = tuple(replace(one, gpu_price=MicroUsdPerHour(max(1, int(one.gpu_price * factor)))) for one in calm)
    page = [facts(*some, at=NOW + n * POLL) for n, some in enumerate((calm, wild, calm, wild, calm, calm))]
    assert polls(scene, *page) == [[]] * 6


def test_on_demand_is_not_left_for_one_page_of_cheap_spot() -> None:
    sold = _sold()

    def scene() -> tuple[World, tuple[Offer, ...]]:
        return _running(sold, 40, ran=2 * _HOUR, saved=False, pacing=Pacing(up_since=NOW - 5 * _HOUR)), ()

    dear, cheap = offer("spot", price=450_000), _SPOT
    page = [facts(one, sold, at=NOW + n * POLL) for n, one in enumerate((dear, cheap, dear, cheap, cheap))]
    assert polls(scene, *page) == [[], [], [], [], [EndReason.MIGRATED]]


def test_a_proposal_is_durable_and_begins_anew_when_the_clock_is_set() -> None:
    world, offers = moving()
    proposed = applied(world, decide(world, facts(*offers), NOW))
    known = proposed.jobs[FIRST.job].moves.proposed
    assert known is not None
    assert (known.verdict, known.since) == (MachineVerdict.MOVE, NOW)
    assert dict(known.readings) == {"offers of shop": NOW, "machines of shop": NOW}
    stepped = redated(proposed, timedelta(hours=-1), NOW)
    assert stepped.jobs[FIRST.job].moves.proposed is None


def test_what_is_proposed_no_more_is_forgotten() -> None:
    world, offers = moving()
    proposed = applied(world, decide(world, facts(*offers), NOW))
    after = applied(proposed, decide(proposed, facts(offer("o1"), at=NOW + POLL), NOW + POLL))
    assert after.jobs[FIRST.job].moves.proposed is None


def test_why_says_what_is_held_back() -> None:
    world, offers = moving()
    sentence = decide(world, facts(*offers), NOW + MINUTE).verdicts[FIRST.job].sentence
    assert "move is held back" not in sentence, "it is compared behind the verdicts of the running jobs"
    world, offers = far_behind()
    [verdict] = decide(world, facts(*offers), NOW).verdicts.values()
    assert "go on-demand is held back: it waits for a second reading" in verdict.sentence


# --- a store and a provider ----------------------------------------------------------------------------------------


@every_scene
def test_nothing_healthy_is_stopped_while_the_store_is_away(scene: Scene, reason: EndReason) -> None:
    offers = scene()[1]
    away = [facts(*offers, at=NOW + n * POLL, store_away="it does not answer") for n in range(80)]  # 40 minutes
    assert polls(scene, *away) == [[]] * 80
    back = [facts(*offers, at=NOW + n * POLL) for n in range(80, 82)]
    assert [one for one in polls(scene, *away, *back)[80:] if one] == [[reason]]


@every_scene
def test_nothing_healthy_is_stopped_while_its_provider_is_away(scene: Scene, reason: EndReason) -> None:
    offers = scene()[1]
    away = [facts(*offers, at=NOW + n * POLL, listed_at=NOW, away={SHOP: "does not answer"}) for n in range(30)]
    assert polls(scene, *away) == [[]] * 30
    back = [facts(*offers, at=NOW + n * POLL) for n in range(30, 32)]
    assert [one for one in polls(scene, *away, *back)[30:] if one] == [[reason]]


ENDS: dict[str, tuple[dict[str, Any], bool]] = {
    "never tried": ({"tries": 0}, True),
    "failed once": ({"tries": 1, "error": "HTTP 500"}, False),
    "fails for hours": ({"tries": 200, "error": "HTTP 500", "created_at": NOW - timedelta(hours=5)}, False),
    "fails since another clock": ({"tries": 2, "error": "HTTP 500", "created_at": NOW + timedelta(days=9)}, False),
    "accepted": ({"tries": 1, "state": IntentState.ACCEPTED}, True),
    "accepted again": ({"tries": 2, "state": IntentState.ACCEPTED}, False),
    "given again": ({"tries": 1, "created_at": NOW - timedelta(hours=5)}, False),
    "gone": ({"tries": 9, "state": IntentState.DONE}, True),
    "of another provider": ({"tries": 9, "provider": ProviderName("else")}, True),
}


@every_scene
@every(("known", "stops_it"), ENDS.values(), ids=ENDS)
def test_nothing_healthy_is_stopped_while_its_provider_ends_nothing(
    scene: Scene, reason: EndReason, known: dict[str, Any], *, stops_it: bool
) -> None:
    world, offers = scene()
    [item, *_] = world.attempts.values()
    owed = Intent(
        id=IntentId("end-another"),
        kind=IntentKind.TERMINATE,
        provider=SHOP,
        key=item.key,
        state=IntentState.OPEN,
        created_at=NOW - MINUTE,
        attempt=None,
    )

    def owing() -> tuple[World, tuple[Offer, ...]]:
        return replace(world, intents={owed.id: replace(owed, **known)}), offers

    readings = [facts(*offers, at=NOW + n * POLL) for n in range(4)]
    assert ([reason] in polls(owing, *readings)) is stops_it


@every_scene
def test_no_stop_comes_to_be_due_while_the_provider_stays_away(scene: Scene, reason: EndReason) -> None:
    """Nothing could end the machine, and it goes on: a deadline is not made by a second one beside it."""
    offers = scene()[1]
    count = int(timedelta(hours=1) / POLL)
    away = [facts(*offers, at=NOW + n * POLL, listed_at=NOW, away={SHOP: "no key"}) for n in range(count)]
    assert polls(scene, *away) == [[]] * count
    stuck = [facts(*offers, at=NOW + n * POLL, listed_at=NOW + min(n, 1) * MINUTE / 60) for n in range(2)]
    assert polls(scene, *stuck)[1] == [reason], "its list is a second one and recent"


@every_scene
@every("age", [LIST_IS_RECENT, timedelta(hours=1), timedelta(days=3650)])
def test_a_list_that_hangs_without_an_error_is_an_answer_no_longer(
    scene: Scene, reason: EndReason, age: timedelta
) -> None:
    world, offers = scene()
    world = applied(world, decide(world, facts(*offers, listed_at=NOW - age - MINUTE), NOW))
    later = NOW + POLL
    plan = decide(beating(world, later), facts(*offers, at=later, listed_at=later - age), later)
    assert stops(plan) == []
    assert SHOP in plan.list_again, "it is asked, so that the stop does not wait for the next poll"
    assert reason is not None


@every_scene
def test_no_limit_of_an_owner_waits_for_anything(scene: Scene, reason: EndReason) -> None:
    world, offers = scene()
    broke = replace(world, policy=replace(world.policy, budget_day=1))  # type: ignore[arg-type]  # micro-dollars
    away = facts(*offers, store_away="away", away={SHOP: "away"})
    assert reason is not EndReason.BUDGET_PAUSED
    assert EndReason.BUDGET_PAUSED in stops(decide(broke, away, NOW))


def releasing(**changes: Any) -> World:
    """A held machine whose time was over a minute ago."""
    world, _ = leaving()
    [item] = world.attempts.values()
    since = NOW - world.policy.hold_max - MINUTE
    item = replace(item, bidding=replace(item.bidding, held_since=since), **changes)
    return replace(world, attempts={item.id: item})


GIVEN_UP: Final = VERDICTS[MachineVerdict.RELEASE].lapses or timedelta(0)
OUT_OF_REACH: dict[str, tuple[dict[str, Any], bool]] = {
    "the store": ({"store_away": "does not answer"}, False),
    "its provider": ({"away": {SHOP: "does not answer"}}, True),
    "its provider, listed long ago": ({"away": {SHOP: "no key"}, "listed_at": NOW - timedelta(hours=9)}, True),
    "a list that was not asked for again": ({"listed_at": NOW - LIST_IS_RECENT}, False),
}


@every(("away", "lapses"), OUT_OF_REACH.values(), ids=OUT_OF_REACH)
def test_a_release_waits_for_what_every_stop_of_a_machine_that_may_run_needs(
    away: dict[str, Any], *, lapses: bool
) -> None:
    """It may have woken since it was listed: then it saves, or it was ended for nothing."""
    world = releasing()
    assert stops(decide(world, facts(), NOW)) == [EndReason.OUTBID]
    assert stops(decide(world, facts(**away), NOW)) == []
    just_before = NOW - MINUTE + GIVEN_UP - timedelta(microseconds=1)
    shift = {"listed_at": just_before - (NOW - away["listed_at"])} if "listed_at" in away else {}
    assert stops(decide(world, facts(at=just_before, **away | shift), just_before)) == []
    over = NOW - MINUTE + GIVEN_UP
    shift = {"listed_at": over - (NOW - away["listed_at"])} if "listed_at" in away else {}
    found = stops(decide(world, facts(at=over, **away | shift), over))
    assert found == ([EndReason.OUTBID] if lapses else []), "it is given up as a silent machine, if it was asked for"


def test_a_provider_that_left_the_config_keeps_no_held_machine_beyond_that() -> None:
    world = releasing()
    world = replace(world, policy=replace(world.policy, providers={}))
    over = NOW - MINUTE + GIVEN_UP
    unknown = replace(facts(), readings=Readings())
    assert stops(decide(world, unknown, over - timedelta(microseconds=1))) == []
    assert stops(decide(world, unknown, over)) == [EndReason.OUTBID]


def test_no_bid_is_raised_for_a_machine_that_is_to_be_released() -> None:
    """It would wake at the higher bid, and be stopped."""
    world = releasing()
    [item] = world.attempts.values()
    world = replace(world, policy=replace(world.policy, raise_bids=True))
    floor = MicroUsdPerHour(item.quote.price.gpu + 10_000)
    for over, raised in ((False, 1), (True, 0)):
        since = NOW - world.policy.hold_max + (MINUTE if not over else -MINUTE)
        held = replace(item, bidding=replace(item.bidding, held_since=since, floor=floor))
        plan = decide(replace(world, attempts={held.id: held}), facts(store_away="does not answer"), NOW)
        assert len([one for one in plan.intents.values() if one.kind is IntentKind.CHANGE_BID]) == raised


def test_nothing_is_stopped_before_its_provider_has_listed_its_machines_since_the_start() -> None:
    world, unlisted = releasing(), replace(facts(), readings=Readings())
    plan = decide(world, unlisted, NOW)
    assert stops(plan) == []
    assert SHOP in plan.list_again


@every("state", [IntentState.OPEN, IntentState.SENT, IntentState.UNKNOWN])
def test_a_machine_is_released_once_the_change_of_its_bid_is_settled(state: IntentState) -> None:
    world = releasing()
    [item] = world.attempts.values()
    change = Intent(
        id=bid_intent_id(item.key),
        kind=IntentKind.CHANGE_BID,
        provider=SHOP,
        key=item.key,
        state=state,
        created_at=NOW - GIVEN_UP + MINUTE,
        attempt=item.id,
    )
    world = replace(world, intents={change.id: change})
    assert stops(decide(world, facts(), NOW)) == []
    over = NOW + MINUTE
    plan = decide(world, facts(at=over), over)
    assert stops(plan) == [EndReason.OUTBID]
    assert not plan.intents[change.id].is_open, "it is not left while its bid is changed"


# --- a target that refuses -------------------------------------------------------------------------------------------


def claiming(**changes: Any) -> World:
    """A job that was stopped for another machine, and has its former one again."""
    known = Claim(
        verdict=MachineVerdict.MOVE,
        at=NOW - 10 * MINUTE,
        attempt=0,
        provider="shop",
        subject="spot host-o2",
        rate=MicroUsdPerHour(400_000),
    )
    return running(moves=Moves(claim=replace(known, **changes)))


def test_a_claim_that_failed_is_remembered_against_the_job_and_the_target() -> None:
    plan = decide(claiming(), facts(offer("o1")), NOW)
    moves = plan.jobs[FIRST.job].moves
    assert (moves.claim, moves.refusals, moves.not_before) == (None, 1, NOW + PATIENCE_FIRST)
    [cooling] = plan.cooldowns
    assert (cooling.scope, cooling.subject, cooling.until) == (
        CooldownScope.TARGET,
        "spot host-o2",
        NOW + PATIENCE_FIRST,
    )
    [event] = [event for event in plan.events if event.kind == "job.claim_failed"]
    assert "shop spot host-o2" in event.message
    after = applied(claiming(), plan)
    offers = (offer("o1"), offer("o2", price=200_000))
    for n in range(2, 20):
        plan = decide(after, facts(*offers, at=NOW + n * POLL), NOW + n * POLL)
        assert stops(plan) == []
        after = applied(after, plan)


def test_another_job_is_not_stopped_for_a_target_that_refused() -> None:
    known = Cooldown(
        provider=SHOP,
        scope=CooldownScope.TARGET,
        subject="spot host-o2",
        until=NOW + _HOUR,
        reason="x",
        since=NOW - MINUTE,
    )
    refused = replace(known, scope=CooldownScope.OFFER, subject="o2", ends=CooldownEnd.SHOWN)
    for one in (known, refused):
        world = replace(running(), cooldowns=(one,))
        assert stops(decide(world, market(offer("o1"), offer("o2", price=200_000)), NOW)) == []
    other = replace(running(), cooldowns=(replace(known, subject="on-demand host-o2"),))
    assert stops(decide(other, market(offer("o1"), offer("o2", price=200_000)), NOW)) == [EndReason.MIGRATED]


def test_a_launch_may_still_use_what_was_refused_after_a_stop() -> None:
    known = Cooldown(
        provider=SHOP, scope=CooldownScope.TARGET, subject="spot host-o1", until=NOW + _HOUR, reason="x", since=NOW
    )
    owner = job()
    world = World(policy=shop_policy(), jobs={owner.id: owner}, attempts={}, intents={}, cooldowns=(known,))
    assert len(decide(world, facts(offer("o1")), NOW).attempts) == 1


@every(
    ("changes", "is_met"),
    [
        pytest.param({"subject": "spot host-o1"}, True, id="it has the target"),
        pytest.param({"rate": MicroUsdPerHour(500_000)}, True, id="it has another one that is cheaper"),
        pytest.param({"verdict": MachineVerdict.MAKE_ROOM}, True, id="any machine does"),
        pytest.param({"verdict": MachineVerdict.GO_ON_DEMAND, "market": Market.ON_DEMAND}, False, id="other market"),
        pytest.param({}, False, id="the one that it had"),
    ],
)
def test_a_claim_is_met_by_a_machine_that_runs_and_is_what_was_wanted(changes: dict[str, Any], is_met: bool) -> None:
    world = claiming(**changes)
    moves = decide(world, facts(offer("o1")), NOW).jobs[FIRST.job].moves
    assert (moves.claim, moves.refusals) == (None, 0 if is_met else 1)


def test_a_claim_is_open_while_its_machine_saves_or_starts_and_not_for_ever() -> None:
    world = claiming(attempt=1)
    assert decide(world, facts(offer("o1")), NOW).jobs == {}, "its own machine has not ended"
    [item] = world.attempts.values()
    starting = replace(claiming(subject="spot host-o1"), attempts={item.id: replace(item, state=AttemptState.STARTING)})
    assert decide(starting, facts(offer("o1")), NOW).jobs == {}
    waiting = replace(claiming(attempt=1, at=NOW - MINUTE), attempts={})
    owner = replace(waiting.jobs[FIRST.job], state_since=NOW - MINUTE)
    for late, refusals in ((timedelta(0), 0), (LASTS, 1), (-2 * MINUTE, 1)):
        now = NOW + late
        plan = decide(replace(waiting, jobs={owner.id: owner}), facts(at=now), now)
        assert plan.jobs.get(owner.id, owner).moves.refusals == refusals


@every(
    ("until", "left"),
    [
        (None, timedelta(0)),
        (NOW - MINUTE, timedelta(0)),
        (NOW + MINUTE, MINUTE),
        (datetime(9999, 1, 1, tzinfo=UTC), timedelta(0)),
    ],
)
def test_a_job_waits_for_no_instant_that_only_another_clock_can_have_noted(
    until: datetime | None, left: timedelta
) -> None:
    assert patience_left(replace(job(), moves=Moves(not_before=until)), NOW) == left


def failing(verdict: MachineVerdict, hours: int) -> list[datetime]:
    """When a job is stopped for a target that is listed and never sold."""
    stopped_at = []
    base = _running(_sold(), 40) if verdict is MachineVerdict.BACK_TO_SPOT else running()
    owner = base.jobs[FIRST.job]
    for n in range(int(timedelta(hours=hours) / MINUTE)):
        now = NOW + n * MINUTE
        world = replace(base, jobs={owner.id: owner})
        builder = PlanBuilder(world, now)
        verdicts = MachineVerdicts(builder, world, facts(offer("o2"), at=now))
        item = world.attempts[FIRST]
        if verdicts.stop(item, verdict, "x", target=offer("o2")):
            stopped_at.append(now)
        verdicts.finish()
        after = builder.plan().jobs.get(FIRST.job, owner)
        claim = after.moves.claim
        owner = after if claim is None else replace(after, moves=replace(after.moves, claim=replace(claim, attempt=0)))
    return stopped_at


@every(
    ("verdict", "most"), [(MachineVerdict.MOVE, 5), (MachineVerdict.GO_ON_DEMAND, 7), (MachineVerdict.BACK_TO_SPOT, 5)]
)
def test_patience_with_a_target_that_never_sells_grows(verdict: MachineVerdict, most: int) -> None:
    stopped_at = failing(verdict, 24)
    pauses = [late - early for early, late in pairwise(stopped_at)]
    assert 3 < len(stopped_at) <= most
    assert sum(pauses[:3], timedelta(0)) > 8 * _HOUR
    assert pauses[0] >= PATIENCE_FIRST
    assert pauses == sorted(pauses)
    assert max(pauses) <= VERDICTS[verdict].patience_max + 3 * MINUTE, "it is never given up for good"


def test_a_job_that_never_starts_stops_few_machines_in_eight_hours() -> None:
    """The victim has its machine again each time, and the other job's launches come to nothing."""
    owner, stopped_at = urgent(), []
    for n in range(8 * 60):
        now = NOW + n * MINUTE
        pair = lower(1, minutes=60 - n)
        world = world_of(pair, waiting=(owner,))
        plan = decide(world, facts(offer("a"), at=now), now)
        owner = plan.jobs.get(owner.id, owner)
        if stops(plan):
            stopped_at.append(now)
            owner = replace(owner, attempts_made=owner.attempts_made + 1)
    assert 1 < len(stopped_at) <= 3


# --- one author ------------------------------------------------------------------------------------------------------


def test_a_bid_is_not_changed_in_the_cycle_of_a_stop_nor_while_one_is_proposed() -> None:
    world, offers = moving()
    world = replace(world, policy=replace(world.policy, raise_bids=True))
    [item] = world.attempts.values()
    builder = PlanBuilder(world, NOW)
    verdicts = MachineVerdicts(builder, world, market(*offers))
    assert verdicts.change_bid(item, usd(0.45), "x")
    assert not verdicts.stop(item, MachineVerdict.MOVE, "x", target=offers[1])
    assert not verdicts.change_bid(item, usd(0.46), "x")
    proposed = applied(world, decide(world, facts(*offers), NOW))
    assert proposed.jobs[FIRST.job].moves.proposed is not None
    assert not MachineVerdicts(PlanBuilder(proposed, NOW), proposed, facts(*offers)).change_bid(item, usd(0.45), "x")


def test_a_raised_bid_is_not_followed_by_a_leave_before_two_readings_since() -> None:
    """The bid of a held machine was raised, and it was left 46 ms later."""
    saved = Checkpoint(name="s", attempt=1, step=1, bytes=1, at=NOW - 5 * MINUTE, manifest_key="k", sha256="0" * 64)
    some = bid_world(floor=0.40, bid=0.30, known=Bidding(placed=(usd(0.30),), floor=usd(0.33), held_since=NOW - MINUTE))
    owner = replace(some.jobs[FIRST.job], checkpoints=(saved,))
    world = replace(some, policy=replace(some.policy, hold_max=30 * MINUTE), jobs={owner.id: owner})
    raised = decide(world, facts(), NOW)
    assert bid_intent_id(world.attempts[FIRST].key) in raised.intents
    world = applied(world, raised)
    cheap, soon = offer("o2", price=350_000), NOW + timedelta(milliseconds=46)
    assert stops(decide(world, facts(cheap, at=soon), soon)) == []
    assert decide(world, facts(cheap, at=soon), soon).jobs == {}, "nothing is proposed while the bid has no answer"
    [intent] = world.intents.values()
    assert intent.kind is IntentKind.CHANGE_BID
    world = replace(world, intents={})
    for at in (soon, soon + POLL, NOW + BID_SETTLES - timedelta(milliseconds=1)):
        plan = decide(world, facts(cheap, at=at), at)
        assert (stops(plan), plan.jobs) == ([], {}), "it was answered, and is not to be seen in a list yet"
        assert plan.wake_at is not None
        assert plan.wake_at <= NOW + BID_SETTLES
    settled = NOW + BID_SETTLES
    world = applied(world, decide(world, facts(cheap, at=settled), settled))
    assert stops(decide(world, facts(cheap, at=settled), settled)) == []
    assert stops(decide(world, facts(cheap, at=settled + POLL), settled + POLL)) == [EndReason.OUTBID]


LEAVING: Final = [v for v in MachineVerdict if VERDICTS[v].reason in {EndReason.OUTBID, EndReason.MIGRATED}]


@every("verdict", LEAVING)
@every(
    ("ago", "is_held_back"),
    [
        pytest.param(timedelta(0), True, id="in this instant"),
        pytest.param(BID_SETTLES - timedelta(microseconds=1), True, id="just before it settles"),
        pytest.param(BID_SETTLES, False, id="once it has settled"),
        pytest.param(-timedelta(microseconds=1), False, id="by a clock that ran ahead"),
        pytest.param(NOW - datetime(9999, 1, 1, tzinfo=UTC), False, id="in the year 9999"),
        pytest.param(None, False, id="never"),
    ],
)
def test_every_verdict_that_leaves_a_machine_waits_until_its_bid_has_settled(
    verdict: MachineVerdict, ago: timedelta | None, *, is_held_back: bool
) -> None:
    world, offers = moving()
    [item] = world.attempts.values()
    bidding = replace(item.bidding, changed_at=None if ago is None else NOW - ago)
    world = replace(world, attempts={item.id: replace(item, bidding=bidding)})
    verdicts = MachineVerdicts(PlanBuilder(world, NOW), world, market(*offers))
    assert bool(verdicts.held_back(world.attempts[item.id], verdict)) is is_held_back


@every("verdict", [*LEAVING, MachineVerdict.RAISE, MachineVerdict.LOWER])
def test_a_machine_that_is_ordered_to_stop_gets_no_other_verdict(verdict: MachineVerdict) -> None:
    world = world_with(AttemptState.STOPPING)
    [item] = world.attempts.values()
    verdicts = MachineVerdicts(PlanBuilder(world, NOW), world, market())
    assert verdicts.held_back(item, verdict) == "its end is decided"


def test_a_bid_without_an_answer_does_not_keep_a_deadline_for_good() -> None:
    world, offers = far_behind()
    [item] = world.attempts.values()
    known = Intent(
        id=bid_intent_id(item.key),
        kind=IntentKind.CHANGE_BID,
        provider=SHOP,
        key=item.key,
        state=IntentState.UNKNOWN,
        created_at=NOW,
        attempt=item.id,
    )
    world = replace(world, intents={known.id: known})
    assert stops(decide(world, market(*offers), NOW)) == []
    later = NOW + timedelta(minutes=20)
    assert stops(decide(world, market(*offers, at=later), later)) == [EndReason.MIGRATED]


@every_scene
def test_a_machine_is_stopped_only_where_what_follows_has_a_place(scene: Scene, reason: EndReason) -> None:
    """The limit may have been lowered below what runs; a stall gets no other machine by it."""
    offers = scene()[1]

    def lowered() -> tuple[World, tuple[Offer, ...]]:
        world = scene()[0]
        return replace(world, policy=replace(world.policy, machines_max=len(world.attempts) - 1)), offers

    found = polls(lowered, *[facts(*offers, at=NOW + n * POLL) for n in range(4)])
    assert found == ([[], [reason], [], []] if scene is stalling else [[]] * 4)


@every_scene
def test_a_store_that_was_written_to_before_the_proposal_only_may_not_take_the_order(
    scene: Scene, reason: EndReason
) -> None:
    offers = scene()[1]

    def page(n: int, stored_at: datetime) -> MarketSnapshot:
        return facts(*offers, at=NOW + n * POLL, stored_at=stored_at)

    assert polls(scene, *[page(n, NOW - POLL) for n in range(10)]) == [[]] * 10
    assert polls(scene, page(0, NOW - POLL), page(1, NOW + POLL / 2)) == [[], [reason]]


def test_nothing_healthy_is_stopped_while_nothing_may_be_launched() -> None:
    world, offers = far_behind()
    paused = replace(world, policy=replace(world.policy, launches_paused="shutting down"))
    assert stops(decide(paused, market(*offers), NOW)) == []


def test_only_what_its_owner_limits_is_stopped_without_a_gate() -> None:
    world = running()
    of_rows = {row.reason for row in VERDICTS.values()}
    for reason in EndReason:
        builder = PlanBuilder(world, NOW)
        if reason not in of_rows:
            order_stop(builder, world.attempts[FIRST], reason, "x")
            assert isinstance(builder.attempt(FIRST).stop, StopOrder)
        else:
            with pytest.raises(InvariantBroken):
                order_stop(builder, world.attempts[FIRST], reason, "x")


def test_nothing_is_given_that_is_held_back_or_of_another_row() -> None:
    world, offers = moving()
    owner: Job = world.jobs[FIRST.job]
    verdicts = MachineVerdicts(PlanBuilder(world, NOW), world, market(*offers))
    item = world.attempts[FIRST]
    for verdict in (MachineVerdict.END, MachineVerdict.STOP, MachineVerdict.RAISE, MachineVerdict.KEEP):
        with pytest.raises(InvariantBroken):
            verdicts.give(item, verdict, "x", gains=owner)
    verdicts.give(item, MachineVerdict.MOVE, "x", gains=owner)
    with pytest.raises(InvariantBroken):
        verdicts.give(item, MachineVerdict.MOVE, "x", gains=owner)


def test_the_table_is_whole() -> None:
    assert set(VERDICTS) == set(MachineVerdict)
    for verdict, row in VERDICTS.items():
        assert verdict not in row.yields_to or verdict in {MachineVerdict.RAISE, MachineVerdict.LOWER}
        is_voluntary = verdict in VOLUNTARY_STOPS
        assert is_voluntary is ({Need.READINGS, Need.STORE, Need.PROVIDER} <= row.needs)
        assert is_voluntary <= (MachineVerdict.STOP in row.yields_to)
        if row.reason is not None:  # a stop that no limit of its owner demands: the machine may run
            assert {Need.STORE, Need.PROVIDER} <= row.needs
            assert row.yields_to >= BID_CHANGES
        for other in row.yields_to - {MachineVerdict.RAISE, MachineVerdict.LOWER}:
            if verdict not in {MachineVerdict.RAISE, MachineVerdict.LOWER}:
                assert RANK[other] < RANK[verdict], f"{verdict} yields to {other}, which comes later"
    assert {verdict for verdict, row in VERDICTS.items() if row.reason is not None} == {
        MachineVerdict.RELEASE,
        *VOLUNTARY_STOPS,
    }


CORE: Final = Path(__file__).parents[4] / "spotd"
ACTS: Final = {"_order", "_owe_bid", "StopOrder"}
"""What changes the fate of a machine that runs."""


def test_one_module_alone_orders_stops_and_changes_bids() -> None:
    found = {}
    for path in sorted(CORE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if not any(f"{name}(" in text for name in {*ACTS, "Intent"}):
            continue
        names = {
            node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Call)
        }
        made = names & ACTS
        if "Intent" in names and "CHANGE_BID" in text and "core" in path.parts:
            made = made | {"Intent(CHANGE_BID)"}
        if made:
            found[path.relative_to(CORE).as_posix()] = made
    assert found == {"core/author.py": ACTS | {"Intent(CHANGE_BID)"}}


def test_the_newest_attempt_of_a_job_carries_its_proposal() -> None:
    """Another machine of the same job begins anew."""
    world, offers = moving()
    proposed = applied(world, decide(world, facts(*offers), NOW))
    owner = proposed.jobs[FIRST.job]
    second = AttemptId(job=owner.id, number=2)
    item = replace(proposed.attempts[FIRST], id=second)
    other = replace(proposed, jobs={owner.id: replace(owner, attempts_made=2)}, attempts={second: item})
    assert stops(decide(other, facts(*offers, at=NOW + POLL), NOW + POLL)) == []
