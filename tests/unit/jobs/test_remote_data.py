"""Data that stays in a hub or a bucket: listed by the daemon, read by a host without a token, and held to the list."""

from __future__ import annotations

import hashlib
import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotd.core.domain.market import UNKNOWN_REGION, bucket_egress
from spotd.daemon.hub import Hub, HubPlace, SourceAway, SourceRefused, repository_of
from spotd.daemon.remote_data import BucketPlace, RemoteData, RemotePlaces
from spotd_jobs.runner.data import DataUnusable, fetch_data
from spotd_jobs.runner.elsewhere import DataAway, ListedRun, data_run
from spotd_jobs.spec.model import DataSource
from spotd_jobs.wire.client import web
from spotd_jobs.wire.client.dataset import (
    ETAG,
    GIT,
    SHA256,
    STORED,
    ListedFile,
    data_chunk_key,
    data_listing_key,
    file_url_key,
    listing_text,
    read_listing,
)
from spotd_jobs.wire.client.sinks import Unreadable
from tests.cases import every
from tests.fakes.hub import TOKEN, FakeHub, FakeRepository, running

WEIGHTS = random.Random(3).randbytes(50_000)
FILES = {
    "config.json": b'{"a": 1}\n',
    "empty.txt": b"",
    "model.safetensors": WEIGHTS,
    "sub/a b.txt": b"hello\n",
    "sub/tokenizer.bin": WEIGHTS[:5_000],
}
SOURCE = DataSource(source="hf://org/model@v1", path="data/model")


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with running() as found:
        found.repositories["models/org/model"] = FakeRepository(dict(FILES))
        yield found


def remote(hub: FakeHub, token: str = "") -> RemoteData:
    return RemoteData(lambda: RemotePlaces(hub=HubPlace(url=hub.url, token=token)))


def test_a_public_snapshot_is_listed_with_hashes_and_its_commit_and_no_token(hub: FakeHub) -> None:
    found = remote(hub, TOKEN).listing(SOURCE, None)
    kinds = {one.path: one.kind for one in found.files}
    assert kinds["model.safetensors"] == SHA256
    assert kinds["config.json"] == GIT
    assert {one.path: one.size for one in found.files} == {name: len(content) for name, content in FILES.items()}
    assert found.revision == hub.repositories["models/org/model"].commit
    assert not found.by_token
    assert not any(by_owner for _, by_owner in hub.asked)
    # A branch that moves on changes nothing for a job that keeps the commit.
    assert repository_of(SOURCE.source, found.revision).revision == found.revision


@pytest.mark.parametrize("access", ["private", "gated"])
def test_what_only_a_token_reads_is_read_by_signed_urls_and_no_host_gets_the_token(hub: FakeHub, access: str) -> None:
    hub.repositories["models/org/model"].access = access
    with pytest.raises(SourceRefused, match=r"private|gated") as refused:
        remote(hub).listing(SOURCE, None)
    assert "token" in refused.value.hint
    kept: dict[str, bytes] = {}
    found = remote(hub, TOKEN).listing(SOURCE, kept.__setitem__)
    assert found.by_token
    stored = {one.path: one.check for one in found.files if one.kind == STORED}
    assert {kept[check] for check in stored.values()} == {FILES["config.json"], FILES["sub/a b.txt"]}
    one = DataSource(source=SOURCE.source, path="x", revision=found.revision, by_token=True)
    urls = remote(hub, TOKEN).urls(one, found.files, web_instant())
    assert {found.files[number].path for number in urls} == {"model.safetensors", "sub/tokenizer.bin"}
    assert all(url.startswith(hub.cdn) and TOKEN not in url for url in urls.values())
    assert hub.tokens_elsewhere == 0


def web_instant() -> Any:
    from datetime import UTC, datetime, timedelta

    return datetime.now(UTC) + timedelta(hours=1)


def test_a_hub_that_is_away_is_no_refusal_and_one_without_the_repository_is(hub: FakeHub) -> None:
    hub.status = 503
    with pytest.raises(SourceAway):
        remote(hub).listing(SOURCE, None)
    hub.status = 429
    with pytest.raises(SourceAway):
        remote(hub).listing(SOURCE, None)
    hub.status = 0
    for source in ("hf://org/none", "hf://datasets/org/model", "hf://org/model@v9"):
        with pytest.raises(SourceRefused, match="is not there"):
            remote(hub, TOKEN).listing(DataSource(source=source, path="x"), None)


