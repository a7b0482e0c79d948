"""The core's own plans, through storms and crashes: the store takes every one and shows the world the core expects."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest

from spotd.core.domain.cooldowns import Cooldown
from spotd.core.domain.plan import Plan
from spotd.store import Store
from tests.sim.daemon import Daemon
from tests.sim.run import run_world
from tests.sim.worlds import Shape
from tests.unit.store.reads import costs_by_job

pytestmark = pytest.mark.long


class StoredDaemon(Daemon):
    """Keeps a real state beside the simulator's dictionary and compares the two after every commit."""

    store: Store

    commits = 0

    def commit(self, plan: Plan) -> None:
        super().commit(plan)
        self.store.tx(lambda tx: tx.commit(plan))
        self.commits += 1
        # Out of memory, which is compared with a whole load.
        stored = self.store.tx(lambda tx: tx.world(self.world.policy, self.now))
        assert stored.jobs == self.world.jobs
        assert stored.attempts == self.world.attempts
        assert stored.intents == self.world.intents
        assert longest(stored.cooldowns) == longest(self.world.cooldowns)
        assert stored.spent_by_day == self.world.spent_by_day


def longest(cooldowns: tuple[Cooldown, ...]) -> dict[object, object]:
    found: dict[object, object] = {}
    for c in sorted(cooldowns, key=lambda c: c.until):
        found[c.provider, c.scope, c.subject] = c.until
    return found


@pytest.fixture
def daemon_type() -> Iterator[type[StoredDaemon]]:
    with Store.open(":memory:") as store:
        yield type("StoredDaemonOfThisTest", (StoredDaemon,), {"store": store})


@pytest.mark.parametrize("seed", [100])
def test_every_plan_of_a_stormy_world_is_stored_as_the_core_expects(daemon_type: type[StoredDaemon], seed: int) -> None:
    result = run_world(seed, Shape(jobs=4, storm=timedelta(hours=3)), daemon_type=daemon_type)
    daemon = result.daemon
    assert isinstance(daemon, StoredDaemon)
    assert daemon.commits > 100
    final = daemon.store.read(lambda r: {job_id: r.job(job_id) for job_id in daemon.done})
    assert final == daemon.done
    events = daemon.store.read(lambda r: r.events(limit=1_000_000))
    assert [e.event.kind for e in events] == daemon.told.events
    assert [e.seq for e in events] == list(range(1, len(events) + 1))
    booked = daemon.store.read(lambda r: {job_id: amount for job_id, amount, _ in costs_by_job(r)})
    assert booked == {job_id: job.spent for job_id, job in daemon.done.items() if job.spent}
