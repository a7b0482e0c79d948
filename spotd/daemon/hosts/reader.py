"""What one host wrote, read as untrusted input and remembered between reads.

Theory. The order of reading is the reverse of the order of writing: the runner publishes chunks, then the manifest,
then the event that names it. Heartbeat, events and manifests are read in this order, so that a read that shows the exit
also shows every checkpoint published before it. A read that had to leave manifests for the next one does not show the
exit yet, and is no more than a liveness check.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import islice
from typing import Final

from spotd.core.canary import measuring_time
from spotd.core.domain.attempts import Attempt, HostSample, HostStatus
from spotd.core.domain.intents import AttemptId
from spotd.core.domain.jobs import FailedRestore, Job
from spotd.core.domain.states import EndReason, require_rows
from spotd.core.pricing import dollar_words, span_words
from spotd.daemon import object_keys
from spotd.daemon.hosts.host_reader import Dating, OutputsSeen, ReadMemory, ReadScope, outputs_of, with_lost
from spotd.daemon.hosts.limits import HostShare
from spotd.daemon.hosts.liveness import read_words
from spotd.daemon.hosts.manifests import read_manifests
from spotd_jobs.objects.api import ObjectInfo, ObjectMissing, ObjectStore, ObjectTooLarge
from spotd_jobs.wire import reports
from spotd_jobs.wire.grant import WireError
from spotd_providers.contract.values import cost

# A host's heartbeat and events: what it does, what happened to it, and how it ended.
#
# Theory. Events are numbered objects, read in their order and once each. How many there are is an untrusted host's
# choice, so each read takes a share of them. The end of an attempt must not hide behind them: it has two places of its
# own, the exit of the heartbeat and the event of the highest number, which is searched for directly where more events
# wait than one read takes.


EVENTS_PER_READ_MAX: Final = 500
LAST_EVENTS: Final = 3
"""The exit is the last event of a runner; these many are read to find it."""
_CANARY_GRACE: Final = timedelta(seconds=10)
"""A host waits so long at most for a measurement whose time is over, and for its own turn."""
_NUMBER_MAX: Final = 10**16
SAVE_S_MAX: Final = 7 * 86_400.0
"""A host that states a longer upload states nothing."""
_NAME: Final = re.compile(r"[0-9]{1,32}\.json")

_SENTENCES: Final = {
    reports.EventKind.CHECKPOINT_REFUSED: "the host refused checkpoint {name}: {reason}",
    reports.EventKind.CHECKPOINT_SKIPPED: "the host skipped checkpoint {name}: {reason}",
    reports.EventKind.UPLOAD_FAILING: "uploads from the host fail: {reason}",
    reports.EventKind.DISK_LOW: "the host's disk is nearly full: {free_mb} MB are free",
    reports.EventKind.OUTPUTS_LOST: "{files} outputs could not be stored by the host: {reason}",
    reports.EventKind.REBALANCE: "the provider may take the machine soon: {reason}",
    reports.EventKind.LEASE_EXPIRED: "the host did not hear from spotd for {lease_s} s",
    reports.EventKind.CANARY: "canary: {finding}; it took {took}, {cost}",
}
"""Events worth a line in the job's own history; the others show in its state."""


def read_heartbeat(reading: ReadScope) -> None:
    """Take in the newest heartbeat.

    Raises:
        StoreError
    """
    view, attempt, at = reading.view, reading.attempt, reading.at
    data = _get(reading, object_keys.heartbeat_key(attempt.id), reports.HEARTBEAT_BYTES_MAX, "heartbeat")
    before, view.heartbeat_read_at = view.heartbeat_read_at, at
    if data is None:
        return
    try:
        heartbeat = reports.parse_heartbeat(data, job_id=attempt.id.job, attempt=attempt.id.number)
    except WireError as exc:
        view.complain("heartbeat", f"the host's heartbeat is not usable: {exc}", at)
        return
    if view.heartbeat is None or heartbeat.seq > view.heartbeat.seq:
        view.heartbeat_at = at
        view.gpu_history.take(heartbeat.gpus, at)
        if heartbeat.phase != (attempt.phase if view.heartbeat is None else view.heartbeat.phase):
            view.phase_at = at
        # The first read of a process goes by what the process before has read.
        view.written_after = before or (attempt.read_at if heartbeat.seq > attempt.heartbeat_seq else None)
    view.heartbeat = heartbeat
    view.transfers.take(heartbeat)
    if heartbeat.exit is not None:
        view.exit, view.exit_at = heartbeat.exit, view.exit_at or heartbeat.at


