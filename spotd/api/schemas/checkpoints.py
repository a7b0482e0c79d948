"""The JSON of `spotctl checkpoints`, by the rules of `spotd.api.schemas`."""

from __future__ import annotations

from typing import Literal, TypedDict

from spotd.api.schemas.jobs import CheckpointResponse


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
