"""The fake EC2 answers AWS's own client, and keeps the rules that money rests on."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from spotd_providers.contract.values import MICRO
from tests.fakes.aws import Phase
from tests.fakes.aws.actions import AMIS
from tests.unit.providers.aws.harness import AwsHarness, open_harness
from tests.unit.providers.aws.stories import official
from tests.unit.providers.local.waiting import until


@pytest.fixture
def h(tmp_path: Path) -> Iterator[AwsHarness]:
    with open_harness(tmp_path) as harness:
        yield harness


def run(client: Any, zone: str = "us-east-1a", **changes: Any) -> Any:
    parameters: dict[str, Any] = {
        "ImageId": AMIS["us-east-1"],
        "InstanceType": "g5.xlarge",
        "MinCount": 1,
        "MaxCount": 1,
        "Placement": {"AvailabilityZone": zone},
        "InstanceMarketOptions": {"MarketType": "spot"},
        "InstanceInitiatedShutdownBehavior": "terminate",
        **changes,
    }
    return client.run_instances(**parameters)["Instances"][0]


def code_of(call: Callable[[], Any]) -> str:
    with pytest.raises(ClientError) as caught:
        call()
    return str(caught.value.response["Error"]["Code"])


def test_prices_since_a_moment_begin_with_the_price_then_in_force(h: AwsHarness) -> None:
    client = official(h.served.url)
    start = h.clock.now()
    h.later(timedelta(hours=1))
    h.cloud.set_price("g5.xlarge:us-east-1a", "0.5")
    asked = {"InstanceTypes": ["g5.xlarge"], "ProductDescriptions": ["Linux/UNIX"], "AvailabilityZone": "us-east-1a"}
    since = client.describe_spot_price_history(**asked, StartTime=start)["SpotPriceHistory"]
    assert [row["SpotPrice"] for row in since] == ["0.5", "0.412300"]
    now = client.describe_spot_price_history(**asked, StartTime=h.clock.now())["SpotPriceHistory"]
    assert [row["SpotPrice"] for row in now] == ["0.5"]
    assert now[0]["AvailabilityZoneId"] == "use1-az6"


def test_pages_of_prices_add_up_to_the_whole(h: AwsHarness) -> None:
    client = official(h.served.url)
    pages = list(client.get_paginator("describe_spot_price_history").paginate(StartTime=h.clock.now()))
    rows = [row for page in pages for row in page["SpotPriceHistory"]]
    assert len(pages) > 1
    in_region = [pool for pool in h.cloud.offered if "us-east-1" in pool]
    assert len(rows) == 2 * len(in_region)


def test_one_token_is_one_machine_in_a_zone_and_another_in_the_next(h: AwsHarness) -> None:
    client = official(h.served.url)
    first = run(client, ClientToken="spotd-lab-j-1")
    again = run(client, ClientToken="spotd-lab-j-1")
    beside = run(client, "us-east-1b", ClientToken="spotd-lab-j-1")
    assert first["InstanceId"] == again["InstanceId"]
    assert beside["InstanceId"] != first["InstanceId"]
    assert len(h.machines()) == 2
    other = {"ClientToken": "spotd-lab-j-1", "UserData": "#!/bin/sh\ntrue\n"}
    assert code_of(lambda: run(client, **other)) == "IdempotentParameterMismatch"


def test_a_launch_is_for_all_or_as_many_as_there_are_between_its_bounds(h: AwsHarness) -> None:
    client = official(h.served.url)
    h.cloud.quirks.room["g5.xlarge:us-east-1a"] = 3
    assert code_of(lambda: run(client, MinCount=4, MaxCount=4)) == "InsufficientInstanceCapacity"
    assert not h.machines()
    run(client, MinCount=1, MaxCount=9, ClientToken="spotd-lab-j-1/9")
    assert len(h.machines()) == 3
    run(client, MinCount=1, MaxCount=9, ClientToken="spotd-lab-j-1/9")
    assert len(h.machines()) == 3
    assert code_of(lambda: run(client, MinCount=1, MaxCount=1)) == "InsufficientInstanceCapacity"


def test_placement_groups_and_interfaces_are_judged_as_ec2_does(h: AwsHarness) -> None:
    client = official(h.served.url)
    near: dict[str, Any] = {"Placement": {"AvailabilityZone": "us-east-1a", "GroupName": "near"}}
    assert code_of(lambda: run(client, **near)) == "InvalidPlacementGroup.Unknown"
    client.create_placement_group(GroupName="near", Strategy="cluster")
    asked = [{"Name": "group-name", "Values": ["near"]}]
    (group,) = client.describe_placement_groups(Filters=asked)["PlacementGroups"]
    assert (group["GroupName"], group["Strategy"], group["State"]) == ("near", "cluster", "available")
    assert not client.describe_placement_groups(Filters=[{"Name": "group-name", "Values": ["far"]}])["PlacementGroups"]
    again = code_of(lambda: client.create_placement_group(GroupName="near", Strategy="cluster"))
    assert again == "InvalidPlacementGroup.Duplicate"
    assert run(client, **near)["Placement"]["GroupName"] == "near"
    subnet = client.describe_subnets()["Subnets"][0]["SubnetId"]

    def with_cards(count: int, kind: str = "p4d.24xlarge", **more: Any) -> str:
        cards = [
            {"DeviceIndex": min(1, n), "NetworkCardIndex": n, "InterfaceType": "efa", "SubnetId": subnet, **more}
            for n in range(count)
        ]
        return code_of(lambda: run(client, InstanceType=kind, NetworkInterfaces=cards, DryRun=True))

    assert with_cards(4) == "DryRunOperation"
    assert with_cards(5) == "AttachmentLimitExceeded"
    assert with_cards(1, "g5.xlarge") == "AttachmentLimitExceeded"
    assert with_cards(1, AssociatePublicIpAddress=True) == "DryRunOperation"
    assert with_cards(2, AssociatePublicIpAddress=True) == "InvalidParameterCombination"


def test_the_official_client_asks_three_times_for_capacity_that_is_not_there(h: AwsHarness) -> None:
    client = official(h.served.url, retries={"mode": "standard"})
    h.cloud.quirks.pool_refusals["g5.xlarge:us-east-1a"] = ("InsufficientInstanceCapacity", 500, "none left")
    assert code_of(lambda: run(client)) == "InsufficientInstanceCapacity"
    assert h.launch_calls() == 3


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"UserData": "#" * 16_385}, "InvalidParameterValue"),
        ({"InstanceType": "m5.large"}, "InvalidInstanceType"),
        ({"ImageId": "ami-0123"}, "InvalidAMIID.NotFound"),
        (
            {"InstanceMarketOptions": {"MarketType": "spot", "SpotOptions": {"MaxPrice": "0.1"}}},
            "SpotMaxPriceTooLow",
        ),
        ({"DryRun": True}, "DryRunOperation"),
        (
            {"BlockDeviceMappings": [{"DeviceName": "/dev/xvda", "Ebs": {"VolumeSize": 8}}]},
            "InvalidBlockDeviceMapping",
        ),
    ],
)
def test_what_cannot_be_launched_is_refused_in_awss_words(h: AwsHarness, changes: Any, code: str) -> None:
    client = official(h.served.url)
    assert code_of(lambda: run(client, **changes)) == code
    assert not h.machines()


def test_an_unknown_id_among_others_ends_none(h: AwsHarness) -> None:
    client = official(h.served.url)
    machine = run(client)["InstanceId"]
    unknown = code_of(lambda: client.terminate_instances(InstanceIds=[machine, "i-0123456789abcdef0"]))
    assert unknown == "InvalidInstanceID.NotFound"
    assert h.machines()[0].exists
    ended = client.terminate_instances(InstanceIds=[machine])["TerminatingInstances"][0]
    assert (ended["PreviousState"]["Name"], ended["CurrentState"]["Name"]) == ("pending", "shutting-down")


def _asked(h: AwsHarness, instance: str, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", h.served.port, timeout=10)
    try:
        connection.request(method, f"/imds/{instance}/{path}", headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_an_interruption_is_told_by_the_request_and_the_metadata_two_minutes_before(h: AwsHarness) -> None:
    client = official(h.served.url)
    machine = run(client)["InstanceId"]
    h.later(timedelta(minutes=1))
    assert _asked(h, machine, "GET", "latest/meta-data/spot/instance-action", {})[0] == 401
    life = {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}
    status, token = _asked(h, machine, "PUT", "latest/api/token", life)
    assert status == 200
    signed = {"X-aws-ec2-metadata-token": token}
    action = "latest/meta-data/spot/instance-action"
    assert _asked(h, machine, "GET", action, signed)[0] == 404
    h.cloud.interrupt(machine, rebalance=True)
    status, body = _asked(h, machine, "GET", action, signed)
    assert (status, json.loads(body)["action"]) == (200, "terminate")
    assert _asked(h, machine, "GET", "latest/meta-data/events/recommendations/rebalance", signed)[0] == 200
    (request,) = client.describe_spot_instance_requests()["SpotInstanceRequests"]
    assert (request["State"], request["Status"]["Code"]) == ("closed", "instance-terminated-no-capacity")
    (reservation,) = client.describe_instances()["Reservations"]
    assert reservation["Instances"][0]["State"]["Name"] == "running"
    h.later(timedelta(minutes=2))
    (reservation,) = client.describe_instances()["Reservations"]
    told = reservation["Instances"][0]
    assert told["State"]["Name"] == "shutting-down"
    assert told["StateReason"]["Code"] == "Server.SpotInstanceTermination"
    h.later(timedelta(hours=2))
    assert not client.describe_instances()["Reservations"]


@pytest.mark.parametrize(("after", "free"), [(timedelta(minutes=40), True), (timedelta(minutes=80), False)])
def test_an_interruption_in_the_first_hour_costs_disk_and_address(h: AwsHarness, after: timedelta, free: bool) -> None:
    machine = run(official(h.served.url))["InstanceId"]
    h.later(timedelta(seconds=20))
    h.machines()
    h.later(after)
    h.cloud.interrupt(machine, notice=False)
    hours = after / timedelta(hours=1)
    disk = (35 * 0.08 / 720 + 0.005) * (hours + 20 / 3600)
    expected = disk if free else disk + 0.4123 * hours
    assert h.billed(machine) / MICRO == pytest.approx(expected, rel=0.01)


def test_our_own_end_in_the_first_hour_is_paid_by_the_second_and_a_minute_at_least(h: AwsHarness) -> None:
    client = official(h.served.url)
    machine = run(client)["InstanceId"]
    h.later(timedelta(seconds=20))
    h.machines()
    h.later(timedelta(seconds=3))
    client.terminate_instances(InstanceIds=[machine])
    assert h.billed(machine) / MICRO == pytest.approx(0.4123 / 60 + 35 * 0.08 / 720 * 23 / 3600, rel=0.01)


def test_a_price_above_the_cap_ends_the_machine_and_below_it_is_paid(h: AwsHarness) -> None:
    client = official(h.served.url)
    options = {"MarketType": "spot", "SpotOptions": {"MaxPrice": "0.6"}}
    machine = run(client, InstanceMarketOptions=options)["InstanceId"]
    h.later(timedelta(minutes=1))
    h.cloud.advance()
    h.cloud.set_price("g5.xlarge:us-east-1a", "0.55")
    assert h.machines()[0].price == 550_000
    h.cloud.set_price("g5.xlarge:us-east-1a", "0.65")
    (request,) = client.describe_spot_instance_requests()["SpotInstanceRequests"]
    assert request["Status"]["Code"] == "instance-terminated-by-price"
    assert h.cloud.instances[machine].phase is Phase.SHUTTING_DOWN


def test_user_data_runs_as_a_process_and_shutting_down_inside_ends_the_machine(h: AwsHarness) -> None:
    client = official(h.served.url)
    machine = run(client, UserData="#!/bin/sh\necho hello from $0\nshutdown -h now\n")["InstanceId"]
    h.later(timedelta(minutes=1))
    h.cloud.advance()

    def ended() -> bool:
        h.cloud.advance()
        return h.cloud.instances[machine].phase is Phase.SHUTTING_DOWN

    until(ended)
    reason = h.cloud.instances[machine].reason
    assert reason is not None
    assert reason[0] == "Client.InstanceInitiatedShutdown"
    assert h.cloud.machines.console(machine, lines=5)[0].startswith("hello from")


def test_every_answer_that_is_not_used_by_the_provider_is_understood_as_well(h: AwsHarness) -> None:
    client = official(h.served.url)
    assert {z["ZoneId"] for z in client.describe_availability_zones()["AvailabilityZones"]} == {
        "use1-az6",
        "use1-az1",
        "use1-az2",
    }
    assert [r["RegionName"] for r in client.describe_regions()["Regions"]] == ["us-east-1", "us-west-2"]
    few = client.get_spot_placement_scores(TargetCapacity=1, InstanceTypes=["g5.xlarge"])["SpotPlacementScores"]
    assert {row["Score"] for row in few} == {1}
    types = ["g5.xlarge", "g6e.xlarge", "g4dn.xlarge"]
    by_region = client.get_spot_placement_scores(TargetCapacity=1, InstanceTypes=types)["SpotPlacementScores"]
    assert [(row["Region"], row["Score"]) for row in by_region] == [("us-east-1", 9), ("us-west-2", 9)]
    one = {"TargetCapacity": 1, "InstanceTypes": types, "SingleAvailabilityZone": True, "RegionNames": ["us-east-1"]}
    by_zone = client.get_spot_placement_scores(**one)["SpotPlacementScores"]
    assert [(row["AvailabilityZoneId"], row["Score"]) for row in by_zone] == [
        ("use1-az6", 9),
        ("use1-az1", 8),
        ("use1-az2", 7),
    ]
