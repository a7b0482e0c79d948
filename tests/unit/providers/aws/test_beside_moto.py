"""The common part of EC2, asked of our fake and of moto alike, so that the fake cannot drift into our own mistakes.

moto is right about shapes, instance types, tags and endings. It ignores client tokens and has no prices that move, no
capacity and no interruption, so nothing of those is asked of it. Every answer is parsed by AWS's own client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from random import Random
from typing import Any

import anyio
import pytest
from botocore.exceptions import ClientError

from spotd_providers.aws.offers import current_prices
from spotd_providers.aws.plugin import PLUGIN, AwsProvider
from spotd_providers.aws.sdk import AwsSettings
from spotd_providers.contract.gpus import aws_gpus
from spotd_providers.contract.provider import Services
from spotd_providers.contract.values import (
    AttemptKey,
    InstallId,
    InstanceState,
    Interruption,
    LaunchRequest,
    Market,
    MicroUsdPerHour,
    Offer,
    OfferId,
    PoolId,
    ProviderName,
)
from spotd_providers.testkit.clock import FakeClock
from spotd_providers.testkit.harness import RecordingLog
from tests.fakes.aws.actions import AMIS
from tests.fakes.aws.catalog import KINDS
from tests.unit.providers.aws.harness import open_harness
from tests.unit.providers.aws.stories import official

MOTO_IMAGE = "ami-03cf127a"
KEY = AttemptKey("spotd-lab-j0b-1")


def mocked_aws() -> AbstractContextManager[Any]:
    """Moto's imports take longer than its tests."""
    found: AbstractContextManager[Any] = pytest.importorskip("moto", reason="moto is not installed").mock_aws()
    return found


@contextmanager
def moto_client() -> Iterator[tuple[Any, str]]:
    import boto3

    with mocked_aws():
        session = boto3.session.Session(aws_access_key_id="AKIA", aws_secret_access_key="s", region_name="us-east-1")
        yield session.client("ec2"), MOTO_IMAGE


@contextmanager
def fake_client(folder: Path) -> Iterator[tuple[Any, str]]:
    with open_harness(folder) as h:
        yield official(h.served.url), AMIS["us-east-1"]


@pytest.fixture(params=["fake", "moto"])
def ec2(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Any, str]]:
    with moto_client() if request.param == "moto" else fake_client(tmp_path) as found:
        yield found


def run(client: Any, image: str, *, spot: bool, tags: dict[str, str]) -> Any:
    market = {"InstanceMarketOptions": {"MarketType": "spot"}} if spot else {}
    return client.run_instances(
        ImageId=image,
        InstanceType="g5.xlarge",
        MinCount=1,
        MaxCount=1,
        Placement={"AvailabilityZone": "us-east-1b"},
        InstanceInitiatedShutdownBehavior="terminate",
        UserData="#!/bin/sh\ntrue\n",
        TagSpecifications=[
            {"ResourceType": "instance", "Tags": [{"Key": key, "Value": value} for key, value in tags.items()]}
        ],
        **market,
    )["Instances"][0]


def listed(client: Any, tag: str, value: str) -> list[Any]:
    answer = client.describe_instances(Filters=[{"Name": f"tag:{tag}", "Values": [value]}])
    return [row for reservation in answer["Reservations"] for row in reservation["Instances"]]


def code_of(call: Callable[[], Any]) -> str:
    with pytest.raises(ClientError) as caught:
        call()
    return str(caught.value.response["Error"]["Code"])


