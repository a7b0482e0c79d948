"""What Prime Intellect says, in the words of the contract: settings, refusals, rows on sale, pods of the account.

It sells machines of other clouds. A row states one price for all its GPUs; whether the disk that comes with every pod
is in it is not what the row's own flag says, so the figures decide. Rows are parsed strictly, pods leniently.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import timedelta
from decimal import Decimal
from itertools import islice
from typing import Annotated, Any, ClassVar, Final

from pydantic import Field, field_validator

from spotd_providers.contract.gpus import canonical, gpu_info
from spotd_providers.contract.values import (
    HOURS_PER_STORAGE_MONTH,
    MICRO,
    NO_GPU,
    AttemptKey,
    Billing,
    Instance,
    InstanceId,
    InstanceRef,
    InstanceState,
    Interruption,
    Loss,
    Market,
    MicroUsdPerGbMonth,
    MicroUsdPerHour,
    Offer,
    OfferId,
    PoolId,
    ProviderName,
    QuotaId,
    Rejected,
)
from spotd_providers.kit.boundary import ApiSettings
from spotd_providers.kit.rest import Dialect, Meaning, RefusalWords, fastapi_problem, meaning_in
from spotd_providers.kit.shapes import ROWS_MAX, Instant, Lenient, Row, Rows, distinct_rows, row_or_reason
from spotd_providers.kit.text import quote_safely
from spotd_providers.kit.vm_market import GB_TO_MB, Id, Size, price_or_none

PROVIDER: Final = ProviderName("primeintellect")
WHO: Final = "Prime Intellect"
ANY_IMAGE: Final = "*"
TEMPLATE: Final = "custom_template"
"""The image of a row that takes a template of the account; only a template has a start command."""
UNIT_USD_MAX: Final = 10  # one gigabyte or processor, per hour


class PrimeSettings(ApiSettings):
    """The templates, under `[providers.primeintellect]`."""

    version: ClassVar = "/api/v1"

    base_url: str = Field(
        default="https://api.primeintellect.ai", description="Where the API answers, without /api/v1."
    )
    templates: dict[str, Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]] = Field(
        default_factory=dict,
        max_length=256,
        description='Id of your template by the image that it runs; "*" is for the images that have none.',
    )


# Prime Intellect's words. Statuses say little of a purchase: the sentence of the cloud behind it does.


_OF_PURCHASE: Final[Mapping[tuple[str, ...], Meaning]] = {
    ("insufficient funds", "insufficient balance", "wallet"): Meaning.NO_BALANCE,
    ("quota", "limit exceeded", "limit reached"): Meaning.QUOTA,
    ("maxprice", "max price"): Meaning.PRICE_MOVED,
    ("capacity", "out of stock", "insufficient", "not available", "unavailable"): Meaning.NO_CAPACITY,
}
_OF_ERROR: Final[Mapping[tuple[str, ...], Meaning]] = {("no capacity", "out of stock"): Meaning.NO_CAPACITY}
"""What an error of the server may say and still be sure: nothing was bought."""


class PrimeDialect(Dialect):
    """Prime Intellect's refusals, by their words where a purchase is refused."""

    def meaning(self, status: int, problem: RefusalWords | None, *, is_purchase: bool) -> Meaning:
        is_sure = status < 500 and status not in (401, 402, 408, 429)
        table = _OF_PURCHASE if is_sure else _OF_ERROR if status >= 500 else {}
        found = meaning_in(problem.text, table) if problem is not None else None
        return found if is_purchase and found is not None else super().meaning(status, problem, is_purchase=is_purchase)


DIALECT: Final = PrimeDialect(
    who=WHO, problem_of=fastapi_problem, interval=timedelta(seconds=1), penalty=timedelta(seconds=10)
)


# What is on sale.


Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:/,+() -]{0,127}$")]
_Count = Annotated[int, Field(ge=0, lt=10_000_000)]


