"""What an OpenStack cloud says, in the words of the contract: settings, refusals, flavours, servers.

No call states a price, so the config does, by flavour. Flavours are parsed strictly; of a server whatever can be read
is kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar, Final

from pydantic import AliasPath, Field, field_validator

from spotd_providers.contract.gpus import UnknownGpu, canonical, resolve
from spotd_providers.contract.values import (
    NO_GPU,
    AttemptKey,
    Billing,
    InstallId,
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
from spotd_providers.kit.boundary import AdapterSettings, ApiSettings, Dollars, safe_base_url
from spotd_providers.kit.http import HttpAnswer
from spotd_providers.kit.rest import Dialect, Meaning, RefusalWords
from spotd_providers.kit.shapes import Instant, Lenient, Row, Rows, distinct_rows, row_or_reason
from spotd_providers.kit.text import clean, quote_safely
from spotd_providers.kit.vm_market import Id, Ip, VmSettings, row_name

PROVIDER: Final = ProviderName("openstack")
WHO: Final = "OpenStack"
KEY_NAME: Final = "spotd-key"
INSTALL_NAME: Final = "spotd-install"
FLAVOR_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9 ._+()/-]{0,127}$"


class OpenstackFlavor(AdapterSettings):
    """What a flavour costs, and which GPUs it has where the cloud does not say it."""

    name: str = Field(pattern=FLAVOR_NAME, description="As `openstack flavor list` shows it.")
    price: Dollars = Field(description="$ for an hour of the whole machine; may be 0.")
    gpu: str | None = Field(default=None, pattern=r"^[A-Za-z0-9 _.-]{1,64}$", description="What its GPUs are.")
    gpus: int | None = Field(default=None, ge=0, le=64, description="How many it has; 0 for a machine without any.")
    market: Market = Field(
        default=Market.ON_DEMAND, description='"spot" if the operator deletes its machines at any time.'
    )


class OpenstackSettings(ApiSettings, VmSettings):
    """The cloud, the credential, the region, image, network and prices, under `[providers.openstack]`."""

    version: ClassVar = "/v3"

    base_url: str = Field(default="", description='Where Keystone answers, say "https://auth.cloud.ovh.net".')
    credential_id: str = Field(
        default="",
        pattern=r"^[A-Za-z0-9_-]{0,128}$",
        description="Id of an application credential; api_key is its secret.",
    )
    username: str = Field(default="", max_length=255, description="Or a user, whose password is api_key.")
    domain: str = Field(default="Default", max_length=64, description="The domain of that user.")
    project_id: str = Field(default="", pattern=r"^[A-Za-z0-9-]{0,64}$", description="The project of that user.")
    region: str = Field(
        default="", pattern=r"^[A-Za-z0-9_. -]{0,64}$", description="Region to rent in; needed where there are several."
    )
    image: str = Field(
        default="", max_length=255, description="Name or id of a machine image with docker and the GPU's driver."
    )
    network: str = Field(default="", max_length=255, description="Name or id of the network; the cloud's own if unset.")
    ssh_key: str | None = Field(
        default=None, pattern=r"^[A-Za-z0-9 ._@-]{1,255}$", description="Name of your key pair there, for spotctl ssh."
    )
    ssh_user: str = Field(default="ubuntu", pattern=r"^[a-z_][a-z0-9_-]{0,31}$", description="Who logs in with it.")
    disk_price: Dollars = Field(
        default=0, description="$ per GB and month of a volume, which flavours without a disk boot from."
    )
    flavors: tuple[OpenstackFlavor, ...] = Field(
        default=(),
        max_length=500,
        description="Tables [[providers.openstack.flavors]]: what is offered, and its price.",
    )

    @field_validator("base_url")
    @classmethod
    def _keeps_the_key_safe(cls, value: str) -> str:
        return value and safe_base_url(value, example="https://auth.cloud.ovh.net").removesuffix(cls.version)

    @field_validator("flavors")
    @classmethod
    def _are_distinct(cls, value: tuple[OpenstackFlavor, ...]) -> tuple[OpenstackFlavor, ...]:
        if len({one.name for one in value}) < len(value):
            raise ValueError("name each flavour once")
        return value

    def missing(self) -> list[str]:
        """Return the settings without which nothing can be rented."""
        needed = () if self.credential_id else ("username", "project_id")
        names = [name for name in ("base_url", *needed, "image") if not getattr(self, name)]
        return ["credential_id (or username and project_id)" if name == "username" else name for name in names]

    def flavor(self, name: str) -> OpenstackFlavor | None:
        return next((one for one in self.flavors if one.name == name), None)


# OpenStack's words: an object of one key, which is named after the fault.


_ROUTE: Final = "the resource could not be found"
"""Nova's words for a path that it does not know, in place of an object that does not exist."""


