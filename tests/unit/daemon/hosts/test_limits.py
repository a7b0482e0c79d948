"""What one host writes costs its own reading, a share of each look, and nothing of any other host's."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from spotd.core.domain.attempts import HostStatus
from spotd.core.domain.intents import AttemptId, JobId
from spotd.core.domain.states import AttemptState, EndReason
from spotd.core.domain.world import World
from spotd.daemon import object_keys
from spotd.daemon.hosts.host_reader import ProvedChunks, ReadMemory
from spotd.daemon.hosts.limits import LARGE, LINES_AT_ONCE, MANIFESTS_PER_READ, HostRation
from spotd.daemon.hosts.monitor import FAILURES_MAX, HostMonitor
from spotd_jobs.objects.api import ObjectInfo, StoreError
from spotd_jobs.objects.folder import FolderStore
from spotd_jobs.wire.client.sinks import WINDOW
from spotd_jobs.wire.manifest import checkpoint_prefix
from spotd_providers.contract.values import AttemptKey
from tests.unit.core.builders import NOW, job, world_with
from tests.unit.daemon.host import Host, text
from tests.unit.daemon.rig import Log
from tests.unit.daemon.test_ids import Still

pytestmark = pytest.mark.anyio
HOUR = timedelta(hours=1)


class Watched(FolderStore):
    """Counts what is read, and refuses what a test says."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.read: Counter[str] = Counter()
        self.refused = ""

    def get(self, key: str, *, bytes_max: int, version: str | None = None) -> bytes:
        self.read[key] += 1
        if self.refused and self.refused in key:
            raise StoreError("it refuses")
        return super().get(key, bytes_max=bytes_max, version=version)

    def list_after(self, prefix: str, after: str, *, page: int = 1000) -> Iterator[ObjectInfo]:
        if self.refused and self.refused in prefix:
            raise StoreError("it refuses")
        return super().list_after(prefix, after, page=page)

    def quickly(self, key: str, data: bytes) -> None:
        """The object is there, without a disk sync."""
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


class Watch:
    """Some hosts, each of a job of its own, and a clock that the test moves."""

    def __init__(self, folder: Path, hosts: int) -> None:
        self.objects = Watched(folder / "objects")
        self.clock = Still()
        self.log = Log()
        self.world = many(hosts)
        self.host_monitor = HostMonitor(
            self.objects, clock=self.clock, wall=self.clock, log=self.log, inline=True, ticks=lambda: 0.0
        )
        self.hosts = [Host(self.objects, attempt) for attempt in self.world.attempts]

    async def look(self, *, after: timedelta = timedelta(0)) -> list[HostStatus | None]:
        self.clock.at += after
        reports = await self.host_monitor.read_hosts(self.world)
        self.host_monitor.committed(reports)
        return [reports.get(attempt) for attempt in self.world.attempts]

    def view(self, number: int = 0) -> ReadMemory:
        return self.host_monitor._views[[*self.world.attempts][number]]

    def publish(self, number: int, name: str, *, padding: int = 0, serial: int | None = None) -> str:
        """A checkpoint of one chunk, whose manifest is as large as asked."""
        host = self.hosts[number]
        content = f"content of {name}".encode()
        document = host.manifest(name, content, serial=serial)
        self.objects.quickly(document["files"][0]["chunks"][0]["key"], content)
        data = json.dumps(document).encode()
        key = f"{checkpoint_prefix(host.attempt.job, host.attempt.number)}{name}.json"
        self.objects.quickly(key, data + b" " * padding)
        return key


def many(hosts: int) -> World:
    base = world_with(AttemptState.RUNNING)
    (item,) = base.attempts.values()
    jobs, attempts = {}, {}
    for number in range(1, hosts + 1):
        owner = job(number, attempts_made=1, state=base.jobs[item.id.job].state)
        ident = AttemptId(job=JobId(owner.id), number=1)
        jobs[owner.id], attempts[ident] = owner, replace(item, id=ident, key=AttemptKey(f"spotd-lab-{owner.id}-1"))
    return replace(base, jobs=jobs, attempts=attempts)


