"""A real Slurm of three nodes on loopback, with munge: controller and nodes are processes below one folder.

Nodes have GPUs that are character devices of no use. Two partitions share them: what runs in `spot` makes way for what
is sent to `prod`. Everything is ended with the fixture, jobs included.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import pytest

PATH: Final = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
NODES: Final = ("n1", "n2", "n3")
READY_S: Final = 60.0
GRACE_S: Final = 25
_CONFIG: Final = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
AuthInfo=socket={root}/run/munge.socket
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
ReturnToService=2
SlurmdTimeout=15
KillWait=5
MessageTimeout=5
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=2,bf_interval=2
{accounting}
JobAcctGatherType=jobacct_gather/none
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/run/slurmctld.pid
SlurmdPidFile={root}/run/%n.pid
SlurmctldLogFile={root}/log/slurmctld
SlurmdLogFile={root}/log/%n
MinJobAge={job_age_s}
{nodes}
PartitionName=spot Nodes=n[1-3] Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace}
PartitionName=prod Nodes=n[1-3] PriorityTier=10 PreemptMode=OFF MaxTime=60
"""


_NO_ACCOUNTING: Final = "AccountingStorageType=accounting_storage/none"
_ACCOUNTING: Final = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStoragePort={port}
AccountingStoragePass={root}/run/munge.socket"""
_DBD: Final = """\
AuthType=auth/munge
AuthInfo=socket={root}/run/munge.socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser=root
LogFile={root}/log/slurmdbd
PidFile={root}/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={database}
StorageUser=slurm
StorageLoc=slurm_acct_db
"""


class Slurm:
    """A running cluster."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "slurm.conf"
        self._database: subprocess.Popen[bytes] | None = None
        self._environ = {**os.environ, "PATH": PATH, "SLURM_CONF": str(self.config)}

    def run(self, *words: str, check: bool = True) -> str:
        """Run one of Slurm's commands as the administrator."""
        done = subprocess.run(words, env=self._environ, capture_output=True, text=True, timeout=60, check=False)
        if check and done.returncode:
            raise RuntimeError(f"{words} ended with {done.returncode}: {done.stderr}")
        return done.stdout

    def start_controller(self) -> None:
        self.run("slurmctld", "-i")

    def start_accounting(self, port: int, database: int) -> None:
        """Start a database and `slurmdbd`, and register the cluster there."""
        data, socket_ = self.root / "database", self.root / "run" / "database.socket"
        install = ("mariadb-install-db", "--no-defaults", f"--datadir={data}", "--user=root", "--skip-test-db")
        self.run(*install, "--auth-root-authentication-method=normal")
        with (self.root / "log" / "database").open("wb") as log:
            command = (
                "mariadbd", "--no-defaults", "--user=root", f"--datadir={data}", f"--socket={socket_}",
                "--bind-address=127.0.0.1", f"--port={database}", f"--pid-file={self.root / 'run' / 'database.pid'}",
                "--innodb-buffer-pool-size=32M", "--innodb-flush-log-at-trx-commit=0",
            )  # fmt: skip
            self._database = subprocess.Popen(
                command, env=self._environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.wait_until(socket_.exists)
        user = "slurm@127.0.0.1"
        self._sql(f"create database slurm_acct_db; create user {user}; grant all on slurm_acct_db.* to {user}")
        config = self.root / "slurmdbd.conf"
        config.write_text(_DBD.format(root=self.root, port=port, database=database))
        config.chmod(0o600)
        self.run("slurmdbd")
        self.wait_until(self._is_registered)

    def _is_registered(self) -> bool:
        self.run("sacctmgr", "-i", "add", "cluster", "test", check=False)
        return "test" in self.run("sacctmgr", "-n", "show", "cluster", "format=cluster", check=False)

    def _sql(self, text: str) -> None:
        reached = f"--socket={self.root / 'run' / 'database.socket'}"
        self.run("mariadb", "--no-defaults", reached, "-u", "root", "-e", text)

    def forget_end(self, number: str) -> None:
        """Let accounting have a job as running, as after an end that it was not told of."""
        table = "slurm_acct_db.test_job_table"
        self._sql(f"update {table} set state = 1, time_end = 0 where id_job = {int(number)}")  # noqa: S608 - a number

    def stop_controller(self) -> None:
        """Stop it in order: one that is killed forgets a job of the last seconds, which it has not written down."""
        self._kill("slurmctld", signal.SIGTERM)

    def start_node(self, name: str) -> None:
        self.run("slurmd", "-N", name)

    def lose_node(self, name: str) -> None:
        """Kill a node's daemon with its jobs and their keepers, as a power cut does."""
        self._kill(name)
        jobs = self._steps(name)
        for pid in [*{keeper for pid in jobs if (keeper := _keeper_of(pid))}, *jobs]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _steps(self, name: str) -> list[int]:
        """Return the processes whose environment names this node of this cluster."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                environ = (folder / "environ").read_bytes().split(b"\0")
                if {f"SLURM_CONF={self.config}".encode(), f"SLURMD_NODENAME={name}".encode()} <= set(environ):
                    found.append(int(folder.name))
        return found

    def _kill(self, name: str, by: signal.Signals = signal.SIGKILL) -> None:
        file = self.root / "run" / f"{name}.pid"
        with suppress(OSError, ValueError):
            pid = int(file.read_text())
            os.kill(pid, by)
            self.wait_until(lambda: not Path(f"/proc/{pid}").exists() or _is_zombie(pid))
            file.unlink()

    def wait_until(self, what: Callable[[], bool], within_s: float = READY_S) -> None:
        """Wait until the cluster has done what is expected of it."""
        deadline = time.monotonic() + within_s
        while not what():
            if time.monotonic() > deadline:
                pytest.fail(f"the cluster did not get there in {within_s:.0f} s: {self.run('squeue', check=False)}")
            time.sleep(0.2)

    def nodes(self) -> dict[str, str]:
        rows = self.run("sinfo", "-N", "-h", "-o", "%N %t", check=False).split("\n")
        return dict(row.split(" ", 1) for row in rows if " " in row)

    def job(self, number: str) -> dict[str, str]:
        """Return what the controller says of a job."""
        text = self.run("scontrol", "show", "job", "-o", number, check=False)
        return dict(one.split("=", 1) for one in text.split() if "=" in one)

    def past(self, number: str) -> str:
        """Return the state of a job in accounting."""
        return self.run("sacct", "-n", "-X", "-j", number, "-o", "State%20").strip()

    def take_all(self) -> str:
        """Ask for all nodes in the partition that is never preempted; return the job's number."""
        words = (
            "-p",
            "prod",
            "-N3",
            "--exclusive",
            "--mem=1000",
            "--time=5",
            "--output=/dev/null",
            "--wrap",
            "sleep 600",
        )
        return self.run("sbatch", "--parsable", *words).strip()

    def empty(self) -> None:
        """End all jobs and make all nodes usable, so that the next test begins with an empty cluster."""
        for number in self.run("squeue", "-h", "-o", "%A").split():
            self.run("scancel", number, check=False)
        self.wait_until(lambda: not self.run("squeue", "-h").strip())
        for name, state in self.nodes().items():
            if not state.startswith("idle"):
                self.run("scontrol", "update", f"NodeName={name}", "State=RESUME", check=False)
        self.wait_until(lambda: set(self.nodes().values()) == {"idle"})

    def stop(self) -> None:
        with suppress(Exception):
            for number in self.run("squeue", "-h", "-o", "%A", check=False).split():
                self.run("scancel", "--signal=KILL", "--full", number, check=False)
        for name in (*NODES, "slurmctld", "slurmdbd", "database", "munged"):
            self._kill(name)
        if self._database is not None:
            self._database.wait(20)
        deadline = time.monotonic() + READY_S
        while (left := self.processes()) and time.monotonic() < deadline:
            for pid in left:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)

    def processes(self) -> list[int]:
        """Return the jobs of this cluster and their keepers.

        A keeper whose daemon is gone waits for it for ever. Its title overwrites its environment, so it is known by its
        folder, which is that of the logs.
        """
        found = [pid for name in NODES for pid in self._steps(name)]
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                is_keeper = (folder / "comm").read_text().startswith("slurmstepd")
                if is_keeper and (folder / "cwd").resolve().is_relative_to(self.root):
                    found.append(int(folder.name))
        return [pid for pid in found if not _is_zombie(pid)]


