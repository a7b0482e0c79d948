"""EC2's actions over an `Ec2Cloud`: parameters in, the fields of the answer out."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import Any, Final

from spotd_providers.contract.values import MicroUsdPerHour, micro_usd
from tests.fakes.aws.catalog import Zone
from tests.fakes.aws.cloud import Ec2Cloud
from tests.fakes.aws.records import FakeInstance, tag_set
from tests.fakes.aws.wire import Params, Refusal, instant, iso, page

USER_DATA_BYTES_MAX: Final = 16_384
HISTORY_MAX: Final = timedelta(days=90)
IMAGE_GB: Final = 35
AMIS: Final = {
    region: f"ami-0{hashlib.sha256(region.encode()).hexdigest()[:16]}" for region in ("us-east-1", "us-west-2")
}

Action = Callable[[Ec2Cloud, str, Params], Mapping[str, Any]]


def spot_price_history(cloud: Ec2Cloud, region: str, params: Params) -> Mapping[str, Any]:
    """Every change in the range, and of each pool the last one before it: the price in force at its start."""
    now = cloud.clock.now()
    start = max(instant(params.get("StartTime")) or now - HISTORY_MAX, now - HISTORY_MAX)
    end = instant(params.get("EndTime")) or now
    kinds, products = params.many("InstanceType"), params.many("ProductDescription")
    zone_wanted, filters = params.get("AvailabilityZone"), params.filters()
    rows = []
    for pool, changes in cloud.prices.items():
        kind, _, zone_name = pool.partition(":")
        zone = cloud.zones[zone_name]
        if zone.region != region or (kinds and kind not in kinds) or (zone_wanted and zone_name != zone_wanted):
            continue
        before = [change for change in changes if change[0] <= start][-1:]
        for at, usd in [*before, *(change for change in changes if start < change[0] <= end)]:
            for product, factor in (("Linux/UNIX", 1.0), ("Windows", 1.9)):
                text = usd if factor == 1.0 else f"{float(usd) * factor:.6f}"
                row = {
                    "instanceType": kind,
                    "productDescription": product,
                    "spotPrice": cloud.quirks.raw_prices.get(pool, text) if factor == 1.0 else text,
                    "timestamp": iso(at),
                    "availabilityZone": zone.name,
                    "availabilityZoneId": zone.zone_id,
                }
                asked = [("product-description", product), ("instance-type", kind), ("availability-zone", zone.name)]
                if (not products or product in products) and _passes(filters, dict(asked)):
                    rows.append(row)
    rows.sort(key=lambda row: row["timestamp"], reverse=True)
    return _paged(cloud, params, "spotPriceHistorySet", rows)


def instance_types(cloud: Ec2Cloud, region: str, params: Params) -> Mapping[str, Any]:
    sold = {pool.partition(":")[0] for pool in cloud.offered if cloud.zones[pool.partition(":")[2]].region == region}
    wanted, filters = params.many("InstanceType"), params.filters()
    rows = [
        kind.row()
        for kind in cloud.kinds.values()
        if kind.name in sold
        and (not wanted or kind.name in wanted)
        and _passes(filters, {"instance-type": kind.name, "supported-usage-class": "spot"})
    ]
    return _paged(cloud, params, "instanceTypeSet", rows)


def type_offerings(cloud: Ec2Cloud, region: str, params: Params) -> Mapping[str, Any]:
    by_id = params.get("LocationType") == "availability-zone-id"
    rows = []
    for pool in sorted(cloud.offered):
        kind, _, zone_name = pool.partition(":")
        zone = cloud.zones[zone_name]
        location = zone.zone_id if by_id else zone.name
        if zone.region == region and _passes(params.filters(), {"instance-type": kind, "location": location}):
            rows.append(
                {"instanceType": kind, "locationType": params.get("LocationType") or "region", "location": location}
            )
    return _paged(cloud, params, "instanceTypeOfferingSet", rows)


def subnets(cloud: Ec2Cloud, region: str, params: Params) -> Mapping[str, Any]:
    rows = []
    own = [(zone, subnet) for zone in cloud.zones.values() for subnet in zone.subnets if zone.region == region]
    for zone, subnet in own:
        default = subnet == zone.subnet
        known = {"default-for-az": str(default).lower(), "subnet-id": subnet, "availability-zone": zone.name}
        if _passes(params.filters(), known):
            if params.many("SubnetId") and subnet not in params.many("SubnetId"):
                continue
            rows.append(
                {
                    "subnetId": subnet,
                    "availabilityZone": zone.name,
                    "availabilityZoneId": zone.zone_id,
                    "availableIpAddressCount": 4091 if default else 251,
                    "defaultForAz": default,
                    "mapPublicIpOnLaunch": default,
                    "vpcId": zone.vpc,
                    "cidrBlock": "172.31.0.0/20" if default else "172.31.96.0/24",
                    "state": "available",
                }
            )
    return _paged(cloud, params, "subnetSet", rows)


def images(cloud: Ec2Cloud, region: str, params: Params) -> Mapping[str, Any]:
    for image in params.many("ImageId"):
        if image != AMIS.get(region):
            raise Refusal("InvalidAMIID.NotFound", f"The image id '[{image}]' does not exist")
    row = {
        "imageId": AMIS.get(region),
        "imageState": "available",
        "architecture": "x86_64",
        "rootDeviceName": "/dev/xvda",
        "blockDeviceMapping": [
            {"deviceName": name, "ebs": {"volumeSize": gb, "volumeType": "gp3", "deleteOnTermination": goes_along}}
            for name, (gb, goes_along) in _image_disks(cloud).items()
        ],
    }
    return {"imagesSet": [row]}


def _image_disks(cloud: Ec2Cloud) -> dict[str, tuple[int, bool]]:
    return {"/dev/xvda": (IMAGE_GB, True), **cloud.quirks.image_disks}


def _make_disks(cloud: Ec2Cloud, instance: FakeInstance, params: Params) -> None:
    """The image's disks with what the launch says of each, and those that only the launch names."""
    disks = _image_disks(cloud)
    number = 1
    while name := params.get(f"BlockDeviceMapping.{number}.DeviceName"):
        ebs = f"BlockDeviceMapping.{number}.Ebs"
        gb, goes_along = disks.get(name, (8, False))
        said = params.get(f"{ebs}.DeleteOnTermination")
        disks[name] = (int(params.get(f"{ebs}.VolumeSize") or gb), said == "true" if said else goes_along)
        number += 1
    for gb, goes_along in disks.values():
        cloud.volumes.add(
            instance.zone,
            gb,
            params.tags("volume"),
            instance.launched_at,
            instance_id=instance.instance_id,
            goes_along=goes_along,
        )


