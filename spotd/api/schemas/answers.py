"""Answers that hold one thing under its name; the others are where their parts are."""

from __future__ import annotations

from typing import TypedDict

from spotd.api.schemas.checkpoints import KeptCheckpointResponse
from spotd.api.schemas.costs import CalibrationResponse
from spotd.api.schemas.envelope import Answer, ErrorResponse
from spotd.api.schemas.health import ChannelTestResponse, ForgottenHostResponse, ProviderResponse, StatusResponse
from spotd.api.schemas.jobs import ArrayResponse, ForgottenResponse, JobResponse
from spotd.api.schemas.plans import CodeResponse, PlanResponse, WhyResponse


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
