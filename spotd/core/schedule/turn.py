"""Why it is not a job's turn yet, whatever machines cost."""

from __future__ import annotations

from datetime import datetime

from spotd.core.jobs import Job
from spotd.core.plan_builder import PlanBuilder
from spotd.core.schedule.opening import window_wait
from spotd.core.verdicts import VerdictKind
from spotd.core.world import World

TurnWait = tuple[VerdictKind, str, datetime | None]
WAITS_FOR_ITS_TURN = frozenset({VerdictKind.WINDOW})
"""It wants no machine now, whether or not it had one."""


class Turns:
    """What jobs wait for apart from the market, in one decision."""

    def __init__(self, builder: PlanBuilder, world: World) -> None:
        self._builder = builder
        self._world = world

    def wait(self, job: Job) -> TurnWait | None:
        """Return why it is not this job's turn, and until when; `None` when it is."""
        shut = window_wait(job, self._world.policy, self._builder.now)
        if shut is None:
            return None
        if shut[1] is not None:
            self._builder.wake(shut[1])
        return VerdictKind.WINDOW, *shut
