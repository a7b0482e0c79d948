"""The parts of AWS's answers that are used, validated at the edge, one row at a time.

AWS's client has already parsed the XML by AWS's own model, so types are right where fields exist at all. Prices are
texts and are judged here.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from ipaddress import ip_network
from typing import Annotated, Any, Final

from pydantic import Field

from spotd_providers.contract.errors import Unavailable
from spotd_providers.contract.gpus import aws_gpus, canonical, gpu_info, vram_fits
from spotd_providers.contract.values import CAPACITY_SCORE_MAX, NO_GPU, Market, MicroUsdPerHour, micro_usd
from spotd_providers.kit.shapes import Lenient, Row, row_or_none

WHO: Final = "AWS"
INSTALL_TAG: Final = "spotd:install"
KEY_TAG: Final = "spotd:key"
"""On everything that a launch makes; a resource without them is not ours."""
NODES_TAG: Final = "spotd:nodes"
"""Of how many machines of one launch it is."""
_PRICE: Final = re.compile(r"[0-9]{1,5}(\.[0-9]{1,10})?")
Text = Annotated[str, Field(min_length=1, max_length=512)]
Natural = Annotated[int, Field(ge=0, lt=2**31)]


class PriceRow(Row):
    AvailabilityZone: Text
    InstanceType: Text
    ProductDescription: Text
    SpotPrice: str
    Timestamp: Annotated[datetime | None, Lenient] = None


class GpuMemory(Row):
    SizeInMiB: Natural


class AwsGpuRow(Row):
    Name: Text
    Manufacturer: Text
    Count: Natural = 0
    LogicalGpuCount: Annotated[int | None, Lenient] = None
    MemoryInfo: Annotated[GpuMemory | None, Lenient] = None


class Gpus(Row):
    Gpus: list[AwsGpuRow] = Field(default_factory=list)


class Cpus(Row):
    DefaultVCpus: Natural


class Memory(Row):
    SizeInMiB: Natural


class Processor(Row):
    SupportedArchitectures: list[str] = Field(default_factory=list)


class EfaRow(Row):
    MaximumEfaInterfaces: Natural = 0


class NetworkRow(Row):
    EfaInfo: Annotated[EfaRow | None, Lenient] = None


class PlacementGroupRow(Row):
    SupportedStrategies: list[str] = Field(default_factory=list)


class TypeRow(Row):
    InstanceType: Text
    SupportedUsageClasses: list[str] = Field(default_factory=list)
    VCpuInfo: Annotated[Cpus | None, Lenient] = None
    MemoryInfo: Annotated[Memory | None, Lenient] = None
    ProcessorInfo: Annotated[Processor | None, Lenient] = None
    NetworkInfo: Annotated[NetworkRow | None, Lenient] = None
    PlacementGroupInfo: Annotated[PlacementGroupRow | None, Lenient] = None
    GpuInfo: Gpus | None = None


class StateRow(Row):
    Name: str


class ReasonRow(Row):
    Code: str = ""
    Message: str = ""


class TagRow(Row):
    Key: str
    Value: str = ""


class TaggedRow(Row):
    Tags: Annotated[list[TagRow] | None, Lenient] = None

    @property
    def tags(self) -> Mapping[str, str]:
        return {tag.Key: tag.Value for tag in self.Tags or ()}


class PlacementRow(Row):
    AvailabilityZone: str = ""


class AwsInstanceRow(TaggedRow):
    """A machine that bills us: whatever can be read of it is kept."""

    InstanceId: Text
    State: Annotated[StateRow | None, Lenient] = None
    StateReason: Annotated[ReasonRow | None, Lenient] = None
    StateTransitionReason: Annotated[str | None, Lenient] = None
    InstanceType: Annotated[str | None, Lenient] = None
    InstanceLifecycle: Annotated[str | None, Lenient] = None
    Placement: Annotated[PlacementRow | None, Lenient] = None
    LaunchTime: Annotated[datetime | None, Lenient] = None
    ClientToken: Annotated[str | None, Lenient] = None
    AmiLaunchIndex: Annotated[int | None, Lenient] = None
    ReservationId: Annotated[str | None, Lenient] = None
    """AWS states it around the rows of one launch; `Region.machine_rows` puts it into each of them."""


class StatusRow(Row):
    Code: str
    UpdateTime: Annotated[datetime | None, Lenient] = None


class SpotRequestRow(Row):
    InstanceId: Text
    Status: StatusRow


class SubnetRow(Row):
    SubnetId: Text
    AvailabilityZone: Text
    AvailabilityZoneId: Annotated[str | None, Lenient] = None
    AvailableIpAddressCount: int = 0
    VpcId: Annotated[str | None, Lenient] = None
    CidrBlock: Annotated[str | None, Lenient] = None
    MapPublicIpOnLaunch: Annotated[bool | None, Lenient] = None


class GroupPairRow(Row):
    GroupId: str = ""


class RangeRow(Row):
    CidrIp: str = ""


class RuleRow(Row):
    IpProtocol: str
    FromPort: Annotated[int | None, Lenient] = None
    ToPort: Annotated[int | None, Lenient] = None
    UserIdGroupPairs: list[GroupPairRow] = Field(default_factory=list)
    IpRanges: list[RangeRow] = Field(default_factory=list)


class SecurityGroupRow(Row):
    GroupId: Text
    VpcId: Text
    IpPermissions: list[RuleRow] = Field(default_factory=list)
    IpPermissionsEgress: list[RuleRow] = Field(default_factory=list)


class ScoreRow(Row):
    AvailabilityZoneId: Text
    Score: Natural


class VolumeRow(TaggedRow):
    VolumeId: Text
    State: Text
    Size: Natural = 0
    CreateTime: datetime


class OfferingRow(Row):
    InstanceType: Text
    Location: Text


class EbsRow(Row):
    VolumeSize: Natural = 0


class MappingRow(Row):
    DeviceName: str = ""
    Ebs: Annotated[EbsRow | None, Lenient] = None


class ImageRow(Row):
    ImageId: Text
    RootDeviceName: Text
    BlockDeviceMappings: list[MappingRow] = Field(default_factory=list)


def rows_of(answer: Mapping[str, Any], name: str) -> Sequence[Any]:
    """Return the list of this name.

    Raises:
        Unavailable: the answer holds none, so it is no answer to this question, whatever else it is.
    """
    rows = answer.get(name)
    if not isinstance(rows, list):
        raise Unavailable(f"AWS's answer holds no {name}")
    return rows


def spot_price(text: str) -> MicroUsdPerHour:
    """Parse the price of a row.

    Raises:
        ValueError: it is no price.
    """
    if _PRICE.fullmatch(text) is None:
        raise ValueError("SpotPrice is no amount of money")
    price = micro_usd(text)
    if price <= 0:
        raise ValueError("SpotPrice is zero")
    return MicroUsdPerHour(price)


# The hardware of an instance type, or the reason why it is not offered.


OPEN_DRIVER_MIN: Final = 7.5
"""CUDA compute capability from which NVIDIA's open kernel modules work; the default images have no others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One instance type that can be offered."""

    instance_type: str
    gpu: str
    gpu_count: int
    gpu_vram_mb: int | None
    cpus: int | None
    memory_mb: int | None
    sold_as: frozenset[str]
    efa_max: int = 0
    is_clustered: bool = True
    """Whether its machines may be placed near each other, in a placement group."""


