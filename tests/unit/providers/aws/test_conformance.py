"""AWS does what every provider must do, against its own fake EC2."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotd_providers.testkit.suite import Behaviour, run
from tests.unit.providers.aws.harness import open_harness
from tests.unit.providers.conformance.tiers import stories


@pytest.mark.parametrize("behaviour", stories(costly=True))
def test_aws_behaves_as_a_provider(behaviour: Behaviour, tmp_path: Path) -> None:
    run(behaviour, open_harness, tmp_path)