def describe_volumes(cloud: Ec2Cloud, region: str, params: Params) -> Mapping[str, Any]:
    rows = []
    for volume in cloud.volumes.all.values():
        row = volume.row()
        known = {f"tag:{k}": v for k, v in volume.tags.items()} | {"status": row["status"]}
        if volume.zone.region == region and _passes(params.filters(), known):
            rows.append(row)
    return _paged(cloud, params, "volumeSet", rows)


def delete_volume(cloud: Ec2Cloud, region: str, params: Params) -> Mapping[str, Any]:
    cloud.volumes.delete(params.get("VolumeId"), region)
    return {"return": True}


def zones(cloud: Ec2Cloud, region: str, _: Params) -> Mapping[str, Any]:
    own = [zone for zone in cloud.zones.values() if zone.region == region]
    rows = [{"zoneName": z.name, "zoneId": z.zone_id, "regionName": region, "zoneState": "available"} for z in own]
    return {"availabilityZoneInfo": rows}


def regions(cloud: Ec2Cloud, _: str, __: Params) -> Mapping[str, Any]:
    names = sorted({zone.region for zone in cloud.zones.values()})
    return {"regionInfo": [{"regionName": name, "regionEndpoint": f"ec2.{name}.amazonaws.com"} for name in names]}


def run_instances(cloud: Ec2Cloud, region: str, params: Params) -> Mapping[str, Any]:
    """As many machines as are asked for or none, at most once per token and zone."""
    kind = cloud.kinds.get(params.get("InstanceType"))
    if kind is None:
        raise Refusal("InvalidInstanceType", f"Invalid value '{params.get('InstanceType')}' for InstanceType.")
    image = params.get("ImageId")
    if image != AMIS.get(region):
        raise Refusal("InvalidAMIID.NotFound", f"The image id '[{image}]' does not exist")
    count_min, count_max = int(params.get("MinCount")), int(params.get("MaxCount"))
    if not 1 <= count_min <= count_max:
        raise Refusal("InvalidParameterValue", "MinCount and MaxCount are no range")
    subnet = cloud.networks.subnet_of(kind, params)
    zone, named = _zone_of(cloud, region, params, subnet)
    group = params.get("Placement.GroupName")
    if group and (region, group) not in cloud.networks.placement_groups:
        raise Refusal("InvalidPlacementGroup.Unknown", f"The Placement Group '{group}' is unknown.")
    user_data = _user_data(params.get("UserData"))
    volume_gb = int(params.get("BlockDeviceMapping.1.Ebs.VolumeSize") or IMAGE_GB)
    if volume_gb < IMAGE_GB:
        raise Refusal("InvalidBlockDeviceMapping", f"Volume of size {volume_gb}GB is smaller than snapshot")
    if params.flag("DryRun"):
        raise Refusal("DryRunOperation", "Request would have succeeded, but DryRun flag is set.", 412)
    token = params.get("ClientToken")
    if len(token) > 64:
        raise Refusal("InvalidParameterValue", "Value for parameter clientToken is too long")
    scope = (f"{region}:{zone.name if named else ''}", token)
    if token and scope in cloud.tokens:
        pinned, instance_ids = cloud.tokens[scope]
        if pinned != params.fingerprint():
            raise Refusal("IdempotentParameterMismatch", "The client token was used with other parameters.")
        return _reservation(cloud, [cloud.instances[instance_id] for instance_id in instance_ids])
    if (subnet or zone.subnet) in cloud.quirks.full_subnets:
        text = "There are not enough free addresses in the subnet to satisfy the requested number of instances."
        raise Refusal("InsufficientFreeAddressesInSubnet", text)
    max_price = params.get("InstanceMarketOptions.SpotOptions.MaxPrice")
    launched = cloud.launch(
        kind,
        zone,
        image=image,
        token=token,
        tags=params.tags("instance"),
        request_tags=params.tags("spot-instances-request"),
        user_data=user_data,
        volume_gb=volume_gb,
        volume_mb_per_s=int(params.get("BlockDeviceMapping.1.Ebs.Throughput") or 125),
        spot=params.get("InstanceMarketOptions.MarketType") == "spot",
        max_price=MicroUsdPerHour(micro_usd(max_price)) if max_price else None,
        behaviour=params.get("InstanceInitiatedShutdownBehavior") or "stop",
        count_min=count_min,
        count_max=count_max,
        placement_group=group,
    )
    for instance in launched:
        _make_disks(cloud, instance, params)
    if token:
        cloud.tokens[scope] = (params.fingerprint(), [instance.instance_id for instance in launched])
    return _reservation(cloud, launched)


