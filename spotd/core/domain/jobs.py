"""A job as the user queued it, and how far it has come."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from spotd.core.domain.chain import ArrayTask, Chain
from spotd.core.domain.charges import NOTHING
from spotd.core.domain.checkpoints import Checkpoint
from spotd.core.domain.ids import JobId
from spotd.core.domain.moves import Moves
from spotd.core.domain.states import JobState
from spotd_jobs.spec.model import JobSpec
from spotd_providers.contract.money import MicroUsd, MicroUsdPerHour

HOSTS_MAX: Final = 100
"""More hosts of one job are not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTotals:
    """What the attempts of a job that are over add up to.

    Attributes:
        ran: time in which its command ran.
        hosts: names of the hosts on which it ran, `HOSTS_MAX` of them at most.
        preemptions: those of the recoveries where the provider took the machine back.
        uncompared: what of `spent` was paid for hosts whose on-demand price was not known at the launch.
        estimated: how many attempts cost something whose provider's own bill is not known.
    """

    ran: timedelta = timedelta(0)
    hosts: tuple[str, ...] = ()
    preemptions: int = 0
    uncompared: MicroUsd = NOTHING
    estimated: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceSample:
    """How many steps one attempt made, by its checkpoints, in how much time of its command."""

    attempt: int
    gpu: str
    gpu_count: int
    steps: int
    span: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class Pacing:
    """What a job with a deadline or a longest duration remembers from one decision to the next.

    Attributes:
        counted_from: since when its deadline is counted, where it was retried; else since its submission.
        ran_before: how long its command had run at its newest retry.
        up_since: since when a spot machine can be had, or is held, without a break; `None` while none can.
        past_up, past_runs: how long, and how often, that was so before.
        losses: of its recoveries those that have ended such a run already.
        is_slipping: its owner was warned that the deadline may not be met.
        spot_wanted_since: since when a job that may take on-demand later waits for spot; `None` while it does not.
    """

    counted_from: datetime | None = None
    ran_before: timedelta = timedelta(0)
    up_since: datetime | None = None
    past_up: timedelta = timedelta(0)
    past_runs: int = 0
    losses: int = 0
    is_slipping: bool = False
    spot_wanted_since: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """What was in the store of a job's outputs when the end of the attempt that succeeded was read.

    Attributes:
        sha256: of the manifest's bytes: no other is delivered. `None` where there was none that can be read.
        problem: what of them is not there, in words; empty where all is, or none were asked for.
    """

    attempt: int
    sha256: str | None
    bytes: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the user queued, and how far it has come.

    Attributes:
        reason: one sentence, why the job is in this state.
        attempts_made: number of the newest attempt, 0 before the first.
        errors: failures of the user's own code so far.
        image_errors: attempts in a row whose image did not start.
        idle_launches: launches in a row after which the job got nowhere, whatever the reason.
        failed_starts: those of them that may be the job's own fault; `[retry] starts` bounds them.
        not_before: no machine is bought for it earlier.
        budget_set: what its owner changed the budget to; the spec's own counts while this is `None`.
        rate_low: the lowest price of a whole machine at which it was ever launched.
        disk_gb_seen: a disk of less than this was too small for it.
        checkpoints: accepted ones, newest first; the first is what the next attempt resumes from.
        spent, on_demand: of attempts that have ended; what has no known on-demand price counts as its own cost.
        lost: machine time after the newest checkpoint at each loss: what had to be done again.
        save_time: how long the upload of a checkpoint takes, as its hosts state, newer ones counting for more.
        paces: of its newest attempts, oldest first, one for each.
        outputs: what the attempt that succeeded left, `None` before one has.
        moves: to cheaper machines.
        stalls: machines in a row on which the watchdog saw no progress.
        chain: the jobs that come before it, `None` where none do.
        array: its place among the jobs of one submission, `None` for one that came alone.
        submitted_by: `agent` for a job that an agent queued, empty for any other.
    """

    id: JobId
    name: str
    spec: JobSpec
    code_sha256: str | None
    code_bytes: int
    submitted_at: datetime
    state: JobState
    reason: str
    state_since: datetime
    attempts_made: int = 0
    errors: int = 0
    image_errors: int = 0
    recoveries: int = 0
    checkpoints: tuple[Checkpoint, ...] = ()
    spent: MicroUsd = NOTHING
    on_demand: MicroUsd = NOTHING
    lost: timedelta = timedelta(0)
    started_at: datetime | None = None
    ended_at: datetime | None = None
    exit_code: int | None = None
    cancel_requested: bool = False
    outputs: Outputs | None = None
    idle_launches: int = 0
    failed_starts: int = 0
    not_before: datetime | None = None
    budget_set: MicroUsd | None = None
    rate_low: MicroUsdPerHour | None = None
    disk_gb_seen: int = 0
    totals: RunTotals = field(default_factory=RunTotals)
    pacing: Pacing = field(default_factory=Pacing)
    paces: tuple[PaceSample, ...] = ()
    save_time: timedelta | None = None
    stalls: int = 0
    chain: Chain | None = None
    array: ArrayTask | None = None
    moves: Moves = field(default_factory=Moves)
    submitted_by: str = ""

    @property
    def delivered_bytes(self) -> int:
        """What each of its machines fetches before it works, apart from a checkpoint: code, inputs and datasets."""
        return self.code_bytes + self.input_bytes + self.data_bytes

    @property
    def data_bytes(self) -> int:
        """How large the datasets are that it reads."""
        return sum(one.bytes for one in self.spec.data)

    @property
    def input_bytes(self) -> int:
        """How large the outputs of other jobs are that it reads."""
        return 0 if self.chain is None else sum(one.bytes for one in self.chain.inputs or ())

    def saved_by(self, attempt: int) -> list[datetime]:
        """Return when this attempt saved what the list has of it, newest first."""
        return [one.at for one in self.checkpoints if one.attempt == attempt]

    @property
    def budget(self) -> MicroUsd | None:
        """What all attempts together may cost."""
        if self.budget_set is not None:
            return self.budget_set
        return None if self.spec.job_budget is None else MicroUsd(self.spec.job_budget)


def new_job(job_id: JobId, spec: JobSpec, now: datetime, *, code_sha256: str | None = None, code_bytes: int = 0) -> Job:
    """Return a job as it is at its submission."""
    return Job(
        id=job_id,
        name=spec.name,
        spec=spec,
        code_sha256=code_sha256,
        code_bytes=code_bytes,
        submitted_at=now,
        state=JobState.QUEUED,
        reason="just submitted",
        state_since=now,
    )
