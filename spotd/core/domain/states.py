"""States, the one table of transitions, and the reasons attempts end.

Theory. A *job* is what the user queued; an *attempt* is one machine and one try. The reason an attempt ended is the
source of everything that follows: the job's next state, whether it counts as a failure of the user's code, whether
the host cools down, and the sentence the user reads are all derived from it here.

An attempt moves only forward:

    INTENDED  the launch is durable, the paid call may or may not have been made
    STARTING  the provider says the machine exists; the runner has not reported the user's command yet
    RUNNING   the runner reported that the user's command runs
    STOPPING  the runner was ordered to save and stop; the machine still lives
    ENDING    the outcome is settled and the machine may no longer count; it is destroyed until the provider says gone
    ENDED     the provider says there is no machine
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from typing import Final


class InvariantBroken(Exception):
    """A rule the safety of money or work rests on does not hold: stop, the write-ahead intents make it safe."""


class JobState(StrEnum):
    QUEUED = "QUEUED"
    WAITING_PRICE = "WAITING_PRICE"
    PROVISIONING = "PROVISIONING"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    RECOVERING = "RECOVERING"
    CANCELLING = "CANCELLING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    EXPIRED = "EXPIRED"

    @property
    def is_final(self) -> bool:
        return self in _FINAL

    @property
    def may_be_placed(self) -> bool:
        """A job in this state holds no machine that counts and wants one."""
        return self in _PLACEABLE


_FINAL: Final = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED})
_PLACEABLE: Final = frozenset({JobState.QUEUED, JobState.WAITING_PRICE, JobState.RECOVERING})


class AttemptState(StrEnum):
    INTENDED = "intended"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDING = "ending"
    ENDED = "ended"

    @property
    def counts(self) -> bool:
        """What this attempt's host writes is accepted, and its job may have no other machine."""
        return self in _COUNTING


_COUNTING: Final = frozenset(
    {AttemptState.INTENDED, AttemptState.STARTING, AttemptState.RUNNING, AttemptState.STOPPING}
)


class IllegalTransition(InvariantBroken):
    """A state was asked to become one that the table does not allow."""

    def __init__(self, before: StrEnum, after: StrEnum) -> None:
        super().__init__(f"{type(before).__name__} {before} cannot become {after}")


_UNPLACED_ENDS: Final = frozenset({JobState.FAILED, JobState.CANCELLED, JobState.EXPIRED})
JOB_TRANSITIONS: Final[Mapping[JobState, frozenset[JobState]]] = {
    JobState.QUEUED: _UNPLACED_ENDS | {JobState.WAITING_PRICE, JobState.PROVISIONING},
    JobState.WAITING_PRICE: _UNPLACED_ENDS | {JobState.QUEUED, JobState.PROVISIONING},
    JobState.PROVISIONING: _FINAL
    | {JobState.STARTING, JobState.RUNNING, JobState.QUEUED, JobState.RECOVERING, JobState.CANCELLING},
    JobState.STARTING: _FINAL | {JobState.RUNNING, JobState.QUEUED, JobState.RECOVERING, JobState.CANCELLING},
    JobState.RUNNING: _FINAL | {JobState.QUEUED, JobState.RECOVERING, JobState.CANCELLING},
    JobState.RECOVERING: _UNPLACED_ENDS | {JobState.QUEUED, JobState.WAITING_PRICE, JobState.PROVISIONING},
    JobState.CANCELLING: frozenset({JobState.CANCELLED, JobState.SUCCEEDED, JobState.FAILED}),
    JobState.SUCCEEDED: frozenset({JobState.QUEUED}),
    JobState.FAILED: frozenset({JobState.QUEUED}),
    JobState.CANCELLED: frozenset({JobState.QUEUED}),
    JobState.EXPIRED: frozenset({JobState.QUEUED}),
}
"""Final states lead only back to QUEUED, by `spotctl retry`, a success only with `--anyway`; all others to FAILED,
by a quarantine."""

ATTEMPT_TRANSITIONS: Final[Mapping[AttemptState, frozenset[AttemptState]]] = {
    AttemptState.INTENDED: frozenset(
        {AttemptState.STARTING, AttemptState.RUNNING, AttemptState.ENDING, AttemptState.ENDED}
    ),
    AttemptState.STARTING: frozenset(
        {AttemptState.RUNNING, AttemptState.STOPPING, AttemptState.ENDING, AttemptState.ENDED}
    ),
    AttemptState.RUNNING: frozenset({AttemptState.STOPPING, AttemptState.ENDING, AttemptState.ENDED}),
    AttemptState.STOPPING: frozenset({AttemptState.ENDING, AttemptState.ENDED}),
    AttemptState.ENDING: frozenset({AttemptState.ENDED}),
    AttemptState.ENDED: frozenset(),
}


