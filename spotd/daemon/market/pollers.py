"""One poller per provider: what it sells, and which of our machines it lists, each at its own pace.

Theory. Pollers share nothing but the offer cache, so one that hangs delays no other. Every call has a deadline in
seconds of the wall, whatever the daemon's clock shows. A listing is dated by the moment it was asked
for, not answered: a machine bought in between is then never taken for missing.

Machines are listed more often than offers where we have or may have any, since a loss may be seen nowhere else, and
otherwise by a slow sweep (the first at once), so that a machine that the state lacks is found however it came to be. A
request to list them at once (a heartbeat is late, a launch is unknown) is granted after a few seconds at the earliest,
which bounds the requests however often it comes. A launch whose outcome is unknown is searched by its key besides,
because a provider's list may lag behind its search.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from random import Random
from typing import Final, TypeVar

import anyio

from spotd.daemon.commits import CrashPoint, CrashPoints
from spotd.daemon.controllers import INTERVAL_MIN_S, Controller, Pause, backoff_s
from spotd.daemon.market.guarded import guarded, no_gangs, nodes_max
from spotd.daemon.market.offer_cache import CauseWatch, OfferCache
from spotd_providers.contract.errors import AuthFailed, ProviderError, RateLimited, Unavailable
from spotd_providers.contract.provider import Clock, KnowsAccount, Logger, Provider, ProviderTraits
from spotd_providers.contract.values import AttemptKey, Instance, Listing, OfferQuery, Power, ProviderName

# How many requests one provider gets, so that a person can hold it against the provider's limits.


HOUR: Final = timedelta(hours=1)
MINUTE: Final = timedelta(minutes=1)
SAMPLES_MAX: Final = 4_000
"""More than an hour's polls at the shortest pace; older ones leave first."""


class HourlyRate:
    """The counts of the last hour, from samples of a number that only rises while the provider is open."""

    def __init__(self) -> None:
        self._samples: deque[tuple[datetime, int]] = deque(maxlen=SAMPLES_MAX)
        self._since: datetime | None = None
        self._before = 0

    def note(self, total: int, *, at: datetime) -> None:
        """So many requests were sent since the provider was opened."""
        sent = total - self._before if total >= self._before else total
        self._before = total
        if self._since is None:
            self._since = at
        if self._samples and at < self._samples[-1][0]:
            # The clock was set back: what was counted before cannot be dated any more.
            self._samples.clear()
            self._since = at
        self._samples.append((at, sent))
        while self._samples and at - self._samples[0][0] >= HOUR:
            self._samples.popleft()

    @property
    def total(self) -> int:
        """Return the requests since the provider was opened."""
        return self._before

    def last_minute(self, now: datetime) -> int:
        """Return the requests of the last minute."""
        return sum(sent for at, sent in self._samples if now - at < MINUTE)

    def per_hour(self, now: datetime) -> int:
        """Return the requests of the last hour; before one has passed, as many as there would be at the pace so far."""
        counted = sum(sent for at, sent in self._samples if now - at < HOUR)
        if self._since is None or now - self._since >= HOUR:
            return counted
        return round(counted * (HOUR / max(now - self._since, MINUTE)))


T = TypeVar("T")

