"""What a daemon costs: the time to be ready with 1,000 jobs to reconcile, its memory and its idle processor time.

Ready is what it reports to its service manager (READY=1), and the first completed cycle is its first WATCHDOG=1.
Peers in the same run: an interpreter that does nothing, and one that imports the libraries of any such daemon. The
published figures of the daemons it is compared with are 7.0 s and 265 MiB (dstack), 6.5 s and 358 MiB (SkyPilot).

Run: python benchmarks/bench_daemon.py
"""

from __future__ import annotations

import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from crowd import crowded_lab

from tests.e2e.harness import Lab

JOBS, RUNNING, ROUNDS, IDLE_S = 1_000, 50, 5, 30.0
READY_LIMIT_S, RSS_LIMIT_MB, CPU_LIMIT = 1.2, 85.0, 0.2
LIBRARIES = "import anyio, httpx, pydantic, sqlmodel, starlette.applications, structlog, uvicorn"
TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Seconds from the start of the process, and of its processors until it was ready."""

    ready_s: float
    ready_cpu_s: float
    reconciled_s: float


def start(lab: Lab) -> Start:
    """Start the daemon; return how long that took by its own reports."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        address = lab.folder / f"notify-{lab.starts}"
        manager.bind(str(address))
        manager.settimeout(60)
        os.environ["NOTIFY_SOCKET"] = str(address)
        try:
            began = time.perf_counter()
            lab.start(wait=False)
        finally:
            del os.environ["NOTIFY_SOCKET"]
        assert lab.process is not None
        moments: dict[str, float] = {}
        ready_cpu_s = 0.0
        while not moments.keys() >= {"READY=1", "WATCHDOG=1"}:
            word = manager.recv(4096).decode().partition("\n")[0]
            moments.setdefault(word, time.perf_counter() - began)
            if word == "READY=1":
                ready_cpu_s = cpu_s(lab.process.pid)
    return Start(ready_s=moments["READY=1"], ready_cpu_s=ready_cpu_s, reconciled_s=moments["WATCHDOG=1"])


def interpreter_s(code: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - began


def rss_mb(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def idle(lab: Lab) -> tuple[float, float]:
    """Memory in MB and percent of one processor, once what the start brought has settled."""
    assert lab.process is not None
    pid = lab.process.pid
    time.sleep(10)
    before, began = cpu_s(pid), time.perf_counter()
    time.sleep(IDLE_S)
    return rss_mb(pid), 100 * (cpu_s(pid) - before) / (time.perf_counter() - began)


def without_test_tools(folder: Path) -> Path:
    """A folder for PYTHONPATH that hides what httpcore and SQLAlchemy import where it is, as it is for tests only."""
    hidden = folder / "hidden"
    hidden.mkdir(exist_ok=True)
    for name in ("trio", "greenlet"):
        (hidden / f"{name}.py").write_text("raise ImportError('not a part of spotd')\n")
    return hidden


def imported(folder: Path) -> set[str]:
    """The packages that a daemon has imported by the time it idles."""
    os.environ["PYTHONPROFILEIMPORTTIME"] = "1"
    lab = crowded_lab(folder, jobs=1, running=0)
    try:
        lab.start()
        assert lab.stop() == 0
    finally:
        del os.environ["PYTHONPROFILEIMPORTTIME"]
        lab.close()
    log = (folder / "spotd-1.log").read_text(errors="replace")
    # By their modules: the attempt to import a package that the daemon keeps out is a line as well.
    return set(re.findall(r"^import time:.*\| +(\w+)\.\S+$", log, re.MULTILINE))


def main() -> None:
    starts, bare, libraries = [], [], []
    with tempfile.TemporaryDirectory(prefix="spotd-bench-") as text:
        folder = Path(text)
        os.environ["PYTHONPATH"] = str(without_test_tools(folder))
        for number in range(ROUNDS):
            bare.append(interpreter_s("pass"))
            libraries.append(interpreter_s(LIBRARIES))
            lab = crowded_lab(folder / f"lab-{number}", jobs=JOBS, running=RUNNING)
            try:
                starts.append(start(lab))
            finally:
                lab.close()
        ready = statistics.median(s.ready_s for s in starts)
        peer = statistics.median(libraries)
        print(f"python -c pass                    {statistics.median(bare) * 1000:7.0f} ms")
        print(f"importing a daemon's libraries    {peer * 1000:7.0f} ms")
        print(
            f"ready with {JOBS} jobs              {ready * 1000:7.0f} ms   {ready / peer:.1f}x its libraries;"
            f" limit {READY_LIMIT_S:.1f} s ({ready / READY_LIMIT_S:.2f}x)"
        )
        busy = statistics.median(s.ready_cpu_s for s in starts)
        print(
            f"  of that on a processor          {busy * 1000:7.0f} ms   (the rest is waiting for one, or for the disk)"
        )
        reconciled = statistics.median(s.reconciled_s for s in starts)
        print(f"first cycle done ({RUNNING} lost hosts)   {reconciled * 1000:7.0f} ms")
        for jobs in (0, JOBS):
            lab = crowded_lab(folder / f"idle-{jobs}", jobs=jobs, running=0)
            try:
                start(lab)
                memory, percent = idle(lab)
            finally:
                lab.close()
            print(
                f"idle with {jobs:4} jobs: {memory:6.1f} MB (limit {RSS_LIMIT_MB:.0f}, {memory / RSS_LIMIT_MB:.2f}x),"
                f" {percent:.2f} % of a processor (limit {CPU_LIMIT} %)"
            )
        heavy = {"boto3", "botocore", "numpy", "rich", "alembic"} & imported(folder / "imports")
        print(f"imported although it may never be needed: {', '.join(sorted(heavy)) or 'nothing'}")


if __name__ == "__main__":
    main()
