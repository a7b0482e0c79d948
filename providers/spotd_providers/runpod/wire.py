"""RunPod's answers, validated at the edge: strict, finite, bounded, and one row at a time.

Catalogue rows are parsed strictly: a price that is not understood must not be paid, so the row is refused.
A pod bills us: whatever can be read of it is kept, since a row that is dropped is a machine that is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from spotd_providers.contract.values import Rejected
from spotd_providers.kit.shapes import Lenient, Row, Rows, as_model, distinct_rows, first_fault, is_small

WHO: Final = "RunPod"
# A bound is a generous multiple of what was ever asked; beyond it a figure is a mistake or an attack.
UsdPerHour = Annotated[float, Field(gt=0, lt=10_000, allow_inf_nan=False)]
Amount = Annotated[float, Field(gt=-1e9, lt=1e9, allow_inf_nan=False)]
Id = Annotated[str, Field(min_length=1, max_length=128)]


def _instant(value: Any) -> Any:
    if not isinstance(value, str) or len(value) > 40:
        raise ValueError("not a time")
    instant = datetime.fromisoformat(value)
    if instant.tzinfo is None:
        raise ValueError("a time without a zone")
    return instant


Stock = Annotated[str, AfterValidator(str.upper)]
"""NONE, LOW, MEDIUM or HIGH; the older APIs write High."""
Instant = Annotated[datetime, BeforeValidator(_instant)]


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
    """A bill of one pod in one bucket of time."""

    pod: Id = Field(alias="podId")
    start: Instant = Field(alias="startTime")
    end: Instant = Field(alias="endTime")
    total: Amount = Field(alias="totalAmount")
    gpu: Annotated[Amount | None, Lenient] = Field(default=None, alias="gpuAmount")
    cpu: Annotated[Amount | None, Lenient] = Field(default=None, alias="cpuAmount")
    disk: Annotated[Amount | None, Lenient] = Field(default=None, alias="diskAmount")
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
        if not is_small(raw):
            yield Rejected(offer_id=_id_of(raw), reason="it holds more values than any row has")
            continue
        try:
            yield GpuRow.model_validate(raw)
        except ValidationError as exc:
            yield Rejected(offer_id=_id_of(raw), reason=first_fault(exc))


def price_of(row: GpuRow, cloud: str) -> float | str:
    """Return the price of one GPU on this cloud, or why there is none."""
    found = row.price.get(cloud.lower())
    if found is None or (found == 0 and not isinstance(found, bool)):
        return "price: not sold on this cloud"
    try:
        return _PRICE.validate_python(found)
    except ValidationError as exc:
        return f"price.{cloud.lower()}: {exc.errors(include_url=False, include_input=False)[0]['msg']}"


def problem_of(body: Any) -> str:
    """Return the text of a refusal: RFC 9457's title, detail and errors, or the fields of the older APIs."""
    if not isinstance(body, Mapping):
        return ""
    errors = body.get("errors")
    listed = [item for item in errors if isinstance(item, str)] if isinstance(errors, list) else []
    said = [body.get("detail"), *listed[:3], body.get("error"), body.get("message")]
    texts = [text for text in said if isinstance(text, str) and text]
    title = body.get("title")
    return "; ".join(texts) if texts else (title if isinstance(title, str) else "")


def _id_of(raw: Any) -> str:
    identity = raw.get("id") if isinstance(raw, dict) else None
    return identity[:128] if isinstance(identity, str) and identity.isprintable() and identity else "unreadable"
