"""What a host wrote, turned into what is true of its attempt: checkpoints, signs of life, notices and its own end."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from spotd.core.billing import (
    bill_until_it_wrote,
    charge_unseen,
    ended_there,
    is_known_start,
    last_lived,
    meter_outputs,
    meter_traffic,
    prove_by_report,
    start_billing,
    start_billing_later,
)
from spotd.core.canary import believed_reason, never_ran
from spotd.core.checkpoints import note_fallbacks, note_outputs, pin_outputs, with_fresh, with_older, with_save_time
from spotd.core.domain.attempts import (
    RUN,
    Attempt,
    Freshness,
    HostStatus,
    LapsedNotices,
    is_due,
    is_due_there,
    watched,
)
from spotd.core.domain.copies import replace
from spotd.core.domain.intents import AttemptId, Intent, IntentKind, IntentState, launch_intent_id
from spotd.core.domain.jobs import Checkpoint, bytes_within, notice_within
from spotd.core.domain.lineage import with_progress
from spotd.core.domain.plan import Plan
from spotd.core.domain.policy import Policy
from spotd.core.domain.states import AttemptState, EndReason, JobState
from spotd.core.domain.world import World
from spotd.core.gangs import note_members
from spotd.core.handover import waits_until
from spotd.core.metering import lease_and_save
from spotd.core.plan_builder import PlanBuilder
from spotd.core.pricing import machine_words, span_words, transfer_time
from spotd.core.ranking.remaining_work import with_pace, with_work
from spotd.core.working_copy import learn_from_start
from spotd_providers.contract.values import InstanceState, Listing, ProviderName

# Interruption notices: which are recorded, and when one that did not come true counts no more.
#
# Theory. While a machine has a notice, its watchdog, its bids and its moves wait: what they would do is overtaken. So
# a notice must not last. It lapses once the host gives a sign of life `LAPSES_AFTER` beyond the instant that it
# named; a host that is silent by then was most likely taken, and the notice says why. What names an instant further
# ahead than `AHEAD_MAX` is recorded when it is near, since a machine that is taken tomorrow is an ordinary one today.
# The same notice counts once, and of one machine so many are recorded: a provider that names a later instant each
# time would else keep the others off for good.


LAPSES_AFTER: Final = timedelta(minutes=5)
AHEAD_MAX: Final = timedelta(minutes=30)
LAPSED_MAX: Final = 3


def note_notice(builder: PlanBuilder, attempt_id: AttemptId, at: datetime) -> None:
    """Record that the machine will be taken at this instant, unless that is known, far away, or not believed."""
    item = builder.attempt(attempt_id)
    at = notice_within(at, builder.now)
    if item.notice_at is not None or at - builder.now > AHEAD_MAX or _is_known(item, at):
        return
    builder.put_attempt(replace(item, notice_at=at))
    seconds = max(0, int((at - builder.now).total_seconds()))
    builder.event("attempt.notice", f"the provider will take the machine in {seconds} s", attempt=attempt_id)
    builder.list_again(item.provider)


def _is_known(item: Attempt, at: datetime) -> bool:
    """Whether it is a notice that has lapsed, or one of more than are recorded of a machine."""
    lapsed_at = item.lapsed.named
    if item.lapsed.count >= LAPSED_MAX or (lapsed_at is not None and at <= lapsed_at + LAPSES_AFTER):
        return True
    return item.heartbeat_seen_at is not None and item.heartbeat_seen_at >= at + LAPSES_AFTER


def drop_lapsed_notice(builder: PlanBuilder, attempt_id: AttemptId) -> None:
    """Forget a notice whose instant has passed by minutes on a host that lives.

    One that lies further ahead than any that is recorded was noted before the clock was set back.
    """
    item = builder.attempt(attempt_id)
    at, seen_at = item.notice_at, item.heartbeat_seen_at
    if at is None or seen_at is None or not item.state.counts:
        return
    if seen_at < at + LAPSES_AFTER and at - builder.now <= AHEAD_MAX:
        return
    lapsed = replace(item, notice_at=None, lapsed=LapsedNotices(count=item.lapsed.count + 1, named=at))
    builder.put_attempt(lapsed)
    late = span_words(max(timedelta(0), seen_at - at))
    why = f"the machine was to be taken {late} ago, and its host gives signs of life: the notice counts no more"
    builder.event("attempt.notice_lapsed", why, attempt=attempt_id)


# What a read of a host shows of progress and of saving, recorded on its attempt.


READS_PER_INTERVAL: Final = 4
"""A host of which only the liveness is checked is read so often in full while its checkpoint is late."""


def note_progress(builder: PlanBuilder, attempt_id: AttemptId, report: HostStatus, *, is_new: bool) -> None:
    """Record what a heartbeat that was not read before states of progress, where the job is watched.

    Args:
        is_new: the heartbeat is a new one.
    """
    item, rules = builder.attempt(attempt_id), builder.job(attempt_id.job).spec.watchdog
    if is_new and report.sample is not None and rules.is_on and item.stop is None:
        builder.put_attempt(replace(item, watch=watched(item.watch, report.sample, rules, report.read_at)))


def note_freshness(builder: PlanBuilder, attempt_id: AttemptId, report: HostStatus, *, is_new: bool) -> None:
    """Raise the alarm once when checkpoints fall behind; the next one ends it."""
    item, job = builder.attempt(attempt_id), builder.job(attempt_id.job)
    every, known = job.spec.checkpoint.every, item.freshness
    if every is None or item.state is not AttemptState.RUNNING or report.up is None:
        return
    if known is None or report.checkpoints:
        builder.put_attempt(replace(item, freshness=Freshness(since=report.read_at, up=report.up, every=every)))
        if known is not None and known.late_at is not None:
            age = span_words(report.read_at - known.since)
            builder.event("checkpoint.fresh", f"a checkpoint has come, after {age} without one", attempt=attempt_id)
        return
    if known.late_at is not None or report.phase != RUN or not is_due(known, builder.now):
        return
    if report.liveness_check:
        if builder.now - (item.read_at or known.since) >= every / READS_PER_INTERVAL:
            builder.read_in_full(attempt_id)
    elif is_new and is_due_there(known, report.up):
        late = replace(known, late_at=builder.now)
        builder.put_attempt(replace(item, freshness=late))
        words = late_words(late, job.checkpoints[0].name if job.checkpoints else "", builder.now)
        builder.event("checkpoint.late", f"{words}: a preemption would repeat all of it", attempt=attempt_id)


def late_words(known: Freshness | None, newest: str, now: datetime) -> str:
    """Return for how long nothing was saved; empty where there is no alarm."""
    if known is None or known.late_at is None:
        return ""
    after = f" since {newest}" if newest else ""
    age = span_words(max(now - known.since, timedelta(0)))
    return f"no new checkpoint{after} for {age}, [checkpoint] every is {span_words(known.every)}"


def witness_words(item: Attempt, policy: Policy, now: datetime) -> str:
    """Return what speaks against the machine and does not end it yet; empty where nothing does."""
    seen_at = item.heartbeat_seen_at
    silence = timedelta(0) if seen_at is None else now - seen_at
    # What is on record may be as old as one such span although heartbeats arrive.
    is_silent = silence >= 2 * policy.silence_max
    if item.missing_since is not None and not is_silent:
        return f"{item.provider} does not list the machine, but its heartbeats arrive, so it is kept"
    if not is_silent:
        return ""
    minutes, limit = int(silence.total_seconds() // 60), int(policy.silence_limit.total_seconds() // 60)
    return (
        f"no sign of life for {minutes} min, and {item.provider} does not say that it is gone:"
        f" it is given up after {limit} min, or later if most hosts are silent"
    )


DATA_TIME_MAX: Final = timedelta(minutes=1)
"""A start that waits longer for its job's datasets says nothing about its host, or about other starts of its image."""
_RUNNING_PHASES: Final = frozenset({"run", "save", "upload", "done"})


