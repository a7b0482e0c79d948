"""RunPod's answers, validated at the edge: strict, finite, bounded, and one row at a time.

Catalogue rows are parsed strictly: a price that is not understood must not be paid, so the row is refused.
A pod bills us: whatever can be read of it is kept, since a row that is dropped is a machine that is forgotten.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from random import Random
from typing import Annotated, Any, ClassVar, Final

from pydantic import AfterValidator, AliasChoices, ConfigDict, Field, TypeAdapter, ValidationError

from spotd_providers.contract.errors import RateLimited
from spotd_providers.contract.values import Rejected
from spotd_providers.kit.boundary import ApiSettings
from spotd_providers.kit.calls import too_often
from spotd_providers.kit.http import HttpAnswer
from spotd_providers.kit.rest import Dialect, Meaning, RefusalWords, meaning_in
from spotd_providers.kit.shapes import Instant, Lenient, Row, Rows, as_model, distinct_rows, row_or_reason
from spotd_providers.kit.text import TEXT_CHARS_MAX

WHO: Final = "RunPod"
# A bound is a generous multiple of what was ever asked; beyond it a figure is a mistake or an attack.
UsdPerHour = Annotated[float, Field(gt=0, lt=10_000, allow_inf_nan=False)]
Amount = Annotated[float, Field(gt=-1e9, lt=1e9, allow_inf_nan=False)]
Id = Annotated[str, Field(min_length=1, max_length=128)]


Stock = Annotated[str, AfterValidator(str.upper)]
"""NONE, LOW, MEDIUM or HIGH; the older APIs write High."""


class CudaVersion(Row):
    version: Annotated[str, Field(pattern=r"^\d{1,3}\.\d{1,3}$")]
    available: bool = False


class DataCenterStock(Row):
    id: Id
    availability: Annotated[Stock | None, Lenient] = None


class GpuRow(Row):
    """One GPU type of the catalogue. Its prices are for ONE GPU, and parsed one by one where they are used."""

    id: Id
    manufacturer: Annotated[str | None, Lenient] = None
    memory: Annotated[float, Field(ge=0, lt=100_000, allow_inf_nan=False)]
    secure: Annotated[bool | None, Lenient] = None
    community: Annotated[bool | None, Lenient] = None
    price: dict[str, Any]
    max_count: Annotated[dict[str, Any] | None, Lenient] = Field(default=None, alias="maxCount")
    availability: Annotated[Stock | None, Lenient] = None
    data_centers: Annotated[list[DataCenterStock] | None, Lenient] = Field(default=None, alias="dataCenters")
    cuda_versions: Annotated[list[CudaVersion] | None, Lenient] = Field(default=None, alias="cudaVersions")


class GpuPage(Row):
    gpus: list[Any]


class PodGpu(Row):
    count: Annotated[int | None, Lenient] = None


class PodDoor(Row):
    """One way to a pod's shell. A host may write what it likes here; what uses it checks it."""

    host: Annotated[str, Field(min_length=1, max_length=253)]
    port: Annotated[int, Field(ge=1, le=65_535)]
    username: Annotated[str, Field(min_length=1, max_length=128)]


class PodSsh(Row):
    proxy: Annotated[PodDoor | None, Lenient] = None
    direct: Annotated[PodDoor | None, Lenient] = None


class PodRow(Row):
    """One pod of the account. The name decides whose it is; words that are not text are unknown words."""

    id: Id
    name: Annotated[str | None, Lenient] = None
    status: Annotated[str | None, Lenient] = None
    gpu: Annotated[PodGpu | None, Lenient] = None
    cost: Annotated[Annotated[float, Field(ge=0, lt=10_000, allow_inf_nan=False)] | None, Lenient] = None
    ssh: Annotated[PodSsh | None, Lenient] = None
    created_at: Annotated[Instant | None, Lenient] = Field(default=None, alias="createdAt")
    started_at: Annotated[Instant | None, Lenient] = Field(default=None, alias="startedAt")


