"""Chunks, manifests and restores: what goes up comes back, and what is damaged never does."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotd_jobs.runner import manifest as tree
from spotd_jobs.runner import restore
from spotd_jobs.runner.manifest import REUSED_MIN, ChunkIndex
from spotd_jobs.runner.store import GivenUp
from spotd_jobs.runner.upload import Progress, TreeUpload, Yielded
from spotd_jobs.wire.client.sinks import DiskFull
from spotd_jobs.wire.manifest import AcceptedManifest, verify_manifest
from spotd_jobs.wire.manifest_document import parse_manifest
from tests.integration.runner.inside import restore_into, runner_grant, store_of, upload_tree
from tests.integration.runner.rig import JOB, Rig, until
from tests.integration.runner.servers import Answer, Server

NAMES = st.text(st.sampled_from("abcXYZ0189._- éß"), min_size=1, max_size=12).filter(
    lambda name: name not in {".", ".."}
)
TREES = st.dictionaries(
    st.lists(NAMES, min_size=1, max_size=3).map(tuple),
    st.tuples(st.binary(max_size=400), st.sampled_from([0o600, 0o644, 0o755])),
    min_size=1,
    max_size=6,
)


@settings(max_examples=25, deadline=None)
@given(content=TREES, chunk_bytes=st.integers(1, 130))
def test_any_tree_comes_back_as_it_was(content: dict[tuple[str, ...], tuple[bytes, int]], chunk_bytes: int) -> None:
    with TemporaryDirectory() as temporary, Rig(Path(temporary)) as rig:
        folder = rig.folder / "ckpt"
        written: dict[str, tuple[bytes, int, int]] = {}
        for parts, (data, mode) in content.items():
            place = folder.joinpath("step-1", *parts)
            if any(above.is_file() for above in place.parents) or place.is_dir():
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
            place.chmod(mode)
            written[str(place.relative_to(folder))] = (data, mode, place.stat().st_mtime_ns)
        store = store_of(runner_grant(rig))
        data = upload_tree(rig, store, folder, "step-1", chunk_bytes)
        verdict = verify_manifest(data, JOB, 1, rig.store.head)
        assert isinstance(verdict, AcceptedManifest), verdict
        back = restore_into(rig, rig.folder / "back", [offer(rig, data, "step-1")]).run()
        assert back is not None
        found = {
            str(path.relative_to(rig.folder / "back")): (
                path.read_bytes(),
                path.stat().st_mode & 0o777,
                path.stat().st_mtime_ns,
            )
            for path in (rig.folder / "back").rglob("*")
            if path.is_file()
        }
        assert found == written


def test_the_blocks_of_a_chunk_are_written_in_pieces_to_all_their_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore, "_WRITE_BYTES", 7)
    large, small = tmp_path / "large", tmp_path / "small"
    data = bytes(range(100))
    for places in (
        [restore.Placement(str(large), 5, 0, 100)],
        [restore.Placement(str(large), 5, 0, 60), restore.Placement(str(small), 0, 60, 40)],
    ):
        large.write_bytes(bytes(110))
        small.write_bytes(b"")
        writer = restore.ChunkWriter(places)
        for first in (0, 33, 66):
            writer.write(memoryview(data)[first : first + 33])
        writer.write(memoryview(data)[99:])
        writer.close()
        assert large.read_bytes()[5 : 5 + places[0].length] + small.read_bytes() == data
        assert large.read_bytes()[:5] + large.read_bytes()[105:] == bytes(10)


def offer(rig: Rig, manifest: bytes, name: str, key: str = "jobs/j1/attempts/1/checkpoints/m.json") -> dict[str, Any]:
    return {
        "name": name,
        "manifest": {
            "url": rig.store.put(key, manifest),
            "key": key,
            "sha256": hashlib.sha256(manifest).hexdigest(),
            "size": len(manifest),
        },
        "chunks": {},
        "chunks_base": rig.store.root.as_uri() + "/",
    }


def saved(rig: Rig, name: str, data: bytes) -> dict[str, Any]:
    """A checkpoint in the store, and the leave to restore it."""
    folder = rig.folder / "made" / name
    (folder / "sub").mkdir(parents=True)
    (folder / "w").write_bytes(data)
    (folder / "sub/o").write_bytes(data[::-1])
    data = upload_tree(rig, store_of(runner_grant(rig)), folder.parent, name)
    return offer(rig, data, name, f"jobs/j1/attempts/1/checkpoints/{name}.json")


def flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(bytes(data))


def cut(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def lengthen(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.randint(1, 9)))


def remove(path: Path, rng: random.Random) -> None:
    path.unlink()


def swap(path: Path, rng: random.Random) -> None:
    other = rng.choice([sibling for sibling in path.parent.iterdir() if sibling != path])
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize("damage", [flip, cut, lengthen, remove, swap], ids=lambda damage: damage.__name__)
def test_every_damaged_checkpoint_is_passed_over_for_the_next_older(
    damage: Callable[[Path, random.Random], None], tmp_path: Path
) -> None:
    rng = random.Random(f"damage {damage.__name__}")
    with Rig(tmp_path) as rig:
        older, newer = saved(rig, "step-1", rng.randbytes(900)), saved(rig, "step-2", rng.randbytes(900))
        own = sorted(set(_chunk_keys(rig, newer)) - set(_chunk_keys(rig, older)))
        for number in range(20):
            key = rng.choice([*own, newer["manifest"]["key"]])
            place = rig.store.path(key)
            before = place.read_bytes()
            damage(place, rng)
            restore = restore_into(rig, tmp_path / "back" / str(number), [newer, older])
            done = restore.run()
            assert done is not None
            assert done.name == "step-1", f"{damage.__name__} of {key} went unnoticed"
            assert [fallback.name for fallback in restore.fallbacks] == ["step-2"]
            assert _names(tmp_path / "back" / str(number)) == ["step-1"]
            place.write_bytes(before)


@pytest.mark.parametrize("is_current", [True, False], ids=["a current grant", "an expired grant"])
def test_a_refusal_speaks_against_a_checkpoint_only_under_a_current_grant(is_current: bool, tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        good = saved(rig, "step-1", b"a" * 100)
        refusals = iter(range(20))
        # As when a sleeping daemon's URLs have run out: after a while it wakes up and new ones are good.
        with Server(lambda request: Answer(403 if next(refusals, None) is not None else 200, data)) as server:
            data = rig.store.get(good["manifest"]["key"]) or b""
            good["manifest"]["url"] = server.url
            restore = restore_into(rig, tmp_path / "back", [good], lambda: is_current)
            done = restore.run()
        assert (done is None) is is_current
        assert len(restore.fallbacks) == (1 if is_current else 0)


@pytest.mark.parametrize("garbage", [b"?" * 5000, b"?" * 64, b"?" * 7], ids=["too long", "other bytes", "too short"])
def test_a_chunk_that_comes_back_bad_is_asked_for_again_and_hurts_no_other(garbage: bytes, tmp_path: Path) -> None:
    content = random.Random("three chunks").randbytes(64 * 3)
    with Rig(tmp_path) as rig:
        good = saved(rig, "step-1", content)
        (key,) = [k for k in _chunk_keys(rig, good) if rig.store.get(k) == content[64:128]]
        answers = iter([garbage, garbage])
        with Server(lambda request: Answer(200, next(answers, content[64:128]))) as server:
            good["chunks"][key] = server.url
            done = restore_into(rig, tmp_path / "back", [good]).run()
            assert done is not None
            assert len(server.requests) == 3
        assert next(p for p in Path(done.path).rglob("*") if p.is_file()).read_bytes() == content


def test_a_restore_onto_a_disk_that_fills_up_ends_with_that_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def full(descriptor: int, data: bytes, offset: int) -> int:
        tries.append(offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Rig(tmp_path) as rig:
        good = saved(rig, "step-1", b"a" * 200)
        monkeypatch.setattr(os, "pwrite", full)
        one = restore_into(rig, tmp_path / "back", [good])
        one._stopped = lambda: len(tries) > 50  # so that a fault is no endless loop
        with pytest.raises(DiskFull, match="before all of it was there"):
            one.run()
    assert _names(tmp_path / "back") == []


def test_a_manifest_of_another_checkpoint_is_not_taken_for_this_one(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        older, newer = saved(rig, "step-1", b"a" * 100), saved(rig, "step-2", b"b" * 100)
        newer["manifest"] = dict(older["manifest"])
        restore = restore_into(rig, tmp_path / "back", [newer, older])
        done = restore.run()
        assert done is not None
        assert done.name == "step-1"
        assert "something else" in restore.fallbacks[0].reason


@pytest.mark.parametrize("path", ["../out", "/out", "step-1/../../out", "step-1//w"])
def test_a_pinned_manifest_that_leads_outside_writes_nothing(path: str, tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        good = saved(rig, "step-1", b"a" * 100)
        manifest = json.loads(rig.store.get(good["manifest"]["key"]) or b"")
        manifest["files"][0]["path"] = path
        restore = restore_into(rig, tmp_path / "back", [offer(rig, json.dumps(manifest).encode(), "step-1")])
        assert restore.run() is None
        assert "outside" in restore.fallbacks[0].reason
        assert not (tmp_path / "out").exists()
        assert _names(tmp_path / "back") == []


def test_a_restore_that_was_killed_leaves_nothing_that_counts_and_is_cleared(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        good = saved(rig, "step-1", b"a" * 1000)
        half = tmp_path / "back" / ".spotd-restore-99"
        half.mkdir(parents=True)
        (half / "step-1").mkdir()
        done = restore_into(rig, tmp_path / "back", [good]).run()
        assert done is not None
        assert _names(tmp_path / "back") == ["step-1"]


def test_a_full_disk_is_told_once_and_the_upload_goes_on_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = threading.Event()
    full.set()
    real_write = os.write

    def write(descriptor: int, data: bytes) -> int:
        if full.is_set() and "/store/" in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real_write(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    with Rig(tmp_path) as rig:
        grant = runner_grant(rig)
        store = store_of(grant)
        result: list[bytes] = []
        made = tmp_path / "made/step-1"
        made.mkdir(parents=True)
        (made / "w").write_bytes(b"x" * 1000)
        thread = threading.Thread(target=lambda: result.append(upload_tree(rig, store, made.parent, "step-1")))
        thread.start()
        until(lambda: store.events._waiting, "the report of the full disk")
        assert store.failing == "the store's disk is full"
        assert list(rig.store.path(grant.prefix).rglob(".spotd-*")) == [], "no half file takes up room"
        assert rig.store.keys(grant.prefix + "data/") == []
        full.clear()
        store.hurry()
        thread.join(30)
        assert isinstance(verify_manifest(result[0], JOB, 1, rig.store.head), AcceptedManifest)
        assert store.failing is None
        assert len(store.events._waiting) == 1, "one event for the whole outage"


def test_an_upload_gives_up_when_there_is_no_hope_and_says_why(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        grant = runner_grant(rig)
        rig.store.path(grant.prefix + "grant.json").unlink()
        rig.store.path(grant.prefix).rmdir()
        with pytest.raises(GivenUp, match="gone"):
            store_of(grant, hopeless=lambda: True).put("data/x", b"x")
        assert not rig.store.path(grant.prefix).exists(), "what was removed on purpose is not brought back"


def test_an_upload_that_yields_keeps_what_it_sent(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        store = store_of(runner_grant(rig))
        folder = tmp_path / "ckpt"
        folder.mkdir()
        (folder / "w").write_bytes(os.urandom(6400))
        seen = tree.scan(str(folder), "w")
        known = ChunkIndex(str(tmp_path / "known"), store.prefix)
        asked = iter(range(1000))
        upload = TreeUpload(
            tree.stage(str(folder), seen, str(tmp_path / "s")), store, known, Progress(), 64, lambda: next(asked) > 60
        )
        with pytest.raises(Yielded):
            upload.run(1)
        sent = len(rig.store.keys(store.prefix + "data/"))
        assert 0 < sent < 100
        progress = Progress()
        again = ChunkIndex(str(tmp_path / "known"), store.prefix)
        TreeUpload(tree.stage(str(folder), seen, str(tmp_path / "s")), store, again, progress, 64, lambda: False).run(2)
        assert progress.sent == 6400 - 64 * sent, "a runner that is started again sends only the rest"


@pytest.mark.parametrize(
    ("size", "is_reused"), [(0, False), (1000, False), (REUSED_MIN - 1, False), (REUSED_MIN, True)]
)
@pytest.mark.parametrize("restarted", [False, True])
def test_a_small_chunk_is_part_of_one_checkpoint_only(
    tmp_path: Path, size: int, is_reused: bool, restarted: bool
) -> None:
    path, prefix = str(tmp_path / "known"), "jobs/j1/attempts/1/"
    known, digest = ChunkIndex(path, prefix), "a" * 64
    key = f"{prefix}data/{digest}-00000000"
    assert known.claim(digest) is None
    known.sent(digest, key, size)
    if restarted:
        known = ChunkIndex(path, prefix)
    assert known.claim(digest) == key, "an upload that goes on sends nothing twice"
    known.publishing()
    known.published([{"chunks": [{"key": key, "sha256": digest, "size": size}]}])
    assert (known.claim(digest) == key) is is_reused
    assert (ChunkIndex(path, prefix).claim(digest) == key) is is_reused


def test_a_full_disk_costs_the_memory_of_chunks_and_no_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "known"
    known = ChunkIndex(str(path), "jobs/j1/attempts/1/")
    assert known.claim("a" * 64) is None
    known.sent("a" * 64, f"jobs/j1/attempts/1/data/{'a' * 64}-00000000", REUSED_MIN)

    def full() -> None:
        raise OSError("no space left")

    known._rewrite = full  # type: ignore[method-assign]  # a disk cannot be filled in a test's folder
    known.publishing()
    assert not path.exists()
    assert ChunkIndex(str(path), "jobs/j1/attempts/1/").claim("a" * 64) is None


def test_content_that_changes_while_it_is_read_makes_no_manifest(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        store = store_of(runner_grant(rig))
        folder = tmp_path / "ckpt"
        folder.mkdir()
        (folder / "w").write_bytes(b"a" * 640)
        seen = tree.scan(str(folder), "w")

        def rewrite() -> bool:
            (folder / "w").write_bytes(b"b" * 640)
            return False

        known = ChunkIndex(str(tmp_path / "known"), store.prefix)
        stage = tree.stage(str(folder), seen, str(tmp_path / "s"))
        with pytest.raises(tree.Vanished):
            TreeUpload(stage, store, known, Progress(), 64, rewrite).run(1)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _chunk_keys(rig: Rig, offered: dict[str, Any]) -> list[str]:
    manifest = parse_manifest(rig.store.get(offered["manifest"]["key"]) or b"")
    return list(manifest.chunk_sizes())
