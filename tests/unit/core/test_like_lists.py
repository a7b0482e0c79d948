"""A list like the last one wakes no decision where all that it repeats is known; the simulator decides by each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from random import Random
from typing import Any

import pytest

from spotd.core.decide import decide
from spotd.core.domain.attempts import Attempt, Bidding, HostStatus, LapsedNotices, MachineState, StopOrder
from spotd.core.domain.intents import AttemptId
from spotd.core.domain.jobs import MachineVerdict, Moves, Proposal
from spotd.core.domain.market import MarketSnapshot, Readings
from spotd.core.domain.members import Members
from spotd.core.domain.plan import Plan, applied, combine
from spotd.core.domain.states import AttemptState, EndReason
from spotd.core.domain.world import World
from spotd.core.kernel.reconcile import reconcile
from spotd.daemon.control_loop import awaits_list
from spotd_providers.contract.values import (
    AttemptKey,
    Billing,
    Instance,
    InstanceState,
    Listing,
    Loss,
    Market,
    MicroUsdPerHour,
)
from tests.unit.core.builders import MINUTE, NOW, REF, SHOP, instance, listing, market, offer, report, world_with

RUNS = listing(instance(InstanceState.RUNNING))[SHOP]


def awaits(world: World, newest: Listing = RUNS) -> bool:
    return awaits_list(world, SHOP, newest)


def test_of_a_machine_that_runs_and_of_what_is_not_ours_a_second_list_says_nothing() -> None:
    assert not awaits(world_with(AttemptState.RUNNING))
    assert not awaits(replace(world_with(AttemptState.RUNNING), jobs={}, attempts={}))


@pytest.mark.parametrize("state", sorted(set(AttemptState) - {AttemptState.RUNNING, AttemptState.ENDED}))
def test_a_machine_in_any_other_state_waits_for_it(state: AttemptState) -> None:
    assert awaits(world_with(state))


@pytest.mark.parametrize(
    "changes",
    [
        {"missing_since": NOW},
        {"over_since": NOW},
        {"over_ceiling_at": NOW},
        {"notice_at": NOW},
        {"ever_listed": False},
        {"machine": MachineState.HALTED},
        {"bidding": Bidding(held_since=NOW)},
        {"bidding": Bidding(leapt_at=NOW)},
        {"bidding": Bidding(seen=MicroUsdPerHour(1))},
        {"machine_key": "key of another", "heartbeat_seen_at": None},
    ],
)
def test_so_does_one_of_which_a_first_list_said_what_a_second_one_must_repeat(changes: dict[str, Any]) -> None:
    assert awaits(world_with(AttemptState.RUNNING, **changes))


@pytest.mark.parametrize(
    "shown", [listing()[SHOP], listing(instance(InstanceState.PAUSED))[SHOP], replace(RUNS, complete=False)]
)
def test_so_does_one_that_the_newest_list_lacks_or_does_not_show_as_running(shown: Listing) -> None:
    assert awaits(world_with(AttemptState.RUNNING), shown)


def test_while_any_job_waits_for_second_readings_every_list_is_one() -> None:
    world = world_with(AttemptState.RUNNING)
    proposed = Proposal(verdict=MachineVerdict.MAKE_ROOM, attempt=0, since=NOW)
    jobs = {i: replace(job, moves=Moves(proposed=proposed)) for i, job in world.jobs.items()}
    assert awaits(replace(world, jobs=jobs))


# Drawn worlds: what is decided by a list that wakes nothing is what is decided without it.
#
# Lists like one another differ in their instant alone, so that each rule which counts lists, or compares an instant
# with that of a list, shows here: absences, second witnesses, leaps, ceilings, notices, bids, silences, proposals.


class Draw(Random):
    """What may be true of one machine, of the row that shows it, of its host and of its market."""

    def ago(self) -> datetime:
        return NOW - timedelta(seconds=self.choice([0, 1, 20, 50, 100, 200, 1_000, 7_000]))

    def some(self, share: float, value: Any, otherwise: Any = None) -> Any:
        return value if self.random() < share else otherwise

    def attempt(self) -> Mapping[str, Any]:
        bidding = Bidding(
            floor=self.some(0.2, MicroUsdPerHour(self.choice([100_000, 390_000]))),
            **self.some(0.03, {"seen": MicroUsdPerHour(900_000), "seen_at": self.ago()}, {}),
            leapt_at=self.some(0.03, self.ago()),
            held_since=self.some(0.03, self.ago()),
            woke_at=self.some(0.2, self.ago()),
        )
        stop = StopOrder(reason=EndReason.MIGRATED, detail="", ordered_at=self.ago(), deadline=NOW + 2 * MINUTE)
        return {
            "missing_since": self.some(0.03, self.ago()),
            "over_since": self.some(0.03, self.ago()),
            "over_ceiling_at": self.some(0.03, self.ago()),
            "listed_at": self.some(0.3, self.ago()),
            "notice_at": self.some(0.03, self.ago()),
            "lapsed": self.some(0.2, LapsedNotices(count=1, named=self.ago()), LapsedNotices()),
            "heartbeat_seen_at": self.some(0.9, self.ago()),
            "read_at": self.some(0.7, self.ago()),
            "proven_at": self.some(0.8, self.ago()),
            "ever_listed": self.some(0.97, True, False),
            "ref": self.some(0.97, REF),
            "machine_key": self.some(0.03, "spotd-lab-j0-1"),
            "machine": self.some(0.95, MachineState.LIVE, self.choice(list(MachineState))),
            "bidding": bidding,
            "stop": self.some(0.03, stop),
            "members": self.some(0.1, Members(since=(0, 0), lost=(1,), kept_since=self.ago())),
            "phase": self.choice(["run", "run", "upload", "restore"]),
        }

    def row(self) -> Instance:
        mine = instance(self.some(0.9, InstanceState.RUNNING, self.choice(list(InstanceState))))
        return replace(
            mine,
            market=self.choice([None, None, Market.SPOT, Market.ON_DEMAND]),
            price=self.some(0.6, MicroUsdPerHour(self.choice([100_000, 400_000, 600_000, 900_000, 5_000_000]))),
            notice_at=self.some(0.2, self.ago() + timedelta(seconds=self.choice([0, 100, 4_000]))),
            loss=self.some(0.2, Loss.OUTBID),
            bid_floor=self.some(0.4, MicroUsdPerHour(self.choice([100_000, 370_000, 395_000, 900_000]))),
            billing=self.choice([Billing.UNKNOWN, Billing.UNKNOWN, *Billing]),
            past_prices=self.some(0.2, ((self.ago(), MicroUsdPerHour(300_000)),), ()),
        )

    def shown(self) -> Listing:
        rows = self.choice([0, 1, 1, 1, 1, 1, 2])
        others = (
            replace(instance(InstanceState.RUNNING, ident=f"m{i}"), key=AttemptKey(f"spotd-lab-j{i}-1")) for i in (2, 3)
        )
        mine = self.row()
        return Listing(instances=(mine, *others)[:rows] if rows else (), complete=self.random() < 0.9, at=self.ago())

    def reports(self, at: datetime) -> dict[AttemptId, HostStatus]:
        seen = {"liveness_check": True} if self.random() < 0.5 else {"phase": "run", "seq": self.randint(0, 9)}
        found = report(**seen, alive_at=self.some(0.5, self.ago()))
        return {i: replace(one, read_at=at) for i, one in found.items() if self.random() < 0.8}

    def market(self) -> MarketSnapshot:
        return market(*(offer(f"o{i}", price=self.choice([20_000, 390_000, 480_000])) for i in range(2)))

    def world(self) -> World:
        bids: dict[str, Any] = {
            "pays_bid": self.random() < 0.5,
            "market": self.choice([Market.SPOT, Market.SPOT, Market.ON_DEMAND]),
        }
        world = world_with(self.some(0.95, AttemptState.RUNNING, self.choice([*AttemptState][:4])), **self.attempt())
        items = {
            i: replace(item, quote=replace(item.quote, offer=replace(item.quote.offer, **bids)))
            for i, item in world.attempts.items()
        }
        return replace(world, attempts=items)


def plan_of(
    world: World, shown: Listing, reports: dict[AttemptId, HostStatus], sold: MarketSnapshot, now: datetime
) -> Plan:
    readings = Readings(listed_at={SHOP: shown.at}, stored_at=now)
    first = reconcile(world, {SHOP: shown}, reports, now)
    return combine(first, decide(applied(world, first), replace(sold, readings=readings), now))


def unproven(item: Attempt) -> Attempt:
    return replace(item, proven_at=None, meter=replace(item.meter, until=None))


def comparable(plan: Plan, world: World) -> Plan:
    """Return the plan without proofs of life, which the next decision takes as well, and lists that proposals name."""
    changed = {i: unproven(item) for i, item in plan.attempts.items()}
    changed = {i: item for i, item in changed.items() if i not in world.attempts or item != unproven(world.attempts[i])}
    named = {i: job.moves.proposed for i, job in plan.jobs.items()}
    jobs = {
        i: replace(job, moves=replace(job.moves, proposed=proposed and replace(proposed, readings=())))
        for (i, job), proposed in zip(plan.jobs.items(), named.values(), strict=True)
    }
    return replace(plan, attempts=changed, jobs=jobs)


def test_whatever_is_true_of_a_machine_a_list_that_wakes_nothing_changes_no_decision() -> None:
    compared = 0
    for seed in range(1_500):
        draw = Draw(seed)
        before, shown, sold = draw.world(), draw.shown(), draw.market()
        decided = plan_of(before, shown, draw.reports(NOW), sold, NOW)
        world = applied(before, decided)
        if awaits_list(world, SHOP, shown) or SHOP in decided.list_again:
            continue
        compared += 1
        # Not longer, since a list that is minutes old is asked for anew before what needs one is decided.
        later = max(NOW, shown.at + timedelta(seconds=draw.choice([1, 10, 59, 120, 240])))
        like = replace(
            shown, at=max(shown.at + timedelta(seconds=1), later - timedelta(seconds=draw.choice([0, 1, 5])))
        )
        reports = draw.reports(later)
        without, with_it = (comparable(plan_of(world, one, reports, sold, later), world) for one in (shown, like))
        assert with_it == without, f"seed {seed}"
    assert compared > 150
