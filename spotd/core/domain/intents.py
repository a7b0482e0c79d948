"""Paid calls that are owed or made, durable before the call."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from spotd.core.domain.charges import FREE
from spotd.core.domain.ids import AttemptId, IntentId
from spotd_providers.contract.money import MicroUsdPerHour
from spotd_providers.contract.values import AttemptKey, InstanceRef, ProviderName


class IntentKind(StrEnum):
    LAUNCH = "launch"
    TERMINATE = "terminate"
    CHANGE_BID = "change_bid"


class IntentState(StrEnum):
    OPEN = "open"
    """Owed; of a launch: not sent yet, so that it certainly made no machine."""
    SENT = "sent"
    """A launch or a change of a bid whose call is made now, or was when the process ended."""
    UNKNOWN = "unknown"
    ACCEPTED = "accepted"
    """The provider took a terminate order; the machine is not yet seen to be gone."""
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """A paid call we owe or have made; durable before the call."""

    id: IntentId
    kind: IntentKind
    provider: ProviderName
    key: AttemptKey
    state: IntentState
    created_at: datetime
    attempt: AttemptId | None
    ref: InstanceRef | None = None
    tries: int = 0
    not_before: datetime | None = None
    accepted_at: datetime | None = None
    error: str = ""
    account: str = ""
    """Of the machine at the provider; empty where it does not state one."""
    stray_rate: MicroUsdPerHour = FREE
    """Of a machine that no attempt owns: what it costs per hour, as listed when its end was first owed."""
    stray_since: datetime | None = None
    """Of the same: when it was made, as far as it is known."""

    @property
    def is_open(self) -> bool:
        return self.state not in {IntentState.DONE, IntentState.FAILED}


def launch_intent_id(key: AttemptKey) -> IntentId:
    return IntentId(f"launch:{key}")


def terminate_intent_id(ref: InstanceRef) -> IntentId:
    return IntentId(f"terminate:{ref.provider}:{ref.scope}:{ref.instance_id}")


def bid_intent_id(key: AttemptKey) -> IntentId:
    """Return the one id that all changes of a machine's bid have: there is one at a time."""
    return IntentId(f"bid:{key}")