@pytest.mark.parametrize(
    "row",
    [
        {"type": "file", "path": "../x", "size": 1, "oid": "0" * 40},
        {"type": "file", "path": "/x", "size": 1, "oid": "0" * 40},
        {"type": "file", "path": "x", "size": -1, "oid": "0" * 40},
        {"type": "file", "path": "x", "size": 1e308, "oid": "0" * 40},
        {"type": "file", "path": "x", "size": True, "oid": "0" * 40},
        {"type": "file", "path": "x", "size": 1, "oid": "0" * 39},
        {"type": "file", "path": "x", "size": 1, "oid": None},
        {"type": "file", "path": 7, "size": 1, "oid": "0" * 40},
        {"type": "file", "path": "x", "size": 1, "oid": "0" * 40, "lfs": {"oid": "0" * 40, "size": 1}},
        {"path": "x"},
        "x",
        None,
    ],
)
def test_a_hub_that_lists_nonsense_is_refused(hub: FakeHub, row: Any) -> None:
    hub._rows = lambda found: iter([row])  # type: ignore[method-assign]  # the hub is the hostile party here
    with pytest.raises(SourceRefused, match="understood"):
        Hub(HubPlace(url=hub.url)).snapshot(repository_of(SOURCE.source, None))


def test_two_files_of_one_name_and_one_below_another_are_refused(hub: FakeHub) -> None:
    for names in (("a", "a"), ("a", "a/b")):
        rows = [{"type": "file", "path": name, "size": 1, "oid": "0" * 40} for name in names]
        hub._rows = lambda found, rows=rows: iter(rows)  # type: ignore[method-assign,misc]  # as above
        hub.repositories["models/org/model"].files = {"a": b"1", "a/b": b"1"}
        with pytest.raises(SourceRefused, match="cannot be brought"):
            remote(hub).listing(SOURCE, None)


class Host:
    """A machine that reads one listing."""

    def __init__(self, folder: Path, files: tuple[ListedFile, ...], urls: dict[int, str], source: str) -> None:
        self.work, self.said = folder / "work", list[str]()
        self.work.mkdir(exist_ok=True)
        text = listing_text(files)
        sha256 = hashlib.sha256(text).hexdigest()
        (folder / "listing").write_bytes(text)
        page = {data_listing_key(sha256): f"file://{folder}/listing"}
        page |= {file_url_key(number): url for number, url in urls.items()}
        (folder / "page").write_text(json.dumps(page))
        self.grant = {"source": source, "path": "data/model", "sha256": sha256, "urls": [f"file://{folder}/page"]}
        self.folder = folder
        self.pauses = 0

    def run(self) -> ListedRun:
        stop = threading.Event()
        made = data_run(
            lambda: [self.grant],
            0,
            str(self.folder / "home"),
            str(self.work),
            2,
            self._pause,
            stop.is_set,
            lambda: True,
            self.said.append,
        )
        assert isinstance(made, ListedRun)
        return made

    def _pause(self, seconds: float) -> bool:
        self.pauses += 1
        return self.pauses > 50

    def fetch(self) -> None:
        run = self.run()
        fetch_data([run], str(self.folder))
        run.put_in_place()

    def read(self) -> dict[str, bytes]:
        top = self.work / "data/model"
        return {str(path.relative_to(top)): path.read_bytes() for path in top.rglob("*") if path.is_file()}


def host_of(hub: FakeHub, folder: Path) -> Host:
    found = remote(hub).listing(SOURCE, None)
    one = DataSource(source=SOURCE.source, path="x", revision=found.revision)
    return Host(folder, found.files, dict(remote(hub).urls(one, found.files, web_instant())), SOURCE.source)


def test_a_host_reads_every_file_of_a_snapshot_and_keeps_them(hub: FakeHub, tmp_path: Path) -> None:
    host = host_of(hub, tmp_path)
    host.fetch()
    assert host.read() == FILES
    asked = len(hub.asked)
    host.fetch()
    assert len(hub.asked) == asked
    (host.work / "data/model/config.json").write_text("changed by the job")
    host.fetch()
    assert host.read() == FILES