def problem_of(body: Any) -> RefusalWords | None:
    """Return the words of `{"itemNotFound": {"code", "message"}}`, and of Keystone's and Neutron's `error` alike."""
    if not isinstance(body, dict) or len(body) != 1:
        return None
    code, said = next(iter(body.items()))
    text = said.get("message") if isinstance(said, dict) else said if code in ("error", "NeutronError") else None
    return RefusalWords(code=code, text=text) if isinstance(code, str) and isinstance(text, str) else None


class OpenstackDialect(Dialect):
    """OpenStack's refusals; one status stands for several, which only the sentence says."""

    def meaning(self, status: int, problem: RefusalWords | None, *, is_purchase: bool) -> Meaning:
        text = problem.text.lower() if problem is not None else ""
        if status in (403, 409, 413) and any(word in text for word in ("quota", "exceeds", "maximum number of")):
            return Meaning.QUOTA
        if status == 413:
            return Meaning.TOO_OFTEN
        if is_purchase and status == 403 and any(what in text for what in ("external network", "zero disk")):
            return Meaning.REJECTED  # it is what was asked for that is forbidden, and the key is good
        if is_purchase and status in (400, 404) and "flavor" in text and "could not be found" in text:
            return Meaning.OFFER_GONE
        found = super().meaning(status, problem, is_purchase=is_purchase)
        if found is Meaning.ABSENT and (problem is None or problem.code != "itemNotFound" or _ROUTE in text):
            return Meaning.REJECTED  # a gateway's word about a path is no witness of an end
        return found


def object_of(answer: HttpAnswer, body: Any) -> Any:
    """Return the object of an answer; an empty one where OpenStack only accepts."""
    return {} if body is None and not answer.body else body


DIALECT: Final = OpenstackDialect(who=WHO, problem_of=problem_of, object_of=object_of, buy_timeout_s=60.0)


# The flavours. What an operator's names mean is known of OVHcloud's only.


_OVH: Final = {
    "t1": ("V100_16", 45), "t1-le": ("V100_16", 45), "t2": ("V100S", 45), "t2-le": ("V100S", 45), "l4": ("L4", 90),
    "l40s": ("L40S", 90), "a10": ("A10", 45), "a100": ("A100_PCIE_80", 180), "h100": ("H100_PCIE", 380),
    "rtx5000": ("QUADRO_RTX_5000", 28),
}  # fmt: skip
"""GPU by family, and the memory in GB, which ends the name, of a machine with one."""
_OVH_NAME: Final = re.compile(r"(?P<family>[a-z0-9]+(?:-le)?)-(?P<memory>\d{2,4})")
_ALIAS: Final = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9 _.-]{0,63}):(?P<count>\d{1,2})")
ALIASES_MAX: Final = 20
_SHARE: Final = re.compile(r"resources[^:]*:.*GPU.*")


_Whole = Annotated[int, Field(ge=0, lt=100_000_000)]


class FlavorRow(Row):
    """A flavour; what is reserved to operators may be left out."""

    id: Id
    name: Annotated[str, Field(pattern=FLAVOR_NAME)]
    vcpus: Annotated[_Whole | None, Lenient] = None
    ram: Annotated[_Whole | None, Lenient] = None
    disk: _Whole
    is_disabled: Annotated[bool | None, Lenient, Field(validation_alias="OS-FLV-DISABLED:disabled")] = None
    extra_specs: Annotated[dict[str, Any] | None, Lenient] = None


def flavors_of(rows: Iterable[Any]) -> Rows[FlavorRow]:
    """Parse every flavour, or reject it with the field that is wrong."""
    return distinct_rows(
        (row_or_reason(FlavorRow, raw, offer_id=row_name(raw, "name")) for raw in rows), what="flavour"
    )


def _is_gpu(name: str) -> bool:
    try:
        return bool(resolve(name))
    except UnknownGpu:
        return False


def _alias_gpus(said: Any) -> list[tuple[str, int]]:
    """Return the GPUs that an alias such as `h100:2,nic:1` asks for; none where a part of it cannot be read."""
    parts = [_ALIAS.fullmatch(one.strip()) for one in said.split(",")[:ALIASES_MAX]] if isinstance(said, str) else []
    read = [(one["name"], int(one["count"])) for one in parts if one is not None]
    return [(name, count) for name, count in read if count and _is_gpu(name)] if len(read) == len(parts) else []


def _ovh_gpus(name: str) -> tuple[str, int]:
    """Return the GPU that a flavour of this name has at OVHcloud, and how many; none of a size that fits no number."""
    parts = _OVH_NAME.fullmatch(name)
    gpu, memory = _OVH.get(parts["family"], ("", 0)) if parts else ("", 0)
    number, rest = divmod(int(parts["memory"]), memory) if parts and memory else (0, 0)
    return (gpu, number) if number and not rest else ("", 0)