def read_events(reading: ReadScope, *, is_new: bool) -> None:
    """Take in what happened since the last read, as far as the share goes.

    Args:
        is_new: whether it is new to the job's history; after a restart, events are read again that are in it already.

    Raises:
        StoreError
    """
    view, prefix = reading.view, object_keys.events_prefix(reading.attempt.id)
    listed = reading.objects.list_after(prefix, view.events_read or prefix)
    fresh = [info.key for info in islice(listed, EVENTS_PER_READ_MAX + 1)]
    if len(fresh) > EVENTS_PER_READ_MAX:
        view.left = True
        if view.exit is None:
            _find_exit(reading, prefix)
    for key in fresh[:EVENTS_PER_READ_MAX]:
        if not reading.share.has_time():
            view.left = True
            return
        event = _event(reading, key) if _is_name(key, prefix) else None
        view.events_read = key
        if event is not None:
            _take_event(reading, event, is_new=is_new)


def _find_exit(reading: ReadScope, prefix: str) -> None:
    """Take in the exit, if one of the events of the highest numbers states it."""
    last = _highest_number(reading.objects, prefix)
    before = f"{prefix}{max(0, last - LAST_EVENTS):016d}.json"
    for info in list(islice(reading.objects.list_after(prefix, before), 2 * LAST_EVENTS)):
        event = _event(reading, info.key) if _is_name(info.key, prefix) else None
        if event is not None and event.exit() is not None:
            reading.view.exit, reading.view.exit_at = event.exit(), event.at


def _highest_number(objects: ObjectStore, prefix: str) -> int:
    """Return the highest number of an event, found by halving, since no store lists from the end."""
    low, high = 0, _NUMBER_MAX
    while high - low > 1:
        middle = (low + high) // 2
        found: Iterator[ObjectInfo] = objects.list_after(prefix, f"{prefix}{middle:016d}", page=1)
        name = next((info.key.removeprefix(prefix).removesuffix(".json") for info in found), "")
        if name.isascii() and name.isdecimal() and len(name) == 16:
            low = max(middle, int(name))
        else:
            high = middle
    return low


def _event(reading: ReadScope, key: str) -> reports.HostEvent | None:
    data = _get(reading, key, reports.EVENT_BYTES_MAX, "event")
    if data is None:
        return None
    try:
        return reports.parse_event(data, job_id=reading.attempt.id.job, attempt=reading.attempt.id.number)
    except WireError as exc:
        reading.view.complain("event", f"an event of the host is not usable: {exc}", reading.at)
        return None


def _take_event(reading: ReadScope, event: reports.HostEvent, *, is_new: bool) -> None:
    view, at = reading.view, reading.at
    ended = event.exit()
    if ended is not None:
        view.exit, view.exit_at = ended, event.at
    if event.kind is reports.EventKind.RESTORED and isinstance(event.data.get("name"), str):
        view.resumed_from = str(event.data["name"])
    if event.kind is reports.EventKind.CHECKPOINT:
        view.save_s = _seconds(event.data.get("seconds"))
    if event.kind is reports.EventKind.CHECKPOINT_FALLBACK and is_new and view.ration.take("fallbacks", at):
        view.fallbacks.append(_fallback(event))
    words = _SENTENCES.get(event.kind)
    known = _cost_words(reading, event) if event.kind is reports.EventKind.CANARY else {}
    if words is not None and is_new and known is not None:
        view.note(event.kind.value, words.format_map(_Blank({**event.data, **known})), at)


def _cost_words(reading: ReadScope, event: reports.HostEvent) -> dict[str, str] | None:
    """Return what a canary took and cost by the time that its host states, within what is possible.

    `None` where the host was not to measure itself.
    """
    item = reading.attempt
    granted = timedelta(0) if reading.policy is None else measuring_time(item, reading.policy)
    if not granted:
        return None
    stated = _seconds(event.data.get("seconds"))
    if stated is None:
        return {"took": "?", "cost": "?"}
    span = reading.dated(event.at) - reading.dated(event.at - timedelta(seconds=stated))
    age = reading.at - (item.launched_at or item.intended_at)
    span = max(timedelta(0), min(span, granted + _CANARY_GRACE, age))
    return {"took": span_words(span), "cost": dollar_words(cost(item.quote.price.total, span))}


def _seconds(stated: object) -> float | None:
    """Return a span that a host states, if it is one."""
    if isinstance(stated, bool) or not isinstance(stated, int | float) or not 0 <= stated <= SAVE_S_MAX:
        return None
    return float(stated)


