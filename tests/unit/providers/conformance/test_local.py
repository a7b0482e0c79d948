"""The local provider shows every behaviour, over real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotd_providers.testkit import Behaviour, run
from tests.unit.providers.conformance.local_harness import open_harness
from tests.unit.providers.conformance.tiers import stories


@pytest.mark.parametrize("behaviour", stories())
def test_the_local_provider(behaviour: Behaviour, tmp_path: Path) -> None:
    run(behaviour, open_harness, tmp_path)
