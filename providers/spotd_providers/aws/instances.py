"""From rows of DescribeInstances, and their spot requests, to instances."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Final

from spotd_providers.aws.offers import PROVIDER
from spotd_providers.aws.wire import INSTALL_TAG, KEY_TAG, AwsInstanceRow, SpotRequestRow
from spotd_providers.contract.money import MicroUsdPerHour
from spotd_providers.contract.values import (
    AttemptKey,
    Billing,
    InstallId,
    Instance,
    InstanceId,
    InstanceRef,
    InstanceState,
    Loss,
    Market,
)
from spotd_providers.kit.keys import key_of
from spotd_providers.kit.text import clean

NOTICE: Final = timedelta(minutes=2)
STATES: Final[Mapping[str, InstanceState]] = {
    "pending": InstanceState.PENDING,
    "running": InstanceState.RUNNING,
    "shutting-down": InstanceState.ENDING,
    "terminated": InstanceState.GONE,
    "stopping": InstanceState.PAUSED,
    "stopped": InstanceState.PAUSED,
}
# On an interruption the request says so at once, while the machine still runs for two minutes.
ANNOUNCED: Final = frozenset(
    {
        "marked-for-termination",
        "marked-for-stop",
        "instance-terminated-no-capacity",
        "instance-terminated-by-price",
        "instance-terminated-by-service",
        "instance-terminated-by-schedule",
        "instance-terminated-launch-group-constraint",
        "instance-stopped-no-capacity",
        "instance-stopped-by-price",
    }
)
BY_PRICE: Final = frozenset({"instance-terminated-by-price", "instance-stopped-by-price"})
LOSSES: Final[Mapping[str, Loss]] = {
    "Server.SpotInstanceTermination": Loss.PREEMPTED,
    "Server.SpotInstanceShutdown": Loss.PREEMPTED,
    "Client.InstanceInitiatedShutdown": Loss.SELF,
    "Server.InsufficientInstanceCapacity": Loss.PROVISION_FAILED,
    "Client.VolumeLimitExceeded": Loss.PROVISION_FAILED,
    "Client.InvalidSnapshot.NotFound": Loss.PROVISION_FAILED,
    "Client.InternalError": Loss.PROVISION_FAILED,
    "Server.InternalError": Loss.HOST_LOST,
    "Server.ScheduledStop": Loss.HOST_LOST,
}
_BILLED: Final = {
    InstanceState.PENDING: Billing.DISK,
    InstanceState.RUNNING: Billing.FULL,
    InstanceState.PAUSED: Billing.DISK,
}
_WHEN: Final = re.compile(r"\((\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.\d+)?(?: GMT|Z)\)\s*$")
"""The instant at the end of a transition's reason: `User initiated (2026-03-02 12:00:00 GMT)`."""
_RUNS: Final = frozenset({InstanceState.PENDING, InstanceState.RUNNING, InstanceState.UNKNOWN})


def key_in(row: AwsInstanceRow, install: InstallId) -> AttemptKey | None:
    """Return the key in the machine's tags, or in its launch's token while the tags are not visible yet."""
    tags = row.tags
    if tags.get(INSTALL_TAG, install) != install:
        return None
    return key_of(tags.get(KEY_TAG) or row.ClientToken, install)


def as_instance(
    row: AwsInstanceRow,
    key: AttemptKey,
    *,
    region: str,
    request: SpotRequestRow | None,
    prices: Mapping[tuple[str, str], MicroUsdPerHour],
    announced_at: datetime | None = None,
) -> Instance:
    """Translate a row to a machine. An undocumented state is unknown, never gone.

    `announced_at` is when we first saw an announced interruption, for one whose own time cannot be read.
    """
    state = STATES.get(row.State.Name, InstanceState.UNKNOWN) if row.State is not None else InstanceState.UNKNOWN
    code = request.Status.Code if request is not None else ""
    zone = row.Placement.AvailabilityZone if row.Placement is not None else ""
    decided_at = announced_at
    if request is not None and request.Status.UpdateTime is not None:
        decided_at = request.Status.UpdateTime.astimezone(UTC)
    notice_at = decided_at + NOTICE if decided_at is not None and is_announced(row, request) else None
    spot = row.InstanceLifecycle == "spot"
    return Instance(
        ref=InstanceRef(provider=PROVIDER, instance_id=InstanceId(row.InstanceId), scope=region),
        key=key,
        state=state,
        market=Market.SPOT if spot else Market.ON_DEMAND,
        price=prices.get((row.InstanceType or "", zone)) if spot else None,
        created_at=row.LaunchTime.astimezone(UTC) if row.LaunchTime is not None else None,
        notice_at=notice_at,
        loss=None if state in _RUNS else _loss(row, code),
        detail=clean(" ".join(part for part in (_said(row), code) if part)),
        billing=_BILLED.get(state, Billing.UNKNOWN),
        ended_at=None if state in _RUNS else _ended_at(row, request),
    )


def is_announced(row: AwsInstanceRow, request: SpotRequestRow | None) -> bool:
    """Whether EC2 has said that it takes this machine, which still runs."""
    state = STATES.get(row.State.Name, InstanceState.UNKNOWN) if row.State is not None else InstanceState.UNKNOWN
    return state in _RUNS and request is not None and request.Status.Code in ANNOUNCED


def _ended_at(row: AwsInstanceRow, request: SpotRequestRow | None) -> datetime | None:
    """When it stopped, as its last transition states it, or the end of its spot request by EC2."""
    found = _WHEN.search(row.StateTransitionReason or "")
    if found is not None:
        try:
            return datetime.fromisoformat(f"{found[1]}T{found[2]}+00:00")
        except ValueError:
            return None
    if request is not None and request.Status.Code.startswith(("instance-terminated-", "instance-stopped-")):
        at = request.Status.UpdateTime
        return None if at is None or at.tzinfo is None else at.astimezone(UTC)
    return None


def _loss(row: AwsInstanceRow, code: str) -> Loss | None:
    reason = row.StateReason
    if reason is None or not reason.Code:
        return Loss.PREEMPTED if code in ANNOUNCED else None
    if reason.Code == "Server.InternalError" and "launch" in reason.Message.lower():
        return Loss.PROVISION_FAILED
    loss = LOSSES.get(reason.Code)
    if loss is None and reason.Code.startswith("Server.SpotInstance"):
        loss = Loss.PREEMPTED
    return Loss.OUTBID if loss is Loss.PREEMPTED and code in BY_PRICE else loss


def _said(row: AwsInstanceRow) -> str:
    if row.StateReason is not None and row.StateReason.Message:
        return row.StateReason.Message
    return row.StateTransitionReason or ""
