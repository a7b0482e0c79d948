"""The login node of a fake cluster: a home, a profile, and Slurm's commands, which ask the cluster's state."""

from __future__ import annotations

import socketserver
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Final

from tests.fakes.slurm.cluster import FakeSlurm

COMMANDS: Final = ("sbatch", "squeue", "scancel", "scontrol", "sinfo", "sacct")
_PROGRAM: Final = """#!{python} -IS
import _socket, posix, sys
name = sys.argv[0].rpartition("/")[2]
given = sys.stdin.buffer.read() if name == "sbatch" and "--wrap" not in sys.argv else b""
parts = [word.encode("utf-8", "surrogateescape") for word in (name, str(len(sys.argv) - 1), *sys.argv[1:])]
link = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
link.connect(("127.0.0.1", {port}))
link.sendall(b"\\0".join([*parts, given, *sorted(posix.environ)]))
link.shutdown(_socket.SHUT_WR)
answer = b""
while piece := link.recv(65536):
    answer += piece
status, _, text = (answer or b"1 killed").partition(b" ")
(sys.stderr if int(status) and name == "sbatch" else sys.stdout).buffer.write(text)
sys.exit(int(status))
"""
"""A test runs dozens of these, so it imports only what is built in: json and socket take longer than the rest."""
_SRUN: Final = """#!/bin/sh
count=1 rank=0
while :; do
  case $1 in --ntasks=*) count=${1#*=} ;; --*) ;; *) break ;; esac
  shift
done
while [ "$rank" -lt "$count" ]; do SLURM_NODEID=$rank "$@" & rank=$((rank + 1)); done
wait
"""
"""Starts what a step runs on each node of a job, all of which are this computer."""
_DATE: Final = """#!/bin/sh
[ "$*" = +%s ] && [ -e "{clock}" ] && exec cat "{clock}"
exec /bin/date "$@"
"""


class LoginNode:
    """Where users log in; `profile` is what their shell does before it runs a command."""

    def __init__(self, root: Path, slurm: FakeSlurm) -> None:
        self.home = root / "home"
        self.bin = root / "bin"
        self.clock = root / "clock"
        self.profile = ""
        self.shared = self.home / ".spotd" / "slurm"
        self._stopping = threading.Event()
        for folder in (self.home, self.bin):
            folder.mkdir(parents=True)
        slurm.path = self.path
        self._server = _Server(slurm, self._stopping)
        port = self._server.server_address[1]
        for name in COMMANDS:
            self.program(name, _PROGRAM.format(python=sys.executable, port=port))
        self.program("srun", _SRUN)
        self.program("date", _DATE.format(clock=self.clock))
        serve = partial(self._server.serve_forever, poll_interval=0.02)  # until which it does not see that it is to end
        threading.Thread(target=serve, daemon=True, name="slurm commands").start()

    def program(self, name: str, text: str) -> None:
        """Put a program before all others on the PATH."""
        (self.bin / name).unlink(missing_ok=True)
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    @property
    def path(self) -> str:
        return f"{self.bin}:/usr/local/bin:/usr/bin:/bin"

    def stop(self) -> None:
        self._stopping.set()
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, slurm: FakeSlurm, stopping: threading.Event) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.slurm = slurm
        self.stopping = stopping


class _Handler(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        name, count, *rest = self.rfile.read().decode("utf-8", "surrogateescape").split("\0")
        arguments, given, environ = rest[: int(count)], rest[int(count)], rest[int(count) + 1 :]
        slurm = self.server.slurm
        if name in slurm.quirks.hanging:
            self.server.stopping.wait(60)
            return
        text, status = slurm.run(name, arguments, given, environ)
        self.wfile.write(f"{status} {text}".encode("utf-8", "surrogateescape"))
