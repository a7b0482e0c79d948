"""Lambda Cloud as a spotd provider: what it says, the requests of its own, and the descriptor.

It is a plain market, on demand only. A listed capacity is not reserved. A launch has no idempotency token and names may
repeat, so the key is the machine's name and a tag of it, and after a lost answer the list of machines decides.

Types are parsed strictly: a price that is not understood must not be paid. Of a machine whatever can be read is kept: a
row that is dropped is a machine that bills on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Annotated, Any, ClassVar, Final

import anyio
from pydantic import Field

from spotd_providers.contract.errors import ProviderError, Unavailable
from spotd_providers.contract.gpus import canonical, gpu_info
from spotd_providers.contract.provider import Services
from spotd_providers.contract.values import (
    NO_GPU,
    AttemptKey,
    Billing,
    Instance,
    InstanceId,
    InstanceRef,
    InstanceState,
    Interruption,
    LaunchRequest,
    Loss,
    Market,
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
from spotd_providers.kit.calls import judge_apart, rejected
from spotd_providers.kit.http import HttpAnswer
from spotd_providers.kit.rest import Dialect, Meaning, RestClient, error_problem, rest_opener
from spotd_providers.kit.shapes import Lenient, Row, Rows, distinct_rows, listed_reasons, row_or_none, row_or_reason
from spotd_providers.kit.template import Check
from spotd_providers.kit.text import quote_safely
from spotd_providers.kit.vm_boot import doorless_ssh_key
from spotd_providers.kit.vm_market import Id, Ip, VmMarket, VmSettings, market_plugin, missing_powers, user_data

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


NO_LOGIN: Final = "Lambda takes a login only in the user data, which every process of the machine may read"
_NO_SHELL: Final = "name your ssh key at Lambda in providers.lambda.ssh_key, and machines that start afterwards have it"
_MISSING: Final = missing_powers(
    WHO,
    SPOT="Lambda sells on-demand only",
    BALANCE="Lambda bills a card each week and states no balance",
    BILLING="Lambda's API states no charges; its website shows the invoices",
    STOP_RESUME="a Lambda machine cannot be stopped, only ended",
    SELF_TERMINATE="a Lambda machine that shuts itself down may be billed on, so the daemon ends it",
)


class LambdaProvider(VmMarket):
    """The requests that are Lambda's own."""

    name = PROVIDER
    who = WHO
    no_login = NO_LOGIN
    key_hint = "create an API key at cloud.lambda.ai/api-keys and put it in api_key"
    list_path = "/api/v1/instances"
    label_tag = KEY_TAG

    def __init__(self, client: RestClient, settings: LambdaSettings, services: Services) -> None:
        super().__init__(client, services, _MISSING if settings.ssh_key else {**_MISSING, Power.SHELL: _NO_SHELL})
        self._settings = settings
        self._ssh_key = settings.ssh_key or f"spotd-{services.install}"
        self._ssh_key_is_there = False
        self._one_ssh_key = anyio.Lock()

    async def offers(self, query: OfferQuery) -> OfferPage:
        """Return every type in every region that has some now; one answer holds the whole market."""
        at = self._services.clock.now()
        if Market.ON_DEMAND not in query.markets:
            return OfferPage(offers=(), at=at)
        data = await self._client.ask("GET", "/api/v1/instance-types", what="the list of types")
        rows = await judge_apart(lambda: sales_of(data), rows=len(data))
        offers, odd = offers_of(rows.rows, self._settings)
        return OfferPage(
            offers=tuple(offers),
            rejected=listed_reasons((*rows.rejected, *odd)),
            complete=not rows.is_cut and bool(rows.rows or not data),
            at=at,
        )

    def _address(self, raw: Any) -> ShellAddress | None:
        row = row_or_none(LambdaInstanceRow, raw)
        is_up = row is not None and row.status == "active"
        return ShellAddress(host=row.ip, port=22, user="ubuntu") if is_up and row and row.ip else None

    def _further_checks(self) -> Sequence[Check]:
        async def ssh() -> str:
            if await self._has_ssh_key():
                return f"{self._ssh_key!r} is registered"
            if self._settings.ssh_key is None:
                return f"{self._ssh_key!r} will be registered at the first launch"
            raise Unavailable(f"Lambda knows no ssh key {self._ssh_key!r}")

        return [Check(name="ssh key", ask=ssh, hint="name one of your keys at cloud.lambda.ai/ssh-keys, or none")]

    def _machine(self, raw: Any, key: AttemptKey) -> Instance | None:
        row = row_or_none(LambdaInstanceRow, raw)
        return None if row is None else as_instance(row, key)

    async def _buy(self, request: LaunchRequest) -> Instance:
        offer = request.offer
        script = user_data(request, who=WHO, extra=("type", "region"), container=self._settings.container)
        family = self._settings.image_family
        body = {
            "region_name": offer.extra["region"],
            "instance_type_name": offer.extra["type"],
            "ssh_key_names": [self._ssh_key],
            "name": request.key,
            "tags": [{"key": KEY_TAG, "value": request.key}],
            "user_data": script,
            **({} if family is None else {"image": {"family": family}}),
        }
        await self._register_ssh_key()
        try:
            answer = await self._purchase("/api/v1/instance-operations/launch", body, request)
        except ProviderError:
            self._ssh_key_is_there = False  # it may be what the launch lacks; the next one asks again
            raise
        made = answer.get("instance_ids")
        named = {"id": made[0]} if isinstance(made, list) and len(made) == 1 else {}
        return self._new_machine(named, request)

    async def _ask_end(self, ref: InstanceRef) -> None:
        path, body = "/api/v1/instance-operations/terminate", {"instance_ids": [ref.instance_id]}
        await self._client.ask_or_absent("POST", path, what="an end", json_body=body)

    async def _has_ssh_key(self) -> bool:
        rows = await self._list("/api/v1/ssh-keys", "the list of ssh keys")
        return any(isinstance(row, dict) and row.get("name") == self._ssh_key for row in rows)

    async def _register_ssh_key(self) -> None:
        """Make sure that the ssh key exists that a launch must name."""
        async with self._one_ssh_key:
            if self._ssh_key_is_there or await self._has_ssh_key():
                self._ssh_key_is_there = True
                return
            if self._settings.ssh_key is not None:
                raise rejected(WHO, "ssh_key", f"Lambda knows no ssh key {self._ssh_key!r}")
            body = {"name": self._ssh_key, "public_key": doorless_ssh_key(self._services.rng.getrandbits(255))}
            await self._client.ask("POST", "/api/v1/ssh-keys", what="registering an ssh key", json_body=body)
            self._ssh_key_is_there = True


PLUGIN: Final = market_plugin(
    LambdaProvider,
    LambdaSettings,
    rest_opener(LambdaProvider, DIALECT, PROVIDER),
    title="Lambda Cloud",
    missing=_MISSING,
    shell_reason="with `ssh_key`",
    # A machine of eight GPUs was seen to boot for twenty minutes, and then pulls the image.
    provision_timeout=timedelta(minutes=40),
    bills_from_running=True,
    bills_by=timedelta(minutes=1),
)
