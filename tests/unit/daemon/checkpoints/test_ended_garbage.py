"""Old checkpoints go, and nothing that anybody may still restore goes with them."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final, NoReturn

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spotd.core.checkpoints import FALLBACKS, REMEMBERED, kept, offered, trim, with_fresh
from spotd.core.domain.intents import AttemptId, JobId
from spotd.core.domain.jobs import Checkpoint, Job, Outputs
from spotd.core.domain.lineage import EARLIER_KEPT, UNPROVEN_KEPT
from spotd.core.domain.states import AttemptState, JobState
from spotd.core.domain.world import World
from spotd.daemon import object_keys
from spotd.daemon.garbage import SETTLED, EndedGarbage, sweep
from spotd_jobs.objects.api import ObjectInfo, ObjectStore, StoreError, StoreUnavailable
from spotd_jobs.objects.folder import FolderStore
from spotd_jobs.runner.manifest import ChunkIndex, new_mark
from spotd_jobs.spec.model import CheckpointPolicy
from spotd_jobs.wire.client.sinks import WINDOW
from spotd_jobs.wire.manifest import AcceptedManifest, checkpoint_prefix, verify_manifest
from spotd_jobs.wire.manifest_document import parse_manifest
from spotd_providers.contract.values import AttemptKey, InstanceState, Loss
from tests.unit.core.builders import NOW, job, world_with
from tests.unit.daemon.host import Host, text
from tests.unit.daemon.rig import SUBMIT, Rig
from tests.unit.store import values

MUCH = 1_000_000


def keeping(keep: int) -> dict[str, Any]:
    return {"spec": {"checkpoint": CheckpointPolicy(keep=keep)}}


def checkpoint(number: int, attempt: int = 1) -> Checkpoint:
    key = f"jobs/j1/attempts/{attempt}/checkpoints/c{number}.json"
    return Checkpoint(
        name=f"c{number}", attempt=attempt, step=number, bytes=1, at=NOW, manifest_key=key, sha256=f"{number:064x}"
    )


def names(some: tuple[Checkpoint, ...]) -> list[str]:
    return [c.name for c in some]


# --- what stays on the list ------------------------------------------------------------------------------------------


def test_a_job_without_a_machine_keeps_as_many_as_it_asked_for() -> None:
    item = job(checkpoints=tuple(checkpoint(n) for n in (5, 4, 3, 2, 1)), **keeping(2))
    assert names(kept(item, frozenset())) == ["c5", "c4"]


def test_while_a_machine_lives_its_fallbacks_stay_even_if_fewer_are_to_be_kept() -> None:
    item = job(checkpoints=tuple(checkpoint(n) for n in (5, 4, 3, 2, 1)), **keeping(1))
    assert names(kept(item, {1})) == ["c5", "c4", "c3"]


def test_what_an_attempt_was_offered_stays_however_much_it_publishes_itself() -> None:
    own = tuple(checkpoint(n, attempt=2) for n in (9, 8, 7, 6))
    item = job(checkpoints=own + tuple(checkpoint(n) for n in (5, 4, 3, 2, 1)), **keeping(1))
    assert names(kept(item, {2})) == ["c9", "c8", "c7", "c5", "c4", "c3"]


def test_what_a_machine_was_offered_that_is_still_being_destroyed_stays_too() -> None:
    third = tuple(checkpoint(n, attempt=3) for n in (9, 8, 7))
    second = (checkpoint(6, attempt=2),)
    item = job(checkpoints=third + second + (checkpoint(2), checkpoint(1)), **keeping(1))
    assert names(kept(item, {2, 3})) == ["c9", "c8", "c7", "c6", "c2", "c1"]


def test_many_checkpoints_of_one_attempt_push_none_of_an_earlier_one_off_the_list() -> None:
    item = job(checkpoints=(checkpoint(1),))
    fresh = [checkpoint(n, attempt=2) for n in range(2, 2 * REMEMBERED)]
    after = with_fresh(item, 2, fresh)
    assert len(after) == REMEMBERED + 1
    assert (after[0], after[-1]) == (fresh[-1], checkpoint(1))


def test_each_dropped_checkpoint_is_told_once() -> None:
    before = world_with(AttemptState.RUNNING)
    item = replace(before.jobs[JobId("j1")], checkpoints=tuple(checkpoint(n) for n in (5, 4, 3, 2, 1)))
    world = replace(before, jobs={item.id: item})
    plan = trim(world, [], NOW)
    assert [(e.kind, e.data["name"]) for e in plan.events] == [
        ("checkpoint.dropped", "c2"),
        ("checkpoint.dropped", "c1"),
    ]
    again = replace(world, jobs={item.id: plan.jobs[item.id]})
    assert trim(again, [], NOW).is_empty


def test_a_job_that_was_queued_again_is_taken_from_the_world() -> None:
    over = job(state=JobState.FAILED, checkpoints=tuple(checkpoint(n) for n in (5, 4, 3, 2, 1)))
    queued = replace(over, state=JobState.QUEUED)
    empty = World(policy=world_with(AttemptState.RUNNING).policy, jobs={queued.id: queued}, attempts={}, intents={})
    assert trim(empty, [over], NOW).jobs[over.id].state is JobState.QUEUED


# --- any history -----------------------------------------------------------------------------------------------------


PIECES: Final = (b"small 0", b"small 1", *(b"large piece %02d" % number for number in range(2, 12)))


class History:
    """One job over many machines, with the daemon's own rules and a real store; hosts behave as the runner does."""

    def __init__(self, objects: ObjectStore, keep: int, seed: int, disk: Path) -> None:
        self.disk = disk
        self.objects = objects
        self.random = Random(seed)
        self.job: Job = job(attempts_made=0, **keeping(keep))
        self.open: dict[int, ChunkIndex] = {}
        """By attempt that has not ended: the very memory of its runner, of which content is stored where."""
        self.counting: int | None = None
        self.offers: dict[int, tuple[Checkpoint, ...]] = {}
        self.unread: list[Checkpoint] = []
        self.outputs: dict[int, str] = {}
        self.seen: tuple[Job, frozenset[int]] | None = None
        self._serial = 0

    def begin(self) -> None:
        """An attempt is intended; its grant offers what the list holds."""
        if self.counting is not None:
            return
        number = self.job.attempts_made + 1
        self.job = replace(self.job, attempts_made=number)
        self.counting, self.open[number] = number, self._boot(number)
        self.offers[number] = offered(self.job)[:FALLBACKS]

    def restore(self) -> None:
        """An older runner has fetched one of the choices, whichever was good, and will refer to its chunks."""
        number = self.counting
        if number is None or not self.offers[number]:
            return
        chosen = self.random.choice(self.offers[number])
        for chunk in self.chunks(chosen):
            if not chunk.startswith(object_keys.data_prefix(self._id(number))):
                self.open[number]._keys.setdefault(chunk.rpartition("/")[2][:64], chunk)

    def restart_runner(self) -> None:
        """The runner is killed and started again on the same machine."""
        if self.counting is not None:
            self.open[self.counting] = self._boot(self.counting)

    def fail_to_publish(self) -> None:
        """Chunks are sent, and the manifest never is."""
        number = self.counting
        if number is None:
            return
        self._manifest(number, "failed", "checkpoint")
        if self.random.random() < 0.5:
            self.open[number].publishing()

    def _boot(self, number: int) -> ChunkIndex:
        return ChunkIndex(str(self.disk / f"known-{number}"), f"jobs/{self.job.id}/attempts/{number}/")

    def publish(self) -> None:
        """A checkpoint of some new content and some that the runner knows."""
        number = self.counting
        if number is None:
            return
        self._serial += 1
        name = f"c{self._serial}"
        data = self._manifest(number, name, "checkpoint")
        key = f"{checkpoint_prefix(self.job.id, number)}{name}.json"
        self.open[number].publishing()
        self.objects.put(key, data)
        self.open[number].published(json.loads(data)["files"])
        digest = hashlib.sha256(data).hexdigest()
        self.unread.append(
            Checkpoint(name=name, attempt=number, step=None, bytes=1, at=NOW, manifest_key=key, sha256=digest)
        )

    def store_outputs(self) -> None:
        """Outputs that may never count, or that are the job's from now on."""
        number = self.counting
        if number is None or number in self.outputs:
            return
        data, key = self._manifest(number, "outputs", "outputs"), object_keys.outputs_key(self._id(number))
        self.objects.put(key, data)
        self.outputs[number] = key
        if self.random.random() < 0.5:
            self.job = replace(self.job, outputs=Outputs(attempt=number, sha256=hashlib.sha256(data).hexdigest()))

    def needed_outputs(self) -> set[str]:
        pinned = None if self.job.outputs is None else self.job.outputs.attempt
        return {key for number, key in self.outputs.items() if number in self.open or number == pinned}

    def accept(self) -> None:
        """The daemon looks, verifies, and puts what is new on the list."""
        if self.counting is None:
            return
        for item in self.unread:
            assert isinstance(self.verified(item), AcceptedManifest)
        self.job = replace(self.job, checkpoints=with_fresh(self.job, self.counting, self.unread))
        self.unread = []
        self.offers[self.counting] = offered(self.job)[:FALLBACKS]

    def judge(self) -> None:
        """The attempt that counts proves what it resumed from, or fails from it."""
        number = self.counting
        if number is None or not self.offers[number]:
            return
        chosen = self.random.choice(self.offers[number])
        if chosen.attempt == number:
            return
        proof = self.random.random() < 0.5
        judged = replace(chosen, proven_by=number) if proof else replace(chosen, doubted_by=(number,))
        self.job = replace(self.job, checkpoints=tuple(judged if c == chosen else c for c in self.job.checkpoints))
        self.offers = {n: tuple(judged if c == chosen else c for c in some) for n, some in self.offers.items()}

    def stop_counting(self) -> None:
        self.unread, self.counting = [], None

    def end_one(self) -> None:
        """The provider says that the oldest machine is gone."""
        if self.open:
            number = min(self.open)
            if number == self.counting:
                self.stop_counting()
            del self.open[number]

    def shorten(self) -> None:
        """The first half of a round: the list is short, and what the second half will work on is fixed."""
        now_open = frozenset(self.open)
        self.job = replace(self.job, checkpoints=kept(self.job, now_open))
        self.seen = (self.job, now_open)

    def sweep(self) -> None:
        """The second half, as long after the first as it likes."""
        if self.seen is not None:
            sweep(self.objects, *self.seen, deleted_max=self.random.choice([1, 3, 1000]), settled=timedelta(0))
            self.seen = None

    def check(self) -> None:
        """Everything on the list, everything offered and everything a runner would refer to is there."""
        for item in self.job.checkpoints:
            assert isinstance(self.verified(item), AcceptedManifest)
        for number, known in self.open.items():
            for item in self.offers[number]:
                assert isinstance(self.verified(item), AcceptedManifest)
            for key in known._keys.values():
                assert self.objects.head(key) is not None
        for key in self.needed_outputs():
            for chunk in self._chunks(key):
                assert self.objects.head(chunk) is not None

    def verified(self, item: Checkpoint) -> object:
        data = self.objects.get(item.manifest_key, bytes_max=MUCH)
        assert hashlib.sha256(data).hexdigest() == item.sha256
        verdict = verify_manifest(data, self.job.id, item.attempt, None)
        assert isinstance(verdict, AcceptedManifest)
        assert all(self.objects.head(key) is not None for key in verdict.chunk_keys)
        return verdict

    def chunks(self, item: Checkpoint) -> list[str]:
        return self._chunks(item.manifest_key)

    def _chunks(self, key: str) -> list[str]:
        manifest = parse_manifest(self.objects.get(key, bytes_max=MUCH))
        return [chunk.key for entry in manifest.files for chunk in entry.chunks]

    def _id(self, number: int) -> AttemptId:
        return AttemptId(job=self.job.id, number=number)

    def _manifest(self, number: int, name: str, kind: str) -> bytes:
        known, mark = self.open[number], new_mark()
        pieces = {PIECES[self.random.randrange(12)] for _ in range(3)}
        chunks = []
        for content in sorted(pieces):
            digest = hashlib.sha256(content).hexdigest()
            key = known.claim(digest)
            if key is None:
                key = f"{object_keys.data_prefix(self._id(number))}{digest}{mark}"
                assert self.objects.head(key) is None, "no key is ever written twice"
                self.objects.put(key, content)
                known.sent(digest, key, len(content))
            chunks.append({"key": key, "sha256": digest, "size": len(content)})
        size = sum(len(content) for content in pieces)
        entry = {"path": f"{name}/w", "type": "file", "size": size, "mode": 420, "mtime_ns": 0, "target": None}
        document = {
            "schema": 1,
            "kind": kind,
            "job": self.job.id,
            "attempt": number,
            "name": name,
            "serial": self._serial,
            "step": None,
            "created_at": text(NOW),
            "bytes": size,
            "files": [{**entry, "chunks": chunks}],
            "previous": None,
        }
        return json.dumps(document).encode()


