"""The state of a fake cluster and what its commands do with it, as Slurm 22.05 was watched to do it.

Names are not unique. A job whose queue is full waits; a preempted one has `PreemptTime` and an end for its grace, and
is over then, or is queued again under its number where it may be. A finished job is known for `MinJobAge`. Nothing here
knows the provider.
"""

from __future__ import annotations

import getpass
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Final

from spotd_providers.local.hosts import HostClock, HostMachineState
from tests.fakes.cloud import FakeCloud

MIN_JOB_AGE: Final = timedelta(seconds=300)
KILL_WAIT: Final = timedelta(seconds=30)
SLURMD_TIMEOUT: Final = timedelta(seconds=300)
VERSION: Final = "slurm-wlm 22.05.8"
OVER: Final = frozenset({"COMPLETED", "FAILED", "CANCELLED", "PREEMPTED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL"})
ON_NODE: Final = frozenset({"RUNNING", "SUSPENDED"})
_FIELD: Final = re.compile(r"(?P<name>[A-Za-z_-]+)(?::\.?(?P<width>\d*)(?P<suffix>[^,]*))?(?:,|$)")
_GPU: Final = re.compile(r"gpu(?::(?P<kind>[a-z0-9_.-]*[a-z][a-z0-9_.-]*))?:(?P<count>\d+)")
Answer = tuple[str, int]


@dataclass(slots=True, kw_only=True)
class FakeNode:
    """A node; `state` is what an administrator or a fault made of it, empty for none."""

    name: str
    kind: str
    gpus: int
    cpus: int = 16
    memory_mb: int = 128_000
    state: str = ""
    reason: str = "none"


@dataclass(slots=True, kw_only=True)
class FakePartition:
    """A partition, over some nodes."""

    name: str
    nodes: tuple[str, ...]
    tier: int = 1
    preempt: str = "OFF"
    grace_s: int = 0
    max_time: str = "UNLIMITED"
    state: str = "UP"


@dataclass(slots=True, kw_only=True)
class FakeJob:
    """A job. Times are of the fake's clock."""

    id: int
    name: str
    comment: str
    user: str
    partition: str
    kind: str
    gpus: int
    cpus: int
    memory_mb: int
    script: str | None
    output: str
    submitted: datetime
    nodes: int = 1
    limit: timedelta | None = None
    may_requeue: bool = False
    array: str = ""
    state: str = "PENDING"
    reason: str = "Priority"
    started: datetime | None = None
    ended: datetime | None = None
    preempted: datetime | None = None
    not_before: datetime | None = None
    restarts: int = 0
    node: str = ""
    """Or several, with commas."""
    exit: str = "0"

    @property
    def on(self) -> list[str]:
        return self.node.split(",") if self.node else []


@dataclass(slots=True, kw_only=True)
class SlurmQuirks:
    """What this cluster does otherwise."""

    has_accounting: bool = False
    hanging: set[str] = field(default_factory=set)
    """Commands that never end."""
    fails: dict[str, Answer] = field(default_factory=dict)
    """By command, what it answers instead of doing anything."""
    breaks: dict[str, Answer] = field(default_factory=dict)
    """By command, what it answers after it has taken effect."""
    cut_rows: int | None = None
    """After so many rows of jobs `squeue` breaks off."""
    submits_max: int | None = None
    rewrites_comment: str = ""
    raw_rows: list[str] = field(default_factory=list)
    """Printed by `squeue` beside its rows."""
    spoiled: set[int] = field(default_factory=set)
    """Jobs whose rows cannot be read."""


