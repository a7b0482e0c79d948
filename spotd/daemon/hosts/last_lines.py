"""The last lines that an attempt wrote, read from the end of its log in the store."""

from __future__ import annotations

from typing import Final

from spotd.core.domain.ids import AttemptId
from spotd.daemon import object_keys
from spotd_jobs.objects.api import ObjectStore
from spotd_jobs.wire.reports import LOG_OBJECT_BYTES_MAX

LINES_MAX: Final = 10
LINE_CHARS_MAX: Final = 300
_OBJECTS_MAX: Final = 4
"""The newest of the log that are read."""


def last_lines(objects: ObjectStore, attempt: AttemptId) -> list[str]:
    """Return at most ten lines, cut where they are very long.

    Raises:
        StoreError: the log cannot be read now.
    """
    prefix = object_keys.log_prefix(attempt)
    names = sorted(info.key for info in objects.list_after(prefix, prefix))
    data = b""
    for name in reversed([name for name in names if name.removeprefix(prefix).isdecimal()][-_OBJECTS_MAX:]):
        data = objects.get(name, bytes_max=LOG_OBJECT_BYTES_MAX) + data
        if data.count(b"\n") > LINES_MAX:
            break
    text = data.decode(errors="replace").replace("\r", "\n")
    return [line[:LINE_CHARS_MAX].rstrip() for line in text.split("\n") if line.strip()][-LINES_MAX:]