def lives(random: Random) -> list[str]:
    """Steps of a job over a few machines, with halves of retention rounds anywhere between them."""
    steps: list[str] = []
    for _ in range(random.randint(2, 6)):
        life = ["begin", "restore"][: random.randint(1, 2)]
        for _ in range(random.randint(0, 7)):
            life += random.choice([[], [], [], ["restart_runner"], ["fail_to_publish"]])
            life += ["publish", "accept"][: random.choice([1, 2, 2, 2])]
        life += random.choice([[], ["judge"]])
        life += random.choice([[], ["store_outputs"]])
        life += random.choice([["end_one"], ["end_one"], ["stop_counting"], ["stop_counting", "begin", "end_one"]])
        for step in life:
            steps += random.choice([[], [], ["shorten"], ["sweep"], ["shorten", "sweep"]])
            steps.append(step)
    return steps


@pytest.fixture(autouse=True, scope="module")
def _small_chunks() -> Iterator[None]:
    """Two of the pieces are too small to be part of two checkpoints."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spotd_jobs.runner.manifest.REUSED_MIN", len(PIECES[-1]))
        yield


@pytest.mark.long
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(keep=st.integers(min_value=1, max_value=4), seed=st.integers(min_value=0, max_value=2**32))
def test_whatever_happens_in_whatever_order_nothing_needed_is_deleted_and_all_garbage_is(
    tmp_path_factory: pytest.TempPathFactory, keep: int, seed: int
) -> None:
    objects = FolderStore(tmp_path_factory.mktemp("store"))
    history = History(objects, keep, seed, tmp_path_factory.mktemp("disk"))
    for step in lives(Random(seed)):
        getattr(history, step)()
        history.check()
    while history.open:
        history.end_one()
    for _ in range(200):
        history.shorten()
        before = len(list(objects.list("")))
        history.sweep()
        history.check()
        if len(list(objects.list(""))) == before:
            break
    assert len(history.job.checkpoints) <= keep + EARLIER_KEPT + UNPROVEN_KEPT
    needed = {c.manifest_key for c in history.job.checkpoints} | history.needed_outputs()
    needed |= {chunk for key in set(needed) for chunk in history._chunks(key)}
    assert {info.key for info in objects.list("")} == needed


def test_a_history_that_forgot_what_a_machine_was_offered_would_lose_a_chunk(tmp_path: Path) -> None:
    """The property above can fail: with a list cut to one under a living machine it does."""
    history = History(FolderStore(tmp_path / "store"), 1, 7, tmp_path)
    for step in ("begin", "publish", "accept", "publish", "accept", "stop_counting", "end_one", "begin", "restore"):
        getattr(history, step)()
    history.job = replace(history.job, checkpoints=())
    history.seen = (history.job, frozenset(history.open))
    history.sweep()
    with pytest.raises((AssertionError, StoreError)):
        history.check()


def test_a_running_job_that_saves_for_ever_does_not_fill_the_store(tmp_path: Path) -> None:
    history = History(FolderStore(tmp_path / "store"), 2, 11, tmp_path)
    history.begin()
    most = 0
    for _ in range(25):
        for step in ("publish", "accept", "shorten", "sweep"):
            getattr(history, step)()
            history.check()
        most = max(most, len(list(history.objects.list("jobs/j1/attempts/1/data/"))))
    assert len(list(history.objects.list("jobs/j1/attempts/1/checkpoints/"))) <= WINDOW + 2
    assert most < 30, "25 checkpoints of three pieces each, all of them under new keys once forgotten"


def test_a_runner_that_counted_on_more_than_the_daemon_thinks_would_lose_a_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The property above can fail: it does where the two halves of the rule are not the same."""
    monkeypatch.setattr("spotd_jobs.runner.manifest.WINDOW", 2 * WINDOW)
    with pytest.raises((AssertionError, StoreError)):
        test_a_running_job_that_saves_for_ever_does_not_fill_the_store(tmp_path)


