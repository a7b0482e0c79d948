"""How a command line can end other than by answering."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from spotd import paths
from spotd.cli import entry
from spotd.cli.client import COMMANDS
from spotd.cli.daemon import COMMANDS as DAEMON_COMMANDS
from spotd.client import transport
from tests.cases import every
from tests.unit.api import made_responses, worlds
from tests.unit.cli.conftest import Ctl

_RUN = "import sys; from spotd.cli.client import main; sys.exit(main())"


@contextmanager
def spotctl(*arguments: str, stdout: IO[str] | int = subprocess.PIPE) -> Iterator[subprocess.Popen[str]]:
    """Start it; whatever the test finds, it is over afterwards."""
    with subprocess.Popen(
        [sys.executable, "-c", _RUN, *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_help_shows_every_command(ctl: Ctl) -> None:
    out = ctl("--help").out
    assert all(f"  {name}" in out for name in COMMANDS)


@every("command", [*COMMANDS, "ps", "queue", "offers"])
def test_every_command_has_its_own_help(ctl: Ctl, command: str) -> None:
    result = ctl(command, "--help")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith(f"Usage: spotctl {command}")


@every("command", COMMANDS)
def test_the_line_in_the_groups_help_is_a_sentence(command: str) -> None:
    assert COMMANDS[command].help[0].isupper()
    assert COMMANDS[command].help.endswith(".")


@pytest.mark.process
@pytest.mark.parametrize("command", DAEMON_COMMANDS)
def test_every_daemon_command_has_its_own_help(command: str) -> None:
    script = "import sys; from spotd.cli.daemon import main; sys.exit(main())"
    result = subprocess.run(
        [sys.executable, "-c", script, command, "--help"], capture_output=True, text=True, check=False, timeout=60
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(f"Usage: spotd {command}")


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        ((), "Usage: spotctl", ""),
        (("lss",), "error: there is no command 'lss', did you mean 'ls'?", "hint: spotctl --help"),
        (("zzz",), "error: there is no command 'zzz'", "hint: spotctl --help"),
        (("ls", "--stat", "x"), "error: spotctl ls has no option --stat", "hint: did you mean --state?"),
        (("ls", "-o", "yaml"), "error: invalid value for '-o' / '--format': 'yaml' is not one of", "spotctl ls --help"),
        (("ls", "-n", "0"), "error: invalid value for '-n' / '--limit': 0 is not in the range", "spotctl ls --help"),
        (("show",), "error: missing argument 'JOB'", "hint: spotctl show --help"),
        (("logs", "a", "-n", "-3"), "error: invalid value for '-n' / '--tail'", "hint: spotctl logs --help"),
        (("--frobnicate",), "error: no such option", "hint: spotctl --help"),
    ],
    ids=lambda value: " ".join(value) or "nothing" if isinstance(value, tuple) else "",
)
def test_a_mistyped_command_line_is_exit_2_with_a_way_out(
    ctl: Ctl, arguments: tuple[str, ...], message: str, hint: str
) -> None:
    result = ctl(*arguments)
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert hint in result.err
    assert "Traceback" not in result.err


def test_a_command_right_behind_the_start_of_the_daemon_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, pauses = tmp_path / "run" / "s", list[float]()
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    now = iter(range(1_000))

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 20:
            listening.bind(os.fspath(path))

    monkeypatch.setattr("spotd.client.transport.time.sleep", pause)
    monkeypatch.setattr("spotd.client.transport.time.monotonic", lambda: float(next(now)))
    with paths.starting(path):
        transport._wait_for_start(path)
        assert len(pauses) == 20
        path.unlink()
        transport._wait_for_start(path)
        assert len(pauses) < 60  # a start that hangs is not waited for without end
    pauses.clear()
    transport._wait_for_start(path)
    assert pauses == []  # no daemon is starting
    path.with_name("s.starting").write_text("999999999\n")
    transport._wait_for_start(path)
    assert pauses == []  # what a killed start left behind
    listening.close()


@contextmanager
def _listener(tmp_path: Path, answer: bytes) -> Iterator[Path]:
    """A socket that is somebody, but not spotd."""
    path = tmp_path / "s"
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(os.fspath(path))
    listening.listen(1)

    def talk() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(answer)

    thread = threading.Thread(target=talk)
    thread.start()
    try:
        yield path
    finally:
        thread.join(10)
        listening.close()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "the daemon went away before it answered"),
        (b"hello\r\n", "what answers at"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{}", "went away in the middle of its answer"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello", "what answers at"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]", "what answers at"),
        (b"HTTP/1.1 500 No\r\ncontent-length: 2\r\n\r\nno", "what answers at"),
        (b'HTTP/1.1 200 OK\r\ncontent-length: 12\r\n\r\n{"schema":2}', "speaks another version of the API"),
    ],
    ids=["silence", "not http", "cut short", "not json", "not an object", "plain error", "another schema"],
)
def test_whatever_answers_at_the_socket_is_exit_5_in_words(
    ctl: Ctl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: bytes, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with _listener(Path(), answer) as path:
        monkeypatch.setenv("SPOTD_SOCKET", str(path))
        result = ctl("ls")
    assert (result.code, result.out) == (5, "")
    assert message in result.err
    assert "hint: " in result.err


def test_no_daemon_is_exit_5_with_the_way_to_start_one(
    ctl: Ctl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPOTD_SOCKET", str(tmp_path / "none"))
    result = ctl("ls")
    assert (result.code, result.out) == (5, "")
    assert result.err.startswith(f"error: the daemon is not running: there is no socket {tmp_path / 'none'}\nhint: ")
    assert "spotd run" in result.err


def test_a_socket_that_a_dead_daemon_left_is_exit_5(ctl: Ctl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    left = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    left.bind("s")
    left.close()
    monkeypatch.setenv("SPOTD_SOCKET", "s")
    result = ctl("ls")
    assert result.code == 5
    assert "nobody listens at s" in result.err


def test_a_path_too_long_for_a_socket_is_named(ctl: Ctl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    deep.write_text("")
    monkeypatch.setenv("SPOTD_SOCKET", str(deep))
    result = ctl("ls")
    assert result.code == 5
    assert "the path of the socket is longer than" in result.err


def test_a_socket_of_another_user_is_not_spoken_to(ctl: Ctl, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = ctl.place.socket.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 4711)
    if owner == 0:
        ctl.place.socket.chmod(0o777)
        os.chown(ctl.place.socket, 12345, -1)
    try:
        result = ctl("submit", "--gpu", "H100", "--image", "x", "-y", "--", "a")
    finally:
        if owner == 0:
            os.chown(ctl.place.socket, 0, -1)
    assert result.code == 5
    assert "belongs to another user" in result.err
    assert ctl.rig.store.read(lambda reads: reads.jobs()) == ()


@pytest.mark.process
def test_a_reader_who_leaves_is_not_an_error(ctl: Ctl) -> None:
    rows = [made_responses.job(id=f"6k{number:08d}") for number in range(2000)]
    ctl.place.answers("jobs.page", {"jobs": rows, "more": False, "paused": ""})
    with spotctl("ls", "-o", "json") as process:
        assert process.stdout is not None
        assert process.stdout.read(1) == "{"
        process.stdout.close()
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (141, "")


@pytest.mark.process
def test_a_full_disk_behind_stdout_is_said(ctl: Ctl) -> None:
    ctl.place.write(worlds.running())
    with Path("/dev/full").open("w") as full, spotctl("ls", stdout=full) as process:
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (74, "error: cannot write the output: No space left on device\n")


@pytest.mark.process
def test_ctrl_c_is_quiet_and_exit_130(ctl: Ctl) -> None:
    ctl.place.write(worlds.waiting())
    with spotctl("events", "-f") as process:
        assert process.stdout is not None
        assert "job.submitted" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "")


def test_a_defect_of_ours_shows_its_name_and_no_traceback(ctl: Ctl, monkeypatch: pytest.MonkeyPatch) -> None:
    import click

    @click.group()
    def broken() -> None:
        raise RuntimeError("surprise")

    @broken.command()
    def go() -> None:
        """Never reached."""

    monkeypatch.delenv("SPOTD_DEBUG", raising=False)
    said: list[str] = []
    monkeypatch.setattr("spotd.cli.stderr.line", lambda text="": said.append(text))
    assert entry.run(broken, "spotctl", ["go"]) == 70
    assert said[0].endswith("a defect of spotd itself: RuntimeError: surprise")
    assert "SPOTD_DEBUG=1" in said[-1]


def test_every_command_that_a_sentence_names_exists() -> None:
    root = Path(__file__).parents[3]
    files = [path for folder in ("spotd", "providers", "jobs") for path in (root / folder).rglob("*.py")]
    files += [root / "README.md", *(root / "docs").rglob("*.md")]
    tables = {"spotctl": COMMANDS, "spotd": DAEMON_COMMANDS}
    known = {
        (tool, name) for tool, table in tables.items() for key, one in table.items() for name in (key, *one.aliases)
    }
    named = {
        (path.name, tool, word)
        for path in files
        for tool, word in re.findall(r"`(spotctl|spotd) ([a-z-]+)", path.read_text(encoding="utf-8"))
    }
    assert len(named) > 20
    assert {one for one in named if one[1:] not in known} == set()
