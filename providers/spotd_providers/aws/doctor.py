"""The checks of `spotctl doctor` at AWS, one line for each finding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any, Final

from spotd_providers.aws.answers import AUTH, QUOTA, contract_errors
from spotd_providers.aws.launching import tag_specifications
from spotd_providers.aws.ondemand import TABLE_DATE, TABLE_REGION
from spotd_providers.aws.quotas import ON_DEMAND_QUOTAS, SPOT_QUOTAS
from spotd_providers.aws.region import Region
from spotd_providers.aws.sdk import AwsRefused, Sdk
from spotd_providers.aws.settings import AwsSettings
from spotd_providers.aws.volumes import Volumes, summary
from spotd_providers.aws.wire import INSTALL_TAG
from spotd_providers.contract.errors import AuthFailed, Unavailable
from spotd_providers.contract.provider import Services
from spotd_providers.contract.values import CheckLine
from spotd_providers.kit.checks import CLOCK_HINT, check_line, clock_line
from spotd_providers.kit.http import AnswerLost

KEY_HINT: Final = "set api_key to ACCESS_KEY_ID:SECRET_ACCESS_KEY, or configure AWS as its own tools want it"
POLICY_HINT: Final = "attach the policy of docs/providers/aws.md to this user or role"
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
    lines: list[CheckLine] = []
    said: list[Mapping[str, Any]] = []

    async def key() -> str:
        answer = await identity(sdk, regions, services)
        if not answer.get("Arn"):
            raise Unavailable("AWS's answer does not say who this key is")
        said.append(answer)
        return str(answer["Arn"])

    lines.append(await check_line("key", key, hint=KEY_HINT))
    if not said:
        return tuple(lines)  # whatever is wrong would only be found in every region, each after its time-out
    lines.append(CheckLine(name="balance", ok=True, detail="AWS bills afterwards, so none can run out"))
    lines.extend(_clock(said[0], services.clock.now()))
    for region in regions:
        lines.extend(await _region_lines(sdk, region, volumes[region.name], settings, services))
    return tuple(lines)


async def _region_lines(
    sdk: Sdk, region: Region, volumes: Volumes, settings: AwsSettings, services: Services
) -> list[CheckLine]:
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
        ("launch", launch, POLICY_HINT),
        ("quota", quota, QUOTA_HINT),
    )
    return [
        await check_line(f"{region.name} {name}", ask, hint=hint, refused=POLICY_HINT) for name, ask, hint in checks
    ]


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
