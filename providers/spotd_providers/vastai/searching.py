"""The search for the offers that the queue needs, in a market that shows 64 of them per search.

Theory. Since June 2026 a search holds at most 64 rows, whatever `limit` asks and without a second page; with a key it
sometimes holds all. So the whole market is asked for first. An answer that may be cut off begins a time of narrow
searches: one per market and GPU that a job waits for, then a few of those that only a ceiling names, in turn. Each goes
on by a cursor: the next search asks for prices from the last one on, and rows that were seen are dropped. Where one
price fills more than a page, it is walked through by the machines' ids.

An answer may be cut off if it holds as many rows as a known cap. The cap may change: a GPU that jobs wait for and that
the answer lacks is asked for by its name, too, and where that finds it, the number of rows was a cap.

Searches are counted by vast.ai, so a poll has a budget of them. What it does not reach is shown as it was, for some
minutes; the page says which GPUs it holds all offers of, and is complete only if this poll read all it was asked for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

from spotd_providers.contract.errors import ProviderError, Unavailable
from spotd_providers.contract.provider import Clock
from spotd_providers.contract.values import Market, OfferQuery, Rejected
from spotd_providers.vastai.offers import names_of, search_body
from spotd_providers.vastai.wire import OfferRow, OfferRows, VastSettings

ROWS_CAP: Final = 64
_PAGE_SIZES: Final = frozenset({ROWS_CAP, 50, 100, 128, 200, 250, 256, 500, 512, 1000, 1024, 2000, 2048})
"""Counts of rows that may be a limit of the service's own, which may change again."""
SEARCHES_PER_POLL: Final = 6
"""Of the eight a minute that the client allows itself: the others are for `doctor` and for a poll that comes early."""
WATCHED_PER_POLL: Final = 1
"""GPUs that no job waits for are asked for in turn, so many in each poll."""
CARRY: Final = timedelta(minutes=4)
"""What the budget of a poll did not reach is shown as it was for so long at most."""
PROBE_POLLS: Final = 60
"""After so many polls of narrow searches the whole market is asked for once more: the cap may be gone."""
ABSENT_EVERY: Final = timedelta(minutes=10)
"""A GPU that jobs wait for and that an answer of the whole market lacks is asked for by its name so often: if it is
sold, the answer was cut off at an unknown number of rows."""
ABSENT_PER_POLL: Final = 2
BARREN_MAX: Final = 2
PRICE_STEP: Final = 1e-6
"""Prices that differ by less are one: they come as decimal text and are compared as floats."""

