"""Named points at which a test may end the daemon as a power cut would.

The list is closed, so that a test can enumerate it and a point that is reached no more is noticed. Production
passes `never`, which costs a function call.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum


class CrashPoint(StrEnum):
    """Before and after each kind of commit, each provider call and each write to the object store."""

    BEFORE_COMMIT_SUBMIT = "before_commit_submit"
    AFTER_COMMIT_SUBMIT = "after_commit_submit"
    BEFORE_COMMIT_CANCEL = "before_commit_cancel"
    AFTER_COMMIT_CANCEL = "after_commit_cancel"
    BEFORE_COMMIT_RETRY = "before_commit_retry"
    AFTER_COMMIT_RETRY = "after_commit_retry"
    BEFORE_COMMIT_ADOPT = "before_commit_adopt"
    AFTER_COMMIT_ADOPT = "after_commit_adopt"
    BEFORE_COMMIT_CYCLE_LAUNCH = "before_commit_cycle_launch"
    AFTER_COMMIT_CYCLE_LAUNCH = "after_commit_cycle_launch"
    BEFORE_COMMIT_CYCLE_TERMINATE = "before_commit_cycle_terminate"
    AFTER_COMMIT_CYCLE_TERMINATE = "after_commit_cycle_terminate"
    BEFORE_COMMIT_CYCLE_ORDER = "before_commit_cycle_order"
    AFTER_COMMIT_CYCLE_ORDER = "after_commit_cycle_order"
    BEFORE_COMMIT_CYCLE_OTHER = "before_commit_cycle_other"
    AFTER_COMMIT_CYCLE_OTHER = "after_commit_cycle_other"
    BEFORE_COMMIT_LAUNCH_SENT = "before_commit_launch_sent"
    AFTER_COMMIT_LAUNCH_SENT = "after_commit_launch_sent"
    BEFORE_COMMIT_LAUNCHED = "before_commit_launched"
    AFTER_COMMIT_LAUNCHED = "after_commit_launched"
    BEFORE_COMMIT_LAUNCH_REFUSED = "before_commit_launch_refused"
    AFTER_COMMIT_LAUNCH_REFUSED = "after_commit_launch_refused"
    BEFORE_COMMIT_LAUNCH_UNKNOWN = "before_commit_launch_unknown"
    AFTER_COMMIT_LAUNCH_UNKNOWN = "after_commit_launch_unknown"
    BEFORE_COMMIT_TERMINATE_ACCEPTED = "before_commit_terminate_accepted"
    AFTER_COMMIT_TERMINATE_ACCEPTED = "after_commit_terminate_accepted"
    BEFORE_COMMIT_TERMINATE_FAILED = "before_commit_terminate_failed"
    AFTER_COMMIT_TERMINATE_FAILED = "after_commit_terminate_failed"
    BEFORE_OFFERS = "before_offers"
    AFTER_OFFERS = "after_offers"
    BEFORE_INSTANCES = "before_instances"
    AFTER_INSTANCES = "after_instances"
    BEFORE_FIND = "before_find"
    AFTER_FIND = "after_find"
    BEFORE_LAUNCH = "before_launch"
    AFTER_LAUNCH = "after_launch"
    BEFORE_TERMINATE = "before_terminate"
    AFTER_TERMINATE = "after_terminate"
    BEFORE_PUT_RUNNER = "before_put_runner"
    AFTER_PUT_RUNNER = "after_put_runner"
    BEFORE_PUT_SPEC = "before_put_spec"
    AFTER_PUT_SPEC = "after_put_spec"
    BEFORE_PUT_GRANT = "before_put_grant"
    AFTER_PUT_GRANT = "after_put_grant"
    BEFORE_RENEW_GRANT = "before_renew_grant"
    AFTER_RENEW_GRANT = "after_renew_grant"
    BEFORE_SUPERSEDE_GRANT = "before_supersede_grant"
    AFTER_SUPERSEDE_GRANT = "after_supersede_grant"
    BEFORE_WRITE_SECRETS = "before_write_secrets"
    AFTER_WRITE_SECRETS = "after_write_secrets"
    BEFORE_PUT_CODE = "before_put_code"
    AFTER_PUT_CODE = "after_put_code"


CrashPoints = Callable[[CrashPoint], None]
"""Called at each point; returns, or never returns."""


def never(point: CrashPoint) -> None:
    """Nothing happens: the crash points of production."""