def absorb(builder: PlanBuilder, attempt_id: AttemptId, report: HostStatus) -> None:
    """Take in checkpoints, signs of life and notices of an attempt that counts; of one that is over its traffic."""
    item = builder.attempt(attempt_id)
    if not item.state.counts:
        if item.end_reason is not EndReason.QUARANTINED:  # whose values may not be understood
            bill_until_it_wrote(builder, item, report)
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
        _announce(builder, attempt_id, report, report.checkpoints)
    if report.older:
        job = builder.job(attempt_id.job)
        known, listed = set(job.checkpoints), with_older(job, report.older)
        builder.put_job(replace(job, checkpoints=listed))
        _announce(builder, attempt_id, report, [one for one in listed if one not in known])
    read_at = item.read_at if report.liveness_check else report.read_at
    if report.seq > item.heartbeat_seq:
        # One copy: of all that a cycle writes, most is that hosts go on.
        item = replace(
            item,
            heartbeat_seq=report.seq,
            heartbeat_seen_at=report.read_at,
            phase="done" if report.exit_reason is not None else report.phase or item.phase,
            read_at=read_at,
            began_there_s=item.began_there_s if is_known_start(item, report) else report.began_there_s,
        )
        if item.ref is None and report.exit_at is None:
            item = replace(item, proven_at=last_lived(item, report.read_at, report))
    elif item.heartbeat_seen_at is not None:
        # A thousand hosts that only show life are not written down each time: the next marker shows the same.
        seen_at = last_sign_of_life(item.heartbeat_seen_at, report)
        if seen_at - item.heartbeat_seen_at >= builder.policy.silence_max:
            item = replace(item, heartbeat_seen_at=seen_at)
    if read_at != item.read_at:
        item = replace(item, read_at=read_at)
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
    note_members(builder, attempt_id, report)
    if report.notice_at is not None:
        note_notice(builder, attempt_id, report.notice_at)
    drop_lapsed_notice(builder, attempt_id)
    _extend_stop(builder, attempt_id, report)
    item = builder.attempt(attempt_id)
    has_run = report.phase in _RUNNING_PHASES and not never_ran(report)
    if has_run and item.state in {AttemptState.INTENDED, AttemptState.STARTING}:
        if item.state is AttemptState.INTENDED and item.ref is None:
            return  # the machine speaks before its launch was answered; its listing will name it
        if item.members is not None and item.members.first in item.members.lost:
            return  # without the first one none of them runs: what says so is a machine that is lost, or lies
        _running(builder, attempt_id)
    note_freshness(builder, attempt_id, report, is_new=moved)


