"""The bodies of requests to the market's server."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from spotd_providers.local.settings import Dollars, Duration


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class LaunchBody(_Body):
    key: str = Field(min_length=1, max_length=200)
    install: str = Field(min_length=1, max_length=100)
    offer_id: str
    price_max: int = Field(ge=0, strict=True, description="micro-dollars per hour")
    expires_at: float = Field(description="wall clock, seconds since 1970: not to be done any later")
    image: str
    disk_gb: int = Field(ge=0, strict=True)
    start_script: str


class BidBody(_Body):
    price: int = Field(gt=0, strict=True)


class PreemptBody(_Body):
    """One machine, or every machine on a host."""

    machine: str | None = None
    host: str | None = None
    notice: bool | None = None
    lasting: Duration = Field(default="30m", validate_default=True)


class PriceBody(_Body):
    host: str
    price: Dollars
    lasting: Duration
