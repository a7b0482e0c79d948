"""What a command costs a person who types it: `spotctl --help`, and `spotctl ls` with 1,000 jobs, whole processes.

Peers in the same run: an interpreter that does nothing, one that imports click, and one that imports rich's tables.
Run: python benchmarks/bench_client.py
"""

from __future__ import annotations

import os
import pty
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from crowd import crowded_lab

JOBS, ROUNDS = 1_000, 15
SPOTCTL = str(Path(sys.executable).with_name("spotctl"))


def piped(command: list[str], environment: Mapping[str, str]) -> tuple[float, bytes]:
    """Seconds from start to end, and what it printed."""
    start = time.perf_counter()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return time.perf_counter() - start, done.stdout


def on_terminal(command: list[str], environment: Mapping[str, str]) -> tuple[float, bytes]:
    """The same on a terminal of its own, read until it ends."""
    start = time.perf_counter()
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    printed = b""
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:
            break  # on Linux: no process has the terminal open any more
        if not data:
            break
        printed += data
    assert process.wait() == 0, printed
    os.close(ours)
    return time.perf_counter() - start, printed


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="spotd-bench-") as folder:
        lab = crowded_lab(Path(folder) / "lab", jobs=JOBS, running=0)
        try:
            lab.start()
            environment = {
                **os.environ,
                "SPOTD_SOCKET": str(lab.folder / "run" / "spotd.sock"),
                "TERM": "xterm-256color",
                "COLUMNS": "140",
            }
            run = {
                "python -c pass": lambda: piped([sys.executable, "-c", "pass"], environment),
                "python -c 'import click'": lambda: piped([sys.executable, "-c", "import click"], environment),
                "python -c 'import rich.table'": lambda: piped(
                    [sys.executable, "-c", "import rich.console, rich.table"], environment
                ),
                "spotctl --help": lambda: piped([SPOTCTL, "--help"], environment),
                "spotctl ls -o json": lambda: piped([SPOTCTL, "ls", "-o", "json"], environment),
                "spotctl ls on a terminal": lambda: on_terminal([SPOTCTL, "ls"], environment),
            }
            times = measure(run)
        finally:
            lab.close()
    limits = {"spotctl --help": 0.10, "spotctl ls -o json": 0.15, "spotctl ls on a terminal": 0.30}
    python = statistics.median(times["python -c pass"])
    print(f"{'':28}  median    best      of {ROUNDS} (the best is what a machine that others leave alone shows)")
    for name, values in times.items():
        median, limit = statistics.median(values), limits.get(name)
        against = (
            "" if limit is None else f"   limit {limit:.2f} s ({median / limit:.2f}x, best {min(values) / limit:.2f}x)"
        )
        print(f"{name:28} {median * 1000:7.1f} {min(values) * 1000:7.1f} ms  {median / python:5.1f}x python{against}")


def measure(run: Mapping[str, Callable[[], tuple[float, bytes]]]) -> dict[str, list[float]]:
    """Seconds of each, taken in turns, so that a busy moment falls on all of them."""
    times: dict[str, list[float]] = {name: [] for name in run}
    for turn in range(ROUNDS + 1):
        for name, call in run.items():
            seconds, printed = call()
            assert "ls" not in name or printed.count(b"job-") >= JOBS, (name, printed[:500])
            if turn:  # the first fills the caches
                times[name].append(seconds)
    return times


if __name__ == "__main__":
    main()
