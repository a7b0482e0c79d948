"""What a *running* attempt has left behind for good.

Theory. The runner counts on a chunk that its own attempt sent only while it is young: one of the `WINDOW` newest
manifests of the attempt names it, or it was sent after the oldest of these was published. What is too old is forgotten
before the next manifest goes out, and is sent again under another key when its content comes back
(`spotd_jobs.runner.chunk_index`). So a chunk that no manifest on any list needs, none of the newest names, and that is
older than the oldest of these, can be named by no manifest that is still to come, and its key is never written again.
Ages are the store's own.

A manifest that is not on the list goes only if a read of the host would pass over it: its serial is below that of one
that was accepted. What it names is garbage with it; every other manifest that is there protects what it names.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from itertools import islice
from typing import Final

from spotd.core.domain.ids import AttemptId
from spotd.daemon import object_keys
from spotd_jobs.objects.api import ObjectInfo, ObjectStore, StoreError, StoreUnavailable
from spotd_jobs.wire.client.manifest_text import MANIFEST_BYTES_MAX, WINDOW
from spotd_jobs.wire.fields import WireError
from spotd_jobs.wire.manifest import checkpoint_prefix
from spotd_jobs.wire.manifest_document import Manifest, parse_manifest

SETTLED: Final = timedelta(minutes=2)
"""So far apart the clocks of a store's own machines may be."""
MANIFESTS_MAX: Final = 10_000
CHUNKS_MAX: Final = 200_000
PARSED_BYTES_MAX: Final = 64 * 1024 * 1024
"""Of manifests that are not on the list: how many and how large is the host's choice."""


def live_garbage(
    objects: ObjectStore,
    attempt: AttemptId,
    needed: Collection[str],
    accepted: Manifest,
    *,
    settled: timedelta = SETTLED,
) -> list[ObjectInfo]:
    """Return objects of a running attempt that cannot be needed any more, manifests first.

    Args:
        needed: manifests on any list, and every chunk that one of them or any outputs name.
        accepted: the newest manifest of this attempt that is on the list.

    Raises:
        StoreUnavailable: the store does not answer.
    """
    prefix = checkpoint_prefix(attempt.job, attempt.number)
    found = [info for info in islice(objects.list(prefix), MANIFESTS_MAX) if info.key.endswith(".json")]
    if not WINDOW < len(found) < MANIFESTS_MAX:
        return []
    found.sort(key=lambda info: info.modified, reverse=True)
    horizon = found[WINDOW - 1].modified - settled
    needed = set(needed)
    garbage: list[ObjectInfo] = []
    unread, left = False, PARSED_BYTES_MAX
    for place, info in enumerate(found):
        if info.key in needed:
            continue
        left -= info.size
        manifest = _parsed(objects, info.key) if left >= 0 else None
        is_news = manifest is not None and manifest.serial > accepted.serial
        if place >= WINDOW and info.modified < horizon and not is_news and left >= 0:
            garbage.append(info)
        elif manifest is not None:
            needed |= set(manifest.chunk_sizes())
        else:
            unread = True
    if unread:
        return garbage  # what cannot be read may need any chunk of its attempt
    written = islice(objects.list(object_keys.data_prefix(attempt)), CHUNKS_MAX)
    return [*garbage, *(info for info in written if info.key not in needed and info.modified < horizon)]


def _parsed(objects: ObjectStore, key: str) -> Manifest | None:
    try:
        return parse_manifest(objects.get(key, bytes_max=MANIFEST_BYTES_MAX))
    except StoreUnavailable:
        raise
    except (StoreError, WireError):
        return None
