"""Whatever a job leaves in its checkpoint and output folders: each entry fails alone, and the end always comes."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotd_jobs.runner import manifest, outputs
from spotd_jobs.runner.manifest import text_bytes
from spotd_jobs.runner.prefetch import Prefetch
from spotd_jobs.runner.upload import Progress, TreeUpload, loads_of
from spotd_jobs.wire.client.sinks import CHUNKS_MAX, MANIFEST_TEXT_MAX, raw_of, remove
from spotd_jobs.wire.manifest import AcceptedManifest, verify_manifest
from spotd_jobs.wire.manifest_document import parse_manifest
from spotd_jobs.wire.reports import Outcome
from tests.integration.runner.inside import restore_into, runner_grant, store_of, upload_tree
from tests.integration.runner.rig import JOB, Rig
from tests.integration.runner.test_transfer import offer

ODD_NAMES = [
    b"line\nbreak", b"\xff\xfe", b"back\\slash", b"zero\xe2\x80\x8dwidth", b"\x01\x7f", b"100%", b"%41", b"a", b"A",
    b"caf\xc3\xa9", b"cafe\xcc\x81", b"n" * 255, b"\xff" * 255, b" ", b"*", b"-rf", b"C:", b"'\"", b"\xe2\x80\xae",
]  # fmt: skip
MAKE_ODD = r"""
import os, socket, sys
root = os.environ["SPOTD_CHECKPOINT_DIR"]
def write(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as stream:
        stream.write(text)
write(root + "/step-1/w", "one")
write(root + "/step-1/DONE", "")
os.makedirs(root + "/deep")
here = os.getcwd()
os.chdir(root + "/deep")
for _ in range(1200):
    os.mkdir("d")
    os.chdir("d")
with open("w", "w") as stream:
    stream.write("deep")
os.chdir(root)
os.makedirs("long")
os.chdir("long")
for _ in range(18):
    os.mkdir("l" * 250)
    os.chdir("l" * 250)
os.chdir(here)
os.mkfifo(root + "/pipe")
os.makedirs(root + "/pipes")
os.mkfifo(root + "/pipes/p")
write(root + "/pipes/w", "beside a pipe")
server = socket.socket(socket.AF_UNIX)
server.bind(root + "/pipes/s")
os.symlink("loop", root + "/loop")
os.makedirs(root + "/loops")
os.symlink("b", root + "/loops/a")
os.symlink("a", root + "/loops/b")
write(root + "/loops/w", "beside a loop")
os.makedirs(root + "/devices")
os.symlink("/dev/zero", root + "/devices/zero")
os.symlink("/dev/zero", root + "/zero")
write(root + "/bad.index.json", "[" * 100000)
os.makedirs(root + "/nested")
write(root + "/nested/model.safetensors.index.json", '{"weight_map":' + "[" * 100000)
os.makedirs(root + "/empty")
write(root + "/step-2/w", "two")
write(root + "/step-2/DONE", "")
out = os.environ["SPOTD_OUTPUT_DIR"]
write(out + "/good", "good")
os.mkfifo(out + "/pipe")
"""


@pytest.fixture(autouse=True)
def _nothing_deep_is_left(tmp_path: Path) -> Iterator[None]:
    """What pytest itself could not remove is gone after each test, however that ended."""
    yield
    subprocess.run(["rm", "-rf", "--", str(tmp_path)], check=False)


def test_a_folder_full_of_odd_things_costs_no_good_checkpoint_and_no_end(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        grant = rig.grant(["python3", "odd.py"], code={"odd.py": MAKE_ODD}, settle_s=0.1, keep=20)
        machine = rig.start(grant)
        assert machine.wait() == 0, machine.console()
        done = machine.events()[-1].exit()
        assert done is not None
        assert (done.outcome, done.exit_code, done.outputs_lost) == (Outcome.SUCCEEDED, 0, 1)
        stored = {one.name for one in rig.accepted(1)}
        assert stored >= {"step-1", "step-2", "pipes", "loops"}
        assert not stored & {"deep", "long", "pipe", "devices", "empty", "nested"}
        told = {str(event.data["name"]) for event in machine.events("checkpoint_refused")}
        assert told >= {"deep", "long", "devices", "nested", "empty"}, told
        (lost,) = machine.events("outputs_lost")
        assert lost.data["files"] == 1
        assert "pipe" in str(lost.data["reason"])
        assert (machine.directory / "machine-done").exists()


def test_names_of_every_kind_come_back_from_the_store_as_they_were(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        folder = tmp_path / "ckpt"
        made = folder / "c\n1"
        made.mkdir(parents=True)
        for number, name in enumerate(ODD_NAMES):
            (made / os.fsdecode(name)).write_bytes(b"%d" % number * (1 + 40 * number))
            (made / f"link{number}").symlink_to(os.fsdecode(name))
        data = upload_tree(rig, store_of(runner_grant(rig)), folder, "c\n1")
        accepted = verify_manifest(data, JOB, 1, rig.store.head)
        assert isinstance(accepted, AcceptedManifest), accepted
        assert accepted.entry == "c%0A1"
        assert {raw_of(e.path) for e in accepted.files} >= {b"c\n1/" + name for name in ODD_NAMES}
        done = restore_into(rig, tmp_path / "back", [offer(rig, data, accepted.name)]).run()
        assert done is not None
        assert done.entry == "c\n1"
        back = Path(done.path)
        for number, name in enumerate(ODD_NAMES):
            for place in (os.fsdecode(name), f"link{number}"):
                assert (back / place).read_bytes() == b"%d" % number * (1 + 40 * number)
            assert os.fsencode((back / f"link{number}").readlink()) == name


def test_an_odd_name_in_the_outputs_is_stored_and_the_job_says_nothing_is_lost(tmp_path: Path) -> None:
    script = 'cd "$SPOTD_OUTPUT_DIR"; printf x > "$(printf \'line\\nbreak\\377\')"; mkdir sub; printf y > "sub/b\\\\s"'
    with Rig(tmp_path) as rig:
        machine = rig.start(rig.grant(["/bin/sh", "-c", script]))
        assert machine.wait() == 0
        done = machine.events()[-1].exit()
        assert done is not None
        assert done.outputs_lost == 0
        data = rig.store.get(machine.prefix + "outputs/manifest.json") or b""
        accepted = verify_manifest(data, JOB, 1, rig.store.head)
        assert isinstance(accepted, AcceptedManifest), accepted
        assert {raw_of(entry.path) for entry in accepted.files} == {b"line\nbreak\xff", b"sub/b\\s"}


@pytest.mark.parametrize(
    "step", ["_limit_flush", "_store_outputs", "_drain", "_oom", "_heartbeat", "_logs", "_saver", "_keeper", "events"]
)
def test_whatever_fails_at_the_end_the_report_of_the_end_comes(step: str, tmp_path: Path) -> None:
    """Each part is broken in a real runner, from a file that Python reads at its start."""
    broken = {
        "_limit_flush": "A._limit_flush = fail",
        "_store_outputs": "A._store_outputs = fail",
        "_drain": "A._drain = fail",
        "_oom": "OomWatch.happened = fail",
        "_heartbeat": "HeartbeatWriter.last = fail",
        "_logs": "LogShipper.close = fail; LogShipper.say = fail",
        "_saver": "CheckpointUploader.drain = fail",
        "_keeper": "GrantKeeper.close = fail",
        "events": "Events.flush = fail",
    }[step]
    script = (
        "import os, sys\n"
        "from spotd_jobs.runner.attempt import AttemptRun as A\n"
        "from spotd_jobs.runner.store import GrantKeeper\n"
        "from spotd_jobs.runner.heartbeat import HeartbeatWriter\n"
        "from spotd_jobs.runner.logs import LogShipper\n"
        "from spotd_jobs.runner.process import OomWatch\n"
        "from spotd_jobs.runner.checkpoint_uploader import CheckpointUploader\n"
        "from spotd_jobs.runner.store import Events\n"
        "from spotd_jobs.runner.main import run\n"
        "def fail(*args, **named): raise RecursionError('broken on purpose')\n"
        f"{broken}\n"
        "run()\n"
    )
    with Rig(tmp_path) as rig:
        machine = rig.start(rig.grant(["/bin/sh", "-c", "true"]), script=script)
        assert machine.wait() == 0, machine.console()
        assert (machine.directory / "machine-done").exists()
        done = machine.event("exit").exit()
        assert done is not None
        assert done.outcome is Outcome.SUCCEEDED


def test_a_runner_that_breaks_altogether_reports_it_and_ends_its_machine(tmp_path: Path) -> None:
    script = (
        "from spotd_jobs.runner.attempt import AttemptRun\n"
        "from spotd_jobs.runner.main import run\n"
        "def fail(*args, **named): raise MemoryError('broken on purpose')\n"
        "AttemptRun.__init__ = fail\n"
        "run()\n"
    )
    with Rig(tmp_path) as rig:
        machine = rig.start(rig.grant(["/bin/sh", "-c", "true"]), script=script)
        assert machine.wait() == 0, machine.console()
        assert (machine.directory / "machine-done").exists()
        done = machine.event("exit").exit()
        assert done is not None
        assert (done.outcome, done.reason) == (Outcome.RUNNER_ERROR, "broken on purpose")


def test_a_machine_whose_disk_takes_nothing_says_so_and_ends(tmp_path: Path) -> None:
    script = (
        "import errno, os\n"
        "from spotd_jobs.runner import main\n"
        "def fail(*args, **named): raise OSError(errno.ENOSPC, 'No space left on device')\n"
        "main.lock = fail\n"
        "main.run()\n"
    )
    with Rig(tmp_path) as rig:
        machine = rig.start(rig.grant(["/bin/sh", "-c", "true"]), script=script)
        assert machine.wait() == 0, machine.console()
        assert (machine.directory / "machine-done").exists()
        done = machine.event("exit").exit()
        assert done is not None
        assert done.outcome is Outcome.DISK_FULL


# --- room on the disk -----------------------------------------------------------------------------------------------


def saved(rig: Rig, name: str, size: int) -> dict[str, Any]:
    folder = rig.folder / "made" / name
    folder.mkdir(parents=True)
    (folder / "w").write_bytes(os.urandom(size))
    data = upload_tree(rig, store_of(runner_grant(rig)), folder.parent, name, 8192)
    return offer(rig, data, name, f"jobs/j1/attempts/1/checkpoints/{name}.json")


def with_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """The disk says that it has so many bytes left."""
    real = os.statvfs

    def stated(folder: Any) -> os.statvfs_result:
        fields = list(real(folder))
        fields[1], fields[4] = 1, free  # f_frsize, f_bavail
        return os.statvfs_result(fields)

    monkeypatch.setattr(os, "statvfs", stated)


def test_a_checkpoint_that_does_not_fit_is_passed_over_before_a_byte_of_it_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Rig(tmp_path) as rig:
        older, newer = saved(rig, "step-1", 10_000), saved(rig, "step-2", 300_000)
        for key in parse_manifest(rig.store.get(newer["manifest"]["key"]) or b"").chunk_sizes():
            rig.store.path(key).unlink()
        with_free(monkeypatch, 17_000_000)
        restore = restore_into(rig, tmp_path / "back", [newer, older])
        done = restore.run()
        assert done is not None
        assert done.name == "step-1"
        (fallback,) = restore.fallbacks
        assert fallback.name == "step-2"
        assert "GB of disk" in fallback.reason


def test_what_was_fetched_ahead_of_one_that_does_not_fit_makes_room_for_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Rig(tmp_path) as rig:
        older, newer = saved(rig, "step-1", 10_000), saved(rig, "step-2", 300_000)
        home = tmp_path / "home"
        (home / "prefetch").mkdir(parents=True)
        (home / "prefetch" / ("0" * 64)).write_bytes(b"x" * 1000)
        with_free(monkeypatch, 17_000_000)
        restore = restore_into(rig, tmp_path / "back", [newer, older])
        restore._prefetch = Prefetch(str(home))
        room: list[bool] = []
        real = restore._fill

        def filled(work: str, document: dict[str, Any]) -> None:
            room.append(not (home / "prefetch").exists())
            real(work, document)

        restore._fill = filled  # type: ignore[method-assign]  # the same work, seen
        done = restore.run()
        assert done is not None
        assert (done.name, room) == ("step-1", [True])


def test_a_job_whose_checkpoints_do_not_fit_never_begins_afresh_and_says_why(tmp_path: Path) -> None:
    script = (
        "import os\n"
        "real = os.statvfs\n"
        "def stated(folder):\n"
        "    fields = list(real(folder)); fields[1], fields[4] = 1, 1000\n"
        "    return os.statvfs_result(fields)\n"
        "os.statvfs = stated\n"
        "from spotd_jobs.runner.main import run\n"
        "run()\n"
    )
    with Rig(tmp_path) as rig:
        save = "cd $SPOTD_CHECKPOINT_DIR; mkdir step-1; echo x > step-1/w; touch step-1/DONE"
        assert rig.start(rig.grant(["/bin/sh", "-c", save])).wait() == 0
        grant = rig.grant(["/bin/sh", "-c", "echo began"], attempt=2, restore=rig.restores(1))
        machine = rig.start(grant, script=script)
        assert machine.wait() == 0
        done = machine.event("exit").exit()
        assert done is not None
        assert done.outcome is Outcome.DISK_FULL
        assert "GB of disk" in done.reason
        assert "began" not in machine.log().split()
        assert (machine.directory / "machine-done").exists()


# --- many files -----------------------------------------------------------------------------------------------------


def test_small_files_travel_together_and_come_back_alone(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        made = tmp_path / "made/c"
        for number in range(300):
            place = made / f"d{number % 7}" / f"f{number}"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(os.urandom(number % 50))
        data = upload_tree(rig, store_of(runner_grant(rig)), made.parent, "c", 4096)
        accepted = verify_manifest(data, JOB, 1, rig.store.head)
        assert isinstance(accepted, AcceptedManifest)
        assert len(accepted.chunk_keys) <= 300 * 25 // 4096 + 2
        done = restore_into(rig, tmp_path / "back", [offer(rig, data, "c")]).run()
        assert done is not None
        for path in made.rglob("*"):
            if path.is_file():
                assert (Path(done.path) / path.relative_to(made)).read_bytes() == path.read_bytes()


def node(number: int, size: int, path: str = "") -> manifest.Node:
    return manifest.Node(
        path or f"c/shard-{number:06d}", manifest.FILE, size, 1_764_000_000_000_000_000, number, 0o644, None
    )


@pytest.mark.parametrize("size", [10_000, 1_100_000, 9_000_000])
def test_a_hundred_thousand_files_of_any_size_fit_into_a_manifest(size: int, tmp_path: Path) -> None:
    nodes = tuple(node(number, size) for number in range(manifest.ENTRIES_MAX))
    with Rig(tmp_path) as rig:
        grant = runner_grant(rig)
        stage = manifest.Stage(manifest.Tree("c", nodes), str(tmp_path), None)
        upload = TreeUpload(stage, store_of(grant), None, Progress(), 8 << 20, lambda: False)  # type: ignore[arg-type]  # nothing is sent
        loads = list(upload._loads)
    assert len(loads) <= CHUNKS_MAX
    assert sum(load.size for load in loads) == size * len(nodes)
    assert text_bytes(nodes, len(loads)) < MANIFEST_TEXT_MAX


def test_what_no_manifest_can_say_is_refused_before_the_first_byte(tmp_path: Path) -> None:
    long_names = tuple(node(number, 1, f"c/{number:06d}" + "x" * 900) for number in range(45_000))
    huge = (node(1, 20 * 10**12),)
    with Rig(tmp_path) as rig:
        for nodes in (long_names, huge):
            stage = manifest.Stage(manifest.Tree("c", nodes), str(tmp_path), None)
            with pytest.raises(manifest.Unfit):
                TreeUpload(stage, store_of(runner_grant(rig)), None, Progress(), 8 << 20, lambda: False)  # type: ignore[arg-type]  # nothing is sent


def test_the_estimate_of_a_manifest_is_never_below_its_length(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        made = tmp_path / "made/c"
        made.mkdir(parents=True)
        for number, name in enumerate(ODD_NAMES):
            (made / os.fsdecode(name)).write_bytes(os.urandom(200 * number))
        seen = manifest.scan(str(made.parent), "c")
        data = upload_tree(rig, store_of(runner_grant(rig)), made.parent, "c", 64)
        chunks = len(json.loads(data)["chunks"])
        assert len(data) <= text_bytes(seen.nodes, chunks)


def test_no_byte_is_in_two_loads_and_none_is_missing() -> None:
    nodes = tuple(node(number, size) for number, size in enumerate([0, 1, 7, 8, 63, 64, 65, 200, 3, 3, 3, 0, 5]))
    for chunk_bytes, packed_below in ((64, 8), (64, 32), (8, 1), (1, 0), (64, 64)):
        covered = {one.path: set[int]() for one in nodes}
        for load in loads_of(nodes, chunk_bytes, packed_below):
            assert load.size == sum(part.size for part in load.parts) <= chunk_bytes
            for part in load.parts:
                span = set(range(part.offset, part.offset + part.size))
                assert not covered[part.node.path] & span
                covered[part.node.path] |= span
        assert {path: len(span) for path, span in covered.items()} == {one.path: one.size for one in nodes}


# --- parts ------------------------------------------------------------------------------------------------------------


def deep_folder(top: Path, depth: int, name: str = "d") -> None:
    top.mkdir()
    here = Path.cwd()
    try:
        os.chdir(top)
        for _ in range(depth):
            Path(name).mkdir()
            os.chdir(name)
        Path("w").write_bytes(b"w")
    finally:
        os.chdir(here)


@pytest.mark.parametrize(("depth", "name"), [(1500, "d"), (40, "l" * 250)], ids=["deep", "long"])
def test_a_tree_of_any_depth_is_removed(depth: int, name: str, tmp_path: Path) -> None:
    deep_folder(tmp_path / "t", depth, name)
    (tmp_path / "t" / "loop").symlink_to("..")
    (tmp_path / "keep").write_bytes(b"k")
    remove(str(tmp_path / "t"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["keep"]


@pytest.mark.parametrize(("depth", "name"), [(1200, "d"), (40, "l" * 250)], ids=["deep", "long"])
def test_a_tree_that_no_manifest_can_hold_is_refused_in_words(depth: int, name: str, tmp_path: Path) -> None:
    deep_folder(tmp_path / "t", depth, name)
    with pytest.raises(manifest.Unfit, match="deep"):
        manifest.scan(str(tmp_path), "t")
    remove(str(tmp_path / "t"))


@pytest.mark.parametrize("depth", [manifest.DEPTH_MAX - 3, manifest.DEPTH_MAX, 2 * manifest.DEPTH_MAX, 1200])
@pytest.mark.parametrize("pattern", ["out/**", "**", "out", "o*/**"])
def test_outputs_with_a_deep_folder_are_stored_without_it(depth: int, pattern: str, tmp_path: Path) -> None:
    work = tmp_path / "work"
    (work / "out").mkdir(parents=True)
    (work / "out/a").write_bytes(b"a")
    deep_folder(work / "out/deep", depth)
    left_out = outputs.LeftOut()
    found = outputs.gather(str(work), [pattern], str(tmp_path / "none"), str(tmp_path / "g"), left_out)
    assert [one.path for one in found.files] == ["g/out/a"]
    assert left_out.count >= 1
    remove(str(work))


def test_a_deep_output_folder_costs_no_other_output(tmp_path: Path) -> None:
    work, own = tmp_path / "work", tmp_path / "own"
    work.mkdir()
    own.mkdir()
    (own / "a").write_bytes(b"a")
    deep_folder(own / "deep", manifest.DEPTH_MAX - 2)
    left_out = outputs.LeftOut()
    found = outputs.gather(str(work), [], str(own), str(tmp_path / "a-long-name"), left_out)
    assert [one.path for one in found.files] == ["a-long-name/a"]
    assert left_out.count == 1
    remove(str(own))


def test_a_tree_of_outputs_is_read_once_however_deep_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    deep_folder(tmp_path / "out/deep", 100)
    read: list[str] = []
    scandir = os.scandir

    def counted(place: str) -> Any:
        read.append(place)
        return scandir(place)

    monkeypatch.setattr(os, "scandir", counted)
    found = outputs.find_outputs(str(tmp_path), ["out/**"], outputs.LeftOut())
    assert [path.count("/") for path in found] == [102]
    assert len(read) == len(set(read))


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("out/**", {"out/a", "out/d/b", "out/.h"}),
        ("out/*", {"out/a", "out/d/b"}),
        ("out", {"out/a", "out/d/b", "out/.h"}),
        ("**/b", {"out/d/b"}),
        ("**/*.txt", {"x.txt"}),
        ("*.txt", {"x.txt"}),
        (".hidden/*", {".hidden/c"}),
        ("**", {"out/a", "out/d/b", "out/.h", "x.txt", "l"}),
        ("out/[ab]", {"out/a"}),
        ("none/**", set()),
    ],
)
def test_patterns_of_outputs_match_as_a_shell_would(pattern: str, matched: set[str], tmp_path: Path) -> None:
    for name in ("out/a", "out/d/b", "out/.h", "x.txt", ".hidden/c"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "l").symlink_to("out")
    assert set(outputs.find_outputs(str(tmp_path), [pattern], outputs.LeftOut())) == matched


@pytest.mark.parametrize("error", [errno.EACCES, errno.EIO, errno.ELOOP, errno.ESTALE])
def test_an_unreadable_folder_costs_its_own_entry_and_is_named(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root, who may read everything, only the system's own answer can be changed."""
    for name in ("step-1/lost+found", "step-2"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "step-2/w").write_bytes(b"w")
    real = os.listdir

    def listed(place: str) -> list[str]:
        if place.endswith("lost+found"):
            raise OSError(error, os.strerror(error))
        return real(place)

    monkeypatch.setattr(os, "listdir", listed)
    with pytest.raises(manifest.Unfit, match=r"lost\+found can not be read: " + os.strerror(error)):
        manifest.scan(str(tmp_path), "step-1")
    assert [one.path for one in manifest.scan(str(tmp_path), "step-2").files] == ["step-2/w"]


@pytest.mark.parametrize("left", ["a file", "nothing"])
def test_an_output_folder_that_is_none_any_more_is_said_to_be_lost(tmp_path: Path, left: str) -> None:
    work, folder = tmp_path / "work", tmp_path / "out"
    work.mkdir()
    if left == "a file":
        folder.write_text("the model")
    left_out = outputs.LeftOut()
    outputs.gather(str(work), [], str(folder), str(tmp_path / "gathered"), left_out)
    assert left_out.count == 1
    assert left_out.reason.startswith("out: ")