def gpus_of(row: FlavorRow, said: OpenstackFlavor) -> tuple[str, int] | str:
    """Return the canonical GPU of a flavour and how many it has; else what is wrong.

    The config knows best, then what the operator wrote for the scheduler, then OVHcloud's names.
    """
    if said.gpus == 0:
        return NO_GPU, 0
    specs = row.extra_specs or {}
    gpus, (named, number) = _alias_gpus(specs.get("pci_passthrough:alias")), _ovh_gpus(row.name)
    if said.gpu is not None:
        count = said.gpus or (gpus[0][1] if len(gpus) == 1 else 0 if gpus else number)
        known = canonical(PROVIDER, said.gpu), count
        return known if count else "the cloud does not say how many GPUs it has: name the number in its table as gpus"
    if any(_SHARE.fullmatch(name) for name in specs):
        return "a share of a GPU: name it in its table as gpu, with gpus"
    if len(gpus) > 1:
        return "it has several kinds of GPU: name one in its table as gpu, with gpus"
    if gpus:
        return canonical(PROVIDER, gpus[0][0]), said.gpus or gpus[0][1]
    if named and said.gpus in (None, number):
        return named, number
    return "the cloud does not say which GPUs it has: name them in its table as gpu and gpus, or gpus = 0"


def offers_of(
    rows: Iterable[FlavorRow], settings: OpenstackSettings, region: str
) -> tuple[list[Offer], list[Rejected]]:
    """Translate each flavour that has a price to one offer, or reject it."""
    offers: list[Offer] = []
    bad: list[Rejected] = []
    names: dict[str, int] = {}
    kept = list(rows)
    for row in kept:
        names[row.name] = names.get(row.name, 0) + 1
    for row in kept:
        said = settings.flavor(row.name)
        gpus = "no price: add a table [[providers.openstack.flavors]]" if said is None else gpus_of(row, said)
        if row.is_disabled:
            gpus = "its operator disabled it"
        elif names[row.name] > 1:
            gpus = "two flavours have this name"
        if isinstance(gpus, str) or said is None:
            bad.append(Rejected(offer_id=row.name, reason=str(gpus)))
        else:
            offers.append(_offer(row, said, gpus, settings, region))
    return offers, bad


def _offer(
    row: FlavorRow, said: OpenstackFlavor, gpus: tuple[str, int], settings: OpenstackSettings, region: str
) -> Offer:
    is_spot, price = said.market is Market.SPOT, MicroUsdPerHour(said.price)
    return Offer(
        provider=PROVIDER,
        offer_id=OfferId(row.name),
        pool=PoolId(f"{region}:{row.name}"),
        quotas=(QuotaId("instances"),),
        market=said.market,
        interruption=Interruption.SUDDEN if is_spot else Interruption.NEVER,
        gpu=gpus[0],
        gpu_count=gpus[1],
        gpu_price=price,
        on_demand_price=None if is_spot else price,
        storage_price=MicroUsdPerGbMonth(0 if row.disk else settings.disk_price),
        region=region,
        cpus=None if row.vcpus is None else float(row.vcpus),
        memory_mb=row.ram,
        disk_gb_max=row.disk or None,
        extra={"flavor": row.id, "name": row.name, "disk": str(row.disk)},
    )


# The servers of the project.


class _Address(Row):
    addr: Ip
    version: int
    kind: Annotated[str | None, Lenient, Field(validation_alias="OS-EXT-IPS:type")] = None


class _Fault(Row):
    message: Annotated[str, Field(max_length=5000)]


class ServerRow(Row):
    """One server. What it was given to run is never in an answer that is read."""

    id: Id
    status: Annotated[str | None, Lenient] = None
    task: Annotated[str | None, Lenient, Field(validation_alias="OS-EXT-STS:task_state")] = None
    fault: Annotated[_Fault | None, Lenient] = None
    created: Annotated[Instant | None, Lenient] = None
    launched: Annotated[str | None, Lenient, Field(validation_alias="OS-SRV-USG:launched_at")] = None
    host: Annotated[str | None, Lenient, Field(validation_alias="hostId")] = None
    flavor_name: Annotated[str | None, Lenient, Field(validation_alias=AliasPath("flavor", "original_name"))] = None
    flavor_id: Annotated[str | None, Lenient, Field(validation_alias=AliasPath("flavor", "id"))] = None
    access_ip: Annotated[Ip | None, Lenient, Field(validation_alias="accessIPv4")] = None
    addresses: Annotated[dict[str, list[Any]] | None, Lenient] = None
    image: Any = None
    volumes: Annotated[list[Any] | None, Lenient, Field(validation_alias="os-extended-volumes:volumes_attached")] = None
    locked_reason: Annotated[str | None, Lenient] = None

    @property
    def is_deleting(self) -> bool:
        return self.task in ("deleting", "soft-deleting")

    @property
    def ip(self) -> str | None:
        """The address for ssh: the one that its owner set, a floating one, else the first."""
        if self.access_ip:
            return self.access_ip
        listed = [raw for rows in (self.addresses or {}).values() for raw in rows[:20]][:100]
        found = []
        for raw in listed:
            row = row_or_reason(_Address, raw, offer_id="")
            if not isinstance(row, Rejected) and row.version == 4:
                found.append(row)
        found.sort(key=lambda one: one.kind != "floating")
        return found[0].addr if found else None


