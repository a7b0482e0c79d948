"""The proof: the same script, never interrupted, must end with the same bytes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from spotd.client.daemon import Daemon
from spotd.demo.script import DemoJob
from spotd.demo.session import DemoFailed

HASH_FILE = "weights.sha256"


def training_folder() -> Path:
    """Return the folder of the training script, in the wheel or in a checkout."""
    packaged = Path(str(files("spotd.demo"))) / "example"
    checkout = Path(__file__).resolve().parents[2] / "examples" / "numpy"
    for folder in (packaged, checkout):
        if (folder / "train.py").is_file():
            return folder
    raise DemoFailed("the demo's training script is missing from this installation; reinstall spotd")


def check_numpy() -> None:
    """Raise DemoFailed with the way out when the training script could not run."""
    try:
        import numpy  # noqa: F401 - only whether it is there matters, and only here
    except ImportError:
        raise DemoFailed("the demo trains with numpy, which is not installed: pip install 'spotd[demo]'") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """An uninterrupted run in the background."""

    job: DemoJob
    folder: Path
    process: subprocess.Popen[bytes]

    def sha256(self) -> str:
        """Return what the uninterrupted run ended with."""
        code = self.process.wait(timeout=60)
        if code != 0:
            raise DemoFailed(f"the uninterrupted run of {self.job.name} failed; see {self.folder}")
        return (self.folder / "out" / HASH_FILE).read_text(encoding="utf-8").strip()


def start_reference(job: DemoJob, folder: Path) -> Reference:
    """Start the job's script once from start to end, without spotd and without pauses."""
    folder.mkdir(parents=True)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, str(training_folder() / "train.py"), *job.flags],
            cwd=folder,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
        )
    return Reference(job=job, folder=folder, process=process)


def delivered_sha256(daemon: Daemon, job: DemoJob) -> str:
    """Return what the job delivered through the store."""
    outputs = daemon.files(job.name, None)["files"]
    path = next((f["path"] for f in outputs if Path(f["path"]).name == HASH_FILE), None)
    if path is None:
        raise DemoFailed(f"{job.name} delivered no {HASH_FILE}")
    return b"".join(daemon.read_file(job.name, None, path)).decode("ascii", "replace").strip()
