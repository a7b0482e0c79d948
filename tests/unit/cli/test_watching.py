"""A list of jobs that is drawn anew as it changes."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from spotd.api.responses import ApiUnavailable
from tests.unit.api import made_responses, worlds
from tests.unit.cli.conftest import Ctl

_RUN = "import sys; from spotd.cli.client import main; sys.exit(main())"


def page(*jobs: object) -> dict[str, object]:
    return {"jobs": [*jobs], "more": False, "paused": "", "arrays": []}


@pytest.mark.parametrize("output", ["table", "json", "id"])
def test_a_pipe_gets_the_list_once_for_each_change(ctl: Ctl, monkeypatch: pytest.MonkeyPatch, output: str) -> None:
    waits, runs = made_responses.job(state="QUEUED", spent_usd=0.0), made_responses.job(state="RUNNING")
    answers = [page(waits), {**page(waits), "paused": "x"}, page({**waits, "spent_usd": 1.0}), None, page(runs)]
    ctl.place.answers("jobs.page", answers[0])

    def sleep(_s: float) -> None:
        answers.pop(0)
        if not answers:
            raise KeyboardInterrupt
        if answers[0] is None:
            ctl.place.answers("jobs.page", ApiUnavailable("away"))
        else:
            ctl.place.answers("jobs.page", answers[0])

    monkeypatch.setattr("spotd.cli.watching.time.sleep", sleep)
    result = ctl("ls", "--watch", "-o", output)
    if output == "json":
        found = [json.loads(line)["jobs"][0]["state"] for line in result.out.splitlines()]
        assert found == ["QUEUED", "RUNNING"]
    else:
        assert result.out.count(waits["id"]) == 2


def test_a_daemon_that_is_not_there_at_first_is_refused_at_once(ctl: Ctl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTD_SOCKET", "/nowhere/spotd.sock")
    assert ctl("ls", "--watch").code == 5


@contextmanager
def on_a_terminal(*words: str) -> Iterator[tuple[int, int]]:
    """The command on a terminal of its own: its process and the terminal's other end."""
    process, terminal = pty.fork()
    if process == 0:
        os.environ["TERM"] = "xterm"
        os.execv(sys.executable, [sys.executable, "-c", _RUN, *words])  # noqa: S606 - no shell
    try:
        yield process, terminal
    finally:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(process, 0)
        os.close(terminal)


def shown(terminal: int, wanted: str, within_s: float = 30.0) -> str:
    """What the terminal showed until this came."""
    text, until = "", time.monotonic() + within_s
    while wanted not in text and time.monotonic() < until:
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                text += os.read(terminal, 65536).decode()
            except OSError:  # its process is gone
                break
    assert wanted in text, text
    return text


@pytest.mark.process
@pytest.mark.parametrize("way", ["q", "\x03", signal.SIGTERM], ids=["q", "Ctrl-C", "SIGTERM"])
def test_a_terminal_is_given_back_as_it_was(ctl: Ctl, way: str | signal.Signals) -> None:
    ctl.place.write(worlds.running())
    with on_a_terminal("ls", "--watch") as (process, terminal):
        before = termios.tcgetattr(terminal)[3]
        shown(terminal, "llama-lora")
        assert termios.tcgetattr(terminal)[3] & termios.ICANON == 0
        if isinstance(way, str):
            os.write(terminal, b"x\x1b[A" + way.encode())  # keys without a meaning are ignored
        else:
            os.kill(process, way)
        shown(terminal, "\x1b[?25h\x1b[?1049l")
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == (0 if way == "q" else 130)
        assert termios.tcgetattr(terminal)[3] == before
