"""The one door for blocking SDKs: bounded threads with a deadline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import anyio
import anyio.to_thread

T = TypeVar("T")


APART_ROWS: Final = 2_000
APART_BYTES: Final = 1024 * 1024


async def judge_apart(judge: Callable[[], T], *, rows: int = 0, size: int = 0) -> T:
    """Return what the judgement of an answer finds; that of a large answer is made in a thread, beside the event loop.

    A market of five thousand offers takes a second, in which the daemon would answer no other request.
    """
    if rows <= APART_ROWS and size <= APART_BYTES:
        return judge()
    return await anyio.to_thread.run_sync(judge)


class BlockingCalls:
    """At most `count` blocking calls of one adapter at a time."""

    def __init__(self, count: int = 4) -> None:
        self._limiter = anyio.CapacityLimiter(count)

    async def run(self, call: Callable[[], T], *, timeout_s: float) -> T:
        """Run a blocking call in a thread.

        The thread cannot be stopped: after a time-out its outcome is unknown, so give the SDK a shorter one.

        Raises:
            TimeoutError: nothing within `timeout_s`.
        """
        with anyio.fail_after(timeout_s):
            return await anyio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._limiter)
