from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import textwrap
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from spotd_jobs.objects.api import ObjectMissing, ObjectStore, StoreError, StoreUnavailable
from spotd_jobs.objects.folder import FolderStore
from tests.unit.jobs.store_contract import MUCH, StoreContract

SOON = datetime.now(UTC) + timedelta(hours=1)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "state" / "store"


@pytest.fixture
def store(root: Path) -> FolderStore:
    return FolderStore(root)


class TestFolderStoreKeepsTheContract(StoreContract):
    @pytest.fixture
    def store(self, root: Path) -> ObjectStore:
        return FolderStore(root)


def test_folders_are_private(store: FolderStore, root: Path) -> None:
    store.put("jobs/1/x", b"x")
    for folder in (root, root / "jobs", root / "jobs/1"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_presigned_url_is_the_file_itself(store: FolderStore) -> None:
    store.put("jobs/1 ä/x?y#z", b"content")
    url = urlsplit(store.presign_get("jobs/1 ä/x?y#z", expires=SOON))
    assert url.scheme == "file"
    assert Path(unquote(url.path)).read_bytes() == b"content"


def test_a_grant_is_a_folder_that_exists_and_whose_files_are_objects(store: FolderStore) -> None:
    grant = store.grant_upload("jobs/1/attempts/1/", expires=SOON, size_max=100)
    folder = Path(grant.fields["directory"])
    assert grant.method == "folder"
    assert folder.is_absolute()
    (folder / "heartbeat.json").write_bytes(b"{}")
    assert [info.key for info in store.list("jobs/1/")] == ["jobs/1/attempts/1/heartbeat.json"]
    assert store.get("jobs/1/attempts/1/heartbeat.json", bytes_max=MUCH) == b"{}"


def test_unfinished_writes_of_a_host_are_no_objects(store: FolderStore) -> None:
    folder = Path(store.grant_upload("a/", expires=SOON, size_max=100).fields["directory"])
    (folder / ".spotd-123-1").write_bytes(b"half")
    assert list(store.list("")) == []
    with pytest.raises(StoreError, match="unfinished writes"):
        store.get("a/.spotd-123-1", bytes_max=MUCH)


def test_links_and_pipes_that_a_host_left_are_no_objects(store: FolderStore, tmp_path: Path) -> None:
    folder = Path(store.grant_upload("a/", expires=SOON, size_max=100).fields["directory"])
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_bytes(b"secret")
    (folder / "link").symlink_to(secret / "key")
    (folder / "folder").symlink_to(secret)
    os.mkfifo(folder / "pipe")
    assert list(store.list("")) == []
    for key in ("a/link", "a/pipe"):
        assert store.head(key) is None
        with pytest.raises(ObjectMissing):
            store.get(key, bytes_max=MUCH)
    for call in (
        lambda: store.get("a/folder/key", bytes_max=MUCH),
        lambda: store.put("a/folder/new", b"x"),
        lambda: list(store.list("a/folder/")),
        lambda: list(store.list("a/folder/k")),
        lambda: list(store.stored("a/folder/")),
    ):
        with pytest.raises(StoreError, match="behind a link"):
            call()
    assert [path.name for path in secret.iterdir()] == ["key"]


def test_a_full_disk_is_unavailable_with_place_and_way_out(store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("k", b"old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        StoreUnavailable, match=r"no space left for the store folder .*/state/store; free some, or point"
    ):
        store.put("k", b"new")
    monkeypatch.undo()
    assert store.get("k", bytes_max=MUCH) == b"old"
    store.put("k", b"new")
    assert store.get("k", bytes_max=MUCH) == b"new"


@pytest.mark.process
def test_a_really_full_file_system_keeps_the_old_object(tmp_path: Path) -> None:
    script = textwrap.dedent("""
        import pathlib, sys
        from spotd_jobs.objects.api import StoreUnavailable
        from spotd_jobs.objects.folder import FolderStore
        store = FolderStore(pathlib.Path(sys.argv[1]) / "store")
        store.put("k", b"old")
        try:
            store.put("k", bytes(1_000_000))
        except StoreUnavailable as exc:
            print(exc)
        print(store.get("k", bytes_max=10), len(list(store.list(""))))
        print(store.put("k", bytes(100_000)).size)
    """)
    mounted = tmp_path / "small"
    mounted.mkdir()
    shell = 'mount -t tmpfs -o size=300k none "$1" && exec "$2" -c "$3" "$1"'
    unshare = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", shell, "sh"]
    probe = subprocess.run([*unshare, str(mounted), sys.executable, "print(1)"], capture_output=True, check=False)
    if probe.returncode != 0:
        pytest.skip("this machine does not let us mount a small file system in a namespace")
    done = subprocess.run([*unshare, str(mounted), sys.executable, script], capture_output=True, text=True, check=True)
    message, kept, after = done.stdout.splitlines()
    assert "no space left" in message
    assert kept == "b'old' 1"
    assert after == "100000"


def test_a_file_where_the_folder_should_be_is_refused_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(
        StoreError, match=r"cannot open in the store folder .*/file: .*; check its owner, mode and mount"
    ):
        FolderStore(tmp_path / "file")


@pytest.mark.process
def test_a_killed_writer_leaves_old_or_new_and_no_litter_in_the_listing(root: Path) -> None:
    store = FolderStore(root)
    store.put("k", b"\0" * 300_000)
    script = textwrap.dedent("""
        import pathlib, sys
        from spotd_jobs.objects.folder import FolderStore
        store = FolderStore(pathlib.Path(sys.argv[1]))
        print("go", flush=True)
        for turn in range(100_000):
            store.put("k", bytes([turn % 256]) * 300_000)
    """)
    for turn in range(5):
        writer = subprocess.Popen([sys.executable, "-c", script, str(root)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        with writer.stdout as output:
            output.readline()
            for _ in range(turn * 7):
                store.head("k")
            writer.send_signal(signal.SIGKILL)
            writer.wait(timeout=30)
        content = store.get("k", bytes_max=MUCH)
        assert len(content) == 300_000
        assert len(set(content)) == 1
        assert [info.key for info in store.list("")] == ["k"]


def test_old_leftovers_of_killed_writers_are_swept_at_the_next_start(root: Path) -> None:
    FolderStore(root)
    old, young = root / ".spotd-spool" / "old", root / ".spotd-spool" / "young"
    old.write_bytes(b"x")
    young.write_bytes(b"x")
    os.utime(old, (0, 0))
    FolderStore(root)
    assert not old.exists()
    assert young.exists()


def test_an_object_below_an_object_is_refused_and_loses_nothing(store: FolderStore) -> None:
    store.put("a", b"x")
    with pytest.raises(StoreError, match="cannot write in the store folder"):
        store.put("a/b", b"y")
    assert store.get("a", bytes_max=MUCH) == b"x"


@pytest.mark.long
@pytest.mark.parametrize(("name", "depth"), [("d", 1_500), ("d" * 10, 1_000)], ids=["many folders", "long path"])
def test_folders_as_deep_as_a_host_likes_hide_no_other_object(
    store: FolderStore, root: Path, name: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ["jobs/1/a", "jobs/1/z"]
    for key in keys:
        store.put(key, b"x")
    monkeypatch.chdir(root / "jobs/1")
    for _ in range(depth):
        os.mkdir(name)  # noqa: PTH102  # relative, as no path is as long as this
        os.chdir(name)
    try:
        assert [info.key for info in store.list("jobs/")] == keys
        assert [info.key for info in store.list_after("jobs/1/", "jobs/1/a")] == keys[1:]
    finally:
        for _ in range(depth):  # nothing else could delete them
            os.chdir("..")
            os.rmdir(name)  # noqa: PTH106  # as above
