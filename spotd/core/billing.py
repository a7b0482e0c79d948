"""From when, up to when and at which rate a machine bills, as far as anything shows it.

Theory. A machine bills from the launch that was intended, never earlier, whatever instant its provider states. Its disk
bills at once, the rest from the state in which the provider bills: since the last listing without that state or, where
the start script is the machine's first process, since its host says that this began. It bills for as long as something
shows that it exists: a listing in which it runs, or a sign of life of its host. Without either it cannot outlive its
lease, so nothing is booked beyond that (`Meter.until`) until it is seen again: then the time between was its own, and
is booked, unless its host says that it began anew in that time (`_note_rest`): it rested, and billed its disk, from the
newest proof until then. One that does not run any more ran up to the newest proof (`ran_until`). Where its provider
states that it bills the disk only, or nothing, as of a host that it cannot reach, that counts instead
(`Instance.billing`).
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from spotd.core.author import order_stop
from spotd.core.canary import CANARY
from spotd.core.domain.attempts import Attempt, HostStatus, TrafficDebt
from spotd.core.domain.copies import replace
from spotd.core.domain.intents import AttemptId, Meter
from spotd.core.domain.jobs import MOVED_MAX, Job, bytes_within
from spotd.core.domain.market import LEAP
from spotd.core.domain.policy import Policy
from spotd.core.domain.states import EndReason
from spotd.core.metering import outlives, proven_until
from spotd.core.plan_builder import PlanBuilder
from spotd.core.pricing import (
    DEFAULT_CHECKPOINT_INTERVAL,
    PPM,
    halted_rate,
    listed_rate,
    metered_rate,
    moved_cost,
    on_demand_rate,
    per_gpu_words,
    traffic_cost,
)
from spotd_providers.contract.values import (
    Instance,
    InstanceState,
    MicroUsd,
    MicroUsdPerHour,
    as_usd,
    cost,
    whole_machine,
)

PROOF_STEP: Final = timedelta(minutes=2)
"""How far the newest proof of a machine may move before it is written down: it ran on for half of that on average."""
GAP: Final = timedelta(minutes=5)
"""After so long without a proof, a host's own report decides when it lived in between."""
HEARTBEATS_APART: Final = timedelta(seconds=15)
"""A host gives a sign of life so often: where nothing follows the newest one, it ran on for half of that on average."""
LATE: Final = 5 * HEARTBEATS_APART
"""What was written so long before it was read may be the last of its host: it is a proof of when it was written."""
ENDING_TAKES: Final = timedelta(seconds=15)
"""From the report of the runner's end until its machine bills no more: it powers off, or calls its provider, then."""

CLOCKS_DIFFER: Final = timedelta(minutes=1)
"""A provider's clock may be ahead of ours by so much."""

SCRIPT_TAKES: Final = timedelta(seconds=1)
"""From the state in which a container is billed to the first process in it, and what clocks differ by."""
LISTED_WITHIN: Final = timedelta(seconds=30)
"""Two listings of a machine that starts are hardly further apart."""

STARTS_WITHIN: Final = timedelta(minutes=2)
"""A virtual machine mostly runs by then; one that does not is listed at the usual pace."""


def began(item: Attempt, created_at: datetime | None, now: datetime, default: datetime) -> datetime:
    """When the machine was made: not before it was intended and not in the future, whatever the provider states.

    An instant that is far in the future is by another clock, as after ours was set back, and says nothing.
    """
    stated = created_at if created_at is not None and created_at - now <= CLOCKS_DIFFER else default
    return min(max(stated, item.intended_at), now)


def began_unseen(builder: PlanBuilder, item: Attempt, created_at: datetime | None) -> datetime:
    """When a machine that is first listed now was made; one that was there before that instant was only woken then.

    No call makes a machine after the time in which a list had to show it. So one that states a later start was paused
    in between, unless a list lacked it meanwhile.
    """
    since = began(item, created_at, builder.now, item.intended_at)
    intent = builder.launch_order(item)
    shown_by = None if intent is None else intent.not_before
    if shown_by is not None and since > shown_by and item.missing_since is None:
        return item.intended_at
    job = builder.job(item.id.job)
    signs = [item.heartbeat_seen_at, *job.saved_by(item.id.number)]
    return item.intended_at if any(at is not None and at < since for at in signs) else since


