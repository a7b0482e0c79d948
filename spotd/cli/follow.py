"""Following a stream of the daemon across its restarts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from spotd.client.errors import DaemonUnreachable
from spotd.client.transport import Json

PATIENCE_S: Final = 60.0
"""How long a daemon that went away may take to come back."""
AGAIN_S: Final = 0.5
_CONNECTED_S: Final = 5.0
"""A try that lasted so long was connected, whether or not a record came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """How time passes between two tries."""

    sleep: Callable[[float], None] = time.sleep
    monotonic: Callable[[], float] = time.monotonic


def followed(
    stream: Callable[[dict[str, Any]], Iterator[Json]],
    query: dict[str, Any],
    *,
    cursor: str,
    drop: tuple[str, ...],
    is_last: Callable[[Json], bool],
    waiting: Waiting | None = None,
) -> Iterator[Json]:
    """Yield the records up to the last, none twice, though the daemon restarts meanwhile.

    Args:
        cursor: the record's key that is given back as `after`.
        drop: parameters that state where to begin, and no longer hold once a record came.

    Raises:
        DaemonUnreachable: it was not there at first, or did not come back.
    """
    waiting = waiting or Waiting()
    query = {**query, "follow": 1}
    lost_at: float | None = None
    was_there = False
    while True:
        began = waiting.monotonic()
        try:
            for record in stream(query):
                was_there, lost_at = True, None
                query = {**query, **dict.fromkeys(drop), "after": record[cursor]}
                yield record
                if is_last(record):
                    return
            was_there, lost_at = True, None
        except DaemonUnreachable as exc:
            now = waiting.monotonic()
            was_there = was_there or now - began > _CONNECTED_S
            if not was_there:
                raise
            if lost_at is None or now - began > _CONNECTED_S:
                lost_at = now
            elif now - lost_at > PATIENCE_S:
                raise DaemonUnreachable(
                    f"the daemon has been away for {PATIENCE_S:.0f} s; jobs on their machines go on", hint=exc.hint
                ) from exc
        waiting.sleep(AGAIN_S)