# --- the sweep -------------------------------------------------------------------------------------------------------


def published(objects: FolderStore, attempt: int, *contents: bytes) -> tuple[Checkpoint, ...]:
    """Checkpoints of one attempt, newest first."""
    host = Host(objects, AttemptId(job=job().id, number=attempt))
    found = []
    for content in contents:
        name = f"c{content.decode()}"
        host.checkpoint(name, content)
        key = f"{checkpoint_prefix('j1', attempt)}{name}.json"
        digest = hashlib.sha256(objects.get(key, bytes_max=MUCH)).hexdigest()
        found.append(replace(checkpoint(1, attempt), name=name, manifest_key=key, sha256=digest))
    return tuple(reversed(found))


def left_by(objects: FolderStore, every: tuple[Checkpoint, ...], listed: slice) -> list[str]:
    """Names of the manifests that stay of a running attempt; each is a minute older than the one before."""
    now = time.time()
    for minutes, one in enumerate(every):
        manifest = parse_manifest(objects.get(one.manifest_key, bytes_max=MUCH))
        for key in (one.manifest_key, *manifest.chunk_sizes()):
            os.utime(objects._path(key), (now - 60 * minutes,) * 2)
    sweep(objects, job(attempts_made=1, checkpoints=every[listed]), frozenset({1}))
    return [one.name for one in every if objects.head(one.manifest_key) is not None]