READ_DEADLINE_S: Final = 60.0
"""A slow provider may take half a minute for a page; beyond this it counts as away."""
SWEEP_EVERY: Final = timedelta(minutes=10)
MACHINES_EVERY: Final = timedelta(seconds=12)
"""A machine that is gone bills a replacement's wait, and its list is one request at most providers."""
MACHINES_GAP: Final = timedelta(seconds=4)
"""Least time between two lists, whatever asks for the second: fifteen a minute at most."""
MACHINES_REST_MAX: Final = timedelta(minutes=5)
"""However long a provider asks not to be called, its machines bill meanwhile: they are listed so often all the same."""
BACKOFF_MAX: Final = 4
JITTER: Final = 0.1
"""Providers must not be asked in step. The pace is a promise, so its pauses are only made shorter; what a failing
provider is given as a rest is only made longer."""
NEWS_EVERY: Final = timedelta(seconds=5)
"""So often a provider that was asked for some GPUs only is held against what the queue needs now."""
AUTH_PAUSE: Final = timedelta(seconds=50)
"""A refused key is asked about within a minute, so that no job waits once it is taken again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PollPace:
    """How often one provider is asked."""

    poll_every: timedelta
    machines_every: timedelta = MACHINES_EVERY
    offers_every_min: timedelta = timedelta(0)
    machines_every_min: timedelta = timedelta(0)
    sweep_every: timedelta = SWEEP_EVERY
    deadline_s: float = READ_DEADLINE_S

    @property
    def machines(self) -> timedelta:
        """From one list of the machines to the next while any lives."""
        return max(min(self.machines_every, self.poll_every), self.machines_every_min)

    @property
    def machines_gap(self) -> timedelta:
        """The same when a list is asked for."""
        return max(min(MACHINES_GAP, self.machines), self.machines_every_min)


class Poller:
    """Keeps the offers and the machines of one provider current while its controllers run."""

    def __init__(
        self,
        provider: Provider,
        *,
        offer_cache: OfferCache,
        clock: Clock,
        rng: Random,
        log: Logger,
        pace: PollPace,
        query: Callable[[], OfferQuery],
        crash: CrashPoints,
        account_known: Callable[[ProviderName, str], None] = lambda _name, _account: None,
    ) -> None:
        self._account_known = account_known
        self._provider = guarded(provider, clock=clock, log=log)
        self._knows_account = self._provider if isinstance(self._provider, KnowsAccount) else None
        self.name: ProviderName = self._provider.name
        self._offer_cache = offer_cache
        causes = CauseWatch(self._provider, offer_cache=offer_cache, clock=clock, ask_again=self.ask_again)
        self._clock = clock
        self._rng = rng
        self._log = log
        self._query = query
        self._crash = crash
        self._offers_failures = 0
        self._machines_failures = 0
        self._listing_done = anyio.Event()
        self._asked_for = OfferQuery()
        self.request_counts = HourlyRate()
        self.pace = pace
        self.offers = Controller(
            f"offers-{self.name}", self.poll_offers, interval_s=clock.real_seconds(pace.poll_every)
        )
        self.machines = Controller(
            f"machines-{self.name}", self.poll_machines, interval_s=clock.real_seconds(pace.machines)
        )
        self.controllers = (causes.controller, self.offers, self.machines)

    def list_again(self) -> None:
        """Have the machines listed as soon as the provider may be asked."""
        self.machines.wake_event.notify()

    def ask_again(self) -> None:
        """Have the offers listed as soon as the provider may be asked."""
        self.offers.wake_event.notify()

    async def first_listing(self, *, deadline_s: float) -> None:
        """Return when the machines were listed once, successfully or not, or at the deadline."""
        with anyio.move_on_after(deadline_s):
            await self._listing_done.wait()

    async def poll_offers(self) -> Pause:
        """Take the newest answer into the offer cache, or what is wrong."""
        asked_at = self._clock.now()
        self._crash(CrashPoint.BEFORE_OFFERS)
        self._offer_cache.offers_asked(self.name, at=asked_at)
        try:
            query = self._asked_for = self._query()
            page = await self._ask(lambda: self._provider.offers(query))
        except ProviderError as exc:
            self._offers_failures += 1
            self._offer_cache.offers_failed(self.name, _sentence(exc), at=asked_at)
            self._went_away("offers", exc, asked_at)
            return self._pause_offers(
                self._after_failure(exc, self._offers_failures, self.pace.poll_every), _sentence(exc)
            )
        finally:
            self._note_requests()
            self._offer_cache.offers_answered(self.name, at=self._clock.now())
        self._crash(CrashPoint.AFTER_OFFERS)
        self._offers_failures = 0
        self._offer_cache.offers_seen(
            self.name,
            page,
            asked_at=asked_at,
            sells_spot=self._has(Power.SPOT),
            changes_bids=self._has(Power.BID_CHANGE),
            no_gangs=no_gangs(self._provider),
            nodes_max=nodes_max(self._provider),
        )
        self._came_back()
        return self._pause_offers(max(self._at_pace(self.pace.poll_every), self.pace.offers_every_min))

    def _has(self, power: Power) -> bool:
        found = self._provider.capabilities.get(power)
        return found is not None and found.available

    async def poll_machines(self) -> Pause:
        """Take the newest listing into the offer cache, or what is wrong."""
        asked_at = self._clock.now()
        wanted = self._offer_cache.wanted.get(self.name, frozenset())
        self._crash(CrashPoint.BEFORE_INSTANCES)
        try:
            await self._learn_account()
            listing = await self._ask(self._provider.instances)
            self._crash(CrashPoint.AFTER_INSTANCES)
            listing, found = await self._with_searched(listing, wanted)
        except ProviderError as exc:
            self._machines_failures += 1
            self._offer_cache.machines_failed(self.name, _sentence(exc), at=asked_at)
            self._went_away("instances", exc, asked_at)
            wait = self._after_failure(exc, self._machines_failures, self.pace.machines)
            wait = min(wait, MACHINES_REST_MAX) if isinstance(exc, RateLimited) else wait
            return self._pause_machines(wait, _sentence(exc), is_rest=isinstance(exc, RateLimited | AuthFailed))
        finally:
            self._note_requests()
            self._listing_done.set()
        self._machines_failures = 0
        self._offer_cache.machines_listed(self.name, _merge(listing, found, asked_at))
        self._came_back()
        return self._pause_machines(self._at_pace(self.pace.machines))

    async def _learn_account(self) -> None:
        """Ask once whose machines the listings show, before the first of them is believed."""
        if self._knows_account is None:
            return
        try:
            account = await self._ask(self._knows_account.account)
        except (Unavailable, RateLimited):
            raise
        except ProviderError:
            account = ""  # the key may list machines and not ask this, or the plugin fails: then nothing is known
        self._account_known(self.name, account)
        self._knows_account = None

    async def _with_searched(self, listing: Listing, wanted: frozenset[AttemptKey]) -> tuple[Listing, list[Instance]]:
        """Return what the search by key shows besides; where a search fails, the list still shows what it shows."""
        found: list[Instance] = []
        for key in sorted(wanted):
            try:
                found += await self._find(key)
            except ProviderError as exc:
                self._log.warning("provider.search_failed", provider=self.name, key=key, error=_sentence(exc))
                return replace(listing, complete=False), found
        return listing, found

    async def _find(self, key: AttemptKey) -> tuple[Instance, ...]:
        self._crash(CrashPoint.BEFORE_FIND)
        found = await self._ask(lambda: self._provider.find(key))
        self._crash(CrashPoint.AFTER_FIND)
        return found

    async def _ask(self, call: Callable[[], Awaitable[T]]) -> T:
        try:
            with anyio.fail_after(self.pace.deadline_s):
                return await call()
        except TimeoutError as exc:
            raise _Silent(f"no answer within {self.pace.deadline_s:.0f} s") from exc

    def _pause_offers(self, wait: timedelta, error: str = "") -> Pause:
        """Pause until the next poll. A new job ends it where the newest answer did not hold the whole market."""
        gap = min(self.pace.offers_every_min, wait)
        page = self._offer_cache.page(self.name)
        is_narrow = page is not None and bool(page.whole or not page.complete) and not error
        return Pause(
            gap_s=self._clock.real_seconds(gap),
            seconds=self._real_pause(wait - gap) if wait > gap else 0.0,
            is_over=(lambda: _wants_more(self._query(), self._asked_for)) if is_narrow else None,
            asked_every_s=self._real_pause(NEWS_EVERY),
            error=error,
        )

    def _pause_machines(self, wait: timedelta, error: str = "", *, is_rest: bool = False) -> Pause:
        """Pause until the next listing; where nothing of ours can be, only the sweep or a request ends it.

        Args:
            is_rest: the provider asked for a rest, or refuses the key: no request to list shortens it.
        """
        gap = wait if is_rest else min(self.pace.machines_gap, wait)
        rest = wait - gap
        if self.name not in self._offer_cache.watched and not error:
            rest = max(rest, self.pace.sweep_every)
        return Pause(gap_s=self._real_pause(gap), seconds=self._real_pause(rest), error=error)

    def _note_requests(self) -> None:
        self.request_counts.note(self._provider.requests_sent, at=self._clock.now())

    def _real_pause(self, wait: timedelta) -> float:
        return max(INTERVAL_MIN_S, self._clock.real_seconds(wait))

    def _at_pace(self, every: timedelta) -> timedelta:
        return every * (1 - JITTER * self._rng.random())

    def _after_failure(self, failure: ProviderError, failures: int, every: timedelta) -> timedelta:
        most_s = max(every, self.pace.poll_every * BACKOFF_MAX).total_seconds()
        wait = timedelta(seconds=backoff_s(every.total_seconds(), failures, max_s=most_s))
        if isinstance(failure, RateLimited):
            wait = max(every, failure.retry_after)
        elif isinstance(failure, AuthFailed):
            wait = max(every, AUTH_PAUSE)
        return wait * (1 + JITTER * self._rng.random())

    def _went_away(self, call: str, failure: ProviderError, at: datetime) -> None:
        if self._offer_cache.note_away(self.name, _sentence(failure), at=at):
            self._log.warning("provider.away", provider=self.name, call=call, error=_sentence(failure))

    def _came_back(self) -> None:
        if self._offers_failures or self._machines_failures:
            return
        if self._offer_cache.note_back(self.name, at=self._clock.now()):
            self._log.info("provider.back", provider=self.name)


class _Silent(ProviderError):
    """No usable answer: treated like every other way of being away."""


def _wants_more(now: OfferQuery, asked: OfferQuery) -> bool:
    """Whether a job waits for what the last answer was not asked for."""
    return (
        not set(now.gpus) <= set(asked.gpus)
        or (bool(asked.gpu_counts) and not set(now.gpu_counts) <= set(asked.gpu_counts))
        or (now.vram_mb_min is not None and (asked.vram_mb_min is None or now.vram_mb_min < asked.vram_mb_min))
        or now.disk_gb > asked.disk_gb
    )


def _sentence(failure: ProviderError) -> str:
    return str(failure) or type(failure).__name__


def _merge(listing: Listing, found: list[Instance], asked_at: datetime) -> Listing:
    """Return the listing dated by its question, with machines that only the search by key showed."""
    listed = {machine.ref for machine in listing.instances}
    more = {machine.ref: machine for machine in found if machine.ref not in listed}
    return replace(listing, at=asked_at, instances=listing.instances + tuple(more.values()))


# What is known of one provider of the config, whether it opened or not.


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderEntry:
    """One provider of the config. `provider` is `None` for one that is disabled or did not open: see `last_error`."""

    name: ProviderName
    title: str
    enabled: bool
    fee_ppm: int
    provider: Provider | None = None
    poller: Poller | None = None
    traits: ProviderTraits | None = None
    last_error: str = ""
