"""Stores over HTTP that keep chunks waiting, so that a test can do something in the middle of a transfer."""

from __future__ import annotations

import threading

from tests.integration.runner.rig import PATIENCE_S, Rig
from tests.integration.runner.servers import Answer, Request
from tests.integration.runner.test_over_http import Bucket


class HeldBucket(Bucket):
    """Nothing of a checkpoint is stored until `go_on`."""

    def __init__(self, rig: Rig, patience_s: float = PATIENCE_S) -> None:
        super().__init__(rig, failures=0.0, seed=0)
        self._open = threading.Event()
        self._patience_s = patience_s
        self.held = 0

    def answer(self, request: Request) -> Answer:
        if request.method == "POST" and b"/data/" in request.body[:4096] and not self._open.is_set():
            self.held += 1
            self._open.wait(self._patience_s)
        return super().answer(request)

    def go_on(self) -> None:
        self._open.set()


class HeldReads(Bucket):
    """The first chunks of a checkpoint are answered, the others not until `go_on`."""

    def __init__(self, rig: Rig, answered: int) -> None:
        super().__init__(rig, failures=0.0, seed=0)
        self._open = threading.Event()
        self._lock = threading.Lock()
        self._answered = answered
        self.held = 0

    def answer(self, request: Request) -> Answer:
        if request.method == "GET" and "/data/" in request.path:
            with self._lock:
                self._answered -= 1
                is_held = self._answered < 0 and not self._open.is_set()
                self.held += is_held
            if is_held:
                self._open.wait(PATIENCE_S)
        return super().answer(request)

    def go_on(self) -> None:
        self._open.set()
