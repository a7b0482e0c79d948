"""The settings under `[providers.runpod]`."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, field_validator

from spotd_providers.kit.settings import safe_base_url

DEFAULT_BASE_URL: Final = "https://api.runpod.io"
_Count = Annotated[int, Field(ge=1, le=64)]
_DataCenter = Annotated[str, Field(pattern=r"^[A-Z0-9-]{2,32}$")]


class RunpodSettings(BaseModel):
    """Clouds, numbers of GPUs and places."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_url: str = Field(default=DEFAULT_BASE_URL, description="Where RunPod's API answers, without /v2.")
    secure: bool = Field(default=True, description="Offers of the Secure cloud: data centres.")
    community: bool = Field(default=True, description="Offers of the Community cloud: individual hosts, cheaper.")
    gpu_counts: tuple[_Count, ...] = Field(
        default=(1, 2, 4, 8),
        min_length=1,
        max_length=16,
        description="Sizes of machines to ask for; each costs one request per cloud and poll.",
    )
    data_centers: tuple[_DataCenter, ...] = Field(
        default=(), max_length=64, description='Only these data centres, say ["EU-RO-1"]. Empty: any.'
    )
    cuda_min: str | None = Field(
        default=None, pattern=r"^\d{1,3}\.\d{1,3}$", description='Lowest CUDA version of the host, say "12.4".'
    )
    amd: bool = Field(default=False, description="Also AMD GPUs, which need images built for ROCm.")
    registry: str | None = Field(
        default=None, min_length=1, max_length=128, description="Id of the RunPod registry credential for your images."
    )
    override_entrypoint: bool = Field(
        default=False,
        description="Replace the image's ENTRYPOINT, for images whose own does not run what it is given.",
    )

    @field_validator("base_url")
    @classmethod
    def _keeps_the_key_safe(cls, value: str) -> str:
        return safe_base_url(value, example=DEFAULT_BASE_URL).removesuffix("/v2")

    @property
    def clouds(self) -> tuple[str, ...]:
        """The clouds to buy in, by RunPod's names."""
        wanted = (("SECURE", self.secure), ("COMMUNITY", self.community))
        return tuple(cloud for cloud, yes in wanted if yes)