def _announce(builder: PlanBuilder, attempt_id: AttemptId, report: HostStatus, accepted: Sequence[Checkpoint]) -> None:
    for checkpoint in accepted:
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
    is_usual = item.machine_key is None  # one that was taken over had its image, and was made long before
    if is_usual and transfer_time(bytes_within(job.data_bytes), item.quote.offer.download_mbps) < DATA_TIME_MAX:
        learn_from_start(builder, item, job.spec.image)
    offer = item.quote.offer
    builder.event("attempt.running", f"the command runs{resumed}", attempt=attempt_id)
    if job.state in {JobState.PROVISIONING, JobState.STARTING}:
        builder.move_job(
            job.id,
            JobState.RUNNING,
            f"runs on {machine_words(offer.gpu, offer.gpu_count, offer.nodes)} at {offer.provider}{resumed}",
            started_at=job.started_at or builder.now,
            image_errors=0,
        )


def exited(builder: PlanBuilder, attempt_id: AttemptId, report: HostStatus) -> None:
    """Record that the runner reported its own end."""
    item = replace(builder.attempt(attempt_id), exit_code=report.exit_code, phase="done")
    if item.state is AttemptState.INTENDED and not item.outcome_unknown:
        return  # the answer to its launch is on its way; the report will still be there
    if item.ref is None:
        charge_unseen(builder, attempt_id, max(ended_there(report) or builder.now, item.proven_at or item.intended_at))
        item = replace(builder.attempt(attempt_id), exit_code=report.exit_code, phase="done")
    builder.put_attempt(item)
    meter_outputs(builder, attempt_id, report.outputs_bytes)
    item = builder.attempt(attempt_id)
    reason = believed_reason(item, builder.job(attempt_id.job), builder.policy, report)
    if reason is None:
        return
    if reason is EndReason.DONE and item.running_at is None:
        # It began and ended between two reads of its host: that it ran is certain, and for how long is not.
        item = replace(item, running_at=builder.now)
        builder.put_attempt(item)
    if reason is EndReason.DONE:
        outputs = pin_outputs(builder, attempt_id, report)
        builder.end_attempt(attempt_id, EndReason.DONE, waits_until=waits_until(builder, item, report))
        note_outputs(builder, attempt_id, outputs)
    elif report.exit_answers_stop and item.stop is not None:
        builder.end_attempt(attempt_id, item.stop.reason, item.stop.detail)
    else:
        if reason is EndReason.CONTRACT_BROKEN:
            job = builder.job(attempt_id.job)
            builder.put_job(replace(job, machines_refused=(job.machines_refused or 0) + 1))
        detail = report.exit_detail or (f"exit code {report.exit_code}" if report.exit_code is not None else "")
        builder.end_attempt(attempt_id, reason, detail if reason.takes_detail else "")


