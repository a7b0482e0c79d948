"""A fake that moves on though nobody asks it anything: boots finish and notices fall due on time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from spotd_providers.testkit.fakes.aws.cloud import Ec2Cloud


@contextmanager
def ticking(cloud: Ec2Cloud, *, every_s: float = 0.05) -> Iterator[None]:
    """The cloud is brought up to date this often, in real seconds, until the block ends."""
    over = threading.Event()

    def tick() -> None:
        while not over.wait(every_s):
            cloud.advance()

    thread = threading.Thread(target=tick, name="fake EC2 ticking", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