def describe_instances(cloud: Ec2Cloud, region: str, params: Params) -> Mapping[str, Any]:
    wanted = params.many("InstanceId")
    shown = {instance.instance_id: instance for instance in cloud.visible(region)}
    for instance_id in wanted:
        if instance_id not in shown:
            raise Refusal("InvalidInstanceID.NotFound", f"The instance ID '{instance_id}' does not exist")
    now = cloud.clock.now()
    rows: dict[str, dict[str, Any]] = {}
    for instance in shown.values():
        tagged = instance.launched_at + cloud.quirks.tag_lag <= now
        known = {f"tag:{k}": v for k, v in instance.tags.items()} if tagged else {}
        known |= {
            "instance-id": instance.instance_id,
            "reservation-id": instance.reservation,
            "client-token": instance.token,
            "instance-state-name": instance.phase.value[0],
            "instance-lifecycle": "spot" if instance.spot else "normal",
        }
        if (not wanted or instance.instance_id in wanted) and _passes(params.filters(), known):
            edits = cloud.quirks.edit_instance.get(instance.instance_id, {})
            own = {"reservationId": instance.reservation, "ownerId": "123456789012", "instancesSet": []}
            row = rows.setdefault(instance.reservation, own)
            row["instancesSet"].append(instance.row(edits, with_tags=tagged))
    return _paged(cloud, params, "reservationSet", list(rows.values()))