# What the end of a command usually means, and what its owner can do about it.


@dataclass(frozen=True, slots=True)
class ExitExplanation:
    """The usual meaning of an end, empty where the code alone means nothing, and the next step."""

    meaning: str
    step: str


_READ: Final = "read its output with spotctl logs {name}, mend the cause, then spotctl retry {name}"
_BY_OUTPUT: Final = (
    (
        re.compile(r"cuda out of memory|outofmemoryerror|cuda error: out of memory|hip out of memory", re.IGNORECASE),
        ExitExplanation(
            "the memory of the GPU was full (CUDA out of memory)",
            "take a smaller batch, or a GPU with more memory: spotctl size states what a model needs",
        ),
    ),
    (
        re.compile(r"no space left on device", re.IGNORECASE),
        ExitExplanation("the disk was full", "ask for more: disk under [resources]"),
    ),
    (
        re.compile(r"modulenotfounderror|no module named", re.IGNORECASE),
        ExitExplanation("a Python package is missing", "install it in `setup`, or take an image that has it"),
    ),
)
_BY_CODE: Final = {
    126: ExitExplanation("the command cannot be executed", "make it executable, or name its interpreter in `run`"),
    127: ExitExplanation("the command was not found", "check the name in `run`, and that `setup` or the image has it"),
    134: ExitExplanation("the command aborted itself (SIGABRT)", _READ),
    137: ExitExplanation(
        "the command was killed (SIGKILL), usually because the machine's memory was full",
        "ask for more: memory under [resources], or load less at once",
    ),
    139: ExitExplanation("the command crashed (SIGSEGV, invalid memory access)", _READ),
}
_SIGNALS: Final = 128


def explain_exit(
    exit_code: int | None, output: Sequence[str], name: str, *, is_retried: bool = False
) -> ExitExplanation:
    """Return what the end of a failed command means. What the command wrote last says more than its code.

    Args:
        is_retried: the job has a retry left, which it takes by itself.
    """
    text = "\n".join(output)
    code = None if exit_code is None else exit_code if exit_code >= 0 else _SIGNALS - exit_code
    found = next((known for pattern, known in _BY_OUTPUT if pattern.search(text)), None)
    if found is None and code is not None:
        found = _BY_CODE.get(code) or ExitExplanation(_signal_words(code), _READ)
    if found is None:
        found = ExitExplanation("", _READ)
    step = found.step.format(name=name)
    if is_retried:
        step = f"nothing if it may pass next time; else spotctl cancel {name}" + (
            "" if found.step == _READ else f" and {step}"
        )
    return ExitExplanation(found.meaning, step)


