"""A job as its owner described it. Pure values; `spec.parse` makes them from TOML and flags."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final


class MarketChoice(StrEnum):
    """Which markets a job accepts."""

    SPOT = "spot"
    ON_DEMAND = "on-demand"
    AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuAlternative:
    """One acceptable kind of machine: `name` as the user spelled it, and how many of them in one machine."""

    name: str
    count: int


SIZES_TRIED: Final = 8
"""Of a range that is wider, the next number that is tried is half of the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Hard requirements on a machine. Sizes in decimal megabytes and gigabytes."""

    gpu: tuple[GpuAlternative, ...] = ()
    min_vram_mb: int | None = None
    gpu_count: int = 1
    """GPUs per machine where `min_vram` is given instead of names; 0 for a job without a GPU."""
    nodes: int = 1
    """Machines that reach each other and run the command together; of a range the fewest."""
    nodes_max: int | None = None
    """The most of a range; absent: so many as `nodes` says, and no others."""
    disk_gb: int = 10
    cpus: int | None = None
    memory_mb: int | None = None
    min_cuda: str | None = None
    min_reliability: float | None = None
    regions: tuple[str, ...] = ()
    providers: tuple[str, ...] = ()
    market: MarketChoice | None = None
    """Absent: spot, and on-demand at providers without a spot market."""
    on_demand_after: timedelta | None = None
    """With `auto`: spot alone until the job has waited so long for it."""
    rent_after: timedelta | None = None
    """Own machines alone until the job has waited so long for one; absent: as `[own]` of the config says."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many machines the job takes, the most first; of a wide range not each number is tried."""
        found = [self.nodes_max or self.nodes]
        is_wide = found[0] - self.nodes > SIZES_TRIED
        while found[-1] > self.nodes:
            found.append(max(self.nodes, found[-1] // 2 if is_wide else found[-1] - 1))
        return tuple(found)

    def of(self, nodes: int) -> Resources:
        """Return the same for exactly so many machines."""
        return replace(self, nodes=nodes, nodes_max=None)

    @property
    def nodes_words(self) -> str:
        """`2..4` of a range, else the number."""
        return f"{self.nodes}..{self.nodes_max}" if self.nodes_max else str(self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceLimit:
    """The highest effective price, micro-dollars per hour: exactly one of the two is set."""

    per_gpu_hour: int | None = None
    machine_hour: int | None = None


class MetricBest(StrEnum):
    """Which value of a metric is the best one."""

    LOWEST = "lowest"
    HIGHEST = "highest"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPolicy:
    """Where checkpoints appear, which are kept, and how the job is asked to stop.

    Attributes:
        keep: so many of the newest.
        metric: a number that the checkpoints hold; the one where it is `best` is kept beside the newest.
        saved_by: of a job of several machines: the first one's folder has all of each checkpoint, or each one's a part.
    """

    path: str | None = None
    every: timedelta | None = None
    keep: int = 3
    metric: str | None = None
    best: MetricBest = MetricBest.LOWEST
    settle: timedelta = timedelta(seconds=10)
    stop_signal: str = "SIGTERM"
    stop_grace: timedelta = timedelta(seconds=90)
    saved_by: SavedBy | None = None


class SavedBy(StrEnum):
    """Which of several machines save a checkpoint."""

    FIRST = "first"
    ALL = "all"


class StallAction(StrEnum):
    """What happens to a job that makes no progress, once it has saved."""

    MOVE = "move"
    STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchdogPolicy:
    """When a job counts as stalled. Nothing is watched while neither limit is given.

    Attributes:
        min_gpu_util: percent; the busiest GPU below it for the whole `window` means a stall.
        no_progress: without a new line of output, step or checkpoint for so long, it is one, too.
    """

    min_gpu_util: int | None = None
    window: timedelta = timedelta(minutes=20)
    no_progress: timedelta | None = None
    action: StallAction = StallAction.MOVE

    @property
    def is_on(self) -> bool:
        return self.min_gpu_util is not None or self.no_progress is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A span of each week, by the clocks of the job's time zone.

    Attributes:
        days: on which it begins; 0 is Monday.
        start_min, end_min: minutes after midnight; an end that is not after the start is one of the next day.
    """

    days: tuple[int, ...]
    start_min: int
    end_min: int


class PolicyName(StrEnum):
    """When a job waits, uses spot or pays for on-demand; the rules are in `spotd.core.policies`."""

    CEILING = "ceiling"
    GREEDY = "greedy"
    UNIFORM_PROGRESS = "uniform-progress"
    UNIFORM_PROGRESS_EAGER = "uniform-progress-eager"
    SLACK_RESERVE = "slack-reserve"
    SLACK_RESERVE_TENTH = "slack-reserve-tenth"
    SLACK_PACING = "slack-pacing"
    ON_DEMAND = "on-demand"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """By when a job is to be done: exactly one of the two is set."""

    span: timedelta | None = None
    """From its submission on, or from its newest retry."""
    at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When a job may run, and which others come first.

    Attributes:
        windows: it runs in these only; at any time where there are none.
        timezone: whose clocks the windows mean.
        deadline: it ends then, done or not.
        max_duration: its command runs for so long at most, on all machines together.
        policy: absent: `slack-pacing` with a deadline, else `ceiling`.
        after: names or ids of jobs that must have succeeded before.
        preempt: machines of jobs of lower priority are stopped for it, saved, where it could start at once on one.
    """

    windows: tuple[Window, ...] = ()
    timezone: str | None = None
    deadline: Deadline | None = None
    max_duration: timedelta | None = None
    policy: PolicyName | None = None
    after: tuple[str, ...] = ()
    preempt: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """How much there is to do, where the job's owner knows it.

    Attributes:
        time: for how long the command works in all on a machine of speed 1.0.
        steps: how many steps it makes in all; its checkpoints show how many of them are done.
    """

    time: timedelta | None = None
    steps: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpeed:
    """How much of the job one GPU of this name does per hour, relative to one of speed 1.0, in millionths."""

    name: str
    ppm: int


class DataMode(StrEnum):
    """How a dataset comes to a machine."""

    COPY = "copy"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """A dataset that the job reads.

    Attributes:
        source: the name of a dataset, a folder of the submitting machine, whose path is absolute, an https URL, or a
            place whose files the daemon lists: `s3://bucket/prefix`, `hf://owner/name@revision`.
        path: where it lies, relative to the folder in which the job runs; of an https URL, the file.
        sha256: of its content, or of the list of its files; every attempt reads just that. The daemon fills it in at
            the submission, but for an https URL, where the owner states it.
        bytes, files: its size, filled in by the daemon.
        revision: of a hub, the commit that the revision meant at the submission, filled in by the daemon.
        egress: what the owner of a bucket asks for each GB that is read there, in micro-dollars, filled in by the
            daemon from its config.
        near: the AWS region of a bucket of AWS, "?" where it is not known; empty for every other.
        by_token: whether a hub serves it only to the owner of the daemon's token, filled in by the daemon.
    """

    source: str
    path: str
    sha256: str | None = None
    mode: DataMode = DataMode.COPY
    bytes: int = 0
    files: int = 0
    revision: str | None = None
    egress: int = 0
    near: str = ""
    by_token: bool = False

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder of the submitting machine, and no name of what the store holds."""
        return "://" not in self.source and (self.source.startswith(("/", ".", "~")) or self.source.endswith("/"))

    @property
    def is_url(self) -> bool:
        """Whether it is one file, which machines read from any server."""
        return self.source.startswith("https://")

    @property
    def is_listed(self) -> bool:
        """Whether machines read its files from a bucket or a hub, by a list that the store has."""
        return self.source.startswith(("s3://", "hf://"))

    @property
    def is_elsewhere(self) -> bool:
        """Whether machines read its content from elsewhere, and not from the store."""
        return self.is_url or self.is_listed


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """Everything about a job that does not change while it runs.

    Attributes:
        run: argv; a shell string is `("/bin/sh", "-c", text)`.
        setup: shell text run before `run` on every attempt.
        workdir: absolute path on the submitting machine, or `None` when the job needs no code.
        secrets: names only; the values never enter a spec.
        job_budget: micro-dollars for all attempts together.
        retry_errors: how many failures of the user's own code are tried again.
        retry_starts: how many launches in a row may come to nothing before the job is given up; four times as many of
            machines that never gave a sign of life once the job has saved.
        reuse: it may take over the machine of a job that is done, and its own may be taken over.
        replace_within: of several machines, how long the others wait for another one in the place of one that is lost.
    """

    name: str
    run: tuple[str, ...]
    setup: str | None = None
    image: str
    workdir: str | None = None
    env: tuple[tuple[str, str], ...] = ()
    secrets: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    resources: Resources = field(default_factory=Resources)
    price: PriceLimit | None = None
    job_budget: int | None = None
    checkpoint: CheckpointPolicy = field(default_factory=CheckpointPolicy)
    schedule: Schedule = field(default_factory=Schedule)
    priority: int = 0
    retry_errors: int = 1
    retry_starts: int = 5
    work: Work = field(default_factory=Work)
    speed: tuple[GpuSpeed, ...] = ()
    watchdog: WatchdogPolicy = field(default_factory=WatchdogPolicy)
    data: tuple[DataSource, ...] = ()
    reuse: bool = True
    replace_within: timedelta = timedelta(0)


# Which of a job's `outputs` patterns match no file that was stored.
#
# A pattern matches as the runner matches it: part by part as a shell would, `**` over any number of folders, a hidden
# name only where the pattern writes the dot; a folder stands for all that is below it.


_EVERYWHERE: Final = "**"


def unmatched_patterns(patterns: Iterable[str], paths: Collection[str]) -> tuple[str, ...]:
    """Return the patterns that match none of these paths, in their order."""
    split = [path.split("/") for path in paths]
    return tuple(
        pattern
        for pattern in patterns
        if (parts := [part for part in pattern.split("/") if part not in ("", ".")])
        and not any(_matches(parts, path) for path in split)
    )


def _matches(pattern: Sequence[str], path: Sequence[str]) -> bool:
    *folders, file = path
    places = _with_empty(pattern, {0})
    for name in folders:
        places = _with_empty(pattern, _after(pattern, places, name))
        if len(pattern) in places:
            return True
    return len(pattern) in _after(pattern, places, file)


def _after(pattern: Sequence[str], places: set[int], name: str) -> set[int]:
    """Return the places in the pattern that are reached by one more part of the path."""
    reached: set[int] = set()
    for at in places:
        if at == len(pattern):
            continue
        part = pattern[at]
        if part == _EVERYWHERE:
            if not name.startswith("."):
                reached |= {at, at + 1} if at == len(pattern) - 1 else {at}
        elif (not name.startswith(".") or part.startswith(".")) and fnmatch.fnmatchcase(name, part):
            reached.add(at + 1)
    return reached


def _with_empty(pattern: Sequence[str], places: set[int]) -> set[int]:
    """Return the same with those that `**` reaches by standing for nothing."""
    found = set(places)
    for at in sorted(places):
        while at < len(pattern) and pattern[at] == _EVERYWHERE:
            at += 1
            found.add(at)
    return found
