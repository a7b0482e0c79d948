"""Daemons that are wrong about what another life did, what nobody can see, or what its user said meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from spotd.core import billing, metering, placement
from spotd.core import host_reports as forgetting
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.intents import AttemptId, IntentState, launch_intent_id
from spotd.core.domain.jobs import Job
from spotd.core.domain.plan import Plan
from spotd.core.domain.world import World
from spotd.core.kernel import outcomes
from spotd.core.recovery import recover, unsent
from spotd.daemon import executor
from tests.sim import daemon as hosts
from tests.sim.daemon import Daemon
from tests.sim.hazards import Hazard
from tests.sim.planted import ROUGH, Bug, patched, small
from tests.sim.planted_promises import CALM, WITHIN, holding
from tests.sim.records import Records

RESTORED = replace(ROUGH, hazards=frozenset({Hazard.RESTORED}))
REVOKED = replace(CALM, hazards=frozenset({Hazard.REVOKED}), storm=timedelta(hours=6))
REVOKED_LONG = replace(REVOKED, jobs=3, hosts=3, need=(300, 900), paces=(240, 480))
AWAY_AND_FULL = replace(CALM, outages_per_hour=0.3, hazards=frozenset({Hazard.FULL_DISK}), storm=timedelta(hours=12))
AWAY_AND_RESTORED = replace(
    CALM,
    hosts=5,
    outages_per_hour=0.3,
    need=(400, 1200),
    paces=(30, 60, 120),
    storm=timedelta(hours=16),
    hazards=frozenset({Hazard.RESTORED, Hazard.LOST_AND_AWAY}),
)
CLOCKS_DIFFER = holding(Hazard.CLOCK_STEPS, Hazard.LOST_AND_AWAY, storm=timedelta(hours=12))
SPIKED = small(WITHIN, hazards=frozenset({Hazard.DEAR_EVERYWHERE}), job_budget=2_500_000)


class UsesNumbersAgain(Daemon):
    """Trusts its state alone for which numbers were used."""

    def asked_store(self, records: Records) -> Plan:
        return recover(self.world, (), self.now, dict.fromkeys(unsent(self.world), False))

    def asked_about(self, records: Records, job: Job) -> None:
        pass

    def use_number(self, item: Attempt) -> None:
        pass


class KnowsOnlyItsState(Daemon):
    """Takes what its state does not know for nobody's."""

    def asked_store(self, records: Records) -> Plan:
        return recover(self.world, (), self.now, dict.fromkeys(unsent(self.world), False))


class RenewsAnyGrant(Daemon):
    """Permits an attempt to go on because its state does not know the next one yet."""

    def is_newest(self, attempt: AttemptId) -> bool:
        return True


def sends_what_waited() -> AbstractContextManager[None]:
    """Buys what was wanted when the launch began to wait for its turn."""

    def wrong(world: World, attempt: AttemptId, _now: datetime, _market: object = None) -> Plan:
        item = world.attempts.get(attempt)
        intent = None if item is None else world.intents.get(launch_intent_id(item.key))
        if intent is None or intent.state is not IntentState.OPEN:
            return Plan()
        return Plan(intents={intent.id: replace(intent, state=IntentState.SENT)})

    return patched((executor, "launch_sent", wrong))


def prices_of_this_moment() -> AbstractContextManager[None]:
    def wrong(catalogue: Any, job: Job) -> list[int]:
        offers = catalogue.list_for(catalogue.key_of(job))
        return [] if offers.at(0) is None else [catalogue.quote_at(offers, 0).price.total]

    return patched((placement, "plausible_rates", wrong))


def given_up_is_over() -> AbstractContextManager[None]:
    forget = forgetting.forget

    def wrong(world: World, found: Any, now: datetime, report: Any = None) -> Plan:
        plan = forget(world, found, now, report)
        return replace(plan, jobs={i: replace(j, not_before=None) for i, j in plan.jobs.items()})

    return patched((forgetting, "forget", wrong))


def given_up_unread() -> AbstractContextManager[None]:
    """Ends the attempt by what was read of its host before."""
    forget = forgetting.forget
    return patched((forgetting, "forget", lambda world, found, now, _report=None: forget(world, found, now)))


def meters_what_cannot_be_seen() -> AbstractContextManager[None]:
    return patched((metering, "outlives", lambda *_: None), (billing, "outlives", lambda *_: None))


def dates_of_hosts_as_they_are() -> AbstractContextManager[None]:
    """Believes the date of a heartbeat that was not there yet at that date."""
    return patched((hosts, "clock_behind", lambda *_: timedelta(0)))


def refused_and_asked_again() -> AbstractContextManager[None]:
    return patched((outcomes, "_cool_down", lambda *_: None))


def ends_of_a_full_disk_are_forgotten() -> AbstractContextManager[None]:
    return patched((executor.Executor, "unsaved_ends", property(lambda _self: ())))


LIVES: Mapping[str, Bug] = {
    "use a number again after the state was restored": Bug(
        daemon=UsesNumbersAgain, rule=("launches",), shape=RESTORED, seed=1, until=timedelta(hours=2)
    ),
    "end the machines that a restored state does not know": Bug(
        daemon=KnowsOnlyItsState, rule=("needed_machines_ended",), shape=RESTORED, seed=2
    ),
    "renew the grant of an attempt that a restored state takes for the newest": Bug(
        daemon=RenewsAnyGrant, rule=("doubles",), shape=AWAY_AND_RESTORED, seed=22, until=timedelta(hours=8)
    ),
    "buy what was cancelled while its launch waited": Bug(
        patch=sends_what_waited, rule=("cancels_lost",), shape=holding(Hazard.HASTY, storm=timedelta(hours=2))
    ),
    "end a job for the price of a moment": Bug(
        patch=prices_of_this_moment, rule=("expired_too_soon",), shape=SPIKED, seed=5, until=timedelta(hours=2)
    ),
    "take what was given up for ended": Bug(
        patch=given_up_is_over, rule=("doubles",), shape=REVOKED, seed=5, until=timedelta(hours=3)
    ),
    "give up a machine without a last full read of its host": Bug(
        patch=given_up_unread, rule=("resumes",), shape=REVOKED_LONG, seed=20, until=timedelta(hours=4)
    ),
    "book without end what nobody can see": Bug(patch=meters_what_cannot_be_seen, rule=("spending",), shape=REVOKED),
    "forget what was ended on a full disk": Bug(
        patch=ends_of_a_full_disk_are_forgotten, rule=("spending",), shape=AWAY_AND_FULL, seed=109
    ),
    "take the clock of a host for a right one": Bug(
        patch=dates_of_hosts_as_they_are, rule=("ambiguous_cost",), shape=CLOCKS_DIFFER, seed=62
    ),
    "ask again at once after a refusal": Bug(
        patch=refused_and_asked_again,
        rule=("launches_bounded",),
        shape=small(holding(Hazard.REFUSALS)),
        seed=19,
        limit=timedelta(hours=4),
    ),
}
