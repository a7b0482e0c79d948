"""The reads of one region, at a bounded pace and repeated on failure; what changes rarely is cached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from typing import Any, Final

from spotd_providers.aws.answers import FULL_FOR, Optional, contract_errors
from spotd_providers.aws.prices import AwsOnDemandPrices, endpoint_region, listed_prices, questions
from spotd_providers.aws.sdk import AwsSettings, Sdk
from spotd_providers.aws.wire import (
    INSTALL_TAG,
    Ground,
    Hardware,
    ImageRow,
    OfferingRow,
    SecurityGroupRow,
    SubnetRow,
    TypeRow,
    fault_of,
    ground_of,
    hardware,
    rows_of,
    scores_of,
    sets_of_types,
)
from spotd_providers.contract.errors import AuthFailed, ProviderError, RequestRejected, Unavailable
from spotd_providers.contract.provider import Services
from spotd_providers.contract.values import MicroUsdPerHour, Rejected
from spotd_providers.kit.calls import Kept, RequestPace, retry_read
from spotd_providers.kit.shapes import readable_rows, row_or_none

INTERVAL: Final = timedelta(seconds=0.4)
PAGES_MAX: Final = 400
PAGED_ROWS_MAX: Final = 100_000
"""Of one question: a region has some thousand pairs of a type and a zone, each with a few products."""
MACHINE_ROWS_MAX: Final = 10_000
LINUX_PRODUCTS: Final = ("Linux/UNIX", "Linux/UNIX (Amazon VPC)")
Pool = tuple[str, str]
"""Instance type and zone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kinds:
    """The types of a region that can be offered, and why the others with GPUs are not."""

    usable: Mapping[str, Hardware]
    rejected: tuple[Rejected, ...]