class FakeSlurm(FakeCloud):
    """One cluster."""

    def __init__(self, root: Path, *, clock: HostClock) -> None:
        super().__init__(root, clock=clock)
        self.quirks = SlurmQuirks()
        self.me = getpass.getuser()
        self.nodes: dict[str, FakeNode] = {}
        self.partitions: dict[str, FakePartition] = {}
        self.jobs: dict[int, FakeJob] = {}
        self.past: list[FakeJob] = []
        self._numbers = count(1)
        self.path = ""
        """By what a job finds its programs: that of its login node."""

    # --- what happens to it ---------------------------------------------------------------------------------------

    def add_job(self, name: str, comment: str, *, user: str = "", partition: str, kind: str = "h100") -> FakeJob:
        """Add a job that runs since long ago, without a process."""
        one = FakeJob(
            id=next(self._numbers), name=name, comment=comment, user=user or self.me, partition=partition, kind=kind,
            gpus=0, cpus=0, memory_mb=0, script=None, output="", submitted=self.clock.now(), state="RUNNING",
            reason="None", started=self.clock.now(), node=self.partitions[partition].nodes[0],
        )  # fmt: skip
        self.jobs[one.id] = one
        return one

    def preempt(self, job: FakeJob) -> None:
        """Let a job of a higher tier take the place of this one."""
        now = self.clock.now()
        grace = timedelta(seconds=self.partitions[job.partition].grace_s)
        job.preempted = now
        if grace:
            self.at(now + grace, lambda at: self._take(job, at))
        else:
            self._take(job, now)

    def _take(self, job: FakeJob, at: datetime) -> None:
        if job.state not in ON_NODE:
            return
        if job.may_requeue:
            self.requeue(job)
        else:
            self.finish(job, "PREEMPTED", at)

    def requeue(self, job: FakeJob) -> None:
        """Queue a job again under its number, which holds it back for two minutes."""
        self._kill(job)
        job.state, job.reason, job.restarts = "PENDING", "BeginTime", job.restarts + 1
        job.started = job.preempted = None
        job.node, job.not_before = "", self.clock.now() + timedelta(minutes=2)

    def lose(self, node: str) -> None:
        """Let a node fall silent; its jobs are given up after SlurmdTimeout."""
        self.nodes[node].state = "down*"
        for job in self.jobs.values():
            if node in job.on and job.state in ON_NODE:
                self._kill(job)
                self.at(self.clock.now() + SLURMD_TIMEOUT, lambda at, job=job: self.finish(job, "NODE_FAIL", at))  # type: ignore[misc] # a default, not an argument

    def finish(self, job: FakeJob, state: str, at: datetime, *, exit_code: str = "0", reason: str = "None") -> None:
        """End a job with its last state."""
        if job.state in OVER:
            return
        self._kill(job)
        job.state, job.ended, job.exit, job.reason = state, at, exit_code, reason
        self.past.append(job)

    def restart_controller(self, *, forget: Sequence[int] = ()) -> None:
        """Lose what a controller keeps of these jobs, as with its folder of state."""
        for number in forget:
            self.jobs.pop(number, None)

    def _kill(self, job: FakeJob) -> None:
        if str(job.id) in self.machines.ids():
            self.machines.kill(str(job.id))

    def _settle_processes(self, known: set[str], now: datetime) -> None:
        for job in list(self.jobs.values()):
            if job.state == "RUNNING" and str(job.id) in known:
                status = self.machines.status(str(job.id))
                is_down = any(self.nodes[name].state.startswith("down") for name in job.on)
                if status.state is not HostMachineState.RUNNING and not is_down:
                    code = 9 if status.exit_code is None else status.exit_code
                    self.finish(job, "FAILED" if code else "COMPLETED", status.ended_at or now, exit_code=str(code))
            if job.state == "RUNNING" and job.limit is not None and job.started and now >= job.started + job.limit:
                self.finish(job, "TIMEOUT", job.started + job.limit)
            if job.state in OVER and job.ended is not None and now - job.ended > MIN_JOB_AGE:
                del self.jobs[job.id]
        self._schedule(now)

    def _schedule(self, now: datetime) -> None:
        for job in sorted(self.jobs.values(), key=lambda one: one.id):
            if job.state != "PENDING" or job.reason.startswith("JobHeld") or (job.not_before or now) > now:
                continue
            free = [one for one in self.partitions[job.partition].nodes if self.fits(job, one)]
            if len(free) < job.nodes:
                job.reason = "Resources"
                continue
            job.state, job.reason, job.started, job.node = "RUNNING", "None", now, ",".join(free[: job.nodes])
            if job.script is not None:
                head = f"exec >>'{job.output}' 2>&1\n"
                env = {"SLURM_JOB_ID": str(job.id), "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(job.gpus)))}
                env |= {"SLURM_JOB_NODELIST": job.node, "SLURM_CPUS_PER_TASK": str(job.cpus)}
                env |= {"SLURM_RESTART_COUNT": str(job.restarts)} if job.restarts else {}
                env |= {"PATH": self.path} if self.path else {}
                self.machines.start(str(job.id), head + job.script, env)

    def fits(self, job: FakeJob, name: str) -> bool:
        node, (gpus, cpus, memory) = self.nodes[name], self.used(name)
        is_kind = job.gpus == 0 or not job.kind or job.kind == node.kind
        has_room = gpus + job.gpus <= node.gpus and cpus + job.cpus <= node.cpus
        return not node.state and is_kind and has_room and memory + job.memory_mb <= node.memory_mb

    def used(self, name: str) -> tuple[int, int, int]:
        """Return the GPUs, processors and megabytes that jobs have there."""
        here = [one for one in self.jobs.values() if name in one.on and one.state in ON_NODE]
        return sum(one.gpus for one in here), sum(one.cpus for one in here), sum(one.memory_mb for one in here)

    # --- its commands ---------------------------------------------------------------------------------------------

    def run(self, command: str, arguments: Sequence[str], given: str, environ: Sequence[str]) -> Answer:
        """Do one command; return what it prints and its status."""
        with self.lock:
            self.advance()
            if command in self.quirks.fails:
                return self.quirks.fails[command]
            odd = [name for name in environ if name.startswith(("SBATCH_", "SQUEUE_", "SINFO_", "SALLOC_"))]
            if odd:
                return f"{command}: error: {odd[0]} of the environment is used\n", 1
            answer: Answer = getattr(self, f"_{command}")(list(arguments), given)
            self.advance()
            return self.quirks.breaks.get(command, answer)

    def _sinfo(self, arguments: list[str], _given: str) -> Answer:
        if "--version" in arguments:
            return f"{VERSION}\n", 0
        wanted = _option(arguments, "-p").split(",")
        lines = []
        for partition in self.partitions.values():
            if partition.name not in wanted:
                continue
            for node in (self.nodes[name] for name in partition.nodes):
                gpus, cpus, memory = self.used(node.name)
                gres = f"gpu:{node.kind}" if node.kind else "gpu"
                state = node.state or ("idle" if not cpus else "alloc" if cpus >= node.cpus else "mix")
                values = {
                    "NodeList": node.name, "Partition": partition.name + ("*" if partition.tier == 1 else ""),
                    "StateCompact": state, "Reason": node.reason,
                    "Gres": f"{gres}:{node.gpus}(S:0-1)" if node.gpus else "(null)",
                    "GresUsed": f"{gres}:{gpus}(IDX:0,2)" if node.gpus else "gpu:0",
                    "CPUsState": f"{cpus}/{node.cpus - cpus}/0/{node.cpus}", "Memory": node.memory_mb,
                    "AllocMem": memory,
                }  # fmt: skip
                lines.append(_printed(_option(arguments, "-O"), values))
        return "".join(lines), 0

    def _squeue(self, arguments: list[str], _given: str) -> Answer:
        number, user = _option(arguments, "-j"), _option(arguments, "--user")
        if number and int(number) not in self.jobs:
            return "slurm_load_jobs error: Invalid job id specified\n", 1
        lines = []
        for job in self.jobs.values():
            if (number and job.id != int(number)) or (user and job.user != user):
                continue
            ends = job.ended or (None if job.started is None or job.limit is None else job.started + job.limit)
            if job.preempted is not None and job.state in ON_NODE:
                ends = job.preempted + timedelta(seconds=self.partitions[job.partition].grace_s)
            values = {
                "JobID": job.id, "JobArrayID": job.array or job.id, "Name": job.name, "Comment": job.comment,
                "UserName": job.user, "State": job.state, "Reason": job.reason, "SubmitTime": _at(job.submitted),
                "StartTime": _at(job.started), "EndTime": _at(ends), "PreemptTime": _at(job.preempted),
                "RestartCnt": job.restarts, "NodeList": job.node, "exit_code": job.exit,
            }  # fmt: skip
            line = _printed(_option(arguments, "-O"), values)
            lines.append(line[: len(line) // 2] + "\n" if job.id in self.quirks.spoiled else line)
        lines += self.quirks.raw_rows if not number else []
        if self.quirks.cut_rows is not None and not number:
            return "".join(
                lines[: self.quirks.cut_rows]
            ) + "slurm_load_jobs error: Unable to contact slurm controller\n", 1
        return "".join(lines), 0

    def _scontrol(self, arguments: list[str], _given: str) -> Answer:
        if arguments[:2] == ["show", "config"]:
            return "PreemptMode             = REQUEUE\nPreemptType             = preempt/partition_prio\n", 0
        if arguments[:2] == ["show", "hostnames"]:
            return arguments[2].replace(",", "\n") + "\n", 0
        if arguments[:2] == ["show", "node"]:
            names = arguments[-1].split(",")
            return "".join(f"NodeName={one} Arch=x86_64 NodeAddr=127.0.0.1 NodeHostName={one}\n" for one in names), 0
        return "".join(
            f"PartitionName={one.name} AllowGroups=ALL GraceTime={one.grace_s} MaxTime={one.max_time}"
            f" PriorityTier={one.tier} PreemptMode={one.preempt} State={one.state} TRES=cpu=6,mem=6000M\n"
            for one in self.partitions.values()
        ), 0

    def _scancel(self, arguments: list[str], _given: str) -> Answer:
        number, user, name = arguments[-1], _option(arguments, "--user"), _option(arguments, "--name")
        job = self.jobs.get(int(number))
        if job is not None and job.user == user and job.name == name and job.state not in OVER:
            self.finish(job, "CANCELLED", self.clock.now(), exit_code="9" if job.started else "0")
        return "", 0

    def _sacct(self, arguments: list[str], _given: str) -> Answer:
        if not self.quirks.has_accounting:
            return "Slurm accounting storage is disabled\n", 1
        name = _option(arguments, "--name")
        rows = {one.id: one for one in [*self.past, *self.jobs.values()] if not name or one.name == name}
        return "".join(f"{one.id:>24} {one.state:>24} \n" for one in rows.values()), 0

    def _sbatch(self, arguments: list[str], given: str) -> Answer:
        partition = self.partitions.get(_option(arguments, "--partition") or _option(arguments, "-p"))
        if partition is None:
            return "sbatch: error: Batch job submission failed: Invalid partition name specified\n", 1
        if "--test-only" in arguments:
            return "sbatch: Job 99 to start at 2026-11-28T06:41:12 using 1 processors\n", 0
        mine = [one for one in self.jobs.values() if one.user == self.me and one.state not in OVER]
        if self.quirks.submits_max is not None and len(mine) >= self.quirks.submits_max:
            words = "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)"
            return (
                f"sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: {words}\n",
                1,
            )
        if not given.startswith("#!"):
            return "sbatch: error: This does not look like a batch script.\n", 1
        wanted = _GPU.match(_option(arguments, "--gres"))
        minutes = _option(arguments, "--time")
        job = FakeJob(
            id=next(self._numbers), name=_option(arguments, "--job-name"),
            comment=self.quirks.rewrites_comment or _option(arguments, "--comment"), user=self.me,
            partition=partition.name, kind=(wanted["kind"] or "") if wanted else "",
            gpus=int(wanted["count"]) if wanted else 0, cpus=int(_option(arguments, "--cpus-per-task") or 1),
            memory_mb=int(_option(arguments, "--mem").rstrip("M") or 0), script=given,
            output=_option(arguments, "--output"), submitted=self.clock.now(),
            nodes=int(_option(arguments, "--nodes") or 1),
            limit=timedelta(minutes=int(minutes)) if minutes else None, may_requeue="--no-requeue" not in arguments,
        )  # fmt: skip
        nodes = [self.nodes[name] for name in partition.nodes]
        if sum(job.gpus <= one.gpus and job.kind in ("", one.kind) for one in nodes) < job.nodes:
            return "sbatch: error: Batch job submission failed: Requested node configuration is not available\n", 1
        self.jobs[job.id] = job
        return f"{job.id}\n", 0


def _option(arguments: Sequence[str], name: str) -> str:
    for place, one in enumerate(arguments):
        if one == name and place + 1 < len(arguments):
            return arguments[place + 1]
        if one.startswith(f"{name}="):
            return one.partition("=")[2]
    return ""


def _at(instant: datetime | None) -> str:
    return "N/A" if instant is None else str(int(instant.astimezone(UTC).timestamp()))


def _printed(layout: str, values: Mapping[str, object]) -> str:
    """Print one row: each value cut to its width, filled up with blanks, and what stands behind it."""
    row = ""
    for one in _FIELD.finditer(layout):
        if one["name"]:
            width = int(one["width"] or 20)
            row += f"{str(values[one['name']])[:width]:<{width}}{one['suffix'] or ''}"
    return row + "\n"
