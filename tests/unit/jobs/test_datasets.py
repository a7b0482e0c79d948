"""A dataset on its whole way: from a folder through the store to the folder of a job, and out of the store again."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotd.core.domain.intents import AttemptId
from spotd.daemon.contents import Parts
from spotd.daemon.datasets import KEPT, BadDataset, Dataset, Datasets, Incomplete
from spotd.daemon.grants.inputs import DataGrants
from spotd_jobs.dataset_pack import DatasetError, pack_dataset
from spotd_jobs.objects.api import ObjectInfo, StoreError
from spotd_jobs.objects.folder import FolderStore
from spotd_jobs.runner.data import DataRun, DataUnusable, fetch_data
from spotd_jobs.runner.restore import Cancelled
from spotd_jobs.spec.model import DataSource
from spotd_jobs.wire.client.dataset import (
    DataChunk,
    DataEntry,
    PartRow,
    Piece,
    data_chunk_key,
    data_part_key,
    digest_of,
    part_text,
    read_part,
    read_root,
    root_text,
)
from spotd_jobs.wire.client.sinks import DiskFull, Unreadable
from tests.cases import every
from tests.unit.core.builders import job

NOW = datetime(2026, 3, 2, 12, tzinfo=UTC)
CHUNK = 1000
PART_FILES = 7


class Sink:
    """Stores as the daemon does, and counts what was sent."""

    def __init__(self, datasets: Datasets, store: FolderStore, *, fails_after: int = 10**9) -> None:
        self.datasets, self.store, self.left, self.sent = datasets, store, fails_after, 0
        self.lock = threading.Lock()

    def put_chunk(self, sha256: str, data: bytes | bytearray) -> None:
        with self.lock:
            if self.left == 0:
                raise ConnectionResetError("cut")
            if not self.datasets.has_chunk(sha256):
                self.left -= 1
                self.store.put(data_chunk_key(sha256), bytes(data))
                self.sent += len(data)

    def put_part(self, sha256: str, text: bytes) -> None:
        self.datasets.put_part(sha256, text)


class Place:
    """A store, and a host that reads it."""

    def __init__(self, folder: Path) -> None:
        self.store = FolderStore(folder / "store")
        self.datasets = Datasets(self.store)
        self.home = folder / "home"
        self.work = self.home / "work"
        self.work.mkdir(parents=True)
        self.said: list[str] = []

    def put(self, source: Path, name: str = "set", **options: Any) -> Dataset:
        sink = Sink(self.datasets, self.store)
        given = {"chunk_bytes": CHUNK, "part_files": PART_FILES, **options}
        made = self.datasets.give_name(name, pack_dataset(source, sink, **given), NOW)
        assert isinstance(made, Dataset)
        return made

    def run(self, dataset: Dataset, path: str = "data", stopped: Callable[[], bool] = lambda: False) -> DataRun:
        grant = {"source": dataset.name, "path": path, "sha256": dataset.sha256}
        grant["base"] = (self.home.parent / "store").as_uri() + "/"
        return DataRun(
            lambda: [grant],
            0,
            str(self.home),
            str(self.work),
            2,
            lambda seconds: stopped(),
            stopped,
            lambda: True,
            self.said.append,
        )

    def bring(self, dataset: Dataset, path: str = "data", stopped: Callable[[], bool] = lambda: False) -> DataRun:
        run = self.run(dataset, path, stopped)
        fetch_data([run], str(self.home))
        run.put_in_place()
        return run


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def tree(top: Path) -> dict[str, Any]:
    """Everything below a folder, by its path."""
    found: dict[str, Any] = {}
    for path in top.rglob("*"):
        short = str(path.relative_to(top))
        if path.is_symlink():
            found[short] = ("link", str(path.readlink()))
        elif path.is_file():
            found[short] = (bool(path.stat().st_mode & 0o100), path.read_bytes())
        elif not any(path.iterdir()):
            found[short] = "empty folder"
    return found


def fill(top: Path, files: dict[bytes, bytes]) -> None:
    for name, content in files.items():
        path = top / os.fsdecode(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def some_files(count: int = 40, seed: int = 1) -> dict[bytes, bytes]:
    draw = random.Random(seed)
    return {b"d%d/f%d" % (n % 5, n): draw.randbytes(draw.choice([0, 3, 90, 400, 1000, 2500])) for n in range(count)}


names = st.binary(min_size=1, max_size=12).filter(lambda n: b"/" not in n and b"\0" not in n and n not in {b".", b".."})
contents = st.binary(max_size=40).map(lambda b: b * 60)


@pytest.mark.long
@given(files=st.dictionaries(st.lists(names, min_size=1, max_size=3).map(b"/".join), contents, max_size=25))
def test_every_tree_arrives_as_it_was(files: dict[bytes, bytes]) -> None:
    paths = set(files)
    files = {p: c for p, c in files.items() if not any(q.startswith(p + b"/") for q in paths)}
    if not files:
        return
    folder = Path(tempfile.mkdtemp())
    try:
        fill(folder / "source", files)
        (folder / "source" / "empty here").mkdir(exist_ok=True)
        before = tree(folder / "source")
        place = Place(folder)
        place.bring(place.put(folder / "source"))
        assert tree(place.work / "data") == before
    finally:
        shutil.rmtree(folder)


def test_links_inside_and_executables_arrive(place: Place, tmp_path: Path) -> None:
    source = tmp_path / "source"
    fill(source, {b"a/run": b"#!/bin/sh\n", b"a/b/c": b"x"})
    (source / "a" / "run").chmod(0o755)
    (source / "a" / "b" / "up").symlink_to("../run")
    (source / "to-nothing").symlink_to("nowhere")
    place.bring(place.put(source))
    assert tree(place.work / "data") == tree(source)


@pytest.mark.parametrize("target", ["/etc/passwd", "../outside", "a/../../outside"])
def test_a_link_that_leads_out_is_refused_or_followed(place: Place, tmp_path: Path, target: str) -> None:
    source = tmp_path / "source"
    fill(source, {b"a/x": b"x"})
    (tmp_path / "outside").write_bytes(b"from outside")
    (source / "leads out").symlink_to(target)
    with pytest.raises(DatasetError, match="leads out"):
        place.put(source)
    if target.startswith("/"):
        return
    place.bring(place.put(source, follow=True))
    assert (place.work / "data" / "leads out").read_bytes() == b"from outside"


def test_what_is_no_file_and_an_empty_folder_are_refused(place: Place, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    with pytest.raises(DatasetError, match="is empty"):
        place.put(source)
    os.mkfifo(source / "pipe")
    with pytest.raises(DatasetError, match="neither file"):
        place.put(source)
    with pytest.raises(DatasetError, match="no folder"):
        place.put(tmp_path / "absent")


def test_the_hash_depends_on_names_and_bytes_alone(place: Place, tmp_path: Path) -> None:
    for name in ("one", "two"):
        fill(tmp_path / name, some_files())
    os.utime(tmp_path / "two" / "d0" / "f0", (1, 1))
    first = place.put(tmp_path / "one")
    assert place.put(tmp_path / "two").sha256 == first.sha256
    (tmp_path / "two" / "d0" / "f0").write_bytes(b"changed")
    assert place.put(tmp_path / "two").sha256 != first.sha256


@pytest.mark.parametrize("cut", range(0, 24, 3))
def test_an_upload_that_was_cut_goes_on_with_what_is_missing(place: Place, tmp_path: Path, cut: int) -> None:
    fill(tmp_path / "source", some_files())
    broken = Sink(place.datasets, place.store, fails_after=cut)
    with pytest.raises(DatasetError):
        pack_dataset(tmp_path / "source", broken, chunk_bytes=CHUNK, part_files=PART_FILES)
    rest = Sink(place.datasets, place.store)
    root = pack_dataset(tmp_path / "source", rest, chunk_bytes=CHUNK, part_files=PART_FILES)
    again = Sink(place.datasets, place.store)
    assert pack_dataset(tmp_path / "source", again, chunk_bytes=CHUNK, part_files=PART_FILES) == root
    assert again.sent == 0
    whole = sum(info.size for info in place.store.list("data/chunks/"))
    assert broken.sent + rest.sent == whole


@pytest.mark.long
def test_a_file_that_is_added_moves_few_others(place: Place, tmp_path: Path) -> None:
    draw = random.Random(3)
    source = tmp_path / "source"
    fill(source, {b"f%06d" % n: draw.randbytes(100) for n in range(5000)})
    place.put(source, chunk_bytes=64_000, part_files=20_000)
    (source / "f000100b").write_bytes(b"new")
    sink = Sink(place.datasets, place.store)
    pack_dataset(source, sink, chunk_bytes=64_000)
    assert 0 < sink.sent <= 100_000  # of 500,000


def test_a_folder_that_changes_while_it_is_read_is_refused(place: Place, tmp_path: Path) -> None:
    source = tmp_path / "source"
    fill(source, {b"a": b"x" * 5000, b"b": b"y", b"done/d": b"z", b"q": b"q", b"z/moved": b"m", b"z/z": b"z"})
    for when, change in (
        (1, lambda: (source / "a").write_bytes(b"x" * 4000)),
        (1, lambda: (source / "new").write_bytes(b"n")),
        (8, lambda: (source / "z" / "moved").rename(source / "done" / "moved")),
    ):
        done: list[int] = []

        def meanwhile(
            count: int, change: Callable[[], object] = change, when: int = when, done: list[int] = done
        ) -> None:
            done.append(count)
            if len(done) == when:
                change()

        with pytest.raises(DatasetError):
            place.put(source, progress=meanwhile)


@pytest.mark.slow
def test_a_hundred_thousand_small_files_are_few_objects(place: Place, tmp_path: Path) -> None:
    source = tmp_path / "source"
    for number in range(100):
        (source / f"{number:03d}").mkdir(parents=True)
        for inner in range(1000):
            (source / f"{number:03d}" / f"{inner:04d}.txt").write_bytes(b"%d\n" % inner)
    made = place.put(source, chunk_bytes=64 * 2**20, part_files=20_000)
    assert made.files == 100_000
    assert sum(1 for _ in place.store.list("data/")) < 40
    place.bring(made)
    assert (place.work / "data" / "042" / "0999.txt").read_bytes() == b"999\n"
    assert sum(len(names) for _, _, names in os.walk(place.work / "data")) == 100_000


class Reads:
    """Counts chunks that are read, and breaks one of them off."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.breaks_at = 0, 10**9
        real = DataRun._bring

        def bring(run: DataRun, load: Any, block: memoryview) -> None:
            self.count += 1
            if self.count > self.breaks_at:
                raise Cancelled
            real(run, load, block)

        monkeypatch.setattr(DataRun, "_bring", bring)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


