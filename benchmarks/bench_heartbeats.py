"""What watching 1,000 running jobs costs the daemon: requests to the bucket, and processor time.

One listing of all beats, against reading each host's heartbeat and listing its events and manifests, which is what a
look was before there were beats and still is for a host without one. Both over the same real S3 server (SeaweedFS), by
the same keeper, in the same run; and the decision and commit that follow each look, over a file as in production.

Run: python benchmarks/bench_heartbeats.py
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
from crowd import POLICY, history

from spotd.core.applied import applied, combine
from spotd.core.decide import decide
from spotd.core.host_status import HostStatus
from spotd.core.ids import AttemptId
from spotd.core.market import MarketSnapshot
from spotd.core.reconcile import reconcile
from spotd.core.world import World
from spotd.daemon import object_keys
from spotd.daemon.clock import SystemClock
from spotd.daemon.hosts.flood import FloodLimits
from spotd.daemon.hosts.monitor import HostMonitor
from spotd.store import Store
from spotd_jobs.objects.probe import Findings
from spotd_jobs.objects.s3 import S3Store
from tests.fakes import seaweed
from tests.unit.daemon.host import Host
from tests.unit.daemon.rig import Log

JOBS, ROUNDS = 1_000, 2
BEAT_S, LOOK_S = 15.0, 10.0
"""As production has them with a bucket."""
REQUESTS_LIMIT, CPU_LIMIT_PERCENT = 2.0, 0.5
NEVER = FloodLimits(audit_every=timedelta(days=1000))
"""What each host wrote is counted every ten minutes; that is another duty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one look."""

    requests: float
    cpu_s: float
    wall_s: float

    def line(self, name: str) -> str:
        looks = BEAT_S / LOOK_S
        return (
            f"{name:34} {self.requests * looks:8.1f} requests  {self.cpu_s * looks * 1000:8.1f} ms of a processor"
            f" ({100 * self.cpu_s / LOOK_S:.2f} %)  a look takes {self.wall_s * 1000:6.0f} ms"
        )


class Meter:
    """Counts what a store is asked for, at the place where requests leave."""

    def __init__(self, objects: S3Store) -> None:
        self.requests = 0
        client = objects._client  # noqa: SLF001  # where requests leave, a retry is one as well
        client.meta.events.register("before-send.s3", self._count)

    def _count(self, **_: object) -> None:
        self.requests += 1

    async def cost(self, work: Callable[[], Coroutine[Any, Any, object]]) -> Cost:
        requests, cpu, wall = self.requests, time.process_time(), time.perf_counter()
        await work()
        return Cost(
            requests=self.requests - requests,
            cpu_s=time.process_time() - cpu,
            wall_s=time.perf_counter() - wall,
        )


def best(costs: list[Cost]) -> Cost:
    """The one that the rest of the machine disturbed least."""
    return min(costs, key=lambda cost: cost.cpu_s)


def written(objects: S3Store, ids: list[AttemptId]) -> None:
    """Every host has a heartbeat in the store."""
    hosts = [Host(objects, i) for i in ids]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(Host.beat, hosts))


def beaten(objects: S3Store, ids: list[AttemptId]) -> None:
    """Every host has beaten once more, and has no news."""
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda i: objects.put(object_keys.liveness_key(i), b"+" * 100), ids))


async def watched(objects: S3Store, world: World) -> tuple[Cost, Cost, dict[AttemptId, HostStatus]]:
    """By each host's documents, by the beats, and what the newest look at the beats told."""
    ids = list(world.attempts)
    meter, wall = Meter(objects), SystemClock()
    keeper = HostMonitor(objects, clock=wall, wall=wall, log=Log(), limits=NEVER, deadline_s=600)
    reports: dict[AttemptId, HostStatus] = {}

    async def look() -> None:
        nonlocal reports
        reports = await keeper.read_hosts(world)

    old = await meter.cost(look)  # at the first look nothing is known of anybody
    assert not any(report.glance for report in reports.values())
    new = []
    for _ in range(ROUNDS):
        await anyio.to_thread.run_sync(beaten, objects, ids)
        new.append(await meter.cost(look))
        assert all(report.glance and report.marker_at is not None for report in reports.values())
    assert len(reports) == JOBS
    return old, best(new), reports


async def decided(store: Store, reports: dict[AttemptId, HostStatus]) -> Cost:
    """What follows a look in which every host has given a sign of life: one decision, one commit."""
    costs = []
    for number in range(ROUNDS):
        at = datetime.now(UTC) + timedelta(seconds=number * LOOK_S)
        wall, cpu = time.perf_counter(), time.process_time()
        told = {
            i: HostStatus(attempt=i, read_at=at, glance=True, marker_at=at, seq=report.seq, phase="run")
            for i, report in reports.items()
        }

        def think(tx: Any, at: datetime = at, told: dict[AttemptId, HostStatus] = told) -> None:
            world = tx.world(POLICY, at)
            first = reconcile(world, {}, told, at)
            second = decide(applied(world, first), MarketSnapshot(offer_cache={}), at)
            tx.commit(combine(first, second))

        store.tx(think)
        costs.append(Cost(requests=0, cpu_s=time.process_time() - cpu, wall_s=time.perf_counter() - wall))
    return best(costs)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="spotd-bench-") as text:
        folder = Path(text)
        with Store.open(folder / "state.sqlite") as store, seaweed.running(folder) as weed:
            plans = history(datetime.now(UTC) - timedelta(hours=1), jobs=JOBS, running=JOBS)
            store.tx(lambda tx: [tx.commit(plan) for plan in plans])
            world = store.tx(lambda tx: tx.world(POLICY, datetime.now(UTC)))
            objects = S3Store(weed.place("bench/"), findings=Findings(ordered=True))
            written(objects, list(world.attempts))
            beaten(objects, list(world.attempts))
            old, new, reports = anyio.run(watched, objects, world)
            after = anyio.run(decided, store, reports)
    print(f"{JOBS} running jobs without news, in each {BEAT_S:.0f} s, of which a look takes place every {LOOK_S:.0f}:")
    print(old.line("each host's documents"))
    print(new.line("one listing of their beats"))
    print(after.line("the decision that follows"))
    looks = BEAT_S / LOOK_S
    print(
        f"one listing: {old.requests / new.requests:.0f}x fewer requests,"
        f" {old.cpu_s / new.cpu_s:.0f}x less processor time"
    )
    goals = {
        "requests": (new.requests * looks, REQUESTS_LIMIT),
        "% of a processor, the look": (100 * new.cpu_s / LOOK_S, CPU_LIMIT_PERCENT),
        "% of a processor, with the decision": (100 * (new.cpu_s + after.cpu_s) / LOOK_S, CPU_LIMIT_PERCENT),
    }
    for what, (found, limit) in goals.items():
        met = "met" if found <= limit else "NOT MET"
        print(f"{found:8.2f} {what}: limit {limit} ({found / limit:.2f}x), {met}")


if __name__ == "__main__":
    main()
