"""What Verda says, in the words of the contract: settings, refusals, types on sale, machines of the account.

Prices are for the whole machine, as texts or numbers; the memory of its GPUs is stated as their sum. Types are parsed
strictly: a price that is not understood must not be paid. Of a machine whatever can be read is kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Annotated, Any, ClassVar, Final

from pydantic import Field

from spotd_providers.contract.gpus import canonical
from spotd_providers.contract.values import (
    NO_GPU,
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
from spotd_providers.kit.http import HttpAnswer
from spotd_providers.kit.rest import Dialect, Meaning, RefusalWords, meaning_in
from spotd_providers.kit.shapes import Lenient, Row, Rows, distinct_rows, row_or_none, row_or_reason
from spotd_providers.kit.text import quote_safely
from spotd_providers.kit.vm_market import GB_TO_MB, Id, Ip, Size, VmSettings, price_or_none, row_name

PROVIDER: Final = ProviderName("verda")
WHO: Final = "Verda"
_UUID: Final = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


class VerdaSettings(ApiSettings, VmSettings):
    """The credentials' id, locations, machine image and ssh key, under `[providers.verda]`."""

    version: ClassVar = "/v1"

    base_url: str = Field(default="https://api.verda.com", description="Where Verda's API answers, without /v1.")
    client_id: str = Field(
        default="",
        pattern=r"^[A-Za-z0-9_.-]{0,128}$",
        description="Client id of the credentials; api_key is their client secret.",
    )
    locations: tuple[Annotated[str, Field(pattern=r"^[A-Z0-9-]{2,16}$")], ...] = Field(
        default=(), max_length=64, description='Only these locations, say ["FIN-03"]. Empty: all.'
    )
    image: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9._-]{1,128}$",
        description="Machine image; the newest with docker that the type takes if unset.",
    )
    ssh_key_id: str | None = Field(
        default=None, pattern=r"^[A-Za-z0-9-]{1,64}$", description="Id of an ssh key at Verda, for spotctl ssh."
    )


# Verda's words. No code says that there is no capacity, or that a machine that starts cannot end yet; sentences do.


_BY_WORDS: Final = {
    ("a provisioning instance",): Meaning.UNAVAILABLE,
    ("invalid instance id", "discontinue a discontinued"): Meaning.ABSENT,
}
_OF_PURCHASE: Final = {
    ("quota", "limit reached", "limit exceeded", "limit has been"): Meaning.QUOTA,
    ("capacity", "unavailable", "not available", "out of stock", "no available"): Meaning.NO_CAPACITY,
}
_SURE: Final = frozenset({"insufficient_funds", "unauthorized_request", "server_error", "service_unavailable"})


def problem_of(body: Any) -> RefusalWords | None:
    """Return the words of `{"code", "message"}`."""
    if not isinstance(body, dict) or not isinstance(body.get("code"), str):
        return None
    said = body.get("message")
    return RefusalWords(code=body["code"], text=said if isinstance(said, str) else "")


def meaning_of(text: str, *, is_purchase: bool) -> Meaning | None:
    """Return what a sentence of Verda's means by its words alone."""
    return meaning_in(text, {**_BY_WORDS, **_OF_PURCHASE} if is_purchase else _BY_WORDS)


class VerdaDialect(Dialect):
    """Verda's refusals, by their words where no code says it."""

    def meaning(self, status: int, problem: RefusalWords | None, *, is_purchase: bool) -> Meaning:
        if problem is not None and problem.code not in _SURE and status < 500 and status not in (401, 429):
            found = meaning_of(problem.text, is_purchase=is_purchase)
            if found is not None:
                return found
        return super().meaning(status, problem, is_purchase=is_purchase)


def object_of(answer: HttpAnswer, body: Any) -> Any:
    """Return the object of an answer: Verda lists in bare arrays, names what is new by a bare id, or says nothing."""
    if isinstance(body, dict):
        return body
    if isinstance(body, list):
        return {"rows": body}
    text = answer.text.strip().strip('"')
    if not text:
        return {}
    return {"id": text} if _UUID.fullmatch(text) else None


DIALECT: Final = VerdaDialect(
    who=WHO,
    problem_of=problem_of,
    object_of=object_of,
    codes={
        "unauthorized_request": Meaning.AUTH,
        "forbidden_action": Meaning.AUTH,
        "insufficient_funds": Meaning.NO_BALANCE,
        "not_found": Meaning.ABSENT,
        "server_error": Meaning.UNAVAILABLE,
        "service_unavailable": Meaning.UNAVAILABLE,
    },
    interval=timedelta(seconds=1),
)


