"""Who lives and who has news, told by one listing of all hosts' beats.

Theory. Every runner writes a tiny object of its own, its beat, into one common folder after each heartbeat; a listing
shows a thousand of them in one answer. That a beat was written again is a sign of life. Its *size* is the host's count
of what there is to read, and nothing else in a listing is as reliable: an etag may change with every write. A size
that differs from the one that was listed before the last complete look means news, and asks for such a look.

The beat is the host's own word, as its heartbeat is: it can hide what it wrote, as it could by not writing it, and it
can cost us the three requests of a complete look again and again, which is what every host would cost without beats.
Nothing is believed lost for want of a beat: a host without one, with one that stands still or with anything unfinished
is looked at completely, and the core ends no attempt on a glance.
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

BEATS_LISTED_MAX: Final = 100_000
STRAYS_KEPT: Final = timedelta(minutes=10)
"""A beat of nobody's that was not written for so long is deleted: a zombie with leave to write makes it anew."""
STRAYS_DELETED_MAX: Final = 1_000
STILL_SHARE: Final = 2 / 3
"""Of the time that makes a host lost: a beat that stands still for longer is not relied upon."""


def list_beats(objects: ObjectStore) -> dict[str, ObjectInfo]:
    """All beats by their keys, in as many requests as there are thousands.

    Raises:
        StoreError
    """
    return {info.key: info for info in islice(objects.list(LIVENESS_PREFIX), BEATS_LISTED_MAX)}


def delete_strays(
    objects: ObjectStore, beats: Mapping[str, ObjectInfo], known: Collection[str], *, real: datetime
) -> None:
    """Beats of attempts that ended long ago are gone, or will be another time."""
    strays = (
        key
        for key, info in beats.items()
        if key not in known and info.modified < real - STRAYS_KEPT and attempt_of_marker(key) is not None
    )
    some = list(islice(strays, STRAYS_DELETED_MAX))
    if some:
        with suppress(StoreError):
            objects.delete(some)


def note_beat(view: HostReader, found: ObjectInfo | None, *, at: datetime) -> None:
    """The newest listing showed this for the host."""
    before = view.beat
    if before is not None and found is not None and _mark(found) != _mark(before):
        view.marker_at = at
    if found is not None and found.size > MARKER_BYTES_MAX:
        view.flood = f"a beat of {found.size} bytes"
    view.beat = found


def is_quiet(view: HostReader, *, at: datetime, silence_max: timedelta) -> bool:
    """Whether nothing is known to have been written since the last complete look, by a host that surely lives."""
    beat = view.beat
    return (
        beat is not None
        and beat.size == view.news_read
        and view.heartbeat is not None
        and not view.unfinished
        and view.marker_at is not None
        and at - view.marker_at <= silence_max * STILL_SHARE
    )


def _mark(info: ObjectInfo) -> tuple[datetime, str, int]:
    return info.modified, info.etag, info.size
