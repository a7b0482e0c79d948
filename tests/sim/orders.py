"""What a daemon orders of running machines, and calls for, with what it could know then; kept for the oracles."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Final

from spotd.core.deadlines import due_at
from spotd.core.decide import decide
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.intents import AttemptId, Intent, IntentKind, IntentState, JobId, bid_intent_id
from spotd.core.domain.market import build_offer_index
from spotd.core.domain.plan import Plan
from spotd.core.domain.states import EndReason, JobState
from spotd.core.domain.world import World
from spotd.core.ranking.candidates import ceiling_for
from spotd_providers.contract.values import AttemptKey, Offer, ProviderName, shares, whole_machine

if TYPE_CHECKING:
    from tests.sim.daemon import Daemon

VOLUNTARY: Final = frozenset({EndReason.MIGRATED, EndReason.OUTBID, EndReason.MADE_ROOM, EndReason.STALLED})
"""Why a machine is stopped that its provider would leave to us."""
FLIP: Final = (JobState.WAITING_PRICE, JobState.QUEUED)
"""Without a launch in between."""


@dataclass(frozen=True, kw_only=True)
class Ordered:
    """One voluntary order to stop, and the circumstances.

    Attributes:
        store_away_since: since when the store could not be read or written.
        provider_away_since: since when the machine's provider was away, as the daemon knew.
        bid_at: when its bid was changed last, a change under way included.
        is_bid_open: whether a change of its bid was under way.
        is_of_one_page: a leap that one page alone has stated leads to the order.
        is_well: it computed at that moment.
        held_since: since when it was waited for as an outbid machine, by the clock of the daemon.
        target: the machine for which it was to stop, where it is known.
    """

    at: datetime
    attempt: AttemptId
    key: AttemptKey
    reason: EndReason
    detail: str
    store_away_since: datetime | None
    provider_away_since: datetime | None
    bid_at: datetime | None
    is_bid_open: bool
    is_of_one_page: bool
    is_well: bool
    held_since: datetime | None
    target: str


@dataclass(frozen=True, kw_only=True)
class PaidCall:
    """A launch or a bid, at the moment of the call, and what its owner allowed at that moment."""

    at: datetime
    key: AttemptKey
    price: int
    most: int
    """Per hour with disk and fee, by the fee in force."""
    ceiling: int
    refused: str
    """Why it must not be made at all: its provider is switched off, or the day's budget is used up."""


