"""Google Cloud does what every provider must do, against a fake that was written without its adapter."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotd_providers.testkit.suite import Behaviour, run
from tests.unit.providers.conformance.tiers import stories
from tests.unit.providers.googlecloud.harness import open_harness


@pytest.mark.parametrize("behaviour", stories())
def test_google_cloud_behaves_as_a_provider(behaviour: Behaviour, tmp_path: Path) -> None:
    run(behaviour, open_harness, tmp_path)
