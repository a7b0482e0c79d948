"""The archive of a folder that a browser sent: what is unpacked, what is refused, and that nothing is left behind."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from spotd.client.daemon import Daemon
from spotd.web import folder
from spotd_jobs.pack import PackError, pack


def tar_of(*members: tuple[str, bytes | None, bytes]) -> bytes:
    """Return a `.tar.gz` of name, content and type of each."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for name, content, kind in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd" if kind in {tarfile.SYMTYPE, tarfile.LNKTYPE} else ""
            member.size = len(content or b"")
            archive.addfile(member, io.BytesIO(content or b""))
    return made.getvalue()


def zip_of(*members: tuple[str, bytes], mode: int = 0) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members:
            info = zipfile.ZipInfo(name)
            info.external_attr, info.compress_type = mode << 16, zipfile.ZIP_DEFLATED
            archive.writestr(info, content)
    return made.getvalue()


def long_name() -> bytes:
    """Return a `.tar.gz` whose name is two megabytes long, which the reader would hold in memory."""
    return tar_of(("n" * 2_000_000, b"", tarfile.REGTYPE))


def sparse_by_header() -> bytes:
    """Return a `.tar.gz` of a plain file that an extended header makes one with holes, of any size."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("x")
        member.pax_headers = {"GNU.sparse.map": "1000000000000,0", "GNU.sparse.size": "1000000000000"}
        archive.addfile(member)
    return made.getvalue()


FILE = tarfile.REGTYPE
HOSTILE = {
    "absolute": (tar_of(("/etc/x", b"x", FILE)), "leads out"),
    "above": (tar_of(("a/../../x", b"x", FILE)), "leads out"),
    "zip absolute": (zip_of(("/x", b"x")), "leads out"),
    "zip above": (zip_of(("../x", b"x")), "leads out"),
    "zip backslash": (zip_of(("..\\x", b"x")), "leads out"),
    "symbolic link": (tar_of(("x", None, tarfile.SYMTYPE)), "a link or a device"),
    "hard link": (tar_of(("x", None, tarfile.LNKTYPE)), "a link or a device"),
    "device": (tar_of(("x", None, tarfile.CHRTYPE)), "a link or a device"),
    "pipe": (tar_of(("x", None, tarfile.FIFOTYPE)), "a link or a device"),
    "sparse": (tar_of(("x", None, tarfile.GNUTYPE_SPARSE)), "a link or a device"),
    "sparse by its header": (sparse_by_header(), "a link or a device"),
    "zip link": (zip_of(("x", b"/etc/passwd"), mode=0o120777), "a link or a device"),
    "twice": (tar_of(("x", b"1", FILE), ("./x", b"2", FILE)), "twice"),
    "below a file": (tar_of(("x", b"1", FILE), ("x/y", b"2", FILE)), "cannot be unpacked"),
    "long name": (long_name(), "a header that is too long"),
    "many": (tar_of(*((f"f{i}", b"", FILE) for i in range(12))), "more than 10 files"),
    "many folders": (zip_of(*((f"f{i}/", b"") for i in range(12))), "more than 10 files"),
    "large": (tar_of(("x", bytes(3_000), FILE)), "MB that may be unpacked"),
    "zip large": (zip_of(("x", bytes(3_000))), "MB that may be unpacked"),
    "large in all": (tar_of(("x", bytes(1_500), FILE), ("y", bytes(1_500), FILE)), "MB that may be unpacked"),
    "neither": (b"BZh9", "neither"),
    "empty": (b"", "neither"),
    "cut": (tar_of(("x", os.urandom(900), FILE))[:-200], "damaged"),
    "zip cut": (zip_of(("x", b"x"))[:-30], "damaged"),
    "no tar": (gzip.compress(b"x" * 2_000), "damaged"),
    "zip longest": (zip_of(("x", b"x"))[:-10] + b"\xff\xff\xff\xff" + bytes(6), "files"),
}


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files, which each test leaves empty."""
    own = tmp_path / "temporary"
    own.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(own))
    return own


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_archive_is_refused_with_a_sentence_and_leaves_nothing(
    case: str, tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "FILES_MAX", 10)
    monkeypatch.setattr(folder, "CODE_BYTES_MAX", 2_000)
    content, sentence = HOSTILE[case]
    archive = tmp_path / "archive"
    archive.write_bytes(content)
    with pytest.raises(PackError, match=sentence) as caught:
        folder.check_code(archive, "code.zip")
    assert str(temporary) not in str(caught.value) + caught.value.hint
    assert list(temporary.iterdir()) == []
    assert sorted(one.name for one in tmp_path.iterdir()) == ["archive", "temporary"]


class Store:
    """What the store of a daemon holds."""

    def __init__(self) -> None:
        self.code: dict[str, bytes] = {}

    def has_code(self, sha256: str) -> bool:
        return sha256 in self.code

    def put_code(self, sha256: str, content: Any, size: int) -> None:
        assert sha256 not in self.code
        self.code[sha256] = content.read()
        assert len(self.code[sha256]) == size


@pytest.mark.parametrize("kind", ["gztar", "zip"])
def test_a_folder_is_stored_once_under_the_hash_that_submit_gives_it(
    kind: str, tmp_path: Path, temporary: Path
) -> None:
    project = tmp_path / "project"
    (project / "deep" / "empty").mkdir(parents=True)
    (project / "train.py").write_text("print(1)\n")
    (project / "deep" / "go.sh").write_text("true\n")
    (project / "deep" / "go.sh").chmod(0o755)
    (project / ".gitignore").write_text("*.bin\n")
    (project / "data.bin").write_bytes(b"x")
    archive = Path(shutil.make_archive(str(tmp_path / "code"), kind, project))
    store = Store()
    folder.check_code(archive, archive.name)
    sent = [folder.send_code(cast(Daemon, store), archive, archive.name) for _ in range(2)]
    packed = pack(project, bytes_max=10_000)
    assert store.code == {packed.sha256: packed.data}
    assert sent == [packed.sha256] * 2
    assert list(temporary.iterdir()) == []


def send(archive: Path, name: str) -> None:
    folder.send_code(cast(Daemon, Store()), archive, name)


@pytest.mark.parametrize("work", [folder.check_code, send])
def test_keys_are_refused_as_by_submit_and_named_with_the_archive(
    work: Callable[[Path, str], None], tmp_path: Path, temporary: Path
) -> None:
    archive = tmp_path / "archive"
    archive.write_bytes(zip_of((".env", b"TOKEN=1"), ("a.py", b"")))
    with pytest.raises(PackError, match=r"the workdir code\.zip holds what looks like keys.*\.env"):
        work(archive, "code.zip")
    assert list(temporary.iterdir()) == []
