"""The one door for blocking SDKs: bounded threads with a deadline."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

T = TypeVar("T")


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
