"""The settings under `[providers.vast]`: which untrusted hosts are good enough to bid on."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

from spotd_providers.kit.settings import duration, safe_base_url

DEFAULT_BASE_URL: Final = "https://console.vast.ai"


def _duration(value: Any) -> Any:
    return duration(value, example='"12h", "3d" or "1d12h"') if isinstance(value, str) else value


class VastSettings(BaseModel):
    """Filters of the search and where to ask. Every filter is sent to vast.ai and checked again on each row."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_url: str = Field(default=DEFAULT_BASE_URL, description="Where vast.ai's API answers, without /api/v0.")
    verified: bool = Field(default=True, description="Only hosts that vast.ai has verified.")
    datacenter: bool = Field(default=False, description="Only hosts in datacentres (vast.ai's secure cloud).")
    reliability_min: float | None = Field(
        default=None, ge=0, le=1, allow_inf_nan=False, description="Lowest reliability score, say 0.98."
    )
    cuda_min: float | None = Field(
        default=None,
        gt=0,
        lt=100,
        allow_inf_nan=False,
        description="Lowest CUDA version that the host's driver supports, say 12.4.",
    )
    direct_ports_min: int = Field(default=0, ge=0, le=65535, description="Fewest open ports on the host's router.")
    duration_min: Annotated[timedelta, BeforeValidator(_duration)] | None = Field(
        default=None, description='Shortest time the host must still be on offer, say "3d".'
    )
    bandwidth_price_max: float | None = Field(
        default=None,
        ge=0,
        lt=1000,
        allow_inf_nan=False,
        description="Highest traffic price in dollars per GB, either way, say 0.02.",
    )
    cpu_arch: Literal["amd64", "arm64", "any"] = Field(
        default="amd64", description="Processor your images are built for: amd64, arm64 or any."
    )
    laptops: bool = Field(default=False, description="Also laptop GPUs.")
    offers_max: int = Field(default=3000, gt=0, le=10_000, description="Rows asked for in one search.")

    @field_validator("base_url")
    @classmethod
    def _keeps_the_key_safe(cls, value: str) -> str:
        return safe_base_url(value, example=DEFAULT_BASE_URL).removesuffix("/api/v0")
