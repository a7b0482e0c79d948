"""A process that is killed at every point of the store, run as `python -m tests.unit.store.dying PLACES`.

It imports once and forks for each point. The child opens a state of its own, commits one plan, and kills itself with
SIGKILL at the point while it commits a second one (or while it brings the schema up to date). PLACES is the URL or the
path of that state, with `{}` for the name of the point.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

from spotd.core.domain.plan import Plan
from spotd.core.domain.states import AttemptState, JobState
from spotd.store import Store, StorePoint
from tests.unit.store import values as v

MIGRATING = frozenset({StorePoint.MIGRATION_BEGUN, StorePoint.MIGRATION_STEP, StorePoint.MIGRATION_COMMITTED})


def before() -> Plan:
    """What is durable before the deadly plan."""
    return v.running_job()


def deadly() -> Plan:
    """A plan that writes to every table."""
    ended = replace(v.attempt(), state=AttemptState.ENDING, ended_at=v.NOW, ref=v.ref("i-j1"))
    fresh = v.attempt(number=2)
    moved = v.job(
        state=JobState.PROVISIONING, attempts_made=2, recoveries=1, checkpoints=(v.checkpoint("b"), v.checkpoint("a"))
    )
    return v.plan(
        moved,
        ended,
        fresh,
        v.launch_of(fresh),
        v.cooldown(until=v.NOW + timedelta(hours=1)),
        v.charge(),
        v.job("j2"),
        *v.told(moved),
    )


def point_of_death(point: StorePoint, *, armed: Callable[[], bool]) -> Callable[[StorePoint], None]:
    """Ends this process as `kill -9` does, the first time the point is passed while armed."""

    def die(passed: StorePoint) -> None:
        if passed is point and armed():
            os.kill(os.getpid(), signal.SIGKILL)

    return die


def live_and_die(places: str, point: StorePoint) -> None:
    at_second = [point in MIGRATING]
    with Store.open(
        places.format(point.replace(".", "_")), at_point=point_of_death(point, armed=lambda: at_second[0])
    ) as store:
        store.tx(lambda tx: tx.commit(before()))
        at_second[0] = True
        store.tx(lambda tx: tx.commit(deadly()))


def main(places: str) -> int:
    """The number of children that did not die as they should."""
    survivors = 0
    for point in StorePoint:
        child = os.fork()
        if child == 0:
            live_and_die(places, point)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
            survivors += 1
            sys.stderr.write(f"{point}: lived through it ({status})\n")
    return survivors


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