def _fallback(event: reports.HostEvent) -> FailedRestore:
    name, reason, after = (event.data.get(key) for key in ("name", "reason", "next"))
    return FailedRestore(name=str(name or "?"), reason=str(reason or "?"), next=None if after is None else str(after))


class _Blank(dict[str, object]):
    """The words of an event; one that the host left out is a question mark in the sentence."""

    def __missing__(self, key: str) -> str:
        return "?"


def _is_name(key: str, prefix: str) -> bool:
    return _NAME.fullmatch(key.removeprefix(prefix)) is not None


def _get(reading: ReadScope, key: str, bytes_max: int, what: str) -> bytes | None:
    try:
        return reading.objects.get(key, bytes_max=bytes_max)
    except ObjectMissing:
        return None
    except ObjectTooLarge as exc:
        reading.view.complain(what, f"the host's {what} is not usable: {exc}", reading.at)
        return None


NOTICE_SPAN_MAX: Final = timedelta(days=30)
SHARES_OF_ONE_READ: Final = 20
"""A read of one host alone goes on for so many shares."""

_REASONS: Final[Mapping[reports.Outcome, EndReason]] = {
    reports.Outcome.SUCCEEDED: EndReason.DONE,
    reports.Outcome.FAILED: EndReason.USER_ERROR,
    reports.Outcome.SETUP_FAILED: EndReason.USER_ERROR,
    reports.Outcome.CODE_UNUSABLE: EndReason.CODE_ERROR,
    reports.Outcome.INPUT_UNUSABLE: EndReason.INPUT_ERROR,
    reports.Outcome.INPUT_AWAY: EndReason.INPUT_AWAY,
    reports.Outcome.DISK_FULL: EndReason.DISK_FULL,
    reports.Outcome.PREEMPTED: EndReason.PREEMPTED,
    reports.Outcome.STOPPED: EndReason.PREEMPTED,
    reports.Outcome.LEASE_EXPIRED: EndReason.LEASE_EXPIRED,
    reports.Outcome.NOT_CURRENT: EndReason.HOST_LOST,
    reports.Outcome.RUNNER_ERROR: EndReason.HOST_LOST,
    reports.Outcome.MEMBER_LOST: EndReason.HOST_LOST,
    reports.Outcome.UNFIT: EndReason.CONTRACT_BROKEN,
}
"""Why an attempt ends whose runner reported its end, unless a stop order is the reason."""
require_rows(reports.Outcome, _REASONS)
ANSWERS_STOP: Final = frozenset({reports.Outcome.SUCCEEDED, reports.Outcome.FAILED, reports.Outcome.STOPPED})
"""An attempt that was ordered to stop has ended for the reason of the order; not where the host says more."""


def read_host(
    objects: ObjectStore, view: ReadMemory, attempt: Attempt, job: Job, *, at: datetime, dated: Dating
) -> HostStatus:
    """Return everything that the host wrote until now.

    Raises:
        StoreError: the store does not answer, or refuses to, so nothing can be said.
    """
    reading = ReadScope(objects=objects, view=view, attempt=attempt, job=job, share=HostShare(), at=at, dated=dated)
    read_news(reading)
    for _ in range(SHARES_OF_ONE_READ):
        read_published(replace(reading, share=HostShare()))
        if not view.behind:
            break
    return report_of(view, attempt, job, at=at, dated=dated)


def read_news(reading: ReadScope) -> None:
    """Read the short part: that it lives, what happened, how it ended.

    Raises:
        StoreError
    """
    view = reading.view
    view.news_before = -1 if view.marker is None else view.marker.size
    # A read that is broken off has left everything, and what was published before an end is read after it.
    view.unfinished, view.behind, view.left = True, True, False
    if view.relearns is None:
        view.relearns = reading.attempt.read_at is not None
    read_heartbeat(reading)
    read_words(reading)
    read_events(reading, is_new=not view.relearns)
    view.relearns = view.relearns and view.left


def read_published(reading: ReadScope) -> None:
    """Read the long part: what it published, and its outputs once it has ended well.

    Raises:
        StoreError
    """
    read_manifests(reading)
    view, ended = reading.view, reading.view.exit
    if ended is not None and not view.behind and view.outputs is None and ended.outcome is reports.Outcome.SUCCEEDED:
        found = outputs_of(reading.objects, reading.attempt, reading.job.spec.outputs)
        view.outputs = with_lost(found, ended.outputs_lost)
    view.notes += view.ration.folded(reading.at, is_end=ended is not None and not view.behind)
    view.unfinished = view.left or view.behind
    view.is_unread = False
    view.news_read = view.news_before