class ClusterCompute(Row):
    pods: Annotated[int, Field(alias="podCount", ge=1, le=10_000)]


class ClusterPods(Row):
    """How many pods of a cluster are in which state; a state that none is in is left out."""

    by_status: dict[str, Annotated[int, Field(ge=0, le=10_000)]] = Field(alias="byStatus")


class ClusterPrimary(Row):
    """The pod of rank 0, once it has a place."""

    pod: Id = Field(alias="podId")
    status: Annotated[str | None, Lenient] = None


class ClusterRow(Row):
    """One cluster of the account. It has no price: its pods state one each."""

    id: Id
    name: Annotated[str | None, Lenient] = None
    compute: ClusterCompute
    pods: ClusterPods
    primary: Annotated[ClusterPrimary | None, Lenient] = None
    created_at: Annotated[Instant | None, Lenient] = Field(default=None, alias="createdAt")


class NamedCluster(Row):
    """What a purchase needs of a cluster's row."""

    id: Id


class ClusterPage(Row):
    clusters: list[Any]


class SshKeys(Row):
    keys: list[Any]


class Pagination(Row):
    has_next: bool | None = Field(default=None, alias="hasNextPage")
    cursor: str | None = Field(default=None, alias="nextCursor")

    @property
    def goes_on(self) -> bool:
        """Whether there is another page: said so, or, where nothing is said, shown by a cursor."""
        return bool(self.cursor) if self.has_next is None else self.has_next


class PodPage(Row):
    """One page of the listing, its rows not yet parsed. Older answers hold all pods and no pagination."""

    pods: list[Any]
    pagination: Pagination | None = None


class BillingRow(Row):
    """A bill of one pod or cluster in one bucket of time."""

    machine: Id = Field(validation_alias=AliasChoices("podId", "clusterId"))
    start: Instant = Field(alias="startTime")
    end: Instant = Field(alias="endTime")
    total: Amount = Field(alias="totalAmount")
    gpu: Annotated[Amount | None, Lenient] = Field(default=None, alias="gpuAmount")
    cpu: Annotated[Amount | None, Lenient] = Field(default=None, alias="cpuAmount")
    disk: Annotated[Amount | None, Lenient] = Field(default=None, alias="diskAmount")
    networking: Annotated[Amount | None, Lenient] = Field(default=None, alias="networkingAmount")
    currency: Annotated[str, Field(min_length=1, max_length=8)] | None = None


class BillingPage(Row):
    records: list[Any]


_PRICE: Final = TypeAdapter(UsdPerHour, config=ConfigDict(strict=True))


def gpu_rows(value: Any) -> Rows[GpuRow]:
    """Parse every row of a catalogue answer, or reject it.

    Raises:
        Unavailable: there is no list of GPUs in it.
    """
    return distinct_rows(_each_gpu(value), what="GPU")


def _each_gpu(value: Any) -> Iterator[GpuRow | Rejected]:
    for raw in as_model(GpuPage, value, who=WHO, what="its catalogue").gpus:
        yield row_or_reason(GpuRow, raw, offer_id=_id_of(raw))


def price_of(row: GpuRow, cloud: str) -> float | str:
    """Return the price of one GPU on this cloud, or why there is none."""
    found = row.price.get(cloud.lower())
    if found is None or (found == 0 and not isinstance(found, bool)):
        return "price: not sold on this cloud"
    try:
        return _PRICE.validate_python(found)
    except ValidationError as exc:
        return f"price.{cloud.lower()}: {exc.errors(include_url=False, include_input=False)[0]['msg']}"


def _id_of(raw: Any) -> str:
    identity = raw.get("id") if isinstance(raw, dict) else None
    return identity[:128] if isinstance(identity, str) and identity.isprintable() and identity else "unreadable"


# The meaning of RunPod's answers: status first, then the words, since only words report a lack of capacity.
#
# Theory. REST v2 follows RFC 9457: the status says whose fault it is. One status is ambiguous: a 400 on create is a
# broken rule *or* a lack of capacity, and no code distinguishes them, so known sentences are kept here, in one table.


