"""The slurm provider does what every provider must do, on a cluster whose scripts and jobs run for real."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotd_providers.testkit.suite import Behaviour, run
from tests.unit.providers.conformance.tiers import stories
from tests.unit.providers.slurm.harness import open_harness


@pytest.mark.parametrize("behaviour", stories(costly=True))
def test_slurm_behaves_as_a_provider(behaviour: Behaviour, tmp_path: Path) -> None:
    run(behaviour, open_harness, tmp_path)