@pytest.mark.parametrize("cut", range(0, 30, 4))
def test_a_download_that_was_cut_goes_on(place: Place, tmp_path: Path, reads: Reads, cut: int) -> None:
    fill(tmp_path / "source", some_files())
    made = place.put(tmp_path / "source")
    whole = sum(1 for _ in place.store.list("data/chunks/"))
    reads.breaks_at = cut
    with pytest.raises(Cancelled):
        place.bring(made)
    assert not (place.work / "data").exists()
    reads.count, reads.breaks_at = 0, 10**9
    place.bring(made)
    assert tree(place.work / "data") == tree(tmp_path / "source")
    assert reads.count <= whole - cut + 2  # two were on their way


def test_what_was_damaged_on_the_disk_meanwhile_is_fetched_again(place: Place, tmp_path: Path, reads: Reads) -> None:
    fill(tmp_path / "source", {b"large": random.Random(5).randbytes(10_000)})
    made = place.put(tmp_path / "source")
    reads.breaks_at = 6
    with pytest.raises(Cancelled):
        place.bring(made)
    (grown,) = place.home.glob("datasets/*/tree/large")
    content = bytearray(grown.read_bytes())
    content[1500] ^= 1
    grown.write_bytes(content)
    reads.breaks_at = 10**9
    place.bring(made)
    assert tree(place.work / "data") == tree(tmp_path / "source")


