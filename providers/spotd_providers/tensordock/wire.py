"""What TensorDock says, in the words of the contract: settings, refusals, models on sale, machines of the account.

A machine is paid in parts: GPUs, processors, memory and disk. Refusals may come as a success whose body has a status.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from spotd_providers.contract.gpus import canonical, gpu_info
from spotd_providers.contract.values import (
    FREE_STORAGE,
    HOURS_PER_STORAGE_MONTH,
    AttemptKey,
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
from spotd_providers.kit.rest import Dialect, Meaning, RefusalWords, meaning_in
from spotd_providers.kit.shapes import Lenient, Row, row_or_none, row_or_reason
from spotd_providers.kit.text import quote_safely
from spotd_providers.kit.vm_market import GB_TO_MB, Id, Ip, VmSettings, price_or_none, row_name

PROVIDER: Final = ProviderName("tensordock")
WHO: Final = "TensorDock"
SYSTEM_GB: Final = 100
"""The least disk that is sold; it comes beside what a job asks for."""
DISK_STEP_GB: Final = 50
COUNTS: Final = (1, 2, 4, 8)
_PER_GB: Final = 1_000_000
"""Prices of a gigabyte are too small for micro-dollars an hour, so they are read as of a million."""


class TensorDockSettings(ApiSettings, VmSettings):
    """The size of machines, the machine image and an ssh key, under `[providers.tensordock]`."""

    version: ClassVar = "/api/v2"

    base_url: str = Field(
        default="https://dashboard.tensordock.com", description="Where TensorDock's API answers, without /api/v2."
    )
    vcpus_per_gpu: int = Field(default=8, ge=2, le=64, multiple_of=2, description="Processors for each GPU; they bill.")
    memory_gb_per_gpu: int = Field(default=32, ge=8, le=512, multiple_of=8, description="Memory for each GPU; bills.")
    image: Literal[
        "ubuntu2204", "ubuntu2404", "ubuntu2404_ml_pytorch", "ubuntu2404_ml_tensorflow", "ubuntu2404_ml_everything"
    ] = Field(default="ubuntu2404", description="Machine image.")
    ssh_key_id: str | None = Field(
        default=None, pattern=r"^[A-Za-z0-9-]{1,64}$", description="Id of an ssh key at TensorDock, for spotctl ssh."
    )


def problem_of(body: Any) -> RefusalWords | None:
    """Return the words of `{"status", "error"}`; the status is the code."""
    if not isinstance(body, dict) or not isinstance(body.get("error"), str):
        return None
    status = body.get("status")
    return RefusalWords(code=str(status) if isinstance(status, int) else "", text=body["error"])


_OF_PURCHASE: Final = {
    ("quota", "limit reached", "limit exceeded", "limit of"): Meaning.QUOTA,
    ("balance", "insufficient funds", "deposit"): Meaning.NO_BALANCE,
    ("no available", "not available", "capacity", "out of stock", "unavailable"): Meaning.NO_CAPACITY,
}


class TensorDockDialect(Dialect):
    """TensorDock's refusals: by the status in the body, whatever that of the answer is, and by their words."""

    def meaning(self, status: int, problem: RefusalWords | None, *, is_purchase: bool) -> Meaning:
        true = int(problem.code) if problem is not None and problem.code.isdecimal() else status
        found = meaning_in(problem.text, _OF_PURCHASE) if problem is not None else None
        if found is not None and is_purchase and 400 <= true < 500 and true not in (401, 402, 408, 429):
            return found
        # A success that is a refusal and states no status of one: what it did is not known.
        return super().meaning(true if true >= 400 else 500, problem, is_purchase=is_purchase)


DIALECT: Final = TensorDockDialect(
    who=WHO,
    problem_of=problem_of,
    is_refusal=lambda body: problem_of(body) is not None,
    interval=timedelta(seconds=0.7),
)


# What TensorDock sells.


