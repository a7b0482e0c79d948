"""Retries for calls without side effects. `launch` must never come here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from random import Random
from typing import TypeVar

from spotd_providers.contract.errors import RateLimited, Unavailable
from spotd_providers.contract.provider import Clock

T = TypeVar("T")


async def retry_read(
    call: Callable[[], Awaitable[T]],
    *,
    clock: Clock,
    rng: Random,
    attempts: int = 3,
    first_wait: timedelta = timedelta(seconds=0.5),
    wait_max: timedelta = timedelta(seconds=15),
) -> T:
    """Await the call, again on `Unavailable` and `RateLimited`, with jittered exponential waits.

    A `RateLimited` that asks for longer than `wait_max` is raised at once: the poller's own pace deals with it.
    """
    ceiling = first_wait
    for _ in range(attempts - 1):
        try:
            return await call()
        except RateLimited as exc:
            if exc.retry_after > wait_max:
                raise
            wait = exc.retry_after
        except Unavailable:
            wait = min(wait_max, ceiling) * (0.5 + rng.random() / 2)
        ceiling *= 2
        await clock.sleep(wait)
    return await call()