_WINDOW: Final = re.compile(r'"?([a-z]+)"?\s*;\s*r=(\d{1,9})\s*;\s*t=(\d{1,6})')
_POLICY: Final = re.compile(r'"?([a-z]+)"?\s*;\s*q=(\d{1,9})')
KEPT_SHARE: Final = 4

NOTHING_MADE_WORDS: Final = (
    "no longer any instances available",
    "no instances available",
    "no instances currently available",
)
"""Whole sentences about a lack of capacity: they also come with a 5xx, and then still mean that no pod was made."""
NO_CAPACITY_WORDS: Final = (
    *NOTHING_MADE_WORDS,
    "not enough free gpus",
    "no resources",
    "does not have the resources",
    "could not find any pods with required specifications",
    "capacity",
    "out of stock",
    "no available datacenter",
    "no machine",
)
OF_CREATE: Final[Mapping[tuple[str, ...], Meaning]] = {
    ("balance", "insufficient funds", "insufficient credit", "not enough credit"): Meaning.NO_BALANCE,
    (
        "spend limit",
        "spending limit",
        "pod limit",
        "quota",
        "maximum number of pods",
        "limit reached",
    ): Meaning.QUOTA,
    NO_CAPACITY_WORDS: Meaning.NO_CAPACITY,
}
SCOPE_WORDS: Final = ("scope", "permission", "read-only", "read only", "api key")


def says(text: str, words: tuple[str, ...]) -> bool:
    """Whether the text holds one of these phrases."""
    text = text.lower()
    return any(word in text for word in words)


def problem_of(body: Any) -> RefusalWords | None:
    """Return the text of a refusal: RFC 9457's title, detail and errors, or the fields of the older APIs."""
    if not isinstance(body, Mapping):
        return None
    errors = body.get("errors")
    listed = [item for item in errors if isinstance(item, str)] if isinstance(errors, list) else []
    said = [body.get("detail"), *listed[:3], body.get("error"), body.get("message")]
    texts = [text for text in said if isinstance(text, str) and text]
    title = body.get("title")
    return RefusalWords(text="; ".join(texts) if texts else (title if isinstance(title, str) else ""))


class RunpodDialect(Dialect):
    """RunPod's refusals: by their words where a create is refused."""

    def meaning(self, status: int, problem: RefusalWords | None, *, is_purchase: bool) -> Meaning:
        text = "" if problem is None else problem.text
        if not is_purchase or status in (401, 402, 413, 422, 429):
            return super().meaning(status, problem, is_purchase=is_purchase)
        if status >= 500 or status == 408:
            return Meaning.NO_CAPACITY if says(text, NOTHING_MADE_WORDS) else Meaning.UNAVAILABLE
        if status == 403 and problem is not None and not meaning_in(text, OF_CREATE):
            # It may mean that this account may not rent that kind of GPU; elsewhere it is the key.
            return Meaning.AUTH if says(text, SCOPE_WORDS) else Meaning.REJECTED
        return meaning_in(text, OF_CREATE) or super().meaning(status, problem, is_purchase=is_purchase)

    def throttle(
        self, answer: HttpAnswer, what: str, rng: Random, problem: RefusalWords | None, now: datetime, /
    ) -> RateLimited:
        """Build the error of a 429: its wait is `Retry-After`, else the reset of the window that is used up."""
        wait = used_up(answer)
        if answer.retry_after is not None or wait is None:
            return super().throttle(answer, what, rng, problem, now)
        return too_often(WHO, what, wait, rng)


DIALECT: Final = RunpodDialect(
    who=WHO,
    problem_of=problem_of,
    text_of=lambda text: RefusalWords(text=text[:TEXT_CHARS_MAX]) if says(text, NOTHING_MADE_WORDS) else None,
    object_of=lambda answer, body: body if answer.body else {},
    buy_timeout_s=60.0,
)


