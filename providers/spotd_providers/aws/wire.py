"""The parts of AWS's answers that are used, validated at the edge, one row at a time.

AWS's client has already parsed the XML by AWS's own model, so types are right where fields exist at all. Prices are
texts and are judged here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Final

from pydantic import Field

from spotd_providers.contract.errors import Unavailable
from spotd_providers.contract.money import MicroUsdPerHour, micro_usd
from spotd_providers.kit.shapes import Lenient, Row

INSTALL_TAG: Final = "spotd:install"
KEY_TAG: Final = "spotd:key"
"""On everything that a launch makes; a resource without them is not ours."""
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


class TypeRow(Row):
    InstanceType: Text
    SupportedUsageClasses: list[str] = Field(default_factory=list)
    VCpuInfo: Annotated[Cpus | None, Lenient] = None
    MemoryInfo: Annotated[Memory | None, Lenient] = None
    ProcessorInfo: Annotated[Processor | None, Lenient] = None
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
