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
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, TypeVar


class InvariantBroken(Exception):
    """A rule the safety of money or work rests on does not hold: stop, the write-ahead intents make it safe."""


Member = TypeVar("Member", bound=StrEnum)


def require_rows(members: type[Member], table: Mapping[Member, object]) -> None:
    """Raise InvariantBroken, at import, where a member of a closed set has no row in the table."""
    missing = [member.name for member in members if member not in table]
    if missing:
        raise InvariantBroken(f"no row for {', '.join(missing)} of {members.__name__}")


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
require_rows(JobState, JOB_TRANSITIONS)

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
require_rows(AttemptState, ATTEMPT_TRANSITIONS)


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


class EndKind(StrEnum):
    """What kind of end it is; each reason has one.

    UNBOUGHT: nothing was bought.
    COMMAND: the command ended by itself, and its exit code is the job's.
    TAKEN: the provider took the machine back.
    LOST: a machine on which the command ran was lost, and its owner is notified.
    GIVEN_UP: a machine did not get as far as the command, or is given up: it is replaced without a notification.
    BROKEN: the machine may not be used further.
    FOR_MONEY: a budget ends it; what was set aside for its end is not to be exceeded.
    FOR_TIME: a window or another job ends it, and it goes on later.
    DECIDED: its owner or a rule of the job ends it.
    """

    UNBOUGHT = "nothing rented"
    COMMAND = "the command ended"
    TAKEN = "taken back"
    LOST = "lost"
    GIVEN_UP = "given up"
    BROKEN = "broken"
    FOR_MONEY = "for money"
    FOR_TIME = "for time"
    DECIDED = "decided"


class Counted(StrEnum):
    """Which count of the job an end adds to; see `backoff`.

    START: the job itself may be at fault if its command did not run for a while. SILENT_START: the same, but a machine
    that gave no sign of life is more likely at fault. AWAY: nothing is at fault, but the next machine waits for longer
    each time. ERROR: a retry is used up, since the job would do the same on every machine.
    """

    NOTHING = "nothing"
    LAUNCH = "a launch without progress"
    START = "a failed start"
    SILENT_START = "a failed start, unless silent"
    AWAY = "a launch without progress, and a pause"
    ERROR = "an error"


class EndEvidence(StrEnum):
    """What an end adds to the history of the host and the market: a loss, a failed start, both or neither."""

    NONE = "none"
    LOSS = "loss"
    FAULT = "failed start"
    LOSS_OR_FAULT = "loss, or failed start"


_RECOVERIES: Final = frozenset({EndKind.TAKEN, EndKind.LOST, EndKind.GIVEN_UP})


@dataclass(frozen=True, slots=True)
class EndTraits:
    """What follows from a reason. No fact has a default: a new reason without one of them fails at import.

    Attributes:
        next_state: of the job; `None` for a user error, where the retries left decide.
        sentence: for the user; `{detail}` is filled in.
    """

    next_state: JobState | None
    kind: EndKind
    blame: Blame
    counted: Counted
    evidence: EndEvidence
    sentence: str

    @property
    def is_recovery(self) -> bool:
        """The job goes on elsewhere and the loss shows in its `recoveries`."""
        return self.kind in _RECOVERIES

    @property
    def is_failed_start(self) -> bool:
        return self.counted is Counted.START or self.counted is Counted.SILENT_START

    @property
    def is_loss(self) -> bool:
        """A machine that was lost, for the hazard of its host and market."""
        return self.evidence is EndEvidence.LOSS or self.evidence is EndEvidence.LOSS_OR_FAULT

    @property
    def is_host_fault(self) -> bool:
        """A machine that did not start, for the memory of its host."""
        return self.evidence is EndEvidence.FAULT or self.evidence is EndEvidence.LOSS_OR_FAULT


