"""Liveness markers: which hosts live and which have news, by one listing of the markers of all hosts.

Theory. Every runner writes a tiny object of its own, its liveness marker, into one common folder after each heartbeat;
a listing shows a thousand of them in one answer. That a marker was written again is a sign of life. Its *size* is the
host's count of what there is to read, and nothing else in a listing is as reliable: an etag may change with every
write. A size that differs from the one that was listed before the last full read means news, and asks for a full read.

The marker is the host's own statement, as its heartbeat is: it can hide what it wrote, as it could by not writing it,
and it can cost the three requests of a full read again and again, which is what every host would cost without markers.
No machine is believed lost for want of a marker: a host without one, with one that stands still or with anything
unfinished is read in full, and the core ends no attempt on a liveness check.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from itertools import islice
from typing import Final

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.intents import AttemptId
from spotd.core.domain.members import Members
from spotd.core.domain.world import World
from spotd.daemon import object_keys
from spotd.daemon.hosts.host_reader import ReadMemory, ReadScope
from spotd_jobs.objects.api import ObjectInfo, ObjectStore, StoreError
from spotd_jobs.wire.grant import LIVENESS_PREFIX, MARKER_BYTES_MAX, attempt_of_marker

MARKERS_LISTED_MAX: Final = 100_000
STRAYS_KEPT: Final = timedelta(minutes=10)
"""An orphaned marker that was not written for so long is deleted: a zombie that may still write makes it again."""
STRAYS_DELETED_MAX: Final = 1_000
STILL_SHARE: Final = 2 / 3
"""Of the time that makes a host lost: a marker that stands still for longer proves nothing."""


def list_markers(objects: ObjectStore) -> dict[str, ObjectInfo]:
    """Return all markers by their keys, in as many requests as there are thousands.

    Raises:
        StoreError
    """
    return {info.key: info for info in islice(objects.list(LIVENESS_PREFIX), MARKERS_LISTED_MAX)}


def delete_strays(
    objects: ObjectStore, markers: Mapping[str, ObjectInfo], known: Collection[str], *, real: datetime
) -> None:
    """Delete markers of attempts that ended long ago, now or another time."""
    strays = (
        key
        for key, info in markers.items()
        if key not in known and info.modified < real - STRAYS_KEPT and attempt_of_marker(key) is not None
    )
    some = list(islice(strays, STRAYS_DELETED_MAX))
    if some:
        with suppress(StoreError):
            objects.delete(some)


def note_marker(view: ReadMemory, found: ObjectInfo | None, *, at: datetime) -> None:
    """Note what the newest listing showed for the host."""
    before = view.marker
    if before is not None and found is not None and _mark(found) != _mark(before):
        view.marker_at = at
    if found is not None and found.size > MARKER_BYTES_MAX:
        view.flood = f"a liveness marker of {found.size} bytes"
    view.marker = found


def is_quiet(view: ReadMemory, *, at: datetime, silence_max: timedelta) -> bool:
    """Whether nothing is known to have been written since the last full read, by a host that surely lives."""
    marker = view.marker
    return (
        marker is not None
        and marker.size == view.news_read
        and view.heartbeat is not None
        and not view.unfinished
        and view.marker_at is not None
        and at - view.marker_at <= silence_max * STILL_SHARE
    )


def _mark(info: ObjectInfo) -> tuple[datetime, str, int]:
    return info.modified, info.etag, info.size


# Of several machines: which of them say that they wait without the first one, which alone writes a marker.


WORDS_MAX: Final = 2048
"""So many words of machines that wait without the first one are listed: twice as many as an attempt has machines."""
WORDS_AFTER: Final = timedelta(seconds=20)
"""The first machine of several is silent for so long before the words of the others are listed."""
_WORD: Final = re.compile(r"(0|[1-9][0-9]{0,6})-(0|[1-9][0-9]{0,3})\.json")
"""One name for each: of two objects that named the same machine, each listing would show the other one as new."""


def read_words(reading: ReadScope) -> None:
    """Note which of several machines say that they wait without the first one, where that has fallen silent.

    One word may be old: that it is written again is a sign of life.

    Raises:
        StoreError
    """
    view, item, at = reading.view, reading.attempt, reading.at
    is_asked = item.members is not None or item.quote.offer.nodes > 1
    if not (is_asked and reading.job.spec.replace_within and view.first_at is not None):
        return
    if at - view.first_at < WORDS_AFTER:
        return
    prefix, known = object_keys.waits_prefix(item.id), item.members or Members(since=(0,) * item.quote.offer.nodes)
    others = {(known.round, rank) for rank, came in enumerate(known.since) if came is not None and rank != known.first}
    for info in islice(reading.objects.list(f"{prefix}{known.round}-"), WORDS_MAX):
        named = _WORD.fullmatch(info.key.removeprefix(prefix))
        word = None if named is None else (int(named[1]), int(named[2]))
        if word is None or word not in others:
            continue
        seen = (info.modified, info.etag, info.size)
        if view.words.get(word, seen) != seen:
            view.words_at[word] = (view.words_at.get(word, (at, at))[0], at)
        view.words[word] = seen


# Whether the checkpoint store takes writes at all, asked while a host is silent that may be unable to write.


PROBE_EVERY: Final = timedelta(seconds=30)
PROBE_KEY: Final = "doctor/writes"


class WriteProbe:
    """The newest answer of the store to a write of the daemon's own."""

    def __init__(self, objects: ObjectStore, marker_at: Callable[[AttemptId], datetime | None]) -> None:
        self._objects = objects
        self._marker_at = marker_at
        """When a listing last showed that a host had written its liveness marker again."""
        self._probed_at: datetime | None = None
        self._failed_at: datetime | None = None

    @property
    def has_failed(self) -> bool:
        """Whether the store takes no writes, or took none until a moment ago."""
        return self._failed_at is not None

    def update(self, world: World, *, at: datetime, real: datetime) -> None:
        """Write if a host is silent and it is time for that; forget a failure when none is silent."""
        if not any(item.state.counts and self._is_late(item, world, at) for item in world.attempts.values()):
            self._failed_at = None
            return
        if self._probed_at is not None and real - self._probed_at < PROBE_EVERY:
            return
        self._probed_at = real
        try:
            self._objects.put(PROBE_KEY, b"spotd")
        except StoreError:
            self._failed_at = at
        else:
            # Just after the store takes writes again, no host has had its turn to write a marker.
            if self._failed_at is not None and at - self._failed_at >= world.policy.silence_max:
                self._failed_at = None

    def _is_late(self, item: Attempt, world: World, at: datetime) -> bool:
        """Whether its host gave no sign of life for a while, or none in half of its provider's time for a start."""
        if item.heartbeat_seen_at is not None:
            newest = max(item.heartbeat_seen_at, self._marker_at(item.id) or item.heartbeat_seen_at)
            return newest < at - world.policy.silence_max * STILL_SHARE
        half = world.policy.provision_timeout(item.provider) / 2
        return item.launched_at is not None and item.launched_at < at - half
