from __future__ import annotations

import hashlib
import io
import os
import socket
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spotd_jobs.pack import Packed, PackError, pack
from tests.cases import every

MUCH = 10_000_000


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return root


def names(packed: Packed) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(packed.data)) as archive:
        return [member.name for member in archive if not member.isdir()]


def test_the_archive_unpacks_to_the_same_tree(tmp_path: Path) -> None:
    source = write(tmp_path / "src", {"train.py": "print()", "pkg/a.py": "a", "pkg/long" + "x" * 150 + ".txt": "ä"})
    (source / "train.py").chmod(0o755)
    (source / "empty").mkdir()
    (source / "link").symlink_to("pkg/a.py")
    packed = pack(source, bytes_max=MUCH)
    assert packed.sha256 == hashlib.sha256(packed.data).hexdigest()
    assert (packed.size, packed.file_count, packed.skipped) == (len(packed.data), 4, ())
    target = tmp_path / "out"
    with tarfile.open(fileobj=io.BytesIO(packed.data)) as archive:
        archive.extractall(target, filter="data")
    assert {str(path.relative_to(target)) for path in target.rglob("*")} == {
        str(path.relative_to(source)) for path in source.rglob("*")
    }
    assert (target / "train.py").stat().st_mode & 0o777 == 0o755
    assert (target / "pkg/a.py").stat().st_mode & 0o777 == 0o644
    assert (target / "link").readlink() == Path("pkg/a.py")


def test_equal_content_gives_an_equal_archive_whatever_the_times_modes_and_place(tmp_path: Path) -> None:
    files = {"b.py": "b", "a/z.py": "z", "a.py": "a"}
    first = write(tmp_path / "one", files)
    second = write(tmp_path / "two", dict(reversed(files.items())))
    os.utime(second / "b.py", (1, 1))
    (second / "a.py").chmod(0o600)
    assert pack(first, bytes_max=MUCH).data == pack(second, bytes_max=MUCH).data
    (second / "a.py").chmod(0o700)
    assert pack(first, bytes_max=MUCH).data != pack(second, bytes_max=MUCH).data


def test_gitignore_files_count_at_every_depth(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            ".gitignore": "*.pt\n/data/\n!keep.pt\n# comment\n",
            "model.pt": "",
            "keep.pt": "",
            "data/x": "",
            "sub/data/x": "",
            "sub/.gitignore": "!model.pt\nnotes.txt\n",
            "sub/model.pt": "",
            "sub/notes.txt": "",
            ".git/config": "secret",
            "sub/.git": "gitdir: elsewhere",
        },
    )
    assert names(pack(root, bytes_max=MUCH)) == [
        ".gitignore",
        "keep.pt",
        "sub/.gitignore",
        "sub/data/x",
        "sub/model.pt",
    ]


def test_rules_of_the_repository_above_count_too(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            ".gitignore": "*.log\n/outside/*.txt\n/repo/train/secret\n",
            "repo/.git/HEAD": "",
            "repo/.gitignore": "*.ckpt\n/train/private/\n",
            "repo/train/a.ckpt": "",
            "repo/train/a.log": "",
            "repo/train/a.py": "",
            "repo/train/private/x": "",
        },
    )
    assert names(pack(tmp_path / "repo/train", bytes_max=MUCH)) == ["a.log", "a.py"]


PATHS = st.lists(st.sampled_from(["a", "b", "c.pt", "d"]), min_size=1, max_size=3).map("/".join)
RULES = st.lists(
    st.sampled_from(
        ["a", "/a", "a/", "!a", "*.pt", "!c.pt", "/b/", "a/b", "**/d", "a/**", "!a/b", "/*", "!/b", "d/*", ""]
    ),
    max_size=4,
).map("\n".join)


