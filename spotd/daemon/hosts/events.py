"""A host's heartbeat and events: what it does, what happened to it, and how it ended.

Theory. Events are numbered objects, read in their order and once each. How many there are is an untrusted host's
choice, so each read takes a share of them. The end of an attempt must not hide behind them: it has two places of its
own, the exit of the heartbeat and the event of the highest number, which is searched for directly where more events
wait than one read takes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from typing import Final

from spotd.core.domain.checkpoints import FallbackRestore
from spotd.daemon import object_keys
from spotd.daemon.hosts.host_reader import HostReader, HostReading
from spotd_jobs.objects.api import ObjectInfo, ObjectMissing, ObjectStore, ObjectTooLarge
from spotd_jobs.wire.fields import WireError
from spotd_jobs.wire.reports import (
    EVENT_BYTES_MAX,
    HEARTBEAT_BYTES_MAX,
    EventKind,
    HostEvent,
    parse_event,
    parse_heartbeat,
)

EVENTS_PER_READ_MAX: Final = 500
LAST_EVENTS: Final = 3
"""The exit is the last event of a runner; these many are read to find it."""
_NUMBER_MAX: Final = 10**16
SAVE_S_MAX: Final = 7 * 86_400.0
"""A host that states a longer upload states nothing."""
_NAME: Final = re.compile(r"[0-9]{1,32}\.json")

_SENTENCES: Final = {
    EventKind.CHECKPOINT_REFUSED: "the host refused checkpoint {name}: {reason}",
    EventKind.CHECKPOINT_SKIPPED: "the host skipped checkpoint {name}: {reason}",
    EventKind.UPLOAD_FAILING: "uploads from the host fail: {reason}",
    EventKind.DISK_LOW: "the host's disk is nearly full: {free_mb} MB are free",
    EventKind.OUTPUTS_LOST: "{files} outputs could not be stored by the host: {reason}",
    EventKind.REBALANCE: "the provider may take the machine soon: {reason}",
    EventKind.LEASE_EXPIRED: "the host did not hear from spotd for {lease_s} s",
}
"""Events worth a line in the job's own history; the others show in its state."""


def read_heartbeat(reading: HostReading) -> None:
    """Take in the newest heartbeat.

    Raises:
        StoreError
    """
    view, attempt, at = reading.view, reading.attempt, reading.at
    data = _get(reading, object_keys.heartbeat_key(attempt.id), HEARTBEAT_BYTES_MAX, "heartbeat")
    before, view.heartbeat_read_at = view.heartbeat_read_at, at
    if data is None:
        return
    try:
        heartbeat = parse_heartbeat(data, job_id=attempt.id.job, attempt=attempt.id.number)
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


def read_events(reading: HostReading, *, is_new: bool) -> None:
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
            _take_event(view, event, is_new=is_new, at=reading.at)


def _find_exit(reading: HostReading, prefix: str) -> None:
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


def _event(reading: HostReading, key: str) -> HostEvent | None:
    data = _get(reading, key, EVENT_BYTES_MAX, "event")
    if data is None:
        return None
    try:
        return parse_event(data, job_id=reading.attempt.id.job, attempt=reading.attempt.id.number)
    except WireError as exc:
        reading.view.complain("event", f"an event of the host is not usable: {exc}", reading.at)
        return None


def _take_event(view: HostReader, event: HostEvent, *, is_new: bool, at: datetime) -> None:
    ended = event.exit()
    if ended is not None:
        view.exit, view.exit_at = ended, event.at
    if event.kind is EventKind.RESTORED and isinstance(event.data.get("name"), str):
        view.resumed_from = str(event.data["name"])
    if event.kind is EventKind.CHECKPOINT:
        view.save_s = _seconds(event.data.get("seconds"))
    if event.kind is EventKind.CHECKPOINT_FALLBACK and is_new and view.ration.take("fallbacks", at):
        view.fallbacks.append(_fallback(event))
    words = _SENTENCES.get(event.kind)
    if words is not None and is_new:
        view.note(event.kind.value, words.format_map(_Blank(event.data)), at)


def _seconds(stated: object) -> float | None:
    """Return a span that a host states, if it is one."""
    if isinstance(stated, bool) or not isinstance(stated, int | float) or not 0 <= stated <= SAVE_S_MAX:
        return None
    return float(stated)


def _fallback(event: HostEvent) -> FallbackRestore:
    name, reason, after = (event.data.get(key) for key in ("name", "reason", "next"))
    return FallbackRestore(name=str(name or "?"), reason=str(reason or "?"), next=None if after is None else str(after))


class _Blank(dict[str, object]):
    """The words of an event; one that the host left out is a question mark in the sentence."""

    def __missing__(self, key: str) -> str:
        return "?"


def _is_name(key: str, prefix: str) -> bool:
    return _NAME.fullmatch(key.removeprefix(prefix)) is not None


def _get(reading: HostReading, key: str, bytes_max: int, what: str) -> bytes | None:
    try:
        return reading.objects.get(key, bytes_max=bytes_max)
    except ObjectMissing:
        return None
    except ObjectTooLarge as exc:
        reading.view.complain(what, f"the host's {what} is not usable: {exc}", reading.at)
        return None
