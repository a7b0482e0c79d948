"""The one way in which tests wait for processes: until something is true, and no longer than a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
_described: list[Callable[[], str]] = []


def until(probe: Callable[[], T | None], what: str, within: float = 60.0, every: float = 0.05) -> T:
    """Return the probe's first true answer. After a second it is asked more seldom: to ask costs a processor, too.

    A probe that meets a file which another process has just removed, as `rglob` does, has no answer yet.

    Raises:
        AssertionError: there was none within so many seconds. It names `what`, and shows what is `described`.
    """
    give_up_at, every_max = time.monotonic() + within, 3 * every
    while True:
        answer: T | FileNotFoundError | None
        try:
            answer = probe()
        except FileNotFoundError as exc:
            answer = exc
        if answer and not isinstance(answer, FileNotFoundError):
            return answer
        if time.monotonic() > give_up_at:
            states = "".join(f"\n{describe()}" for describe in _described)
            last = str(answer) if isinstance(answer, FileNotFoundError) else repr(answer)
            raise AssertionError(f"waited {within:g} s in vain for {what}; the last answer was {last}{states}")
        time.sleep(every)
        every = min(every * 1.1, every_max)


@contextmanager
def described(describe: Callable[[], str]) -> Iterator[None]:
    """Show this last state of something in the words of every wait that fails meanwhile."""
    _described.append(describe)
    try:
        yield
    finally:
        _described.remove(describe)
