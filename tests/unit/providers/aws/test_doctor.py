"""What `spotctl doctor` says of AWS: each thing that is missing in one line, with the way out."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from spotd_providers.aws.plugin import AwsProvider
from spotd_providers.contract.values import CheckLine
from tests.fakes.aws import Ec2Cloud, Quirks
from tests.unit.providers.aws.harness import AwsHarness
from tests.unit.providers.aws.stories import play


def lines_of(folder: Path, prepare: Callable[[Ec2Cloud], None], quirks: Quirks | None = None) -> dict[str, CheckLine]:
    found: dict[str, CheckLine] = {}

    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        prepare(h.cloud)
        found.update({line.name: line for line in await provider.check()})

    play(folder, story, quirks)
    return found


def nothing(_: Ec2Cloud) -> None:
    """The account as it is."""


def test_a_healthy_account_is_told_with_its_figures(tmp_path: Path) -> None:
    lines = lines_of(tmp_path, nothing)
    assert all(line.ok for line in lines.values())
    assert lines["balance"].detail == "AWS bills afterwards, so none can run out"
    assert lines["us-east-1 prices"].detail == "9 on-demand prices from AWS's list"
    assert "G 64, P2-P4 96, P5 192; on-demand: G 64, P 0" in lines["us-west-2 quota"].detail


@pytest.mark.parametrize(
    ("denied", "line"),
    [
        ("ec2:DescribeSpotPriceHistory", "market"),
        ("ec2:DescribeInstances", "machines"),
        ("ec2:DescribeSpotInstanceRequests", "machines"),
        ("ec2:DescribeSubnets", "network"),
        ("ec2:RunInstances", "launch"),
        ("servicequotas:GetServiceQuota", "quota"),
    ],
)
def test_a_permission_that_is_absent_is_one_line_that_names_the_policy(tmp_path: Path, denied: str, line: str) -> None:
    lines = lines_of(tmp_path, nothing, Quirks(allowed=lambda action: action != denied))
    assert not lines[f"us-east-1 {line}"].ok
    assert "docs/reference/providers.md" in lines[f"us-east-1 {line}"].hint


def test_without_the_price_list_a_region_with_a_table_is_well_and_another_is_not(tmp_path: Path) -> None:
    lines = lines_of(tmp_path, nothing, Quirks(allowed=lambda action: action != "pricing:GetProducts"))
    assert lines["us-east-1 prices"].ok
    assert "2026-07-20" in lines["us-east-1 prices"].detail
    assert "pricing:GetProducts" in lines["us-east-1 prices"].detail
    assert not lines["us-west-2 prices"].ok
    assert "docs/reference/providers.md" in lines["us-west-2 prices"].hint


def test_a_clock_more_than_five_seconds_off_is_told(tmp_path: Path) -> None:
    found: dict[int, CheckLine] = {}

    async def story(h: AwsHarness, provider: AwsProvider) -> None:
        for ahead_s in (0, 5, -5, 7, -7, 3600):
            h.cloud.quirks.clock_ahead = timedelta(seconds=ahead_s)
            found[ahead_s] = next(line for line in await provider.check() if line.name == "clock")

    play(tmp_path, story, regions=("us-east-1",))
    assert {ahead_s for ahead_s, line in found.items() if line.ok} == {0, 5, -5}
    assert all(("synchronise" in line.hint) is not line.ok for line in found.values())
    assert found[0].detail == "0 s from AWS's"
    assert found[3600].detail in {"3599 s from AWS's", "3600 s from AWS's"}


def test_a_new_account_without_vcpus_is_told_to_ask_for_them(tmp_path: Path) -> None:
    lines = lines_of(tmp_path, lambda cloud: cloud.quotas.update(dict.fromkeys(cloud.quotas, 0.0)))
    assert not lines["us-east-1 quota"].ok
    assert "Service Quotas" in lines["us-east-1 quota"].hint
