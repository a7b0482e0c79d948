"""What the shop sends. Strict: a price is a finite number above zero, or its row is rejected."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

Usd = Annotated[float, Field(gt=0, lt=100_000, allow_inf_nan=False, strict=True)]
Word = Annotated[str, Field(min_length=1, max_length=200, strict=True)]


class SlotRow(BaseModel):
    """One free place on the shelf."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    slot: Word
    gpu: Word
    gpus: Annotated[int, Field(gt=0, le=64, strict=True)]
    vram_mb: Annotated[int, Field(gt=0, lt=10_000_000, strict=True)]
    usd_per_gpu_hour: Usd
    interruptible: Annotated[bool, Field(strict=True)]


class RentalRow(BaseModel):
    """One machine of the account, ours or not."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    number: Word
    slot: Word
    name: Annotated[str, Field(max_length=200, strict=True)]
    usd_per_hour: Usd
    interruptible: Annotated[bool, Field(strict=True)]
    since: AwareDatetime
    state: Word


class SlotPage(BaseModel):
    """The whole shelf; rows are judged one by one."""

    slots: list[Any]


class RentalPage(BaseModel):
    """One page of the account's machines; `next` is where the following one starts."""

    rentals: list[Any]
    next: Annotated[int, Field(gt=0, strict=True)] | None


class RentalReply(BaseModel):
    """The answer to a purchase."""

    rental: RentalRow


class AccountReply(BaseModel):
    """The account."""

    balance_usd: Annotated[float, Field(allow_inf_nan=False, strict=True)]
