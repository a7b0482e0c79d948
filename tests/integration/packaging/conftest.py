"""The wheel as it is released, and programs of it as from a fresh login."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by this environment's own hatchling: nothing is fetched."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=REPO, check=True, capture_output=True, timeout=120)
    (made,) = folder.glob("*.whl")
    return made


def run(command: Sequence[str | Path], folder: Path, *, within: float = 60) -> subprocess.CompletedProcess[str]:
    """Run as from a fresh login, away from the checkout."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("SPOTD_", "PYTHON", "XDG_"))}
    environment |= {"HOME": str(folder), "NO_COLOR": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=within, check=False
    )
