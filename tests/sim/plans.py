"""What the jobs of a world ask for beside a machine under their ceiling: windows, other jobs, arrays, a watchdog."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Final

from spotd.core.domain.intents import JobId
from spotd.core.domain.jobs import ArrayTask, Chain, Job
from spotd_jobs.spec.model import Resources, StallAction, WatchdogPolicy, Window
from tests.sim.daemon import Hang, Work
from tests.sim.hazards import PLANNED, Hazard
from tests.sim.machines import BOOT
from tests.sim.worlds import Shape

MINUTE: Final = timedelta(minutes=1)
HOUR: Final = timedelta(hours=1)
DAY_MIN: Final = 24 * 60
LONG: Final = timedelta(hours=7)
"""A job that takes longer has windows on each day, of half of a day or more."""
HARMLESS: Final = frozenset({Hazard.GPUS, Hazard.ON_DEMAND, Hazard.TRAFFIC, Hazard.NOTICES, Hazard.MONTH_END})
"""With these everything can be reached."""
CHANGES: Final = (
    ("Europe/Kyiv", datetime(2026, 3, 29, 1, tzinfo=UTC)),
    ("Europe/Kyiv", datetime(2026, 10, 25, 1, tzinfo=UTC)),
    ("America/New_York", datetime(2026, 3, 8, 7, tzinfo=UTC)),
    ("America/New_York", datetime(2026, 11, 1, 6, tzinfo=UTC)),
    ("Australia/Lord_Howe", datetime(2026, 4, 4, 15, tzinfo=UTC)),
    ("Australia/Lord_Howe", datetime(2026, 10, 3, 15, 30, tzinfo=UTC)),
    ("Asia/Kolkata", datetime(2028, 2, 29, tzinfo=UTC)),
)
"""Zones, and when their clocks are changed; one whose are not, with a leap day."""


def with_plans(shape: Shape, planned: frozenset[Hazard], seed: int) -> Shape:
    """The same world with these hazards, and what they need of it."""
    luck = Random(f"plans of {seed}")
    limits = dict(shape.limits)
    hosts = shape.hosts
    if Hazard.BIDS in planned:
        limits["raise_bids"] = luck.random() < 0.8
        limits["hold_max"] = MINUTE * luck.choice([0, 5, 10, 15])
    if Hazard.MOVES in planned:
        limits["moves_max"] = luck.choice([1, 2, 5])
    if Hazard.PREEMPT in planned and not limits.keys() & {"machines_max", "budget_day", "budget_month"}:
        limits["machines_max"] = luck.randint(1, 2)
    if Hazard.CPUS in planned:
        hosts += 3
    if luck.random() < 0.35:
        # What is ordered happens soon only where everything can be reached, which few worlds are left with.
        shape = replace(
            shape,
            hazards=shape.hazards & HARMLESS,
            reachable=True,
            crash_rate=0.0,
            kills_per_hour=0.0,
            outages_per_hour=0.0,
        )
    return replace(
        shape,
        hazards=shape.hazards | planned,
        limits=limits,
        hosts=hosts,
        floors=shape.floors or Hazard.BIDS in planned,
    )


class Plans:
    """Gives each job of a world its plan, from a source of chance of its own."""

    def __init__(self, seed: int, shape: Shape) -> None:
        self._luck = Random(f"jobs' plans of {seed}")
        self.hazards = shape.hazards & PLANNED
        self.begins_at: datetime | None = None
        self._zone = "UTC"
        if Hazard.WINDOWS in self.hazards:
            self._zone, changed_at = self._luck.choice(CHANGES)
            if Hazard.MONTH_END not in shape.hazards:
                begun = changed_at - min(shape.storm, timedelta(days=2)) * self._luck.random()
                self.begins_at = begun.replace(second=0, microsecond=0)
        self._in_array = self._luck.randint(2, max(2, shape.jobs)) if Hazard.ARRAYS in self.hazards else 0
        self._at_once = self._luck.choice([None, 1, 2])
        self._first: Job | None = None

    def planned(self, number: int, made: Job, work: Work, before: Mapping[JobId, Job]) -> tuple[Job, Work]:
        """The job with its plan, and what it really does; `before` were submitted, and the state knows them."""
        luck = self._luck
        if Hazard.CPUS in self.hazards and luck.random() < 0.3:
            made = replace(made, spec=replace(made.spec, resources=Resources(gpu_count=0)))
        if Hazard.PREEMPT in self.hazards and luck.random() < 0.5 and made.spec.resources.nodes == 1:
            schedule = replace(made.spec.schedule, preempt=True)
            made = replace(made, spec=replace(made.spec, schedule=schedule, priority=luck.choice([1, 5, 9])))
        if Hazard.WINDOWS in self.hazards and luck.random() < 0.7:
            windows = self._windows(work.need)
            schedule = replace(made.spec.schedule, windows=windows, timezone=self._zone)
            made = replace(made, spec=replace(made.spec, schedule=schedule))
        if Hazard.WATCHDOG in self.hazards:
            made, work = self._watched(made, work)
        if Hazard.CHAINS in self.hazards:
            made = self._after(made, before)
            work = replace(work, outputs=luck.choice([0, 1000, 10**9]))
        if number < self._in_array:
            first = self._first = self._first or made
            task = ArrayTask(id=JobId("jarr"), name="array", index=number, count=self._in_array, at_once=self._at_once)
            spec = replace(first.spec, name=made.name)
            made = replace(made, spec=spec, array=task, chain=first.chain)
        if work.hangs is not None and made.spec.watchdog.min_gpu_util is None:
            work = replace(work, hangs=replace(work.hangs, prints_on=False))
        return made, work

    def _windows(self, need: timedelta) -> tuple[Window, ...]:
        luck = self._luck
        is_long = need > LONG
        days = (*range(7),) if is_long or luck.random() < 0.5 else (*sorted(luck.sample(range(7), 5)),)
        start = luck.randrange(0, DAY_MIN, 30)
        length = luck.randrange(12 * 60 if is_long else 4 * 60, 20 * 60, 30)
        found = [Window(days=days, start_min=start, end_min=(start + length) % DAY_MIN)]
        if luck.random() < 0.3:  # touches the first, or lies in it
            other = (start + luck.choice([length, length // 2])) % DAY_MIN
            found.append(Window(days=days, start_min=other, end_min=(other + 90) % DAY_MIN))
        return tuple(found)

    def _watched(self, made: Job, work: Work) -> tuple[Job, Work]:
        luck = self._luck
        use = luck.choice([None, None, 20]) if made.spec.resources.gpu else None
        rules = WatchdogPolicy(
            min_gpu_util=use,
            window=MINUTE * luck.choice([20, 40]),
            no_progress=MINUTE * luck.choice([15, 30, 60]) if use is None or luck.random() < 0.5 else None,
            action=luck.choice([StallAction.MOVE, StallAction.MOVE, StallAction.STOP]),
        )
        hang = None
        if work.never is None and not work.no_secrets and luck.random() < 0.4:
            # A job that goes on printing while its GPU is idle is noticed by the use of its GPU alone.
            hang = Hang(machines=luck.choice([1, 2, 99]), prints_on=use is not None and luck.random() < 0.5)
        made = replace(made, spec=replace(made.spec, watchdog=rules))
        return made, replace(work, hangs=hang, saves_always=use is None and luck.random() < 0.3)

    def _after(self, made: Job, before: Mapping[JobId, Job]) -> Job:
        luck = self._luck
        if not before or luck.random() < 0.4:
            return made
        known = sorted(before)
        after = tuple(sorted(luck.sample(known, min(len(known), luck.choice([1, 1, 2])))))
        return replace(made, chain=Chain(after=after))


def longest_wait(job: Job, work: Work) -> timedelta:
    """For how long its plan may keep a job from being done beside what it needs, where everything goes well."""
    span = timedelta(0)
    if job.spec.schedule.windows:
        span += 3 * work.need + timedelta(days=4)
    if work.hangs is not None:
        rules = job.spec.watchdog
        limit = max([rules.window, *([rules.no_progress] if rules.no_progress else [])])
        span += 3 * (3 * limit + BOOT + HOUR)
    return span
