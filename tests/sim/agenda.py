"""Virtual time: what is due, in order. Nothing else in the simulator knows how to wait."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from datetime import datetime, timedelta

Action = Callable[[], None]


class Agenda:
    """A heap of actions. Those due at one instant run in the order in which they were entered."""

    def __init__(self, start: datetime) -> None:
        self.now = start
        self._due: list[tuple[datetime, int, Action]] = []
        self._entered = 0

    def at(self, when: datetime, action: Action) -> None:
        self._entered += 1
        heapq.heappush(self._due, (max(when, self.now), self._entered, action))

    def after(self, span: timedelta, action: Action) -> None:
        self.at(self.now + span, action)

    def run(self, until: datetime, finished: Callable[[], bool]) -> None:
        """Everything up to `until` has happened, or the world was finished before."""
        while self._due and self._due[0][0] <= until and not finished():
            self.now, _, action = heapq.heappop(self._due)
            action()