def test_content_that_is_not_what_was_listed_is_refused_with_its_file(hub: FakeHub, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        folder = tmp_path / name
        folder.mkdir()
        host = host_of(hub, folder)
        files = hub.repositories["models/org/model"].files
        commit = hub.repositories["models/org/model"].commit
        good = files[name]
        files[name] = bytes(len(good))
        FakeRepository.commit, before = property(lambda self, kept=commit: kept), FakeRepository.commit  # type: ignore[assignment,method-assign,misc]  # the hub serves other bytes under one commit
        try:
            with pytest.raises(DataUnusable, match=name):
                host.fetch()
        finally:
            FakeRepository.commit, files[name] = before, good  # type: ignore[method-assign]  # as it was
        assert not (host.work / "data/model").exists()


def test_a_hub_that_is_away_ends_the_wait_for_it_and_is_not_said_of_the_data(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("spotd_jobs.runner.elsewhere.steady", lambda: now[0])
    host = host_of(hub, tmp_path)
    hub.status = 503

    def pause(seconds: float) -> bool:
        now[0] += 60.0
        return now[0] > 100 * 60.0

    monkeypatch.setattr(host, "_pause", pause)
    with pytest.raises(DataAway, match=r"hf://org/model.*503"):
        host.fetch()
    assert 600 < now[0] < 900
    hub.status = 0
    host.fetch()
    assert host.read() == FILES


def test_spans_that_an_earlier_start_brought_are_believed_by_their_hash(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spotd_jobs.runner.elsewhere.CHUNK_BYTES", 10_000)
    host = host_of(hub, tmp_path)
    run = host.run()
    run.begin()
    run.fetch()
    tree = next((tmp_path / "home/datasets").iterdir()) / "tree"
    content = bytearray(WEIGHTS)
    content[25_000] ^= 1
    (tree / "model.safetensors").write_bytes(content)
    asked = sum("model.safetensors" in path for path, _ in hub.asked)
    again = host.run()
    again.begin()
    again.fetch()
    again.put_in_place()
    assert host.read() == FILES
    assert sum("model.safetensors" in path for path, _ in hub.asked) == asked + 1


class Bucket(FakeHub):
    """Serves each object at /NAME by its ETag, as S3 does."""

    def __init__(self) -> None:
        super().__init__()
        self.objects = {"a.bin": WEIGHTS, "b/c.bin": WEIGHTS[:77]}
        self.matched: list[str] = []

    def answer(self, path: str, headers: Any) -> tuple[int, dict[str, str], bytes]:
        content = self.objects[path.strip("/")]
        self.matched.append(headers["If-Match"])
        if headers["If-Match"] != f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"':
            return 412, {}, b""
        first, last = (int(figure) for figure in headers["Range"].removeprefix("bytes=").split("-"))
        return 206, {"Content-Range": f"bytes {first}-{last}/{len(content)}"}, content[first : last + 1]


def test_an_object_of_a_bucket_is_read_by_its_etag_and_one_that_was_changed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running() as hub:
        bucket = Bucket()
        monkeypatch.setattr(FakeHub, "answer", lambda _, *asked: bucket.answer(*asked))
        files = tuple(
            ListedFile(name, len(content), ETAG, hashlib.md5(content, usedforsecurity=False).hexdigest())
            for name, content in bucket.objects.items()
        )
        urls = {number: f"{hub.url}/{one.path}" for number, one in enumerate(files)}
        (tmp_path / "one").mkdir()
        host = Host(tmp_path / "one", files, urls, "s3://bucket/set")
        host.fetch()
        assert host.read() == bucket.objects
        assert all(bucket.matched)
        bucket.objects["a.bin"] = bytes(len(WEIGHTS))
        (tmp_path / "two").mkdir()
        with pytest.raises(DataUnusable, match="not what it was when it was listed"):
            Host(tmp_path / "two", files, urls, "s3://bucket/set").fetch()
    web.drop_connections()


@every(
    "files",
    [
        (),
        (ListedFile("../a", 1, GIT, "0" * 40),),
        (ListedFile("a", -1, GIT, "0" * 40),),
        (ListedFile("a", 10**18, GIT, "0" * 40),),
        (ListedFile("a", 1, GIT, "0" * 64),),
        (ListedFile("a", 1, ETAG, 'x"\r\nHost: y'),),
        (ListedFile("a", 1, "md5", "0" * 32),),
        (ListedFile("a", 0, STORED, "0" * 64),),
        (ListedFile("b", 1, GIT, "0" * 40), ListedFile("a", 1, GIT, "0" * 40)),
    ],
)
def test_a_list_that_leads_outside_or_does_not_add_up_is_not_read(files: tuple[ListedFile, ...]) -> None:
    with pytest.raises(Unreadable):
        read_listing(listing_text(files))


def test_a_source_is_read_only_below_a_place_that_the_config_names() -> None:
    place = BucketPlace(name="corpus", bucket="data", prefix="v1/", place=None, error="no key")
    found = RemoteData(lambda: RemotePlaces(buckets=(place,)))
    for source in ("s3://data", "s3://data/v10/x", "s3://data/v", "s3://other/v1/x"):
        with pytest.raises(SourceRefused, match="no bucket that the config names"):
            found.listing(DataSource(source=source, path="x"), None)
    for source in ("s3://data/v1", "s3://data/v1/", "s3://data/v1/x"):
        with pytest.raises(SourceRefused, match="no key"):
            found.listing(DataSource(source=source, path="x"), None)


def test_a_bucket_of_aws_costs_nothing_to_a_machine_beside_it() -> None:
    assert bucket_egress(90_000, "us-east-1").highest == 90_000
    assert bucket_egress(0, "us-east-1").highest == 0
    assert bucket_egress(90_000, UNKNOWN_REGION).near
    assert not bucket_egress(90_000, "").near
    assert data_chunk_key("0" * 64)