def first_meter(item: Attempt, instance: Instance, since: datetime, builder: PlanBuilder) -> Meter:
    """Return the meter of a machine that is known for the first time."""
    rate, compared = metered_rate(item.quote), on_demand_rate(item.quote)
    if instance.state is InstanceState.PENDING and _bills_from_running(item, builder.policy):
        rate, compared = halted_rate(item.quote), MicroUsdPerHour(0)
    return replace(
        item.meter,
        rate=rate,
        on_demand_rate=compared,
        since=since,
        until=proven_until(item, builder.job(item.id.job), builder.policy, builder.now),
    )


def _bills_from_running(item: Attempt, policy: Policy) -> bool:
    rules = policy.providers.get(item.provider)
    return rules is not None and rules.bills_from_running


def prove(
    builder: PlanBuilder, attempt: AttemptId, at: datetime, *, lived_at: datetime | None = None, exactly: bool = False
) -> None:
    """Bill the machine up to this instant, at which it existed, and beyond it for as long as its lease.

    Args:
        exactly: it is written down however little newer it is, since no other may follow.
    """
    item = builder.attempt(attempt)
    known = item.meter.until
    if item.meter.since is None:
        return
    proven = min(at, lived_at or at)
    exactly = exactly and (item.proven_at is None or proven > item.proven_at)
    if exactly:
        proven = _as_proof(proven, HEARTBEATS_APART / 2)
    elif item.proven_at is not None:
        proven = max(proven, item.proven_at)
    until = proven_until(item, builder.job(attempt.job), builder.policy, at)
    exactly = exactly or _lived_on(item, at)
    if known is None:
        is_old = exactly or item.proven_at is None or proven - item.proven_at >= PROOF_STEP
        if is_old and (until is None or not item.state.counts):
            builder.put_attempt(replace(item, proven_at=proven))
        return
    is_newer = item.proven_at is not None and proven - item.proven_at >= PROOF_STEP
    if exactly or is_newer or until is None or until - known >= PROOF_STEP or (until > known and builder.now >= known):
        until = None if until is None else max(until, known)
        builder.put_attempt(replace(item, proven_at=proven, meter=replace(item.meter, until=until)))


def _was_read_late(item: Attempt) -> bool:
    """Whether its proof is what its host wrote long before it was read: what is read in time is never so far ahead."""
    seen_at, proven_at = item.heartbeat_seen_at, item.proven_at
    return seen_at is not None and proven_at is not None and seen_at - proven_at >= PROOF_STEP


def _lived_on(item: Attempt, at: datetime) -> bool:
    """Whether a machine whose last words were read late, or dated by a wrong clock, lived at this later instant."""
    return _was_read_late(item) and item.proven_at is not None and at > item.proven_at + PROOF_STEP / 2


def _as_proof(last: datetime, ran_on: timedelta) -> datetime:
    """Return the proof of life of a machine that is known to have run on for so long after its last sign of life.

    Other proofs are rarely written down, so a machine is taken to have run for half of `PROOF_STEP` after each.
    """
    return last + ran_on - PROOF_STEP / 2


def prove_by_report(builder: PlanBuilder, before: Attempt, report: HostStatus, *, moved: bool) -> None:
    """Its host gave a sign of life, or came to its end, since it was read last, when it was as `before`."""
    attempt, job = before.id, builder.job(before.id.job)
    if before.meter.since is None:
        return
    _note_rest(builder, before, report)
    bill_until_it_wrote(builder, before, report)
    item = builder.attempt(attempt)
    known, span = item.meter.until, outlives(before, job, builder.policy)
    is_limited = span is not None and known is not None
    proven = known - span if span is not None and known is not None else item.proven_at or before.meter.since
    if is_limited and before.heartbeat_seen_at is None and item.heartbeat_seen_at is not None:
        # It has a lease from now on, which is shorter than the time it had for its start.
        known = proven_until(item, job, builder.policy, max(proven, min(report.read_at, builder.now))) or known
        item = replace(item, meter=replace(item.meter, until=known))
        builder.put_attempt(item)
    last = ended_there(report)
    if last is not None and report.exit_at is not None and proven <= report.exit_at <= builder.now:
        until = last + ENDING_TAKES
        if not is_limited:
            prove(builder, attempt, last)
        elif known is not None and until < known:
            proof = _as_proof(last, ENDING_TAKES)
            builder.put_attempt(replace(item, proven_at=proof, meter=replace(item.meter, until=until)))
        return
    at = report.read_at if moved else report.marker_at
    # It may be read a while after it was written, which its own clock states, unless that is behind what is proven.
    lived_at = report.alive_at if moved and report.alive_at is not None and report.alive_at <= report.read_at else None
    if lived_at is not None and proven - lived_at >= PROOF_STEP:
        lived_at = None
    is_late = lived_at is not None and report.read_at - lived_at > LATE
    if at is not None and (is_late or at - proven > GAP):
        at = report.alive_at if report.alive_at is not None and report.alive_at <= report.read_at else None
    if at is not None:
        prove(builder, attempt, at, lived_at=lived_at, exactly=is_late)