def hardware(row: TypeRow, *, own_image: bool, without_gpu: bool = False) -> Hardware | str | None:
    """Describe the type's hardware: a reason if it cannot be used, `None` for one without GPUs that is not wanted.

    Args:
        own_image: the user names the machine image, and answers for its drivers and processor.
        without_gpu: the user names this type although it has no GPU.
    """
    gpus = row.GpuInfo.Gpus if row.GpuInfo is not None else []
    architectures = row.ProcessorInfo.SupportedArchitectures if row.ProcessorInfo is not None else []
    other_processor = f"its processor is {'/'.join(architectures) or 'unknown'}, the machine image is for x86_64"
    if not gpus:
        if without_gpu and "x86_64" not in architectures and not own_image:
            return other_processor
        return _described(row, NO_GPU, 0, None) if without_gpu else None
    first = gpus[0]
    if len(gpus) > 1:
        return "it has several kinds of GPU"
    if first.Manufacturer.upper() != "NVIDIA":
        return f"its GPUs are made by {first.Manufacturer}, images for CUDA do not run on them"
    if "x86_64" not in architectures and not own_image:
        return other_processor
    vram = first.MemoryInfo.SizeInMiB if first.MemoryInfo is not None else None
    known = aws_gpus(row.InstanceType)
    # Fractions of a card (g6f) count 0; they are named by their memory and never answer to the whole card's name.
    count = first.Count or first.LogicalGpuCount or 0
    if count <= 0:
        return "AWS does not say how many GPUs it has"
    name = known[0] if known is not None else canonical("aws", first.Name, vram)
    info = gpu_info(name)
    if not own_image and info is not None and float(info.compute_capability or OPEN_DRIVER_MIN) < OPEN_DRIVER_MIN:
        return f"the default machine image's driver knows no {name}; set ami"
    return _described(row, name, count, _memory(name, vram))