def test_a_running_attempt_keeps_what_is_hardly_older_than_its_newest_manifests(tmp_path: Path) -> None:
    objects = FolderStore(tmp_path)
    every = published(objects, 1, *(b"%d" % number for number in range(WINDOW + 4)))
    minutes = int(SETTLED / timedelta(minutes=1))
    assert left_by(objects, every, slice(3)) == names(every[: WINDOW + minutes])


def test_a_manifest_that_is_yet_to_be_read_stays_however_old_its_store_calls_it(tmp_path: Path) -> None:
    objects = FolderStore(tmp_path)
    newest, *others = published(objects, 1, *(b"%d" % number for number in range(WINDOW + 4)))
    assert newest.name in left_by(objects, (*others, newest), slice(3))


def test_logs_events_and_outputs_of_a_job_that_is_over_stay_and_its_grant_goes(tmp_path: Path) -> None:
    objects = FolderStore(tmp_path)
    newest, _ = published(objects, 1, b"1", b"2")
    host = Host(objects, AttemptId(job=job().id, number=1))
    host.log("a line")
    host.event("boot", boot=1, runner="1", python="3", restart=False)
    host.beat()
    host.outputs("model", b"the result")
    host.raw("grant.json", b"with secrets")
    sweep(objects, job(attempts_made=1, state=JobState.SUCCEEDED, checkpoints=(newest,)), frozenset())
    left = [info.key.removeprefix("jobs/j1/attempts/1/") for info in objects.list("")]
    kinds = [key.split("/")[0] for key in left]
    assert kinds == ["checkpoints", "data", "data", "events", "heartbeat.json", "log", "outputs"]


