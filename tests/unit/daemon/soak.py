"""Weeks of one daemon in virtual time, with the real state file, and hosts that save what no test could hold as bytes.

The store remembers of each object how large it says it is; the daemon never reads a chunk, so none needs to exist.
"""

from __future__ import annotations

import gc
import hashlib
import json
import resource
import sys
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
from sqlalchemy import func, select

from spotd.core.domain.intents import AttemptId, JobId
from spotd.daemon import object_keys
from spotd.daemon.control_loop import Housekeeping
from spotd.daemon.garbage import EndedGarbage
from spotd.store import Store, Tx
from spotd.store.tables import METADATA
from spotd_jobs.objects.api import Advice, Conflict, ObjectInfo, ObjectMissing, ObjectTooLarge, UploadGrant
from spotd_jobs.wire.manifest import checkpoint_prefix
from spotd_providers.contract.provider import Clock
from spotd_providers.contract.values import MicroUsdPerHour
from tests.unit.core.builders import job, offer, shop_policy
from tests.unit.daemon.clocks import VirtualClock
from tests.unit.daemon.host import Host, text
from tests.unit.daemon.rig import Rig
from tests.unit.daemon.shop import Shop

GB = 1_000_000_000
TABLES = tuple(METADATA.tables.values())
CHUNK = 64 * 1024 * 1024
BEAT_EVERY = timedelta(minutes=1)
PRICES_MOVE_EVERY = timedelta(minutes=10)