_OFF: Final = "it was shut down, by its own script or by the cloud, and is billed on"
_STATES: Final = {
    "build": (InstanceState.PENDING, Billing.UNKNOWN),
    **dict.fromkeys(("deleted", "soft_deleted"), (InstanceState.GONE, Billing.NOTHING)),
    **dict.fromkeys(("shutoff", "stopped", "paused", "suspended"), (InstanceState.PAUSED, Billing.FULL)),
    **dict.fromkeys(("shelved", "shelved_offloaded"), (InstanceState.PAUSED, Billing.UNKNOWN)),
    **dict.fromkeys(
        ("active", "reboot", "hard_reboot", "password", "migrating", "resize", "verify_resize", "revert_resize",
         "rebuild", "rescue"),
        (InstanceState.RUNNING, Billing.FULL),
    ),
    "unknown": (InstanceState.UNKNOWN, Billing.UNKNOWN),
}  # fmt: skip
_NO_HOST: Final = ("no valid host", "exceeded maximum number of retries", "not enough hosts")


def as_instance(row: ServerRow, key: AttemptKey, flavor: OpenstackFlavor | None, *, hangs: bool = False) -> Instance:
    """Translate one server; its price is what the config states for its flavour.

    One whose deletion hangs is billed on and is to be ended again, so its state is unknown.
    """
    word, loss = (row.status or "").strip().lower(), None
    state, billing = _STATES.get(word, (InstanceState.UNKNOWN, Billing.UNKNOWN))
    odd = "" if word in _STATES else f"{WHO} calls its status {quote_safely(row.status or '')!r}"
    detail = _OFF if word in ("shutoff", "stopped") else odd
    if word == "error":
        said = row.fault.message if row.fault is not None else ""
        detail = clean(quote_safely(said)) or "the cloud calls its status an error"
        if not row.launched:
            state, loss, billing = InstanceState.PAUSED, Loss.PROVISION_FAILED, Billing.UNKNOWN
            if any(one in said.lower() for one in _NO_HOST):
                loss = Loss.NO_CAPACITY
    elif word in ("shutoff", "stopped"):
        loss = Loss.SELF
    if row.is_deleting and state is not InstanceState.GONE:
        if not hangs:
            state, loss = InstanceState.ENDING, None
        elif loss not in (Loss.PROVISION_FAILED, Loss.NO_CAPACITY):
            state, loss, detail = InstanceState.UNKNOWN, None, "its deletion hangs"
    return Instance(
        ref=InstanceRef(provider=PROVIDER, instance_id=InstanceId(row.id)),
        key=key,
        state=state,
        market=None if flavor is None else flavor.market,
        price=None if flavor is None else MicroUsdPerHour(flavor.price),
        created_at=None if row.created is None else row.created.astimezone(UTC),
        loss=loss,
        billing=billing,
        detail=detail,
    )


def label_of(raw: Any) -> tuple[str | None, Mapping[str, Any] | None]:
    """Return name and metadata of a row that has an id; `None` for what cannot be read."""
    if not isinstance(raw, dict) or row_name(raw, "id") == "unreadable":
        return None, None
    name, said = raw.get("name"), raw.get("metadata", {})
    return name if isinstance(name, str) else None, said if isinstance(said, dict) else None


def marks_of(key: AttemptKey, install: InstallId) -> dict[str, str]:
    """Return the metadata of what is ours, which carries the key as its name, too."""
    return {INSTALL_NAME: str(install), KEY_NAME: str(key)}


def newest(rows: Iterable[Any]) -> str | None:
    """Return the id of the newest of these images."""
    found: list[tuple[datetime, str]] = []
    for raw in rows:
        row = row_or_reason(_Image, raw, offer_id="")
        if not isinstance(row, Rejected):
            found.append((row.created_at or datetime.min.replace(tzinfo=UTC), row.id))
    return max(found)[1] if found else None


class _Image(Row):
    id: Id
    created_at: Annotated[Instant | None, Lenient] = None
