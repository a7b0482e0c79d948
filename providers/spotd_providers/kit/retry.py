"""Retries for calls without side effects; the only module that imports tenacity. `launch` must never come here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from random import Random
from typing import TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt

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

    def wait_s(state: RetryCallState) -> float:
        failure = state.outcome.exception() if state.outcome else None
        if isinstance(failure, RateLimited):
            return failure.retry_after.total_seconds()
        ceiling = min(wait_max.total_seconds(), first_wait.total_seconds() * 2 ** (state.attempt_number - 1))
        return float(ceiling * (0.5 + rng.random() / 2))

    async def sleep(seconds: float) -> None:
        await clock.sleep(timedelta(seconds=seconds))

    def worth_waiting(failure: BaseException) -> bool:
        if isinstance(failure, RateLimited):
            return failure.retry_after <= wait_max
        return isinstance(failure, Unavailable)

    retrying = AsyncRetrying(
        sleep=sleep,
        wait=wait_s,
        stop=stop_after_attempt(attempts),
        retry=retry_if_exception(worth_waiting),
        reraise=True,
    )
    return await retrying(call)
