"""Core values to column values and back, one pair of functions per table."""

from __future__ import annotations

import json
from collections import namedtuple
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

from sqlalchemy import Connection, Select

from spotd.core.attempts import Attempt, MachineState, StopOrder
from spotd.core.charges import Charge, Meter
from spotd.core.checkpoints import Checkpoint
from spotd.core.cooldowns import Cooldown, CooldownEnd, CooldownScope
from spotd.core.ids import AttemptId, IntentId, JobId
from spotd.core.intents import Intent, IntentKind, IntentState
from spotd.core.jobs import Job, Outputs
from spotd.core.plan import Event
from spotd.core.quotes import Quote
from spotd.core.states import AttemptState, EndReason, InvariantBroken, JobState
from spotd.store.codec import Codec
from spotd.store.columns import (
    duration_in,
    duration_out,
    instant_in,
    instant_out,
    maybe_instant_in,
    maybe_instant_out,
    words_out,
)
from spotd_jobs.spec.codec import spec_from_json, spec_to_json
from spotd_jobs.spec.model import JobSpec, Resources
from spotd_providers.contract.money import MicroUsd, MicroUsdPerHour
from spotd_providers.contract.values import InstanceId, InstanceRef, ProviderName

Row = Any
"""A result row with the columns of one table as attributes."""
Columns = dict[str, Any]

_QUOTE: Final = Codec(Quote)
_STOP: Final = Codec(StopOrder)


@cache
def _shape(names: tuple[str, ...]) -> Any:
    shape: Any = namedtuple("Row", names)  # type: ignore[misc]  # the names are known only at run time
    return shape._make


def fetch(connection: Connection, query: Select[Any]) -> Iterator[Row]:
    """Return the rows of a select, as named tuples: an attribute of SQLAlchemy's own rows costs ten times as much."""
    result = connection.execute(query)
    return map(_shape(tuple(result.keys())), result)


def spec_out(spec: JobSpec) -> str:
    return json.dumps(spec_to_json(spec), separators=(",", ":"), allow_nan=False)


def spec_in(text: str) -> JobSpec:
    return spec_from_json(json.loads(text))


def quote_out(quote: Quote) -> str:
    return _QUOTE.dumps(quote)


def quote_in(text: str) -> Quote:
    return _QUOTE.loads(text)


def gpu_wanted(resources: Resources) -> str:
    """Return what the user asked for, short enough for a column of a table."""
    if resources.gpu:
        return ", ".join(f"{gpu.name}:{gpu.count}" for gpu in resources.gpu)
    if resources.min_vram_mb is not None:
        return f">={-(-resources.min_vram_mb // 1000)}GB:{resources.gpu_count}"
    return f"any:{resources.gpu_count}"


def job_out(job: Job, spec_text: str) -> Columns:
    return {
        "id": job.id,
        "name": job.name,
        "spec": spec_text,
        "gpu_wanted": gpu_wanted(job.spec.resources),
        "code_sha256": job.code_sha256,
        "code_bytes": job.code_bytes,
        "submitted_at": instant_out(job.submitted_at),
        "state": job.state.value,
        "reason": words_out(job.reason),
        "state_since": instant_out(job.state_since),
        "attempts_made": job.attempts_made,
        "errors": job.errors,
        "image_errors": job.image_errors,
        "recoveries": job.recoveries,
        "spent": job.spent,
        "on_demand": job.on_demand,
        "lost": duration_out(job.lost),
        "started_at": maybe_instant_out(job.started_at),
        "ended_at": maybe_instant_out(job.ended_at),
        "exit_code": job.exit_code,
        "cancel_requested": job.cancel_requested,
        "outputs_attempt": None if job.outputs is None else job.outputs.attempt,
        "outputs_sha256": None if job.outputs is None else job.outputs.sha256,
        "outputs_bytes": 0 if job.outputs is None else job.outputs.bytes,
        "outputs_problem": "" if job.outputs is None else words_out(job.outputs.problem),
        "idle_launches": job.idle_launches,
        "failed_starts": job.failed_starts,
        "not_before": maybe_instant_out(job.not_before),
        "budget_set": job.budget_set,
        "rate_low": job.rate_low,
        "disk_gb_seen": job.disk_gb_seen,
    }