class Block(Row):
    """A part of a machine that can be paid for by the piece: disk, processors, memory."""

    least: Annotated[_Count | None, Field(validation_alias="minCount")] = None
    usual: Annotated[_Count | None, Field(validation_alias="defaultCount")] = None
    most: Annotated[_Count | None, Field(validation_alias="maxCount")] = None
    step: _Count | None = None
    unit: Annotated[Any, Field(validation_alias="pricePerUnit")] = None
    is_included: Annotated[bool | None, Field(validation_alias="defaultIncludedInPrice")] = None

    @field_validator("unit")
    @classmethod
    def _is_a_price(cls, value: Any) -> Any:
        if value is None or (value == 0 and not isinstance(value, bool)):
            return value
        if not isinstance(value, int | float) or price_or_none(value) is None or value > UNIT_USD_MAX:
            raise ValueError("not a price")
        return value

    def cost(self, count: int) -> int:
        """Return what so many cost in micro-dollars an hour, rounded up."""
        exact = Decimal(repr(self.unit or 0)) * count * MICRO
        return int(exact.quantize(Decimal("0.001")).to_integral_value("ROUND_CEILING"))

    @property
    def least_sold(self) -> int:
        return max(self.least or 0, self.usual or 0)


class _Prices(Row):
    secure: Annotated[Any, Field(validation_alias="onDemand")] = None
    community: Annotated[Any, Field(validation_alias="communityPrice")] = None
    currency: str