def used_up(answer: HttpAnswer) -> timedelta | None:
    """Return the time to the reset of a window of the `RateLimit` header that is used up; `None` if none is."""
    return max((reset for _, left, reset in _windows(answer) if left == 0), default=None)


def running_low(answer: HttpAnswer) -> timedelta | None:
    """Return the time to the reset of a short window with less than a quarter left, which is kept for urgent calls."""
    sizes = {name: int(size) for name, size in _POLICY.findall(answer.headers.get("ratelimit-policy", "")[:1024])}
    low = (
        reset
        for name, left, reset in _windows(answer)
        if left < sizes.get(name, 0) // KEPT_SHARE and reset <= timedelta(minutes=1, seconds=1)
    )
    return max(low, default=None)


def _windows(answer: HttpAnswer) -> Iterator[tuple[str, int, timedelta]]:
    """Yield name, requests left and time to reset of each window: `"minute";r=0;t=12, "hour";r=2800;t=1812`."""
    for name, left, reset in _WINDOW.findall(answer.headers.get("ratelimit", "")[:1024]):
        yield name, int(left), timedelta(seconds=int(reset))


# The settings under `[providers.runpod]`.


_Count = Annotated[int, Field(ge=1, le=64)]
_DataCenter = Annotated[str, Field(pattern=r"^[A-Z0-9-]{2,32}$")]


class RunpodSettings(ApiSettings):
    """Clouds, numbers of GPUs and places."""

    version: ClassVar = "/v2"

    base_url: str = Field(default="https://api.runpod.io", description="Where RunPod's API answers, without /v2.")
    secure: bool = Field(default=True, description="Offers of the Secure cloud: data centres.")
    community: bool = Field(default=True, description="Offers of the Community cloud: individual hosts, cheaper.")
    gpu_counts: tuple[_Count, ...] = Field(
        default=(1, 2, 4, 8),
        min_length=1,
        max_length=16,
        description="Sizes of machines to ask for; each costs one request per cloud and poll.",
    )
    cluster_gpu_counts: tuple[_Count, ...] = Field(
        default=(8,),
        max_length=16,
        description="Sizes of machines for jobs with `nodes`; each costs one request per poll. Empty: none.",
    )
    cluster_network: float = Field(
        default=0.0,
        ge=0,
        le=1000,
        description="What your bill says the network of each machine of a cluster costs per hour, in $; no price does.",
    )
    data_centers: tuple[_DataCenter, ...] = Field(
        default=(), max_length=64, description='Only these data centres, say ["EU-RO-1"]. Empty: any.'
    )
    cuda_min: str | None = Field(
        default=None, pattern=r"^\d{1,3}\.\d{1,3}$", description='Lowest CUDA version of the host, say "12.4".'
    )
    amd: bool = Field(default=False, description="Also AMD GPUs, which need images built for ROCm.")
    registry: str | None = Field(
        default=None, min_length=1, max_length=128, description="Id of the RunPod registry credential for your images."
    )
    override_entrypoint: bool = Field(
        default=False,
        description="Replace the image's ENTRYPOINT, for images whose own does not run what it is given.",
    )
    direct_ssh: bool = Field(
        default=False,
        description=(
            "Map port 22 and start the image's ssh server for the public keys of your account, so that spotctl forward "
            "and scp reach the pod."
        ),
    )

    @property
    def no_clusters(self) -> str:
        """Why no cluster can be asked for with these settings; empty if it can."""
        if not self.cluster_gpu_counts:
            return "cluster_gpu_counts is empty, so spotd rents no cluster of RunPod"
        if not self.secure:
            return "RunPod's clusters are on its Secure cloud, which the config leaves out"
        if self.cuda_min is not None or self.override_entrypoint:
            return "the config has cuda_min or override_entrypoint, which no cluster of RunPod can be asked for"
        return ""

    @property
    def clouds(self) -> tuple[str, ...]:
        """The clouds to buy in, by RunPod's names."""
        wanted = (("SECURE", self.secure), ("COMMUNITY", self.community))
        return tuple(cloud for cloud, yes in wanted if yes)