class SizedStore:
    """An object store in memory. What is put as a size has no content and cannot be read."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._folders: dict[str, dict[str, tuple[ObjectInfo, bytes | None]]] = {}
        self._written = 0

    @property
    def shared_with_hosts_by(self) -> str:
        return "network"

    def count(self) -> int:
        return sum(len(folder) for folder in self._folders.values())

    def size(self) -> int:
        return sum(info.size for folder in self._folders.values() for info, _ in folder.values())

    def put(self, key: str, data: bytes, *, create_only: bool = False) -> ObjectInfo:
        if create_only and self.head(key) is not None:
            raise Conflict(f"{key} exists")
        return self._keep(key, len(data), data)

    def put_size(self, key: str, size: int) -> None:
        self._keep(key, size, None)

    def _keep(self, key: str, size: int, data: bytes | None) -> ObjectInfo:
        self._written += 1
        info = ObjectInfo(key=key, size=size, etag=str(self._written), modified=self._clock.now())
        folder, _, name = key.rpartition("/")
        self._folders.setdefault(folder, {})[name] = (info, data)
        return info

    def put_file(self, key: str, path: Path) -> ObjectInfo:
        return self.put(key, path.read_bytes())

    def _find(self, key: str) -> tuple[ObjectInfo, bytes | None] | None:
        folder, _, name = key.rpartition("/")
        return self._folders.get(folder, {}).get(name)

    def get(self, key: str, *, bytes_max: int, version: str | None = None) -> bytes:
        found = self._find(key)
        if found is None or found[1] is None:
            raise ObjectMissing(f"there is no object {key}")
        if len(found[1]) > bytes_max:
            raise ObjectTooLarge(f"{key} is larger than {bytes_max}")
        return found[1]

    def head(self, key: str) -> ObjectInfo | None:
        found = self._find(key)
        return None if found is None else found[0]

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        found: list[ObjectInfo] = []
        for folder, names in self._folders.items():
            if f"{folder}/".startswith(prefix) or prefix.startswith(f"{folder}/"):
                found.extend(info for info, _ in names.values() if info.key.startswith(prefix))
        yield from sorted(found, key=lambda info: info.key)

    def list_after(self, prefix: str, after: str, *, page: int = 1000) -> Iterator[ObjectInfo]:
        return (info for info in self.list(prefix) if info.key > after)

    def stored(self, prefix: str) -> Iterator[ObjectInfo]:
        return self.list(prefix)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            folder, _, name = key.rpartition("/")
            names = self._folders.get(folder, {})
            names.pop(name, None)
            if not names:
                self._folders.pop(folder, None)

    def delete_listed(self, key: str) -> None:
        self.delete([key])

    def presign_get(self, key: str, *, expires: datetime, version: str | None = None) -> str:
        return f"file:///nowhere/{key}"

    def first_versions(self, prefix: str) -> Mapping[str, str]:
        return {}

    def grant_upload(
        self, prefix: str, *, expires: datetime, size_max: int, marker_key: str | None = None
    ) -> UploadGrant:
        return UploadGrant(
            method="folder", prefix=prefix, expires=expires, size_max=size_max, fields={"directory": "/nowhere"}
        )

    def revoke_upload(self, prefix: str) -> None:
        pass

    def advice(self) -> Sequence[Advice]:
        return ()


class BigHost(Host):
    """Saves so many bytes at each turn, all of them new but for a tenth."""

    def __init__(self, objects: SizedStore, attempt: AttemptId, clock: Clock, size: int) -> None:
        super().__init__(objects, attempt)
        self._sized, self._clock, self._size = objects, clock, size
        self._chunks: list[tuple[str, int]] = []
        self._saves = 0

    def save(self) -> None:
        self._saves += 1
        count = -(-self._size // CHUNK)
        kept = self._chunks[: count // 10]
        fresh = [self._chunk(number, CHUNK) for number in range(len(kept), count - 1)]
        fresh.append(self._chunk(count - 1, self._size - CHUNK * (count - 1)))
        self._chunks = [*kept, *fresh]
        for name, size in fresh:
            self._sized.put_size(f"{object_keys.data_prefix(self.attempt)}{name}", size)
        name = f"step-{self._saves}"
        pieces = [[index, 0, size] for index, (_, size) in enumerate(self._chunks)]
        document = {
            **self.manifest(name, b""),
            "schema": 2,
            "entry": name,
            "bytes": self._size,
            "created_at": text(self._clock.now()),
            "chunks": [list(chunk) for chunk in self._chunks],
            "files": [{"path": f"{name}/weights", "type": "file", "size": self._size, "mode": 420, "pieces": pieces}],
        }
        key = f"{checkpoint_prefix(self.attempt.job, self.attempt.number)}{name}.json"
        self.objects.put(key, json.dumps(document).encode())
        self.event("checkpoint", name=name, step=self._saves)

    def _chunk(self, number: int, size: int) -> tuple[str, int]:
        told = f"{self.attempt.job} {self.attempt.number} {self._saves} {number}"
        return f"{hashlib.sha256(told.encode()).hexdigest()}-0123abcd", size

    async def live(self, *, save_every: timedelta) -> None:
        due = self._clock.now() + save_every
        while True:
            self.beat("run", at=text(self._clock.now()), up_s=(self.seq + 2) * BEAT_EVERY.total_seconds())
            if self._clock.now() >= due:
                self.save()
                due += save_every
            await self._clock.sleep(BEAT_EVERY)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What the daemon holds at one time."""

    day: float
    rss_kb: int
    python_objects: int
    """Without weak references: those to connections of the database come and go."""
    memory_blocks: int
    """Of Python's allocator: numbers and texts count, too."""
    state_bytes: int
    wal_bytes: int
    prices_bytes: int
    events: int
    rows: int
    checkpoints: int
    stored_objects: int
    stored_bytes: int

    def line(self) -> str:
        return (
            f"day {self.day:5.2f}  rss {self.rss_kb / 1024:7.1f} MB  objects {self.python_objects:8}  "
            f"blocks {self.memory_blocks:8}  "
            f"state {self.state_bytes / 1024:6.0f} kB  wal {self.wal_bytes / 1024:5.0f} kB  "
            f"prices {self.prices_bytes / 1024:5.0f} kB  events {self.events:6}  rows {self.rows:6}  "
            f"checkpoints {self.checkpoints:3}  "
            f"store {self.stored_objects:6} objects, {self.stored_bytes / GB:8.0f} GB"
        )


def rss_kb() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() // 1024


def file_bytes(path: Path, ending: str = "") -> int:
    found = path.with_name(path.name + ending)
    return found.stat().st_size if found.exists() else 0


