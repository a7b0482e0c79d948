"""The job of `tests/e2e/test_own_then_rented.py`, with a real Slurm of three nodes as its second place."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spotd_providers.local.hosts import ScaledClock
from tests.e2e.test_own_then_rented import Batch, carry
from tests.fakes.ssh.sshd import SSHD
from tests.system.engines.slurm import PATH, running_slurm

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(900),
    pytest.mark.skipif(SSHD is None, reason="openssh-server is not installed"),
]


@contextmanager
def real_slurm(folder: Path, _clock: ScaledClock) -> Iterator[Batch]:
    """A cluster whose time is the wall's, and not that of the daemon under test."""
    with running_slurm(folder) as slurm:

        def take_all() -> None:
            slurm.take_all()

        values = {
            "slurm_conf": slurm.config,
            "folder": folder / "jobs",
            "path": f"{Path(sys.executable).parent}:{PATH}",
        }
        settings = "\n".join(f'{name} = "{value}"' for name, value in values.items())
        yield Batch(settings=settings, take_all=take_all)


def test_a_job_leaves_an_own_host_a_real_slurm_and_kubernetes_for_vast_and_loses_no_bit(tmp_path: Path) -> None:
    carry(tmp_path, real_slurm)
