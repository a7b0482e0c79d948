"""What an owner does with checkpoints: verify, pin, remove, and the metric by which the best one is kept."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest

from spotd.api.requests import JobDraft, Submission
from spotd.api.responses import Invalid, NotFound, StateConflict
from spotd.api.schemas.jobs import VerificationResponse
from spotd.core.checkpoints import find_checkpoint, kept
from spotd.core.domain.intents import AttemptId, JobId
from spotd.core.domain.states import AttemptState, JobState
from spotd.daemon.hosts.host_reader import ReadMemory
from spotd.daemon.hosts.manifests import FILE_BYTES_MAX
from spotd.daemon.hosts.reader import read_host
from spotd_jobs.objects.api import ObjectStore, StoreUnavailable
from spotd_jobs.objects.folder import FolderStore
from spotd_jobs.spec.model import CheckpointPolicy, MetricBest
from spotd_providers.contract.values import AttemptKey, InstanceState, Loss
from tests.unit.core.builders import NOW, job, world_with
from tests.unit.daemon.checkpoints.test_ended_garbage import checkpoint, data_keys, names, retention
from tests.unit.daemon.host import Host
from tests.unit.daemon.rig import Rig

pytestmark = pytest.mark.anyio


async def ended(rig: Rig, *contents: str, keep: int = 3) -> JobId:
    """A job that wrote these checkpoints and is over."""
    name = await rig.submit(job(spec={"checkpoint": CheckpointPolicy(keep=keep), "retry_errors": 0}))
    host = await rig.until_running(name, 1)
    for content in contents:
        host.checkpoint(f"c-{content}", content.encode())
    host.exit("failed", code=1)
    await rig.until_state(name, JobState.FAILED)
    await rig.until(lambda: all(a.state is AttemptState.ENDED for a in rig.attempts(name)))
    return name


async def verified(rig: Rig, name: str, *wanted: str, every: bool = False) -> list[VerificationResponse]:
    records = [r async for r in rig.handlers().checkpoints.verify(name, wanted, every=every)]
    return [r for r in records if r["kind"] == "verified"]


# --- verify ----------------------------------------------------------------------------------------------------------


async def test_every_byte_of_what_is_stored_is_read(rig: Rig) -> None:
    async with rig.ready():
        name = await ended(rig, "one", "two")
        (newest,) = await verified(rig, name)
        assert (newest["name"], newest["ok"], newest["bytes_done"], newest["problem"]) == ("c-two", True, 3, "")
        assert [r["name"] for r in await verified(rig, name, every=True)] == ["c-two", "c-one"]


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (b"0ne", "c-one/weights: chunk 7692c3ad3540 holds other content"),
        (b"on", "c-one/weights: chunk 7692c3ad3540 holds other content"),
        (b"onee", "larger than the 3 bytes"),
        (None, "c-one/weights: chunk 7692c3ad3540 is gone"),
    ],
    ids=["flip", "cut", "longer", "gone"],
)
async def test_a_damaged_chunk_is_named_and_told_in_the_job_s_history(rig: Rig, harm: bytes | None, words: str) -> None:
    async with rig.ready():
        name = await ended(rig, "one", "two")
        key = next(k for k in data_keys(rig, 1) if k.endswith(hashlib.sha256(b"one").hexdigest()))
        rig.objects.delete([key])
        if harm is not None:
            rig.objects.put(key, harm)
        sound, damaged = await verified(rig, name, every=True)
        assert (sound["ok"], damaged["ok"], damaged["damaged"]) == (True, False, 1)
        assert words in damaged["problem"]
        assert rig.kinds(name).count("checkpoint.damaged") == 1


async def test_a_manifest_that_was_swapped_is_no_checkpoint_any_more(rig: Rig) -> None:
    async with rig.ready():
        name = await ended(rig, "one", "two")
        newest, older = rig.job(name).checkpoints
        rig.objects.put(newest.manifest_key, rig.objects.get(older.manifest_key, bytes_max=10_000))
        (found,) = await verified(rig, name)
        assert (found["ok"], found["problem"]) == (False, "its manifest is not the one that was accepted")
        rig.objects.delete([newest.manifest_key])
        (found,) = await verified(rig, name)
        assert found["problem"] == "its manifest is gone from the store"


async def test_a_checkpoint_that_does_not_exist_is_not_found(rig: Rig) -> None:
    async with rig.ready():
        name = await ended(rig, "one")
        for wanted in ("c-two", "c-one@2", "best"):
            with pytest.raises(NotFound, match="has no checkpoint"):
                await verified(rig, name, wanted)


# --- pin and remove --------------------------------------------------------------------------------------------------


async def test_a_pinned_checkpoint_outlives_everything_until_it_is_unpinned(rig: Rig) -> None:
    host_monitor = retention(rig)
    async with rig.ready():
        name = await ended(rig, "one", "two", "three", keep=1)
        await rig.handlers().checkpoints.pin(name, ["c-one"], pinned=True)
        for _ in range(3):
            await host_monitor.controller.run_once()
        assert names(rig.job(name).checkpoints) == ["c-three", "c-one"]
        assert len(data_keys(rig, 1)) == 2
        assert [r["ok"] for r in await verified(rig, name, every=True)] == [True, True]
        await rig.handlers().checkpoints.pin(name, ["c-one"], pinned=False)
        for _ in range(3):
            await host_monitor.controller.run_once()
        assert names(rig.job(name).checkpoints) == ["c-three"]
        assert len(data_keys(rig, 1)) == 1


async def test_a_removed_checkpoint_is_never_resumed_from_and_its_content_goes(rig: Rig) -> None:
    host_monitor = retention(rig)
    async with rig.ready():
        name = await ended(rig, "one", "two")
        await host_monitor.controller.run_once()
        (gone,) = await rig.handlers().checkpoints.remove(name, ["c-two"])
        assert gone["name"] == "c-two"
        await host_monitor.controller.run_once()
        assert len(data_keys(rig, 1)) == 1
        await rig.handlers().jobs.retry(name)
        await rig.until(lambda: len(rig.attempts(name)) > 1)
        await rig.until(lambda: rig.attempts(name)[-1].ref is not None)
        assert [r.name for r in rig.grant(name, rig.job(name).attempts_made).restore] == ["c-one"]


async def test_what_is_pinned_or_in_reach_of_a_machine_cannot_be_removed(rig: Rig) -> None:
    async with rig.ready():
        name = await rig.submit()
        host = await rig.until_running(name, 1)
        host.checkpoint("c1")
        await rig.until(lambda: bool(rig.job(name).checkpoints))
        with pytest.raises(StateConflict, match="may still be read by a machine of attempt 1"):
            await rig.handlers().checkpoints.remove(name, ["c1"])
        await rig.handlers().checkpoints.pin(name, ["c1"], pinned=True)
        with pytest.raises(StateConflict, match="is pinned"):
            await rig.handlers().checkpoints.remove(name, ["c1"])
        assert names(rig.job(name).checkpoints) == ["c1"]


async def test_of_several_names_one_that_is_wrong_changes_nothing(rig: Rig) -> None:
    async with rig.ready():
        name = await ended(rig, "one")
        with pytest.raises(NotFound):
            await rig.handlers().checkpoints.pin(name, ["c-one", "c-nine"], pinned=True)
        assert not rig.job(name).checkpoints[0].pinned


def test_a_name_that_two_attempts_wrote_means_the_newest_unless_the_attempt_is_named() -> None:
    older, newer = checkpoint(1, attempt=1), checkpoint(1, attempt=2)
    item = job(checkpoints=(newer, older))
    assert find_checkpoint(item, item.checkpoints, "c1") == newer
    assert find_checkpoint(item, item.checkpoints, "c1@1") == older
    assert find_checkpoint(item, item.checkpoints, "newest") == newer
    assert find_checkpoint(item, item.checkpoints, "c1@3") is None


# --- begin from another job's ---------------------------------------------------------------------------------------


def to_submit(resume_from: str) -> Submission:
    data = {"name": "next", "run": "true", "image": "scratch", "resources": {"gpu": "RTX_4090:1"}}
    return Submission(draft=JobDraft(data={**data, "price": {"max_price": 1.0}}), resume_from=resume_from)


async def begun_from(rig: Rig, resume_from: str) -> JobId:
    return JobId((await rig.handlers().submissions.submit(to_submit(resume_from)))["job"]["id"])


async def test_a_job_begins_from_another_jobs_checkpoint(rig: Rig) -> None:
    async with rig.ready():
        source = await ended(rig, "one", "two", "three")
        plan = await rig.handlers().submissions.plan(to_submit("").draft, f"{source}:c-two")
        assert plan["resume_from"] is not None
        assert (plan["resume_from"]["name"], plan["resume_from"]["job"]) == ("c-two", source)
        name = await begun_from(rig, f"{source}:c-two")
        await rig.until(lambda: bool(rig.attempts(name)) and rig.attempts(name)[-1].ref is not None)
        (offer,) = rig.grant(name, 1).restore
        assert (offer.name, offer.manifest.key) == ("c-two", f"jobs/{source}/attempts/1/checkpoints/c-two.json")
        (row,) = await rig.handlers().checkpoints.entries(name)
        assert (row["attempt"], row["job"], row["pinned"]) == (0, source, False)
        assert [r["ok"] for r in await verified(rig, name)] == [True]
        read = [piece async for piece in rig.handlers().files.content(name, "newest", "c-two/weights")]
        assert b"".join(read) == b"two"
        assert (
            "from checkpoint c-two of another job" in rig.store.read(lambda r: r.events(job_id=name))[0].event.message
        )


async def test_without_a_name_it_begins_from_the_newest_and_can_fall_back(rig: Rig) -> None:
    async with rig.ready():
        source = await ended(rig, "one", "two", "three", "four", keep=5)
        name = await begun_from(rig, source)
        assert names(rig.job(name).checkpoints) == ["c-four", "c-three", "c-two"]


async def test_what_another_job_begins_from_stays_until_that_job_needs_it_no_more(rig: Rig) -> None:
    host_monitor = retention(rig)
    async with rig.ready():
        source = await ended(rig, "one", "two", keep=1)
        name = await begun_from(rig, f"{source}:c-one")
        await rig.until(lambda: bool(rig.attempts(name)) and rig.attempts(name)[-1].ref is not None)
        for _ in range(3):
            await host_monitor.controller.run_once()
        assert names(rig.job(source).checkpoints) == ["c-two"], "its own list is as short as it was asked to be"
        assert [r["ok"] for r in await verified(rig, name)] == [True]
        host = await rig.until_running(name, 1)
        for content in ("a", "b", "c"):
            host.checkpoint(content, content.encode())
        await rig.until(lambda: len(rig.job(name).checkpoints) == 4)
        await host_monitor.controller.run_once()
        assert [r["ok"] for r in await verified(rig, name, every=True)] == [True] * 4, "its machine may still read it"
        host.exit("succeeded")
        await rig.until_state(name, JobState.SUCCEEDED)
        await rig.until(lambda: all(a.state is AttemptState.ENDED for a in rig.attempts(name)))
        for _ in range(4):
            await host_monitor.controller.run_once()
        assert names(rig.job(name).checkpoints) == ["c", "b", "a", "c-one"], (
            "nothing has shown that the new ones are good"
        )
        await rig.handlers().checkpoints.remove(name, ["c-one"])
        for _ in range(4):
            await host_monitor.controller.run_once()
        left = [i.key for i in rig.objects.list(f"jobs/{source}/attempts/1/data/")]
        assert left == [f"jobs/{source}/attempts/1/data/{hashlib.sha256(b'two').hexdigest()}"]


async def test_what_cannot_be_resumed_from_is_refused_before_anything_is_queued(rig: Rig) -> None:
    async with rig.ready():
        source = await ended(rig, "one")
        with pytest.raises(NotFound, match="there is no job"):
            await begun_from(rig, "nobody")
        with pytest.raises(NotFound, match="has no checkpoint 'c-nine'"):
            await begun_from(rig, f"{source}:c-nine")
        rig.objects.put(rig.job(source).checkpoints[0].manifest_key, b"{}")
        with pytest.raises(Invalid, match="cannot be resumed from: its manifest is not the one"):
            await begun_from(rig, source)
        assert len(rig.store.read(lambda reads: reads.jobs())) == 1


# --- what could not be resumed from ----------------------------------------------------------------------------------


async def test_a_fallback_of_the_host_is_an_event_and_a_line_of_the_receipt(rig: Rig) -> None:
    async with rig.ready():
        name = await rig.submit()
        host = await rig.until_running(name, 1)
        host.event("checkpoint_fallback", name="c9", reason="a chunk is gone from the store", next=None)
        await rig.until(lambda: "checkpoint.fallback" in rig.kinds(name))
        (receipt,) = (await rig.handlers().receipts.cost(name))["receipts"]
        (line,) = receipt["fallbacks"]
        assert (line["attempt"], line["name"], line["next"]) == (1, "c9", None)
        assert line["reason"] == "a chunk is gone from the store"
        host.beat()
        cycles = rig.control_loop.cycles
        await rig.until(lambda: rig.control_loop.cycles > cycles + 3)
        assert rig.kinds(name).count("checkpoint.fallback") == 1
        assert [r["fallbacks"] for r in (await rig.handlers().receipts.cost(None))["receipts"]] == [[line]]


async def test_a_checkpoint_that_cannot_even_be_offered_is_told_the_same_way(rig: Rig) -> None:
    async with rig.ready():
        name = await rig.submit()
        host = await rig.until_running(name, 1)
        for number in (1, 2, 3):
            host.checkpoint(f"c{number}", str(number).encode())
        await rig.until(lambda: len(rig.job(name).checkpoints) == 3)
        for number in (2, 3):
            rig.objects.put(f"jobs/{name}/attempts/1/checkpoints/c{number}.json", b"{}")
        rig.shop.set_state(AttemptKey(f"spotd-lab-{name}-1"), InstanceState.PAUSED, Loss.OUTBID)
        await rig.until(lambda: len(rig.attempts(name)) == 2 and rig.attempts(name)[-1].ref is not None)
        assert [r.name for r in rig.grant(name, 2).restore] == ["c1"]
        (receipt,) = (await rig.handlers().receipts.cost(name))["receipts"]
        assert [(f["attempt"], f["name"], f["next"]) for f in receipt["fallbacks"]] == [
            (2, "c3", "c2"),
            (2, "c2", "c1"),
        ]


# --- the best by a metric --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("best", "name"), [(MetricBest.LOWEST, "c2"), (MetricBest.HIGHEST, "c1")])
def test_the_best_is_kept_beside_the_newest(best: MetricBest, name: str) -> None:
    told = [replace(checkpoint(n), metric=value) for n, value in ((5, None), (4, 0.5), (3, 0.4), (2, 0.1), (1, 0.9))]
    item = job(checkpoints=tuple(told), spec={"checkpoint": CheckpointPolicy(keep=1, metric="loss", best=best)})
    assert names(kept(item, frozenset())) == ["c5", name]


def test_without_a_metric_no_checkpoint_is_the_best() -> None:
    told = tuple(replace(checkpoint(n), metric=1.0) for n in (2, 1))
    assert names(kept(job(checkpoints=told, spec={"checkpoint": CheckpointPolicy(keep=1)}), frozenset())) == ["c2"]


def of_host(objects: ObjectStore, files: dict[str, bytes]) -> Host:
    """A host that has published one checkpoint of these files."""
    host = Host(objects, AttemptId(job=job().id, number=1))
    host.beat()
    document = host.manifest("c1", b"weights")
    rows = []
    for path, content in files.items():
        digest = hashlib.sha256(content).hexdigest()
        host.raw(f"data/{digest}", content)
        chunk = {"key": f"jobs/j1/attempts/1/data/{digest}", "sha256": digest, "size": len(content)}
        rows.append({**document["files"][0], "path": f"c1/{path}", "size": len(content), "chunks": [chunk]})
    document |= {"files": rows, "bytes": sum(row["size"] for row in rows)}
    host.raw("checkpoints/c1.json", json.dumps(document).encode())
    return host


def seen(objects: ObjectStore, view: ReadMemory | None = None) -> list[float | None]:
    item = job(spec={"checkpoint": CheckpointPolicy(metric="loss")}, attempts_made=1)
    (running,) = world_with(AttemptState.RUNNING).attempts.values()
    report = read_host(objects, view or ReadMemory(), running, item, at=NOW, dated=lambda at: at)
    return [c.metric for c in report.checkpoints]


@pytest.mark.parametrize(
    ("files", "value"),
    [
        ({"metrics.json": b'{"loss": 0.25, "step": 3}'}, 0.25),
        ({"metrics.json": b'{"loss": 3}'}, 3.0),
        ({"trainer_state.json": b'{"log_history": [{"loss": 2}, {"loss": 1}, {"other": 5}]}'}, 1.0),
        ({"metrics.json": b"{}", "trainer_state.json": b'{"log_history": [{"loss": 2}]}'}, 2.0),
        ({"metrics.json": b'{"loss": true}'}, None),
        ({"metrics.json": b'{"loss": NaN}'}, None),
        ({"metrics.json": b'{"loss": 1e999}'}, None),
        ({"metrics.json": b'{"loss": ' + b"9" * 400 + b"}"}, None),
        ({"metrics.json": b'{"loss": "0.1"}'}, None),
        ({"metrics.json": b"[" * 100_000}, None),
        ({"metrics.json": b"\xff\xfe"}, None),
        ({"metrics.json": b'{"loss": 1}' + b" " * FILE_BYTES_MAX}, None),
        ({"trainer_state.json": b'{"log_history": {"loss": 1}}'}, None),
        ({"deeper/metrics.json": b'{"loss": 1}'}, None),
    ],
    ids=[
        "float",
        "integer",
        "trainer",
        "both",
        "bool",
        "nan",
        "inf",
        "huge",
        "text",
        "deep",
        "bytes",
        "large",
        "odd",
        "deeper",
    ],
)
def test_the_metric_is_read_from_the_checkpoint_and_nothing_else_is_believed(
    rig: Rig, files: dict[str, bytes], value: float | None
) -> None:
    of_host(rig.objects, {"weights": b"w", **files})
    assert seen(rig.objects) == [value]


def test_a_metric_of_other_bytes_than_were_published_is_not_believed(rig: Rig) -> None:
    of_host(rig.objects, {"weights": b"w", "metrics.json": b'{"loss": 1}'})
    [key] = [one.key for one in rig.objects.list("jobs/") if rig.objects.get(one.key, bytes_max=9999) == b'{"loss": 1}']
    rig.objects.put(key, b'{"loss": 2}')
    assert seen(rig.objects) == [None]


class Flaky(FolderStore):
    """A store that goes away when a certain object is read, once."""

    away_for = ""

    def get(self, key: str, *, bytes_max: int, version: str | None = None) -> bytes:
        if self.away_for and key.endswith(self.away_for):
            self.away_for = ""
            raise StoreUnavailable("the checkpoint store is away")
        return super().get(key, bytes_max=bytes_max, version=version)


def test_a_store_that_goes_away_in_the_middle_of_a_look_makes_no_checkpoint_old_news(rig: Rig) -> None:
    of_host(rig.objects, {"metrics.json": b'{"loss": 0.5}'})
    objects = Flaky(rig.folder / "objects")
    objects.away_for = hashlib.sha256(b'{"loss": 0.5}').hexdigest()
    view = ReadMemory()
    with pytest.raises(StoreUnavailable):
        seen(objects, view)
    assert seen(objects, view) == [0.5]


def test_a_checkpoint_judged_before_the_store_went_away_is_judged_again(rig: Rig) -> None:
    host = of_host(rig.objects, {"weights": b"w"})
    host.checkpoint("c2", b"more")
    objects = Flaky(rig.folder / "objects")
    objects.away_for = "checkpoints/c2.json"
    view = ReadMemory()
    with pytest.raises(StoreUnavailable):
        seen(objects, view)
    assert len(seen(objects, view)) == 2


async def test_the_best_is_marked_and_survives_the_rounds(rig: Rig) -> None:
    host_monitor = retention(rig)
    async with rig.ready():
        policy = CheckpointPolicy(keep=1, metric="loss")
        name = await rig.submit(job(spec={"checkpoint": policy}))
        host = await rig.until_running(name, 1)
        for number, loss in ((1, 0.5), (2, 0.1), (3, 0.3)):
            content = json.dumps({"loss": loss}).encode()
            document = host.manifest(f"c{number}", content)
            document["files"][0]["path"] = f"c{number}/metrics.json"
            host.raw(f"data/{hashlib.sha256(content).hexdigest()}", content)
            host.raw(f"checkpoints/c{number}.json", json.dumps(document).encode())
        host.exit("succeeded")
        await rig.until_state(name, JobState.SUCCEEDED)
        await rig.until(lambda: all(a.state is AttemptState.ENDED for a in rig.attempts(name)))
        await host_monitor.controller.run_once()
        rows = await rig.handlers().checkpoints.entries(name)
        assert [(r["name"], r["metric"], r["best"]) for r in rows] == [("c3", 0.3, False), ("c2", 0.1, True)]
        pulled = await rig.handlers().files.entries(name, "best")
        assert pulled["name"] == "c2"
