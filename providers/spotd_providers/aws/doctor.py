"""The checks of `spotctl doctor` at AWS, one line for each finding."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any, Final

from spotd_providers.aws.answers import AUTH, ON_DEMAND_QUOTAS, QUOTA, SPOT_QUOTAS, Optional, contract_errors
from spotd_providers.aws.offers import state_of
from spotd_providers.aws.prices import TABLE_DATE, TABLE_REGION
from spotd_providers.aws.region import MachineImage, Region
from spotd_providers.aws.sdk import AwsRefused, AwsSettings, Sdk
from spotd_providers.aws.wire import INSTALL_TAG, KEY_TAG, NODES_TAG, WHO, AwsInstanceRow, VolumeRow
from spotd_providers.contract.errors import AuthFailed, Unavailable
from spotd_providers.contract.provider import Services
from spotd_providers.contract.values import (
    MICRO,
    AttemptKey,
    CheckLine,
    InstallId,
    InstanceState,
    LaunchRequest,
    Market,
)
from spotd_providers.kit.calls import CLOCK_HINT, clock_line, rejected
from spotd_providers.kit.http import AnswerLost
from spotd_providers.kit.shapes import readable_rows, row_or_none
from spotd_providers.kit.template import Check
from spotd_providers.kit.template import examine as examine_account
from spotd_providers.kit.text import key_of
from spotd_providers.kit.vm_boot import DockerRun, boot_script

# The script of a machine's first boot: `kit/vm_boot.py`, and what is EC2's own before the machine ends.
#
# As its shutdown behaviour is `terminate`, a machine that shuts itself down costs nothing from then on. One that EC2 is
# about to take waits for that: in its first hour it is free if EC2 ends it, and not if it ends itself a minute earlier.


USER_DATA_BYTES_MAX: Final = 16_384
SCRIPT_BYTES_MAX: Final = 13_600
_METADATA: Final = """imds=${AWS_EC2_METADATA_SERVICE_ENDPOINT:-http://169.254.169.254}
meta() {
  token=$(curl -s -m 2 -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' "$imds/latest/api/token")
  curl -sf -m 2 -H "X-aws-ec2-metadata-token: $token" "$imds/latest/meta-data/$1"
}
"""
_PLACE: Final = """n=0
until SPOTD_NODE_RANK=$(meta ami-launch-index) && SPOTD_NODE_ADDRESS=$(meta local-ipv4); do
  n=$((n + 1))
  [ "$n" -ge 60 ] && { echo "spotd: this machine does not learn which of several it is"; shutdown -h now; exit 1; }
  sleep 2
done
export SPOTD_NODE_RANK SPOTD_NODE_ADDRESS
efa=$([ ! -d /dev/infiniband ] || echo --device /dev/infiniband --ulimit memlock=-1)
"""
_BEFORE_END: Final = "meta spot/instance-action && sleep 150\n"


def user_data(*, image: str, start_script: str, container: str, has_gpu: bool = True, nodes: int = 1) -> str:
    """Build the script for `UserData`. Each of several machines learns its place from EC2's metadata.

    Raises:
        ValueError: the image is no image name, or everything together is beyond EC2's limit.
    """
    return boot_script(
        image=image,
        start_script=start_script,
        container=container,
        has_gpu=has_gpu,
        beside=_METADATA + (_PLACE if nodes > 1 else ""),
        before_end=_BEFORE_END,
        bytes_max=USER_DATA_BYTES_MAX,
        docker=DockerRun(flags=" -e SPOTD_NODE_RANK -e SPOTD_NODE_ADDRESS $efa" if nodes > 1 else ""),
    )


# The request that buys one machine, or several at once, and its answer.


TOKEN_CHARS_MAX: Final = 64
TAG_CHARS_MAX: Final = 256
TAGGED: Final = ("instance", "volume", "network-interface")
MAX_PRICE_MICRO_USD_MIN: Final = 1_001


def client_token(key: AttemptKey, nodes: int = 1) -> str:
    """Return the idempotency token of a launch: the key, or its hash if the key is too long, and of several how many.

    Every machine shows it from the first moment, before its tags.
    """
    mark = f"/{nodes}" if nodes > 1 else ""
    if len(key) + len(mark) <= TOKEN_CHARS_MAX:
        return f"{key}{mark}"
    return hashlib.sha256(key.encode()).hexdigest()[: TOKEN_CHARS_MAX - len(mark)] + mark


def run_parameters(
    request: LaunchRequest, image: MachineImage, subnet: str, settings: AwsSettings, beside: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the parameters of RunInstances for this request; `beside` are those of several machines.

    Tags are given with the launch, so that no moment exists in which the machine is orphaned. The root disk is the
    job's disk on top of what the machine image itself takes.

    Raises:
        RequestRejected: it can not be asked for.
    """
    offer = request.offer
    try:
        script = user_data(
            image=request.image,
            start_script=request.start_script,
            container=settings.container,
            has_gpu=offer.gpu_count > 0,
            nodes=offer.nodes,
        )
    except ValueError as exc:
        raise rejected(WHO, "image" if "image" in str(exc) else "start_script", str(exc)) from exc
    disk = {
        "VolumeSize": image.disk_gb + request.disk_gb,
        "VolumeType": "gp3",
        "Throughput": settings.volume_mb_per_s,
        "DeleteOnTermination": True,
    }
    spot = offer.market is Market.SPOT
    parameters: dict[str, Any] = {
        "ImageId": image.image_id,
        "InstanceType": offer.extra["type"],
        # As many as are asked for, or none at all.
        "MinCount": offer.nodes,
        "MaxCount": offer.nodes,
        "ClientToken": client_token(request.key, offer.nodes),
        "UserData": script,
        "InstanceInitiatedShutdownBehavior": "terminate",
        # A container on a bridge network is one hop further from the metadata service.
        "MetadataOptions": {
            "HttpTokens": "required",
            "HttpPutResponseHopLimit": 2,
            "InstanceMetadataTags": "disabled",
        },
        "BlockDeviceMappings": [
            {"DeviceName": image.root_device, "Ebs": disk},
            # The image may say that its other disks outlive the machine, and cost for ever.
            *({"DeviceName": name, "Ebs": {"DeleteOnTermination": True}} for name in image.other_devices),
        ],
        "TagSpecifications": tag_specifications(request.install, str(request.key), spot=spot, nodes=offer.nodes),
    }
    if "NetworkInterfaces" not in beside:
        parameters["SubnetId"] = subnet
        if settings.security_groups:
            parameters["SecurityGroupIds"] = list(settings.security_groups)
    parameters |= beside
    if spot:
        price_max = request.price_max // offer.nodes
        if price_max < MAX_PRICE_MICRO_USD_MIN:
            raise rejected(WHO, "price_max", "AWS takes no spot price of $0.001 or less")
        capped = {"MaxPrice": f"{price_max / MICRO:.6f}"} if settings.max_price == "ceiling" else {}
        parameters["InstanceMarketOptions"] = {
            "MarketType": "spot",
            "SpotOptions": {
                "SpotInstanceType": "one-time",
                "InstanceInterruptionBehavior": "terminate",
                **capped,
            },
        }
    return parameters


def tags_of(install: InstallId) -> list[dict[str, str]]:
    """Build the tag of whatever this install makes."""
    return [{"Key": INSTALL_TAG, "Value": str(install)}]


def tag_specifications(install: InstallId, key: str, *, spot: bool, nodes: int = 1) -> list[dict[str, Any]]:
    """Build our tags for everything that a launch makes; the least policy allows no launch without them."""
    tags = [*tags_of(install), {"Key": KEY_TAG, "Value": key}]
    tags += [{"Key": NODES_TAG, "Value": str(nodes)}] if nodes > 1 else []
    kinds = (*TAGGED, "spot-instances-request") if spot else TAGGED
    return [{"ResourceType": kind, "Tags": tags} for kind in kinds]


# Disks that outlived their machines: found by our tags in every region, and deleted.
#
# Every disk of a launch is to go with its machine. One may stay all the same: that was changed on the running
# machine, or AWS failed half-way through a launch. It would cost for ever without being noticed. What carries
# our tags, hangs on no machine for a while, and whose attempt has no machine any more, is deleted.


SWEEP_EVERY: Final = timedelta(hours=1)
AGE_MIN: Final = timedelta(minutes=15)
"""A disk is on no machine for a moment while its machine is being made."""


class Volumes:
    """The disks of one region.

    Attributes:
        left: the last sweep, with the names of what it found and may not judge.
    """

    def __init__(self, region: Region, sdk: Sdk, services: Services) -> None:
        self._region = region
        self._sdk = sdk
        self._services = services
        self.left = Optional[Sequence[str]](services, self._sweep, without=(), fresh=SWEEP_EVERY, kept=SWEEP_EVERY)

    async def sweep(self) -> None:
        """Delete what is left over if a sweep is due; a failure is logged once."""
        before = self.left.last_error
        await self.left.get()
        if self.left.last_error not in ("", before):
            self._services.log.warning("aws.volumes_not_swept", region=self._region.name, detail=self.left.last_error)

    async def strays(self) -> Sequence[VolumeRow]:
        """Return our disks that are attached to no machine.

        Raises:
            ProviderError: AWS does not list them.
        """
        now = self._services.clock.now()
        return [
            row
            for row in readable_rows(VolumeRow, await self._region.volume_rows())
            if row.State == "available"
            and row.tags.get(INSTALL_TAG) == self._services.install
            and now - row.CreateTime.astimezone(UTC) >= AGE_MIN
        ]

    async def _sweep(self) -> Sequence[str]:
        left = []
        for row in await self.strays():
            key = key_of(row.tags.get(KEY_TAG), self._services.install)
            if key is None or await self._has_machine(key):
                left.append(row.VolumeId)
                continue
            with contract_errors("delete_volume", self._services.rng, unless="InvalidVolume.NotFound"):
                await self._sdk.call("ec2", self._region.name, "delete_volume", VolumeId=row.VolumeId)
            self._services.log.warning(
                "aws.stray_volume_deleted", volume=row.VolumeId, region=self._region.name, gb=row.Size, key=key
            )
        return left

    async def _has_machine(self, key: AttemptKey) -> bool:
        rows = [row_or_none(AwsInstanceRow, raw) for raw in await self._region.machine_rows(f"tag:{KEY_TAG}", str(key))]
        return any(row is None or state_of(row) is not InstanceState.GONE for row in rows)


def summary(strays: Sequence[VolumeRow]) -> str:
    shown = ", ".join(row.VolumeId for row in strays[:3]) + (", ..." if len(strays) > 3 else "")
    return f"{len(strays)} disks of ended machines are left ({shown}), {sum(row.Size for row in strays)} GB"


KEY_HINT: Final = "set api_key to ACCESS_KEY_ID:SECRET_ACCESS_KEY, or configure AWS as its own tools want it"
POLICY_HINT: Final = "attach the least policy of docs/reference/providers.md to this user or role"
DISKS_HINT: Final = "spotd deletes them within an hour where the policy lets it; otherwise: aws ec2 delete-volume"
QUOTA_HINT: Final = (
    "ask AWS for spot vCPUs of the G or P family in this region (Service Quotas, EC2); a new account has 0"
)


async def identity(sdk: Sdk, regions: Sequence[Region], services: Services) -> Mapping[str, Any]:
    """Return AWS's answer about the key.

    Raises:
        AuthFailed, Unavailable, RateLimited: as every call.
    """
    with contract_errors("get_caller_identity", services.rng):
        return await sdk.call("sts", regions[0].name, "get_caller_identity")


async def examine(
    sdk: Sdk,
    regions: Sequence[Region],
    volumes: Mapping[str, Volumes],
    settings: AwsSettings,
    services: Services,
) -> Sequence[CheckLine]:
    """Check key and clock, then each region. A failed check is a line, never an exception."""

    async def greet() -> tuple[Mapping[str, Any], str]:
        answer = await identity(sdk, regions, services)
        if not answer.get("Arn"):
            raise Unavailable("AWS's answer does not say who this key is")
        return answer, str(answer["Arn"])

    return await examine_account(
        greet,
        lambda found: (
            CheckLine(name="balance", ok=True, detail="AWS bills afterwards, so none can run out"),
            *_clock(found[0], services.clock.now()),
            *(one for region in regions for one in _checks(sdk, region, volumes[region.name], settings, services)),
        ),
        accepted=lambda found: found[1],
        hint=KEY_HINT,
    )


def _checks(sdk: Sdk, region: Region, volumes: Volumes, settings: AwsSettings, services: Services) -> list[Check]:
    async def market() -> str:
        kinds, rows = await region.kinds(), await region.price_rows()
        if not kinds.usable:
            raise Unavailable("no instance type with a usable GPU matches instance_types")
        return f"{len(kinds.usable)} GPU types, {len(rows)} spot prices"

    async def prices() -> str:
        try:
            return f"{len(await region.price_list.ask_now())} on-demand prices from AWS's list"
        except AuthFailed:
            if region.name != TABLE_REGION:
                raise
            return f"on-demand prices of {TABLE_DATE} are built in, AWS's list may not be read (pricing:GetProducts)"

    async def machines() -> str:
        await region.machine_rows(f"tag:{INSTALL_TAG}", str(services.install))
        await region.spot_request_rows(f"tag:{INSTALL_TAG}", str(services.install))
        return "can list machines and spot requests"

    async def disks() -> str:
        strays = await volumes.strays()
        if strays:
            raise Unavailable(summary(strays))
        return "no disk is left of a machine that has ended"

    async def network() -> str:
        subnets = await region.subnets()
        if not subnets:
            raise Unavailable("there is no default subnet with free addresses; create a default VPC, or set subnets")
        return f"subnets in {len(subnets)} zones"

    async def gangs() -> str:
        # Without that, a job for one machine lacks nothing: no fault of the setup.
        grounds = await region.grounds.ask_now()
        return region.gang_fault() or f"machines of one job reach each other in {len(grounds)} subnets"

    async def launch() -> str:
        return await _dry_run(sdk, region, settings, services)

    async def quota() -> str:
        spot = {name: await _quota(region, code) for name, code in SPOT_QUOTAS.items()}
        on_demand = {name: await _quota(region, code) for name, code in ON_DEMAND_QUOTAS.items()}
        text = f"vCPUs on spot: {_listed(spot)}; on-demand: {_listed(on_demand)}"
        if not any(spot.values()):
            raise Unavailable(f"no spot machines with GPUs are allowed: {text}")
        return text

    checks = (
        ("market", market, POLICY_HINT),
        ("prices", prices, POLICY_HINT),
        ("machines", machines, POLICY_HINT),
        ("disks", disks, DISKS_HINT),
        ("network", network, POLICY_HINT),
        ("gangs", gangs, POLICY_HINT),
        ("launch", launch, POLICY_HINT),
        ("quota", quota, QUOTA_HINT),
    )
    return [Check(name=f"{region.name} {name}", ask=ask, hint=hint, refused=POLICY_HINT) for name, ask, hint in checks]


async def _dry_run(sdk: Sdk, region: Region, settings: AwsSettings, services: Services) -> str:
    image, subnets, kinds = await region.image(), await region.subnets(), await region.kinds()
    pools = [pool for pool in await region.pools() if pool[0] in kinds.usable and pool[1] in subnets]
    if not pools:
        raise Unavailable("no zone with a subnet sells a GPU type")
    kind, zone = min(pools)
    groups = {"SecurityGroupIds": list(settings.security_groups)} if settings.security_groups else {}
    try:
        await sdk.call(
            "ec2",
            region.name,
            "run_instances",
            DryRun=True,
            ImageId=image.image_id,
            InstanceType=kind,
            MinCount=1,
            MaxCount=1,
            SubnetId=subnets[zone],
            InstanceMarketOptions={"MarketType": "spot"},
            TagSpecifications=tag_specifications(services.install, "dry-run", spot=True),
            **groups,
        )
    except AwsRefused as exc:
        if exc.code == "DryRunOperation":
            return f"may launch {image.image_id}"
        if exc.code in AUTH or exc.code in QUOTA:
            raise AuthFailed(f"AWS does not allow a launch: {exc}") from None
        raise Unavailable(f"a launch would fail: {exc}") from None
    except AnswerLost as exc:
        raise Unavailable(str(exc)) from None
    raise Unavailable("AWS did not answer a dry run as one")


def _listed(quotas: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.0f}" for name, value in quotas.items())


async def _quota(region: Region, code: str) -> float:
    answer = await region.ask("service-quotas", "get_service_quota", ServiceCode="ec2", QuotaCode=code)
    quota = answer.get("Quota")
    value = quota.get("Value") if isinstance(quota, Mapping) else None
    if not isinstance(value, int | float):
        raise Unavailable("AWS's answer holds no quota")
    return float(value)


def _clock(answer: Mapping[str, Any], now: datetime) -> list[CheckLine]:
    headers = (answer.get("ResponseMetadata") or {}).get("HTTPHeaders") or {}
    try:
        theirs = parsedate_to_datetime(str(headers.get("date", ""))).astimezone(UTC)
    except (ValueError, TypeError):
        return []
    # The header holds whole seconds: their clock shows some instant of the second that begins with it.
    skew = max(theirs - now, now - theirs - timedelta(seconds=1), timedelta(0))
    return [clock_line(skew, who="AWS", hint=f"{CLOCK_HINT}; AWS refuses requests that are five minutes off")]
