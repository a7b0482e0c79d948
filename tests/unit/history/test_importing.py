"""Imported prices: twice is once, the newest statement of a span holds, and nothing that is polled is touched."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from spotd.backtest.rows import MarketCollector
from spotd.backtest.traces import TraceDefaults, read_into
from spotd.history import HISTORY_FILE, IMPORTED_FILE, History, HistoryUnavailable, PriceTerms, SeriesQuery
from spotd.history.file import without
from spotd_providers.contract.provider import OfferPriceHistory, PriceHistoryPage
from spotd_providers.contract.values import Market, MicroUsdPerGbMonth, MicroUsdPerHour, OfferId, PoolId, ProviderName
from tests.cases import every
from tests.unit.core.builders import SHOP, offer

DAY_S, HOUR_S = 86_400, 3_600
NOW = 1_790_000_000 // DAY_S * DAY_S
FREE = PriceTerms()
CLOUD = ProviderName("cloud")


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    found = History(tmp_path / HISTORY_FILE, imports=tmp_path / IMPORTED_FILE)
    yield found
    found.close()


def instant(second: float) -> datetime:
    return datetime.fromtimestamp(second, UTC)


def statement(
    since: int,
    until: int,
    *changes: tuple[float, int | None],
    offer_id: str = "a",
    provider: ProviderName = CLOUD,
    gpu: str = "H100_SXM",
) -> PriceHistoryPage:
    row = OfferPriceHistory(
        provider=provider, offer_id=OfferId(offer_id), pool=PoolId(offer_id), market=Market.SPOT, gpu=gpu,
        gpu_count=1, storage_price=MicroUsdPerGbMonth(0),
        changes=tuple((instant(at), None if price is None else MicroUsdPerHour(price)) for at, price in changes),
    )  # fmt: skip
    return PriceHistoryPage(offers=(row,), since=instant(since), until=instant(until))


def seconds_by_price(history: History, since: int, until: int, *, gpu: str = "H100_SXM") -> dict[int, float]:
    """For each hour of the span its median, as hours for each price."""
    question = SeriesQuery(since=since, until=until, every_s=HOUR_S, gpus=frozenset({gpu}))
    groups = history.ask(question, FREE).groups
    found: dict[int, float] = {}
    for bucket in groups[0].buckets if groups else ():
        found[bucket.quantiles[2]] = found.get(bucket.quantiles[2], 0) + 1
    return found


def rows_of(tmp_path: Path, found: History) -> list[tuple[object, ...]]:
    found.close()
    with sqlite3.connect(tmp_path / IMPORTED_FILE) as connection:
        return [*connection.execute("SELECT * FROM points"), *connection.execute("SELECT * FROM watched")]


def test_an_import_that_is_repeated_changes_nothing(tmp_path: Path, history: History) -> None:
    page = statement(NOW - 10 * HOUR_S, NOW, (NOW - 20 * HOUR_S, 5), (NOW - 4 * HOUR_S, 7), (NOW - 2 * HOUR_S, None))
    assert history.take_over(page, now=NOW) == 2
    once = rows_of(tmp_path, history)
    history.take_over(page, now=NOW)
    assert rows_of(tmp_path, history) == once
    assert seconds_by_price(history, NOW - 10 * HOUR_S, NOW) == {5: 6, 7: 2}


def test_a_statement_replaces_what_was_said_of_its_span_and_nothing_else(history: History) -> None:
    history.take_over(statement(NOW - 10 * HOUR_S, NOW, (NOW - 10 * HOUR_S, 5)), now=NOW)
    history.take_over(statement(NOW - 6 * HOUR_S, NOW - 4 * HOUR_S, (NOW - 6 * HOUR_S, 9)), now=NOW)
    assert seconds_by_price(history, NOW - 10 * HOUR_S, NOW) == {5: 8, 9: 2}


def test_a_price_does_not_hold_behind_the_span_that_it_was_stated_for(history: History) -> None:
    history.take_over(statement(NOW - 10 * HOUR_S, NOW - 8 * HOUR_S, (NOW - 10 * HOUR_S, 5)), now=NOW)
    history.take_over(statement(NOW - 8 * HOUR_S, NOW, (NOW - 8 * HOUR_S, 3), offer_id="b", gpu="RTX_4090"), now=NOW)
    assert seconds_by_price(history, NOW - 10 * HOUR_S, NOW) == {5: 2}


def test_of_a_hundred_thousand_prices_of_one_second_the_last_holds(history: History) -> None:
    many = [(NOW - HOUR_S + number / 1_000_000, number + 1) for number in range(100_000)]
    assert history.take_over(statement(NOW - HOUR_S, NOW, *many), now=NOW) == 1
    assert seconds_by_price(history, NOW - HOUR_S, NOW) == {100_000: 1}


def test_what_is_older_than_ninety_days_or_after_now_is_not_stored(history: History) -> None:
    year = 365 * DAY_S
    assert history.take_over(statement(NOW - 2 * year, NOW - year, (NOW - 2 * year, 5)), now=NOW) == 0
    page = statement(NOW - year, NOW + year, (NOW - year, 5), (NOW + HOUR_S, 7))
    assert history.take_over(page, now=NOW) == 1
    assert seconds_by_price(history, NOW - 2 * HOUR_S, NOW + 2 * HOUR_S) == {5: 2}


def test_what_ages_is_forgotten_but_for_the_price_that_holds_at_the_border(history: History) -> None:
    history.take_over(statement(NOW - 89 * DAY_S, NOW, (NOW - 89 * DAY_S, 5), (NOW - DAY_S, 7)), now=NOW)
    later = NOW + 30 * DAY_S
    history.take_over(statement(later - HOUR_S, later, (later - HOUR_S, 9), offer_id="b"), now=later)
    border = later - 90 * DAY_S
    assert seconds_by_price(history, border - 2 * HOUR_S, border + 2 * HOUR_S) == {5: 2}


def test_time_that_was_polled_is_not_taken_from_an_import(history: History) -> None:
    for at in range(NOW - 4 * HOUR_S, NOW, HOUR_S // 2):
        history.record(SHOP, [offer(gpu="H100_SXM", price=2)], complete=True, at=at)
    history.take_over(statement(NOW - 8 * HOUR_S, NOW, (NOW - 8 * HOUR_S, 5), provider=SHOP), now=NOW)
    answer = history.ask(SeriesQuery(since=NOW - 8 * HOUR_S, until=NOW, every_s=HOUR_S), FREE)
    shares = [round(bucket.imported, 2) for bucket in answer.groups[0].buckets]
    assert shares == [1.0] * 4 + [0.0] * 3 + [shares[-1]]
    assert {round(bucket.offers) for bucket in answer.groups[0].buckets} == {1}


def test_an_imported_row_is_never_what_a_provider_offered_last(history: History) -> None:
    history.take_over(statement(NOW - HOUR_S, NOW, (NOW - HOUR_S, 5), provider=SHOP), now=NOW)
    assert history.last_offers([SHOP]) == {}
    assert history.gpus() == {"H100_SXM"}


def test_an_imported_file_that_is_damaged_costs_no_polled_price(tmp_path: Path, history: History) -> None:
    history.record(SHOP, [offer(gpu="H100_SXM")], complete=True, at=NOW - HOUR_S)
    history.record(SHOP, [offer(gpu="H100_SXM")], complete=True, at=NOW - HOUR_S // 2)
    (tmp_path / IMPORTED_FILE).write_bytes(b"no database at all" * 1000)
    assert seconds_by_price(history, NOW - 2 * HOUR_S, NOW)
    assert [path.name for path in tmp_path.iterdir() if "damaged" in path.name] == [f"{IMPORTED_FILE}.damaged"]


def test_a_full_disk_or_file_refuses_an_import_with_the_reason(tmp_path: Path) -> None:
    history = History(tmp_path / HISTORY_FILE, imports=tmp_path / IMPORTED_FILE, free_bytes=lambda _: 1_000_000)
    with pytest.raises(HistoryUnavailable, match="left to the state"):
        history.take_over(statement(NOW - HOUR_S, NOW, (NOW - HOUR_S, 5)), now=NOW)


def test_a_back_test_reads_the_imported_prices_beside_the_own_ones(tmp_path: Path, history: History) -> None:
    history.record(SHOP, [offer(gpu="H100_SXM")], complete=True, at=NOW - HOUR_S)
    history.record(SHOP, [offer(gpu="H100_SXM")], complete=True, at=NOW - HOUR_S // 2)
    history.take_over(statement(NOW - 8 * HOUR_S, NOW, (NOW - 8 * HOUR_S, 5)), now=NOW)
    history.close()
    found = MarketCollector(lambda _gpu, _count: True)
    notes = read_into(tmp_path / HISTORY_FILE, found, TraceDefaults())
    market = found.market()
    assert {one.provider for one in market.series} == {SHOP, CLOUD}
    assert market.begins_at == NOW - 8 * HOUR_S
    assert any("imported" in note for note in notes)


@every(
    ("watches", "other", "left"),
    [
        ([(0, 10)], [], [(0, 10)]),
        ([(0, 10)], [(0, 10)], []),
        ([(0, 10)], [(3, 5)], [(0, 3), (5, 10)]),
        ([(0, 10), (20, 30)], [(5, 25)], [(0, 5), (25, 30)]),
        ([(0, 10)], [(10, 20)], [(0, 10)]),
        ([(5, 10)], [(0, 6), (7, 8), (9, 99)], [(6, 7), (8, 9)]),
    ],
)
def test_spans_without_others(
    watches: list[tuple[int, int]], other: list[tuple[int, int]], left: list[tuple[int, int]]
) -> None:
    assert without(watches, other) == left
