"""Core values as rows of their tables."""

from __future__ import annotations

import json
from collections import namedtuple
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from typing import Any, Final

from sqlalchemy import Connection, Select

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.charges import Charge, CostSums
from spotd.core.domain.checkpoints import Checkpoint
from spotd.core.domain.cooldowns import Cooldown
from spotd.core.domain.ids import JobId
from spotd.core.domain.intents import Intent
from spotd.core.domain.jobs import Job
from spotd.core.domain.quotes import Quote
from spotd.core.domain.records import Record
from spotd.core.domain.states import InvariantBroken
from spotd.core.domain.world import PastJob
from spotd.core.plans.plan import Event
from spotd.store.mapping import Columns, Row, RowMap, compact, from_json
from spotd.store.views import AttemptView, JobView
from spotd_jobs.spec.codec import spec_from_json, spec_to_json
from spotd_jobs.spec.model import JobSpec, Resources
from spotd_providers.contract.values import NO_GPU, InstanceId, InstanceRef, ProviderName

_ID: Final = {"id.job": "job_id", "id.number": "number"}
_REF: Final = {"ref.instance_id": "ref_id"}

JOB: Final = RowMap(
    Job, words=("reason", "outputs.problem"), nested_json=("chain", "moves"), without=("spec", "checkpoints")
)
PAST_JOB: Final = RowMap(PastJob, words=("reason", "outputs.problem"))
ATTEMPT: Final = RowMap(
    Attempt,
    names=_ID | _REF,
    words=("phase", "end_detail", "account", "bill_note"),
    nested_json=("stop", "watch", "freshness", "bidding"),
    without=("quote",),
)
CHECKPOINT: Final = RowMap(Checkpoint, words=("host",))
INTENT: Final = RowMap(Intent, names=_REF, words=("error", "account"))
COOLDOWN: Final = RowMap(Cooldown, words=("reason",))
RECORD: Final = RowMap(Record, names={"id.kind": "kind", "id.provider": "provider", "id.subject": "subject"})
CHARGE: Final = RowMap(Charge, names={"attempt.job": "job_id", "attempt.number": "attempt"})
EVENT: Final = RowMap(Event, names={"job": "job_id"}, words=("message",))
COST_SUMS: Final = RowMap(CostSums)
ATTEMPT_VIEW: Final = RowMap(AttemptView, names=_ID | {"price": "price_total", "on_demand": "on_demand_total"})
JOB_VIEW: Final = RowMap(
    JobView,
    names={"settled": "spent", "on_demand_settled": "on_demand"},
    nested_json=("moves",),
    without=("open", "checkpoint"),
)


@cache
def _shape(names: tuple[str, ...]) -> Any:
    shape: Any = namedtuple("Row", names)  # type: ignore[misc]  # the names are known only at run time
    return shape._make


def fetch(connection: Connection, query: Select[Any], values: Mapping[str, object] | None = None) -> Iterator[Row]:
    """Return the rows of a select, as named tuples: an attribute of SQLAlchemy's own rows costs ten times as much."""
    result = connection.execute(query, values)
    return map(_shape(tuple(result.keys())), result)


def spec_out(spec: JobSpec) -> str:
    return compact(spec_to_json(spec))


@lru_cache(maxsize=64)
def spec_in(text: str) -> JobSpec:
    """Return the value of a stored spec; the jobs of an array share one."""
    return spec_from_json(json.loads(text))


def quote_in(text: str) -> Quote:
    return from_json(Quote, text)


def gpu_wanted(resources: Resources) -> str:
    """Return what the user asked for, short enough for a column of a table."""
    if resources.gpu:
        return ", ".join(f"{gpu.name}:{gpu.count}" for gpu in resources.gpu)
    if resources.min_vram_mb is not None:
        return f">={-(-resources.min_vram_mb // 1000)}GB:{resources.gpu_count}"
    return f"any:{resources.gpu_count}" if resources.gpu_count else f"{NO_GPU}:0"


def job_out(job: Job, spec_text: str) -> Columns:
    return {**JOB.out(job), "spec": spec_text, "gpu_wanted": gpu_wanted(job.spec.resources)}


def checkpoint_out(job: JobId, ordinal: int, checkpoint: Checkpoint) -> Columns:
    return {"job_id": job, "ordinal": ordinal, **CHECKPOINT.out(checkpoint)}


def attempt_out(attempt: Attempt, quote_text: str) -> Columns:
    """Raise InvariantBroken for a machine at another provider than the one that was agreed."""
    offer = attempt.quote.offer
    if attempt.ref is not None and attempt.ref.provider != offer.provider:
        raise InvariantBroken(
            f"attempt {attempt.key} was bought at {offer.provider} but its machine is {attempt.ref.provider}'s"
        )
    return {
        **ATTEMPT.out(attempt),
        "quote": quote_text,
        "provider": offer.provider,
        "offer_id": offer.offer_id,
        "host_id": offer.host_id,
        "gpu": offer.gpu,
        "gpu_count": offer.gpu_count,
        "price_total": attempt.quote.price.total,
        "on_demand_total": attempt.quote.on_demand,
    }


def attempt_in(row: Row) -> Attempt:
    """Return the attempt in a row, its quote read anew."""
    return ATTEMPT.read(row, quote=quote_in(row.quote))


def ref_in(row: Row) -> InstanceRef | None:
    """Return the machine in a row of an attempt that cannot be understood, by its columns alone."""
    if not isinstance(row.ref_id, str) or not isinstance(row.provider, str):
        return None
    return InstanceRef(
        provider=ProviderName(row.provider), instance_id=InstanceId(row.ref_id), scope=str(row.ref_scope or "")
    )


def event_out(seq: int, event: Event) -> Columns:
    return {"seq": seq, **EVENT.out(event)}