# --- manifests -------------------------------------------------------------------------------------------------------


async def test_huge_manifests_of_one_host_are_read_a_share_at_a_time_and_each_once(tmp_path: Path) -> None:
    watch = Watch(tmp_path, 2)
    huge = [watch.publish(0, f"h{n:03d}", padding=LARGE) for n in range(8)]
    watch.publish(1, "small")
    for host in watch.hosts:
        host.beat("run")
    first, second = await watch.look()
    assert first is not None
    assert second is not None
    assert (first.seq, first.liveness_check, second.seq, second.liveness_check) == (0, True, 0, False)
    assert [c.name for c in second.checkpoints] == ["small"], "what the other one publishes delays nothing"
    assert sum(watch.objects.read[key] for key in huge) == 1
    names = [c.name for c in first.checkpoints]
    for _ in range(20):
        first, _ = await watch.look()
        assert first is not None
        names += [c.name for c in first.checkpoints]
        if not first.liveness_check:
            break
    assert names == [f"h{n:03d}" for n in range(8)]
    assert {watch.objects.read[key] for key in huge} == {1}


async def test_an_end_is_told_only_with_everything_that_was_published_before_it(tmp_path: Path) -> None:
    watch = Watch(tmp_path, 1)
    for number in range(4):
        watch.publish(0, f"c{number}", padding=LARGE)
    watch.hosts[0].exit("failed", code=3)
    found: list[str] = []
    causes: list[EndReason | None] = []
    for _ in range(4):
        (report,) = await watch.look()
        assert report is not None
        found += [c.name for c in report.checkpoints]
        causes.append(report.exit_reason)
        assert (report.exit_reason is None) == report.liveness_check == (len(found) < 4)
    assert causes[-1] is EndReason.USER_ERROR


async def test_of_more_manifests_than_are_of_any_use_the_newest_are_taken_and_the_rest_passed_over(
    tmp_path: Path,
) -> None:
    import os

    watch = Watch(tmp_path, 1)
    for number in range(300):
        key = watch.publish(0, f"c{number:03d}")
        at = 1_700_000_000 + number * 600
        os.utime(watch.objects._path(key), (at, at))
    (report,) = await watch.look()
    assert report is not None
    assert [c.name for c in report.checkpoints] == [f"c{n}" for n in range(300 - MANIFESTS_PER_READ, 300)]
    assert sum(watch.objects.read.values()) < 2 * MANIFESTS_PER_READ
    assert any("284 older checkpoints" in note for note in report.notes)
    (report,) = await watch.look()
    assert report is not None
    assert (report.liveness_check, report.checkpoints) == (False, ())


async def test_a_manifest_that_lacks_a_chunk_is_not_read_again_for_it(tmp_path: Path) -> None:
    watch = Watch(tmp_path, 1)
    watch.hosts[0].checkpoint("early", b"late", chunks=False)
    for _ in range(3):
        await watch.look()
    key = f"{checkpoint_prefix('j1', 1)}early.json"
    assert watch.objects.read[key] == 1
    watch.hosts[0].checkpoint("other", b"late")
    (report,) = await watch.look()
    assert report is not None
    assert {c.name for c in report.checkpoints} == {"other", "early"}
    assert watch.objects.read[key] == 2


# --- memory ----------------------------------------------------------------------------------------------------------


def test_only_the_chunks_of_the_newest_manifests_are_remembered() -> None:
    known = ProvedChunks()
    for number in range(1_000):
        known.add({f"chunk {number} {n}": n for n in range(800)})
    assert known.bytes == WINDOW * 800 * 16
    assert known.size_of("chunk 999 5") == 5
    assert ("chunk 1 5" in known, "chunk 999 5" in known) == (False, True)


async def test_what_is_remembered_of_a_host_does_not_grow_with_what_it_published(tmp_path: Path) -> None:
    watch = Watch(tmp_path, 1)
    for number in range(60):
        watch.publish(0, f"c{number:03d}")
        await watch.look()
        if number >= 3:
            watch.objects.delete([min(watch.view().settled)])
    await watch.look()
    view = watch.view()
    sizes = (len(view.settled), len(view.accepted), len(view.uploads), len(view.lacking), view.chunks.bytes)
    assert sizes == (3, 0, 0, 0, WINDOW * 16)


