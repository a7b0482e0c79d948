"""A training of two machines or more: queued as a job, watched, and run without spotd for what it must end with."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.e2e.harness import FINAL, Lab
from tests.e2e.test_gang import SCRIPT, code_folder

STEPS = 1500


def straight_sha256(folder: Path, nodes: int = 2, steps: int = STEPS) -> str:
    """What so many processes of the same training end with, when nothing of spotd or Slurm is beside them."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    processes = []
    for rank in range(nodes):
        here = folder / f"rank{rank}"
        (here / "saved").mkdir(parents=True)
        place = {"NODE_RANK": str(rank), "NNODES": str(nodes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        more = {"SPOTD_CHECKPOINT_DIR": str(here / "saved"), "SPOTD_RENDEZVOUS_ID": "straight", "SPOTD_RESUME": ""}
        words = [sys.executable, str(SCRIPT), "--steps", str(steps), "--save-every", str(steps)]
        processes.append(subprocess.Popen(words, cwd=here, env={**os.environ, **place, **more}))
    assert [one.wait(120) for one in processes] == [0] * nodes
    return (folder / "rank0" / "out" / "weights.sha256").read_text().strip()


def saved_on_its_own(found: Lab, job: str) -> int:
    """The number of the attempt that runs, once a checkpoint of its own was accepted; 0 until then."""
    row = found.job(job)
    assert row["state"] not in FINAL, row["attempts"]
    number = len(row["attempts"])
    kept = found.api.checkpoints(job)["checkpoints"] if row["state"] == "RUNNING" else []
    return number if any(one["attempt"] == number for one in kept) else 0


def submit_two(found: Lab, tmp_path: Path, *, nodes: int = 2, pace: float = 0.05, **changes: Any) -> str:
    """Queue it on two machines, or on so many; the file `release` lets it end soon."""
    run = f"{sys.executable} gang_train.py --steps {STEPS} --pace {pace} --release {tmp_path / 'release'}"
    return found.submit(
        "gang",
        run,
        workdir=code_folder(tmp_path),
        nodes=nodes,
        outputs=["out/**"],
        checkpoint={"every": "1m", "settle": "10s", "stop_grace": "60s", "saved_by": "first"},
        **changes,
    )