Search = Callable[[Mapping[str, Any]], Awaitable[OfferRows]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchGroup:
    """The purpose of one narrow search. No names stand for any GPU."""

    gpus: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    counts: tuple[int, ...] = ()
    vram_mb_min: int | None = None

    def holds(self, row: OfferRow) -> bool:
        """Whether a search for this group would show the row."""
        return row.gpu_name in self.names and (not self.counts or row.num_gpus in self.counts)

    def narrow(self, body: Mapping[str, Any]) -> dict[str, Any]:
        more: dict[str, Any] = {}
        if self.names:
            more["gpu_name"] = {"in": list(self.names)}
        if self.counts:
            more["num_gpus"] = {"in": list(self.counts)}
        if self.vram_mb_min:
            more["gpu_ram"] = {"gte": float(self.vram_mb_min)}
        return {**body, **more}


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The rows of each market, and how much of it they are.

    Attributes:
        whole: GPUs and counts (0 for any) of which these are all offers; empty together with `complete`: of all GPUs.
    """

    rows: Mapping[Market, Sequence[OfferRow]]
    rejected: tuple[Rejected, ...]
    complete: bool
    whole: frozenset[tuple[str, int]] = frozenset()
    note: str = ""


def is_cut(count: int, limit: int) -> bool:
    """Whether an answer of so many rows may be only the beginning."""
    return count >= limit or count in _PAGE_SIZES


def groups_of(query: OfferQuery) -> tuple[list[SearchGroup], list[SearchGroup]]:
    """Return the searches for GPUs that jobs wait for, and those for GPUs that are only watched.

    Canonical names that vast.ai spells alike (the A100 of 40 and of 80 GB) share a search.
    """
    wanted = _by_spelling(query.gpus, query.gpu_counts)
    if query.vram_mb_min is not None:
        wanted.append(SearchGroup(counts=query.gpu_counts, vram_mb_min=query.vram_mb_min))
    taken = {group.names for group in wanted}
    watched = [group for group in _by_spelling(query.watched, ()) if group.names not in taken]
    return wanted, watched


def _by_spelling(gpus: Iterable[str], counts: tuple[int, ...]) -> list[SearchGroup]:
    found: dict[tuple[str, ...], list[str]] = {}
    for gpu in gpus:
        found.setdefault(names_of(gpu), []).append(gpu)
    return [SearchGroup(gpus=tuple(ids), names=names, counts=counts) for names, ids in found.items()]


@dataclass(slots=True, kw_only=True)
class _Run:
    """One search with its further pages."""

    market: Market
    group: SearchGroup
    body: Mapping[str, Any]
    limit: int
    rows: dict[int, OfferRow] = field(default_factory=dict)
    rejected: list[Rejected] = field(default_factory=list)
    is_done: bool = False
    has_gaps: bool = False
    _from_price: float | None = None
    _is_above: bool = False
    _from_machine: int | None = None
    _barren: int = 0

    async def step(self, search: Search) -> None:
        """Read one page.

        Raises:
            ProviderError: it could not be read.
        """
        try:
            page = await search(self._next_body())
        except Unavailable:
            if self._from_machine is None:
                raise
            self._leave_tie(whole=False)  # a search by machine that is refused ends neither the poll nor the run
            return
        fresh = [row for row in page.rows if row.id not in self.rows]
        self.rows.update((row.id, row) for row in fresh)
        if not self.rejected:
            self.rejected.extend(page.rejected)
        self._barren = 0 if fresh else self._barren + 1
        full = is_cut(page.count, self.limit)
        if self._barren >= BARREN_MAX and full and self._from_machine is None:
            self._end(whole=False)
        elif self._from_machine is not None:
            self._after_tie_page(page.rows, full=full)
        elif not full:
            self._end(whole=True)
        else:
            self._after_full_page(page.rows)

    def _next_body(self) -> dict[str, Any]:
        body = dict(self.body)
        price = self._from_price
        if price is None:
            return body
        if self._from_machine is not None:
            body["dph_total"] = {"gte": price - PRICE_STEP, "lte": price + PRICE_STEP}
            body["machine_id"] = {"gte": self._from_machine}
            body["order"] = [["machine_id", "asc"]]
        elif self._is_above:
            body["dph_total"] = {"gt": price + PRICE_STEP}
        else:
            body["dph_total"] = {"gte": price - PRICE_STEP}
        return body

    def _after_full_page(self, rows: Sequence[OfferRow]) -> None:
        prices = [row.dph_total for row in rows if row.dph_total is not None]
        if not prices:
            self._end(whole=False)
            return
        last = max(prices)
        if last - min(prices) <= PRICE_STEP:
            self._from_price, self._from_machine = last, 0
        elif self._from_price is not None and last <= self._from_price + PRICE_STEP and not self._is_above:
            self._from_machine = 0
        else:
            self._from_price, self._is_above = last, False

    def _after_tie_page(self, rows: Sequence[OfferRow], *, full: bool) -> None:
        if not full:
            self._leave_tie(whole=True)
            return
        last = max((row.machine_id for row in rows), default=0)
        if self._from_machine is None or last <= self._from_machine or self._barren > BARREN_MAX:
            self._leave_tie(whole=False)  # one machine with more asks of one price than a page holds
        else:
            self._from_machine = last

    def _leave_tie(self, *, whole: bool) -> None:
        self.has_gaps = self.has_gaps or not whole
        self._from_machine, self._is_above, self._barren = None, True, 0

    def _end(self, *, whole: bool) -> None:
        self.is_done = True
        self.has_gaps = self.has_gaps or not whole


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """The result of a group's newest search."""

    rows: tuple[OfferRow, ...]
    rejected: tuple[Rejected, ...]
    is_whole: bool
    at: datetime


class OfferSearch:
    """The searches of one account, and what is known of its cap."""

    def __init__(
        self, search: Search, settings: VastSettings, clock: Clock, *, has_room: Callable[[], bool] = lambda: True
    ) -> None:
        self._search = search
        self._settings = settings
        self._clock = clock
        self._has_room = has_room
        """Whether one more search may be sent without a long wait."""
        self._narrow_polls_left = 0
        self._poll = 0
        self._asked_in: dict[SearchGroup, int] = {}
        self._held: dict[tuple[Market, SearchGroup], _Held] = {}
        self._cap: int | None = None
        """At how many rows an answer was seen to end though more was sold."""
        self._absent_asked_at: dict[tuple[Market, SearchGroup], datetime] = {}

    @property
    def _limit(self) -> int:
        """How many rows an answer may hold."""
        return self._settings.offers_max if self._cap is None else min(self._cap, self._settings.offers_max)

    async def found(self, query: OfferQuery) -> SearchResult:
        """Read the offers of one poll.

        Raises:
            ProviderError: nothing could be read.
        """
        markets = [market for market in (Market.ON_DEMAND, Market.SPOT) if market in query.markets]
        wanted, watched = groups_of(query)
        general: dict[Market, OfferRows] = {}
        asked = 0
        if self._narrow_polls_left <= 0 or not (wanted or watched):
            cut = False
            for market in markets:
                page = general[market] = await self._search(search_body(self._settings, query.disk_gb, market))
                if self._cap is not None and page.count > self._cap:
                    self._cap = None
                cut = cut or is_cut(page.count, self._limit)
            if not cut:
                cut, asked = await self._hides(query, wanted, general)
            if not cut:
                return _everything(general)
            self._narrow_polls_left = PROBE_POLLS
            if not (wanted or watched):
                return _everything(general, cut=True)
        self._narrow_polls_left -= 1
        budget = SEARCHES_PER_POLL - len(general) - asked
        runs = await self._narrow(query, markets, wanted, watched, budget=budget)
        return self._assemble(markets, wanted, watched, general, runs)

    async def _hides(
        self, query: OfferQuery, wanted: Sequence[SearchGroup], general: Mapping[Market, OfferRows]
    ) -> tuple[bool, int]:
        """Whether a search by name finds what answers of the whole market lack, and how many searches that took."""
        now, asked = self._clock.now(), 0
        absent = {
            (market, group): page
            for market, page in general.items()
            for group in wanted
            if group.names and not any(group.holds(row) for row in page.rows)
        }
        self._absent_asked_at = {
            key: at for key, at in self._absent_asked_at.items() if key in absent and now - at < ABSENT_EVERY
        }
        for (market, group), page in absent.items():
            if (market, group) in self._absent_asked_at:
                continue
            if asked >= ABSENT_PER_POLL or not self._has_room():
                break
            asked += 1
            self._absent_asked_at[market, group] = now
            try:
                named = await self._search(group.narrow(search_body(self._settings, query.disk_gb, market)))
            except ProviderError:
                break
            if any(group.holds(row) for row in named.rows):
                self._cap = max(page.count, 1)
                return True, asked
        return False, asked

    def _is_whole(self, market: Market, group: SearchGroup) -> bool:
        held = self._held.get((market, group))
        return held is not None and held.is_whole

    async def _narrow(
        self,
        query: OfferQuery,
        markets: Sequence[Market],
        wanted: list[SearchGroup],
        watched: list[SearchGroup],
        *,
        budget: int,
    ) -> list[_Run]:
        """Run the searches that the budget allows: a first page of each before the second of any."""
        bodies = {market: search_body(self._settings, query.disk_gb, market) for market in markets}
        self._poll += 1
        asked = [*self._longest_unasked(wanted), *self._longest_unasked(watched)[:WATCHED_PER_POLL]]
        runs = [
            _Run(market=market, group=group, body=group.narrow(bodies[market]), limit=self._limit)
            for group in asked
            for market in markets
        ]
        started: list[_Run] = []
        try:
            for number, run in enumerate(_round_robin(runs)):
                if number >= budget or (started and not self._has_room()):
                    break
                await run.step(self._search)
                if run not in started:
                    started.append(run)
                    self._asked_in[run.group] = self._poll
        except ProviderError:
            if not started:
                raise
        now = self._clock.now()
        for run in started:
            self._held[run.market, run.group] = _Held(
                rows=tuple(run.rows.values()),
                rejected=tuple(run.rejected),
                is_whole=run.is_done and not run.has_gaps,
                at=now,
            )
        return started

    def _longest_unasked(self, groups: Sequence[SearchGroup]) -> list[SearchGroup]:
        return sorted(groups, key=lambda group: self._asked_in.get(group, 0))

    def _assemble(
        self,
        markets: Sequence[Market],
        wanted: Sequence[SearchGroup],
        watched: Sequence[SearchGroup],
        general: Mapping[Market, OfferRows],
        runs: Sequence[_Run],
    ) -> SearchResult:
        now = self._clock.now()
        groups = [*wanted, *watched]
        alive = {(market, group) for market in markets for group in groups}
        self._held = {
            key: held for key, held in self._held.items() if key in alive and timedelta(0) <= now - held.at <= CARRY
        }
        self._asked_in = {group: poll for group, poll in self._asked_in.items() if group in groups}
        rows: dict[Market, dict[int, OfferRow]] = {market: {} for market in markets}
        rejected: list[Rejected] = []
        for (market, _), held in sorted(self._held.items(), key=lambda one: one[1].at, reverse=True):
            for row in held.rows:
                rows[market].setdefault(row.id, row)
            rejected.extend(held.rejected)
        for market, page in general.items():
            for row in page.rows:
                rows[market].setdefault(row.id, row)
        whole = {group for group in groups if all(self._is_whole(market, group) for market in markets)}
        answered = {(run.market, run.group) for run in runs}
        missing = [group for group in groups if group not in whole]
        return SearchResult(
            rows={market: tuple(found.values()) for market, found in rows.items()},
            rejected=tuple(rejected),
            complete=not missing and alive <= answered,
            whole=frozenset((gpu, count) for group in whole for gpu in group.gpus for count in group.counts or (0,)),
            note=_note(groups, missing),
        )


def _everything(pages: Mapping[Market, OfferRows], *, cut: bool = False) -> SearchResult:
    note = "vast.ai cut its answer off: only the cheapest offers are known, until a job or a ceiling names a GPU"
    return SearchResult(
        rows={market: page.rows for market, page in pages.items()},
        rejected=tuple(one for page in pages.values() for one in page.rejected),
        complete=not cut,
        note=note if cut else "",
    )


def _note(groups: Sequence[SearchGroup], missing: Sequence[SearchGroup]) -> str:
    words = f"vast.ai cuts its answers off, so it is asked for {_listed(groups)} only"
    return f"{words}; not all offers of {_listed(missing)} are known" if missing else words


def _listed(groups: Sequence[SearchGroup]) -> str:
    names = [gpu for group in groups for gpu in group.gpus or ("any GPU",)]
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _round_robin(runs: Sequence[_Run]) -> Iterable[_Run]:
    left = list(runs)
    while left:
        yield from (run for run in left if not run.is_done)
        left = [run for run in left if not run.is_done]