class Orders:
    """Filled by the daemon of the simulator as it commits and calls."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self.stops: list[Ordered] = []
        self.calls: list[PaidCall] = []
        self.for_price: list[tuple[datetime, AttemptId, str, int]] = []
        """When which machine was ordered to stop for its price, why, and what its job accepted at that moment."""
        self.overdue: list[tuple[JobId, AttemptKey, datetime, datetime]] = []
        """What was bought for a job that was due by then, with both instants by the clock of that moment."""
        self.ceilings: list[tuple[datetime, int]] = []
        """What the config accepts per GPU-hour, and from when on, where a world changes it."""
        self.bids: defaultdict[AttemptKey, list[datetime]] = defaultdict(list)
        """When changes of bids were decided."""
        self.flips: defaultdict[JobId, list[datetime]] = defaultdict(list)
        """When a job that waited for a price waited for its turn again."""
        self.pages: dict[ProviderName, tuple[Offer, ...]] = {}
        """What the newest page would have stated, where it has leapt and the one before had not leapt the same way."""
        self._leaps: dict[ProviderName, bool] = {}
        """Whether the newest page leapt upwards, where it leapt."""
        self.opened: Callable[[str], None] = lambda _what: None
        """After something was begun during which a setting may change."""

    # --- what is read ---

    def note_page(self, name: ProviderName, offers: tuple[Offer, ...], unleapt: tuple[Offer, ...] | None) -> None:
        """A page as the daemon reads it, and what it would have stated, had it not leapt."""
        before = self._leaps.pop(name, None)
        self.pages.pop(name, None)
        if unleapt and offers:
            right = {one.offer_id: one.gpu_price for one in unleapt}
            is_up = self._leaps[name] = any(one.gpu_price > right.get(one.offer_id, one.gpu_price) for one in offers)
            if is_up is not before:  # else two readings have stated the same, and that is all a daemon can ask for
                self.pages[name] = unleapt

    # --- what is decided ---

    def note(self, before: World, plan: Plan, after: World) -> None:
        true = self._daemon.true
        for intent in plan.intents.values():
            if intent.state is IntentState.OPEN and intent.id not in before.intents:
                self._note_intent(intent, true)
                self._note_overdue(intent, plan, after)
        for identity, job in plan.jobs.items():
            former = before.jobs.get(identity)
            if former is not None and (former.state, job.state) == FLIP:
                self.flips[identity].append(true)
        stopped = [
            item
            for i, item in plan.attempts.items()
            if item.stop is not None and i in before.attempts and before.attempts[i].stop is None
        ]
        # One that is held bills its disk, and is left for what it would cost again.
        runs = [item for item in stopped if item.bidding.held_since is None]
        dear = [(item, item.stop) for item in runs if item.stop and item.stop.reason is EndReason.PRICE_ROSE]
        self.for_price.extend((true, i.id, stop.detail, self._accepted(i, after)) for i, stop in dear)
        chosen = [item for item in stopped if item.stop is not None and item.stop.reason in VOLUNTARY]
        if chosen:
            fooled = self._of_one_page(before, chosen)
            self.stops.extend(self._ordered(item, after, is_of_one_page=item.id in fooled) for item in chosen)
        for i, item in plan.attempts.items():
            former_item = before.attempts.get(i)
            if item.bidding.held_since is not None and (former_item is None or former_item.bidding.held_since is None):
                self.opened("hold")
        if any(item.stop is not None and item.stop.reason is EndReason.MIGRATED for item in chosen):
            self.opened("move")

    def _accepted(self, item: Attempt, after: World) -> int:
        offer, limit = item.quote.offer, after.jobs[item.id.job].spec.price
        ceiling = ceiling_for(offer.gpu, offer.gpu_count, limit, self._daemon.policy.current)
        return 0 if ceiling is None else whole_machine(ceiling, shares(offer.gpu_count))

    def _note_overdue(self, intent: Intent, plan: Plan, after: World) -> None:
        item = None if intent.attempt is None else plan.attempts.get(intent.attempt)
        if intent.kind is IntentKind.LAUNCH and item is not None:
            due = due_at(after.jobs[item.id.job])
            if due is not None and item.intended_at >= due:
                self.overdue.append((item.id.job, item.key, item.intended_at, due))

    def _note_intent(self, intent: Intent, true: datetime) -> None:
        if intent.kind is IntentKind.CHANGE_BID:
            self.bids[intent.key].append(true)
            self.opened("bid")
        elif intent.kind is IntentKind.LAUNCH:
            self.opened("launch")

    def _ordered(self, item: Attempt, after: World, *, is_of_one_page: bool) -> Ordered:
        daemon, stop = self._daemon, item.stop
        assert stop is not None
        m = daemon.machine_of(item)
        cloud = daemon.clouds[item.provider]
        known = daemon.process.offer_cache.machines(item.provider)
        since = known.error_since if known.error and (cloud.down or cloud.dead) else None
        change = after.intents.get(bid_intent_id(item.key))
        job = after.jobs[item.id.job]
        is_move = stop.reason is EndReason.MIGRATED and job.moves.attempt == item.id.number
        return Ordered(
            at=daemon.true,
            attempt=item.id,
            key=item.key,
            reason=stop.reason,
            detail=stop.detail,
            store_away_since=daemon.store_away_since,
            provider_away_since=None if since is None else since - daemon.off,
            bid_at=max(self.bids[item.key], default=None),
            is_bid_open=change is not None and change.is_open,
            is_of_one_page=is_of_one_page,
            is_well=m is not None and m.alive and not m.dumb and (m.exit_at is None or m.exit_at > daemon.true),
            held_since=None if item.bidding.held_since is None else item.bidding.held_since - daemon.off,
            target=job.moves.host if is_move else "",
        )

    def _of_one_page(self, before: World, stopped: Iterable[Attempt]) -> frozenset[AttemptId]:
        """Those that are stopped by this market, and would not be without the leaps of newest pages."""
        if not self.pages:
            return frozenset()
        daemon = self._daemon
        market = daemon.process.offer_cache.snapshot()
        offers = dict(market.by_provider)
        for name, rows in self.pages.items():
            offers[name] = replace(offers[name], offer_index=build_offer_index(rows))
        with_leap = _stopped(decide(before, market, daemon.now).attempts)
        without = _stopped(decide(before, replace(market, by_provider=offers), daemon.now).attempts)
        return frozenset(item.id for item in stopped) & with_leap - without

    # --- what is called ---

    def note_call(self, key: AttemptKey, offer: Offer, price: int, disk_gb: int, *, former: int = 0) -> None:
        """A launch, or a bid in place of a former one; a lower bid is always allowed."""
        daemon = self._daemon
        if former >= price:
            return
        policy, job = daemon.policy.current, daemon.world.jobs.get(JobId(key.split("-")[-2]))
        rules, limit = policy.providers[offer.provider], None if job is None else job.spec.price
        ceiling = None if job is None else ceiling_for(offer.gpu, offer.gpu_count, limit, policy)
        if ceiling is None:
            return
        disk = -(-offer.storage_price * disk_gb // 720)
        spent = daemon.world.spent_by_day.get(daemon.now.date(), 0)
        is_off = "" if former else rules.unusable
        # An own machine may cost nothing, which every budget carries.
        over = policy.budget_day is not None and spent >= policy.budget_day and offer.gpu_price + disk > 0
        self.calls.append(
            PaidCall(
                at=daemon.true,
                key=key,
                price=price,
                most=-(-(price + disk) * rules.fee_ppm // 1_000_000),
                ceiling=whole_machine(ceiling, shares(offer.gpu_count)),
                refused=is_off or ("the budget of the day is used up" if over else ""),
            )
        )


def _stopped(attempts: Mapping[AttemptId, Attempt]) -> frozenset[AttemptId]:
    return frozenset(i for i, item in attempts.items() if item.stop is not None)