def job_in(row: Row, spec: JobSpec, checkpoints: tuple[Checkpoint, ...]) -> Job:
    return Job(
        id=JobId(row.id),
        name=row.name,
        spec=spec,
        code_sha256=row.code_sha256,
        code_bytes=row.code_bytes,
        submitted_at=instant_in(row.submitted_at),
        state=JobState(row.state),
        reason=row.reason,
        state_since=instant_in(row.state_since),
        attempts_made=int(row.attempts_made),
        errors=row.errors,
        image_errors=row.image_errors,
        recoveries=row.recoveries,
        checkpoints=checkpoints,
        spent=MicroUsd(int(row.spent)),
        on_demand=MicroUsd(int(row.on_demand)),
        lost=duration_in(row.lost),
        started_at=maybe_instant_in(row.started_at),
        ended_at=maybe_instant_in(row.ended_at),
        exit_code=row.exit_code,
        cancel_requested=row.cancel_requested,
        outputs=outputs_in(row),
        idle_launches=row.idle_launches,
        failed_starts=row.failed_starts,
        not_before=maybe_instant_in(row.not_before),
        budget_set=row.budget_set,
        rate_low=row.rate_low,
        disk_gb_seen=row.disk_gb_seen,
    )


def outputs_in(row: Row) -> Outputs | None:
    if row.outputs_attempt is None:
        return None
    return Outputs(
        attempt=row.outputs_attempt,
        sha256=row.outputs_sha256,
        bytes=row.outputs_bytes,
        problem=row.outputs_problem,
    )


def checkpoint_out(job: JobId, ordinal: int, checkpoint: Checkpoint) -> Columns:
    return {
        "job_id": job,
        "ordinal": ordinal,
        "name": checkpoint.name,
        "attempt": checkpoint.attempt,
        "step": checkpoint.step,
        "bytes": checkpoint.bytes,
        "at": instant_out(checkpoint.at),
        "manifest_key": checkpoint.manifest_key,
        "sha256": checkpoint.sha256,
        "metric": checkpoint.metric,
        "pinned": checkpoint.pinned,
        "host": words_out(checkpoint.host),
        "proven_by": checkpoint.proven_by,
        "doubted_by": json.dumps(checkpoint.doubted_by) if checkpoint.doubted_by else "",
    }


def checkpoint_in(row: Row) -> Checkpoint:
    return Checkpoint(
        name=row.name,
        attempt=row.attempt,
        step=row.step,
        bytes=row.bytes,
        at=instant_in(row.at),
        manifest_key=row.manifest_key,
        sha256=row.sha256,
        metric=row.metric,
        pinned=bool(row.pinned),
        host=row.host,
        proven_by=row.proven_by,
        doubted_by=tuple(int(number) for number in json.loads(row.doubted_by or "[]")),
    )