class _Most(Row):
    max_vcpus: Annotated[int, Field(ge=0, lt=100_000)]
    max_ram_gb: Annotated[int, Field(ge=0, lt=1_000_000)]
    max_storage_gb: Annotated[int, Field(ge=0, lt=100_000_000)]


class ModelRow(Row):
    """One model of GPU at one location; every part of its price is needed."""

    model: Annotated[Id, Field(validation_alias="v0Name")]
    display: Annotated[str, Field(validation_alias="displayName", max_length=128)]
    max_count: Annotated[int, Field(ge=0, le=64)]
    price_per_hr: Any
    resources: _Most
    pricing: dict[str, Any]
    network_features: Annotated[dict[str, Any] | None, Lenient] = None


_GB: Final = re.compile(r"[\s-]*(\d{1,3})\s*GB\b", re.IGNORECASE)
_FORM: Final = re.compile(r"\s+(pcie|sxm\d?)\b", re.IGNORECASE)


def offers_of(locations: Iterable[Any], settings: TensorDockSettings) -> tuple[list[Offer], list[Rejected]]:
    """Translate models at locations to an offer for each count, or reject them with the reason."""
    offers: list[Offer] = []
    bad: list[Rejected] = []
    seen: set[str] = set()
    for place in locations:
        number = place.get("id") if isinstance(place, dict) else None
        models = place.get("gpus") if isinstance(place, dict) else None
        if not isinstance(number, str) or row_or_none(_Place, {"id": number}) is None or not isinstance(models, list):
            bad.append(Rejected(offer_id="unreadable", reason="a location without an id or without GPUs"))
            continue
        for raw in models[:1000]:
            name = f"{row_name(raw, 'v0Name')}:{number}"
            row = row_or_reason(ModelRow, raw, offer_id=name)
            found = row if isinstance(row, Rejected) else _offers(row, place, settings)
            if isinstance(found, Rejected) or name in seen:
                again = Rejected(offer_id=name, reason="the same model twice at one location")
                bad.append(found if isinstance(found, Rejected) else again)
                continue
            seen.add(name)
            offers.extend(found)
    return offers, bad


class _Place(Row):
    id: Id


