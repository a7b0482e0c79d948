"""The bodies of requests to the market's server."""

from __future__ import annotations

from enum import StrEnum

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


class MarketCall(StrEnum):
    """The calls of a customer that can be made to fail."""

    OFFERS = "offers"
    LAUNCH = "launch"
    LIST = "list"
    TERMINATE = "terminate"
    CHARGES = "charges"


class FaultBody(_Body):
    """The next `times` calls of this kind fail, or with `slow_s` are late. With `lose`, the connection breaks."""

    call: MarketCall
    status: int = Field(default=503, ge=400, le=599)
    retry_after_s: int | None = Field(default=None, ge=0)
    lose: bool = False
    after_effect: bool = Field(default=False, description="the market did what was asked, and only then failed")
    slow_s: float = Field(default=0.0, ge=0, le=60, description="seconds on the wall before the true answer")
    times: int = Field(default=1, ge=1, le=1_000_000)


class KnobsBody(_Body):
    """Market rules changed while it runs; what is absent stays."""

    list_lag: Duration | None = None
    provisioning: Duration | None = None
    machines_max: int | None = Field(default=None, ge=0)
