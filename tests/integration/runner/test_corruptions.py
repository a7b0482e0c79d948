"""Seeded damage to what is stored, before and after the daemon looked at it: nothing damaged is ever used.

Two gates stand before a damaged checkpoint: the daemon takes in a manifest only after checking it, and the runner
verifies every byte when it restores. Each case damages the newer of two checkpoints, lets both gates work as they do in
production, and then compares what lies in the checkpoint folder with what was saved.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from spotd_jobs.runner import restore
from spotd_jobs.runner.store import RunnerStore
from spotd_jobs.wire.manifest import AcceptedManifest, restore_of, verify_manifest
from spotd_jobs.wire.manifest_document import parse_manifest
from tests.cases import every
from tests.integration.runner.inside import restore_into, runner_grant, store_of, upload_tree
from tests.integration.runner.rig import JOB, Rig, Stored

ATTEMPT = "jobs/j1/attempts/1/"
Tree = dict[str, bytes]


@dataclass(frozen=True)
class Saved:
    """A checkpoint in the store, and what it really holds."""

    name: str
    key: str
    manifest: bytes
    chunks: tuple[str, ...]
    content: Tree


class Bench:
    """Two checkpoints that share some chunks, in a store that is put right after each case."""

    def __init__(self, rig: Rig, rng: random.Random) -> None:
        self.rig = rig
        self.rng = rng
        shared = rng.randbytes(200)
        self.older = self._save("step-1", shared)
        self.newer = self._save("step-2", shared)
        self.own = sorted(set(self.newer.chunks) - set(self.older.chunks))
        self.undo: dict[str, bytes | None] = {}

    def _save(self, name: str, shared: bytes) -> Saved:
        folder = self.rig.folder / "made" / name
        content = {"w": shared + self.rng.randbytes(300), "sub/o": self.rng.randbytes(150), "trainer.txt": b"{}"}
        for path, data in content.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data)
        data = upload_tree(self.rig, store_of(runner_grant(self.rig)), folder.parent, name)
        key = f"{ATTEMPT}checkpoints/{name}.json"
        self.rig.store.put(key, data)
        chunks = tuple(parse_manifest(data).chunk_sizes())
        return Saved(name, key, data, chunks, content)

    def change(self, key: str, data: bytes | None) -> None:
        """The object holds something else, or is gone, until `mend`."""
        self.undo.setdefault(key, self.rig.store.get(key))
        if data is None:
            self.rig.store.path(key).unlink()
        else:
            self.rig.store.put(key, data)

    def mend(self) -> None:
        for key, data in self.undo.items():
            if data is None:
                self.rig.store.path(key).unlink(missing_ok=True)
            else:
                self.rig.store.put(key, data)
        self.undo.clear()

    def read(self, key: str) -> bytes:
        return self.rig.store.get(key) or b""

    def a_target(self) -> str:
        """A chunk that only the newer checkpoint has, or its manifest."""
        return self.rng.choice([*self.own, self.newer.key])


def flip(bench: Bench) -> None:
    key = bench.a_target()
    data = bytearray(bench.read(key))
    for _ in range(bench.rng.choice([1, 1, 1, 8])):
        data[bench.rng.randrange(len(data))] ^= 1 << bench.rng.randrange(8)
    bench.change(key, bytes(data))


def cut(bench: Bench) -> None:
    key = bench.a_target()
    data = bench.read(key)
    bench.change(key, data[: bench.rng.randrange(len(data))])


def lengthen(bench: Bench) -> None:
    key = bench.a_target()
    bench.change(key, bench.read(key) + bench.rng.randbytes(bench.rng.randint(1, 9)))


def lose(bench: Bench) -> None:
    bench.change(bench.a_target(), None)


def overwrite(bench: Bench) -> None:
    """As a zombie with a form that is still valid may do."""
    key = bench.rng.choice(bench.own)
    bench.change(key, bench.rng.randbytes(len(bench.read(key))))


def swap_chunks(bench: Bench) -> None:
    one, other = bench.rng.sample(bench.own, 2)
    first, second = bench.read(one), bench.read(other)
    bench.change(one, second)
    bench.change(other, first)


def swap_manifests(bench: Bench) -> None:
    bench.change(bench.newer.key, bench.older.manifest)
    if bench.rng.random() < 0.5:
        bench.change(bench.older.key, bench.newer.manifest)


def _rewrite(bench: Bench, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads(bench.newer.manifest)
    change(document)
    if bench.rng.random() < 0.5:
        bench.change(bench.newer.key, json.dumps(document).encode())
    else:  # a runner that errs seals its error
        del document["seal"]
        bench.change(bench.newer.key, RunnerStore.seal(document))


def drop_a_chunk(bench: Bench) -> None:
    def change(document: dict[str, Any]) -> None:
        row = bench.rng.choice(document["files"])
        del row["pieces"][bench.rng.randrange(len(row["pieces"]))]

    _rewrite(bench, change)


def add_a_chunk(bench: Bench) -> None:
    def change(document: dict[str, Any]) -> None:
        row, other = bench.rng.choice(document["files"]), bench.rng.choice(document["files"])
        row["pieces"].insert(bench.rng.randint(0, len(row["pieces"])), bench.rng.choice(other["pieces"]))

    _rewrite(bench, change)


def name_another_chunk(bench: Bench) -> None:
    """It is of the right size, and nobody ever stored it."""

    def change(document: dict[str, Any]) -> None:
        chunk = bench.rng.choice(document["chunks"])
        chunk[0] = bench.rng.randbytes(32).hex() + chunk[0][64:]

    _rewrite(bench, change)


DAMAGES = (
    flip,
    cut,
    lengthen,
    lose,
    overwrite,
    swap_chunks,
    swap_manifests,
    drop_a_chunk,
    add_a_chunk,
    name_another_chunk,
)


def taken_in(bench: Bench, *, hashes: bool) -> list[dict[str, Any]]:
    """What the next grant offers to restore: the manifests that the daemon accepts, newest first."""

    def head(key: str) -> Stored | None:
        found = bench.rig.store.head(key)
        return found if hashes or found is None else Stored(found.size, None)

    offers = []
    for saved in (bench.newer, bench.older):
        data = bench.rig.store.get(saved.key)
        verdict = verify_manifest(data or b"", JOB, 1, head)
        if isinstance(verdict, AcceptedManifest):
            offer = restore_of(verdict, saved.key, bench.rig.store.url)
            offers.append(json.loads(offer.model_dump_json()))
    return offers


def run_cases(folder: Path, *, seed: int, count: int) -> Counter[str]:
    """How many of each damage were noticed, and where; every case ends with whole content or none."""
    rng = random.Random(seed)
    noticed: Counter[str] = Counter()
    with Rig(folder / "rig") as rig:
        bench = Bench(rig, rng)
        contents = {saved.name: saved.content for saved in (bench.older, bench.newer)}
        for number in range(count):
            damage = DAMAGES[number % len(DAMAGES)]
            hashes, late = rng.random() < 0.5, rng.random() < 0.5
            offers = taken_in(bench, hashes=hashes) if late else []
            damage(bench)
            offers = offers if late else taken_in(bench, hashes=hashes)
            place = folder / "back"
            restore = restore_into(rig, place, offers)
            done = restore.run()
            told = f"case {number} of seed {seed}: {damage.__name__}"
            visible = [path.name for path in place.iterdir()]
            assert visible == ([done.entry] if done is not None else []), told
            if done is not None:
                found = {
                    str(p.relative_to(place / done.entry)): p.read_bytes() for p in place.rglob("*") if p.is_file()
                }
                assert found == contents[done.entry], f"{told}: altered content was used"
            assert done is None or done.name != "step-2", f"{told} went unnoticed"
            noticed[damage.__name__ + (" at the restore" if restore.fallbacks else " by the daemon")] += 1
            bench.mend()
            shutil.rmtree(place)
        whole = restore_into(rig, folder / "back", taken_in(bench, hashes=True)).run()
        assert whole is not None
        assert whole.name == "step-2", "an undamaged checkpoint is used"
    return noticed


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.lengthy)])
def test_seeded_damages_are_all_noticed_before_use(tmp_path: Path, count: int) -> None:
    noticed = run_cases(tmp_path, seed=1, count=count)
    assert {words.split(" ")[0] for words in noticed} == {damage.__name__ for damage in DAMAGES}
    assert sum(noticed.values()) == count


@pytest.mark.slow
def test_ten_thousand_damages_are_all_noticed_before_use(tmp_path: Path) -> None:
    noticed = run_cases(tmp_path, seed=2, count=10_000)
    assert sum(noticed.values()) == 10_000


def row(**changes: Any) -> dict[str, Any]:
    known = {"path": "sub/w", "type": "link", "size": 0, "mode": 420, "mtime_ns": 0, "target": "../other", "chunks": []}
    return {**known, **changes}


@every(
    ("entry", "is_refused"),
    [
        (row(), False),
        (row(target="/etc/passwd"), True),
        (row(target="../../other"), True),
        (row(target="a/../../../other"), True),
        (row(path="../w"), True),
        (row(path="/w"), True),
        (row(type="file", target=None, size=1), True),
    ],
)
def test_the_host_itself_restores_nothing_outside_of_its_folder_and_no_file_that_does_not_add_up(
    entry: dict[str, Any], *, is_refused: bool
) -> None:
    document = {"schema": 1, "kind": "checkpoint", "name": "step-1", "bytes": 0, "files": [entry]}
    try:
        restore._check(RunnerStore.seal(document), "step-1")
    except restore.BadCheckpoint:
        assert is_refused
    else:
        assert not is_refused
