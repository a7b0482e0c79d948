"""The metric of a checkpoint, read from a file inside it.

`metrics.json` is an object with the metric as one of its numbers. Where there is no such file, `trainer_state.json` is
read, which the Hugging Face Trainer writes: the newest row of its `log_history` that has the metric. Hosts are
untrusted: both files are bounded and verified like any chunk, and what is no finite number is no value.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from typing import Final

from spotd_jobs.objects.api import ObjectStore, StoreError, StoreUnavailable
from spotd_jobs.wire.manifest import AcceptedManifest
from spotd_jobs.wire.manifest_document import Entry, EntryType

FILE_BYTES_MAX: Final = 4 * 1024 * 1024


def metric_of(objects: ObjectStore, accepted: AcceptedManifest, metric: str) -> float | None:
    """Return the checkpoint's value of this metric.

    Raises:
        StoreUnavailable: the store does not answer, so nothing can be said.
    """
    for name, read in (("metrics.json", _in_metrics), ("trainer_state.json", _in_trainer_state)):
        path = f"{accepted.entry}/{name}"
        entry = next((e for e in accepted.files if e.path == path and e.type is EntryType.FILE), None)
        document = None if entry is None else _document(objects, entry)
        value = None if document is None else _number(read(document, metric))
        if value is not None:
            return value
    return None


def _document(objects: ObjectStore, entry: Entry) -> object:
    if entry.size > FILE_BYTES_MAX:
        return None
    pieces = []
    for chunk in entry.chunks:
        try:
            data = objects.get(chunk.key, bytes_max=chunk.size)
        except StoreUnavailable:
            raise
        except StoreError:
            return None
        if hashlib.sha256(data).hexdigest() != chunk.sha256:
            return None
        pieces.append(chunk.part_of(data))
    try:
        document: object = json.loads(b"".join(pieces))
    except (ValueError, RecursionError):
        return None
    return document


def _in_metrics(document: object, metric: str) -> object:
    return document.get(metric) if isinstance(document, dict) else None


def _in_trainer_state(document: object, metric: str) -> object:
    history = document.get("log_history") if isinstance(document, dict) else None
    rows: Iterable[object] = reversed(history) if isinstance(history, list) else ()
    return next((row[metric] for row in rows if isinstance(row, dict) and metric in row), None)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
