"""The settings of a price list, and its rows: CSV or JSON, strictly parsed."""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Iterator
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from spotd_providers.contract.errors import Unavailable
from spotd_providers.contract.gpus import canonical
from spotd_providers.contract.values import (
    MICRO,
    NO_GPU,
    Interruption,
    Market,
    MicroUsdPerGb,
    MicroUsdPerGbMonth,
    MicroUsdPerHour,
    Offer,
    OfferId,
    PoolId,
    ProviderName,
    QuotaId,
    Rejected,
)
from spotd_providers.kit.boundary import Dollars, Span, safe_base_url
from spotd_providers.kit.shapes import Row, Rows, decode, distinct_rows, row_or_reason
from spotd_providers.kit.vm_market import GB_TO_MB, Id, VmSettings, listed_price, row_name

PROVIDER: Final = ProviderName("pricelist")
WHO: Final = "the price list"
LIST_BYTES_MAX: Final = 4 * 1024 * 1024
COMMANDS: Final = ("launch", "list", "end")
ONE_OF: Final = "name either file or url"


class PricelistSettings(VmSettings):
    """Where the list is, and the commands that act on it, under `[providers.pricelist]`."""

    file: Path | None = Field(default=None, description="The list: CSV, or JSON if its name ends in .json.")
    url: str | None = Field(default=None, max_length=2048, description="The same behind https, instead of a file.")
    launch: str | None = Field(
        default=None, max_length=4096, description="Command that rents one machine; needs list and end beside it."
    )
    list: str | None = Field(
        default=None, max_length=4096, description="Command that prints every machine as JSON: id, key, state."
    )
    end: str | None = Field(default=None, max_length=4096, description="Command that ends the machine of its argument.")
    timeout: Span = Field(
        default=timedelta(minutes=1),
        ge=timedelta(seconds=1),
        le=timedelta(seconds=80),
        description="How long a command may take; a launch that takes longer may have happened.",
    )

    @field_validator("url")
    @classmethod
    def _is_safe(cls, value: str | None) -> str | None:
        return None if value is None else safe_base_url(value, example="https://prices.example/list.csv")

    @field_validator(*COMMANDS)
    @classmethod
    def _can_be_split(cls, value: str | None) -> str | None:
        if value is not None and not shlex.split(value):
            raise ValueError("it names no program")
        return value

    @model_validator(mode="after")
    def _is_whole(self) -> PricelistSettings:
        if self.file is not None and self.url is not None:
            raise ValueError(ONE_OF)
        missing = [name for name in COMMANDS if getattr(self, name) is None]
        if self.launch is not None and missing:
            lost = "without them a launch whose answer is lost could not be found again, or not be ended"
            raise ValueError(f"launch needs {' and '.join(missing)} beside it: {lost}")
        return self


Amount = Annotated[float, Field(ge=0, lt=10_000_000, allow_inf_nan=False)]
Price = Annotated[int, BeforeValidator(listed_price)]


class ListRow(BaseModel):
    """One machine that is sold: dollars for the whole machine, an hour; all else where the seller states it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,64}$", validation_alias="name")]
    gpu: Annotated[str, Field(max_length=64)] = ""
    gpus: Annotated[int, Field(ge=0, le=64)] = 1
    price: Price
    market: Market = Market.ON_DEMAND
    fee: Annotated[int, BeforeValidator(listed_price), Field(ge=MICRO, le=3 * MICRO)] = MICRO
    region: Annotated[str, Field(max_length=64)] = ""
    vram_gb: Amount | None = None
    cpus: Amount | None = None
    memory_gb: Amount | None = None
    disk_gb_max: Annotated[int, Field(ge=1, lt=10_000_000)] | None = None
    disk_gb_month: Dollars = 0
    upload_gb: Dollars = 0
    download_gb: Dollars = 0
    from_: Annotated[date | None, Field(validation_alias="from")] = None
    until: date | None = None


def rows_of(body: bytes, *, is_json: bool) -> Rows[ListRow]:
    """Parse a list; a row that is wrong is rejected with its field, and never taken for a price.

    Raises:
        Unavailable: it is no list.
    """
    if len(body) > LIST_BYTES_MAX:
        raise Unavailable(f"{WHO} has more than {LIST_BYTES_MAX // 1024 // 1024} MiB")
    found = list(_json_rows(body) if is_json else _csv_rows(body))

    return distinct_rows((row_or_reason(ListRow, raw, offer_id=row_name(raw, "name")) for raw in found), what="name")


def _json_rows(body: bytes) -> Iterator[Any]:
    said = decode(body, who=WHO)
    rows = said.get("offers") if isinstance(said, dict) else said
    if not isinstance(rows, list):
        raise Unavailable(f"{WHO} is no list, and has none under offers")
    yield from rows


def _csv_rows(body: bytes) -> Iterator[Any]:
    try:
        reader = csv.DictReader(io.StringIO(body.decode("utf-8-sig"), newline=""), strict=True)
        if "name" not in (reader.fieldnames or ()) or "price" not in (reader.fieldnames or ()):
            raise Unavailable(f"the first line of {WHO} has to name its columns, name and price among them")
        for row in reader:
            yield {key: cell.strip() for key, cell in row.items() if isinstance(cell, str) and cell.strip() and key}
    except (csv.Error, UnicodeDecodeError) as exc:
        raise Unavailable(f"{WHO} is no CSV in UTF-8 ({type(exc).__name__})") from exc


def offer_of(row: ListRow, now: datetime) -> Offer | Rejected:
    """Translate a row; one that does not hold today is rejected."""
    if (row.from_ is not None and now.date() < row.from_) or (row.until is not None and now.date() > row.until):
        return Rejected(offer_id=row.id, reason="it does not hold today (from, until)")
    if row.gpus and not row.gpu:
        return Rejected(offer_id=row.id, reason="gpu: which GPU it has is not said")
    vram_mb = None if row.vram_gb is None else round(row.vram_gb * GB_TO_MB)
    price = MicroUsdPerHour(_with_fee(row.price, row.fee))
    return Offer(
        provider=PROVIDER,
        offer_id=OfferId(row.id),
        pool=PoolId(row.id),
        quotas=(QuotaId("machines"),),
        market=row.market,
        interruption=Interruption.SUDDEN if row.market is Market.SPOT else Interruption.NEVER,
        gpu=canonical(PROVIDER, row.gpu, vram_mb) if row.gpus else NO_GPU,
        gpu_count=row.gpus,
        gpu_vram_mb=vram_mb if row.gpus else None,
        gpu_price=price,
        on_demand_price=price if row.market is Market.ON_DEMAND else None,
        storage_price=MicroUsdPerGbMonth(_with_fee(row.disk_gb_month, row.fee)),
        upload_price=MicroUsdPerGb(_with_fee(row.upload_gb, row.fee)),
        download_price=MicroUsdPerGb(_with_fee(row.download_gb, row.fee)),
        region=row.region,
        cpus=row.cpus,
        memory_mb=None if row.memory_gb is None else round(row.memory_gb * GB_TO_MB),
        disk_gb_max=row.disk_gb_max,
        extra={"name": row.id},
    )


def _with_fee(amount: int, fee: int) -> int:
    return -(-amount * fee // MICRO)


class SellerRow(Row):
    """One machine that the list command prints; `state` is one of the words of `InstanceState`."""

    id: Id
    key: str = ""
    state: str = "unknown"
