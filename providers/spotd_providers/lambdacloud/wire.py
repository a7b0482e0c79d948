"""What Lambda Cloud says, in the words of the contract: settings, refusals, types on sale, machines of the account.

Types are parsed strictly: a price that is not understood must not be paid. Of a machine whatever can be read is kept: a
row that is dropped is a machine that bills on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Annotated, Any, ClassVar, Final

from pydantic import Field

from spotd_providers.contract.gpus import canonical, gpu_info
from spotd_providers.contract.values import (
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
    MicroUsdPerHour,
    Offer,
    OfferId,
    PoolId,
    ProviderName,
    QuotaId,
    Rejected,
)
from spotd_providers.kit.boundary import ApiSettings
from spotd_providers.kit.http import HttpAnswer
from spotd_providers.kit.rest import Dialect, Meaning, error_problem
from spotd_providers.kit.shapes import Lenient, Row, Rows, distinct_rows, row_or_none, row_or_reason
from spotd_providers.kit.text import quote_safely
from spotd_providers.kit.vm_market import Id, Ip, VmSettings

PROVIDER: Final = ProviderName("lambda")
WHO: Final = "Lambda"
LAUNCH_EVERY: Final = timedelta(seconds=12)
KEY_TAG: Final = "spotd-key"
CENT: Final = 10_000
"""Micro-dollars."""


class LambdaSettings(ApiSettings, VmSettings):
    """Regions, machines and the ssh key, under `[providers.lambda]`."""

    version: ClassVar = "/api/v1"

    base_url: str = Field(default="https://cloud.lambda.ai", description="Where Lambda's API answers, without /api/v1.")
    regions: tuple[Annotated[str, Field(pattern=r"^[a-z0-9-]{2,32}$")], ...] = Field(
        default=(), max_length=64, description='Only these regions, say ["us-west-1"]. Empty: all.'
    )
    arm: bool = Field(default=False, description="Also GH200 and GB200, which need images built for ARM.")
    image_family: str | None = Field(
        default=None, min_length=1, max_length=128, description="Family of the machine image; Lambda's own if unset."
    )
    ssh_key: str | None = Field(
        default=None,
        min_length=1,
        max_length=64,
        description="Name of your ssh key at Lambda; if unset spotd registers one that opens no door.",
    )


# Lambda's words.


def object_of(_answer: HttpAnswer, body: Any) -> Any:
    """Return what is in Lambda's envelope; a list as `rows`."""
    data = body.get("data") if isinstance(body, dict) else None
    return {"rows": data} if isinstance(data, list) else data


DIALECT: Final = Dialect(
    who=WHO,
    problem_of=error_problem,
    object_of=object_of,
    codes={
        "instance-operations/launch/insufficient-capacity": Meaning.NO_CAPACITY,
        "instance-operations/": Meaning.REJECTED,
        "global/invalid-parameters": Meaning.REJECTED,
        "global/duplicate": Meaning.REJECTED,
        "global/invalid-address": Meaning.REJECTED,
        "global/quota-exceeded": Meaning.QUOTA,
        "global/invalid-api-key": Meaning.AUTH,
        "global/account-inactive": Meaning.AUTH,
        "global/forbidden": Meaning.AUTH,
        "global/object-does-not-exist": Meaning.ABSENT,
        "global/not-found": Meaning.ABSENT,
        # What conflicts may be the effect of this very request; the list of machines decides.
        "global/conflict": Meaning.UNAVAILABLE,
        "global/internal-error": Meaning.UNAVAILABLE,
        "provider/": Meaning.UNAVAILABLE,
    },
    interval=timedelta(seconds=1),
    buy_interval=LAUNCH_EVERY,
    penalty=LAUNCH_EVERY,
)


# What Lambda sells. A price is for the whole machine, in cents; disk and traffic are in it.


_GPU: Final = re.compile(r"\s*(?P<name>[^()]{1,64}?)\s*\(\s*(?P<gb>\d{1,4})\s*GB\s*(?P<form>[^()]{0,32}?)\s*\)\s*")
_ARM: Final = re.compile(r"\bG[HB]\d{3}\b", re.IGNORECASE)
GB_PER_GIB: Final = 1.073741824


class SpecsRow(Row):
    vcpus: Annotated[Annotated[int, Field(ge=0, lt=100_000)] | None, Lenient] = None
    memory_gib: Annotated[Annotated[int, Field(ge=0, lt=1_000_000)] | None, Lenient] = None
    storage_gib: Annotated[Annotated[int, Field(ge=0, lt=100_000_000)] | None, Lenient] = None
    gpus: Annotated[int, Field(ge=0, le=64)]


class LambdaTypeRow(Row):
    """A kind of machine, and what all of it costs per hour."""

    name: Id
    gpu_description: Annotated[str | None, Lenient] = None
    price_cents_per_hour: Annotated[int, Field(gt=0, lt=1_000_000)]
    specs: SpecsRow

    @property
    def price(self) -> MicroUsdPerHour:
        return MicroUsdPerHour(self.price_cents_per_hour * CENT)


class RegionRow(Row):
    name: Id


class SaleRow(Row):
    instance_type: LambdaTypeRow
    regions_with_capacity_available: list[Any]

    @property
    def id(self) -> str:
        return self.instance_type.name