def test_nothing_of_a_job_is_deleted_while_one_of_its_manifests_is_not_the_accepted_one(tmp_path: Path) -> None:
    objects = FolderStore(tmp_path)
    newest, _ = published(objects, 1, b"1", b"2")
    objects.put(newest.manifest_key, b"{}")
    before = [info.key for info in objects.list("")]
    with pytest.raises(StoreError, match="not the one that was accepted"):
        sweep(objects, job(attempts_made=1, checkpoints=(newest,)), frozenset())
    assert [info.key for info in objects.list("")] == before


def test_what_an_open_attempt_wrote_is_left_alone_however_much_it_is(tmp_path: Path) -> None:
    objects = FolderStore(tmp_path)
    published(objects, 2, b"1", b"2", b"3")
    before = [info.key for info in objects.list("")]
    done = sweep(objects, job(attempts_made=2, checkpoints=()), frozenset({2}))
    assert done.objects == 0
    assert [info.key for info in objects.list("")] == before


def test_one_sweep_deletes_a_bounded_number_and_says_that_there_is_more(tmp_path: Path) -> None:
    objects = FolderStore(tmp_path)
    published(objects, 1, b"1", b"2", b"3")
    item = job(attempts_made=1)
    done = sweep(objects, item, frozenset(), deleted_max=4)
    assert (done.objects, done.more) == (4, True)
    last = sweep(objects, item, frozenset(), deleted_max=4)
    assert (last.objects, last.more, last.clean) == (2, False, frozenset({AttemptId(job=item.id, number=1)}))
    assert list(objects.list("")) == []