class EndReason(StrEnum):
    """Why an attempt ended. The strings are part of the JSON output."""

    DONE = "done"
    PREEMPTED = "preempted"
    OUTBID = "outbid"
    HOST_LOST = "host_lost"
    USER_ERROR = "user_error"
    IMAGE_ERROR = "image_error"
    PROVISION_TIMEOUT = "provision_timeout"
    NO_CAPACITY = "no_capacity"
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
    INPUT_AWAY = "input_away"
    DISK_FULL = "disk_full"
    NOT_PREPARED = "not_prepared"
    FORGOTTEN = "forgotten"
    NOT_SENT = "not_sent"
    LAUNCH_UNKNOWN = "launch_unknown"
    QUARANTINED = "quarantined"
    STALLED = "stalled"
    NOT_HANDED_OVER = "not_handed_over"

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
    EndReason.DONE: EndTraits(
        JobState.SUCCEEDED, EndKind.COMMAND, Blame.NONE, Counted.NOTHING, EndEvidence.NONE,
        "the command ended with exit code 0"),
    EndReason.PREEMPTED: EndTraits(
        JobState.RECOVERING, EndKind.TAKEN, Blame.HOST_BRIEFLY, Counted.LAUNCH, EndEvidence.LOSS,
        "the provider took the machine back"),
    EndReason.OUTBID: EndTraits(
        JobState.RECOVERING, EndKind.TAKEN, Blame.HOST_BRIEFLY, Counted.LAUNCH, EndEvidence.LOSS,
        "somebody bid more for the machine"),
    EndReason.HOST_LOST: EndTraits(
        JobState.RECOVERING, EndKind.LOST, Blame.HOST, Counted.SILENT_START, EndEvidence.LOSS_OR_FAULT,
        "the machine was lost: {detail}"),
    EndReason.USER_ERROR: EndTraits(
        None, EndKind.COMMAND, Blame.USER, Counted.ERROR, EndEvidence.NONE,
        "the command failed: {detail}"),
    EndReason.IMAGE_ERROR: EndTraits(
        JobState.RECOVERING, EndKind.GIVEN_UP, Blame.HOST_BRIEFLY, Counted.START, EndEvidence.NONE,
        "the image did not start: {detail}"),
    EndReason.PROVISION_TIMEOUT: EndTraits(
        JobState.RECOVERING, EndKind.GIVEN_UP, Blame.HOST, Counted.SILENT_START, EndEvidence.FAULT,
        "the machine did not come up in time"),
    EndReason.NO_CAPACITY: EndTraits(
        JobState.RECOVERING, EndKind.UNBOUGHT, Blame.POOL, Counted.LAUNCH, EndEvidence.NONE,
        "the machine waited for a place and got none: {detail}"),
    # What cools down depends on the refusal: see `outcomes`.
    EndReason.LAUNCH_FAILED: EndTraits(
        JobState.RECOVERING, EndKind.UNBOUGHT, Blame.NONE, Counted.LAUNCH, EndEvidence.NONE,
        "the launch was refused: {detail}"),
    EndReason.NEVER_LAUNCHED: EndTraits(
        JobState.RECOVERING, EndKind.UNBOUGHT, Blame.NONE, Counted.LAUNCH, EndEvidence.NONE,
        "the launch did not take effect: {detail}"),
    # Whether it can go on at all with what is left is decided where offers are known.
    EndReason.OVER_BUDGET: EndTraits(
        JobState.QUEUED, EndKind.FOR_MONEY, Blame.NONE, Counted.NOTHING, EndEvidence.NONE,
        "the job's budget is used up: {detail}"),
    EndReason.BUDGET_PAUSED: EndTraits(
        JobState.QUEUED, EndKind.FOR_MONEY, Blame.NONE, Counted.NOTHING, EndEvidence.NONE,
        "stopped until there is budget again: {detail}"),
    EndReason.WINDOW_CLOSED: EndTraits(
        JobState.QUEUED, EndKind.FOR_TIME, Blame.NONE, Counted.NOTHING, EndEvidence.NONE,
        "its window ends: {detail}"),
    EndReason.MIGRATED: EndTraits(
        JobState.RECOVERING, EndKind.DECIDED, Blame.NONE, Counted.NOTHING, EndEvidence.NONE,
        "the job moves to another machine: {detail}"),
    EndReason.DEADLINE_PASSED: EndTraits(
        JobState.EXPIRED, EndKind.DECIDED, Blame.NONE, Counted.NOTHING, EndEvidence.NONE,
        "its deadline has passed: {detail}"),
    EndReason.MAX_DURATION: EndTraits(
        JobState.EXPIRED, EndKind.DECIDED, Blame.NONE, Counted.NOTHING, EndEvidence.NONE,
        "it ran for as long as it may: {detail}"),
    EndReason.MADE_ROOM: EndTraits(
        JobState.QUEUED, EndKind.FOR_TIME, Blame.NONE, Counted.NOTHING, EndEvidence.NONE,
        "it makes room for a job of higher priority: {detail}"),
    EndReason.PRICE_ROSE: EndTraits(
        JobState.RECOVERING, EndKind.LOST, Blame.NONE, Counted.LAUNCH, EndEvidence.NONE,
        "the machine's price rose above the ceiling: {detail}"),
    EndReason.CANCELLED: EndTraits(
        JobState.CANCELLED, EndKind.DECIDED, Blame.NONE, Counted.NOTHING, EndEvidence.NONE,
        "cancelled by its owner"),
    EndReason.LEASE_EXPIRED: EndTraits(
        JobState.RECOVERING, EndKind.LOST, Blame.NONE, Counted.START, EndEvidence.NONE,
        "the machine had no contact to spotd for too long and ended itself"),
    EndReason.CONTRACT_BROKEN: EndTraits(
        JobState.RECOVERING, EndKind.BROKEN, Blame.HOST, Counted.LAUNCH, EndEvidence.FAULT,
        "the provider did not sell what was asked: {detail}"),
    EndReason.PROVIDER_BALANCE: EndTraits(
        JobState.RECOVERING, EndKind.LOST, Blame.POOL, Counted.LAUNCH, EndEvidence.NONE,
        "the account at the provider ran out of money"),
    EndReason.FLOODED: EndTraits(
        None, EndKind.BROKEN, Blame.HOST, Counted.ERROR, EndEvidence.NONE,
        "the machine wrote more into the checkpoint store than it may: {detail}"),
    EndReason.CODE_ERROR: EndTraits(
        JobState.RECOVERING, EndKind.GIVEN_UP, Blame.HOST_BRIEFLY, Counted.START, EndEvidence.NONE,
        "the job's code could not be unpacked: {detail}"),
    EndReason.INPUT_ERROR: EndTraits(
        JobState.RECOVERING, EndKind.GIVEN_UP, Blame.HOST_BRIEFLY, Counted.START, EndEvidence.NONE,
        "what it reads could not be brought to the machine: {detail}"),
    # Neither the job nor the host is at fault, and a machine that waits for a hub is billed: it ends, a pause follows.
    EndReason.INPUT_AWAY: EndTraits(
        JobState.RECOVERING, EndKind.GIVEN_UP, Blame.NONE, Counted.AWAY, EndEvidence.NONE,
        "the place of its data does not answer: {detail}"),
    EndReason.DISK_FULL: EndTraits(
        JobState.RECOVERING, EndKind.GIVEN_UP, Blame.NONE, Counted.START, EndEvidence.NONE,
        "the disk was full: {detail}"),
    EndReason.NOT_PREPARED: EndTraits(
        JobState.RECOVERING, EndKind.UNBOUGHT, Blame.NONE, Counted.START, EndEvidence.NONE,
        "nothing was rented, the launch cannot be prepared: {detail}"),
    EndReason.FORGOTTEN: EndTraits(
        JobState.RECOVERING, EndKind.GIVEN_UP, Blame.NONE, Counted.NOTHING, EndEvidence.NONE,
        "its owner gave the machine up without seeing its end: {detail}"),
    EndReason.NOT_SENT: EndTraits(
        JobState.RECOVERING, EndKind.UNBOUGHT, Blame.NONE, Counted.NOTHING, EndEvidence.NONE,
        "the launch was not made: {detail}"),
    EndReason.LAUNCH_UNKNOWN: EndTraits(
        JobState.RECOVERING, EndKind.UNBOUGHT, Blame.NONE, Counted.LAUNCH, EndEvidence.NONE,
        "it could not be learned whether the launch took effect: {detail}"),
    # Whether it moves, or has failed, is decided by `[watchdog]` and by how often it has stalled.
    EndReason.STALLED: EndTraits(
        JobState.RECOVERING, EndKind.LOST, Blame.HOST, Counted.LAUNCH, EndEvidence.NONE,
        "the job made no progress: {detail}"),
    EndReason.NOT_HANDED_OVER: EndTraits(
        JobState.RECOVERING, EndKind.GIVEN_UP, Blame.NONE, Counted.LAUNCH, EndEvidence.NONE,
        "the machine of the former job was not handed over: {detail}"),
    EndReason.QUARANTINED: EndTraits(
        JobState.FAILED, EndKind.DECIDED, Blame.NONE, Counted.NOTHING, EndEvidence.NONE,
        "spotd could not go on with it safely: {detail}"),
}  # fmt: skip
"""Every fact of a reason: no other module keeps a set of reasons, and a test searches for one."""
require_rows(EndReason, _END_TRAITS)
