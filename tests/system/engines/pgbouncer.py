"""A real PgBouncer on loopback before a PostgreSQL, in the mode in which a session is one client's until it ends."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.system.engines.postgres import Postgres, as_server_user, free_port

_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin"
_READY_S = 30.0


def missing() -> str:
    """Why there can be none here; empty where there can."""
    return (
        ""
        if shutil.which("pgbouncer", path=_PATH)
        else "PgBouncer is not installed (Debian: apt-get install pgbouncer)"
    )


@contextmanager
def running(server: Postgres) -> Iterator[int]:
    """Start one before the server; yield its port."""
    program = shutil.which("pgbouncer", path=_PATH)
    assert program is not None
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="pgbouncer-") as folder:
        Path(folder).chmod(0o755)
        users, config = Path(folder) / "users.txt", Path(folder) / "pgbouncer.ini"
        users.write_text('"spotd" ""\n')
        config.write_text(
            f"[databases]\nspotd = host=127.0.0.1 port={server.port}\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n"
            f"auth_type = trust\nauth_file = {users}\npool_mode = session\n"
        )
        process = subprocess.Popen(
            [*as_server_user(), program, "-q", str(config)], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            _wait(port)
            yield port
        finally:
            process.terminate()
            process.wait(_READY_S)


def _wait(port: int) -> None:
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise RuntimeError("PgBouncer does not answer")
