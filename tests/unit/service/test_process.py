"""The daemon as a process of its own: it starts, answers, refuses a second one, reloads, and ends in order."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.preloaded import Forked

pytestmark = [pytest.mark.e2e, pytest.mark.enable_socket]

PATIENCE_S = 60.0
CONFIG = """
[daemon]
install = "lab"
[ceilings]
default = 1.00
[budget]
machines = 3
[providers.local]
idle_exit = "1s"
"""


class Process:
    """One daemon, its folder and what it logged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "config.toml"
        self.config.write_text(CONFIG)
        self.socket = folder / "run" / "s"
        self.log = folder / "log"
        self.process = self.spawn(self.log)

    def spawn(self, log: Path) -> Forked:
        environ = {
            **os.environ,
            "STATE_DIRECTORY": str(self.folder / "state"),
            "SPOTD_SOCKET": str(self.socket),
            "SPOTD_CONFIG": str(self.config),
        }
        with log.open("wb") as out:
            return Forked([], environment=environ, output=out)

    def events(self) -> list[str]:
        lines = self.log.read_text().splitlines()
        return [json.loads(line)["event"] for line in lines if line.startswith("{") and line.endswith("}")]

    def wait_for(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            if time.monotonic() > deadline or self.process.poll() not in (None, 0):
                raise AssertionError(f"{what} did not happen; log:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.02)

    def get(self, path: str) -> dict[str, Any]:
        connection = http.client.HTTPConnection("spotd", timeout=PATIENCE_S)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(PATIENCE_S)
        connection.sock.connect(str(self.socket))
        try:
            connection.request("GET", path)
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
            return answer
        finally:
            connection.close()

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Process]:
    process = Process(tmp_path)
    try:
        process.wait_for(lambda: "daemon.ready" in process.events(), "the start")
        yield process
    finally:
        if process.process.poll() is None:
            process.process.kill()
            process.process.wait()


def test_it_starts_answers_its_owner_and_ends_in_order(daemon: Process) -> None:
    assert stat.S_IMODE(daemon.socket.stat().st_mode) == 0o600
    assert daemon.get("/v1/status")["status"]["install"] == "lab"
    daemon.wait_for(lambda: daemon.get("/v1/providers")["providers"][0]["ok"], "the first prices")
    daemon.wait_for(lambda: daemon.get("/v1/status")["status"]["paused"] == "", "the end of taking stock")
    assert daemon.stop() == 0
    ends = [event for event in daemon.events() if event != "controller.metrics"]
    assert ends[-3:] == ["daemon.stopping", "daemon.drained", "daemon.stopped"]
    assert not daemon.socket.exists()


def test_a_second_daemon_is_refused_in_a_sentence_and_the_first_lives_on(daemon: Process) -> None:
    second = daemon.spawn(daemon.folder / "second")
    assert second.wait(PATIENCE_S) == 1
    words = (daemon.folder / "second").read_text()
    assert "another spotd daemon answers" in words
    assert "Traceback" not in words
    assert daemon.get("/v1/status")["status"]["pid"] == daemon.process.pid
    assert daemon.stop() == 0


def test_after_a_sudden_death_the_next_one_takes_over_the_socket_and_the_state(daemon: Process) -> None:
    daemon.process.kill()
    daemon.process.wait()
    assert daemon.socket.exists()
    daemon.process = daemon.spawn(daemon.log)
    daemon.wait_for(lambda: "daemon.ready" in daemon.events(), "the second start")
    assert daemon.get("/v1/status")["status"]["pid"] == daemon.process.pid
    assert daemon.stop() == 0


def test_a_reload_takes_over_limits_and_refuses_nonsense(daemon: Process) -> None:
    daemon.config.write_text(CONFIG.replace("machines = 3", "machines = -3"))
    daemon.process.send_signal(signal.SIGHUP)
    daemon.wait_for(lambda: "config.refused" in daemon.events(), "the refusal")
    daemon.config.write_text(CONFIG.replace("machines = 3", "machines = 5"))
    daemon.process.send_signal(signal.SIGHUP)
    daemon.wait_for(lambda: "config.reloaded" in daemon.events(), "the reload")

    def limit() -> float:
        budgets = daemon.get("/v1/cost")["budgets"]
        return float(next(b["limit"] for b in budgets if b["name"] == "machines"))

    daemon.wait_for(lambda: limit() == 5, "the new limit")
    assert daemon.stop() == 0


def test_a_bad_config_ends_the_start_with_its_place_and_no_traceback(tmp_path: Path) -> None:
    environ = {**os.environ, "STATE_DIRECTORY": str(tmp_path / "state"), "SPOTD_CONFIG": str(tmp_path / "c.toml")}
    (tmp_path / "c.toml").write_text("[daemon]\npoll_evry = 5\n")
    code = "import sys; from spotd.service.main import run; sys.exit(run(None, {}))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 2
    assert "poll_evry" in done.stderr
    assert "poll_every" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_running_daemon_has_not_imported_what_it_does_not_need() -> None:
    code = (
        "import sys, spotd.service.main\n"
        "print([m for m in ('boto3', 'botocore', 'rich', 'alembic', 'uvicorn', 'trio') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert done.stdout.strip() == "[]"