def test_a_machine_that_starts_again_has_it_already(place: Place, tmp_path: Path, reads: Reads) -> None:
    fill(tmp_path / "source", some_files())
    made = place.put(tmp_path / "source")
    place.bring(made)
    reads.count = 0
    (place.work / "data" / "own cache").write_bytes(b"of the job")
    assert place.bring(made).is_placed
    assert reads.count == 0
    (place.work / "data" / "d2" / "f2").write_bytes(b"the job wrote over it")
    place.bring(made)
    assert reads.count <= 2
    assert {**tree(tmp_path / "source"), "own cache": (False, b"of the job")} == tree(place.work / "data")


@pytest.mark.long
def test_a_tampered_object_is_refused(place: Place, tmp_path: Path) -> None:
    fill(tmp_path / "source", some_files())
    made = place.put(tmp_path / "source")
    for info in list(place.store.list("data/")):
        if info.key.startswith("data/names/"):
            continue
        content = place.store.get(info.key, bytes_max=10**6)
        place.store.put(info.key, bytes([content[0] ^ 1]) + content[1:])
        with pytest.raises(DataUnusable, match="set: "):
            place.bring(made)
        shutil.rmtree(place.home / "datasets")
        place.store.put(info.key, content[:-1])
        with pytest.raises(DataUnusable):
            place.bring(made)
        shutil.rmtree(place.home / "datasets")
        place.store.put(info.key, content)
    assert not (place.work / "data").exists()
    place.bring(made)


