"""Daemon processes that need no second of imports each: forks of one process that has imported everything.

A test that kills the daemon and starts it again pays for what the daemon does, not for reading its modules once more.
The forked process is the one that an `exec` would have become: a session and a group of its own, its own files,
environment, arguments, random seeds and signals, and it ends as any process does. What only an `exec` shows (that the
command starts at all, and what a fresh process holds in memory) is tested with one: `Lab.fresh`.

The market that such a daemon starts is a fork as well, of this process: it asks at a socket of its own for one. How the
launcher executes it is what `tests/unit/providers/local/test_server.py` is about.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from datetime import timedelta
from functools import cache, partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import IO, Any, Final

from spotd_providers.local import plugin
from spotd_providers.local.server import __main__ as market_server
from tests.e2e import crashable
from tests.fakes.faulty_market import FaultyMarketApp

_MODULES: Final = (
    "spotd.service.main",
    "spotd.api.app",
    "spotd.service.http_server",
    "spotd_providers.kit.http",
    "spotd_providers.local.plugin",
    "spotd_providers.local.plugin",
    "spotd_providers.local.plugin",
    "spotd_providers.local.server.__main__",
    "anyio._backends._asyncio",
    "httpcore",
    "uvicorn.protocols.http.h11_impl",
)
"""What a daemon imports between its start and its first prices, and what its market does."""
_REQUEST_BYTES_MAX: Final = 1 << 18
_START_S: Final = 60.0


class Forked:
    """What `subprocess.Popen` is for a process that another one has forked."""

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str], output: IO[bytes]) -> None:
        """Run `crashable.main` as if it had been executed with these arguments."""
        self.returncode: int | None = None
        self._report, theirs = socket.socketpair()
        request = json.dumps({"argv": list(command), "env": dict(environment)}).encode()
        assert len(request) < _REQUEST_BYTES_MAX
        with theirs:
            socket.send_fds(_preloaded(), [request], [output.fileno(), theirs.fileno()])
        self.pid = self._read(_START_S)
        assert self.pid, "no daemon was forked"

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or `None` while the process runs."""
        if self.returncode is None and select.select([self._report], [], [], 0)[0]:
            self.returncode = self._read(0.0)
            self._report.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        if self.returncode is None and not select.select([self._report], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("the daemon", timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _read(self, within_s: float) -> int:
        assert select.select([self._report], [], [], within_s)[0], "the preloaded process does not answer"
        data = self._report.recv(16)
        assert len(data) == 8, "the preloaded process has ended"
        return int.from_bytes(data, "big", signed=True)


@cache
def _preloaded() -> socket.socket:
    """Return the way to the process that forks; it ends when this one does."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.preloaded", str(theirs.fileno())],
            cwd=Path(__file__).parents[2],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def end() -> None:
        mine.close()
        process.wait(10)

    atexit.register(end)
    return mine


def main() -> int:
    """Fork for each request and report each end, until nobody is left who could ask; a fork becomes the daemon."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()
    for name in _MODULES:
        importlib.import_module(name)
    _work_ahead()
    gc.collect()
    gc.freeze()
    assert threading.active_count() == 1, "a fork has no other thread"
    # Its name is not in the file system, so nothing is left of it.
    markets = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    markets.bind(b"\0spotd-markets-%d" % os.getpid())
    markets.listen(64)
    plugin._spawn = partial(_fork_market, markets.getsockname())
    ended, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    reports: dict[int, socket.socket] = {}
    while True:
        ready = select.select([requests, markets, ended], [], [])[0]
        if ended in ready:
            ended.recv(4096)
            _report_ends(reports)
        for asked in {requests, markets}.intersection(ready):
            source = requests if asked is requests else markets.accept()[0]
            data, fds, _, _ = socket.recv_fds(source, _REQUEST_BYTES_MAX, 2)
            if not data and asked is requests:  # a test run that was killed leaves no daemon behind
                for left in reports:
                    os.kill(left, signal.SIGKILL)
                return 0
            if not data:  # the daemon was killed while it asked
                source.close()
                continue
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for one in (requests, markets, source, ended, wake, *reports.values()):
                    one.close()
                return _become(json.loads(data), *fds)
            os.close(fds[0])
            if asked is requests:
                reports[pid] = socket.socket(fileno=fds[1])
                _send(reports[pid], pid)
            else:
                os.close(fds[1])
                reports[pid] = source


def _work_ahead() -> None:
    """Do once what every daemon would do anew after its start, and compile the runner for its hosts."""
    from spotd.config import credentials
    from spotd.service import parts
    from spotd_providers.kit import http
    from tests.fakes.compiled_runner import compiled_runner

    vars(parts).update(build_runner=compiled_runner)
    vars(credentials).update(entry_points=cache(entry_points))
    compiled_runner()
    http._tls_context()
    credentials.InstalledPlugins().bundled()


def _become(request: dict[str, Any], output: int, other: int) -> int:
    os.setsid()
    for number in (1, 2):
        os.dup2(output, number)
    os.close(output)
    os.environ.clear()
    os.environ.update(request["env"])
    time.tzset()
    if "market" in request:
        os.chdir(request["market"])
        sys.argv = ["market", *request["argv"], "--ready-fd", str(other)]
        vars(market_server)["MarketApp"] = FaultyMarketApp  # the same, with faults where a test asks for some
        return market_server.main(sys.argv[1:])
    os.close(other)
    sys.argv = ["crashable.py", *request["argv"]]
    return crashable.main()


def _fork_market(address: bytes, folder: Path, ready: int, *, idle_exit: timedelta) -> None:
    """Do what `launcher._spawn` does: return once the server has detached itself."""
    request = {
        "market": str(folder),
        "argv": ["--detach", "--dir", str(folder), "--idle-exit", str(idle_exit.total_seconds())],
        "env": {name: os.environ[name] for name in plugin._PASSED_ON if name in os.environ},
    }
    with (
        closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as way,
        (folder / "server.log").open("ab") as log,
    ):
        way.settimeout(_START_S)
        way.connect(address)
        socket.send_fds(way, [json.dumps(request).encode()], [log.fileno(), ready])
        way.recv(16)


def _report_ends(reports: dict[int, socket.socket]) -> None:
    for pid in list(reports):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            with reports.pop(pid) as report:
                _send(report, os.waitstatus_to_exitcode(status))


def _send(report: socket.socket, number: int) -> None:
    with suppress(OSError):  # the test does not want to know
        report.sendall(number.to_bytes(8, "big", signed=True))


if __name__ == "__main__":
    sys.exit(main())
