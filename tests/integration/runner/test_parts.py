"""Parts of the runner on their own: logs, archives, notices, figures."""

from __future__ import annotations

import io
import json
import os
import signal
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotd_jobs.runner import outputs, process, shutdown
from spotd_jobs.runner.heartbeat import Status, host_figures, parse_gpus
from spotd_jobs.runner.logs import LogShipper
from spotd_jobs.runner.outputs import CodeUnusable, unpack
from spotd_jobs.runner.process import OomWatch
from spotd_jobs.runner.shutdown import ShutdownWatch, Stop, Wakeups
from spotd_jobs.runner.store import GrantKeeper
from spotd_jobs.wire.client import sinks
from tests.cases import every
from tests.integration.runner.inside import runner_grant, store_of
from tests.integration.runner.rig import Rig

SECRET = "hunter2-canary"


def shipped(rig: Rig, written: list[bytes], *, bytes_per_h: int = 1 << 24, secrets: list[str] | None = None) -> bytes:
    """What is in the store after a job printed this."""
    grant = runner_grant(rig)
    logs = LogShipper(store_of(grant), secrets or [], bytes_per_h, 0.02)
    for block in written:
        logs._take(block)
    logs.start()
    assert logs.close(20)
    return b"".join(rig.store.get(key) or b"" for key in rig.store.keys(grant.prefix + "log/"))


def test_output_is_stored_whole_and_in_order(tmp_path: Path) -> None:
    lines = [b"line %d\n" % number for number in range(20_000)]
    with Rig(tmp_path) as rig:
        assert shipped(rig, lines) == b"".join(lines)