# --- events ----------------------------------------------------------------------------------------------------------


async def test_the_end_is_read_behind_thousands_of_events(tmp_path: Path) -> None:
    watch = Watch(tmp_path, 1)
    host = watch.hosts[0]
    for number in range(1, 2_051):
        document = {"schema": 1, "job": "j1", "attempt": 1, "seq": number, "at": text(NOW), "kind": "disk_low"}
        watch.objects.quickly(
            f"{object_keys.events_prefix(host.attempt)}{number:016d}.json",
            json.dumps({**document, "data": {}}).encode(),
        )
    host._events = 2_050
    host.exit("failed", code=3, reason="assertion")
    (report,) = await watch.look()
    assert report is not None
    assert (report.exit_reason, report.exit_code) == (EndReason.USER_ERROR, 3)
    assert len(report.notes) <= 2 * LINES_AT_ONCE


async def test_events_of_one_kind_are_told_some_and_the_rest_in_one_line(tmp_path: Path) -> None:
    watch = Watch(tmp_path, 1)
    for _ in range(300):
        watch.hosts[0].event("checkpoint_refused", name="a", reason="it is broken")
    (report,) = await watch.look()
    assert report is not None
    assert len(report.notes) == LINES_AT_ONCE + 1
    assert report.notes[-1] == "and 250 more of this kind: checkpoint_refused"
    rows = 0
    for _ in range(8 * 6):
        for _ in range(3):
            watch.hosts[0].event("checkpoint_refused", name="a", reason="it is broken")
        (report,) = await watch.look(after=HOUR / 6)
        assert report is not None
        rows += len(report.notes)
    assert rows <= 8 * 8, "however long it goes on"


async def test_a_host_that_publishes_every_second_gets_no_line_for_each(tmp_path: Path) -> None:
    watch = Watch(tmp_path, 1)
    told = 0
    for number in range(3 * LINES_AT_ONCE):
        watch.publish(0, f"c{number:03d}")
        (report,) = await watch.look()
        assert report is not None
        told += len({c.manifest_key for c in report.checkpoints} - report.unannounced)
    assert told == LINES_AT_ONCE


def test_kinds_that_a_host_makes_up_share_one_ration() -> None:
    ration = HostRation()
    told = sum(ration.take(f"kind {n}", NOW) for n in range(10_000))
    assert told < 2_000 / 10


# --- one host's faults are its own -----------------------------------------------------------------------------------


async def test_a_host_whose_writing_cannot_be_read_blinds_nobody_and_is_judged_after_a_while(tmp_path: Path) -> None:
    watch = Watch(tmp_path, 2)
    for host in watch.hosts:
        host.beat("run")
    watch.objects.refused = "j1/attempts/1/events"
    for turn in range(1, FAILURES_MAX + 1):
        first, second = await watch.look()
        assert second is not None
        assert second.seq == 0
        assert (first is None) == (turn < FAILURES_MAX)
    assert watch.log.events().count("host.not_readable") == 1
    assert watch.host_monitor.last_error == ""


async def test_a_store_that_refuses_everything_is_the_store_s_trouble_and_no_host_is_judged(tmp_path: Path) -> None:
    watch = Watch(tmp_path, 2)
    for host in watch.hosts:
        host.beat("run")
    watch.objects.refused = "attempts/"
    for _ in range(2 * FAILURES_MAX):
        assert await watch.look() == [None, None]
    assert watch.host_monitor.last_error == "it refuses"


async def test_a_defect_in_the_reading_of_one_host_is_contained(tmp_path: Path) -> None:
    watch = Watch(tmp_path, 2)
    for host in watch.hosts:
        host.beat("run")
    await watch.look()
    watch.view(0).transfers = None  # type: ignore[assignment]  # what no code expects
    watch.hosts[0].beat("run")
    watch.hosts[1].beat("run")
    first, second = await watch.look()
    assert first is None
    assert second is not None
    assert second.seq == 1
