"""What would become of a job, and why one waits, as JSON."""

from __future__ import annotations

from typing import Any, TypedDict

from spotd.api.schemas.jobs import FailureResponse, StageResponse
from spotd.api.schemas.prices import PollResponse, QuoteResponse
from spotd.api.schemas.streams import EventResponse


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
    """A dataset that the job reads: which content, how large, and where on the machine."""

    source: str
    path: str
    sha256: str
    bytes: int
    files: int


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
    attempt of an ended job why it ran where it did; `failure` is null for a job that did not fail.
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
