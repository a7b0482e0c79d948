"""What the market's server sends, checked strictly: a row that makes no sense never becomes a price."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from spotd_providers.contract.values import Loss, Market
from spotd_providers.local.market.machine import State
from spotd_providers.local.settings import Flavour

_MICRO_MAX = 10_000_000 * 1_000_000


class _Row(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)


class LocalOfferRow(_Row):
    """One offer."""

    offer_id: str = Field(min_length=1)
    host: str
    market: Market = Field(strict=False)
    flavour: Flavour = Field(strict=False)
    gpu: str
    gpu_count: int = Field(ge=1, le=64)
    vram_mb: int | None
    price: int = Field(gt=0, le=_MICRO_MAX)
    on_demand: int | None
    storage_gb_month: int = Field(ge=0, le=_MICRO_MAX)
    upload_gb: int = Field(ge=0, le=_MICRO_MAX)
    download_gb: int = Field(ge=0, le=_MICRO_MAX)
    region: str
    disk_gb_max: int
    cpus: float
    memory_mb: int
    cuda_max: str
    reliability: float
    upload_mbps: float
    download_mbps: float


class MachineRow(_Row):
    """One machine. An unknown state stays readable, since the machine costs money all the same."""

    machine_id: str = Field(min_length=1)
    key: str
    install: str
    host: str
    market: Market = Field(strict=False)
    state: str
    price: int = Field(ge=0, le=_MICRO_MAX)
    created_at: AwareDatetime = Field(strict=False)
    doomed_at: AwareDatetime | None = Field(strict=False)
    loss: str | None
    detail: str

    @property
    def known_state(self) -> State | None:
        return State(self.state) if self.state in tuple(State) else None

    @property
    def known_loss(self) -> Loss | None:
        return Loss(self.loss) if self.loss in tuple(Loss) else None


class LocalChargeRow(_Row):
    """What one machine cost over one span."""

    machine_id: str
    key: str
    start: datetime = Field(strict=False)
    end: datetime = Field(strict=False)
    amount: int = Field(ge=0)
    kind: str


class OfferAnswer(_Row):
    now: AwareDatetime = Field(strict=False)
    offers: list[Any]


class MachineAnswer(_Row):
    """`count` is how many rows the server meant to send."""

    now: AwareDatetime = Field(strict=False)
    count: int
    machines: list[Any]


class ChargeAnswer(_Row):
    charges: list[LocalChargeRow]


class LogAnswer(_Row):
    lines: list[str]


class StatusAnswer(_Row):
    now: AwareDatetime = Field(strict=False)
    spec_hash: str
    hosts: int
    machines: int


class ErrorAnswer(_Row):
    error: str
    message: str
    field: str = ""