def ended_there(report: HostStatus) -> datetime | None:
    """Up to when a host that reported its end lived at the least, by its own clock.

    It lives on while its report cannot be written, as where the store is away.
    """
    if report.exit_at is None or report.alive_at is None or report.alive_at > report.read_at:
        return report.exit_at
    return max(report.exit_at, report.alive_at)


def is_known_start(item: Attempt, report: HostStatus) -> bool:
    """Whether the host's own date of the begin of its start script is the one that is known."""
    known, stated = item.began_there_s, report.began_there_s
    return known is not None and (stated is None or abs(stated - known) < GAP.total_seconds())


def _note_rest(builder: PlanBuilder, before: Attempt, report: HostStatus) -> None:
    """Bill the disk alone from the newest proof of its life until its host says that it began again, be it much later.

    A machine that is outbid, or whose host goes down, stops at once; what begins anew on it is the start script. No
    list and no heartbeat has shown it in between, as while the daemon was dead, else that would be the newest proof.
    What it wrote meanwhile proves it, too. One that began when it did before, by its own clock, did not begin again, be
    it that this clock and ours differ by hours. One whose runner had come to its end before was idle, and nothing shows
    for how long.
    """
    again, proven, meter = report.script_began_at, before.proven_at, before.meter
    if again is None or proven is None or meter.since is None or before.heartbeat_seen_at is None:
        return  # a first start may take long, and is billed
    if is_known_start(before, report):
        return
    if meter.rate <= halted_rate(before.quote) or (report.exit_at is not None and report.exit_at < again):
        return
    wrote = [report.alive_at, *(one.at for one in report.checkpoints)]
    exact = max((at for at in wrote if at is not None and proven < at < again), default=None)
    stopped = proven + PROOF_STEP / 2 if exact is None else exact + HEARTBEATS_APART / 2
    end, begin = min(again - SCRIPT_TAKES, builder.now), max(stopped, meter.since)
    if end - begin <= GAP:
        return
    builder.set_rate(before.id, halted_rate(before.quote), MicroUsdPerHour(0), at=begin)
    bill_until_ended(builder, before.id)
    builder.set_rate(before.id, meter.rate, meter.on_demand_rate, at=end)
    item = builder.attempt(before.id)
    until = proven_until(item, builder.job(before.id.job), builder.policy, end)
    builder.put_attempt(replace(item, proven_at=end, meter=replace(item.meter, until=until)))


def bill_until_it_wrote(builder: PlanBuilder, before: Attempt, report: HostStatus) -> None:
    """Bill in full up to what its host wrote last, where a list that was read before showed a machine that had stopped.

    Such a machine is billed for its disk alone from the newest proof of its life, where nothing showed when it stopped
    (`ran_until`). One that a list showed to stop is billed from that moment on, and stays so.
    """
    since, proven, halted = before.meter.since, before.proven_at, halted_rate(before.quote)
    if since is None or proven is None or before.meter.rate != halted or since != proven + PROOF_STEP / 2:
        return
    wrote = [at for at in (report.exit_at, report.alive_at) if at is not None]
    last = min(max(wrote, default=proven), report.read_at, builder.now)
    full = metered_rate(before.quote)
    if last <= since or full <= halted:
        return
    meter = replace(before.meter, rate=full, on_demand_rate=on_demand_rate(before.quote))
    builder.put_attempt(replace(before, meter=meter))
    builder.set_rate(before.id, halted, None, at=min(last + HEARTBEATS_APART / 2, builder.now))
    builder.put_attempt(replace(builder.attempt(before.id), proven_at=last))