def attempt_out(attempt: Attempt, quote_text: str) -> Columns:
    """Raise InvariantBroken for a machine at another provider than the one that was agreed."""
    offer, ref, meter = attempt.quote.offer, attempt.ref, attempt.meter
    if ref is not None and ref.provider != offer.provider:
        raise InvariantBroken(
            f"attempt {attempt.key} was bought at {offer.provider} but its machine is {ref.provider}'s"
        )
    return {
        "job_id": attempt.id.job,
        "number": attempt.id.number,
        "key": attempt.key,
        "state": attempt.state.value,
        "quote": quote_text,
        "provider": offer.provider,
        "offer_id": offer.offer_id,
        "host_id": offer.host_id,
        "region": offer.region,
        "gpu": offer.gpu,
        "gpu_count": offer.gpu_count,
        "price_total": attempt.quote.price.total,
        "price_per_gpu": attempt.quote.price.per_gpu,
        "ceiling": attempt.ceiling,
        "price_max": attempt.price_max,
        "intended_at": instant_out(attempt.intended_at),
        "ref_id": None if ref is None else ref.instance_id,
        "ref_scope": None if ref is None else ref.scope,
        "outcome_unknown": attempt.outcome_unknown,
        "launched_at": maybe_instant_out(attempt.launched_at),
        "running_at": maybe_instant_out(attempt.running_at),
        "ended_at": maybe_instant_out(attempt.ended_at),
        "meter_settled": meter.settled,
        "meter_rate": meter.rate,
        "meter_on_demand_rate": meter.on_demand_rate,
        "meter_since": maybe_instant_out(meter.since),
        "on_demand_settled": attempt.on_demand_settled,
        "ever_listed": attempt.ever_listed,
        "missing_since": maybe_instant_out(attempt.missing_since),
        "machine": attempt.machine.value,
        "heartbeat_seq": attempt.heartbeat_seq,
        "heartbeat_seen_at": maybe_instant_out(attempt.heartbeat_seen_at),
        "read_at": maybe_instant_out(attempt.read_at),
        "phase": words_out(attempt.phase),
        "resumed_from": attempt.resumed_from,
        "notice_at": maybe_instant_out(attempt.notice_at),
        "stop": None if attempt.stop is None else _STOP.dumps(attempt.stop),
        "end_reason": None if attempt.end_reason is None else attempt.end_reason.value,
        "end_detail": words_out(attempt.end_detail),
        "exit_code": attempt.exit_code,
        "meter_until": maybe_instant_out(meter.until),
        "meter_traffic": meter.traffic,
        "listed_at": maybe_instant_out(attempt.listed_at),
        "over_ceiling_at": maybe_instant_out(attempt.over_ceiling_at),
        "start_deadline": maybe_instant_out(attempt.start_deadline),
        "uploaded_bytes": attempt.uploaded_bytes,
        "restored_bytes": attempt.restored_bytes,
        "traffic_since": maybe_instant_out(attempt.traffic_since),
        "traffic_spent": attempt.traffic_spent,
        "bill_tries": attempt.bill_tries,
        "account": words_out(attempt.account),
    }


def meter_in(row: Row) -> Meter:
    return Meter(
        settled=MicroUsd(int(row.meter_settled)),
        rate=MicroUsdPerHour(int(row.meter_rate)),
        on_demand_rate=row.meter_on_demand_rate,
        since=maybe_instant_in(row.meter_since),
        until=maybe_instant_in(row.meter_until),
        traffic=MicroUsd(int(row.meter_traffic)),
    )


def ref_in(row: Row) -> InstanceRef | None:
    """Return the machine in a row of an attempt, by its columns alone."""
    if not isinstance(row.ref_id, str) or not isinstance(row.provider, str):
        return None
    return InstanceRef(
        provider=ProviderName(row.provider), instance_id=InstanceId(row.ref_id), scope=str(row.ref_scope or "")
    )


def attempt_in(row: Row, quote: Quote) -> Attempt:
    ref = None
    if row.ref_id is not None:
        ref = InstanceRef(provider=quote.offer.provider, instance_id=InstanceId(row.ref_id), scope=row.ref_scope)
    return Attempt(
        id=AttemptId(job=JobId(row.job_id), number=row.number),
        key=row.key,
        state=AttemptState(row.state),
        quote=quote,
        ceiling=row.ceiling,
        price_max=row.price_max,
        intended_at=instant_in(row.intended_at),
        ref=ref,
        outcome_unknown=row.outcome_unknown,
        launched_at=maybe_instant_in(row.launched_at),
        running_at=maybe_instant_in(row.running_at),
        ended_at=maybe_instant_in(row.ended_at),
        meter=meter_in(row),
        on_demand_settled=row.on_demand_settled,
        ever_listed=row.ever_listed,
        missing_since=maybe_instant_in(row.missing_since),
        machine=MachineState(row.machine),
        heartbeat_seq=row.heartbeat_seq,
        heartbeat_seen_at=maybe_instant_in(row.heartbeat_seen_at),
        read_at=maybe_instant_in(row.read_at),
        phase=row.phase,
        resumed_from=row.resumed_from,
        notice_at=maybe_instant_in(row.notice_at),
        stop=None if row.stop is None else _STOP.loads(row.stop),
        end_reason=None if row.end_reason is None else EndReason(row.end_reason),
        end_detail=row.end_detail,
        exit_code=row.exit_code,
        listed_at=maybe_instant_in(row.listed_at),
        over_ceiling_at=maybe_instant_in(row.over_ceiling_at),
        start_deadline=maybe_instant_in(row.start_deadline),
        uploaded_bytes=row.uploaded_bytes,
        restored_bytes=row.restored_bytes,
        traffic_since=maybe_instant_in(row.traffic_since),
        traffic_spent=row.traffic_spent,
        bill_tries=row.bill_tries,
        account=row.account,
    )