def report_of(
    view: ReadMemory, attempt: Attempt, job: Job, *, at: datetime, dated: Dating, liveness_check: bool = False
) -> HostStatus:
    """Return what is known of the host, without asking the store for anything."""
    known = {c.manifest_key for c in job.checkpoints} if view.accepted or view.older else frozenset()
    heartbeat, ended = view.heartbeat, None if view.behind or view.lacks_outputs else view.exit
    outputs = view.outputs or OutputsSeen()
    notice = heartbeat.notice if heartbeat is not None else None
    behind = timedelta(0) if heartbeat is None else clock_behind(dated(heartbeat.at), view.written_after)
    return HostStatus(
        attempt=attempt.id,
        read_at=at,
        liveness_check=liveness_check or view.behind,
        marker_at=max(
            (at_ for at_ in (view.marker_at, *(newest for _, newest in view.words_at.values())) if at_ is not None),
            default=None,
        ),
        first_at=view.first_at,
        words=tuple((*word, *seen) for word, seen in sorted(view.words_at.items())),
        flood=view.flood,
        upload_progress="" if heartbeat is None else _progress_of(heartbeat),
        seq=heartbeat.seq if heartbeat is not None else -1,
        phase=heartbeat.phase.value if heartbeat is not None else "",
        checkpoints=tuple(c for key, c in view.accepted.items() if key not in known),
        older=tuple(one for key, one in view.older.items() if key not in known),
        unannounced=frozenset(view.unannounced),
        resumed_from=view.resumed_from,
        exit_reason=None if ended is None else exit_reason(ended.outcome, _exit_code(ended)),
        exit_phase="" if view.exit is None else view.exit.phase.value,
        exit_answers_stop=ended is not None and ended.outcome in ANSWERS_STOP,
        exit_code=_exit_code(ended),
        exit_detail=_exit_detail(ended),
        waits=ended is not None and ended.waits,
        outputs_sha256=outputs.sha256,
        outputs_bytes=outputs.bytes,
        outputs_problem=outputs.problem,
        outputs_lost=outputs.lost,
        notice_at=None if notice is None else _near(dated(notice.at), at) if notice.at is not None else at,
        notes=tuple(view.notes),
        fallbacks=tuple(view.fallbacks),
        alive_at=None if heartbeat is None else later(dated(heartbeat.at), behind, at),
        exit_at=None if view.exit_at is None else later(dated(view.exit_at), behind, at),
        script_began_at=None if heartbeat is None else _script_began(heartbeat, at=at, dated=dated),
        began_there_s=None if heartbeat is None else int(heartbeat.at.timestamp() - heartbeat.up_s),
        stored_bytes=view.stored_bytes,
        uploads={key: size for key, size in view.uploads.items() if key in view.accepted or key in view.older},
        save_time=None if view.save_s is None or heartbeat is None else _dated_span(heartbeat, view.save_s, dated),
        restored_bytes=heartbeat.restore.bytes_done if heartbeat is not None and heartbeat.restore is not None else 0,
        data_bytes=heartbeat.data.bytes_done if heartbeat is not None and heartbeat.data is not None else 0,
        up=None if heartbeat is None else _dated_span(heartbeat, heartbeat.up_s, dated),
        sample=None if heartbeat is None else _sample_of(heartbeat, dated),
        gang=None
        if heartbeat is None or heartbeat.gang is None
        else (heartbeat.gang.round, tuple(sorted(set(heartbeat.gang.lost)))),
    )


def _dated_span(heartbeat: reports.Heartbeat, seconds: float, dated: Dating) -> timedelta:
    """Return the daemon's span of so many seconds on the host."""
    return max(timedelta(0), dated(heartbeat.at) - dated(heartbeat.at - timedelta(seconds=seconds)))


def _sample_of(heartbeat: reports.Heartbeat, dated: Dating) -> HostSample | None:
    """Return what the heartbeat states of progress, if its job is watched."""
    stated, seen = heartbeat.progress, heartbeat.seen
    if stated is None:
        return None

    def span(seconds: float | None) -> timedelta | None:
        return None if seconds is None else _dated_span(heartbeat, seconds, dated)

    return HostSample(
        boot=heartbeat.boot,
        up=_dated_span(heartbeat, heartbeat.up_s, dated),
        phase=heartbeat.phase.value,
        printed=stated.printed,
        writes=stated.writes,
        seen="" if seen is None else f"{seen.name}:{seen.step}:{seen.at.isoformat()}",
        gpu_time=span(stated.gpu_s),
        gpu_busy=span(stated.gpu_busy_s),
    )


