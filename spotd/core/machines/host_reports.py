"""What a host wrote, turned into what is true of its attempt: checkpoints, signs of life, notices and its own end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from spotd.core.billing.billing import charge_unseen, last_lived, prove_by_report, start_billing, start_billing_later
from spotd.core.billing.traffic import meter_outputs, meter_traffic
from spotd.core.checkpoints.checkpoint_advice import with_save_time
from spotd.core.checkpoints.outputs import note_outputs, pin_outputs
from spotd.core.checkpoints.retention import note_fallbacks, with_fresh
from spotd.core.domain.bounds import bytes_within
from spotd.core.domain.host_status import ExitCause, HostStatus
from spotd.core.domain.ids import AttemptId
from spotd.core.domain.lineage import with_progress
from spotd.core.domain.states import AttemptState, EndReason, JobState, require_rows
from spotd.core.machines.notices import drop_lapsed_notice, note_notice
from spotd.core.machines.watchdog import note_freshness, note_progress
from spotd.core.plans.learning import learn_from_start
from spotd.core.plans.plan_builder import PlanBuilder
from spotd.core.pricing.usefulness import transfer_time
from spotd.core.pricing.words import machine_words
from spotd.core.ranking.remaining_work import with_pace, with_work

DATA_TIME_MAX: Final = timedelta(minutes=1)
"""A start that waits longer for its job's datasets says nothing about its host, or about other starts of its image."""
_RUNNING_PHASES: Final = frozenset({"run", "save", "upload", "done"})
_EXIT_REASONS: Final[Mapping[ExitCause, EndReason]] = {
    ExitCause.FINISHED: EndReason.USER_ERROR,
    ExitCause.STOPPED: EndReason.PREEMPTED,
    ExitCause.NOTICE: EndReason.PREEMPTED,
    ExitCause.LEASE: EndReason.LEASE_EXPIRED,
    ExitCause.SETUP_FAILED: EndReason.USER_ERROR,
    ExitCause.CODE_UNUSABLE: EndReason.CODE_ERROR,
    ExitCause.INPUT_UNUSABLE: EndReason.INPUT_ERROR,
    ExitCause.DISK_FULL: EndReason.DISK_FULL,
    ExitCause.RUNNER_FAILED: EndReason.HOST_LOST,
}
"""Why an attempt ends whose command did not succeed, and which was not ordered to stop."""
require_rows(ExitCause, _EXIT_REASONS)


def absorb(builder: PlanBuilder, attempt_id: AttemptId, report: HostStatus) -> None:
    """Take in checkpoints, signs of life and notices of an attempt that counts; of one that is over its traffic."""
    item = builder.attempt(attempt_id)
    if not item.state.counts:
        meter_traffic(builder, attempt_id, report)
        return
    for note in report.notes:
        builder.event("host.note", note, attempt=attempt_id)
    note_fallbacks(builder, attempt_id, report.fallbacks)
    if report.checkpoints:
        job = builder.job(attempt_id.job)
        resumed = replace(item, resumed_from=item.resumed_from or report.resumed_from)
        fresh = with_work(job, resumed, report.checkpoints, builder.now)
        builder.put_job(replace(job, checkpoints=with_fresh(job, attempt_id.number, fresh)))
        for checkpoint in report.checkpoints:
            if checkpoint.manifest_key in report.unannounced:
                continue
            builder.event(
                "checkpoint.accepted",
                f"checkpoint {checkpoint.name} is complete and verified",
                attempt=attempt_id,
                name=checkpoint.name,
                step=checkpoint.step,
                bytes=checkpoint.bytes,
            )
    if report.seq > item.heartbeat_seq:
        item = replace(
            item,
            heartbeat_seq=report.seq,
            heartbeat_seen_at=report.read_at,
            phase=report.phase or item.phase,
        )
        if item.ref is None and report.exit_at is None:
            item = replace(item, proven_at=last_lived(item, report.read_at, report))
    elif item.heartbeat_seen_at is not None:
        # A thousand hosts that only show life are not written down each time: the next marker shows the same.
        seen_at = last_sign_of_life(item.heartbeat_seen_at, report)
        if seen_at - item.heartbeat_seen_at >= builder.policy.silence_max:
            item = replace(item, heartbeat_seen_at=seen_at)
    if not report.liveness_check:
        item = replace(item, read_at=report.read_at)
    if report.resumed_from is not None and item.resumed_from is None:
        item = replace(item, resumed_from=report.resumed_from)
        builder.event(
            "attempt.resumed",
            f"resumed from checkpoint {report.resumed_from}",
            attempt=attempt_id,
            name=report.resumed_from,
        )
    before = builder.attempt(attempt_id)
    moved = report.seq > before.heartbeat_seq
    if item is not before:
        builder.put_attempt(item)
    prove_by_report(builder, before, report, moved=moved)
    if moved:
        start_billing(builder, attempt_id)
    if moved and before.heartbeat_seen_at is None:
        start_billing_later(builder, attempt_id, report.script_began_at)
    meter_traffic(builder, attempt_id, report)
    item = builder.attempt(attempt_id)
    if report.checkpoints:
        job = with_save_time(builder.job(attempt_id.job), report.save_time)
        job = with_pace(job, item, report.checkpoints, builder.now)
        builder.put_job(with_progress(job, item, builder.now))
    note_progress(builder, attempt_id, report, is_new=moved)
    if report.notice_at is not None:
        note_notice(builder, attempt_id, report.notice_at)
    drop_lapsed_notice(builder, attempt_id)
    _extend_stop(builder, attempt_id, report)
    item = builder.attempt(attempt_id)
    if report.phase in _RUNNING_PHASES and item.state in {AttemptState.INTENDED, AttemptState.STARTING}:
        if item.state is AttemptState.INTENDED and item.ref is None:
            return  # the machine speaks before its launch was answered; its listing will name it
        _running(builder, attempt_id)
    note_freshness(builder, attempt_id, report, is_new=moved)