def _signal_words(code: int) -> str:
    try:
        return f"the command was ended by {signal.Signals(code - _SIGNALS).name}" if code > _SIGNALS else ""
    except ValueError:
        return ""


# Machines that their owner gives up without having seen their end: the account is dead, or nothing lists them.
#
# What was given up holds no slot and no budget any more. It is remembered all the same: whatever carries the key of an
# attempt that is over is ended as a stray as soon as any list shows it.


_GIVEN_UP = "its owner gave it up without seeing its end; if it is ever listed again, it is ended"


def find_machine(world: World, text: str) -> AttemptId | Intent | None:
    """Return what a user means by an instance's id, a key or `JOB-NUMBER`: a machine, with an attempt or without."""
    for identity, item in world.attempts.items():
        names = {item.key, item.carried_key, f"{identity.job}-{identity.number}", f"{identity.job}@{identity.number}"}
        if text in names or (item.ref is not None and text == item.ref.instance_id):
            return identity
    for intent in world.intents.values():
        if intent.kind is not IntentKind.TERMINATE or intent.attempt is not None or intent.ref is None:
            continue
        if text in {intent.key, intent.ref.instance_id, intent.id}:
            return intent
    return None


def refusal(
    world: World,
    found: AttemptId | Intent,
    listings: Mapping[ProviderName, Listing],
    errors: Mapping[ProviderName, str],
) -> str:
    """Why this machine must not be given up, since it can be seen and ended; empty if it may be."""
    item = found if isinstance(found, Intent) else world.attempts[found]
    launch = world.intents.get(launch_intent_id(item.key))
    if launch is not None and launch.state in {IntentState.OPEN, IntentState.SENT}:
        return "its launch is under way; ask again when it has an answer"
    listing = listings.get(item.provider)
    if item.provider not in world.policy.providers or listing is None or errors.get(item.provider):
        return ""
    key = item.carried_key if isinstance(item, Attempt) else item.key
    shown = [i for i in listing.instances if (i.key == key or i.ref == item.ref) and i.state is not _GONE]
    if shown:
        return f"{item.provider} lists it as {shown[0].state.value}, so it can be ended and need not be given up"
    if (
        isinstance(item, Attempt)
        and not item.ever_listed
        and listing.at < (item.launched_at or item.intended_at) + world.policy.list_lag(item.provider)
    ):
        return f"it was rented just now and the lists of {item.provider} may lack it yet; ask again in some minutes"
    if isinstance(item, Attempt) and item.state.counts and item.ever_listed and not listing.complete:
        return f"the newest list of {item.provider} is not complete; ask again in a minute"
    return ""


def forget(world: World, found: AttemptId | Intent, now: datetime, report: HostStatus | None = None) -> Plan:
    """Give the machine up; its job goes on elsewhere once no lease can keep it alive.

    Args:
        report: all that its host wrote until now: of an attempt that is over nothing more is read.
    """
    builder = PlanBuilder(world, now)
    if isinstance(found, Intent):
        builder.put_intent(replace(found, state=IntentState.DONE))
        builder.event("machine.forgotten", f"a machine without an attempt: {_GIVEN_UP}", key=found.key)
        return builder.plan()
    item = builder.attempt(found)
    cannot_compute_from = item.ended_at or now
    builder.event("machine.forgotten", _GIVEN_UP, attempt=found, provider=item.provider, key=item.key)
    if report is not None:
        absorb(builder, found, report)
        if builder.attempt(found).state.counts and report.exit_reason is not None:
            exited(builder, found, report)
    builder.end_attempt(found, EndReason.FORGOTTEN, f"{item.provider} does not show it")
    job = builder.job(found.job)
    not_before = cannot_compute_from + lease_and_save(job, builder.policy)
    if item.machine.may_compute and not job.state.is_final and not_before > now:
        builder.put_job(replace(job, not_before=not_before))
    builder.machine_gone(found, "nothing more is booked for it")
    return builder.plan()


_GONE = InstanceState.GONE