def ran_until(item: Attempt, stated: datetime | None, now: datetime) -> datetime:
    """Up to when a machine ran that does not run now: as its provider states it, else until nothing showed it any more.

    One that was seen a few minutes ago stopped just before; after a longer time, or where its host was read and had
    written nothing more, as where the daemon was dead, the newest proof of its life is the best estimate, until its
    bill is read.
    """
    since = item.meter.since
    if since is None:
        return now
    if stated is not None:
        return min(max(stated, since), now)
    if item.proven_at is None or item.meter.rate <= halted_rate(item.quote):
        return now
    if item.meter.until is None and item.phase == "done":
        return now  # its host writes nothing more, and nothing but an order ends it
    if now - item.proven_at <= GAP and not _was_read_late(item):
        return now
    return min(max(item.proven_at + PROOF_STEP / 2, since), now)


def last_lived(item: Attempt, seen_at: datetime, report: HostStatus | None) -> datetime:
    """When a machine that no list shows lived last: what it wrote may be read only hours after it was written.

    Its host dates that by its own clock, which ours may have left since, so no date before what is proven is believed.
    """
    stated = None if report is None else report.alive_at
    lived = stated if stated is not None and seen_at - stated > GAP else seen_at
    return max(lived, item.proven_at or item.intended_at)


def has_booked_time(item: Attempt) -> bool:
    """Whether time of the machine is booked, not its traffic alone."""
    meter = item.meter
    return meter.settled > moved_cost(item.quote, item.uploaded_bytes, item.restored_bytes) - meter.traffic


def charge_unseen(builder: PlanBuilder, attempt: AttemptId, last: datetime) -> None:
    """Charge a machine that no list ever showed, from its intent to this last sign of it."""
    item = builder.attempt(attempt)
    if item.meter.since is not None or has_booked_time(item):
        return
    until = min(max(last, item.intended_at) + ENDING_TAKES, builder.now)
    meter = replace(
        item.meter,
        rate=metered_rate(item.quote),
        on_demand_rate=on_demand_rate(item.quote),
        since=min(item.intended_at, until),
        until=until,
    )
    launched_at = item.launched_at or item.intended_at
    builder.put_attempt(replace(item, launched_at=launched_at, meter=meter, full_since=meter.since))
    builder.set_rate(attempt, MicroUsdPerHour(0), None, at=until)


def note_listed(builder: PlanBuilder, attempt: AttemptId, at: datetime, *, exactly: bool) -> None:
    """Record that a listing of this instant showed the machine as it is."""
    item = builder.attempt(attempt)
    if exactly and (item.listed_at is None or at > item.listed_at):
        builder.put_attempt(replace(item, listed_at=at))
    prove(builder, attempt, at)


def bill_listed(builder: PlanBuilder, attempt: AttemptId, at: datetime, rate: MicroUsdPerHour) -> None:
    """Bill the rate at which a listing of this instant shows the machine that runs.

    One that leaps is more likely a wrong row than a market, and would use up a budget at once: it is billed once a
    second listing states a leap, too, and then from the first one on.
    """
    item = builder.attempt(attempt)
    meter, first = item.meter, item.bidding.leapt_at
    is_running = meter.since is not None and meter.rate > halted_rate(item.quote)
    before = meter.rate if is_running else metered_rate(item.quote)
    leaps = rate > LEAP * before or before > LEAP * rate
    if not leaps or not builder.policy.rows_may_be_wrong:
        _note_leap(builder, item, None)
        _bill_from(builder, attempt, rate, None)
    elif first is None or at <= first:
        _note_leap(builder, item, first or at)
        if not is_running:
            _bill_from(builder, attempt, metered_rate(item.quote), None)
    else:
        _note_leap(builder, item, None)
        _bill_from(builder, attempt, rate, min(builder.now, max(first, meter.since or first)))


def _note_leap(builder: PlanBuilder, item: Attempt, at: datetime | None) -> None:
    if item.bidding.leapt_at != at:
        builder.put_attempt(replace(item, bidding=replace(item.bidding, leapt_at=at)))