class PrimeRow(Row):
    """One configuration of one cloud in one place."""

    cloud_id: Annotated[Word, Field(validation_alias="cloudId")]
    type: Annotated[Word, Field(validation_alias="gpuType")]
    socket: Word
    cloud: Annotated[Word, Field(validation_alias="provider")]
    place: Annotated[Word | None, Field(validation_alias="dataCenter")] = None
    region: Annotated[str | None, Lenient] = None
    country: Annotated[Word | None, Lenient] = None
    count: Annotated[int, Field(ge=0, le=64, validation_alias="gpuCount")]
    gpu_memory: Annotated[Size | None, Lenient, Field(validation_alias="gpuMemory")] = None
    disk: Block
    shared: Annotated[Block | None, Field(validation_alias="sharedDisk")] = None
    vcpu: Block | None = None
    memory: Block | None = None
    stock: Annotated[str, Field(validation_alias="stockStatus")]
    security: Word
    prices: _Prices
    images: list[str]
    is_spot: Annotated[bool | None, Field(validation_alias="isSpot")] = None
    prepaid: Annotated[float | None, Field(validation_alias="prepaidTime", allow_inf_nan=False)] = None

    @property
    def market(self) -> Market:
        return Market.SPOT if self.is_spot else Market.ON_DEMAND

    @property
    def listed(self) -> MicroUsdPerHour | None:
        said = self.prices.secure if self.security == "secure_cloud" else self.prices.community
        return price_or_none(said) if isinstance(said, int | float) else None

    @property
    def id(self) -> str:
        """The name that lasts: `cloudId` changes while the same thing is sold."""
        size = f"{self.count}x{self.type}:{self.socket}"
        return f"{self.cloud}:{self.place or self.region or ''}:{size}:{self.security}:{self.market}"

    def disk_gb(self, asked: int) -> int:
        """Return the disk that is ordered: what a job asks for, beside what every pod comes with."""
        step = max(1, self.disk.step or 1)
        return self.disk.least_sold + -(-asked // step) * step


SOLD_OUT: Final = "sold out now"
_ON_SALE: Final = frozenset({"available", "low", "medium", "high"})


def sales_of(raw: Iterable[Any]) -> Rows[PrimeRow]:
    """Parse what is for sale, or reject it with the reason; of two with the same name the cheaper one is sold."""
    found = [_sale(one) for one in islice(raw, ROWS_MAX + 1)]
    good = sorted((one for one in found if isinstance(one, PrimeRow)), key=lambda one: one.listed or 0)
    return distinct_rows((*good, *(one for one in found if isinstance(one, Rejected))), what="configuration")


def _sale(raw: Any) -> PrimeRow | Rejected:
    row = row_or_reason(PrimeRow, raw, offer_id=quote_safely(str(raw.get("cloudId"))) if isinstance(raw, dict) else "?")
    if isinstance(row, Rejected):
        return row
    reasons = {
        SOLD_OUT: row.stock.strip().lower() not in _ON_SALE,
        "currency: not US dollars": row.prices.currency.upper() != "USD",
        "its price is none": row.listed is None,
        "it has to be paid hours ahead": row.prepaid,
        "it runs no template, so nothing would start on it": TEMPLATE not in row.images,
        "disk: its price is not stated": row.disk.unit is None,
        "disk: none is left beside what the system takes": row.disk.least_sold in (0, row.disk.most),
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    return row if reason is None else Rejected(offer_id=row.id, reason=reason)


def offer_of(row: PrimeRow) -> Offer:
    """Translate one row that is for sale."""
    listed, extra, disk = row.listed or 0, 0, row.disk.cost(row.disk.usual or 0)
    for part in (row.vcpu, row.memory, row.shared):
        extra += part.cost(part.usual or 0) if part is not None and not part.is_included else 0
    # Recorded rows hold these parts in their price although their flag denies it: what is left is whole cents then.
    holds_all = _is_cents(listed - extra - disk) and not _is_cents(listed)
    without = listed - disk if holds_all else listed + extra - (disk if row.disk.is_included else 0)
    price = MicroUsdPerHour(without if without > 0 else listed + extra)
    gpu, count, vram_mb = gpu_of(row)
    return Offer(
        provider=PROVIDER,
        offer_id=OfferId(row.id),
        pool=PoolId(row.id),
        quotas=(QuotaId("pods"),),
        market=row.market,
        interruption=Interruption.SUDDEN if row.is_spot else Interruption.NEVER,
        gpu=gpu,
        gpu_count=count,
        gpu_vram_mb=vram_mb,
        gpu_price=price,
        on_demand_price=None if row.is_spot else price,
        storage_price=MicroUsdPerGbMonth(row.disk.cost(HOURS_PER_STORAGE_MONTH)),
        storage_fixed=MicroUsdPerHour(row.disk.cost(row.disk.least_sold)),
        region=(row.place or row.region or "")[:64],
        cpus=None if row.vcpu is None or not row.vcpu.usual else float(row.vcpu.usual),
        memory_mb=None if row.memory is None or not row.memory.usual else row.memory.usual * GB_TO_MB,
        disk_gb_max=None if row.disk.most is None else row.disk.most - row.disk.least_sold,
        extra={"type": row.type, "cloud": row.cloud},
    )


def _is_cents(amount: int) -> bool:
    """Whether this is a whole number of cents, of which a part was rounded up."""
    return amount > 0 and (amount + 2) % 10_000 <= 4


_MEMORY: Final = re.compile(r"_(\d{1,3})GB$", re.IGNORECASE)


def gpu_of(row: PrimeRow) -> tuple[str, int, int | None]:
    """Return the canonical GPU of a row, how many, and the memory of one in MB.

    Its name states the memory of one; the field states that of one or that of all, so the smaller reading is taken.
    """
    if row.count == 0 or row.type.upper().startswith("CPU"):
        return NO_GPU, 0, None
    said, model = _MEMORY.search(row.type), _MEMORY.sub("", row.type)
    vram_mb = int(said[1]) * GB_TO_MB if said else round((row.gpu_memory or 0) / row.count) * GB_TO_MB or None
    names = (f"{model} {row.socket}", f"{model} {row.socket.rstrip('0123456789')}", model)
    known = (canonical(PROVIDER, one, vram_mb) for one in names)
    return next((one for one in known if gpu_info(one)), canonical(PROVIDER, model, vram_mb)), row.count, vram_mb


# The pods of the account.


class PrimePodRow(Row):
    """One pod. Its password for Jupyter is a secret, and not read."""

    id: Id
    status: Annotated[str | None, Lenient] = None
    price: Annotated[Any, Field(validation_alias="priceHr")] = None
    stopped_price: Annotated[Any, Field(validation_alias="stoppedPriceHr")] = None
    currency: Annotated[str | None, Lenient, Field(validation_alias="baseCurrency")] = None
    is_spot: Annotated[bool | None, Lenient, Field(validation_alias="isSpot")] = None
    installed: Annotated[str | None, Lenient, Field(validation_alias="installationStatus")] = None
    progress: Annotated[float | None, Lenient, Field(validation_alias="installationProgress")] = None
    failure: Annotated[str | None, Lenient, Field(validation_alias="installationFailure")] = None
    created_at: Annotated[Instant | None, Lenient, Field(validation_alias="createdAt")] = None
    terminated_at: Annotated[Instant | None, Lenient, Field(validation_alias="terminatedAt")] = None

    @property
    def has_run(self) -> bool:
        return self.is_installed and (self.installed is not None or self.progress is not None)

    @property
    def is_installed(self) -> bool:
        """Whether its start command runs; either field may be missing."""
        is_done = self.progress is None or self.progress >= 100
        return is_done and (self.installed is None or self.installed.upper() == "FINISHED")

    @property
    def gpu_price(self) -> MicroUsdPerHour | None:
        """Its price without the disk, which the offer counts apart: a stopped pod costs just that.

        More than half of the whole is something else, so nothing is taken off.
        """
        whole = price_or_none(self.price) if (self.currency or "USD").upper() == "USD" else None
        disk = price_or_none(self.stopped_price)
        if whole is None or disk is None or disk * 2 > whole:
            return whole
        return MicroUsdPerHour(whole - round(float(self.stopped_price) * MICRO))


class HistoryRow(Row):
    """One pod that has ended, with its bill."""

    id: Id
    name: Annotated[str | None, Lenient] = None
    total: Annotated[float, Field(validation_alias="totalBilledPrice", ge=0, allow_inf_nan=False)]
    currency: Annotated[str | None, Lenient, Field(validation_alias="baseCurrency")] = None
    created_at: Annotated[Instant, Field(validation_alias="createdAt")]
    terminated_at: Annotated[Instant, Field(validation_alias="terminatedAt")]


_STATES: Final = {
    **dict.fromkeys(("provisioning", "pending"), InstanceState.PENDING),
    "active": InstanceState.RUNNING,
    **dict.fromkeys(("stopped", "error"), InstanceState.PAUSED),
    "deleting": InstanceState.ENDING,
    "terminated": InstanceState.GONE,
    "unknown": InstanceState.UNKNOWN,
}


def as_instance(row: PrimePodRow, key: AttemptKey, *, ended_by_us: bool) -> Instance:
    word = (row.status or "").strip().lower()
    state = _STATES.get(word, InstanceState.UNKNOWN)
    if state is InstanceState.RUNNING and not row.is_installed:
        state = InstanceState.PENDING
    taken = Loss.PREEMPTED if row.is_spot else Loss.HOST_LOST
    loss = None
    if word == "error":
        loss = taken if row.has_run else Loss.PROVISION_FAILED
    elif word == "terminated" and not ended_by_us:
        loss = taken
    odd = "" if word in _STATES else f"Prime Intellect calls its status {quote_safely(row.status or '')!r}"
    return Instance(
        ref=InstanceRef(provider=PROVIDER, instance_id=InstanceId(row.id)),
        key=key,
        state=state,
        market=None if row.is_spot is None else Market.SPOT if row.is_spot else Market.ON_DEMAND,
        price=row.gpu_price if state in (InstanceState.PENDING, InstanceState.RUNNING) else None,
        created_at=row.created_at,
        loss=loss,
        # No page says that a pod in an error is free.
        billing=Billing.FULL if word == "error" else Billing.UNKNOWN,
        ended_at=row.terminated_at if word in ("terminated", "deleting") else None,
        detail=odd or quote_safely(row.failure or ""),
    )