def _keeper_of(pid: int) -> int:
    """Return the `slurmstepd` that started this process; 0 if another one did."""
    with suppress(OSError, ValueError, IndexError):
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
        return parent if Path(f"/proc/{parent}/comm").read_text().startswith("slurmstepd") else 0
    return 0


def _is_zombie(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")
    return True


def _free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(one.getsockname()[1]) for one in listeners]
    for one in listeners:
        one.close()
    return ports


def require_slurm(*, accounting: bool = False) -> None:
    """Skip the test where a real Slurm cannot be started."""
    packages = {"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "sbatch": "slurm-wlm", "munged": "munge"}
    packages |= {"slurmdbd": "slurmdbd", "mariadbd": "mariadb-server"} if accounting else {}
    missing = [name for name in packages if shutil.which(name, path=PATH) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed (apt-get install {packages[missing[0]]})")
    if os.getuid() != 0:
        pytest.skip("nodes of Slurm are started by root only")


@contextmanager
def running_slurm(root: Path, *, accounting: bool = False) -> Iterator[Slurm]:
    """Start munge, a controller and three nodes with two GPUs each; end all of it afterwards.

    With accounting the controller forgets a job soon after its end, so that `sacct` alone knows of it.
    """
    require_slurm(accounting=accounting)
    for folder in ("run", "log", "state", "dev", *(f"spool/{name}" for name in NODES)):
        (root / folder).mkdir(parents=True)
    key = root / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    port, dbd, database, *ports = _free_ports(3 + len(NODES))
    nodes = "\n".join(
        f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={own} CPUs=2 RealMemory=2000"
        f" Gres=gpu:h100:2 State=UNKNOWN"
        for name, own in zip(NODES, ports, strict=True)
    )
    (root / "slurm.conf").write_text(
        _CONFIG.format(
            port=port,
            root=root,
            nodes=nodes,
            grace=GRACE_S,
            job_age_s=2 if accounting else 300,
            accounting=_ACCOUNTING.format(root=root, port=dbd) if accounting else _NO_ACCOUNTING,
        )
    )
    lines = []
    for name in NODES:
        for number in range(2):
            try:
                os.mknod(root / "dev" / f"{name}-{number}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
            except OSError as exc:
                pytest.skip(f"a node's GPU has to be a character device, which cannot be made here ({exc})")
        lines.append(f"NodeName={name} Name=gpu Type=h100 File={root}/dev/{name}-[0-1]\n")
    (root / "gres.conf").write_text("".join(lines))
    slurm = Slurm(root)
    run = root / "run"
    try:
        slurm.run(
            "munged", f"--socket={run}/munge.socket", f"--key-file={key}", f"--pid-file={run}/munged.pid",
            f"--log-file={root}/log/munged", f"--seed-file={run}/seed", "--force",
        )  # fmt: skip
        if accounting:
            slurm.start_accounting(dbd, database)
        slurm.start_controller()
        for name in NODES:
            slurm.start_node(name)
        slurm.wait_until(lambda: set(slurm.nodes().values()) == {"idle"})
        yield slurm
    finally:
        slurm.stop()
