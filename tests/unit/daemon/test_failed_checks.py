"""What a check against the rules adds to a plan is added again until it is stored."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from spotd.core.domain.intents import IntentKind, JobId
from spotd.core.domain.plan import Plan
from spotd.core.domain.states import AttemptState, JobState
from spotd.core.domain.world import World
from spotd.daemon.commits import Commits, CrashPoint, Database, PolicyHolder, never
from spotd.store import Store
from spotd.store.engine import StorePoint
from spotd_providers.contract.values import InstanceId, InstanceRef
from tests.unit.daemon.clocks import VirtualClock
from tests.unit.store import values as v

pytestmark = pytest.mark.anyio
POINTS = (CrashPoint.BEFORE_COMMIT_CYCLE_OTHER, CrashPoint.AFTER_COMMIT_CYCLE_OTHER)
LIVES, ENDS = JobId("lives"), JobId("ends")


class Disk:
    """Refuses a commit while it is full."""

    is_full = False

    def at(self, point: StorePoint) -> None:
        if self.is_full and point is StorePoint.EVENTS:
            raise sqlite3.OperationalError("database or disk is full")


def opened(folder: Path, disk: Disk) -> tuple[Store, Commits]:
    """A state with a machine that runs, and one that ends although nothing is ordered to end it."""
    store = Store.open(folder / "state.sqlite", at_point=disk.at)
    for name in (LIVES, ENDS):
        item = v.attempt(name, state=AttemptState.RUNNING)
        item = replace(item, ref=InstanceRef(provider=item.provider, instance_id=InstanceId(f"i-{name}"), scope=""))
        store.tx(lambda tx, i=item, n=name: tx.commit(v.plan(v.job(n, JobState.RUNNING, attempts_made=1), i)))  # type: ignore[misc] # bound at once
    store.tx(
        lambda tx: tx.commit(
            v.plan(
                v.job(ENDS, JobState.FAILED, attempts_made=1),
                replace(item, state=AttemptState.ENDING),
            )
        )
    )
    return store, Commits(Database(store, inline=True), PolicyHolder(v.POLICY), VirtualClock(), never)


def beats(world: World, _now: object) -> Plan:
    """What most cycles write: that a host lives."""
    lives = next(item for identity, item in world.attempts.items() if identity.job == LIVES)
    return Plan(attempts={lives.id: replace(lives, heartbeat_seq=lives.heartbeat_seq + 1)})


def nothing(_world: World, _now: object) -> Plan:
    return Plan()


def ordered_ends(store: Store) -> list[IntentKind]:
    world = store.read(lambda reads: reads.world(v.POLICY, v.NOW))
    return [intent.kind for intent in world.intents.values() if intent.kind is IntentKind.TERMINATE]


@pytest.mark.parametrize("later", [beats, nothing])
async def test_an_end_that_the_check_ordered_is_ordered_again_where_its_commit_failed(
    tmp_path: Path, later: object
) -> None:
    disk = Disk()
    store, commits = opened(tmp_path, disk)
    disk.is_full = True
    with pytest.raises(Exception, match="full"):
        await commits.commit(beats, POINTS, contain=True)
    disk.is_full = False
    assert ordered_ends(store) == []
    await commits.commit(later, POINTS, contain=True)  # type: ignore[arg-type] # one of the two above
    assert ordered_ends(store) == [IntentKind.TERMINATE]
    store.close()


@pytest.mark.parametrize(
    "harm", ["DELETE FROM intents", "UPDATE intents SET state = 'odd'", "UPDATE intents SET created_at = 'odd'"]
)
async def test_an_order_that_another_program_spoiled_is_given_anew(tmp_path: Path, harm: str) -> None:
    store, commits = opened(tmp_path, Disk())
    await commits.commit(beats, POINTS, contain=True)
    assert ordered_ends(store) == [IntentKind.TERMINATE]
    other = sqlite3.connect(tmp_path / "state.sqlite")
    with other:
        other.execute(harm)
    other.close()
    assert ordered_ends(store) == []
    await commits.commit(beats, POINTS, contain=True)
    assert ordered_ends(store) == [IntentKind.TERMINATE]
    store.close()
