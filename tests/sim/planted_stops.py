"""Bugs of what stops a machine that is well: on one reading, in vain, or with nothing to take the order."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from spotd.core import author, host_reports, placement
from spotd.core.author import MachineVerdicts
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.jobs import Job
from spotd.core.domain.states import EndReason, JobState
from spotd.core.domain.world import VerdictKind
from spotd.core.kernel import reconcile
from spotd.core.kernel.loss_evidence import LossEvidence
from spotd.core.wait_reasons import state_of_waiting
from spotd.daemon.control_loop import ControlLoop
from spotd_providers.contract.values import Listing, MicroUsdPerHour
from tests.sim.hazards import Hazard
from tests.sim.planted import Bug, patched
from tests.sim.worlds import Shape

WELL: Final = Shape(
    jobs=4,
    hosts=5,
    storm=timedelta(hours=6),
    need=(200, 400),
    user=False,
    faults=False,
    reachable=True,
    crash_rate=0.0,
    kills_per_hour=0.0,
    outages_per_hour=0.0,
    paces=(60,),
    floors=True,
    limits={"raise_bids": True, "moves_max": 5, "hold_max": timedelta(minutes=15)},
)


def deceived(*hazards: Hazard, **changes: object) -> Shape:
    """A world with these hazards, beside bids and moves."""
    return replace(WELL, hazards=frozenset({Hazard.BIDS, Hazard.MOVES, *hazards}), **changes)  # type: ignore[arg-type]  # by name


def one_reading_is_enough() -> AbstractContextManager[None]:
    return patched((MachineVerdicts, "_readings", lambda *_: {}))


def outages_hold_nothing_back() -> AbstractContextManager[None]:
    return patched(
        (ControlLoop, "_market", lambda self, _reports: self._offer_cache.snapshot()),
        (MachineVerdicts, "_provider_away", lambda *_: ""),
    )


def refusals_are_forgotten() -> AbstractContextManager[None]:
    return patched((author, "patience_left", lambda *_: timedelta(0)), (MachineVerdicts, "refuses", lambda *_: False))


def one_row_is_believed() -> AbstractContextManager[None]:
    return patched((reconcile, "is_doubted", lambda *_: False))


def bids_hold_nothing_back() -> AbstractContextManager[None]:
    """Leaves a machine as its bid is changed."""
    right = MachineVerdicts.change_bid

    def wrong(self: MachineVerdicts, item: Attempt, bid: MicroUsdPerHour, why: str) -> bool:
        is_changed = right(self, item, bid, why)
        if is_changed:
            author._order(self._builder, self._builder.attempt(item.id), EndReason.OUTBID, "another one is as cheap")
        return is_changed

    return patched((MachineVerdicts, "change_bid", wrong))


def held_machines_must_speak() -> AbstractContextManager[None]:
    right = LossEvidence.confirm_absence

    def wrong(self: LossEvidence, item: Attempt, listing: Listing) -> bool:
        return item.bidding.held_since is None and right(self, item, listing)

    return patched((LossEvidence, "confirm_absence", wrong))


def waiting_is_judged_anew() -> AbstractContextManager[None]:
    """Puts a job that waits for a price back to its turn in each decision."""
    right = state_of_waiting

    def wrong(job: Job, kind: VerdictKind, now: datetime) -> JobState:
        return JobState.QUEUED if job.state is JobState.WAITING_PRICE else right(job, kind, now)

    return patched((placement, "state_of_waiting", wrong))


def notices_last() -> AbstractContextManager[None]:
    return patched((host_reports, "drop_lapsed_notice", lambda *_: None))


STOPS: Mapping[str, Bug] = {
    "stop a machine on one reading": Bug(
        patch=one_reading_is_enough,
        rule=("of_one_page",),
        shape=deceived(Hazard.LEAPS),
        until=timedelta(hours=2),
        seed=6,
    ),
    "stop a machine while the store is away": Bug(
        patch=outages_hold_nothing_back,
        rule=("while_away",),
        shape=deceived(Hazard.AWAY_AT_BARGAINS, reachable=False),
        until=timedelta(hours=5),
    ),
    "forget who refused": Bug(
        patch=refusals_are_forgotten,
        rule=("in_vain",),
        shape=deceived(Hazard.NO_ON_DEMAND, Hazard.ON_DEMAND, Hazard.DEADLINES, jobs=3, hosts=3),
        until=timedelta(hours=2),
        seed=4,
    ),
    "believe one row": Bug(
        patch=one_row_is_believed,
        rule=("of_one_row",),
        shape=deceived(Hazard.WRONG_STATES),
        until=timedelta(hours=2),
        seed=7,
    ),
    "leave a machine while its bid is changed": Bug(
        patch=bids_hold_nothing_back, rule=("contradictions",), shape=deceived(Hazard.SPIKES), until=timedelta(hours=3)
    ),
    "wait for words of a held machine": Bug(
        patch=held_machines_must_speak,
        rule=("held_and_gone",),
        shape=deceived(Hazard.VANISHING),
        until=timedelta(hours=3),
    ),
    "change what a job waits for": Bug(
        patch=waiting_is_judged_anew,
        rule=("flips",),
        shape=deceived(Hazard.SPIKES),
        until=timedelta(hours=1),
    ),
    "believe a notice for ever": Bug(
        patch=notices_last,
        rule=("hung",),
        shape=deceived(Hazard.LAPSES, Hazard.WATCHDOG),
        until=timedelta(hours=4),
        seed=1,
    ),
}