def _bill_from(builder: PlanBuilder, attempt: AttemptId, rate: MicroUsdPerHour, at: datetime | None) -> None:
    item = builder.attempt(attempt)
    if item.meter.rate != rate or item.meter.since is None:
        builder.set_rate(attempt, rate, on_demand_rate(item.quote), at=at)


def bill_past_prices(builder: PlanBuilder, attempt: AttemptId, mine: Instance, until: datetime) -> None:
    """Bill each price from when its provider states that it held: the daemon may have been dead when it changed."""
    for at, price in mine.past_prices:
        item = builder.attempt(attempt)
        since = item.meter.since
        if since is None or item.meter.rate <= halted_rate(item.quote):
            return
        if since < at < until:
            rate = listed_rate(item.quote, price)[0]
            if rate != item.meter.rate:
                builder.set_rate(attempt, rate, on_demand_rate(item.quote), at=at)


def bill_until_ended(builder: PlanBuilder, attempt: AttemptId) -> None:
    """Bill what is left of the machine until its end is confirmed, since no lease ends it."""
    item = builder.attempt(attempt)
    if item.meter.until is not None:
        builder.put_attempt(replace(item, meter=replace(item.meter, until=None)))


def start_billing(builder: PlanBuilder, attempt: AttemptId) -> None:
    """Bill the machine in full since the last listing in which it only started."""
    item = builder.attempt(attempt)
    meter = item.meter
    if meter.since is None or not is_starting(item, builder.policy):
        return
    since = min(builder.now, max(meter.since, item.listed_at or item.launched_at or meter.since))
    builder.set_rate(attempt, metered_rate(item.quote), on_demand_rate(item.quote), at=since)


def list_again_for_start(builder: PlanBuilder, item: Attempt) -> None:
    """Ask for another listing soon, since nothing else shows when the machine began to bill; for a while only."""
    rules = builder.policy.providers.get(item.provider)
    if rules is None or rules.bills_from_script or item.launched_at is None:
        return
    if builder.now - item.launched_at < STARTS_WITHIN:
        builder.list_again(item.provider)


def start_billing_later(builder: PlanBuilder, attempt: AttemptId, script_began_at: datetime | None) -> None:
    """Its host speaks for the first time and says since when it runs: later than the listing before showed.

    It is believed for as long as passes between two listings, which is what a wrong word can hide.
    """
    item = builder.attempt(attempt)
    rules, meter = builder.policy.providers.get(item.provider), item.meter
    if script_began_at is None or rules is None or not rules.bills_from_script or meter.since is None:
        return
    if item.running_at is not None or meter.rate <= halted_rate(item.quote):
        return
    since = min(script_began_at - SCRIPT_TAKES, meter.since + LISTED_WITHIN, builder.now)
    if since <= meter.since:
        return
    halted = replace(meter, rate=halted_rate(item.quote), on_demand_rate=MicroUsdPerHour(0))
    builder.put_attempt(replace(item, meter=halted, full_since=None))
    builder.set_rate(attempt, meter.rate, meter.on_demand_rate, at=since)


def start_anew(builder: PlanBuilder, attempt: AttemptId) -> None:
    """Bill the disk of a machine that starts and was not billed, until it runs."""
    item = builder.attempt(attempt)
    if item.meter.since is None and item.running_at is None and _bills_from_running(item, builder.policy):
        builder.set_rate(attempt, halted_rate(item.quote), MicroUsdPerHour(0))


def is_starting(item: Attempt, policy: Policy) -> bool:
    """Whether the machine only starts, which its provider does not bill."""
    return (
        item.state.counts
        and item.running_at is None
        and item.meter.since is not None
        and item.meter.on_demand_rate == 0
        and _bills_from_running(item, policy)
    )


# What a machine uploads and restores, as money: metered, and held to the ceiling.
#
# Theory. A ceiling is a price per hour with the traffic in it, so what is uploaded must stay within what the price of
# the machine's time leaves of it. Uploads come in lumps: each is a debt that is paid off at that rate, with a small
# tolerance. A machine is given up when it uploads again while more than a window of debt is left, so neither one
# large checkpoint nor a few in quick succession end it, and a pace that costs more than the ceiling always does.
#
# The bytes are those of manifests whose chunks the daemon found in the store, or all that it counts there once in a
# while where that is more, and of checkpoints that it offered to restore; no figure of a host is taken further than
# that.