def _extend_stop(builder: PlanBuilder, attempt_id: AttemptId, report: HostStatus) -> None:
    """Give a stopping host more time while its upload advances, up to the order's limit."""
    item = builder.attempt(attempt_id)
    stop = item.stop
    if stop is None or stop.limit is None or report.upload_progress in {"", stop.progress}:
        return
    later = min(stop.limit, builder.now + builder.policy.save_allowance)
    if later <= stop.deadline:
        return
    if not stop.progress:
        minutes = int((stop.limit - builder.now).total_seconds() // 60)
        builder.event("attempt.saving", f"its upload advances: it has up to {minutes} min more", attempt=attempt_id)
    builder.put_attempt(replace(item, stop=replace(stop, deadline=later, progress=report.upload_progress)))


def last_sign_of_life(written: datetime, report: HostStatus) -> datetime:
    """Return the later of what is on record and what the liveness markers showed since."""
    return written if report.marker_at is None else max(written, report.marker_at)


def _running(builder: PlanBuilder, attempt_id: AttemptId) -> None:
    item = builder.attempt(attempt_id)
    builder.put_attempt(replace(item, state=AttemptState.RUNNING, running_at=builder.now))
    resumed = f", from checkpoint {item.resumed_from}" if item.resumed_from else ""
    job = builder.job(attempt_id.job)
    if transfer_time(bytes_within(job.data_bytes), item.quote.offer.download_mbps) < DATA_TIME_MAX:
        learn_from_start(builder, item, job.spec.image)
    offer = item.quote.offer
    builder.event("attempt.running", f"the command runs{resumed}", attempt=attempt_id)
    if job.state in {JobState.PROVISIONING, JobState.STARTING}:
        builder.move_job(
            job.id,
            JobState.RUNNING,
            f"runs on {machine_words(offer.gpu, offer.gpu_count)} at {offer.provider}{resumed}",
            started_at=job.started_at or builder.now,
            image_errors=0,
        )


def exited(builder: PlanBuilder, attempt_id: AttemptId, report: HostStatus) -> None:
    """Record that the runner reported its own end."""
    item = replace(builder.attempt(attempt_id), exit_code=report.exit_code, phase="done")
    if item.state is AttemptState.INTENDED and not item.outcome_unknown:
        return  # the answer to its launch is on its way; the report will still be there
    if item.ref is None:
        charge_unseen(builder, attempt_id, max(report.exit_at or builder.now, item.proven_at or item.intended_at))
        item = replace(builder.attempt(attempt_id), exit_code=report.exit_code, phase="done")
    builder.put_attempt(item)
    meter_outputs(builder, attempt_id, report.outputs_bytes)
    item = builder.attempt(attempt_id)
    cause = report.exit_cause
    if cause is None:
        return
    if cause is ExitCause.FINISHED and report.exit_code == 0:
        outputs = pin_outputs(builder, attempt_id, report)
        builder.end_attempt(attempt_id, EndReason.DONE)
        note_outputs(builder, attempt_id, outputs)
    elif cause in {ExitCause.FINISHED, ExitCause.STOPPED} and item.stop is not None:
        builder.end_attempt(attempt_id, item.stop.reason, item.stop.detail)
    else:
        reason = _EXIT_REASONS[cause]
        detail = report.exit_detail or (f"exit code {report.exit_code}" if report.exit_code is not None else "")
        detail = detail or ("setup failed" if cause is ExitCause.SETUP_FAILED else "")
        builder.end_attempt(attempt_id, reason, detail if reason.takes_detail else "")