@pytest.mark.process
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=st.sets(PATHS, min_size=1, max_size=6), top=RULES, nested=RULES)
def test_what_is_packed_is_what_git_would_add(
    tmp_path_factory: pytest.TempPathFactory, files: set[str], top: str, nested: str
) -> None:
    root = tmp_path_factory.mktemp("repo")
    for name in sorted(files, key=len, reverse=True):
        path = root / name
        if not path.is_dir() and not any((root / parent).is_file() for parent in Path(name).parents):
            write(root, {name: "x"})
    write(root, {".gitignore": top, "z.txt": ""})
    if (root / "a").is_dir():
        write(root / "a", {".gitignore": nested})
    quiet = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    subprocess.run(["git", "init", "-q", str(root)], check=True, env=quiet)
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root, check=True, env=quiet, capture_output=True, text=True,
    ).stdout.split("\0")[:-1]  # fmt: skip
    if listed:
        assert names(pack(root, bytes_max=MUCH)) == sorted(listed)
    else:
        with pytest.raises(PackError, match="holds nothing to pack"):
            pack(root, bytes_max=MUCH)


@pytest.mark.parametrize(
    ("place", "target"),
    [
        pytest.param("link", "/etc/passwd", id="absolute"),
        pytest.param("link", "../outside", id="parent"),
        pytest.param("sub/link", "../../outside", id="from below"),
        pytest.param("link", "deep/hop/../../outside", id="through another link"),
    ],
)
def test_a_link_that_leaves_the_tree_is_refused(tmp_path: Path, place: str, target: str) -> None:
    root = write(tmp_path / "src", {"a.py": "", "sub/b": "", "deep/down/c": ""})
    write(tmp_path, {"outside": "secret"})
    (root / "deep/hop").symlink_to("../sub")
    (root / place).symlink_to(target)
    if place == "link" and target.startswith("deep"):
        (root / "deep/hop").unlink()
        (root / "deep/hop").symlink_to("..")
    with pytest.raises(PackError) as caught:
        pack(root, bytes_max=MUCH)
    assert f"the link {place} leads out of the workdir, to {target}" in str(caught.value)
    assert "make it a relative link inside" in caught.value.hint


def test_an_absolute_link_into_the_tree_is_refused_for_it_leads_nowhere_on_a_host(tmp_path: Path) -> None:
    root = write(tmp_path / "src", {"a.py": ""})
    (root / "link").symlink_to(root / "a.py")
    with pytest.raises(PackError, match="the link link leads out of the workdir"):
        pack(root, bytes_max=MUCH)


def test_an_ignored_link_may_lead_anywhere_and_a_dangling_or_looping_one_inside_is_kept(tmp_path: Path) -> None:
    root = write(tmp_path / "src", {"a.py": "", ".gitignore": "data\n"})
    (root / "data").symlink_to("/mnt/data")
    (root / "later").symlink_to("not-there-yet")
    (root / "loop").symlink_to("loop")
    assert names(pack(root, bytes_max=MUCH)) == [".gitignore", "a.py", "later", "loop"]


def test_too_much_is_refused_before_reading_and_names_the_largest(tmp_path: Path) -> None:
    root = write(tmp_path, {"big.bin": "x" * 3_000_000, "sub/small.py": "y" * 10, "mid": "z" * 1_000_000})
    with pytest.raises(PackError) as caught:
        pack(root, bytes_max=2_000_000)
    assert "holds 4.0 MB, more than the 2.0 MB that may be packed" in str(caught.value)
    assert "the largest are big.bin (3.0 MB), mid (1.0 MB), sub/small.py (0.0 MB)" in caught.value.hint


def test_a_missing_folder_a_file_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("absent", "does not exist"),
        ("file", "is not a folder"),
        ("empty", "holds nothing to pack"),
    ):
        with pytest.raises(PackError, match=f"the workdir .*/{name} {message}") as caught:
            pack(tmp_path / name, bytes_max=MUCH)
        assert caught.value.hint


def test_sockets_and_pipes_are_left_out_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"a.py": ""})
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("sock")
        packed = pack(tmp_path, bytes_max=MUCH)
    assert names(packed) == ["a.py"]
    assert packed.skipped == ("pipe", "sock")