def test_a_disk_that_is_too_small_is_a_reason_before_the_download(
    place: Place, tmp_path: Path, reads: Reads, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "source", some_files())
    made = place.put(tmp_path / "source")
    monkeypatch.setattr("spotd_jobs.wire.client.sinks.free_bytes", lambda folder: 16 * 2**20 + 5000)
    with pytest.raises(DiskFull, match=r"the data set needs .* of disk and 16\.8 MB are free"):
        place.bring(made)
    assert reads.count == 0


def test_nothing_of_the_job_is_written_over(place: Place, tmp_path: Path) -> None:
    fill(tmp_path / "source", some_files())
    made = place.put(tmp_path / "source")
    (place.work / "data").mkdir()
    place.bring(made)  # an empty folder is no more than a place
    (place.work / "other").mkdir()
    (place.work / "other" / "code.py").write_bytes(b"mine")
    with pytest.raises(DataUnusable, match="has something at other already"):
        place.bring(made, "other")
    assert (place.work / "other" / "code.py").read_bytes() == b"mine"


def test_a_place_behind_a_link_out_of_the_folder_is_refused(place: Place, tmp_path: Path) -> None:
    fill(tmp_path / "source", some_files())
    made = place.put(tmp_path / "source")
    (tmp_path / "elsewhere").mkdir()
    (place.work / "out").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataUnusable, match="leads out"):
        place.bring(made, "out/data")
    assert not list((tmp_path / "elsewhere").iterdir())
    with pytest.raises(DataUnusable):
        place.run(made, "../data")


CHUNKS = (DataChunk("ab" * 32, 10),)


@every(
    "entries",
    [
        [DataEntry("../x", "dir")],
        [DataEntry("/x", "dir")],
        [DataEntry("a/./b", "dir")],
        [DataEntry("a", "link", target="/etc")],
        [DataEntry("a", "link", target="../x")],
        [DataEntry("b/a", "link", target="c/../../../x")],
        [DataEntry("b", "dir"), DataEntry("a", "dir")],
        [DataEntry("a", "dir"), DataEntry("a", "dir")],
        [DataEntry("a", "link", target="b"), DataEntry("a/x", "dir")],
        [DataEntry("a", "file", 11, False, None, (Piece(0, 0, 11),))],
        [DataEntry("a", "file", 10, False, None, (Piece(0, 0, 9),))],
        [DataEntry("a", "file", 10, False, None, (Piece(1, 0, 10),))],
        [DataEntry("a" * 300, "dir")],
        [DataEntry("a", "socket")],
    ],
)
def test_a_list_of_files_that_leads_outside_or_does_not_add_up_is_refused(entries: list[DataEntry]) -> None:
    with pytest.raises(Unreadable):
        read_part(part_text(CHUNKS, entries))