def sales_of(data: Mapping[str, Any]) -> Rows[SaleRow]:
    """Parse every kind of machine, or reject it with the field that is wrong."""
    named = ((quote_safely(str(name)[:64]) or "unreadable", raw) for name, raw in data.items())
    return distinct_rows((row_or_reason(SaleRow, raw, offer_id=name) for name, raw in named), what="type")


def offers_of(rows: Sequence[SaleRow], settings: LambdaSettings) -> tuple[list[Offer], list[Rejected]]:
    """Translate kinds of machines to one offer for each region that has some, or reject them with the reason."""
    offers: list[Offer] = []
    bad: list[Rejected] = []
    for row in rows:
        gpu = gpu_of(row.instance_type)
        regions = [region for raw in row.regions_with_capacity_available if (region := row_or_none(RegionRow, raw))]
        odd = len(row.regions_with_capacity_available) - len(regions)
        wanted = sorted({region.name for region in regions if not settings.regions or region.name in settings.regions})
        if gpu is None:
            reason = "gpu_description: Lambda does not say which GPU this is"
        elif not settings.arm and _ARM.search(row.instance_type.gpu_description or ""):
            reason = "an ARM machine (providers.lambda.arm)"
        elif odd:
            reason = "regions_with_capacity_available: a region without a name"
        elif not regions:
            reason = "sold out everywhere now"
        else:
            reason = "" if wanted else "sold out in your regions now (providers.lambda.regions)"
        if reason:
            bad.append(Rejected(offer_id=row.id, reason=reason))
        if gpu is not None and (not reason or odd):
            offers.extend(_offer(row.instance_type, region, *gpu) for region in wanted)
    return offers, bad


def gpu_of(row: LambdaTypeRow) -> tuple[str, int | None] | None:
    """Return the canonical GPU of a kind of machine and its memory in MB; `None` where Lambda does not say which."""
    if row.specs.gpus == 0:
        return NO_GPU, None
    said = _GPU.fullmatch(row.gpu_description or "")
    if said is None:
        return None
    vram_mb = int(said["gb"]) * 1024
    names = (f"{said['name']} {said['form']}".strip(), said["name"])
    known = (canonical(PROVIDER, name, vram_mb) for name in names)
    return next((gpu for gpu in known if gpu_info(gpu) is not None), canonical(PROVIDER, names[0], vram_mb)), vram_mb


def _offer(row: LambdaTypeRow, region: str, gpu: str, vram_mb: int | None) -> Offer:
    name = f"{row.name}:{region}"
    specs = row.specs
    return Offer(
        provider=PROVIDER,
        offer_id=OfferId(name),
        pool=PoolId(name),
        quotas=(QuotaId("instances"),),
        market=Market.ON_DEMAND,
        interruption=Interruption.NEVER,
        gpu=gpu,
        gpu_count=specs.gpus,
        gpu_vram_mb=vram_mb,
        gpu_price=row.price,
        on_demand_price=row.price,
        region=region,
        cpus=None if specs.vcpus is None else float(specs.vcpus),
        memory_mb=None if specs.memory_gib is None else specs.memory_gib * 1024,
        disk_gb_max=None if specs.storage_gib is None else int(specs.storage_gib * GB_PER_GIB),
        extra={"type": row.name, "region": region},
    )


# The machines of the account.


class _Priced(Row):
    price_cents_per_hour: Annotated[int, Field(ge=0, lt=1_000_000)]


class LambdaInstanceRow(Row):
    """One machine. Its fields for Jupyter are secrets, and not read."""

    id: Id
    name: Annotated[str | None, Lenient] = None
    status: Annotated[str | None, Lenient] = None
    ip: Annotated[Ip | None, Lenient] = None
    instance_type: Annotated[_Priced | None, Lenient] = None


_STATES: Final = {
    "booting": (InstanceState.PENDING, Billing.NOTHING),
    "active": (InstanceState.RUNNING, Billing.FULL),
    # Billed if it was healthy before, which the row does not show.
    "unhealthy": (InstanceState.UNKNOWN, Billing.UNKNOWN),
    "terminating": (InstanceState.ENDING, Billing.UNKNOWN),
    "terminated": (InstanceState.GONE, Billing.NOTHING),
    # No page says whether a preempted machine still exists: it is ended like one that does.
    "preempted": (InstanceState.PAUSED, Billing.UNKNOWN),
}


def as_instance(row: LambdaInstanceRow, key: AttemptKey) -> Instance:
    word = (row.status or "").strip().lower()
    state, billing = _STATES.get(word, (InstanceState.UNKNOWN, Billing.UNKNOWN))
    details = {"unhealthy": "Lambda calls the machine unhealthy", "preempted": "Lambda took it away"}
    odd = "" if word in _STATES else f"Lambda calls its status {quote_safely(row.status or '')!r}"
    price = row.instance_type
    return Instance(
        ref=InstanceRef(provider=PROVIDER, instance_id=InstanceId(row.id)),
        key=key,
        state=state,
        market=Market.ON_DEMAND,
        price=None if price is None else MicroUsdPerHour(price.price_cents_per_hour * CENT),
        loss=Loss.PREEMPTED if word == "preempted" else None,
        billing=billing,
        detail=details.get(word, odd),
    )
