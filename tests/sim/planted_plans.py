"""Bugs of plans: of windows, of jobs that come after others, of arrays, of priorities, and of commands that hang."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Final

from spotd.core import decide, enforcement, relocation, schedule
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.jobs import Job
from spotd.core.enforcement import Preemption
from spotd.core.relocation import Relocation
from spotd.core.schedule import Predecessors, Turns
from tests.sim.hazards import Hazard
from tests.sim.planted import Bug, patched
from tests.sim.worlds import QUIET

NEAR: Final = replace(QUIET, storm=timedelta(hours=4), reachable=True, jobs=5, need=(20, 150))
"""Everything can be reached, so that what is ordered happens soon."""
PLANNED: Final = replace(
    NEAR,
    hazards=frozenset({Hazard.WINDOWS, Hazard.CHAINS, Hazard.ARRAYS, Hazard.PREEMPT, Hazard.WATCHDOG}),
    limits={"machines_max": 2},
)
BESIDE: Final = replace(
    NEAR,
    floors=True,
    need=(200, 300),
    limits={"raise_bids": True, "hold_max": timedelta(minutes=5), "moves_max": 3},
)


def nothing(*_args: Any, **_more: Any) -> None:
    return None


def empty(*_args: Any, **_more: Any) -> str:
    return ""


def buys_outside_of_windows() -> AbstractContextManager[None]:
    return patched((schedule, "window_wait", nothing))


def stays_when_a_window_closes() -> AbstractContextManager[None]:
    return patched((decide, "enforce_windows", nothing))


def waits_for_no_other_job() -> AbstractContextManager[None]:
    return patched((Predecessors, "wait", empty))


def counts_no_array() -> AbstractContextManager[None]:
    return patched((Turns, "_array_wait", empty))


def stops_equals_as_well() -> AbstractContextManager[None]:
    """Makes room by stopping machines of any priority."""

    def wrong(self: Preemption, item: Attempt, job: Job) -> bool:
        return item.id.job != job.id and self._builder.attempt(item.id).stop is None

    return patched((Preemption, "_may_stop", wrong))


def sees_no_stall() -> AbstractContextManager[None]:
    return patched((enforcement, "stall_words", empty))


def moves_for_anything() -> AbstractContextManager[None]:
    """Moves for any saving, and lets a bid fall with the market, as soon as a machine runs."""

    def wrong(_self: Relocation, _job: Job, item: Attempt, _changed_at: datetime | None) -> bool:
        return item.running_at is not None

    return patched((Relocation, "_has_settled", wrong), (relocation, "_is_worth", lambda found: found.saving > 0))


def waits_for_ever() -> AbstractContextManager[None]:
    """Keeps an outbid machine until it wakes, and raises no bid either."""
    return patched(
        (Relocation, "_releases", lambda *_: True),
        (Relocation, "_raise", lambda *_: None),
        (Relocation, "leave_held", lambda _: []),
    )


def ends_what_it_moves() -> AbstractContextManager[None]:
    """Ends the machine of a job that is to move without waiting for its save."""
    move = Relocation._move

    def wrong(self: Relocation, item: Attempt) -> None:
        move(self, item)
        stop = self._builder.attempt(item.id).stop
        if stop is not None:
            self._builder.end_attempt(item.id, stop.reason, stop.detail)

    return patched((Relocation, "_move", wrong))


PLANS: Mapping[str, Bug] = {
    "buy outside of windows": Bug(
        patch=buys_outside_of_windows, rule=("out_of_window",), shape=PLANNED, seed=1, until=timedelta(hours=6)
    ),
    "stay when a window closes": Bug(
        patch=stays_when_a_window_closes, rule=("out_of_window",), shape=PLANNED, seed=1, until=timedelta(hours=6)
    ),
    "wait for no other job": Bug(patch=waits_for_no_other_job, rule=("successors",), shape=PLANNED),
    "count no array": Bug(patch=counts_no_array, rule=("arrays",), shape=PLANNED),
    "stop equals as well": Bug(
        patch=stops_equals_as_well, rule=("preempted",), shape=PLANNED, seed=5, until=timedelta(hours=9)
    ),
    "see no stall": Bug(patch=sees_no_stall, rule=("hung",), shape=PLANNED, limit=timedelta(hours=30)),
    "move for anything": Bug(patch=moves_for_anything, rule=("moved",), shape=BESIDE, seed=6, until=timedelta(hours=5)),
    "bid less": Bug(patch=moves_for_anything, rule=("bids_bounded",), shape=BESIDE, seed=3),
    "wait for an outbid machine for ever": Bug(patch=waits_for_ever, rule=("held",), shape=BESIDE, seed=3),
    "end what it moves": Bug(patch=ends_what_it_moves, rule=("ended_unsaved",), shape=BESIDE, seed=3),
}