# What Verda sells.


_GPU: Final = re.compile(r"\s*(?:(?P<count>\d{1,3})\s*x\s+)?(?P<name>.{2,64}?)(?:\s+\d{1,4}\s*GB)?\s*", re.IGNORECASE)


class _Size(Row):
    size_in_gigabytes: Size


class _Cores(Row):
    number_of_cores: Annotated[int, Field(ge=0, lt=100_000)]


class _Gpu(Row):
    description: Annotated[str | None, Lenient] = None
    number_of_gpus: Annotated[int, Field(ge=0, le=64)]


class VerdaTypeRow(Row):
    """A kind of machine; `spot_price` and `price_per_hour` are judged apart, as each is an offer of its own."""

    id: Annotated[Id, Field(validation_alias="instance_type")]
    price_per_hour: Any = None
    spot_price: Any = None
    currency: str = "usd"
    manufacturer: Annotated[str | None, Lenient] = None
    gpu: _Gpu | None = None
    gpu_memory: Annotated[_Size | None, Lenient] = None
    memory: Annotated[_Size | None, Lenient] = None
    cpu: Annotated[_Cores | None, Lenient] = None


class _Stock(Row):
    location_code: Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{2,32}$")]
    availabilities: list[Any]


class _VolumeType(Row):
    type: str
    price: dict[str, Any]


def types_of(rows: list[Any]) -> Rows[VerdaTypeRow]:
    """Parse every kind of machine, or reject it with the field that is wrong."""
    return distinct_rows(
        (row_or_reason(VerdaTypeRow, raw, offer_id=row_name(raw, "instance_type")) for raw in rows), what="type"
    )


def stock_of(rows: Iterable[Any]) -> dict[str, frozenset[str]] | None:
    """Return the types that each location has now; `None` if any part of the answer cannot be read."""
    found: dict[str, frozenset[str]] = {}
    for raw in rows:
        row = row_or_none(_Stock, raw)
        if row is None or not all(isinstance(one, str) for one in row.availabilities):
            return None
        found[row.location_code] = found.get(row.location_code, frozenset()) | frozenset(row.availabilities)
    return found


def volume_price(rows: Iterable[Any]) -> MicroUsdPerGbMonth | None:
    """Return what the disk of a machine costs: NVMe's price, or the highest where no type is called so."""
    prices: dict[str, int] = {}
    for raw in rows:
        row = row_or_none(_VolumeType, raw)
        if row is None or str(row.price.get("currency", "usd")).lower() != "usd":
            continue
        price = price_or_none(row.price.get("price_per_month_per_gb", row.price.get("monthly_per_gb")))
        if price is not None:
            prices[row.type.lower()] = price
    nvme = [price for name, price in prices.items() if "nvme" in name and "shared" not in name]
    return MicroUsdPerGbMonth(max(nvme or prices.values())) if prices else None


def offers_of(
    rows: Iterable[VerdaTypeRow],
    stock: Mapping[Market, Mapping[str, frozenset[str]]],
    disk: MicroUsdPerGbMonth,
    settings: VerdaSettings,
) -> tuple[list[Offer], list[Rejected]]:
    """Translate kinds of machines to one offer for each location and market that has some, or reject them."""
    offers: list[Offer] = []
    bad: list[Rejected] = []
    for row in rows:
        gpu = gpu_of(row)
        reason = "currency: not US dollars" if row.currency.lower() != "usd" else gpu if isinstance(gpu, str) else ""
        is_sold = False
        for market, places in stock.items():
            said = row.spot_price if market is Market.SPOT else row.price_per_hour
            if reason or (market is Market.SPOT and said is None):
                continue
            price = price_or_none(said)
            if price is None:
                bad.append(Rejected(offer_id=f"{row.id}:{market}", reason=f"its price on the {market} market is none"))
                continue
            here = sorted(place for place, types in places.items() if row.id in types)
            wanted = [place for place in here if not settings.locations or place in settings.locations]
            is_sold = is_sold or bool(wanted)
            if not isinstance(gpu, str):
                offers.extend(_offer(row, market, place, price, gpu, disk) for place in wanted)
        if reason or not is_sold:
            bad.append(Rejected(offer_id=row.id, reason=reason or "sold out in your locations now"))
    return offers, bad