def intent_out(intent: Intent) -> Columns:
    attempt, ref = intent.attempt, intent.ref
    return {
        "id": intent.id,
        "kind": intent.kind.value,
        "provider": intent.provider,
        "key": intent.key,
        "state": intent.state.value,
        "created_at": instant_out(intent.created_at),
        "attempt_job": None if attempt is None else attempt.job,
        "attempt_number": None if attempt is None else attempt.number,
        "ref_provider": None if ref is None else ref.provider,
        "ref_id": None if ref is None else ref.instance_id,
        "ref_scope": None if ref is None else ref.scope,
        "tries": intent.tries,
        "not_before": maybe_instant_out(intent.not_before),
        "accepted_at": maybe_instant_out(intent.accepted_at),
        "error": words_out(intent.error),
        "account": words_out(intent.account),
        "stray_rate": intent.stray_rate,
        "stray_since": maybe_instant_out(intent.stray_since),
    }


def intent_in(row: Row) -> Intent:
    attempt = None if row.attempt_job is None else AttemptId(job=JobId(row.attempt_job), number=row.attempt_number)
    ref = None
    if row.ref_id is not None:
        ref = InstanceRef(
            provider=ProviderName(row.ref_provider), instance_id=InstanceId(row.ref_id), scope=row.ref_scope
        )
    return Intent(
        id=IntentId(row.id),
        kind=IntentKind(row.kind),
        provider=ProviderName(row.provider),
        key=row.key,
        state=IntentState(row.state),
        created_at=instant_in(row.created_at),
        attempt=attempt,
        ref=ref,
        tries=row.tries,
        not_before=maybe_instant_in(row.not_before),
        accepted_at=maybe_instant_in(row.accepted_at),
        error=row.error,
        account=row.account,
        stray_rate=row.stray_rate,
        stray_since=maybe_instant_in(row.stray_since),
    )


def cooldown_out(cooldown: Cooldown) -> Columns:
    return {
        "provider": cooldown.provider,
        "scope": cooldown.scope.value,
        "subject": cooldown.subject,
        "until": instant_out(cooldown.until),
        "reason": words_out(cooldown.reason),
        "since": maybe_instant_out(cooldown.since),
        "strikes": cooldown.strikes,
        "ends": cooldown.ends.value,
    }


def cooldown_in(row: Row) -> Cooldown:
    return Cooldown(
        provider=ProviderName(row.provider),
        scope=CooldownScope(row.scope),
        subject=row.subject,
        until=instant_in(row.until),
        reason=row.reason,
        since=maybe_instant_in(row.since),
        strikes=row.strikes,
        ends=CooldownEnd(row.ends),
    )


def charge_out(charge: Charge) -> Columns:
    return {
        "job_id": charge.attempt.job,
        "attempt": charge.attempt.number,
        "start": instant_out(charge.start),
        "end": instant_out(charge.end),
        "provider": charge.provider,
        "day": charge.day,
        "amount": charge.amount,
        "on_demand": charge.on_demand,
    }


def charge_in(row: Row) -> Charge:
    return Charge(
        attempt=AttemptId(job=JobId(row.job_id), number=row.attempt),
        provider=ProviderName(row.provider),
        day=row.day,
        start=instant_in(row.start),
        end=instant_in(row.end),
        amount=row.amount,
        on_demand=row.on_demand,
    )


def event_out(seq: int, event: Event) -> Columns:
    return {
        "seq": seq,
        "at": instant_out(event.at),
        "kind": event.kind,
        "message": words_out(event.message),
        "job_id": event.job,
        "attempt": event.attempt,
        "data": json.dumps(dict(event.data), separators=(",", ":"), allow_nan=False),
    }


def event_in(row: Row) -> Event:
    return Event(
        at=instant_in(row.at),
        kind=row.kind,
        message=row.message,
        job=None if row.job_id is None else JobId(row.job_id),
        attempt=row.attempt,
        data=json.loads(row.data),
    )
