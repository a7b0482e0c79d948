"""What requests carry, as JSON."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict


class FolderBody(TypedDict, total=False):
    """How large a folder is and, once its content is in the store, the hash of that."""

    bytes: int
    files: int
    sha256: str


class DraftBody(TypedDict, total=False):
    """A job as its owner wrote it.

    Attributes:
        data: the job file as parsed from TOML (dates as ISO strings); empty without a file.
        flags: what was given by flags, in the same shape; a value here replaces the file's value of that key.
        source: the job file's path as the user wrote it, empty without one.
        base_dir: absolute folder that a relative `workdir`, and a folder as source of data, is relative to.
        folders: for each folder that is a source of data, by its absolute path, what it holds.
    """

    data: dict[str, Any]
    flags: dict[str, Any]
    source: str
    base_dir: str
    folders: dict[str, FolderBody]


class PlanBody(TypedDict):
    """A job, or an array of jobs, to be planned.

    Attributes:
        resume_from: `JOB` or `JOB:CHECKPOINT` of another job to begin from, empty to begin afresh.
        array: indexes of an array of such jobs, as in `0-15%4`; empty for one job.
    """

    draft: DraftBody
    resume_from: NotRequired[str | None]
    array: NotRequired[str | None]


class SubmitBody(PlanBody):
    """A job, or an array of jobs, to be queued.

    Attributes:
        code_sha256: of a code archive that was stored before, null for a job without a workdir.
        secrets: values by name; they go to the secret store and nowhere else.
        i_know: its owner knows that it may lose everything.
        agent: an agent submits it, within `[mcp]` of the config.
    """

    code_sha256: NotRequired[str | None]
    secrets: NotRequired[dict[str, str] | None]
    i_know: NotRequired[bool]
    agent: NotRequired[bool]


class BudgetBody(TypedDict):
    """What a job may cost in all: `140` or `"=140"` sets dollars, `"+20"` adds them."""

    budget: str | float


class CeilingBody(TypedDict):
    """What a machine of a job may cost: `2.40` per GPU-hour, `"19.20/h"` in all, `"config"` as the config says."""

    ceiling: str | float


class MachineBody(TypedDict):
    """A machine by its id at its provider, its key, or `JOB-NUMBER`."""

    machine: str


class ChannelBody(TypedDict):
    """A channel of notifications by its name; null for all of them."""

    channel: str | None


class AdoptionBody(TypedDict, total=False):
    """Values of secrets by name: they are lost with a state."""

    secrets: dict[str, str] | None


class HostBody(TypedDict):
    """A host as `HOST` or `PROVIDER/HOST`."""

    host: str


class PastOfferBody(TypedDict):
    """What one offer cost in a span of the past.

    Attributes:
        changes: pairs of a Unix second and micro-dollars per hour from then on (the GPU part of the whole machine,
            before any fee); null is off the market. The last price holds until the end of the span.
    """

    provider: str
    offer: str
    pool: str
    gpu: str
    count: int
    market: str
    storage_microusd_gb_month: NotRequired[int]
    changes: list[list[int | None]]


class PastOffersBody(TypedDict):
    """Everything that these offers cost in a span, in Unix seconds: it replaces what was imported of them before."""

    since_s: int
    until_s: int
    offers: list[PastOfferBody]


class PriceImportBody(TypedDict):
    """A provider by its name, and from which Unix second on. `after` is `next` of the answer before."""

    provider: str
    since_s: int
    after: NotRequired[str]


class CheckpointsBody(TypedDict):
    """Checkpoints of a job by their names, at least one."""

    checkpoints: list[str]


class PinBody(CheckpointsBody):
    """Checkpoints to be kept for good, or no longer."""

    pinned: NotRequired[bool]


# What each answer of the API holds, and each refusal.


class Answer(TypedDict, total=False):
    """What each answer holds: the version of its schema, and the daemon's time. Handlers leave both out."""

    schema: int
    now: str


class Spending(TypedDict):
    """What something cost by now.

    Attributes:
        estimated: for a part of it no provider's own bill is known: it follows from what was observed.
    """

    spent_usd: float
    estimated: bool


class ProblemResponse(TypedDict):
    """One thing wrong in what the user wrote. `key` is the dotted key of the job file, empty for the whole."""

    key: str
    message: str
    hint: str


class ErrorResponse(TypedDict):
    code: str
    message: str
    hint: str
    problems: list[ProblemResponse]
