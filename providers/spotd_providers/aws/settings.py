"""The settings under `[providers.aws]`: the regions, what to boot, and how the job's image is run."""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator

from spotd_providers.kit.settings import safe_base_url

IMDS: Final = "http://169.254.169.254"
_REGION: Final = re.compile(r"[a-z]{2}(-[a-z]+)+-[0-9]{1,2}")
Region = Annotated[str, StringConstraints(max_length=32)]
Name = Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=r"^[A-Za-z0-9/._*:-]+$")]


class AwsSettings(BaseModel):
    """Regions, types and the way a machine is booted. Keys come from `api_key` or from AWS's usual places."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    regions: tuple[Region, ...] = Field(
        default=("us-east-1",), min_length=1, max_length=32, description="Regions to buy in and to watch."
    )
    instance_types: tuple[Name, ...] = Field(
        default=("g*", "p*"), min_length=1, max_length=100, description='Types to consider, with wildcards: "g5.*".'
    )
    cpu_types: tuple[Name, ...] = Field(
        default=(), max_length=100, description='Types without a GPU, for jobs that ask for none: "m7i.2xlarge".'
    )
    container: Literal["docker", "none"] = Field(
        default="docker",
        description='"docker" runs the job\'s image with the GPUs; "none" runs the job on the machine image itself.',
    )
    ami: dict[Region, Name] = Field(
        default_factory=dict, description='Machine image per region, say {"us-east-1" = "ami-..."}.'
    )
    ami_parameters: tuple[Name, ...] = Field(
        default=(
            "/aws/service/ecs/optimized-ami/amazon-linux-2023/gpu/recommended/image_id",
            "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id",
            "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-ubuntu-22.04/latest/ami-id",
        ),
        description="SSM parameters naming an image with docker and NVIDIA's driver; the first that exists.",
    )
    subnets: tuple[Name, ...] = Field(
        default=(), max_length=64, description="Subnets to launch in; empty for the default one of each zone."
    )
    security_groups: tuple[Name, ...] = Field(
        default=(), max_length=5, description="Security groups of the machines; empty for the VPC's default."
    )
    max_price: Literal["ceiling", "none"] = Field(
        default="ceiling",
        description=(
            '"ceiling": AWS ends a spot machine whose price passes your ceiling; "none": AWS caps its price at'
            " on-demand only, and spotd stops it in order when it passes your ceiling."
        ),
    )
    volume_mb_per_s: int = Field(
        default=250, ge=125, le=2000, description="Throughput of the disk; loading an image is what it limits."
    )
    on_demand_usd: dict[Region, dict[Name, float]] = Field(
        default_factory=dict,
        description="Your own on-demand prices per region and type, $/h; they win over AWS's list.",
    )
    egress_usd_per_gb: float = Field(
        default=0.09,
        ge=0,
        lt=10,
        allow_inf_nan=False,
        description="Price of traffic out of a machine; 0 if the checkpoint store is S3 in the same region.",
    )
    spot_advisor: str = Field(
        default="",
        max_length=4096,
        description="A saved copy of AWS's spot-advisor-data.json; decides between offers at the same price.",
    )
    profile: str = Field(
        default="", max_length=128, description="Profile of AWS's own config files, if api_key is unset."
    )
    endpoint_url: str = Field(default="", description="Where every AWS call goes instead, for tests.")

    @property
    def types(self) -> tuple[str, ...]:
        """All types to consider, with wildcards."""
        return (*self.instance_types, *self.cpu_types)

    @field_validator("regions")
    @classmethod
    def _are_regions(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for region in value:
            if _REGION.fullmatch(region) is None:
                raise ValueError(f'{region!r} is no region; write it like "us-east-1"')
        return tuple(dict.fromkeys(value))

    @field_validator("on_demand_usd")
    @classmethod
    def _are_prices(cls, value: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
        if any(not 0 < usd < 10_000 for prices in value.values() for usd in prices.values()):
            raise ValueError("a price is above 0 and below 10000 dollars per hour")
        return value

    @field_validator("endpoint_url")
    @classmethod
    def _keeps_the_key_safe(cls, value: str) -> str:
        return safe_base_url(value, example="http://127.0.0.1:5555") if value else ""
