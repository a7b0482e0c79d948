"""Work beside the main thread, which goes on waiting for reasons to stop meanwhile."""

from __future__ import annotations

import threading
from typing import Any, Callable

from spotd_jobs.runner.shutdown import Wakeups


class Background:
    """Work in a thread, whose result or error the main thread picks up."""

    def __init__(self, work: Callable[[], Any], wakeups: Wakeups, name: str) -> None:
        self._work = work
        self._wakeups = wakeups
        self.done = False
        self._result: Any = None
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:  # noqa: BLE001 - carried to the main thread, which raises it
            self._error = error
        self.done = True
        self._wakeups.wake()
