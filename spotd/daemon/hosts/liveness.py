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

from collections.abc import Collection, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from itertools import islice
from typing import Final

from spotd.daemon.hosts.host_reader import HostReader
from spotd_jobs.objects.api import ObjectInfo, ObjectStore, StoreError
from spotd_jobs.wire.fields import LIVENESS_PREFIX, MARKER_BYTES_MAX, attempt_of_marker

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


def note_marker(view: HostReader, found: ObjectInfo | None, *, at: datetime) -> None:
    """Note what the newest listing showed for the host."""
    before = view.marker
    if before is not None and found is not None and _mark(found) != _mark(before):
        view.marker_at = at
    if found is not None and found.size > MARKER_BYTES_MAX:
        view.flood = f"a liveness marker of {found.size} bytes"
    view.marker = found


def is_quiet(view: HostReader, *, at: datetime, silence_max: timedelta) -> bool:
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