def clock_behind(stated: datetime, written_after: datetime | None) -> timedelta:
    """Return by how much at least the clock of a host is behind that dates its newest heartbeat so."""
    return timedelta(0) if written_after is None else max(timedelta(0), written_after - stated)


def later(stated: datetime, behind: timedelta, at: datetime) -> datetime:
    """Return the instant that a host whose clock is behind states, no later than the read where it is moved."""
    if not behind:
        return stated
    return at if stated > at - behind else stated + behind


def _near(stated: datetime, at: datetime) -> datetime:
    """Return when the machine goes, as its host states it, no further from now than any provider announces it."""
    return min(max(stated, at - NOTICE_SPAN_MAX), at + NOTICE_SPAN_MAX)


def _script_began(heartbeat: reports.Heartbeat, *, at: datetime, dated: Dating) -> datetime:
    """Return when its start script began, as the host states it; a clock that runs ahead makes it no later than now."""
    written = dated(heartbeat.at)
    age = written - dated(heartbeat.at - timedelta(seconds=heartbeat.up_s))
    return min(written, at) - age


def _progress_of(heartbeat: reports.Heartbeat) -> str:
    up = heartbeat.upload
    return "" if up.name is None else f"{up.name}:{up.bytes_done}:{up.queued}"


def exit_reason(outcome: reports.Outcome, code: int | None) -> EndReason:
    """Return why the attempt ended: what a command came to is its exit code, whatever the host calls it."""
    if outcome in {reports.Outcome.SUCCEEDED, reports.Outcome.FAILED}:
        outcome = reports.Outcome.SUCCEEDED if code == 0 else reports.Outcome.FAILED
    return _REASONS[outcome]


def _exit_detail(ended: reports.Exit | None) -> str:
    if ended is None:
        return ""
    is_silent = not ended.reason and _exit_code(ended) is None
    return "setup failed" if is_silent and ended.outcome is reports.Outcome.SETUP_FAILED else ended.reason


def _exit_code(ended: reports.Exit | None) -> int | None:
    if ended is None:
        return None
    if ended.exit_code is None and ended.signal is not None:
        return 128 + ended.signal
    return ended.exit_code


def drop_committed(view: ReadMemory, report: HostStatus) -> None:
    """Drop the report's notes and checkpoints, which are durable: they are not reported again."""
    view.notes = view.notes[len(report.notes) :]
    view.fallbacks = view.fallbacks[len(report.fallbacks) :]
    for checkpoint in (*report.checkpoints, *(one for one, _ in report.older)):
        view.accepted.pop(checkpoint.manifest_key, None)
        view.older.pop(checkpoint.manifest_key, None)
        view.uploads.pop(checkpoint.manifest_key, None)
        view.unannounced.discard(checkpoint.manifest_key)


def with_job(report: HostStatus, job: Job) -> HostStatus:
    """Return the report without checkpoints that the job knows by now."""
    if not report.checkpoints and not report.older:
        return report
    known = {(c.attempt, c.name) for c in job.checkpoints}
    fresh = tuple(c for c in report.checkpoints if (c.attempt, c.name) not in known)
    older = tuple(pair for pair in report.older if (pair[0].attempt, pair[0].name) not in known)
    return replace(report, checkpoints=fresh, older=older)


# The last lines that an attempt wrote, read from the end of its log in the store.


LINES_MAX: Final = 10
LINE_CHARS_MAX: Final = 300
_OBJECTS_MAX: Final = 4
"""The newest of the log that are read."""
_END_MARK: Final = "[spotd] ended: "
"""What the runner writes last."""


def last_lines(objects: ObjectStore, attempt: AttemptId) -> list[str]:
    """Return at most ten lines of the job, cut where they are very long; how it ended is known better than its log.

    Raises:
        StoreError: the log cannot be read now.
    """
    prefix = object_keys.log_prefix(attempt)
    names = sorted(info.key for info in objects.list_after(prefix, prefix))
    data = b""
    for name in reversed([name for name in names if name.removeprefix(prefix).isdecimal()][-_OBJECTS_MAX:]):
        data = objects.get(name, bytes_max=reports.LOG_OBJECT_BYTES_MAX) + data
        if data.count(b"\n") > LINES_MAX:
            break
    text = data.decode(errors="replace").replace("\r", "\n")
    lines = [line[:LINE_CHARS_MAX].rstrip() for line in text.split("\n") if line.strip()]
    if lines and lines[-1].startswith(_END_MARK):
        del lines[-1]
    return lines[-LINES_MAX:]
