"""Prices that one daemon polled are there for the daemon that leads after it, through the store that both have."""

from __future__ import annotations

import gzip
import json
import math
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from spotd.daemon.market.price_recorder import KEPT, PriceRecorder, SharedPrices
from spotd.history import HISTORY_FILE, IMPORTED_FILE, History, PriceTerms, SeriesQuery
from spotd.history.file import DAY_S
from spotd.history.importing import BadDocument, decode, encode
from spotd_jobs.objects.folder import FolderStore
from tests.unit.core.builders import SHOP
from tests.unit.daemon.rig import Log
from tests.unit.history.market import VAST, Bazaar

pytestmark = pytest.mark.anyio
NOW = 1_790_000_000 // DAY_S * DAY_S
HOUR_S, STEP_S = 3_600, 600
FREE = PriceTerms()


class Clock:
    """Set by the test."""

    def __init__(self, second: int) -> None:
        self.second = second

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.second, UTC)

    def real_seconds(self, span: timedelta) -> float:
        return span.total_seconds()


class Daemon:
    """As far as it keeps prices."""

    def __init__(self, folder: Path, name: str, clock: Clock) -> None:
        home = folder / name
        home.mkdir()
        self.history = History(home / HISTORY_FILE, imports=home / IMPORTED_FILE)
        self.log = Log()
        self.objects = FolderStore(folder / "store")
        self._folder, self._name, self._clock = folder, name, clock
        self.begin()

    def begin(self) -> None:
        """It begins to lead."""
        parts: Any = {"clock": self._clock, "log": self.log, "inline": True}
        recorder = PriceRecorder(self.history, note=lambda *_: None, **parts)
        self.shared = SharedPrices(self.objects, recorder=recorder, install="lab", writer=self._name, **parts)

    def poll(self, market: Bazaar, hours: int) -> None:
        end = self._clock.second + hours * HOUR_S
        while self._clock.second < end:
            self._clock.second += STEP_S
            market.pass_time(STEP_S)
            self.history.record(VAST, market.offers(), complete=True, at=self._clock.second)

    def shows(self, since: int, until: int) -> list[tuple[Any, ...]]:
        found = self.history.ask(SeriesQuery(since=since, until=until, every_s=HOUR_S), FREE)
        return [
            (group.gpu, bucket.start, bucket.quantiles, bucket.low, bucket.high, round(bucket.offers, 3))
            for group in found.groups
            for bucket in group.buckets
        ]


@pytest.fixture
def clock() -> Clock:
    return Clock(NOW)


async def test_the_next_leader_shows_the_prices_of_the_former_one(tmp_path: Path, clock: Clock) -> None:
    first, second = Daemon(tmp_path, "a", clock), Daemon(tmp_path, "b", clock)
    market = Bazaar(40, busy=4.0)
    for _ in range(3):
        first.poll(market, 10)
        await first.shared.reconcile_once()
    begun = clock.second - clock.second % HOUR_S
    assert second.shows(NOW, begun) == []
    await second.shared.reconcile_once()
    shown = second.shows(NOW + HOUR_S, begun - HOUR_S)
    assert shown == first.shows(NOW + HOUR_S, begun - HOUR_S)
    assert len(shown) > 100
    found = second.history.ask(SeriesQuery(since=NOW, until=begun, every_s=HOUR_S), FREE)
    assert {bucket.imported for group in found.groups for bucket in group.buckets} == {1.0}
    assert second.history.last_offers([VAST]) == {}, "a decision would rest on what another polled"


async def test_two_that_lead_in_turn_each_know_all_of_it(tmp_path: Path, clock: Clock) -> None:
    both = Daemon(tmp_path, "a", clock), Daemon(tmp_path, "b", clock)
    market = Bazaar(10, busy=4.0)
    for turn in range(4):
        leader = both[turn % 2]
        leader.begin()
        await leader.shared.reconcile_once()
        leader.poll(market, 9)
        await leader.shared.reconcile_once()
    both[0].begin()
    await both[0].shared.reconcile_once()
    hours = [{start for _, start, *_ in one.shows(NOW, clock.second)} for one in both]
    assert hours[0] == {NOW + hour * HOUR_S for hour in range(36)}
    assert hours[1] == hours[0]
    listed = [info.key for info in both[0].objects.list("prices/")]
    assert len(listed) == 4, "an object for each day and computer"


