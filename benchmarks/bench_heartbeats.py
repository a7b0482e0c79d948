"""What watching 1,000 running jobs costs the daemon: requests to the bucket, and processor time.

One listing of all liveness markers, against a full read of each host: its heartbeat and lists of its events and
manifests, as a host without a marker needs it. Both over the same real S3 server (SeaweedFS), by the same host monitor,
in the same run; and the decision and commit that follow each pass, over a file as in production.

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

from spotd.core.decide import decide
from spotd.core.domain.attempts import HostStatus
from spotd.core.domain.intents import AttemptId
from spotd.core.domain.market import MarketSnapshot
from spotd.core.domain.plan import applied, combine
from spotd.core.domain.world import World
from spotd.core.kernel.reconcile import reconcile
from spotd.daemon import object_keys
from spotd.daemon.clock import SystemClock
from spotd.daemon.hosts.limits import FloodLimits
from spotd.daemon.hosts.monitor import HostMonitor
from spotd.store import Store
from spotd_jobs.objects.s3 import Findings, S3Store
from tests.fakes import seaweed
from tests.unit.daemon.host import Host
from tests.unit.daemon.rig import Log

JOBS, ROUNDS = 1_000, 2
HEARTBEAT_S, PASS_S = 15.0, 10.0
"""As production has them with a bucket."""
REQUESTS_LIMIT, CPU_LIMIT_PERCENT = 2.0, 0.5
NEVER = FloodLimits(audit_every=timedelta(days=1000))
"""What each host wrote is counted every ten minutes; that is another duty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Cost of one pass over all hosts."""

    requests: float
    cpu_s: float
    wall_s: float

    def line(self, name: str) -> str:
        passes = HEARTBEAT_S / PASS_S
        return (
            f"{name:34} {self.requests * passes:8.1f} requests  {self.cpu_s * passes * 1000:8.1f} ms of a processor"
            f" ({100 * self.cpu_s / PASS_S:.2f} %)  a pass takes {self.wall_s * 1000:6.0f} ms"
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


def write_heartbeats(objects: S3Store, ids: list[AttemptId]) -> None:
    hosts = [Host(objects, i) for i in ids]
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda host: host.raw("heartbeat.json", host.heartbeat()), hosts))


def write_markers(objects: S3Store, ids: list[AttemptId]) -> None:
    """Write a newer liveness marker of each host, without news."""
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda i: objects.put(object_keys.liveness_key(i), b"+" * 100), ids))


async def watch(objects: S3Store, world: World) -> tuple[Cost, Cost, dict[AttemptId, HostStatus]]:
    """Measure a full read of each host and the listing of the markers; return both, and the newest statuses."""
    ids = list(world.attempts)
    meter, wall = Meter(objects), SystemClock()
    monitor = HostMonitor(objects, clock=wall, wall=wall, log=Log(), limits=NEVER, deadline_s=600)
    reports: dict[AttemptId, HostStatus] = {}

    async def read_all() -> None:
        nonlocal reports
        reports = await monitor.read_hosts(world)

    old = await meter.cost(read_all)  # nothing is known of any host yet
    assert not any(report.liveness_check for report in reports.values())
    new = []
    for _ in range(ROUNDS):
        await anyio.to_thread.run_sync(write_markers, objects, ids)
        new.append(await meter.cost(read_all))
        assert all(report.liveness_check and report.marker_at is not None for report in reports.values())
    assert len(reports) == JOBS
    return old, best(new), reports


async def decide_after(store: Store, reports: dict[AttemptId, HostStatus]) -> Cost:
    """Measure the decision and the commit that follow a pass with a newer marker of every host."""
    costs = []
    for number in range(ROUNDS):
        at = datetime.now(UTC) + timedelta(seconds=number * PASS_S)
        wall, cpu = time.perf_counter(), time.process_time()
        statuses = {
            i: HostStatus(attempt=i, read_at=at, liveness_check=True, marker_at=at, seq=report.seq, phase="run")
            for i, report in reports.items()
        }

        def decide_and_commit(tx: Any, at: datetime = at, statuses: dict[AttemptId, HostStatus] = statuses) -> None:
            world = tx.world(POLICY, at)
            first = reconcile(world, {}, statuses, at)
            second = decide(applied(world, first), MarketSnapshot(by_provider={}), at)
            tx.commit(combine(first, second))

        store.tx(decide_and_commit)
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
            write_heartbeats(objects, list(world.attempts))
            write_markers(objects, list(world.attempts))
            old, new, reports = anyio.run(watch, objects, world)
            after = anyio.run(decide_after, store, reports)
    print(f"{JOBS} running jobs without news, in each {HEARTBEAT_S:.0f} s; a pass takes place every {PASS_S:.0f} s:")
    print(old.line("a full read of each host"))
    print(new.line("one listing of their markers"))
    print(after.line("the decision that follows"))
    passes = HEARTBEAT_S / PASS_S
    print(
        f"one listing: {old.requests / new.requests:.0f}x fewer requests,"
        f" {old.cpu_s / new.cpu_s:.0f}x less processor time"
    )
    goals = {
        "requests": (new.requests * passes, REQUESTS_LIMIT),
        "% of a processor, the pass": (100 * new.cpu_s / PASS_S, CPU_LIMIT_PERCENT),
        "% of a processor, with the decision": (100 * (new.cpu_s + after.cpu_s) / PASS_S, CPU_LIMIT_PERCENT),
    }
    for what, (found, limit) in goals.items():
        met = "met" if found <= limit else "NOT MET"
        print(f"{found:8.2f} {what}: limit {limit} ({found / limit:.2f}x), {met}")


if __name__ == "__main__":
    main()