def count_rows(tx: Tx) -> int:
    """The rows of every table of the state."""
    connection = tx._connection  # round the door, since no answer counts them all
    return sum(connection.execute(select(func.count()).select_from(table)).scalar_one() for table in TABLES)


class Soak:
    """A daemon with so many live jobs; `readings` come one for each span."""

    def __init__(self, folder: Path, *, jobs: int, size: int, save_every: timedelta, read_every_s: float) -> None:
        clock = VirtualClock()
        self.jobs, self.size, self.save_every = jobs, size, save_every
        self.state, self.prices = folder / "state.sqlite", folder / "prices.sqlite"
        self.objects = SizedStore(clock)
        shop = Shop(clock, offers=[offer(f"o{number}") for number in range(jobs)])
        self.rig = Rig(
            folder,
            clock=clock,
            shops=[shop],
            policy=shop_policy(machines_max=jobs, silence_max=5 * BEAT_EVERY),
            store=Store.open(str(self.state)),
            objects=self.objects,
            read_every_s=read_every_s,
        )
        self.rig.log.lines = deque(maxlen=200)
        self.rig.passed = deque(maxlen=10)
        self.retention = EndedGarbage(
            self.objects,
            commits=self.rig.commits,
            database=self.rig.database,
            clock=clock,
            log=self.rig.log,
            inline=True,
        )
        self.housekeeping = Housekeeping(self.rig.database, clock=clock, log=self.rig.log)

    async def readings(self, spans: int, span: timedelta) -> Sequence[Reading]:
        rig = self.rig
        found: list[Reading] = []
        async with rig.ready(), anyio.create_task_group() as group:
            for part in (
                self.retention.controller.run,
                self.housekeeping.controller.run,
                rig.price_recorder.run,
                self._prices_move,
            ):
                group.start_soon(part)
            for number in range(1, self.jobs + 1):
                ident = await rig.submit(job(number))
                group.start_soon(self._host, ident)
            begun = rig.clock.now()
            self.reading(0.0)  # the first one compiles its queries
            for turn in range(1, spans + 1):
                await rig.clock.sleep(begun + span * turn - rig.clock.now())
                found.append(self.reading((rig.clock.now() - begun) / timedelta(days=1)))
                print(found[-1].line(), flush=True)
            group.cancel_scope.cancel()
        return found

    async def _prices_move(self) -> None:
        """Each offer's price goes up and down by some percent, so that there is a price history to keep."""
        first, turn = list(self.rig.shop.offer_index), 0
        while True:
            turn += 1
            self.rig.shop.offer_index = [
                replace(one, gpu_price=MicroUsdPerHour(one.gpu_price + 1_000 * ((turn * (number + 3)) % 40)))
                for number, one in enumerate(first)
            ]
            await self.rig.clock.sleep(PRICES_MOVE_EVERY)

    async def _host(self, ident: JobId) -> None:
        while not any(a.ref is not None for a in self.rig.attempts(ident)):
            await self.rig.clock.sleep(BEAT_EVERY)
        host = BigHost(self.objects, AttemptId(job=ident, number=1), self.rig.clock, self.size)
        await host.live(save_every=self.save_every)

    def reading(self, day: float) -> Reading:
        gc.collect()
        now = self.rig.clock.now()
        facts: dict[str, Any] = self.rig.store.read(
            lambda reads: {
                "events": len(reads.events(limit=1_000_000)),
                "checkpoints": sum(len(j.checkpoints) for j in reads.world(self.rig.policy.current, now).jobs.values()),
            }
        )
        return Reading(
            day=day,
            rss_kb=rss_kb(),
            python_objects=sum(type(one) is not weakref.ReferenceType for one in gc.get_objects()),
            memory_blocks=sys.getallocatedblocks(),
            state_bytes=file_bytes(self.state),
            wal_bytes=file_bytes(self.state, "-wal"),
            prices_bytes=file_bytes(self.prices) + file_bytes(self.prices, "-wal"),
            rows=self.rig.store.tx(count_rows),
            stored_objects=self.objects.count(),
            stored_bytes=self.objects.size(),
            **facts,
        )
