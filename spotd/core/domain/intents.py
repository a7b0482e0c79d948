"""Paid calls that are owed or made, durable before the call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import date, datetime, timedelta
from enum import StrEnum
from typing import Final, NewType, Self

from spotd_providers.contract.values import AttemptKey, InstanceRef, MicroUsd, MicroUsdPerHour, ProviderName

# What names a job, an attempt and an intent.

JobId = NewType("JobId", str)
IntentId = NewType("IntentId", str)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptId:
    """Which try of which job; attempts count from 1."""

    job: JobId
    number: int

    def __hash__(self) -> int:
        return hash(self.job) ^ self.number  # without a tuple: rows are found by it more often than by anything else


# Running cost: what accrues on a meter, and what is settled.

NOTHING: Final = MicroUsd(0)
FREE: Final = MicroUsdPerHour(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meter:
    """Running cost: `settled` is closed and booked, the rest accrues at `rate` since `since`.

    Attributes:
        on_demand_rate: what the same hardware would have cost on-demand over the same time; `None` where unknown.
        until: time is booked up to here and no further, until something shows that the machine exists after it;
            `None` where it bills until its end is confirmed.
        traffic: measured traffic that is not in `settled` yet.
    """

    settled: MicroUsd = NOTHING
    rate: MicroUsdPerHour = FREE
    on_demand_rate: MicroUsdPerHour | None = None
    since: datetime | None = None
    until: datetime | None = None
    traffic: MicroUsd = NOTHING


class ChargePart(StrEnum):
    """What a charge is for.

    DISK: the disk of a machine that does not run. CREDIT: what its provider does not bill, since it took the machine so
    soon. BILL: the difference to the provider's own bill.
    """

    MACHINE = "machine"
    DISK = "disk"
    TRAFFIC = "traffic"
    CREDIT = "credit"
    BILL = "bill"


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """A settled piece of running cost, never across a UTC midnight; or what of it is taken back, which has no length.

    What is taken back is negative, and would have cost on-demand all the same.

    Attributes:
        on_demand: what it would have cost on-demand; `None` where that price was not known at the launch.
        fee: how much of the amount is the marketplace's fee.
    """

    attempt: AttemptId
    provider: ProviderName
    day: date
    start: datetime
    end: datetime
    amount: MicroUsd
    on_demand: MicroUsd | None
    part: ChargePart = ChargePart.MACHINE
    fee: MicroUsd = NOTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSums:
    """What charges add up to: `amount` = gpu + disk + traffic + fee - free + corrected, to the micro-dollar.

    Attributes:
        on_demand: what it would have cost on-demand; where that is not known, what it cost.
        uncompared: what of the amount has no known on-demand price.
        billed: metered time.
        disk: of machines that did not run.
        free: what was taken back because the provider took the machine so soon.
        corrected: what providers' own bills added, which may be negative.
    """

    amount: MicroUsd = NOTHING
    on_demand: MicroUsd = NOTHING
    uncompared: MicroUsd = NOTHING
    billed: timedelta = timedelta(0)
    disk: MicroUsd = NOTHING
    traffic: MicroUsd = NOTHING
    fee: MicroUsd = NOTHING
    free: MicroUsd = NOTHING
    corrected: MicroUsd = NOTHING

    def __add__(self, other: Self) -> Self:
        return type(self)(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    @property
    def booked(self) -> MicroUsd:
        """What was booked before any provider's bill was known."""
        return MicroUsd(self.amount - self.corrected)

    @property
    def gpu(self) -> MicroUsd:
        """What machines cost while they ran, their disk with them, without the fee."""
        return MicroUsd(self.booked + self.free - self.disk - self.traffic - self.fee)


def sums_of(charge: Charge) -> CostSums:
    """Return the sums of one charge."""
    amount, bare = charge.amount, MicroUsd(charge.amount - charge.fee)
    return CostSums(
        amount=amount,
        on_demand=amount if charge.on_demand is None else charge.on_demand,
        uncompared=amount if charge.on_demand is None else NOTHING,
        billed=charge.end - charge.start,
        disk=bare if charge.part is ChargePart.DISK else NOTHING,
        traffic=bare if charge.part is ChargePart.TRAFFIC else NOTHING,
        fee=charge.fee,
        free=MicroUsd(-amount) if charge.part is ChargePart.CREDIT else NOTHING,
        corrected=amount if charge.part is ChargePart.BILL else NOTHING,
    )


def added_up(sums: Sequence[CostSums]) -> CostSums:
    """Return the sum of all; field by field, since there may be very many."""
    nothing = CostSums()
    return CostSums(
        **{f.name: sum((getattr(one, f.name) for one in sums), start=getattr(nothing, f.name)) for f in fields(nothing)}
    )


class IntentKind(StrEnum):
    LAUNCH = "launch"
    TERMINATE = "terminate"
    CHANGE_BID = "change_bid"
    REPLACE = "replace"


class IntentState(StrEnum):
    OPEN = "open"
    """Owed; of a launch: not sent yet, so that it certainly made no machine."""
    SENT = "sent"
    """A launch or a change of a bid whose call is made now, or was when the process ended."""
    UNKNOWN = "unknown"
    """Its answer was lost: only lists and what hosts wrote can settle it."""
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
    """From when on it is to be made; of one that is unknown: what is listed from then on settles it."""
    accepted_at: datetime | None = None
    error: str = ""
    account: str = ""
    """Of the machine at the provider; empty where it does not state one."""
    stray_rate: MicroUsdPerHour = FREE
    """Of a machine that no attempt owns: what it costs per hour, as listed when its end was first owed."""
    stray_since: datetime | None = None
    """Of the same: when it was made, as far as it is known."""
    stray_rose_at: datetime | None = None
    """Of the same: the listing of then states a higher price, which a second one has to state, too."""

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