IMAGE_GB: Final = 45
"""Of the image's own disk, until AWS has stated it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineImage:
    """A machine image: its root disk cannot be smaller than `disk_gb`, and it may have other disks."""

    image_id: str
    root_device: str
    disk_gb: int
    other_devices: tuple[str, ...] = ()


class Region:
    """Reads of one region; the launch and the end of machines go through `Sdk` directly."""

    def __init__(self, name: str, sdk: Sdk, settings: AwsSettings, services: Services, pace: RequestPace) -> None:
        self.name = name
        self._sdk = sdk
        self._settings = settings
        self._services = services
        self._pace = pace
        self.kinds = Kept(services.clock, timedelta(hours=6), self._ask_kinds).get
        """The instance types that this region sells, of those to consider."""
        self.pools = Kept(services.clock, timedelta(hours=6), self._ask_pools).get
        """Which of them exist in which zone."""
        self._subnets = Kept(services.clock, timedelta(hours=1), self._ask_subnets)
        self._full_until: dict[str, datetime] = {}
        self.image = Kept(services.clock, timedelta(days=1), self._ask_image).get
        """The machine image that machines boot from; `RequestRejected` where the settings name none that exists."""
        self.price_list = Optional[Mapping[str, MicroUsdPerHour]](
            services, self._ask_price_list, without={}, fresh=timedelta(days=1), kept=timedelta(days=14)
        )
        """AWS's list of on-demand prices: it changes a few times a year, and may not be ours to read."""
        self.scores = Optional[Mapping[Pool, int]](
            services, self._ask_scores, without={}, fresh=timedelta(minutes=20), kept=timedelta(hours=1)
        )
        """How likely a spot launch is to succeed in each pool, where AWS says."""
        self.grounds = Optional[Mapping[str, Ground]](
            services, self._ask_grounds, without={}, fresh=timedelta(minutes=10), kept=timedelta(hours=1)
        )
        """Whether machines in each subnet reach each other, as their security groups say."""

    async def subnets(self) -> Mapping[str, str]:
        """Return each zone's subnet to launch in: of those not found full lately, the one with most free addresses."""
        now = self._services.clock.now()
        self._full_until = {name: until for name, until in self._full_until.items() if until > now}
        return {
            row.AvailabilityZone: row.SubnetId
            for row in await self._subnets.get()
            if row.SubnetId not in self._full_until
        }

    def subnet_is_full(self, subnet: str) -> None:
        """Avoid this subnet for a while, if its zone has another one."""
        self._full_until[subnet] = self._services.clock.now() + FULL_FOR

    def gang_fault(self) -> str:
        """Return why machines of this region do not reach each other; empty where they do, or nothing is known yet."""
        if self.grounds.is_refused:
            return f"in {self.name} {self.grounds.last_error}; allow ec2:DescribeSecurityGroups"
        return fault_of(self.grounds.known().values())

    async def image_gb(self) -> int:
        """Return the size of the image's own disk; a usual size where AWS does not state it, since a launch will."""
        try:
            return (await self.image()).disk_gb
        except ProviderError:
            return IMAGE_GB

    async def price_rows(self, pool: Pool | None = None, *, since: datetime | None = None) -> Sequence[Any]:
        """Return the rows of the spot prices in force, in every zone or for one pool; with `since` all from then on."""
        types = sorted((await self.kinds()).usable) if pool is None else [pool[0]]
        where = {} if pool is None else {"AvailabilityZone": pool[1]}
        # Without a start AWS sends 90 days of changes; from now on it is one row per type, zone and product.
        return await self._spot_prices(types, since or self._services.clock.now(), **where) if types else ()

    async def history_rows(self, instance_type: str, since: datetime) -> Sequence[Any]:
        """Return every change of the spot price of one type since then, and the price that held then."""
        return await self._spot_prices([instance_type], since, EndTime=self._services.clock.now())

    async def _spot_prices(self, types: list[str], since: datetime, **where: Any) -> Sequence[Any]:
        return await self._pages(
            "describe_spot_price_history",
            "SpotPriceHistory",
            InstanceTypes=types,
            **where,
            ProductDescriptions=list(LINUX_PRODUCTS),
            StartTime=since,
            MaxResults=1000,
        )

    async def on_demand(self) -> AwsOnDemandPrices:
        return AwsOnDemandPrices(
            region=self.name,
            own=self._settings.on_demand_usd.get(self.name, {}),
            listed=await self.price_list.get(),
            last_error=self.price_list.last_error,
        )

    async def machine_rows(self, name: str, *values: str) -> Sequence[Any]:
        """Return every instance that this filter matches, ended ones included as long as AWS lists them."""
        filters = [{"Name": name, "Values": list(values)}]
        found = await self._pages("describe_instances", "Reservations", Filters=filters, MaxResults=1000)
        rows = [
            {**row, "ReservationId": _mapping(reservation).get("ReservationId")} if isinstance(row, Mapping) else row
            for reservation in found
            for row in rows_of(_mapping(reservation), "Instances")
        ]
        if len(rows) > MACHINE_ROWS_MAX:
            raise Unavailable(f"AWS lists more than {MACHINE_ROWS_MAX:,} machines of ours, which no install has")
        return rows

    async def spot_request_rows(self, name: str, value: str) -> Sequence[Any]:
        filters = [{"Name": name, "Values": [value]}]
        return await self._pages(
            "describe_spot_instance_requests", "SpotInstanceRequests", Filters=filters, MaxResults=1000
        )

    async def volume_rows(self) -> Sequence[Any]:
        """Return every disk under our install tag that is attached to no machine."""
        filters = [
            {"Name": f"tag:{INSTALL_TAG}", "Values": [str(self._services.install)]},
            {"Name": "status", "Values": ["available"]},
        ]
        return await self._pages("describe_volumes", "Volumes", Filters=filters, MaxResults=500)

    async def ask(self, service: str, operation: str, *, at: str = "", **params: Any) -> Mapping[str, Any]:
        """Send one read, repeated a few times on failure; `at` names the region of another endpoint.

        Raises:
            AuthFailed, RateLimited, Unavailable: there is none.
        """

        async def once() -> Mapping[str, Any]:
            await self._pace.turn(f"{at or self.name} {operation}", INTERVAL)
            with contract_errors(operation, self._services.rng):
                return await self._sdk.call(service, at or self.name, operation, **params)

        return await retry_read(once, clock=self._services.clock, rng=self._services.rng)

    async def _pages(
        self, operation: str, name: str, *, service: str = "ec2", at: str = "", **params: Any
    ) -> list[Any]:
        rows: list[Any] = []
        tokens: set[str] = set()
        token = ""
        while True:
            answer = await self.ask(service, operation, at=at, **params, **({"NextToken": token} if token else {}))
            rows.extend(rows_of(answer, name))
            if len(rows) > PAGED_ROWS_MAX:
                raise Unavailable(
                    f"AWS answered {operation} with more than {PAGED_ROWS_MAX:,} rows, which no region has"
                )
            token = str(answer.get("NextToken") or "")
            if not token:
                return rows
            if token in tokens or len(tokens) >= PAGES_MAX:
                raise Unavailable(f"AWS's pages of {operation} do not end")
            tokens.add(token)

    async def _ask_kinds(self) -> Kinds:
        raw = await self._pages(
            "describe_instance_types",
            "InstanceTypes",
            Filters=[{"Name": "instance-type", "Values": list(self._settings.types)}],
            MaxResults=100,
        )
        return kinds_of(raw, self._settings, self.name)

    async def _ask_pools(self) -> Sequence[Pool]:
        raw = await self._pages(
            "describe_instance_type_offerings",
            "InstanceTypeOfferings",
            LocationType="availability-zone",
            Filters=[{"Name": "instance-type", "Values": list(self._settings.types)}],
            MaxResults=1000,
        )
        return [(row.InstanceType, row.Location) for row in readable_rows(OfferingRow, raw)]

    async def _ask_price_list(self) -> Mapping[str, MicroUsdPerHour]:
        prices: dict[str, MicroUsdPerHour] = {}
        for filters in questions(self.name, (await self.kinds()).usable):
            rows = await self._pages(
                "get_products",
                "PriceList",
                service="pricing",
                at=endpoint_region(self.name),
                ServiceCode="AmazonEC2",
                FormatVersion="aws_v1",
                Filters=filters,
                MaxResults=100,
            )
            prices |= listed_prices(rows, self.name)
        if not prices:
            raise Unavailable(f"AWS's price list names no price of {self.name}")
        return prices

    async def _ask_scores(self) -> Mapping[Pool, int]:
        zone_by_id = {
            r.AvailabilityZoneId: r.AvailabilityZone for r in await self._subnets.get() if r.AvailabilityZoneId
        }
        sets = sets_of_types((await self.kinds()).usable.values())
        scores: dict[Pool, int] = {}
        failures: list[ProviderError] = []
        for types in sets:
            try:
                rows = await self._pages(
                    "get_spot_placement_scores",
                    "SpotPlacementScores",
                    InstanceTypes=list(types),
                    TargetCapacity=1,
                    TargetCapacityUnitType="units",
                    SingleAvailabilityZone=True,
                    RegionNames=[self.name],
                    MaxResults=30,
                )
            except AuthFailed:
                raise
            except ProviderError as exc:
                failures.append(exc)  # a question that AWS does not take costs the scores of its own types
            else:
                scores |= scores_of(rows, types, zone_by_id)
        if failures and len(failures) == len(sets):
            raise failures[0]
        return scores

    async def _ask_grounds(self) -> Mapping[str, Ground]:
        subnets = await self._subnets.get()
        own = self._settings.security_groups
        vpcs = sorted({row.VpcId for row in subnets if row.VpcId})
        if not own and not vpcs:
            return {}
        filters = [{"Name": "group-name", "Values": ["default"]}, {"Name": "vpc-id", "Values": vpcs}]
        chosen = {"GroupIds": list(own)} if own else {"Filters": filters, "MaxResults": 1000}
        raw = await self._pages("describe_security_groups", "SecurityGroups", **chosen)
        groups = readable_rows(SecurityGroupRow, raw)
        return {subnet.SubnetId: ground_of(subnet, groups) for subnet in subnets}

    async def _ask_subnets(self) -> Sequence[SubnetRow]:
        own = self._settings.subnets
        chosen = {"Name": "subnet-id", "Values": list(own)} if own else {"Name": "default-for-az", "Values": ["true"]}
        raw = await self._pages("describe_subnets", "Subnets", Filters=[chosen], MaxResults=1000)
        return sorted(readable_rows(SubnetRow, raw), key=lambda row: row.AvailableIpAddressCount)

    async def _ask_image(self) -> MachineImage:
        image_id = self._settings.ami.get(self.name) or await self._image_by_parameter()
        answer = await self.ask("ec2", "describe_images", ImageIds=[image_id])
        row = row_or_none(ImageRow, next(iter(rows_of(answer, "Images")), None))
        if row is None:
            raise RequestRejected(
                f"AWS shows no machine image {image_id} in {self.name}", field="ami", reason="not found"
            )
        root = [m.Ebs.VolumeSize for m in row.BlockDeviceMappings if m.DeviceName == row.RootDeviceName and m.Ebs]
        others = [m.DeviceName for m in row.BlockDeviceMappings if m.Ebs and m.DeviceName != row.RootDeviceName]
        return MachineImage(
            image_id=row.ImageId,
            root_device=row.RootDeviceName,
            disk_gb=max([8, *root]),
            other_devices=tuple(dict.fromkeys(name for name in others if name)),
        )

    async def _image_by_parameter(self) -> str:
        for parameter in self._settings.ami_parameters:
            await self._pace.turn(f"{self.name} get_parameter", INTERVAL)
            with contract_errors("get_parameter", self._services.rng, unless="ParameterNotFound") as refused:
                answer = await self._sdk.call("ssm", self.name, "get_parameter", Name=parameter)
            if refused:
                continue
            value = _mapping(answer.get("Parameter")).get("Value")
            if isinstance(value, str) and value.startswith("ami-"):
                return value
        raise RequestRejected(
            f"none of ami_parameters exists in {self.name}; set ami", field="ami_parameters", reason="not found"
        )


def kinds_of(raw: Sequence[Any], settings: AwsSettings, region: str) -> Kinds:
    """Sort the rows of DescribeInstanceTypes into usable types and rejected ones."""
    usable: dict[str, Hardware] = {}
    rejected = []
    for item in raw:
        row = row_or_none(TypeRow, item)
        name = str(_mapping(item).get("InstanceType") or "unreadable")[:80]
        if not any(fnmatchcase(name, pattern) for pattern in settings.types):
            continue
        plain = any(fnmatchcase(name, pattern) for pattern in settings.cpu_types)
        found: Hardware | str | None = "its description cannot be read"
        if row is not None:
            found = hardware(row, own_image=region in settings.ami, without_gpu=plain)
        if isinstance(found, Hardware):
            usable[found.instance_type] = found
        elif found is not None:
            rejected.append(Rejected(offer_id=name, reason=found))
    return Kinds(usable=usable, rejected=tuple(rejected))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