# --- in the daemon ---------------------------------------------------------------------------------------------------


def retention(rig: Rig, objects: ObjectStore | None = None) -> EndedGarbage:
    return EndedGarbage(
        objects or rig.objects,
        commits=rig.commits,
        database=rig.database,
        clock=rig.clock,
        log=rig.log,
        inline=True,
    )


def data_keys(rig: Rig, attempt: int) -> list[str]:
    return [info.key for info in rig.objects.list(f"jobs/j1/attempts/{attempt}/data/")]


def _newest_is(rig: Rig, name: JobId, wanted: str) -> bool:
    return names(rig.job(name).checkpoints)[:1] == [wanted]


@pytest.mark.anyio
async def test_a_dropped_checkpoint_does_not_come_back_as_the_newest(rig: Rig) -> None:
    host_monitor = retention(rig)
    async with rig.running():
        name = await rig.submit()
        host = await rig.until_running(name, 1)
        for number in range(1, 6):
            host.checkpoint(f"c{number}", str(number).encode())
            await rig.until(partial(_newest_is, rig, name, f"c{number}"))
        await host_monitor.controller.run_once()
        host.beat()
        cycles = rig.control_loop.cycles
        await rig.until(lambda: rig.control_loop.cycles > cycles + 3)
    assert names(rig.job(name).checkpoints) == ["c5", "c4", "c3"]
    assert rig.kinds(name).count("checkpoint.dropped") == 2
    assert len(data_keys(rig, 1)) == 5, "the attempt lives, so what it wrote is left alone"


@pytest.mark.anyio
async def test_a_job_over_many_machines_keeps_what_it_asked_for_and_what_nothing_has_made_needless(rig: Rig) -> None:
    host_monitor = retention(rig)
    async with rig.running():
        name = await rig.submit()
        for number in (1, 2, 3):
            host = await rig.until_running(name, number)
            for turn in ("a", "b"):
                host.checkpoint(f"c{number}{turn}", f"{number}{turn}".encode())
            if number < 3:
                rig.shop.set_state(AttemptKey(f"spotd-lab-j1-{number}"), InstanceState.PAUSED, Loss.OUTBID)
            else:
                host.exit("succeeded")
        await rig.until_state(name, JobState.SUCCEEDED)
        await rig.until(lambda: all(a.state is AttemptState.ENDED for a in rig.attempts(name)))
        await host_monitor.controller.run_once()
        await host_monitor.controller.run_once()
    assert names(rig.job(name).checkpoints) == ["c3b", "c3a", "c2b", "c1b", "c1a"]
    assert [len(data_keys(rig, number)) for number in (1, 2, 3)] == [2, 1, 2]
    assert "retention.swept" in rig.log.events()


@pytest.mark.anyio
async def test_what_is_remembered_of_an_ended_job_is_a_few_objects(rig: Rig) -> None:
    collector = retention(rig)
    async with rig.running():
        name = await rig.submit()
        for number in (1, 2, 3):
            host = await rig.until_running(name, number)
            if number < 3:
                rig.shop.set_state(AttemptKey(f"spotd-lab-j1-{number}"), InstanceState.PAUSED, Loss.OUTBID)
            else:
                host.exit("succeeded")
        await rig.until_state(name, JobState.SUCCEEDED)
        await rig.until(lambda: all(a.state is AttemptState.ENDED for a in rig.attempts(name)))
        await collector.controller.run_once()
        await collector.controller.run_once()
    known = collector._jobs[name]
    assert known.clean == (1, 2, 3)
    held = [one for one in gc.get_referents(known) if not isinstance(one, type | bool)]
    assert len(held) <= 4
    assert sum(map(sys.getsizeof, (known, *held, *known.clean))) < 400, (
        "it is kept for thousands of jobs that have ended"
    )


