"""What AWS bills for a machine besides its GPUs and the disk that its job asked for is part of its price."""

from __future__ import annotations

import pytest

from spotd_providers.aws.offers import storage_fixed
from tests.cases import every


@every(
    ("image_gb", "mb_per_s", "per_hour"),
    [
        pytest.param(0, 125, 5_000, id="an address"),
        pytest.param(36, 125, 9_000, id="the image's disk"),
        pytest.param(0, 305, 15_000, id="a faster disk"),
        pytest.param(35, 250, 15_834, id="what is usual, rounded up"),
    ],
)
def test_each_machine_pays_its_image_its_faster_disk_and_its_address(
    image_gb: int, mb_per_s: int, per_hour: int
) -> None:
    assert storage_fixed(image_gb, mb_per_s) == per_hour
