"""A real PostgreSQL on loopback, in one folder: started once, stopped, killed and started again by tests.

`python -m tests.system.engines.postgres COMMAND` runs a command beside one, which finds its URL in `SPOTD_TEST_STATE`:
so the tests of the store run over it as they are.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_USER: Final = "postgres"
_READY_S: Final = 60.0
_STOP_S: Final = 30
_ANSWERS: Final = frozenset({"psql", "pg_dump"})


def programs() -> Path | None:
    """Return the folder of the newest server's programs, which Debian keeps out of the PATH."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if found:
        return found[-1].parent
    initdb = shutil.which("initdb")
    return Path(initdb).parent if initdb else None


def missing() -> str:
    """Why there can be no server here; empty where there can."""
    if programs() is None:
        return "PostgreSQL is not installed (Debian: apt-get install postgresql)"
    try:
        pwd.getpwnam(_USER)
    except KeyError:
        return f"PostgreSQL does not run as root, and there is no user {_USER}" if os.geteuid() == 0 else ""
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Postgres:
    """One server."""

    root: Path
    port: int
    namespace: str = ""
    """The network namespace that it runs in."""

    @property
    def data(self) -> Path:
        return self.root / "data"

    def url(self, schema: str, *, port: int | None = None) -> str:
        """Return the URL of a state in this schema, which is made when it is not there."""
        self.sql(f"CREATE SCHEMA IF NOT EXISTS {schema}")
        return f"postgresql://spotd@127.0.0.1:{port or self.port}/spotd?options=-csearch_path%3D{schema}"

    def sql(self, statement: str) -> str:
        """Run a statement; return what it answers, without headings."""
        done = self._run("psql", "-h", "127.0.0.1", "-p", str(self.port), "-U", "spotd", "-Atqc", statement, "spotd")
        return done.stdout.strip()

    def dump(self) -> str:
        """Return everything that a reader of the database sees."""
        return self._run("pg_dump", "-h", "127.0.0.1", "-p", str(self.port), "-U", "spotd", "spotd").stdout

    def start(self) -> None:
        self._run("pg_ctl", "-D", str(self.data), "-l", str(self.root / "log"), "-t", str(_READY_S), "-w", "start")

    @contextmanager
    def full_disk(self) -> Iterator[None]:
        """Leave nothing free on the disk of this server meanwhile; it may crash, and is there again afterwards."""
        filler = self.root / "filler"
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            for size in (1 << 20, 1 << 12):
                with suppress(OSError):
                    while True:
                        file.write(b"\0" * size)
        try:
            yield
        finally:
            filler.unlink()
            if not (self.data / "postmaster.pid").exists() or not _is_alive(self._pid()):
                self.start()

    def use_up_log(self) -> None:
        """Write into the write-ahead log alone until a full disk ends the server."""
        with suppress(RuntimeError):
            while True:
                self.sql("SELECT pg_logical_emit_message(false, 'filler', repeat('x', 900000))")

    def stop(self, mode: str = "fast") -> None:
        self._run("pg_ctl", "-D", str(self.data), "-m", mode, "-t", str(_STOP_S), "-w", "stop")

    def standby(self) -> Postgres:
        """Start a copy of this server beside it that follows it, until it is cut off or promoted."""
        other = Postgres(root=self.root.with_name("standby"), port=free_port())
        make_root(other.root)
        link = ("-h", "127.0.0.1", "-p", str(self.port), "-U", "spotd")
        self._run("pg_basebackup", *link, "-D", str(other.data), "-X", "stream", "-c", "fast", "-R")
        with (other.data / "postgresql.conf").open("a") as config:
            config.write(f"port={other.port}\nunix_socket_directories='{other.root}'\n")
        other.start()
        return other

    def cut_off(self) -> None:
        """Let this standby receive nothing more."""
        self.sql("ALTER SYSTEM SET primary_conninfo = ''")
        self.sql("SELECT pg_reload_conf()")
        deadline = time.monotonic() + _STOP_S
        while self.sql("SELECT count(*) FROM pg_stat_wal_receiver") != "0" and time.monotonic() < deadline:
            time.sleep(0.05)

    def promote(self) -> None:
        self._run("pg_ctl", "-D", str(self.data), "-t", str(_READY_S), "-w", "promote")

    def kill(self) -> None:
        """End it as a crash does. Its processes end with the postmaster within a moment."""
        pid = self._pid()
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + _STOP_S
        while _is_alive(pid) and time.monotonic() < deadline:
            time.sleep(0.05)

    def end(self) -> None:
        """Stop it without a word to its clients, if a test has not killed it."""
        if (self.data / "postmaster.pid").exists() and _is_alive(self._pid()):
            self.stop("immediate")

    def _pid(self) -> int:
        return int((self.data / "postmaster.pid").read_text().split()[0])

    def _run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        folder = programs()
        assert folder is not None
        within = ["ip", "netns", "exec", self.namespace] if self.namespace else []
        done = subprocess.run(
            [*within, *as_server_user(), str(folder / program), *arguments],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if program in _ANSWERS else subprocess.DEVNULL,
            stderr=subprocess.PIPE if program in _ANSWERS else subprocess.DEVNULL,
            text=True,
            cwd="/",
            timeout=_READY_S * 2,
        )
        if done.returncode != 0:
            log = self.root / "log"
            raise RuntimeError(f"{program} failed: {done.stderr or (log.read_text()[-2000:] if log.exists() else '')}")
        return done


