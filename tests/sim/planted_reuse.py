"""Bugs of machines that pass from job to job: handed to two, to the wrong one, kept too long, or taken for a stray."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from typing import Final

from spotd.core import handover, host_reports, reuse
from spotd.core.domain.attempts import Attempt, HostStatus
from spotd.core.domain.intents import AttemptId
from spotd.core.domain.jobs import Job
from spotd.core.kernel import listed
from spotd.core.plan_builder import PlanBuilder
from spotd.core.reuse import Handover, WaitingMachines
from tests.sim.hazards import Hazard
from tests.sim.planted import Bug, patched
from tests.sim.worlds import Shape

SHARED: Final = Shape(
    jobs=12,
    hosts=4,
    storm=timedelta(hours=6),
    need=(5, 60),
    user=False,
    faults=False,
    reachable=True,
    crash_rate=0.0,
    kills_per_hour=0.0,
    outages_per_hour=0.0,
    paces=(30,),
    limits={"machines_max": 2, "reuse_wait": timedelta(minutes=10)},
    hazards=frozenset({Hazard.REUSE}),
)


def hands_one_machine_to_two() -> AbstractContextManager[None]:
    take = WaitingMachines.hand_over

    def wrong(self: WaitingMachines, job: Job, chosen: Handover) -> tuple[Attempt, str]:
        found = take(self, job, chosen)
        self.machines.append(chosen.former)
        return found

    return patched((WaitingMachines, "hand_over", wrong), (handover, "is_claimed", lambda *_: False))


def hands_to_anybody() -> AbstractContextManager[None]:
    return patched((reuse, "words_against_job", lambda *_: ""))


def waits_too_long() -> AbstractContextManager[None]:
    wait = handover.waits_until

    def wrong(builder: PlanBuilder, item: Attempt, report: HostStatus) -> object:
        until = wait(builder, item, report)
        return None if until is None else until + timedelta(hours=2)

    return patched((host_reports, "waits_until", wrong), (WaitingMachines, "release", lambda *_: None))


def takes_it_for_a_stray() -> AbstractContextManager[None]:
    """Finds the machine by the key of its next attempt, and spares none for its reference."""
    end = listed._end_if_orphan
    return patched(
        (Attempt, "carried_key", property(lambda self: self.key)),
        (listed, "_end_if_orphan", lambda builder, instance, _: end(builder, instance, ())),
    )


def books_it_twice() -> AbstractContextManager[None]:
    """The next attempt is booked from when the former one was booked from."""
    take = handover.hand_over

    def wrong(builder: PlanBuilder, former: Attempt, job: Job, *rest: object) -> Attempt:
        began = former.meter.since
        item = take(builder, former, job, *rest)  # type: ignore[arg-type]  # passed on as they came
        item = replace(item, meter=replace(item.meter, since=began))
        builder.put_attempt(item)
        return item

    return patched((reuse, "hand_over", wrong))


def takes_it_for_clean() -> AbstractContextManager[None]:
    """Believes that every host removed what its job left, secrets and processes too."""
    wait = handover.waits_until
    return patched((host_reports, "waits_until", lambda b, item, report: wait(b, item, replace(report, waits=True))))


def takes_it_at_any_price() -> AbstractContextManager[None]:
    return patched((reuse, "is_admissible", lambda *_: True))


def books_its_wait_to_nobody() -> AbstractContextManager[None]:
    """The former job's meter stops where its end was read, not where the next one's begins."""
    leave = handover.leave_machine

    def wrong(builder: PlanBuilder, former: AttemptId, why: str) -> None:
        item = builder.attempt(former)
        builder.put_attempt(replace(item, meter=replace(item.meter, since=builder.now)))
        leave(builder, former, why)

    return patched((handover, "leave_machine", wrong))


REUSES: Mapping[str, Bug] = {
    "hand one machine to two": Bug(patch=hands_one_machine_to_two, rule=("said_by_the_core",), shape=SHARED),
    "hand a machine to anybody": Bug(patch=hands_to_anybody, rule=("handed_to_whom_it_fits",), shape=SHARED),
    "wait too long": Bug(patch=waits_too_long, rule=("waiting_bounded", "forgotten_machines"), shape=SHARED),
    "take a machine that was handed over for a stray": Bug(
        patch=takes_it_for_a_stray, rule=("needed_machines_ended", "said_by_the_core"), shape=SHARED
    ),
    "hand over what its job left": Bug(
        patch=takes_it_for_clean, rule=("handed_to_whom_it_fits",), shape=SHARED, seed=1
    ),
    "hand a machine over at any price": Bug(
        patch=takes_it_at_any_price, rule=("handed_to_whom_it_fits", "said_by_the_core"), shape=SHARED, seed=1
    ),
    "book the wait of a machine to nobody": Bug(patch=books_its_wait_to_nobody, rule=("spending",), shape=SHARED),
    "book a machine twice": Bug(patch=books_it_twice, rule=("one_at_a_time",), shape=SHARED),
}