@every(
    "text",
    [
        b"",
        b"[]",
        b"{}",
        b'{"schema":2}',
        b"[" * 100_000,
        root_text([PartRow("zz", 1, 1, 1)]),
        root_text([PartRow("ab" * 32, -1, 1, 1)]),
        root_text([PartRow("ab" * 32, 10**30, 1, 1)]),
        root_text([PartRow("ab" * 32, 1, 1, 10**6)]),
        root_text([PartRow("ab" * 32, 1, 1, 1)] * 2),
        root_text([PartRow("ab" * 32, 1, 1, 1)]) + b" ",
    ],
)
def test_what_is_no_root_is_refused(text: bytes) -> None:
    with pytest.raises(Unreadable):
        read_root(text)


def test_a_name_is_given_only_to_what_is_there(place: Place, tmp_path: Path) -> None:
    fill(tmp_path / "source", some_files())
    sink = Sink(place.datasets, place.store)
    root = pack_dataset(tmp_path / "source", sink, chunk_bytes=CHUNK, part_files=PART_FILES)
    gone = next(iter(place.store.list("data/chunks/"))).key
    place.store.delete([gone])
    made = place.datasets.give_name("set", root, NOW)
    assert isinstance(made, Incomplete)
    assert [data_chunk_key(one) for one in made.missing] == [gone]
    assert place.datasets.named("set") is None
    for name in ("", "..", "a/b", "A", "x" * 64):
        with pytest.raises(BadDataset):
            place.datasets.give_name(name, root, NOW)
        assert place.datasets.named(name) is None


def test_parts_that_do_not_fit_together_make_no_dataset(place: Place) -> None:
    rows = []
    for path in ("b", "a"):
        text = part_text((), [DataEntry(path, "dir")])
        place.datasets.put_part(digest_of(text), text)
        rows.append(PartRow(digest_of(text), 0, 0, 0))
    with pytest.raises(BadDataset, match="order"):
        place.datasets.give_name("set", root_text(rows), NOW)
    with pytest.raises(BadDataset, match="not what its list says"):
        place.datasets.give_name("set", root_text([rows[0]._replace(files=3)]), NOW)


# --- what naming costs: requests have deadlines, and a dataset has up to 256 parts and 65,536 chunks ---