def as_server_user() -> list[str]:
    """Return what begins a command that is not to run as root."""
    return ["setpriv", f"--reuid={_USER}", f"--regid={_USER}", "--init-groups"] if os.geteuid() == 0 else []


def no_disk_of_its_own() -> str:
    """Why no server here can have a disk of its own; empty where one can."""
    with tempfile.TemporaryDirectory(prefix="disk-") as folder:
        mounted = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=False, capture_output=True)
        if mounted.returncode == 0:
            subprocess.run(["umount", folder], check=True)
        return "" if mounted.returncode == 0 else "no file system may be mounted here"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def make_root(root: Path) -> None:
    root.mkdir()
    if os.geteuid() == 0:
        shutil.chown(root, _USER, _USER)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextmanager
def running(*, namespace: str = "", disk_mb: int = 0) -> Iterator[Postgres]:
    """Start a server in a folder of its own, which its user must be able to reach.

    Args:
        namespace: the network namespace that it is to run in.
        disk_mb: the size of a file system of its own; 0: it is on the disk of this computer.
    """
    with tempfile.TemporaryDirectory(prefix="postgres-") as folder, ExitStack() as stack:
        Path(folder).chmod(0o755)
        if disk_mb:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={disk_mb}m,mode=755", "tmpfs", folder], check=True)
            stack.callback(subprocess.run, ["umount", "-l", folder], check=True)
        with _running(Path(folder) / "server", namespace) as server:
            yield server


@contextmanager
def _running(root: Path, namespace: str) -> Iterator[Postgres]:
    make_root(root)
    port = free_port()
    server = Postgres(root=root, port=port, namespace=namespace)
    server._run("initdb", "-D", str(server.data), "-A", "trust", "-U", "spotd", "-N", "--wal-segsize=1")
    with (server.data / "pg_hba.conf").open("a") as rules:
        rules.write("host all all 198.18.0.0/15 trust\n")  # where there is a network of its own
    with (server.data / "postgresql.conf").open("a") as config:
        everywhere = "*" if namespace else "127.0.0.1"
        config.write(f"port={port}\nlisten_addresses='{everywhere}'\nunix_socket_directories='{root}'\n")
        config.write("min_wal_size=4MB\nmax_wal_size=16MB\n")
        config.write("fsync=off\n")  # a killed server loses nothing by it, only a computer without power
    server.start()
    try:
        server._run("createdb", "-h", "127.0.0.1", "-p", str(port), "-U", "spotd", "spotd")
        yield server
    finally:
        server.end()


STATE_VARIABLE: Final = "SPOTD_TEST_STATE"


def main(command: list[str]) -> int:
    """Run the command beside a server; return its exit code, 0 where there can be no server."""
    reason = missing()
    if reason:
        print(f"skipped: {reason}")
        return 0
    with running() as server:
        url = f"postgresql://spotd@127.0.0.1:{server.port}/spotd"
        return subprocess.run(command, check=False, env={**os.environ, STATE_VARIABLE: url}).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