@pytest.mark.parametrize("spot", [True, False], ids=["spot", "on-demand"])
def test_a_machine_is_told_alike_when_launched_and_when_listed(ec2: tuple[Any, str], spot: bool) -> None:
    client, image = ec2
    launched = run(client, image, spot=spot, tags={"spotd:install": "lab", "spotd:key": KEY})
    assert (launched["State"]["Name"], launched["State"]["Code"]) == ("pending", 0)
    assert launched.get("InstanceLifecycle") == ("spot" if spot else None)
    (row,) = listed(client, "spotd:install", "lab")
    assert row["InstanceId"] == launched["InstanceId"]
    assert row["InstanceType"] == "g5.xlarge"
    assert row["Placement"]["AvailabilityZone"] == "us-east-1b"
    assert {tag["Key"]: tag["Value"] for tag in row["Tags"]} == {"spotd:install": "lab", "spotd:key": KEY}
    assert row.get("InstanceLifecycle") == ("spot" if spot else None)
    assert row["LaunchTime"].tzinfo is not None
    assert not listed(client, "spotd:install", "la")
    assert not listed(client, "spotd:other", "lab")


def test_several_machines_of_one_launch_are_told_alike(ec2: tuple[Any, str]) -> None:
    client, image = ec2
    answer = client.run_instances(ImageId=image, InstanceType="g5.xlarge", MinCount=3, MaxCount=3)
    assert [one["AmiLaunchIndex"] for one in answer["Instances"]] == [0, 1, 2]
    (found,) = client.describe_instances()["Reservations"]
    assert found["ReservationId"] == answer["ReservationId"]
    assert {one["InstanceId"] for one in found["Instances"]} == {one["InstanceId"] for one in answer["Instances"]}
    vpc = client.describe_subnets(Filters=[{"Name": "default-for-az", "Values": ["true"]}])["Subnets"][0]["VpcId"]
    default = [{"Name": "group-name", "Values": ["default"]}, {"Name": "vpc-id", "Values": [vpc]}]
    (rules,) = client.describe_security_groups(Filters=default)["SecurityGroups"]
    assert [rule["IpProtocol"] for rule in rules["IpPermissionsEgress"]] == ["-1"]


def test_an_end_is_accepted_twice_and_says_who_asked_for_it(ec2: tuple[Any, str]) -> None:
    client, image = ec2
    machine = run(client, image, spot=False, tags={"spotd:install": "lab"})["InstanceId"]
    (ended,) = client.terminate_instances(InstanceIds=[machine])["TerminatingInstances"]
    assert ended["InstanceId"] == machine
    assert ended["CurrentState"]["Name"] == "shutting-down"
    (again,) = client.terminate_instances(InstanceIds=[machine])["TerminatingInstances"]
    assert again["PreviousState"]["Name"] in ("shutting-down", "terminated")
    (row,) = listed(client, "spotd:install", "lab")
    assert row["State"]["Name"] in ("shutting-down", "terminated")
    assert row["StateReason"]["Code"] == "Client.UserInitiatedShutdown"


def test_an_unknown_machine_cannot_be_ended(ec2: tuple[Any, str]) -> None:
    client, _ = ec2
    unknown = code_of(lambda: client.terminate_instances(InstanceIds=["i-0123456789abcdef0"]))
    assert unknown == "InvalidInstanceID.NotFound"


def test_a_dry_run_says_so_and_launches_nothing(ec2: tuple[Any, str]) -> None:
    client, image = ec2
    asked = {"ImageId": image, "InstanceType": "g5.xlarge", "MinCount": 1, "MaxCount": 1, "DryRun": True}
    assert code_of(lambda: client.run_instances(**asked)) == "DryRunOperation"
    assert client.describe_instances()["Reservations"] == []


def hardware_in(row: Any) -> dict[str, Any]:
    gpu = row["GpuInfo"]["Gpus"][0]
    return {
        "gpu": (gpu["Name"], gpu["Manufacturer"], gpu["Count"], gpu["MemoryInfo"]["SizeInMiB"]),
        "part": (gpu.get("LogicalGpuCount"), gpu.get("GpuPartitionSize")) if gpu["Count"] == 0 else None,
        "cpus": row["VCpuInfo"]["DefaultVCpus"],
        "memory": row["MemoryInfo"]["SizeInMiB"],
        "processor": row["ProcessorInfo"]["SupportedArchitectures"],
        "spot": "spot" in row["SupportedUsageClasses"],
    }


