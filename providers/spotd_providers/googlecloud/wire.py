"""What Google Cloud says, in the words of the contract: settings, refusals, pages, machines and why they ended."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Annotated, Any, Final
from urllib.parse import urlencode

from pydantic import Field, field_validator

from spotd_providers.contract.errors import Unavailable
from spotd_providers.contract.values import (
    AttemptKey,
    Billing,
    Instance,
    InstanceId,
    InstanceRef,
    InstanceState,
    Loss,
    Market,
    ProviderName,
)
from spotd_providers.kit.boundary import ApiSettings, Dollars, Span, safe_base_url
from spotd_providers.kit.calls import Page, all_pages
from spotd_providers.kit.rest import Dialect, Meaning, RefusalWords, RestClient, RestRefused
from spotd_providers.kit.shapes import Instant, Lenient, Row, row_or_none
from spotd_providers.kit.template import as_unreadable
from spotd_providers.kit.text import quote_safely
from spotd_providers.kit.vm_market import Id, VmSettings

PROVIDER: Final = ProviderName("gcp")
WHO: Final = "Google Cloud"
INSTALL_LABEL: Final = "spotd-install"
KEY_LABEL: Final = "spotd-key"
METADATA: Final = "http://metadata.google.internal/computeMetadata/v1"
ROWS_MAX: Final = 50_000
NAME_CHARS_MAX: Final = 63
NO_RESULTS: Final = "NO_RESULTS_ON_PAGE"
Region = Annotated[str, Field(pattern=r"^[a-z]+-[a-z]+[0-9]{1,2}$")]
Pattern = Annotated[str, Field(pattern=r"^[a-z0-9*-]{1,64}$")]
Resource = Annotated[str, Field(pattern=r"^[A-Za-z0-9:._/-]{1,256}$")]


class GoogleSettings(ApiSettings, VmSettings):
    """Project, regions, types and machines, under `[providers.gcp]`."""

    base_url: str = Field(default="https://compute.googleapis.com", description="Where Compute Engine's API answers.")
    billing_url: str = Field(default="https://cloudbilling.googleapis.com", description="Where the price list is read.")
    project: str = Field(
        default="",
        pattern=r"^([a-z][a-z0-9:.-]{1,61}[a-z0-9])?$",
        description="The project to rent in; if unset the one in the service account's key file.",
    )
    regions: tuple[Region, ...] = Field(
        default=("us-central1",), min_length=1, max_length=64, description="Regions to buy in."
    )
    machine_types: tuple[Pattern, ...] = Field(
        default=("a2-*", "a3-*", "a4-*", "g2-*", "g4-*", "n1-standard-4", "n1-standard-8", "n1-standard-16"),
        min_length=1,
        max_length=100,
        description='Types to consider, with wildcards: "g2-standard-*". GPUs are attached to types of N1.',
    )
    cpu_types: tuple[Pattern, ...] = Field(
        default=(), max_length=100, description='Types without a GPU, for jobs that ask for none: "e2-standard-8".'
    )
    image: Resource = Field(
        default="projects/deeplearning-platform-release/global/images/family/common-cu129-ubuntu-2204",
        description="Machine image, or family of images, with docker and the driver of the GPUs.",
    )
    disk_type: str = Field(
        default="",
        pattern=r"^(|pd-balanced|pd-ssd|pd-standard|hyperdisk-balanced)$",
        description="Type of the boot disk; if unset pd-balanced, and hyperdisk-balanced for A4 and A3 Ultra.",
    )
    disk_usd_per_gb_month: Dollars = Field(
        default=100_000, description="Price of the disk where the price list names none, in dollars."
    )
    address_usd_per_h: Dollars = Field(default=5_000, description="Price of an external address, in dollars an hour.")
    egress_usd_per_gb: Dollars = Field(
        default=120_000, description="Price of traffic out, in dollars a GB; it is 0.08 to 0.23 by region and target."
    )
    network: Resource = Field(default="global/networks/default", description="The network of the machines.")
    external_ip: bool = Field(default=True, description="An external address for each; without one, use Cloud NAT.")
    notice: bool = Field(default=True, description="Ask for two minutes of warning before a preemption.")
    max_run: Span | None = Field(
        default=None,
        ge=timedelta(minutes=10),
        le=timedelta(days=120),
        description='Google itself deletes a machine after this time, say "3d"; never if unset.',
    )

    @field_validator("billing_url")
    @classmethod
    def _keeps_the_token_safe(cls, value: str) -> str:
        return safe_base_url(value, example=cls.model_fields["billing_url"].default)


# Google's words. The HTTP error and the error of an operation name their cause by words of one list.


def problem_of(body: Any) -> RefusalWords | None:
    """Return the words of `{"error": {"code", "message", "errors": [{"reason"}], "status"}}`."""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return None
    details = error.get("errors")
    first = details[0] if isinstance(details, list) and details else None
    said = [first.get("reason") if isinstance(first, dict) else None, error.get("status")]
    code = next((one for one in said if isinstance(one, str) and one), "")
    message = error.get("message")
    return RefusalWords(code=code, text=message if isinstance(message, str) else "")


NO_ROOM: Final = "does not have enough resources"


class GoogleDialect(Dialect):
    """A stockout comes as a server error, so its words decide before its status."""

    def meaning(self, status: int, problem: RefusalWords | None, *, is_purchase: bool) -> Meaning:
        if problem is not None and NO_ROOM in problem.text:
            return Meaning.NO_CAPACITY
        found = super().meaning(status, problem, is_purchase=is_purchase)
        # Anything else that does not exist, say the network or the machine image, is a fault of the settings.
        is_type = found is Meaning.ABSENT and problem is not None and _TYPE.search(problem.text) is not None
        return Meaning.OFFER_GONE if is_purchase and is_type else found


_TYPE: Final = re.compile(r"\b(machine|accelerator|disk)Types/")
DIALECT: Final = GoogleDialect(
    who=WHO,
    problem_of=problem_of,
    codes={
        "ZONE_RESOURCE_POOL_EXHAUSTED": Meaning.NO_CAPACITY,
        "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS": Meaning.NO_CAPACITY,
        "STOCKOUT": Meaning.NO_CAPACITY,
        "QUOTA_EXCEEDED": Meaning.QUOTA,
        "quotaExceeded": Meaning.QUOTA,
        "rateLimitExceeded": Meaning.TOO_OFTEN,
        "userRateLimitExceeded": Meaning.TOO_OFTEN,
        "RATE_LIMIT_EXCEEDED": Meaning.TOO_OFTEN,
        "RESOURCE_NOT_FOUND": Meaning.ABSENT,
        "notFound": Meaning.ABSENT,
        "invalid": Meaning.REJECTED,
        "alreadyExists": Meaning.REJECTED,
        "RESOURCE_ALREADY_EXISTS": Meaning.REJECTED,
        "PERMISSIONS_ERROR": Meaning.AUTH,
        # What only operations say. A word that is not here is no fault of the request: `refusal_in`.
        "INVALID_FIELD_VALUE": Meaning.REJECTED,
        "INVALID_USAGE": Meaning.REJECTED,
        "INTERNAL_ERROR": Meaning.UNAVAILABLE,
        "RESOURCE_NOT_READY": Meaning.UNAVAILABLE,
        "RESOURCE_OPERATION_RATE_EXCEEDED": Meaning.TOO_OFTEN,
    },
    interval=timedelta(seconds=0.05),
)
_TWIN: Final = frozenset({"alreadyExists", "RESOURCE_ALREADY_EXISTS"})


def is_twin(refused: RestRefused) -> bool:
    """Whether a launch was refused because a machine has its name."""
    return refused.code in _TWIN or refused.status == 409


async def every_row(
    client: RestClient,
    path: str,
    what: str,
    *,
    name: str = "items",
    keep: Callable[[list[Any]], list[Any]] = list,
    **query: str,
) -> list[Any]:
    """Return the rows of all pages of a list.

    Raises:
        Unavailable: it breaks off; of a part nothing may be concluded.
    """

    async def read(token: str | None) -> Page:
        answer = await client.ask("GET", path + query_of(token, **query), what=what)
        rows = answer.get(name, [] if answer else None)
        if not isinstance(rows, list):
            raise Unavailable(f"{WHO}'s answer to {what} is no list")
        return keep(rows), next_token(answer)

    rows, whole = await all_pages(read, rows_max=ROWS_MAX)
    if not whole:
        raise Unavailable(f"{WHO}'s answer to {what} breaks off")
    return rows


def query_of(token: str | None = None, **query: str) -> str:
    """Return the query of one page."""
    found = {**query, **({} if token is None else {"pageToken": token})}
    return f"?{urlencode(found)}" if found else ""


def next_token(answer: Mapping[str, Any]) -> str | None:
    token = answer.get("nextPageToken")
    return (token if isinstance(token, str) else "") if token else None


def last_part(link: Any) -> str:
    """Return the name at the end of a link or a path; empty for none."""
    return link.rpartition("/")[2] if isinstance(link, str) else ""


# Machines. A name has no dot and a label neither, so a key's dot is written otherwise in both.


def name_of(key: str) -> str:
    return key.replace(".", "-")


def label_of(key: str) -> str:
    """Write a key as a label, which may hold `_` where no key does."""
    return key.replace(".", "_")


def key_in(raw: Any, install: str) -> str | None:
    """Return the key in a row's label if its name is that key's: a copy of our labels makes no machine ours.

    A row without such a label is not ours, by its name; `None` for one that may be anybody's, or is named as ours.
    """
    labels = raw.get("labels") if isinstance(raw, dict) else None
    if not isinstance(raw, dict) or not isinstance(labels, dict | None) or not isinstance(raw.get("name"), str):
        return None
    name, said = raw["name"], (labels or {}).get(KEY_LABEL)
    key = said.replace("_", ".") if isinstance(said, str) else None
    if key is not None and name_of(key) == name:
        return key
    return None if name.startswith(f"spotd-{install}-") else name


class _Scheduling(Row):
    provisioningModel: Annotated[str | None, Lenient] = None  # noqa: N815 - Google's own name


class GoogleInstanceRow(Row):
    """One machine, as lists and its own page show it."""

    name: Id
    zone: str
    status: Annotated[str | None, Lenient] = None
    creationTimestamp: Annotated[Instant | None, Lenient] = None  # noqa: N815 - Google's own name
    lastStopTimestamp: Annotated[Instant | None, Lenient] = None  # noqa: N815 - Google's own name
    scheduling: Annotated[_Scheduling | None, Lenient] = None


_STATES: Final[Mapping[str, InstanceState]] = {
    **dict.fromkeys(("PENDING", "PROVISIONING", "STAGING"), InstanceState.PENDING),
    "RUNNING": InstanceState.RUNNING,
    **dict.fromkeys(("PENDING_STOP", "STOPPING", "SUSPENDING", "DEPROVISIONING"), InstanceState.ENDING),
    **dict.fromkeys(("TERMINATED", "STOPPED", "SUSPENDED"), InstanceState.PAUSED),
}
_MARKETS: Final = {"SPOT": Market.SPOT, "STANDARD": Market.ON_DEMAND}


def as_instance(raw: Any, key: AttemptKey, *, notice: Callable[[str], datetime | None]) -> Instance | None:
    """Translate a row; `notice` says since when a machine that we did not end goes away."""
    row = row_or_none(GoogleInstanceRow, raw)
    if row is None:
        name, zone = (raw.get("name"), last_part(raw.get("zone"))) if isinstance(raw, dict) else (None, "")
        known = isinstance(name, str) and zone
        return as_unreadable(reference(str(name), zone), key, who=WHO) if known else None
    state = _STATES.get(row.status or "", InstanceState.UNKNOWN)
    is_ending, is_off = state is InstanceState.ENDING, state is InstanceState.PAUSED
    announced = notice(row.name) if is_ending else None
    if row.status == "PENDING_STOP" and announced is not None:
        state = InstanceState.RUNNING  # its processes run on until it stops
    return Instance(
        ref=reference(row.name, last_part(row.zone)),
        key=key,
        state=state,
        market=_MARKETS.get((row.scheduling.provisioningModel if row.scheduling else None) or ""),
        created_at=row.creationTimestamp,
        notice_at=announced,
        billing=Billing.DISK if is_off else Billing.UNKNOWN,
        ended_at=row.lastStopTimestamp if is_off else None,
        detail=quote_safely(row.status or "") if state is InstanceState.UNKNOWN else "",
    )


def reference(name: str, zone: str) -> InstanceRef:
    return InstanceRef(provider=PROVIDER, instance_id=InstanceId(name), scope=zone)


# Operations: what a launch leads to, and why a machine went away.


class _Fault(Row):
    code: Annotated[str | None, Lenient] = None
    message: Annotated[str | None, Lenient] = None


class _Faults(Row):
    errors: list[_Fault] = Field(default_factory=list)


class OperationRow(Row):
    """One operation of a zone."""

    name: Id
    status: Annotated[str | None, Lenient] = None
    operationType: Annotated[str | None, Lenient] = None  # noqa: N815 - Google's own name
    targetLink: Annotated[str | None, Lenient] = None  # noqa: N815 - Google's own name
    error: Annotated[_Faults | None, Lenient] = None


def refusal_in(answer: Mapping[str, Any], operation: OperationRow) -> RestRefused | None:
    """Return why an operation that is done failed; `None` where it did not."""
    if answer.get("error") is None:
        return None
    faults = operation.error.errors if operation.error is not None else []
    first = faults[0] if faults else _Fault()
    problem = RefusalWords(code=first.code or "", text=first.message or first.code or "the operation failed")
    meaning = DIALECT.meaning(400, problem, is_purchase=True)
    known = meaning is not Meaning.REJECTED or problem.code in DIALECT.codes
    return RestRefused(WHO, status=400, meaning=meaning if known else Meaning.NO_CAPACITY, problem=problem)


_CAUSES: Final[Mapping[str, Loss]] = {
    "compute.instances.preempted": Loss.PREEMPTED,
    "compute.instances.hostError": Loss.HOST_LOST,
    "compute.instances.guestTerminate": Loss.SELF,
}


def cause_in(rows: Sequence[Any], name: str) -> Loss | None:
    """Return why a machine went away by the operations on it; `None` where none of them says."""
    kinds = set()
    for one in rows:
        row = row_or_none(OperationRow, one)
        if row is not None and last_part(row.targetLink) == name:
            kinds.add(row.operationType)
    return next((loss for kind, loss in _CAUSES.items() if kind in kinds), None)
