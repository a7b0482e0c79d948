"""TensorDock as a spotd provider: what it says, the requests of its own, and the descriptor.

It is a plain market, on demand only: no spot price is documented for its present API. An empty list of locations is no
proof that nothing is sold, so it is never taken for the market.

A machine is paid in parts: GPUs, processors, memory and disk. Refusals may come as a success whose body has a status.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from spotd_providers.contract.errors import RequestRejected, Unavailable
from spotd_providers.contract.gpus import canonical, gpu_info
from spotd_providers.contract.provider import Services
from spotd_providers.contract.values import (
    FREE_STORAGE,
    HOURS_PER_STORAGE_MONTH,
    AttemptKey,
    Instance,
    InstanceId,
    InstanceRef,
    InstanceState,
    Interruption,
    LaunchRequest,
    Loss,
    Market,
    MicroUsdPerGbMonth,
    MicroUsdPerHour,
    Offer,
    OfferId,
    OfferPage,
    OfferQuery,
    PoolId,
    Power,
    ProviderName,
    QuotaId,
    Rejected,
    ShellAddress,
)
from spotd_providers.kit.boundary import ApiSettings
from spotd_providers.kit.calls import Page
from spotd_providers.kit.rest import Dialect, Meaning, RefusalWords, RestClient, meaning_in, rest_opener
from spotd_providers.kit.shapes import ROWS_MAX, Lenient, Row, listed_reasons, row_or_none, row_or_reason
from spotd_providers.kit.template import bound
from spotd_providers.kit.text import quote_safely
from spotd_providers.kit.vm_boot import doorless_ssh_key
from spotd_providers.kit.vm_market import (
    GB_TO_MB,
    Id,
    Ip,
    VmMarket,
    VmSettings,
    market_plugin,
    missing_powers,
    price_or_none,
    row_name,
    user_data,
)

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


NO_LOGIN: Final = "TensorDock takes a login only in cloud-init, which every process of the machine may read"
EMPTY: Final = "TensorDock lists no location at all, which is no proof that nothing is sold (a deposit may be needed)"
_BOOT: Final = "/var/lib/spotd-boot.sh"
_NO_SHELL: Final = "name your ssh key in providers.tensordock.ssh_key_id; machines that start afterwards have it"
_MISSING: Final = missing_powers(
    WHO,
    SPOT="TensorDock documents no spot price for its present API, so spotd rents on demand",
    BALANCE="TensorDock's API states no balance; watch it on its website",
)


class TensorDockProvider(VmMarket):
    """The requests that are TensorDock's own."""

    name = PROVIDER
    who = WHO
    mark = "name"
    no_login = NO_LOGIN
    key_hint = "create an API token in TensorDock's dashboard and put it in api_key"
    list_path = "/api/v2/instances"

    def __init__(self, client: RestClient, settings: TensorDockSettings, services: Services) -> None:
        super().__init__(client, services, _MISSING if settings.ssh_key_id else {**_MISSING, Power.SHELL: _NO_SHELL})
        self._settings = settings
        self._gpus_by_name = True
        self._disk_prices: dict[str, MicroUsdPerGbMonth] = {}

    async def offers(self, query: OfferQuery) -> OfferPage:
        """Return every model at every location, for one, two, four and eight GPUs."""
        at = self._services.clock.now()
        if Market.ON_DEMAND not in query.markets:
            return OfferPage(offers=(), at=at)
        data = (await self._client.ask("GET", "/api/v2/locations", what="the list of locations")).get("data")
        rows = data.get("locations") if isinstance(data, dict) else None
        if not isinstance(rows, list) or len(rows) > ROWS_MAX:
            raise Unavailable("TensorDock's answer about locations is no list")
        offers, bad = offers_of(rows, self._settings)
        for one in offers:  # where models differ, the lowest: too little taken off a rate breaks no budget
            known = self._disk_prices.get(one.extra["location"], one.storage_price)
            self._disk_prices[one.extra["location"]] = min(known, one.storage_price)
        bound(self._disk_prices)
        return OfferPage(
            offers=tuple(offers),
            rejected=listed_reasons(bad),
            complete=bool(rows),
            note="" if rows else EMPTY,
            at=at,
        )

    def _address(self, raw: Any) -> ShellAddress | None:
        row = row_or_none(TensorDockRow, raw)
        is_up = row is not None and (row.status or "").lower() == "running"
        return ShellAddress(host=row.ip, port=22, user="user") if is_up and row and row.ip else None

    async def _page(self, _token: str | None) -> Page:
        data = (await self._client.ask("GET", self.list_path, what="the list of instances")).get("data")
        rows = data.get("instances") if isinstance(data, dict) else data
        if not isinstance(rows, list):
            raise Unavailable("TensorDock's answer about instances is no list")
        return [flat(one) for one in rows[:ROWS_MAX]], None if len(rows) <= ROWS_MAX else ""

    async def _row(self, ref: InstanceRef) -> Any | None:
        answer = await self._client.ask_or_absent("GET", self._path(ref), what="an instance")
        if answer is None:
            return None
        raw = flat(answer.get("data", answer))
        if not isinstance(raw, dict) or raw.get("id") != ref.instance_id:
            raise Unavailable(f"TensorDock's answer about instance {ref.instance_id} is about none")
        return raw

    def _machine(self, raw: Any, key: AttemptKey) -> Instance | None:
        row = row_or_none(TensorDockRow, raw)
        return None if row is None else as_instance(row, key, self._disk_prices.get(row.location or "", FREE_STORAGE))

    async def _buy(self, request: LaunchRequest) -> Instance:
        script = user_data(request, who=WHO, extra=("model", "location"), container=self._settings.container)
        offer, count = request.offer, {"count": request.offer.gpu_count}
        model = offer.extra["model"]
        key = self._settings.ssh_key_id
        attributes = {
            "name": request.key,
            "type": "virtualmachine",
            "image": self._settings.image,
            "location_id": offer.extra["location"],
            "resources": {
                "vcpu_count": self._settings.vcpus_per_gpu * offer.gpu_count,
                "ram_gb": self._settings.memory_gb_per_gpu * offer.gpu_count,
                "storage_gb": _disk_gb(request),
                "gpus": {model: count} if self._gpus_by_name else {"model": {"gpuV0Name": model, **count}},
            },
            "useDedicatedIp": key is not None,  # nothing has to reach the machine but the user's own ssh
            **({"ssh_key_id": key} if key else {"ssh_key": doorless_ssh_key(self._services.rng.getrandbits(255))}),
            "cloud_init": {
                "write_files": [{"path": _BOOT, "content": script, "permissions": "0755"}],
                "runcmd": [f"sh {_BOOT}"],
            },
        }
        body = {"data": {"type": "virtualmachine", "attributes": attributes}}
        try:
            answer = await self._purchase(self.list_path, body, request)
        except RequestRejected as exc:
            if "gpus" not in exc.reason.lower():
                raise
            self._gpus_by_name = not self._gpus_by_name  # both forms are documented
            raise Unavailable("TensorDock refuses this form of naming GPUs; the next launch takes the other") from exc
        data = answer.get("data")
        return self._new_machine(data if isinstance(data, dict) else {}, request)

    def _price_limit(self, request: LaunchRequest) -> int:
        """Allow for the disk, which is in the rate of a machine at a location whose prices are not known yet."""
        return super()._price_limit(request) + request.offer.storage_price * _disk_gb(request) // 720 + 1


def _disk_gb(request: LaunchRequest) -> int:
    return SYSTEM_GB + -(-request.disk_gb // DISK_STEP_GB) * DISK_STEP_GB


PLUGIN: Final = market_plugin(
    TensorDockProvider,
    TensorDockSettings,
    rest_opener(TensorDockProvider, DIALECT, PROVIDER),
    title="TensorDock",
    missing=_MISSING,
    shell_reason="with `ssh_key_id`",
    provision_timeout=timedelta(minutes=40),
)
