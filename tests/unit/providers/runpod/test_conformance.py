"""RunPod does what every provider must do, against its own fake; with its old spot market too, while that lasts."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotd_providers.testkit.behaviours import BEHAVIOURS
from spotd_providers.testkit.suite import Behaviour, run
from tests.unit.providers.runpod.harness import open_harness, open_with_spot

ABOUT_SPOT = (
    "a_launch_makes_one",
    "a_lost_answer_means",
    "a_purchase_that_never",
    "a_rate_limited_launch",
    "a_vanished_offer",
    "a_cloud_without_machines",
    "an_interruptible_purchase",
    "a_preempted_machine",
    "an_outbid_machine",
    "a_price_that_moved",
    "price_max_is",
    "a_changed_bid",
    "a_bid_on_an_absent",
    "a_bad_price",
    "offers_are",
    "asking_for",
    "spot_and_host",
    "every_power",
)


@pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=str)
def test_runpod_behaves_as_a_provider(behaviour: Behaviour, tmp_path: Path) -> None:
    run(behaviour, open_harness, tmp_path)


@pytest.mark.parametrize("behaviour", [one for one in BEHAVIOURS if one.name.startswith(ABOUT_SPOT)], ids=str)
def test_runpod_with_spot_behaves_as_a_provider(behaviour: Behaviour, tmp_path: Path) -> None:
    run(behaviour, open_with_spot, tmp_path)