def _described(row: TypeRow, gpu: str, gpu_count: int, gpu_vram_mb: int | None) -> Hardware:
    return Hardware(
        instance_type=row.InstanceType,
        gpu=gpu,
        gpu_count=gpu_count,
        gpu_vram_mb=gpu_vram_mb,
        cpus=row.VCpuInfo.DefaultVCpus if row.VCpuInfo is not None else None,
        memory_mb=row.MemoryInfo.SizeInMiB if row.MemoryInfo is not None else None,
        sold_as=frozenset(row.SupportedUsageClasses),
        efa_max=row.NetworkInfo.EfaInfo.MaximumEfaInterfaces if row.NetworkInfo and row.NetworkInfo.EfaInfo else 0,
        is_clustered=row.PlacementGroupInfo is None or "cluster" in row.PlacementGroupInfo.SupportedStrategies,
    )


def _memory(gpu: str, stated_mb: int | None) -> int | None:
    """Return the memory that a card in the table is sold with: AWS states 22,888 MiB for one with 24 GB."""
    info = gpu_info(gpu)
    if info is not None and stated_mb:
        fitting = [gb for gb in info.vram_gb if vram_fits(gb, stated_mb)]
        return max([stated_mb, *(gb * 1024 for gb in fitting)])
    return stated_mb or None


# AWS's own scores of how likely a spot launch is to succeed now: 1 to 10 for each zone.
#
# AWS scores a *set* of types, low whenever there are fewer than three, and lets an account ask only a limited number of
# different questions a day. So the sets are fixed by what the region sells: the types with the same GPUs, among which a
# job may choose. They are asked seldom. A GPU that fewer than three types carry has no score.


TYPES_MIN: Final = 3


def sets_of_types(kinds: Iterable[Hardware]) -> list[tuple[str, ...]]:
    """Group the types with the same GPUs: each group is scored together."""
    found: defaultdict[tuple[str, int], list[str]] = defaultdict(list)
    for kind in kinds:
        # The types without a GPU differ in size: a score of all of them says nothing about one.
        if Market.SPOT.value in kind.sold_as and kind.gpu_count:
            found[kind.gpu, kind.gpu_count].append(kind.instance_type)
    return [tuple(sorted(types)) for _, types in sorted(found.items()) if len(types) >= TYPES_MIN]


def scores_of(rows: Sequence[Any], types: Iterable[str], zone_by_id: Mapping[str, str]) -> dict[tuple[str, str], int]:
    """Return the score of each type and zone name: AWS states the zone's id, which is not its name in this account."""
    by_zone: dict[str, int] = {}
    for raw in rows:
        row = row_or_none(ScoreRow, raw)
        zone = zone_by_id.get(row.AvailabilityZoneId) if row is not None else None
        if row is not None and zone is not None and 1 <= row.Score <= CAPACITY_SCORE_MAX:
            by_zone[zone] = row.Score
    return {(kind, zone): score for kind in types for zone, score in by_zone.items()}