def _offers(row: ModelRow, place: Mapping[str, Any], settings: TensorDockSettings) -> list[Offer] | Rejected:
    name = f"{row.model}:{place['id']}"
    gpu, cpu = price_or_none(row.price_per_hr), price_or_none(row.pricing.get("per_vcpu_hr"))
    memory, disk = price_or_none(row.pricing.get("per_gb_ram_hr")), _per_gb(row.pricing.get("per_gb_storage_hr"))
    if gpu is None or cpu is None or memory is None or disk is None:
        return Rejected(offer_id=name, reason="a part of its price is none")
    kind, vram_mb = gpu_of(row)
    found = []
    for count in COUNTS:
        vcpus, ram = settings.vcpus_per_gpu * count, settings.memory_gb_per_gpu * count
        most = row.resources
        free = most.max_storage_gb - SYSTEM_GB - DISK_STEP_GB
        if count > row.max_count or vcpus > most.max_vcpus or ram > most.max_ram_gb or free <= 0:
            break
        price = MicroUsdPerHour(gpu * count + cpu * vcpus + memory * ram)
        found.append(
            Offer(
                provider=PROVIDER,
                offer_id=OfferId(f"{count}x{name}"),
                pool=PoolId(name),
                quotas=(QuotaId("instances"),),
                market=Market.ON_DEMAND,
                interruption=Interruption.NEVER,
                gpu=kind,
                gpu_count=count,
                gpu_vram_mb=vram_mb,
                gpu_price=price,
                on_demand_price=price,
                storage_price=MicroUsdPerGbMonth(-(-disk * HOURS_PER_STORAGE_MONTH // _PER_GB)),
                # What a job asks for is rounded up to a step, so its last gigabytes are counted whatever it asks for.
                storage_fixed=MicroUsdPerHour(-(-disk * (SYSTEM_GB + DISK_STEP_GB - 1) // _PER_GB)),
                region=place["city"][:64] if isinstance(place.get("city"), str) else "",
                cpus=float(vcpus),
                memory_mb=ram * GB_TO_MB,
                disk_gb_max=free,
                extra={"model": row.model, "location": place["id"]},
            )
        )
    return found or Rejected(offer_id=name, reason="none is left that has so many processors and so much memory")


def _per_gb(value: Any) -> int | None:
    """Read the price of a gigabyte and hour, in micro-dollars for a million of them."""
    whole = price_or_none(value)
    return None if whole is None else round(float(value) * 1_000_000 * _PER_GB)


def gpu_of(row: ModelRow) -> tuple[str, int | None]:
    """Return the canonical GPU of a model and its memory in MB, where its name says that."""
    said = _GB.search(row.display) or _GB.search(row.model)
    vram_mb = None if said is None else int(said[1]) * GB_TO_MB
    name = _GB.sub("", row.display)
    names = (name, _FORM.sub("", name))
    known = (canonical(PROVIDER, one, vram_mb) for one in names)
    return next((gpu for gpu in known if gpu_info(gpu) is not None), canonical(PROVIDER, names[0], vram_mb)), vram_mb


# The machines of the account.


class _Resources(Row):
    storage_gb: Annotated[int, Field(ge=0, lt=100_000_000)]


class TensorDockRow(Row):
    """One machine, after `flat`."""

    id: Id
    status: Annotated[str | None, Lenient] = None
    ip: Annotated[Ip | None, Lenient, Field(validation_alias="ipAddress")] = None
    rate: Annotated[Any, Field(validation_alias="rateHourly")] = None
    resources: Annotated[_Resources | None, Lenient] = None
    location: Annotated[Id | None, Lenient, Field(validation_alias="location_id")] = None

    def gpu_price(self, disk: MicroUsdPerGbMonth) -> MicroUsdPerHour | None:
        """Return its rate without the disk, which the offer counts apart, where size and price of that are known."""
        rate = price_or_none(self.rate)
        size = 0 if self.resources is None else self.resources.storage_gb
        without = 0 if rate is None else rate - disk * size // HOURS_PER_STORAGE_MONTH
        return MicroUsdPerHour(without) if without > 0 else rate


_STATES: Final = {
    **dict.fromkeys(("starting", "creating"), InstanceState.PENDING),
    "running": InstanceState.RUNNING,
    **dict.fromkeys(("stopping", "stopped", "stoppeddisassociated", "error"), InstanceState.PAUSED),
    "deleting": InstanceState.ENDING,
    "deleted": InstanceState.GONE,
}


def flat(raw: Any) -> Any:
    """Return a row with its attributes beside its id: three shapes are in use."""
    attributes = raw.get("attributes") if isinstance(raw, dict) else None
    return {**attributes, "id": raw.get("id")} if isinstance(attributes, dict) else raw


def as_instance(row: TensorDockRow, key: AttemptKey, disk: MicroUsdPerGbMonth = FREE_STORAGE) -> Instance:
    """Translate a machine; `disk` is the price at its location, or nothing where none is known yet."""
    word = (row.status or "").strip().lower()
    odd = "" if word in _STATES else f"TensorDock calls its status {quote_safely(row.status or '')!r}"
    return Instance(
        ref=InstanceRef(provider=PROVIDER, instance_id=InstanceId(row.id)),
        key=key,
        state=_STATES.get(word, InstanceState.UNKNOWN),
        market=Market.ON_DEMAND,
        # The rate of a stopped machine is that of its disk; that of a running one holds it.
        price=row.gpu_price(disk) if word in ("starting", "creating", "running") else None,
        loss=Loss.PROVISION_FAILED if word == "error" else None,
        detail=odd,
    )