class Counted(FolderStore):
    """Counts requests: each page of a listing is one."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.requests: Counter[str] = Counter()

    def head(self, key: str) -> ObjectInfo | None:
        self.requests["head"] += 1
        return super().head(key)

    def get(self, key: str, *, bytes_max: int, version: str | None = None) -> bytes:
        self.requests["get"] += 1
        return super().get(key, bytes_max=bytes_max, version=version)

    def put(self, key: str, data: bytes, *, create_only: bool = False) -> ObjectInfo:
        self.requests["put"] += 1
        return super().put(key, data, create_only=create_only)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        for number, info in enumerate(super().list(prefix)):
            self.requests["list"] += number % 1000 == 0
            yield info

    def sum(self) -> int:
        total = self.requests.total()
        self.requests.clear()
        return total


@pytest.fixture
def many_parts(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Counted, bytes]:
    """A store with everything of a dataset of 200 parts and 200 chunks but its name; reading a whole part fails."""
    store = Counted(tmp_path / "store")
    place.store, place.datasets = store, Datasets(store)
    fill(tmp_path / "source", {b"f%d" % number: b"%d" % number * 250 for number in range(200)})
    sink = Sink(place.datasets, place.store)
    root = pack_dataset(tmp_path / "source", sink, chunk_bytes=CHUNK, part_files=1)
    assert len(read_root(root).parts) == 200

    def never(text: bytes) -> None:
        raise AssertionError("a part was validated again")

    monkeypatch.setattr("spotd_jobs.wire.client.dataset.read_part", never)
    store.requests.clear()
    return store, root


@pytest.mark.long
def test_naming_costs_few_requests(place: Place, many_parts: tuple[Counted, bytes]) -> None:
    store, root = many_parts
    made = place.datasets.give_name("set", root, NOW)
    assert isinstance(made, Dataset)
    assert store.sum() <= 4
    assert place.datasets.stored(made.sha256) is not None  # as submit and retry ask
    assert store.sum() <= 3
    place.datasets.collect((), datetime.now(UTC))
    assert store.sum() <= 4
    assert place.datasets.stored(made.sha256) is not None
    assert store.sum() <= 3


@pytest.mark.long
def test_a_daemon_that_was_started_anew_reads_each_part_once(place: Place, many_parts: tuple[Counted, bytes]) -> None:
    store, root = many_parts
    place.datasets = Datasets(store)
    made = place.datasets.give_name("set", root, NOW)
    assert isinstance(made, Dataset)
    assert store.sum() <= 204
    assert place.datasets.stored(made.sha256) is not None
    assert store.sum() <= 3


@pytest.mark.long
def test_of_a_small_dataset_each_object_is_asked_for(place: Place, many_parts: tuple[Counted, bytes]) -> None:
    store, root = many_parts
    row = read_root(root).parts[0]
    small = root_text([row])
    place.datasets.store(small)
    assert store.requests["list"] == 0
    store.delete([data_part_key(row.sha256)])
    assert place.datasets.store(small) == Incomplete(missing=(row.sha256,))


@pytest.mark.long
def test_what_is_remembered_of_a_part_says_nothing_about_the_store(
    place: Place, many_parts: tuple[Counted, bytes]
) -> None:
    store, root = many_parts
    made = place.datasets.give_name("set", root, NOW)
    assert isinstance(made, Dataset)
    one, other, *_ = store.list("data/parts/")
    store.delete([one.key])
    assert place.datasets.give_name("set", root, NOW) == Incomplete(missing=(one.key.removeprefix("data/parts/"),))
    assert place.datasets.stored(made.sha256) is None
    store.put(one.key, b"damaged")
    with pytest.raises(StoreError, match="put the dataset again"):
        place.datasets.stored(made.sha256)
    store.delete([one.key, other.key])
    assert len(getattr(place.datasets.store(root), "missing", ())) == 2


def test_a_damaged_part_is_mended_by_putting_the_dataset_again(place: Place, tmp_path: Path) -> None:
    fill(tmp_path / "source", some_files())
    place.put(tmp_path / "source")
    part = next(iter(place.store.list("data/parts/"))).key
    place.store.put(part, b"damaged")
    place.bring(place.put(tmp_path / "source"))


def test_what_is_remembered_of_parts_has_a_bound(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spotd.daemon.contents.SUMMARIES_MAX", 3)
    store = Counted(place.home.parent / "store")
    parts = Parts(store)
    texts = [part_text((), [DataEntry(f"d{number}", "dir")]) for number in range(5)]
    for text in texts:
        parts.put(digest_of(text), text)
    store.requests.clear()
    for text in reversed(texts[2:]):
        parts.summary(digest_of(text))
    assert store.sum() == 0
    assert parts.summary(digest_of(texts[0])).first == b"d0"
    assert store.sum() == 1


# --- garbage collection ---


def age_everything(store: FolderStore, folder: Path) -> None:
    for path in (folder / "store" / "data").rglob("*"):
        if path.is_file():
            os.utime(path, (1, 1))


def test_only_what_nothing_needs_is_deleted_and_only_after_a_day(place: Place, tmp_path: Path) -> None:
    fill(tmp_path / "one", some_files(seed=1))
    fill(tmp_path / "two", some_files(seed=2))
    one, two = place.put(tmp_path / "one", "one"), place.put(tmp_path / "two", "two")
    age_everything(place.store, tmp_path)
    place.datasets.forget("one")
    later = datetime.now(UTC)
    assert place.datasets.collect({one.sha256}, later).objects == 0
    assert place.datasets.collect({one.sha256}, later + 3 * KEPT).objects == 0  # a job reads it
    assert place.datasets.collect((), later + 3 * KEPT).objects == 0  # seen for the first time
    assert place.datasets.collect((), later + 4 * KEPT - timedelta(hours=1)).objects == 0
    assert place.datasets.collect((), later + 4 * KEPT).objects > 3
    place.bring(two)
    with pytest.raises(DataUnusable):
        place.bring(one, "other")


def test_content_of_an_upload_in_progress_stays(place: Place, tmp_path: Path) -> None:
    fill(tmp_path / "source", some_files())
    sink = Sink(place.datasets, place.store)
    root = pack_dataset(tmp_path / "source", sink, chunk_bytes=CHUNK, part_files=PART_FILES)
    now = datetime.now(UTC)
    for hours in range(0, 23, 4):
        assert place.datasets.collect((), now + timedelta(hours=hours)).objects == 0
    assert isinstance(place.datasets.give_name("set", root, now), Dataset)


@pytest.mark.long
@given(steps=st.lists(st.sampled_from(["put", "rm", "submit", "end", "day", "collect", "restart"]), max_size=30))
def test_whatever_happens_in_which_order_nothing_that_is_needed_goes(steps: list[str]) -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        place = Place(folder)
        now = datetime.now(UTC)
        named: list[Dataset] = []
        jobs: list[str] = []
        for number, step in enumerate(steps):
            if step == "put":
                shutil.rmtree(folder / "source", ignore_errors=True)
                fill(folder / "source", some_files(6, seed=number % 3))
                named.append(place.put(folder / "source", f"n{number % 4}"))
                named = list(place.datasets.every())
            elif step == "rm" and named:
                place.datasets.forget(named.pop(0).name)
            elif step == "submit" and named:
                jobs.append(named[0].sha256)
            elif step == "end" and jobs:
                jobs.pop(0)
            elif step == "day":
                now += timedelta(hours=25)
                age_everything(place.store, folder)
            elif step == "collect":
                place.datasets.collect(jobs, now)
            elif step == "restart":
                place.datasets = Datasets(place.store)
            for sha256 in {one.sha256 for one in named} | set(jobs):
                assert all(place.store.head(key) for key in place.datasets.keys_of(sha256))
    finally:
        shutil.rmtree(folder)


def test_nothing_is_deleted_while_it_is_unknown_what_is_needed(place: Place, tmp_path: Path) -> None:
    fill(tmp_path / "source", some_files())
    made = place.put(tmp_path / "source")
    part = next(iter(place.store.list("data/parts/"))).key
    content = place.store.get(part, bytes_max=10**6)
    place.store.put(part, b"damaged")
    place.datasets = Datasets(place.store)  # of a daemon that was started anew: it has not seen the part
    fill(tmp_path / "other", some_files(seed=9))
    place.put(tmp_path / "other", "other")
    place.datasets.forget("other")
    age_everything(place.store, tmp_path)
    now = datetime.now(UTC)
    for days in range(3):
        with pytest.raises(Exception, match=r"put the dataset again|in the store"):
            place.datasets.collect((), now + days * KEPT)
    place.store.put(part, content)
    place.bring(made)


def test_hashes_are_those_of_the_bytes(place: Place, tmp_path: Path) -> None:
    fill(tmp_path / "source", some_files())
    place.put(tmp_path / "source")
    for info in place.store.list("data/chunks/"):
        content = place.store.get(info.key, bytes_max=10**6)
        assert hashlib.sha256(content).hexdigest() == info.key.rpartition("/")[2]


def test_a_grant_of_a_url_names_nothing_of_the_store(place: Place, tmp_path: Path) -> None:
    fill(tmp_path / "source", {b"a": b"x"})
    made = place.put(tmp_path / "source")
    url = DataSource(source="https://host/" + "x" * 1000, path="file", sha256="cd" * 32, bytes=7, files=1)
    folder = DataSource(source="/" + "long/" * 900 + "\u202e", path="set", sha256=made.sha256, bytes=1, files=1)
    one = replace(job(), spec=replace(job().spec, data=(url, folder)))
    granted = DataGrants(place.store).grants(AttemptId(job=one.id, number=1), one, NOW, NOW + KEPT)
    read = [(grant.source[:12], grant.base is None, grant.urls) for grant in granted]
    assert read == [("https://host", True, []), ("/long/long/l", False, [])]
    assert granted[0].source == url.source
