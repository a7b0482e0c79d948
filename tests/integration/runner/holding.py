"""A store over HTTP that keeps chunks waiting, so that a test can do something in the middle of a transfer."""

from __future__ import annotations

import threading

from tests.integration.runner.rig import PATIENCE_S, Rig
from tests.integration.runner.servers import Answer, Request
from tests.integration.runner.test_over_http import Bucket


class HeldBucket(Bucket):
    """So many chunks of checkpoints are stored, or read if the method is GET, and no other until `go_on`."""

    def __init__(self, rig: Rig, patience_s: float = PATIENCE_S, *, method: str = "POST", free: int = 0) -> None:
        super().__init__(rig, failures=0.0, seed=0)
        self._open = threading.Event()
        self._lock = threading.Lock()
        self._method, self._patience_s = method, patience_s
        self._free = free
        self.held = 0

    def answer(self, request: Request) -> Answer:
        if request.method == self._method and (b"/data/" in request.body[:4096] or "/data/" in request.path):
            with self._lock:
                self._free -= 1
                is_held = self._free < 0 and not self._open.is_set()
                self.held += is_held
            if is_held:
                self._open.wait(self._patience_s)
        return super().answer(request)

    def go_on(self) -> None:
        self._open.set()