def security_groups(cloud: Ec2Cloud, region: str, params: Params) -> Mapping[str, Any]:
    vpcs = sorted({zone.vpc for zone in cloud.zones.values() if zone.region == region})
    rows = cloud.networks.security_groups(vpcs)
    wanted = params.many("GroupId")
    if unknown := set(wanted) - {row["groupId"] for row in rows}:
        raise Refusal("InvalidGroup.NotFound", f"The security group '{min(unknown)}' does not exist")
    found = [
        row
        for row in rows
        if (not wanted or row["groupId"] in wanted)
        and _passes(params.filters(), {"vpc-id": row["vpcId"], "group-name": row["groupName"]})
    ]
    return _paged(cloud, params, "securityGroupInfo", found)


def create_placement_group(cloud: Ec2Cloud, region: str, params: Params) -> Mapping[str, Any]:
    name = params.get("GroupName")
    if (region, name) in cloud.networks.placement_groups:
        raise Refusal("InvalidPlacementGroup.Duplicate", f"The Placement Group '{name}' already exists.")
    row = {
        "groupName": name,
        "groupId": f"pg-{len(cloud.networks.placement_groups):017x}",
        "state": "available",
        "strategy": params.get("Strategy"),
        "tagSet": tag_set(params.tags("placement-group")),
    }
    cloud.networks.placement_groups[region, name] = row
    return {"placementGroup": row}


def placement_groups(cloud: Ec2Cloud, region: str, params: Params) -> Mapping[str, Any]:
    own = [row for (where, _), row in cloud.networks.placement_groups.items() if where == region]
    return {"placementGroupSet": [row for row in own if _passes(params.filters(), {"group-name": row["groupName"]})]}


def terminate_instances(cloud: Ec2Cloud, region: str, params: Params) -> Mapping[str, Any]:
    ended = cloud.terminate(params.many("InstanceId"), region)
    rows = [
        {
            "instanceId": instance.instance_id,
            "currentState": instance.state(),
            "previousState": {"code": before.value[1], "name": before.value[0]},
        }
        for instance, before in ended
    ]
    return {"instancesSet": rows}


def spot_requests(cloud: Ec2Cloud, region: str, params: Params) -> Mapping[str, Any]:
    rows = []
    for instance in cloud.instances.values():
        if instance.spot is None or instance.zone.region != region:
            continue
        known = {f"tag:{k}": v for k, v in instance.spot.tags.items()}
        known |= {"status-code": instance.spot.code, "instance-id": instance.instance_id, "state": instance.spot.state}
        if _passes(params.filters(), known):
            rows.append({**instance.request_row(), **cloud.quirks.edit_request.get(instance.instance_id, {})})
    return _paged(cloud, params, "spotInstanceRequestSet", rows)


def console_output(cloud: Ec2Cloud, region: str, params: Params) -> Mapping[str, Any]:
    instance = cloud.instances.get(params.get("InstanceId"))
    if instance is None or instance.zone.region != region:
        raise Refusal("InvalidInstanceID.NotFound", f"The instance ID '{params.get('InstanceId')}' does not exist")
    text = "\n".join(cloud.machines.console(instance.instance_id, lines=1000))
    encoded = base64.b64encode(text.encode()).decode()
    return {"instanceId": instance.instance_id, "timestamp": iso(cloud.clock.now()), "output": encoded}