def check_job_transition(before: JobState, after: JobState) -> None:
    """Raise IllegalTransition unless the table has this row."""
    if before is not after and after not in JOB_TRANSITIONS[before]:
        raise IllegalTransition(before, after)


def check_attempt_transition(before: AttemptState, after: AttemptState) -> None:
    """Raise IllegalTransition unless the table has this row."""
    if before is not after and after not in ATTEMPT_TRANSITIONS[before]:
        raise IllegalTransition(before, after)


class Blame(StrEnum):
    """What pays for the end of an attempt, with a retry or a cool-down.

    A host that failed cools down for long. One that another user pays more for, or that could not start an image which
    may well not exist, only so long that the job tries others first: in a small market one bad evening or one bad image
    would else use up the hosts.
    """

    NONE = "none"
    USER = "user"
    HOST = "host"
    HOST_BRIEFLY = "host, briefly"
    POOL = "pool"


@dataclass(frozen=True, slots=True)
class EndTraits:
    """What follows from a reason.

    Attributes:
        next_state: of the job; `None` for a user error, where the retries left decide.
        is_recovery: the job goes on elsewhere and the loss shows in its `recoveries`.
        is_failed_start: the job itself may be at fault if its command did not run for a while; see `backoff`.
        sentence: for the user; `{detail}` is filled in.
    """

    next_state: JobState | None
    sentence: str
    _: KW_ONLY
    is_recovery: bool = False
    blame: Blame = Blame.NONE
    is_failed_start: bool = False


class EndReason(StrEnum):
    """Why an attempt ended. The strings are part of the JSON output."""

    DONE = "done"
    PREEMPTED = "preempted"
    OUTBID = "outbid"
    HOST_LOST = "host_lost"
    USER_ERROR = "user_error"
    IMAGE_ERROR = "image_error"
    PROVISION_TIMEOUT = "provision_timeout"
    LAUNCH_FAILED = "launch_failed"
    NEVER_LAUNCHED = "never_launched"
    OVER_BUDGET = "over_budget"
    BUDGET_PAUSED = "budget_paused"
    WINDOW_CLOSED = "window_closed"
    MADE_ROOM = "made_room"
    DEADLINE_PASSED = "deadline_passed"
    MIGRATED = "migrated"
    MAX_DURATION = "max_duration"
    PRICE_ROSE = "price_rose"
    CANCELLED = "cancelled"
    LEASE_EXPIRED = "lease_expired"
    CONTRACT_BROKEN = "contract_broken"
    PROVIDER_BALANCE = "provider_balance"
    FLOODED = "flooded"
    CODE_ERROR = "code_error"
    INPUT_ERROR = "input_error"
    DISK_FULL = "disk_full"
    NOT_PREPARED = "not_prepared"
    FORGOTTEN = "forgotten"
    NOT_SENT = "not_sent"
    LAUNCH_UNKNOWN = "launch_unknown"
    QUARANTINED = "quarantined"
    STALLED = "stalled"

    @property
    def traits(self) -> EndTraits:
        return _END_TRAITS[self]

    @property
    def takes_detail(self) -> bool:
        return "{detail}" in self.traits.sentence

    def sentence(self, detail: str) -> str:
        """Return what the user reads."""
        return self.traits.sentence.format(detail=detail or "no details")


