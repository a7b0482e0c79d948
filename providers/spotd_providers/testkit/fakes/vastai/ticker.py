"""A fake that moves on though nobody asks it anything: boots finish and bids are lost on time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from spotd_providers.testkit.fakes.vastai.cloud import VastCloud


@contextmanager
def ticking(cloud: VastCloud, *, every_s: float = 0.05) -> Iterator[None]:
    """The cloud is brought up to date this often, in real seconds, until the block ends.

    For clouds on a scaled or real clock whose machines must start without a customer polling for them.
    """
    over = threading.Event()

    def tick() -> None:
        while not over.wait(every_s):
            cloud.advance()

    thread = threading.Thread(target=tick, name="fake vast.ai ticking", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