def placement_scores(cloud: Ec2Cloud, _: str, params: Params) -> Mapping[str, Any]:
    """Low for fewer than three types, as for real; otherwise each next zone of a region a point lower."""
    if params.get("MaxResults") and int(params.get("MaxResults")) < 10:
        raise Refusal("InvalidParameterValue", "Value for parameter MaxResults is below 10")
    good = len(set(params.many("InstanceType"))) >= 3
    best: dict[tuple[str, str | None], int] = {}
    places: dict[str, int] = {}
    for zone in cloud.zones.values():
        place = places[zone.region] = places.get(zone.region, -1) + 1
        score = cloud.quirks.scores.get(zone.zone_id, max(1, 9 - place)) if good else 1
        spot = (zone.region, zone.zone_id if params.flag("SingleAvailabilityZone") else None)
        if not params.many("RegionName") or zone.region in params.many("RegionName"):
            best[spot] = max(score, best.get(spot, 0))
    rows = [{"region": region, "availabilityZoneId": zone, "score": score} for (region, zone), score in best.items()]
    rows.sort(key=lambda row: -int(str(row["score"])))
    return _paged(cloud, params, "spotPlacementScoreSet", rows[:10])


ACTIONS: Final[Mapping[str, Action]] = {
    "DescribeSpotPriceHistory": spot_price_history,
    "DescribeInstanceTypes": instance_types,
    "DescribeInstanceTypeOfferings": type_offerings,
    "DescribeSubnets": subnets,
    "DescribeImages": images,
    "DescribeAvailabilityZones": zones,
    "DescribeRegions": regions,
    "RunInstances": run_instances,
    "DescribeInstances": describe_instances,
    "TerminateInstances": terminate_instances,
    "DescribeSpotInstanceRequests": spot_requests,
    "GetConsoleOutput": console_output,
    "DescribeVolumes": describe_volumes,
    "DeleteVolume": delete_volume,
    "GetSpotPlacementScores": placement_scores,
    "DescribeSecurityGroups": security_groups,
    "DescribePlacementGroups": placement_groups,
    "CreatePlacementGroup": create_placement_group,
}


def _paged(cloud: Ec2Cloud, params: Params, name: str, rows: Sequence[Any]) -> dict[str, Any]:
    quirks = cloud.quirks
    shown, token = page(rows, params, rows_max=quirks.page_rows_max, last_token_empty=quirks.last_token_empty)
    return {name: shown, "nextToken": token}


def _passes(filters: Mapping[str, Sequence[str]], known: Mapping[str, str]) -> bool:
    """Whether every filter matches; one that is not known matches nothing, as for a missing tag."""
    return all(
        any(fnmatchcase(known[name], pattern) for pattern in patterns) if name in known else False
        for name, patterns in filters.items()
    )


def _reservation(cloud: Ec2Cloud, launched: Sequence[FakeInstance]) -> dict[str, Any]:
    edits = cloud.quirks.edit_instance
    return {
        "reservationId": launched[0].reservation,
        "ownerId": "123456789012",
        "instancesSet": [instance.row(edits.get(instance.instance_id, {})) for instance in launched],
    }


def _zone_of(cloud: Ec2Cloud, region: str, params: Params, subnet: str) -> tuple[Zone, bool]:
    own = [zone for zone in cloud.zones.values() if zone.region == region]
    name = params.get("Placement.AvailabilityZone")
    if subnet:
        found = [zone for zone in own if subnet in zone.subnets]
        if not found:
            raise Refusal("InvalidSubnetID.NotFound", f"The subnet ID '{subnet}' does not exist")
        return found[0], True
    if name:
        found = [zone for zone in own if zone.name == name]
        if not found:
            raise Refusal("InvalidParameterValue", f"Invalid availability zone: [{name}]")
        return found[0], True
    return own[0], False


def _user_data(encoded: str) -> str:
    try:
        raw = base64.b64decode(encoded, validate=True)
    except binascii.Error:
        raise Refusal("InvalidUserData.Malformed", "Invalid BASE64 encoding of user data.") from None
    if len(raw) > USER_DATA_BYTES_MAX:
        raise Refusal("InvalidParameterValue", f"User data is limited to {USER_DATA_BYTES_MAX} bytes")
    return raw.decode("utf-8", "replace")
