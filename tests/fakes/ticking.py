"""A fake that advances without requests: boots finish and machines are lost on time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Advancing(Protocol):
    """A fake cloud that makes up for what should have happened by now."""

    def advance(self) -> None: ...


@contextmanager
def ticking(cloud: Advancing, *, every_s: float = 0.05) -> Iterator[None]:
    """Advance the cloud this often, in real seconds, until the block ends.

    For clouds on a scaled or real clock whose machines must start without a customer polling for them.
    """
    over = threading.Event()

    def tick() -> None:
        while not over.wait(every_s):
            cloud.advance()

    thread = threading.Thread(target=tick, name="fake cloud ticking", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
