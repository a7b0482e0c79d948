"""What a machine uploads and restores, as money: metered, and held to the ceiling.

Theory. A ceiling is a price per hour with the traffic in it, so what is uploaded must stay within what the price of the
machine's time leaves of it. Uploads come in lumps: each is a debt that is paid off at that rate, with a small
tolerance. A machine is given up when it uploads again while more than a window of debt is left, so neither one large
checkpoint nor a few in quick succession end it, and a pace that costs more than the ceiling always does.

The bytes are those of manifests whose chunks the daemon found in the store, or all that it counts there once in a while
where that is more, and of checkpoints that it offered to restore; no figure of a host is taken further than that.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Final

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.bounds import MOVED_MAX, bytes_within
from spotd.core.domain.charges import Meter
from spotd.core.domain.host_status import HostStatus
from spotd.core.domain.ids import AttemptId
from spotd.core.domain.jobs import Job
from spotd.core.domain.states import EndReason
from spotd.core.plans.plan_builder import PlanBuilder
from spotd.core.pricing.effective_price import DEFAULT_CHECKPOINT_INTERVAL, PPM, moved_cost, traffic_cost
from spotd.core.pricing.words import per_gpu_words
from spotd.core.running.author import order_stop
from spotd_providers.contract.money import MicroUsd, MicroUsdPerHour, as_usd, cost, whole_machine

WINDOW_MIN: Final = timedelta(hours=1)
TOLERANCE_PPM: Final = 50_000
"""How much of the ceiling traffic may cost above it: a machine whose time costs the whole ceiling saves, too."""
BOOKED_AT: Final = 10_000
"""A cent of traffic becomes a charge; less waits for more."""


def meter_traffic(builder: PlanBuilder, attempt: AttemptId, report: HostStatus) -> None:
    """Meter what this report adds to the attempt's traffic, and end a machine that uploads beyond its ceiling."""
    item = builder.attempt(attempt)
    added = sum(bytes_within(report.uploads.get(saved.manifest_key, saved.bytes)) for saved in report.checkpoints)
    # What was uploaded for a checkpoint that never became complete is in no manifest, and was paid for.
    added = max(added, bytes_within(report.stored_bytes) - item.uploaded_bytes)
    uploaded = min(added, MOVED_MAX - item.uploaded_bytes)
    restored = max(item.restored_bytes, _restored(item, builder.job(attempt.job), report))
    if not uploaded and restored == item.restored_bytes:
        return
    meter = _add_moved(builder, item, uploaded, restored)
    if meter.traffic >= BOOKED_AT:
        builder.set_rate(attempt, meter.rate, meter.on_demand_rate)
    if uploaded:
        _hold_to_ceiling(builder, attempt, traffic_cost(item.quote.offer, uploaded, 0))


def meter_outputs(builder: PlanBuilder, attempt: AttemptId, size: int) -> None:
    """Meter the outputs that the attempt left at its end, which is read once."""
    item = builder.attempt(attempt)
    uploaded = min(bytes_within(size), MOVED_MAX - item.uploaded_bytes)
    if uploaded:
        _add_moved(builder, item, uploaded, item.restored_bytes)


def _add_moved(builder: PlanBuilder, item: Attempt, uploaded: int, restored: int) -> Meter:
    """Meter so many bytes uploaded besides, and so many restored in all."""
    total = item.uploaded_bytes + uploaded
    before = moved_cost(item.quote, item.uploaded_bytes, item.restored_bytes)
    added = moved_cost(item.quote, total, restored) - before
    meter = replace(item.meter, traffic=MicroUsd(item.meter.traffic + added))
    builder.put_attempt(replace(item, uploaded_bytes=total, restored_bytes=restored, meter=meter))
    return meter


def _restored(item: Attempt, job: Job, report: HostStatus) -> int:
    """Return what was downloaded of the checkpoints that this attempt was offered, of code, inputs and data."""
    offered = [saved for saved in job.checkpoints if saved.attempt != item.id.number]
    size = max((saved.bytes for saved in offered), default=0)
    done = next((saved.bytes for saved in offered if saved.name == (report.resumed_from or item.resumed_from)), 0)
    moved = max(done, min(report.restored_bytes, size))
    if item.heartbeat_seen_at is not None:
        moved += bytes_within(job.delivered_bytes - job.data_bytes)
    # All datasets are there once the command runs; before, a lost host has read no more than it stated.
    return moved + min(bytes_within(job.data_bytes), job.data_bytes if item.running_at else max(0, report.data_bytes))


def _hold_to_ceiling(builder: PlanBuilder, attempt: AttemptId, added: MicroUsd) -> None:
    item = builder.attempt(attempt)
    every = builder.job(attempt.job).spec.checkpoint.every or DEFAULT_CHECKPOINT_INTERVAL
    paid_off_per_hour = left_for_uploads(item)
    debt = 0
    if item.traffic_since is not None:
        debt = max(0, item.traffic_spent - cost(paid_off_per_hour, builder.now - item.traffic_since))
    builder.put_attempt(replace(item, traffic_since=builder.now, traffic_spent=MicroUsd(debt + added)))
    if item.stop is None and item.state.counts and debt > cost(paid_off_per_hour, max(WINDOW_MIN, every)):
        accepted = per_gpu_words(item.ceiling_now)
        moved = traffic_cost(item.quote.offer, item.uploaded_bytes, 0)
        order_stop(
            builder,
            builder.attempt(attempt),
            EndReason.PRICE_ROSE,
            f"its uploads have cost ${as_usd(moved):.4f}, which with the machine is more than {accepted}",
        )


def left_for_uploads(item: Attempt) -> MicroUsdPerHour:
    """Return what the ceiling leaves per hour for uploads beside the machine's time, with the tolerance."""
    whole = whole_machine(item.ceiling_now, item.quote.offer.gpu_count)
    time = max(item.meter.rate, 0)
    return MicroUsdPerHour(max(0, whole - time - item.quote.price.restore) + whole * TOLERANCE_PPM // PPM)