WINDOW_MIN: Final = timedelta(hours=1)
TOLERANCE_PPM: Final = 50_000
"""How much of the ceiling traffic may cost above it: a machine whose time costs the whole ceiling saves, too."""
BOOKED_AT: Final = 10_000
"""A cent of traffic becomes a charge; less waits for more."""


def meter_traffic(builder: PlanBuilder, attempt: AttemptId, report: HostStatus) -> None:
    """Meter what this report adds to the attempt's traffic, and end a machine that uploads beyond its ceiling."""
    item = builder.attempt(attempt)
    published = (*report.checkpoints, *(saved for saved, _ in report.older))
    added = sum(bytes_within(report.uploads.get(saved.manifest_key, saved.bytes)) for saved in published)
    # What was uploaded for a checkpoint that never became complete is in no manifest, and was paid for.
    added = max(added, bytes_within(report.stored_bytes) - item.uploaded_bytes)
    uploaded = min(added, MOVED_MAX - item.uploaded_bytes)
    restored = max(item.restored_bytes, _restored_bytes(item, builder.job(attempt.job), report))
    if not uploaded and restored == item.restored_bytes:
        return
    meter = _add_traffic(builder, item, uploaded, restored)
    if meter.traffic >= BOOKED_AT:
        builder.set_rate(attempt, meter.rate, meter.on_demand_rate)
    if uploaded:
        _hold_to_ceiling(builder, attempt, traffic_cost(item.quote.offer, uploaded, 0))


def meter_outputs(builder: PlanBuilder, attempt: AttemptId, size: int) -> None:
    """Meter the outputs that the attempt left at its end, which is read once."""
    item = builder.attempt(attempt)
    uploaded = min(bytes_within(size), MOVED_MAX - item.uploaded_bytes)
    if uploaded:
        _add_traffic(builder, item, uploaded, item.restored_bytes)


def _add_traffic(builder: PlanBuilder, item: Attempt, uploaded: int, restored: int) -> Meter:
    """Meter so many bytes uploaded besides, and so many restored in all."""
    total = item.uploaded_bytes + uploaded
    before = moved_cost(item.quote, item.uploaded_bytes, item.restored_bytes)
    added = moved_cost(item.quote, total, restored) - before
    meter = replace(item.meter, traffic=MicroUsd(item.meter.traffic + added))
    builder.put_attempt(replace(item, uploaded_bytes=total, restored_bytes=restored, meter=meter))
    return meter


def _restored_bytes(item: Attempt, job: Job, report: HostStatus) -> int:
    """Return what was downloaded of the checkpoints that this attempt was offered, of code, inputs and data."""
    offered = [saved for saved in job.checkpoints if saved.attempt != item.id.number]
    size = max((saved.bytes for saved in offered), default=0)
    done = next((saved.bytes for saved in offered if saved.name == (report.resumed_from or item.resumed_from)), 0)
    moved = max(done, min(report.restored_bytes, size))
    was_read = item.heartbeat_seen_at is not None and not report.liveness_check
    if was_read and (report.exit_phase or report.phase or item.phase) != CANARY:
        # Its code and inputs; a machine that measures itself fetches nothing before that.
        moved += bytes_within(job.delivered_bytes - job.data_bytes)
    # All datasets are there once the command runs, also one that no read found running: it has an exit code. Before,
    # a lost host has read no more than it stated.
    has_all = item.running_at is not None or report.exit_code is not None
    return moved + min(bytes_within(job.data_bytes), job.data_bytes if has_all else max(0, report.data_bytes))


def _hold_to_ceiling(builder: PlanBuilder, attempt: AttemptId, added: MicroUsd) -> None:
    item = builder.attempt(attempt)
    every = builder.job(attempt.job).spec.checkpoint.every or DEFAULT_CHECKPOINT_INTERVAL
    paid_off_per_hour = left_for_uploads(item)
    debt = 0
    if item.debt.since is not None:
        debt = max(0, item.debt.spent - cost(paid_off_per_hour, builder.now - item.debt.since))
    builder.put_attempt(replace(item, debt=TrafficDebt(since=builder.now, spent=MicroUsd(debt + added))))
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