KEYS = [
    ".env", ".env.local", "conf/prod.env", ".ssh/id_rsa", ".ssh/config", "id_ed25519", "deploy/id_rsa_backup",
    ".aws/credentials", ".netrc", ".git-credentials", "server.key", "cert.p12", ".kube/config", "kubeconfig",
    ".config/gcloud/application_default_credentials.json", ".azure/accessTokens.json", ".docker/config.json",
    ".huggingface/token", ".ENV", "Id_RSA", ".streamlit/secrets.toml", ".npmrc", ".pypirc", "credentials.json",
    "kaggle.json", "service-account.json", "conf/Service_Account_prod.json", "terraform.tfstate", "terraform.tfstate.1",
    "prod.tfvars", "token.json", "client_secret_1.apps.json", "credentials.csv", "root_accessKeys.csv",
]  # fmt: skip
BY_CONTENT = {
    "k.pem": "-----BEGIN RSA PRIVATE KEY-----\nx",
    "odd-name": "-----BEGIN OPENSSH PRIVATE KEY-----\nx",
    ".yarnrc.yml": "npmAuthToken: abc",
    "pip.conf": "[global]\nindex-url = https://me:word@host/simple",
    "sa.json": '{"type": "service_account", "private_key": "-----"}',
}
HARMLESS = {
    ".env.example": "A=", "id_rsa.pub": "ssh-rsa", "ca.pem": "-----BEGIN CERTIFICATE-----\n", ".yarnrc.yml": "a: 1",
    "pip.conf": "[global]\nindex-url = https://host/simple", "data.json": "{}", "environment.yml": "x", "key.py": "x",
    "tokenizer.json": "{}", "tokens.json": "{}", "special_tokens_map.json": "{}",
    "main.tf": "x", "keys/readme.txt": "x", "monkey": "x",
}  # fmt: skip


def _with(tmp_path: Path, files: Mapping[str, str]) -> Path:
    for name, text in {"train.py": "x", **files}.items():
        (tmp_path / "w" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "w" / name).write_text(text)
    return tmp_path / "w"


@every(("name", "text"), [*((name, "x") for name in KEYS), *BY_CONTENT.items()])
def test_what_looks_like_a_key_travels_only_where_it_is_included_by_name(tmp_path: Path, name: str, text: str) -> None:
    folder = _with(tmp_path / name.replace("/", "-"), {name: text})
    with pytest.raises(PackError) as refused:
        pack(folder, bytes_max=MUCH)
    assert name in str(refused.value)
    assert f"--include {name}" in refused.value.hint
    assert ".spotdignore" in refused.value.hint
    assert name in names(pack(folder, bytes_max=MUCH, include=[name]))
    (folder / ".spotdignore").write_text(f"/{name}\n")
    assert name not in names(pack(folder, bytes_max=MUCH))
    assert name in names(pack(folder, bytes_max=MUCH, include=[name])), "included is included, also where it is ignored"


def test_harmless_files_of_similar_names_travel_without_a_word(tmp_path: Path) -> None:
    folder = _with(tmp_path, HARMLESS)
    assert set(HARMLESS) <= set(names(pack(folder, bytes_max=MUCH)))


def test_many_keys_are_named_in_one_refusal_and_a_folder_includes_all_below_it(tmp_path: Path) -> None:
    folder = _with(tmp_path, {f".ssh/id_rsa{number}": "x" for number in range(30)})
    with pytest.raises(PackError, match="and 20 more"):
        pack(folder, bytes_max=MUCH)
    assert len(names(pack(folder, bytes_max=MUCH, include=[".ssh/"]))) == 31


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "", "none", "a/../../x"])
def test_only_what_is_in_the_workdir_can_be_included(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text("x")
    with pytest.raises(PackError, match="is to be included, and is not in"):
        pack(_with(tmp_path, {}), bytes_max=MUCH, include=[name])