_PORTS_MAX: Final = 65_535
_ALL: Final = "-1"
_TCP: Final = frozenset({"tcp", "6"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """One subnet as machines that are to reach each other find it.

    Attributes:
        groups: ids of the security groups of machines there.
        fault: why they do not reach each other there; empty where they do.
        takes_efa: the groups allow all traffic among themselves both ways, as EFA demands.
        is_public: machines there reach the store by a public address, which EC2 gives to no more than one interface.
    """

    groups: tuple[str, ...]
    fault: str
    takes_efa: bool
    is_public: bool


def ground_of(subnet: SubnetRow, groups: Sequence[SecurityGroupRow]) -> Ground:
    """Judge a subnet by the rules of those of the groups that are of its VPC."""
    own = [row for row in groups if row.VpcId == subnet.VpcId]
    ids = tuple(row.GroupId for row in own)
    inbound = [rule for row in own for rule in row.IpPermissions]
    outbound = [rule for row in own for rule in row.IpPermissionsEgress]
    names = ", ".join(ids) or "of machines there"
    fault = ""
    for rules, way in ((inbound, "from"), (outbound, "to")):
        if not fault and not any(_is_open(rule, ids, subnet.CidrBlock) for rule in rules):
            fault = (
                f"machines in {subnet.AvailabilityZone} do not reach each other: no rule of the security group {names}"
                f" allows all traffic {way} itself"
            )
    return Ground(
        groups=ids,
        fault=fault,
        takes_efa=not fault and all(any(_names_itself(rule, ids) for rule in rules) for rules in (inbound, outbound)),
        is_public=subnet.MapPublicIpOnLaunch is not False,
    )


def _names_itself(rule: RuleRow, ids: Collection[str]) -> bool:
    return rule.IpProtocol == _ALL and any(pair.GroupId in ids for pair in rule.UserIdGroupPairs)


def _is_open(rule: RuleRow, ids: Collection[str], cidr: str | None) -> bool:
    """Whether the rule allows every port of TCP between the machines of the subnet."""
    ports = (rule.FromPort or 0) <= 1 and (rule.ToPort or 0) >= _PORTS_MAX
    if rule.IpProtocol != _ALL and not (rule.IpProtocol in _TCP and ports):
        return False
    if any(pair.GroupId in ids for pair in rule.UserIdGroupPairs):
        return True
    return any(_holds(row.CidrIp, cidr or "0.0.0.0/0") for row in rule.IpRanges)


def _holds(outer: str, inner: str) -> bool:
    try:
        wide, narrow = ip_network(outer), ip_network(inner)
    except ValueError:
        return False
    return wide.version == narrow.version and wide.supernet_of(narrow)  # type: ignore[arg-type]  # of one version


def interfaces(subnet: str, ground: Ground, efa_max: int) -> list[dict[str, Any]]:
    """Return the EFA interfaces of a machine: one a network card, or the first alone where that has the public address.

    None where the type has no EFA, or the security groups do not let it work.
    """
    if not ground.takes_efa:
        return []
    count = min(1, efa_max) if ground.is_public else efa_max
    return [
        {
            "DeviceIndex": min(1, card),
            "NetworkCardIndex": card,
            "InterfaceType": "efa",
            "SubnetId": subnet,
            "Groups": list(ground.groups),
            "DeleteOnTermination": True,
            **({"AssociatePublicIpAddress": True} if ground.is_public else {}),
        }
        for card in range(count)
    ]


def fault_of(grounds: Iterable[Ground]) -> str:
    """Return why machines reach each other in none of these subnets; empty where they do in one, or none is known."""
    faults = [one.fault for one in grounds]
    return "" if not faults or "" in faults else faults[0]