def test_output_beyond_the_allowance_is_left_out_and_said(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        stored = shipped(rig, [b"%07d\n" % number for number in range(60_000)], bytes_per_h=100_000)
        notes = [line for line in stored.splitlines() if b"were left out" in line]
        kept = [line for line in stored.splitlines() if line not in notes]
        assert sum(int(note.split()[1]) for note in notes) + 8 * len(kept) == 480_000
        assert len(stored) < 200_000
        assert kept[-1] == b"0059999", "the newest is kept"
        assert kept == sorted(kept)


def test_a_flood_is_bounded_in_memory_while_the_store_is_away(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        logs = LogShipper(store_of(runner_grant(rig)), [], 1 << 24, 0.02)
        for _ in range(100):
            logs._take(b"x" * 65536)
        assert len(logs._waiting) <= 1024 * 1024
        os.close(logs.pipe)
        os.close(logs._reader)


def test_secrets_are_masked_wherever_a_read_was_cut(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        stored = shipped(rig, [b"token is hunt", b"er2-canary!\nand hunter2-canary"], secrets=[SECRET, "ab"])
        assert stored == b"token is ***!\nand ***"


def archive(*members: tuple[str, str, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, kind, value in members:
            info = tarfile.TarInfo(name)
            info.type = {"file": tarfile.REGTYPE, "link": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE,
                         "dev": tarfile.CHRTYPE, "dir": tarfile.DIRTYPE}[kind]  # fmt: skip
            info.mode = 0o755
            if kind == "file":
                info.size = len(value)
                tar.addfile(info, io.BytesIO(value.encode()))
            else:
                info.linkname = value if kind in {"link", "hard"} else ""
                tar.addfile(info)
    return buffer.getvalue()


def test_code_is_unpacked_with_modes_and_inner_links(tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_bytes(
        archive(("bin", "dir", ""), ("bin/run", "file", "go"), ("l", "link", "bin/run"), ("h", "hard", "bin/run"))
    )
    unpack(str(tmp_path / "a.tar.gz"), str(tmp_path / "work"))
    assert (tmp_path / "work/l").read_text() == "go"
    assert (tmp_path / "work/h").read_text() == "go"
    assert (tmp_path / "work/bin/run").stat().st_mode & 0o777 == 0o755


HOSTILE = {
    "climbs": [("../x", "file", "evil")],
    "absolute": [("/tmp/x", "file", "evil")],
    "climbs later": [("a/../../x", "file", "evil")],
    "link out": [("l", "link", "../out")],
    "link to root": [("l", "link", "/etc")],
    "through a link": [("d", "dir", ""), ("l", "link", "d"), ("l/x", "file", "evil")],
    "over a link": [("t", "file", "t"), ("l", "link", "t"), ("l", "file", "evil")],
    "device": [("d", "dev", "")],
    "hard link out": [("h", "hard", "../../etc/passwd")],
}


@pytest.mark.parametrize("members", HOSTILE.values(), ids=HOSTILE.keys())
def test_code_that_leads_outside_is_refused(members: list[tuple[str, str, str]], tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_bytes(archive(*members))
    with pytest.raises(CodeUnusable):
        unpack(str(tmp_path / "a.tar.gz"), str(tmp_path / "work"))
    assert not (tmp_path / "work").exists()
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "data", [b"", b"no archive", archive(("a", "file", "x" * 5000))[:60]], ids=["empty", "text", "cut"]
)
def test_a_damaged_archive_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_bytes(data)
    with pytest.raises(CodeUnusable, match="damaged"):
        unpack(str(tmp_path / "a.tar.gz"), str(tmp_path / "work"))


def test_gpu_figures_are_read_where_told_and_odd_lines_left_out() -> None:
    rows = parse_gpus(
        "0, NVIDIA H100 80GB HBM3, 97, 70000, 81559, 650.12, 64\n"
        "1, NVIDIA H100 80GB HBM3, [N/A], 1, 81559, [Not Supported], 30\n"
        "NVIDIA-SMI has failed because it couldn't communicate\n"
    )
    assert [(row["index"], row["util_pct"], row["power_w"]) for row in rows] == [(0, 97.0, 650.12), (1, None, None)]


def test_host_figures_are_numbers_or_none(tmp_path: Path) -> None:
    figures = host_figures(str(tmp_path))
    assert figures["cpus"] >= 1
    assert figures["disk_total_mb"] > figures["disk_free_mb"] > 0
    assert host_figures(str(tmp_path / "none"))["disk_free_mb"] is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"at": null, "reason": "outbid"}', "outbid"),
        ('{"at": "2026-11-21T10:00:00+00:00"}', "preempted"),
        ('{"at": "2026-11-21T10:00', None),
        ('{"at": "yesterday"}', None),
        ("[]", None),
        ("", None),
    ],
)
def test_only_a_whole_notice_file_is_a_notice(content: str, reason: str | None, tmp_path: Path) -> None:
    (tmp_path / "notice").write_text(content)
    found = shutdown.from_file(str(tmp_path / "notice"))
    assert (found.reason if found else None) == reason


@every(
    ("text", "clean"),
    [
        ("plain", "plain"),
        ("\x1b[31mred\x07\n", " [31mred  "),
        ("bidi\u202egnp", "bidi gnp"),
        ("caf\u00e9", "caf\u00e9"),
        ("\udcff", "?"),
        ("x" * 900, "x" * 480),
    ],
)
def test_reported_text_is_one_bounded_visible_line(text: str, clean: str) -> None:
    assert sinks.clean(text) == clean


def test_outputs_are_found_once_and_never_outside(tmp_path: Path) -> None:
    work, out = tmp_path / "work", tmp_path / "out"
    for place in (work / "o/a", work / "o/d/b", work / "x", tmp_path / "secret", out / "o/a"):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(str(place))
    found = outputs.gather(str(work), ["o/**", "o", "../secret", "/etc/passwd"], str(out), str(tmp_path / "g"))
    assert sorted(node.path for node in found.files) == ["g/o/a", "g/o/d/b"]
    assert (tmp_path / "g/o/a").read_text() == str(out / "o/a"), "the output folder wins"


class Died(BaseException):
    """The runner is gone."""


def test_a_job_never_begins_without_the_guard_that_ends_it_with_its_runner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = []

    def die(group: int) -> int:
        pids.append(group)
        raise Died

    monkeypatch.setattr(process, "_guard", die)
    with (tmp_path / "output").open("wb") as output, pytest.raises(Died):
        process.JobProcess(
            ["/bin/sh", "-c", "echo >began"], {"PATH": os.environ["PATH"]}, str(tmp_path), output.fileno()
        )
    _, status = os.waitpid(pids[0], 0)
    assert os.waitstatus_to_exitcode(status) == 126
    assert not (tmp_path / "began").exists()


@every(
    ("ended", "words", "hard"),
    [
        (process.ProcessEnd(3, None, 0.0), "exit code 3", False),
        (process.ProcessEnd(None, int(signal.SIGKILL), 0.0), "killed by SIGKILL", True),
        (process.ProcessEnd(137, None, 0.0), "exit code 137", True),
        (process.ProcessEnd(None, int(signal.SIGSEGV), 0.0), "killed by SIGSEGV", False),
    ],
)
def test_an_end_is_told_in_words_and_only_a_hard_kill_may_be_for_want_of_memory(
    ended: process.ProcessEnd, words: str, *, hard: bool
) -> None:
    assert ended.words() == words
    assert ended.killed_hard is hard
    assert OomWatch([]).happened(ended) in ((None, False, True) if hard else (False,))


HARD = process.ProcessEnd(None, int(signal.SIGKILL), 0.0)
BY_CODE = process.ProcessEnd(1, None, 0.0)
KILLED = "6,1,2,-;Memory cgroup out of memory: Killed process 77 (python)\n"


@pytest.mark.parametrize(
    ("ended", "group", "log", "machine", "oom"),
    [
        (HARD, (1, 2), None, None, True),
        (HARD, (1, 1), KILLED, (1, 2), False),
        (BY_CODE, (1, 2), None, None, True),
        (BY_CODE, (1, 1), KILLED, (1, 2), False),
        (process.ProcessEnd(0, None, 0.0), (1, 2), KILLED, (1, 2), False),
        (HARD, None, KILLED, (1, 1), True),
        (HARD, None, "6,1,2,-;usb 1-1: new device\n", (1, 2), False),
        (BY_CODE, None, KILLED, (1, 2), False),
        (HARD, None, None, (1, 1), False),
        (HARD, None, None, (1, 2), None),
        (HARD, None, None, None, None),
    ],
    ids=[
        "own group counted a kill",
        "own group counted none, whatever others suffered",
        "a worker was killed, the command ended by itself",
        "an ordinary failure beside others' kills",
        "a success is a success",
        "the kernel's log tells",
        "the kernel's log tells of other things",
        "without a group only a hard kill can be one",
        "the machine counted none",
        "the machine counted one, maybe another's",
        "nothing can be read",
    ],
)
def test_a_kill_for_want_of_memory_is_told_by_whatever_can_be_read(
    ended: process.ProcessEnd,
    group: tuple[int, int] | None,
    log: str | None,
    machine: tuple[int, int] | None,
    oom: bool | None,
    tmp_path: Path,
) -> None:
    places = {name: tmp_path / name for name in ("group", "machine", "log")}

    def count(name: str, values: tuple[int, int] | None, which: int) -> None:
        if values is not None:
            places[name].write_text(f"low 0\noom_kill {values[which]}\n")

    if log is not None:
        places["log"].write_text("6,0,1,-;Out of memory: Killed process 5 (long ago)\n")
    for name, values in (("group", group), ("machine", machine)):
        count(name, values, 0)
    watch = OomWatch([str(places["group"])], str(places["machine"]), str(places["log"]))
    for name, values in (("group", group), ("machine", machine)):
        count(name, values, 1)
    if log is not None:
        with places["log"].open("a") as file:
            file.write(log)
    assert watch.happened(ended) is oom


@pytest.fixture
def shutdown_watch(tmp_path: Path) -> Iterator[ShutdownWatch]:
    with Rig(tmp_path) as rig:
        grant = runner_grant(rig)
        kept = {
            number: signal.getsignal(number)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
        }
        wakeups = Wakeups()
        keeper = GrantKeeper(grant, wakeups.wake)
        home = tmp_path / "home"
        home.mkdir()
        yield ShutdownWatch(
            keeper, wakeups, store_of(grant), Status(1), shutdown.JobFile(str(home / "job-notice")), str(home)
        )
        signal.set_wakeup_fd(-1)
        os.close(wakeups._reader)
        os.close(wakeups._writer)
        for number, handler in kept.items():
            signal.signal(number, handler)


def test_the_grace_leaves_time_to_upload(shutdown_watch: ShutdownWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spotd_jobs.runner.shutdown.steady", lambda: 1000.0)
    monkeypatch.setattr("spotd_jobs.runner.shutdown.CLOCK", type("Fixed", (), {"now": staticmethod(lambda: 5000.0)}))
    shutdown_watch.stop = Stop("preempted", "spot terminate", at=5120.0)
    assert shutdown_watch.kill_at(1000.0, 90.0) == 1090.0
    assert shutdown_watch.kill_at(1000.0, 600.0) == 1090.0, (
        "a quarter of the time left, at most 30 s, is for the upload"
    )
    shutdown_watch.stop = Stop("preempted", "spot terminate", at=5020.0)
    assert shutdown_watch.kill_at(1000.0, 90.0) == 1015.0
    shutdown_watch.stop = Stop("preempted", "spot terminate", at=4000.0)
    assert shutdown_watch.kill_at(1000.0, 90.0) == 1090.0, "an end in the past is a wrong clock"
    shutdown_watch.stop = Stop("stopped", "cancelled", grace_s=0.0)
    assert shutdown_watch.kill_at(1000.0, 90.0) == 1000.0


def test_a_rebalance_recommendation_asks_for_a_checkpoint_and_stops_nothing(shutdown_watch: ShutdownWatch) -> None:
    shutdown_watch._on_rebalance("spot rebalance recommendation")
    assert shutdown_watch.poll() is None
    assert shutdown_watch.wants_checkpoint
    told = json.loads(Path(shutdown_watch._job_file.path).read_text())
    assert told["kind"] == "rebalance"