_END_TRAITS: Final[Mapping[EndReason, EndTraits]] = {
    EndReason.DONE: EndTraits(JobState.SUCCEEDED, "the command ended with exit code 0"),
    EndReason.PREEMPTED: EndTraits(
        JobState.RECOVERING, "the provider took the machine back", is_recovery=True, blame=Blame.HOST_BRIEFLY
    ),
    EndReason.OUTBID: EndTraits(
        JobState.RECOVERING, "somebody bid more for the machine", is_recovery=True, blame=Blame.HOST_BRIEFLY
    ),
    EndReason.HOST_LOST: EndTraits(
        JobState.RECOVERING,
        "the machine was lost: {detail}",
        is_recovery=True,
        blame=Blame.HOST,
        is_failed_start=True,
    ),
    EndReason.USER_ERROR: EndTraits(None, "the command failed: {detail}", blame=Blame.USER),
    EndReason.IMAGE_ERROR: EndTraits(
        JobState.RECOVERING,
        "the image did not start: {detail}",
        is_recovery=True,
        blame=Blame.HOST_BRIEFLY,
        is_failed_start=True,
    ),
    EndReason.PROVISION_TIMEOUT: EndTraits(
        JobState.RECOVERING,
        "the machine did not come up in time",
        is_recovery=True,
        blame=Blame.HOST,
        is_failed_start=True,
    ),
    # What cools down depends on the refusal: see `outcomes`.
    EndReason.LAUNCH_FAILED: EndTraits(JobState.RECOVERING, "the launch was refused: {detail}"),
    EndReason.NEVER_LAUNCHED: EndTraits(JobState.RECOVERING, "the launch did not take effect: {detail}"),
    # Whether it can go on at all with what is left is decided where offers are known.
    EndReason.OVER_BUDGET: EndTraits(JobState.QUEUED, "the job's budget is used up: {detail}"),
    EndReason.BUDGET_PAUSED: EndTraits(JobState.QUEUED, "stopped until there is budget again: {detail}"),
    EndReason.WINDOW_CLOSED: EndTraits(JobState.QUEUED, "its window ends: {detail}"),
    EndReason.MIGRATED: EndTraits(JobState.RECOVERING, "the job moves to another machine: {detail}"),
    EndReason.DEADLINE_PASSED: EndTraits(JobState.EXPIRED, "its deadline has passed: {detail}"),
    EndReason.MAX_DURATION: EndTraits(JobState.EXPIRED, "it ran for as long as it may: {detail}"),
    EndReason.MADE_ROOM: EndTraits(JobState.QUEUED, "it makes room for a job of higher priority: {detail}"),
    EndReason.PRICE_ROSE: EndTraits(
        JobState.RECOVERING, "the machine's price rose above the ceiling: {detail}", is_recovery=True
    ),
    EndReason.CANCELLED: EndTraits(JobState.CANCELLED, "cancelled by its owner"),
    EndReason.LEASE_EXPIRED: EndTraits(
        JobState.RECOVERING,
        "the machine had no contact to spotd for too long and ended itself",
        is_recovery=True,
        is_failed_start=True,
    ),
    EndReason.CONTRACT_BROKEN: EndTraits(
        JobState.RECOVERING, "the provider did not sell what was asked: {detail}", blame=Blame.HOST
    ),
    EndReason.PROVIDER_BALANCE: EndTraits(
        JobState.RECOVERING, "the account at the provider ran out of money", is_recovery=True, blame=Blame.POOL
    ),
    EndReason.FLOODED: EndTraits(
        None, "the machine wrote more into the checkpoint store than it may: {detail}", blame=Blame.HOST
    ),
    EndReason.CODE_ERROR: EndTraits(
        JobState.RECOVERING,
        "the job's code could not be unpacked: {detail}",
        is_recovery=True,
        blame=Blame.HOST_BRIEFLY,
        is_failed_start=True,
    ),
    EndReason.INPUT_ERROR: EndTraits(
        JobState.RECOVERING,
        "the outputs of another job could not be read: {detail}",
        is_recovery=True,
        blame=Blame.HOST_BRIEFLY,
        is_failed_start=True,
    ),
    EndReason.DISK_FULL: EndTraits(
        JobState.RECOVERING, "the disk was full: {detail}", is_recovery=True, is_failed_start=True
    ),
    EndReason.NOT_PREPARED: EndTraits(
        JobState.RECOVERING, "nothing was bought, the launch cannot be prepared: {detail}", is_failed_start=True
    ),
    EndReason.FORGOTTEN: EndTraits(
        JobState.RECOVERING, "its owner gave the machine up without seeing its end: {detail}", is_recovery=True
    ),
    EndReason.NOT_SENT: EndTraits(JobState.RECOVERING, "the launch was not made: {detail}"),
    EndReason.LAUNCH_UNKNOWN: EndTraits(
        JobState.RECOVERING, "it could not be learned whether the launch took effect: {detail}"
    ),
    # Whether it moves, or has failed, is decided by `[watchdog]` and by how often it has stalled.
    EndReason.STALLED: EndTraits(
        JobState.RECOVERING, "the job made no progress: {detail}", is_recovery=True, blame=Blame.HOST
    ),
    EndReason.QUARANTINED: EndTraits(JobState.FAILED, "spotd could not go on with it safely: {detail}"),
}