async def test_what_was_polled_before_midnight_is_written_after_a_restart_behind_it(
    tmp_path: Path, clock: Clock
) -> None:
    first, second = Daemon(tmp_path, "a", clock), Daemon(tmp_path, "b", clock)
    clock.second = NOW + 20 * HOUR_S
    market = Bazaar(5)
    first.poll(market, 3)
    first.begin()
    clock.second = NOW + DAY_S + HOUR_S
    await first.shared.reconcile_once()
    await second.shared.reconcile_once()
    assert second.shows(NOW + 20 * HOUR_S, NOW + 23 * HOUR_S) == first.shows(NOW + 20 * HOUR_S, NOW + 23 * HOUR_S) != []


async def test_prices_go_after_ninety_days(tmp_path: Path, clock: Clock) -> None:
    first, second = Daemon(tmp_path, "a", clock), Daemon(tmp_path, "b", clock)
    first.poll(Bazaar(5), 1)
    await first.shared.reconcile_once()
    age(tmp_path, NOW)
    clock.second += int(KEPT.total_seconds()) + 2 * DAY_S
    await second.shared.reconcile_once()
    assert len([*first.objects.list("prices/")]) == 1, "by the store's clock nothing is old: ours may be ahead"
    second.poll(Bazaar(5), 1)
    await second.shared.reconcile_once()
    (new,) = (path for path in (tmp_path / "store").rglob("b.json.gz"))
    os.utime(new, (clock.second, clock.second))
    first.begin()
    await first.shared.reconcile_once()
    assert [info.key.rpartition("/")[2] for info in first.objects.list("prices/")] == ["b.json.gz"]


async def test_a_clock_that_was_years_ahead_keeps_no_prices_away(tmp_path: Path, clock: Clock) -> None:
    first, second = Daemon(tmp_path, "a", clock), Daemon(tmp_path, "b", clock)
    first.poll(Bazaar(5), 2)
    await first.shared.reconcile_once()
    age(tmp_path, NOW)
    true = clock.second
    clock.second += 3 * 365 * DAY_S
    await second.shared.reconcile_once()
    await first.shared.reconcile_once()
    clock.second = true
    first.poll(Bazaar(5), 4)
    await first.shared.reconcile_once()
    second.begin()
    await second.shared.reconcile_once()
    assert {start for _, start, *_ in second.shows(NOW, clock.second)} == {NOW + hour * HOUR_S for hour in range(6)}


def age(folder: Path, second: int) -> None:
    """As if the store had taken all its objects then."""
    for path in (folder / "store").rglob("*.json.gz"):
        os.utime(path, (second, second))


async def test_an_object_that_holds_no_prices_is_passed_over(tmp_path: Path, clock: Clock) -> None:
    first, second = Daemon(tmp_path, "a", clock), Daemon(tmp_path, "b", clock)
    first.poll(Bazaar(5), 2)
    await first.shared.reconcile_once()
    (good,) = first.objects.list("prices/")
    first.objects.put(good.key.replace("/a.", "/0."), b"no prices")
    await second.shared.reconcile_once()
    assert second.shows(NOW, NOW + HOUR_S) != []
    assert second.log.events() == ["shared_prices.unreadable"]


def document(**changes: Any) -> bytes:
    page = {"since": NOW, "until": NOW + HOUR_S, "offers": [[SHOP, "o", "p", "spot", "H100_SXM", 1, 0, [[NOW, 5]]]]}
    return gzip.compress(json.dumps({"schema": 1, "pages": [page], **changes}).encode(), mtime=0)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x1f\x8b",
        document()[:-9],
        gzip.compress(b"[" * 100_000, mtime=0),
        gzip.compress(b"\xff", mtime=0),
        gzip.compress(b"null", mtime=0),
        document(schema=2),
        document(pages=None),
        *(
            document(pages=[{"since": since, "until": NOW, "offers": []}])
            for since in (-1, math.nan, 1e308, 10**30, 1 << 61, "0", None, True)
        ),
        *(
            document(pages=[{"since": 0, "until": 1, "offers": [[SHOP, "o", "p", market, gpu, 1, 0, [[0, price]]]]}])
            for market, gpu, price in (("free", "H100", 1), ("spot", 7, 1), ("spot", "H100", -1), ("spot", "H100", 0.5))
        ),
    ],
)
def test_a_document_of_another_content_is_refused(data: bytes) -> None:
    with pytest.raises(BadDocument):
        decode(data)


def test_a_document_says_what_its_pages_said() -> None:
    pages = decode(document())
    assert decode(encode(pages)) == pages
    assert encode(pages) == encode(pages)
