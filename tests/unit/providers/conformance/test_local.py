"""The local provider shows every behaviour, over real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotd_providers.testkit import BEHAVIOURS, Behaviour, run
from tests.unit.providers.conformance.local_harness import open_harness


@pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=str)
def test_the_local_provider(behaviour: Behaviour, tmp_path: Path) -> None:
    run(behaviour, open_harness, tmp_path)