def test_the_types_of_the_fake_are_those_of_aws(tmp_path: Path) -> None:
    with fake_client(tmp_path) as (client, _):
        ours = client.describe_instance_types(InstanceTypes=[kind.name for kind in KINDS])["InstanceTypes"]
    names = [row["InstanceType"] for row in ours]
    assert len(names) == len(KINDS)
    with moto_client() as (client, _):
        answer = client.get_paginator("describe_instance_types").paginate(
            Filters=[{"Name": "instance-type", "Values": ["g*", "p*"]}]
        )
        theirs = {row["InstanceType"]: row for page in answer for row in page["InstanceTypes"]}
    compared = [name for name in names if name in theirs]
    assert len(compared) >= len(KINDS) - 1  # moto's data has no AMD types
    for row in ours:
        if row["InstanceType"] in theirs:
            assert hardware_in(row) == hardware_in(theirs[row["InstanceType"]]), row["InstanceType"]


def request(provider: AwsProvider, subnet: str) -> LaunchRequest:
    offer = Offer(
        provider=ProviderName("aws"),
        offer_id=OfferId("g5.xlarge:us-east-1a:spot"),
        pool=PoolId("g5.xlarge:us-east-1a"),
        market=Market.SPOT,
        interruption=Interruption.NOTICE,
        gpu="A10G",
        gpu_count=1,
        gpu_price=MicroUsdPerHour(412_300),
        region="us-east-1",
        extra={"region": "us-east-1", "zone": "us-east-1a", "type": "g5.xlarge", "subnet": subnet},
    )
    return LaunchRequest(
        key=KEY,
        install=InstallId("lab"),
        offer=offer,
        price_max=MicroUsdPerHour(500_000),
        image="scratch",
        disk_gb=20,
        start_script="true",
    )


def test_the_provider_itself_lives_with_moto(tmp_path: Path) -> None:
    services = Services(
        install=InstallId("lab"),
        clock=FakeClock(),
        rng=Random(1),
        log=RecordingLog(),
        state_dir=tmp_path,
        credential="AKIA:secret",
    )

    async def main() -> None:
        async with PLUGIN.open(AwsSettings(ami={"us-east-1": MOTO_IMAGE}), services) as provider:
            assert isinstance(provider, AwsProvider)
            region = provider._regions["us-east-1"]
            kinds = await region.kinds()
            print(f"{len(kinds.usable)} types usable, {len(kinds.rejected)} rejected")
            assert len(kinds.usable) > 50
            for name, kind in kinds.usable.items():
                known = aws_gpus(name)
                if known is not None:
                    assert (kind.gpu, kind.gpu_count) == known
                assert kind.gpu_vram_mb is not None
            nominal = {"g6.xlarge": 24, "g5.48xlarge": 24, "g6e.xlarge": 48, "p4d.24xlarge": 40, "p5en.48xlarge": 141}
            for name, gb in nominal.items():
                assert (kinds.usable[name].gpu_vram_mb or 0) >= gb * 1000, "min_vram means what the card is sold as"
            assert kinds.usable["g6f.large"].gpu_vram_mb == 2861
            prices, odd = current_prices(await region.price_rows())
            assert not odd
            assert {kind for kind, _ in prices} <= kinds.usable.keys()
            subnets = await region.subnets()
            launched = (await provider.launch(request(provider, subnets["us-east-1a"]))).instance
            assert launched.market is Market.SPOT
            (seen,) = (await provider.instances()).instances
            assert (seen.ref, seen.key, seen.state) == (launched.ref, KEY, InstanceState.RUNNING)
            for _ in range(2):
                await provider.terminate(launched.ref)
            (ended,) = (await provider.instances()).instances
            assert ended.state in (InstanceState.ENDING, InstanceState.GONE)
            assert ended.loss is None, "we asked for its end"

    with mocked_aws():
        anyio.run(main)