def gpu_of(row: VerdaTypeRow) -> tuple[str, int, int | None] | str:
    """Return the canonical GPU of a kind of machine, how many, and the memory of one in MB; else what is wrong."""
    if row.gpu is None or row.gpu.number_of_gpus == 0:
        return NO_GPU, 0, None
    count = row.gpu.number_of_gpus
    said = _GPU.fullmatch(row.gpu.description or "")
    if said is None:
        return "gpu.description: Verda does not say which GPU this is"
    if said["count"] is not None and int(said["count"]) != count:
        return "gpu.description: another number of GPUs than number_of_gpus"
    if (row.manufacturer or "").upper() == "AMD" or said["name"].upper().startswith("AMD"):
        return "an AMD GPU, for which Verda's machine images have no driver"
    size = row.gpu_memory.size_in_gigabytes if row.gpu_memory is not None else 0
    vram_mb = round(size / count) * GB_TO_MB or None
    return canonical(PROVIDER, said["name"], vram_mb), count, vram_mb


def _offer(
    row: VerdaTypeRow,
    market: Market,
    place: str,
    price: MicroUsdPerHour,
    gpu: tuple[str, int, int | None],
    disk: MicroUsdPerGbMonth,
) -> Offer:
    name = f"{row.id}:{place}:{market}"
    return Offer(
        provider=PROVIDER,
        offer_id=OfferId(name),
        pool=PoolId(name),
        quotas=(QuotaId("instances"),),
        market=market,
        interruption=Interruption.SUDDEN if market is Market.SPOT else Interruption.NEVER,
        gpu=gpu[0],
        gpu_count=gpu[1],
        gpu_vram_mb=gpu[2],
        gpu_price=price,
        on_demand_price=price_or_none(row.price_per_hour),
        storage_price=disk,
        region=place,
        cpus=None if row.cpu is None else float(row.cpu.number_of_cores),
        memory_mb=None if row.memory is None else round(row.memory.size_in_gigabytes * GB_TO_MB),
        extra={"type": row.id, "location": place},
    )


# The machines of the account, and what they leave behind.


class VerdaInstanceRow(Row):
    """One machine. Its token for Jupyter is a secret, and not read."""

    id: Id
    status: Annotated[str | None, Lenient] = None
    price_per_hour: Any = None
    is_spot: Annotated[bool | None, Lenient] = None
    contract: Annotated[str | None, Lenient] = None
    os_volume_id: Annotated[Id | None, Lenient] = None
    ip: Annotated[Ip | None, Lenient] = None

    @property
    def market(self) -> Market | None:
        said = self.contract if self.is_spot is None else "SPOT" if self.is_spot else "PAY_AS_YOU_GO"
        return {"SPOT": Market.SPOT, "PAY_AS_YOU_GO": Market.ON_DEMAND, "LONG_TERM": Market.ON_DEMAND}.get(said or "")


_STATES: Final = {
    **dict.fromkeys(("new", "ordered", "pending", "provisioning", "validating"), InstanceState.PENDING),
    "running": InstanceState.RUNNING,
    **dict.fromkeys(("offline", "starting_hibernation", "hibernating", "restoring"), InstanceState.PAUSED),
    **dict.fromkeys(("no_capacity", "error"), InstanceState.PAUSED),
    "deleting": InstanceState.ENDING,
    **dict.fromkeys(("discontinued", "deleted", "notfound"), InstanceState.GONE),
    "unknown": InstanceState.UNKNOWN,
}
_DETAILS: Final = {
    "no_capacity": "Verda had no capacity for it",
    "error": "Verda calls its state an error",
    "offline": "it was shut down, by its own script or by Verda",
}


def as_instance(row: VerdaInstanceRow, key: AttemptKey, *, ended_by_us: bool) -> Instance:
    word = (row.status or "").strip().lower()
    loss = Loss.PROVISION_FAILED if word in ("no_capacity", "error") else None
    if row.market is Market.SPOT and word == "discontinued" and not ended_by_us:
        loss = Loss.PREEMPTED
    odd = "" if word in _STATES else f"Verda calls its status {quote_safely(row.status or '')!r}"
    return Instance(
        ref=InstanceRef(provider=PROVIDER, instance_id=InstanceId(row.id)),
        key=key,
        state=_STATES.get(word, InstanceState.UNKNOWN),
        market=row.market,
        price=price_or_none(row.price_per_hour),
        loss=loss,
        detail=_DETAILS.get(word, odd),
    )
