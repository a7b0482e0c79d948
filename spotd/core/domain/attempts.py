"""An attempt: one machine, one try of a job."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final

from spotd.core.domain.bidding import Bidding
from spotd.core.domain.charges import NOTHING, Meter
from spotd.core.domain.freshness import Freshness
from spotd.core.domain.ids import AttemptId
from spotd.core.domain.progress import Watch
from spotd.core.domain.quotes import Quote
from spotd.core.domain.states import AttemptState, EndReason
from spotd_providers.contract.money import MicroUsd, MicroUsdPerGpuHour, MicroUsdPerHour
from spotd_providers.contract.values import AttemptKey, InstanceRef, ProviderName

_ENDS_ITSELF: Final = frozenset({"upload", "done"})
"""Phases of a host whose command has ended."""


class MachineState(StrEnum):
    """What may exist under an attempt's key.

    EXPECTED: the launch may have taken effect. LIVE: it exists and may compute, or wake up and compute. HALTED: the
    provider ends it or accepted its end. GONE: the provider says so.
    """

    EXPECTED = "expected"
    LIVE = "live"
    HALTED = "halted"
    GONE = "gone"

    @property
    def may_compute(self) -> bool:
        return self in {MachineState.EXPECTED, MachineState.LIVE}


@dataclass(frozen=True, slots=True, kw_only=True)
class StopOrder:
    """The order to the runner to save and stop; after `deadline` the machine is ended regardless."""

    reason: EndReason
    detail: str
    ordered_at: datetime
    deadline: datetime
    limit: datetime | None = None
    """Up to when the deadline may move while an upload advances; `None` where it may not."""
    progress: str = ""
    """How far the upload was when the deadline moved last."""
    flush: bool = True
    """Whether it saves once more; not where that upload would cost more than a budget has left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One machine, one try.

    Attributes:
        quote: what was agreed at commit; its total is the price this attempt may not exceed.
        ceiling: the highest that the job accepted for this machine, at commit or since, per GPU.
        ceiling_set: what it accepts since its owner changed that; `ceiling` counts while this is `None`.
        ref: the machine, once the provider named it.
        ever_listed: a complete listing showed the machine; only then can absence mean loss quickly.
        missing_since: first of the consecutive complete listings that lack the machine.
        price_max: GPU part of the whole machine given to the launch call; the bid in a bid market.
        heartbeat_seen_at: when the daemon last saw the heartbeat's sequence number move, by its own clock.
        read_at: the last full read of what this attempt wrote.
        listed_at: the newest listing that showed the machine, while that matters: it starts, or costs too much.
        over_ceiling_at: the first of the consecutive listings whose price is above the ceiling.
        start_deadline: when a machine that never spoke is given up, where that is later than usual; see `starting`.
        uploaded_bytes, restored_bytes: traffic of this attempt that the daemon measured.
        traffic_since, traffic_spent: when it uploaded last, and what then was left of the debt of its uploads.
        bill_tries: how often the provider's own bill was read after the end; -1 once it is read no more.
        bill_read: what it said when it was read last.
        bill_note: why that was not believed, in a sentence; empty where it was, or may be when it says so again.
        billed: what it says, once it was believed.
        full_since: since when its machine has billed in full, without a pause.
        proven_at: the newest instant at which something showed that the machine runs, to within a few minutes.
        watch: what is known of its progress, where its job is watched.
        bidding: the bids for its machine, where a bid is paid.
        freshness: how old its newest checkpoint is, where its job states how often it saves.
        over_since: the first of the consecutive listings which state that the machine is over, or another one.
        notices_lapsed: how many interruption notices did not come true.
        notice_lapsed_at: the instant that the newest of them named.
    """

    id: AttemptId
    key: AttemptKey
    state: AttemptState
    quote: Quote
    ceiling: MicroUsdPerGpuHour
    price_max: MicroUsdPerHour
    intended_at: datetime
    ref: InstanceRef | None = None
    outcome_unknown: bool = False
    launched_at: datetime | None = None
    running_at: datetime | None = None
    ended_at: datetime | None = None
    meter: Meter = field(default_factory=Meter)
    on_demand_settled: MicroUsd = NOTHING
    ever_listed: bool = False
    missing_since: datetime | None = None
    machine: MachineState = MachineState.EXPECTED
    heartbeat_seq: int = -1
    heartbeat_seen_at: datetime | None = None
    read_at: datetime | None = None
    phase: str = ""
    resumed_from: str | None = None
    notice_at: datetime | None = None
    stop: StopOrder | None = None
    end_reason: EndReason | None = None
    end_detail: str = ""
    exit_code: int | None = None
    listed_at: datetime | None = None
    over_ceiling_at: datetime | None = None
    start_deadline: datetime | None = None
    uploaded_bytes: int = 0
    restored_bytes: int = 0
    traffic_since: datetime | None = None
    traffic_spent: MicroUsd = NOTHING
    bill_tries: int = 0
    bill_read: MicroUsd | None = None
    bill_note: str = ""
    billed: MicroUsd | None = None
    full_since: datetime | None = None
    proven_at: datetime | None = None
    save_every: timedelta | None = None
    """How often it is advised to save, where its owner states nothing."""
    account: str = ""
    """At the provider; empty where it does not state one."""
    watch: Watch | None = None
    freshness: Freshness | None = None
    bidding: Bidding = field(default_factory=Bidding)
    ceiling_set: MicroUsdPerGpuHour | None = None
    over_since: datetime | None = None
    notices_lapsed: int = 0
    notice_lapsed_at: datetime | None = None

    @property
    def provider(self) -> ProviderName:
        return self.quote.offer.provider

    @property
    def ceiling_now(self) -> MicroUsdPerGpuHour:
        """What the job accepts to pay for this machine from now on."""
        return self.ceiling if self.ceiling_set is None else self.ceiling_set

    @property
    def ends_itself(self) -> bool:
        """Whether its command has ended, as its host states: it stores what is left, and reports how it ended."""
        return self.phase in _ENDS_ITSELF