async def ended(rig: Rig, numbers: Iterable[int]) -> None:
    """Let these jobs have ended, each after one machine."""
    over = [job(number, state=JobState.SUCCEEDED, attempts_made=1) for number in numbers]
    await rig.commits.commit(lambda _world, _now: values.plan(*over), SUBMIT)


@pytest.mark.anyio
async def test_a_job_that_has_just_ended_is_swept_before_hundreds_that_ended_long_ago(rig: Rig) -> None:
    await ended(rig, range(100, 300))
    collector = retention(rig)
    async with rig.running():
        name = await rig.submit()
        host = await rig.until_running(name, 1)
        await collector.controller.run_once()
        host.exit("succeeded")
        await rig.until(lambda: all(a.state is AttemptState.ENDED for a in rig.attempts(name)))
        for _ in range(2):
            await collector.controller.run_once()
    assert collector._jobs[name].swept_for is not None


@pytest.mark.anyio
async def test_ended_jobs_have_their_turn_again_and_again_though_few_are_remembered(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spotd.daemon.garbage.REMEMBERED_MAX", 5)
    swept: Counter[str] = Counter()

    class Counting(FolderStore):
        def list_after(self, prefix: str, after: str, *, page: int = 1000) -> Iterator[ObjectInfo]:
            swept[prefix.split("/")[1]] += 1
            return super().list_after(prefix, after, page=page)

    await ended(rig, range(100, 140))
    collector = retention(rig, Counting(rig.folder / "objects"))
    for _ in range(15):
        await collector.controller.run_once()
        assert len(collector._jobs) <= 5
    assert len(swept) == 40
    assert min(swept.values()) >= 2


@pytest.mark.anyio
async def test_garbage_that_a_crash_left_behind_is_found_by_the_next_process(rig: Rig) -> None:
    async with rig.running():
        name = await rig.submit()
        host = await rig.until_running(name, 1)
        for number in range(1, 6):
            host.checkpoint(f"c{number}", str(number).encode())
        host.exit("succeeded")
        await rig.until_state(name, JobState.SUCCEEDED)
        await rig.until(lambda: all(a.state is AttemptState.ENDED for a in rig.attempts(name)))
    after = rig.reborn()
    await retention(after).controller.run_once()
    assert len(data_keys(after, 1)) == 3


class Away(FolderStore):
    """A store that cannot be listed."""

    def list_after(self, prefix: str, after: str, *, page: int = 1000) -> NoReturn:
        raise StoreUnavailable("the checkpoint store is away")


@pytest.mark.anyio
async def test_a_store_that_is_away_is_told_once_and_costs_nothing_else(rig: Rig) -> None:
    async with rig.running():
        name = await rig.submit()
        host = await rig.until_running(name, 1)
        host.checkpoint("c1")
        host.exit("succeeded")
        await rig.until_state(name, JobState.SUCCEEDED)
        await rig.until(lambda: all(a.state is AttemptState.ENDED for a in rig.attempts(name)))
        host_monitor = retention(rig, Away(rig.folder / "objects"))
        await host_monitor.controller.run_once()
        await host_monitor.controller.run_once()
    assert rig.log.events().count("retention.held") == 1
    assert names(rig.job(name).checkpoints) == ["c1"]


@pytest.mark.anyio
async def test_the_loop_looks_about_once_a_minute(rig: Rig) -> None:
    import anyio

    host_monitor = retention(rig)
    async with rig.running(), anyio.create_task_group() as group:
        group.start_soon(host_monitor.controller.run)
        name = await rig.submit()
        host = await rig.until_running(name, 1)
        for number in range(1, 6):
            host.checkpoint(f"c{number}", str(number).encode())
        await rig.until(lambda: len(rig.job(name).checkpoints) == 5)
        began = rig.clock.now()
        await rig.until(lambda: len(rig.job(name).checkpoints) == 3)
        assert rig.clock.now() - began <= timedelta(seconds=65)
        group.cancel_scope.cancel()
