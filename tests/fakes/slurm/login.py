"""The login node of a fake cluster: a home, a profile, and Slurm's commands, which ask the cluster's state."""

from __future__ import annotations

import json
import socketserver
import sys
import threading
from pathlib import Path
from typing import Final

from tests.fakes.slurm.cluster import FakeSlurm

COMMANDS: Final = ("sbatch", "squeue", "scancel", "scontrol", "sinfo", "sacct")
_PROGRAM: Final = """#!{python} -IS
import json, os, socket, sys
name = os.path.basename(sys.argv[0])
given = sys.stdin.read() if name == "sbatch" and "--wrap" not in sys.argv else ""
with socket.create_connection(("127.0.0.1", {port})) as link:
    link.sendall(json.dumps([name, sys.argv[1:], given, sorted(os.environ)]).encode() + b"\\n")
    text, status = json.loads(link.makefile().readline() or '["killed", 1]')
(sys.stderr if status and name == "sbatch" else sys.stdout).write(text)
sys.exit(status)
"""
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
        self._server = _Server(slurm, self._stopping)
        port = self._server.server_address[1]
        for name in COMMANDS:
            self.program(name, _PROGRAM.format(python=sys.executable, port=port))
        self.program("date", _DATE.format(clock=self.clock))
        threading.Thread(target=self._server.serve_forever, daemon=True, name="slurm commands").start()

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
        name, arguments, given, environ = json.loads(self.rfile.readline())
        slurm = self.server.slurm
        if name in slurm.quirks.hanging:
            self.server.stopping.wait(60)
            return
        answer = slurm.run(name, arguments, given, environ)
        self.wfile.write(json.dumps(answer).encode() + b"\n")
