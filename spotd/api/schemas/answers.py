"""Answers that hold one thing under its name; the others are where their parts are."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from spotd.api.schemas.bodies import Answer, ErrorResponse
from spotd.api.schemas.costs import CalibrationResponse, PollResponse, QuoteResponse
from spotd.api.schemas.jobs import (
    ArrayResponse,
    FailureResponse,
    ForgottenResponse,
    JobResponse,
    KeptCheckpointResponse,
    StageResponse,
)

# Log lines and events, as JSON.


LogKind = Literal["log", "attempt", "gap", "transfer", "end"]


class LogResponse(TypedDict):
    """A piece of a job's log stream.

    Attributes:
        kind: `log` is output of the user's command (`text` as it was written, line ends included);
            `attempt` is a marker before the first output of an attempt (`text` a sentence, for instance where it runs);
            `gap`: output is missing here; `transfer` states in a sentence how far a checkpoint has come that
            takes a while, where the log is followed; `end` is the last record of an ended stream; its text
            sums a job up whose log was followed to its end.
        cursor: give it back as `after` to go on behind this record.
        state, exit_code: of the job, in `end` only, else null.
    """

    kind: LogKind
    cursor: str
    attempt: int
    at: str | None
    text: str
    state: str | None
    exit_code: int | None


class EventResponse(TypedDict):
    """Something happened, and why. `id` grows; give it back as `after`."""

    id: int
    at: str
    kind: str
    message: str
    job: str | None
    job_name: str | None
    attempt: int | None
    data: dict[str, str | int | float | bool | None]


# What would become of a job, and why one waits, as JSON.


class PassedOverResponse(TypedDict):
    reason: str
    offers: int


class ResumeSourceResponse(TypedDict):
    """A checkpoint of another job: `job` is the id of the job that has it."""

    job: str
    name: str
    step: int | None
    bytes: int
    at: str


class PlannedDataResponse(TypedDict):
    """A dataset that the job reads: which content, how large, and where on the machine; of a hub, which commit."""

    source: str
    path: str
    sha256: str
    bytes: int
    files: int
    revision: NotRequired[str]


class PlanResponse(TypedDict):
    """What `submit` would do, decided by the same code that will decide.

    Attributes:
        spec: the job as it was understood, in the shape of a job file, defaults filled in.
        run: the command for a person to read.
        workdir: absolute path on the submitting machine to be packed, or null.
        secrets: names whose values `submit` must bring.
        ceilings: the effective $ per GPU-hour that applies, by canonical GPU name.
        resume_from: the checkpoint of another job that this one would begin from, null without one.
        data: what each machine reads before it works.
        data_cost: a sentence on how long that takes and what it costs; empty without data.
        candidates: cheapest first by expected cost to finish, those that fit and the best that do not, at most 20.
        costs: sentences on what finishing the job is expected to cost, and what that rests on.
        verdict_kind: a VerdictKind value; `placed` means it would start now.
        fits: at least one candidate is at or under the ceiling.
        unprotected: why it is refused unless its owner knows what it may lose; empty where it is not.
        warnings: sentences worth reading that refuse nothing.
    """

    name: str
    spec: dict[str, Any]
    run: str
    image: str
    workdir: str | None
    secrets: list[str]
    ceilings: dict[str, float]
    budget_usd: float | None
    resume_from: ResumeSourceResponse | None
    data: list[PlannedDataResponse]
    data_cost: str
    candidates: list[QuoteResponse]
    costs: list[str]
    passed_over: list[PassedOverResponse]
    offers: list[PollResponse]
    fits: bool
    verdict_kind: str
    verdict: str
    unprotected: str
    warnings: list[str]


class CodeResponse(TypedDict):
    """A packed workdir that is in the store."""

    sha256: str
    bytes: int


class WhyResponse(TypedDict):
    """The answer to `why`, never empty. `kind` is a VerdictKind value or null for a final job.

    `costs` are sentences on what finishing the job is expected to cost, empty for a final job. `placed` states for each
    attempt of an ended job why it ran where it did; `failure` is null for a job that neither failed nor is tried again
    because its command did.
    """

    id: str
    name: str
    state: str
    sentence: str
    kind: str | None
    at: str | None
    until: str | None
    ceiling_usd_gpu_h: float | None
    best: QuoteResponse | None
    costs: list[str]
    passed_over: list[PassedOverResponse]
    offers: list[PollResponse]
    events: list[EventResponse]
    stage: StageResponse | None
    placed: list[str]
    failure: FailureResponse | None


# The state of the daemon and its providers, as JSON.


class CapabilityResponse(TypedDict):
    """`reason` is the sentence for a power that is missing."""

    power: str
    available: bool
    reason: str


class AccountResponse(TypedDict):
    """The money at one provider.

    Attributes:
        balance_usd, balance_at: what is left of money paid in advance, and when the provider stated it; null where it
            does not, or not lately.
        spend_usd_h: what its machines cost per hour now.
        runway_s: how long the balance lasts at that pace; null where nothing is spent, or no balance is known.
    """

    balance_usd: float | None
    balance_at: str | None
    spend_usd_h: float
    runway_s: float | None


class ProviderResponse(AccountResponse):
    """Health of one provider. `detail` states in one line what is wrong, or how many offers it shows.

    Attributes:
        machines: of ours that it lists. Each of several machines of one job counts, as in `[budget] machines`.
        requests_h: requests of the last hour; before one has passed, as many as there would be at the pace so far.
        requests_min: requests of the last minute.
    """

    name: str
    title: str
    enabled: bool
    ok: bool
    detail: str
    offers: int
    machines: int
    last_poll_at: str | None
    last_listing_at: str | None
    fee_multiplier: float
    requests_h: int
    requests_min: int
    capabilities: list[CapabilityResponse]


class CheckResponse(TypedDict):
    """One finding of `doctor`. `area` is `daemon`, `store` or the provider's name.

    One that is `ok` and has a hint is a warning.
    """

    area: str
    name: str
    ok: bool
    detail: str
    hint: str


class DoctorResponse(Answer):
    ok: bool
    checks: list[CheckResponse]


class ChannelTestResponse(TypedDict):
    """Whether a channel of notifications took a message; `error` is why not, without its address."""

    channel: str
    ok: bool
    error: str


class ListingResponse(TypedDict):
    """What one provider lists as ours, each of several machines of one job. `error` is empty when it answered whole."""

    provider: str
    machines: int
    complete: bool
    error: str


class ReconcileResponse(Answer):
    """The machines were listed and compared at once; `actions` names what follows, empty when all is in order."""

    listings: list[ListingResponse]
    actions: list[str]


class AdoptedJobResponse(TypedDict):
    """A job that the store knows and the state does not.

    Attributes:
        state: the final one of a job that had ended, CANCELLING for one that is ended now, empty for one that goes on.
        attempt: the newest one, whose machine is searched for; null where there is none.
        machine: as its provider lists it now; empty where it does not.
        spent_usd: by the file in the store.
    """

    id: str
    name: str
    state: str
    attempt: int | None
    provider: str
    machine: str
    checkpoints: int
    spent_usd: float | None


class UnownedMachineResponse(TypedDict):
    """A machine of this install that no job of the store or of the state has."""

    provider: str
    machine: str
    key: str


class AdoptionResponse(Answer):
    """What a lost state is rebuilt from: the plan, or what was done of it.

    Attributes:
        adopted: it was done.
        strays: they are ended.
        secrets: names whose values are needed again.
        unreadable: files in the store that cannot be understood, each with the reason.
        others: how many files are of another install with the same label; they are left alone.
        unlisted: providers without a complete list of machines.
    """

    adopted: bool
    jobs: list[AdoptedJobResponse]
    strays: list[UnownedMachineResponse]
    secrets: list[str]
    unreadable: list[str]
    others: int
    unlisted: list[str]


class StatusResponse(TypedDict):
    """A summary of the daemon. `clock_scale` is above 1 in an accelerated local market.

    Attributes:
        paused: a sentence while nothing may be launched, else empty.
        jobs: number of jobs by state.
    """

    version: str
    install: str
    pid: int
    started_at: str
    clock_scale: float
    paused: str
    machines: int
    jobs: dict[str, int]
    spent_day_usd: float
    spent_month_usd: float


class HostResponse(TypedDict):
    """What is remembered of one host; counts fade by half in three days, losses and hours in fourteen.

    Attributes:
        failed_starts, slow_starts, early_losses: faults for which it ranks behind.
        losses, machine_h: machines that were lost there, over the machine time of attempts that are over.
        ranks_behind: share of its price by which it ranks behind others.
        at: when the newest of it happened.
        cools_until: until when it is avoided, null where it is not.
    """

    provider: str
    host: str
    failed_starts: float
    slow_starts: float
    early_losses: float
    losses: float
    machine_h: float
    ranks_behind: float
    at: str
    cools_until: str | None


class HostsResponse(Answer):
    """Hosts that jobs have used, the worst first. `more`: there are more than are shown."""

    hosts: list[HostResponse]
    more: bool


class ForgottenHostResponse(TypedDict):
    """A host of which nothing is remembered any more."""

    provider: str
    host: str


class RefusedAnswer(TypedDict):
    """Why a request was refused, or failed."""

    schema: int
    error: ErrorResponse


class DaemonStatusAnswer(Answer):
    status: StatusResponse


class PlanAnswer(Answer):
    plan: PlanResponse


class PresentAnswer(Answer):
    present: bool


class CodeAnswer(Answer):
    code: CodeResponse


class WhyAnswer(Answer):
    why: WhyResponse


class JobAnswer(Answer):
    job: JobResponse


class JobOrArrayAnswer(Answer, total=False):
    """The job that was changed, or the array where the reference meant one."""

    job: JobResponse
    array: ArrayResponse


class ForgottenAnswer(Answer):
    forgotten: ForgottenResponse


class CalibrationAnswer(Answer):
    calibration: list[CalibrationResponse]


class CheckpointsAnswer(Answer):
    checkpoints: list[KeptCheckpointResponse]


class ProvidersAnswer(Answer):
    providers: list[ProviderResponse]


class ChannelTestsAnswer(Answer):
    channels: list[ChannelTestResponse]


class ForgottenHostsAnswer(Answer):
    forgotten: list[ForgottenHostResponse]
