"""Jobs, their attempts and checkpoints, as JSON."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

from spotd.api.schemas.bodies import Answer, Spending


class CheckpointResponse(TypedDict):
    """A complete, verified checkpoint; `attempt` wrote it."""

    name: str
    attempt: int
    step: int | None
    bytes: int
    at: str


class TransferResponse(TypedDict):
    """A checkpoint on its way between host and store, as the host's heartbeats show it.

    Attributes:
        kind: `upload` or `restore`.
        bytes_per_s, seconds_left: null while they are unknown.
        queued: how many more wait for their upload.
        failing: why it does not advance, empty while it does.
    """

    kind: str
    checkpoint: str
    bytes_done: int
    bytes_total: int
    bytes_per_s: int | None
    seconds_left: float | None
    queued: int
    failing: str


class StageResponse(TypedDict):
    """What a machine does while the job's command does not run.

    Attributes:
        name: `launch`, `takeover`, `image`, `boot`, `canary`, `code`, `set-up`, `restore`, `save`, `upload` or `waits`
            (its job is done, and it waits for another one).
        text: the same as a clause, with the provider's own words where it has any.
        since: null where the daemon does not know.
        bytes_done, bytes_total: of what is moved in this stage, null where nothing is or it is not known.
    """

    name: str
    text: str
    since: str | None
    bytes_done: int | None
    bytes_total: int | None


class GpuResponse(TypedDict):
    """The use of one GPU, as the heartbeat that was read at `at` states it; what its driver leaves out is null."""

    index: int
    name: str
    util_pct: float | None
    mem_used_mb: float | None
    mem_total_mb: float | None
    power_w: float | None
    temp_c: float | None
    at: str


class GpuSampleResponse(TypedDict):
    """All GPUs of a machine at one instant: their mean use and the sum of their memory, null where it is not stated."""

    at: str
    util_pct: float | None
    mem_used_mb: float | None
    mem_total_mb: float | None


class GpuHistoryResponse(Answer):
    """The use of the machine that a job has now, oldest first; `attempt` is null and `samples` empty without one.

    Only what this run of the daemon has read; the distance of the samples grows with the time that they cover.
    """

    attempt: int | None
    samples: list[GpuSampleResponse]


class ShellResponse(Answer):
    """Where the machine that a job has now gives a shell to a key of the provider's account.

    Attributes:
        host: empty where `command` is run on the user's own computer.
        command: what leads from there into the machine; empty where ssh itself does.
        ports: `provider` where the daemon leads to its ports, `ssh` where ssh does, else `none`.
        no_ports: why ssh does not.
    """

    job_id: str
    attempt: int
    host: str
    port: int
    user: str
    command: list[str]
    ports: Literal["provider", "ssh", "none"]
    no_ports: str


class PortResponse(TypedDict):
    """What is said of a forwarded port: first `open`, and `end` with the reason when the job leaves the machine.

    Attributes:
        socket: a unix socket of the daemon's user; each connection to it is one to the port.
    """

    kind: Literal["open", "end"]
    socket: str
    attempt: int
    text: str


class ForgottenResponse(TypedDict):
    """A machine that was given up; `job` is null for one without an attempt."""

    provider: str
    machine: str | None
    key: str
    job: str | None
    attempt: int | None


class BidResponse(TypedDict):
    """What is bid for a machine, for its GPU part per hour.

    Attributes:
        floor_usd_h: the lowest bid that wins, as the provider stated it last; null where it did not.
        changes: how often it was raised or lowered.
        held_since: it was outbid then, and is waited for; null while it is not.
    """

    usd_h: float
    floor_usd_h: float | None
    changes: int
    held_since: str | None


class AttemptResponse(Spending):
    """One machine, one try. `reason` is the EndReason once ended, `detail` its sentence for the user.

    `bid` is null where no bid is paid. `taken_over_from` is the attempt, as `JOB-NUMBER`, for which its machine was
    made, null where that is its own.
    """

    attempt: int
    state: str
    provider: str
    host: str
    region: str
    market: str
    gpu: str
    gpu_count: int
    nodes: int
    effective_usd_h: float
    ceiling_usd_gpu_h: float
    on_demand_usd_h: float | None
    intended_at: str
    launched_at: str | None
    running_at: str | None
    ended_at: str | None
    resumed_from: str | None
    reason: str | None
    detail: str
    exit_code: int | None
    on_demand_usd: float
    bid: BidResponse | None
    taken_over_from: str | None


class ArrayTaskResponse(TypedDict):
    """The place of a job in its array; `at_once` is null where any number of them may run at one time."""

    id: str
    name: str
    index: int
    count: int
    at_once: int | None


class ArrayResponse(Spending):
    """An array as a whole.

    Attributes:
        states: how many of its jobs are in each state.
        retried, refusals, next_index: of a retry: how many were queued again, why some were not, and where to go on.
    """

    id: str
    name: str
    jobs: int
    states: dict[str, int]
    retried: int
    refusals: list[str]
    next_index: int | None


class FailureResponse(TypedDict):
    """Why a job failed.

    Attributes:
        attempt: the number of its last attempt, 0 where it had none. A job whose command failed and is about to be
            tried again states that failure, too.
        meaning: what its exit code and its output usually mean; empty where they mean nothing in particular.
        output: the last lines that this attempt wrote, at most ten; a list states them of its newest failures.
        next_step: what its owner can do.
    """

    attempt: int
    reason: str
    exit_code: int | None
    meaning: str
    output: list[str]
    next_step: str


class JobResponse(Spending):
    """The JSON job object. `provider` to `effective_usd_h` are those of the machine it has now, null without one.

    `gpu` and `gpu_count` are what the job asks for while it has no machine (its first alternative); `gpu_wanted` has
    every alternative, as `RTX_4090:4, L40S:4`, and `2..4 x L40S:4` where several machines are wanted. `nodes` machines
    have the GPUs of `gpu_count` together.
    `attempt` is the number of the newest attempt, 0 before the first. `verdict` is the newest decision's sentence.
    `gpus` is empty without a machine, and where its image has no `nvidia-smi`.
    `uncompared_usd` of `spent_usd` is compared with nothing: no on-demand price was known, or the job failed.
    `summary` is one sentence about how long it ran, where, and what that cost and saved; empty before its end.
    `checkpoint_late` states for how long nothing was saved, while that is longer than `[checkpoint] every` allows.
    `array` is null for a job that was not submitted with `--array`.
    `ceiling_usd_gpu_h` is the one of its machine, else of the newest decision about it; null where neither is known.
    `stage` is null while its command runs, and without a machine.
    `moves` is how often it was moved to a cheaper machine.
    `failure` is null for a job that neither failed nor is tried again because its command did.
    `submitted_by` is the name of the user who queued it, `agent` for an agent, empty for the owner of spotd.
    """

    id: str
    name: str
    state: str
    reason: str
    provider: str | None
    host: str | None
    gpu: str | None
    gpu_count: int
    nodes: int
    attempt: int
    attempts: list[AttemptResponse]
    effective_usd_h: float | None
    on_demand_usd: float
    saved_usd: float
    recoveries: int
    checkpoint: CheckpointResponse | None
    submitted_at: str
    started_at: str | None
    ended_at: str | None
    verdict: str
    exit_code: int | None
    transfer: TransferResponse | None
    gpus: list[GpuResponse]
    uncompared_usd: float
    summary: str
    checkpoint_late: str
    array: ArrayTaskResponse | None
    ceiling_usd_gpu_h: float | None
    stage: StageResponse | None
    moves: int
    submitted_by: str
    gpu_wanted: str
    failure: FailureResponse | None


class JobDetailResponse(Answer):
    """What `show` adds to the job object.

    Attributes:
        spec: the job as it was understood, in the shape of a job file; secrets by name only.
        checkpoint_advice: how often it should save and why, empty while nothing is known of its saves.
        lost_s: work and waiting lost to preemptions.
        ceiling_usd_gpu_h: the one of its machine; without one the highest of `ceilings`.
        ceilings: the effective $ per GPU-hour that applies to each GPU that it names, by canonical name.
        set_aside: which of its rows cannot be understood and are not part of this answer, in sentences. Where that is
            the job's own, `spec` is empty and the job is described by its columns alone.
    """

    job: JobResponse
    spec: dict[str, Any]
    code_sha256: str | None
    code_bytes: int
    priority: int
    lost_s: float
    ceiling_usd_gpu_h: float | None
    ceilings: dict[str, float]
    budget_usd: float | None
    phase: str
    checkpoint_advice: str
    set_aside: list[str]


class ArraySumResponse(Spending):
    """All jobs of an array: how many are in each state, and what they cost together."""

    id: str
    states: dict[str, int]
    on_demand_usd: float
    saved_usd: float
    uncompared_usd: float
    recoveries: int


class JobPageResponse(Answer):
    """Jobs, newest submission first. `more` when the limit cut some off.

    Attributes:
        arrays: those of which the limit cut jobs off.
        paused: a sentence while nothing may be launched for any of them, else empty.
    """

    jobs: list[JobResponse]
    more: bool
    paused: str
    arrays: list[ArraySumResponse]


# The JSON of `spotctl checkpoints`, by the rules of `spotd.api.schemas`.


class KeptCheckpointResponse(CheckpointResponse):
    """A checkpoint on a job's list.

    Attributes:
        job: the id of the job that wrote it; where this job is to begin from another's, `attempt` is 0.
        metric: what the job measured with it, null where it names no metric or the checkpoint does not hold it.
        best: it has the best value of the metric.
        pinned: it stays until it is unpinned.
        manifest_sha256: of the manifest that was accepted.
    """

    job: str
    metric: float | None
    best: bool
    pinned: bool
    manifest_sha256: str


class VerificationResponse(TypedDict):
    """How far the reading of one checkpoint has come, or how it ended.

    Attributes:
        kind: `progress`, or `verified` for the last record of one checkpoint.
        bytes_done, bytes_total: of content that is there once, however often the checkpoint uses it.
        ok: null while it is read.
        damaged: how many chunks differ from the manifest.
        problem: a sentence, empty where nothing is wrong.
    """

    kind: Literal["progress", "verified"]
    name: str
    attempt: int
    bytes_done: int
    bytes_total: int
    ok: bool | None
    damaged: int
    problem: str


# Files kept in the store, as JSON.


class FileResponse(TypedDict):
    """One path of a checkpoint or of the outputs. `mode` holds the permission bits.

    In `path` and `target` what is not printable text is `%` and two hex digits for each byte.

    A `dir` is listed only where it is empty. `target` is a `link`'s, relative and inside the folder, else null.
    """

    path: str
    kind: Literal["file", "dir", "link"]
    bytes: int
    mode: int
    target: str | None


class FilesResponse(Answer):
    """What `pull` can fetch: `kind` is `outputs` or `checkpoint`, `name` the checkpoint's, `attempt` who wrote it.

    `manifest_sha256` is of this very list.
    `warning` names what of the outputs is missing; it is empty where nothing is.
    """

    id: str
    kind: Literal["outputs", "checkpoint"]
    name: str
    attempt: int
    manifest_sha256: str
    files: list[FileResponse]
    bytes: int
    warning: str


# Datasets: what a name means, and what its upload still lacks.


class DatasetResponse(TypedDict):
    """A dataset that has a name.

    `sha256` stands for its whole content. `jobs` are the ids of jobs that have not ended and read just this content.
    """

    name: str
    sha256: str
    bytes: int
    files: int
    created_at: str
    jobs: list[str]


class DatasetsAnswer(Answer):
    datasets: list[DatasetResponse]


class DatasetAnswer(Answer, total=False):
    """The dataset that is stored now, or hashes of what the store lacks of it, and then nothing has changed."""

    dataset: DatasetResponse
    missing: list[str]


class StoredAnswer(Answer):
    """How many bytes were stored."""

    bytes: int


class RootBody(TypedDict):
    """The list of the parts of a dataset, as its text."""

    root: str
