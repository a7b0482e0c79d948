"""The other side of a soak: a marketplace over HTTP whose machines are light, in one process.

The marketplace is the local market as it is, but for its machines: none is a process. What a runner would write is
written by one thread for all of them, in the wire's own words: each reads its grant, writes heartbeats, liveness
markers, events, logs and checkpoints by the sink that the grant describes, obeys a stop, and ends with a last report.

    python benchmarks/soak_world.py FOLDER MEAN_LIFE_S

Prints `URL TOKEN` once it serves; ends with its parent.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
import os
import random
import re
import shlex
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import uvicorn

sys.path.insert(0, str(Path(__file__).parents[1]))

from spotd.core.domain.intents import AttemptId, JobId
from spotd_jobs.objects.api import ObjectStore
from spotd_jobs.runner.store import NotCurrent, RunnerGrant, first_grant, read_grant
from spotd_jobs.wire.client.grant_sinks import sink_of
from spotd_jobs.wire.client.sinks import Sink, SinkError
from spotd_jobs.wire.client.web import WebError
from spotd_jobs.wire.grant import MARKER_BYTES_MAX
from spotd_providers.local.hosts import REAL_TIME, HostMachineState, MachineStatus
from spotd_providers.local.market.market import LocalMarket
from spotd_providers.local.server.app import MarketApp
from spotd_providers.local.settings import HostSpec, MarketSpec
from tests.unit.daemon.host import Host

TOKEN = "soak-market"
POOLS, SLOTS = 100, 12
HEARTBEAT_S, LOG_S, SAVE_S = 15.0, 60.0, 300.0
"""A heartbeat as often as a bucket has it; a checkpoint and a line of log at the pace of a slow job."""
ADVANCE_S = 1.0
_GRANT_URL = re.compile(r"^export SPOTD_GRANT_URL=(.*)$", re.MULTILINE)


def now() -> datetime:
    return datetime.now(UTC)


class _Writer:
    """The part of an object store that `Host` uses: a put of a full key, by the sink of the newest grant."""

    def __init__(self, grant: RunnerGrant) -> None:
        self.use(grant)

    def use(self, grant: RunnerGrant) -> None:
        self._prefix = grant.prefix
        self._sink: Sink = sink_of(grant.raw["upload"])
        marker = grant.raw["liveness_marker"]
        self._marker, self._marker_name = sink_of(marker, fleeting=True), str(marker["name"])

    def put(self, key: str, data: bytes) -> None:
        self._sink.put(key.removeprefix(self._prefix), data)

    def mark(self, size: int) -> None:
        self._marker.put(self._marker_name, b"+" * size)


@dataclass(slots=True)
class LightHost:
    """One machine: what its runner has written, and when it acts next."""

    machine_id: str
    url: str
    boot: int = 0
    begun: int = -1
    """The boot whose runner has begun."""
    order: int = 0
    grant: RunnerGrant | None = None
    writer: _Writer | None = None
    host: Host | None = None
    news: int = 1
    log_at: float = 0.0
    save_at: float = 0.0
    stored: dict[str, Any] | None = None
    published: bool = False


class LightMachines:
    """What the market asks of its machines, without a process."""

    def __init__(self, mean_life_s: float) -> None:
        self.lock = threading.RLock()
        self._mean_life_s = mean_life_s
        self._rng = random.Random(22)
        self._status: dict[str, MachineStatus] = {}
        self._hosts: dict[str, LightHost] = {}
        self._due: list[tuple[float, int, str, int]] = []
        self._order = itertools.count()
        self._notices: set[str] = set()
        self._work_left_s: dict[str, float] = {}
        """Of each job, over all of its attempts: seconds that its command still runs."""
        self.steps: dict[str, int] = {}

    def start(self, machine_id: str, start_script: str, _: Mapping[str, str] | None = None) -> MachineStatus:
        found = _GRANT_URL.search(start_script)
        if found is None:
            raise ValueError("a start script without a grant")
        with self.lock:
            self._hosts[machine_id] = LightHost(machine_id, shlex.split(found.group(1))[0])
            return self._boot(machine_id)

    def restart(self, machine_id: str) -> MachineStatus:
        with self.lock:
            self._hosts[machine_id].boot += 1
            return self._boot(machine_id)

    def _boot(self, machine_id: str) -> MachineStatus:
        boot = self._hosts[machine_id].boot
        self._status[machine_id] = MachineStatus(machine_id=machine_id, boots=boot + 1, started_at=now())
        self._notices.discard(machine_id)
        self._schedule(machine_id, boot, self._rng.uniform(1, 5))
        return self._status[machine_id]

    def _schedule(self, machine_id: str, boot: int, in_s: float) -> None:
        heapq.heappush(self._due, (time.monotonic() + in_s, next(self._order), machine_id, boot))

    def ids(self) -> tuple[str, ...]:
        with self.lock:
            return tuple(self._status)

    def status(self, machine_id: str) -> MachineStatus:
        return self._status[machine_id]

    def alive(self, machine_id: str) -> bool:
        return self._status[machine_id].state is HostMachineState.RUNNING

    def console(self, machine_id: str, *, lines: int) -> list[str]:
        return [f"{machine_id} is light"][:lines]

    def notice(self, machine_id: str, _: datetime) -> None:
        with self.lock:
            self._notices.add(machine_id)

    def kill(self, machine_id: str) -> None:
        self._end(machine_id, HostMachineState.KILLED)

    def lose(self) -> None:
        """Let any one machine that runs vanish, as where its host dies."""
        with self.lock:
            running = [name for name, one in self._status.items() if one.state is HostMachineState.RUNNING]
            if running:
                self._end(self._rng.choice(running), HostMachineState.LOST)

    def _end(self, machine_id: str, state: HostMachineState, code: int | None = None) -> None:
        with self.lock:
            before = self._status.get(machine_id)
            if before is not None and before.state is HostMachineState.RUNNING:
                self._status[machine_id] = replace(
                    before, state=state, ended_at=now(), exit_code=code, done=state is HostMachineState.ENDED
                )

    def kill_all(self) -> None:
        for machine_id in self.ids():
            self.kill(machine_id)

    def remove(self, machine_id: str) -> None:
        with self.lock:
            self.kill(machine_id)
            self._status.pop(machine_id, None)
            self._hosts.pop(machine_id, None)

    # --- what runs on them ---

    def work(self) -> None:
        """Be all the runners, for ever."""
        while True:
            with self.lock:
                at = self._due[0][0] if self._due else float("inf")
                entry = heapq.heappop(self._due) if at <= time.monotonic() else None
            if entry is None:
                time.sleep(min(0.2, max(0.01, at - time.monotonic())))
                continue
            _, _, machine_id, boot = entry
            light, status = self._hosts.get(machine_id), self._status.get(machine_id)
            if light is None or status is None or light.boot != boot or status.state is not HostMachineState.RUNNING:
                continue
            try:
                goes_on = self._turn(light)
            except (SinkError, WebError) as exc:
                print(f"{machine_id}: {exc}", file=sys.stderr)
                goes_on = True
            if goes_on:
                self._schedule(machine_id, boot, HEARTBEAT_S * self._rng.uniform(0.9, 1.1))
            else:
                self._end(machine_id, HostMachineState.ENDED, 0)

    def _turn(self, light: LightHost) -> bool:
        """Do what is due on one machine; return whether it goes on."""
        if light.begun != light.boot:
            return self._begin(light)
        assert light.grant is not None
        assert light.writer is not None
        assert light.host is not None
        grant = read_grant(light.grant.url)
        light.grant = grant
        light.writer.use(grant)
        job = grant.job_id
        if grant.stop is not None:
            return self._finish(light, "stopped", 143, str(grant.stop.get("reason")))
        if light.machine_id in self._notices:
            self._notices.discard(light.machine_id)
            light.host.event("preempt_notice", source="file", reason="preempted", at=None)
            self._save(light)
            return self._finish(light, "preempted", 143, "preempted")
        self._work_left_s[job] -= HEARTBEAT_S
        if self._work_left_s[job] <= 0:
            self._save(light)
            failed = self._rng.random() < 0.1
            return self._finish(light, "failed" if failed else "succeeded", int(failed), "it is over")
        if grant.checkpoint_order > light.order:
            light.order = grant.checkpoint_order
            light.host.event("checkpoint_order", seq=light.order)
            light.save_at = 0.0
        moment = time.monotonic()
        if moment >= light.log_at:
            light.log_at = moment + LOG_S
            light.host.log(f"step {self.steps[job]} loss 0.{self._rng.randrange(10**6):06d}\n" * 4)
        if moment >= light.save_at:
            light.save_at = moment + SAVE_S * self._rng.uniform(0.9, 1.1)
            self._save(light)
        self._write_heartbeat(light)
        return True

    def _begin(self, light: LightHost) -> bool:
        try:
            grant = first_grant(light.url, lambda _: True, published=light.published)
        except NotCurrent as exc:
            if light.host is not None:
                return self._finish(light, "not_current", None, str(exc)[:200])
            return False
        light.grant, light.begun = grant, light.boot
        light.writer = _Writer(grant)
        if light.host is None:
            attempt = AttemptId(job=JobId(grant.job_id), number=grant.attempt)
            light.host = Host(cast("ObjectStore", light.writer), attempt, now)
        light.host.objects = cast("ObjectStore", light.writer)
        job = grant.job_id
        self._work_left_s.setdefault(job, self._rng.expovariate(1 / self._mean_life_s))
        self.steps.setdefault(job, 0)
        light.host.event("boot", boot=light.boot, runner="0.1.0", python="3.11", restart=light.boot > 0)
        restore = grant.raw.get("restore") or []
        if restore:
            name, key = restore[0]["name"], restore[0]["manifest"]["key"]
            light.host.event("restored", name=name, step=int(name[4:]), bytes=1, seconds=0.1, key=key)
        light.host.event("started", pid=4711, resume=restore[0]["name"] if restore else None)
        moment = time.monotonic()
        light.log_at = moment + self._rng.uniform(0, LOG_S)
        light.save_at = moment + self._rng.uniform(0.2, 1) * SAVE_S
        light.news += 1
        self._write_heartbeat(light)
        return True

    def _save(self, light: LightHost) -> None:
        assert light.host is not None
        assert light.grant is not None
        job = light.grant.job_id
        self.steps[job] += 1
        step = self.steps[job]
        name = f"step{step}"
        content = self._rng.randbytes(1024)
        light.host.checkpoint(name, content, step=step)
        key = f"{light.grant.prefix}checkpoints/{name}.json"
        light.stored = {"name": name, "step": step, "at": now().isoformat().replace("+00:00", "Z")}
        light.stored |= {"bytes": len(content), "key": key}
        light.host.event("checkpoint", name=name, step=step, bytes=1024, uploaded_bytes=1024, seconds=0.1, key=key)
        light.published = True
        light.news += 1

    def _write_heartbeat(self, light: LightHost, phase: str = "run", leave: dict[str, Any] | None = None) -> None:
        assert light.host is not None
        assert light.grant is not None
        assert light.writer is not None
        seen = None if light.stored is None else {key: light.stored[key] for key in ("name", "step", "at")}
        document = light.host.heartbeat(
            phase,
            boot=light.boot,
            grant_issued_at=light.grant.issued_at_text,
            order_checkpoint=light.order,
            seen=seen,
            stored=light.stored,
            exit=leave,
        )
        light.host.raw("heartbeat.json", document)
        light.writer.mark(1 + light.news % MARKER_BYTES_MAX)

    def _finish(self, light: LightHost, outcome: str, code: int | None, reason: str) -> bool:
        assert light.host is not None
        light.host.exit(outcome, code=code, reason=reason)
        leave = {"outcome": outcome, "phase": "run", "exit_code": code, "signal": None, "oom": None, "reason": reason}
        light.news += 1
        self._write_heartbeat(light, "done", leave)
        return False


class SoakMarket(LocalMarket):
    """A market that keeps nothing for a next server: writing a thousand machines at each sale is no part of a soak."""

    def _save(self) -> None:
        self.floor.dirty = False


def spec() -> MarketSpec:
    def pools() -> Iterator[HostSpec]:
        for number in range(POOLS):
            price = {"kind": "seeded", "base": 0.30 + 0.004 * number, "tick": "2m", "spikes": 0.3}
            flavour = "notice" if number % 3 == 0 else "sudden"
            yield HostSpec.model_validate(
                {"name": f"pool-{number:03d}", "gpu": "RTX_4090", "slots": SLOTS, "flavour": flavour, "spot": price}
                | {"on_demand": 3.0, "region": f"r{number % 7}"}
            )

    return MarketSpec(seed=22, hosts=tuple(pools()), machines_max=5_000, notice_lead="60s", keep_gone="5m")


async def serve(folder: Path, mean_life_s: float) -> None:
    market = SoakMarket(spec(), folder / "market", clock=REAL_TIME)
    machines = LightMachines(mean_life_s)
    market.machines = market.floor.machines = cast("Any", machines)
    threading.Thread(target=machines.work, name="runners", daemon=True).start()
    app = MarketApp(market, token=TOKEN)
    config = uvicorn.Config(
        app.app, http="h11", ws="none", lifespan="off", log_config=None, access_log=False, timeout_keep_alive=75
    )
    server = uvicorn.Server(config)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))

    async def advance() -> None:
        parent, turn = os.getppid(), 0
        while os.getppid() == parent:
            await asyncio.sleep(ADVANCE_S)
            await app.on_market(market.advance)
            turn += 1
            if turn % 60 == 0:
                machines.lose()
        server.should_exit = True

    print(json.dumps({"url": f"http://127.0.0.1:{listener.getsockname()[1]}", "token": TOKEN}), flush=True)
    pulse = asyncio.create_task(advance())
    await server.serve(sockets=[listener])
    pulse.cancel()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), float(sys.argv[2])))
