"""A file that may be lost: damaged, full, of another version. Each time one sentence, and it goes on."""

from __future__ import annotations

import resource
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from spotd.history import History, HistoryUnavailable, PriceTerms, Retained, SeriesQuery
from tests.unit.core.builders import SHOP, offer

START = 1_790_000_000


def record(history: History, minute: int, *prices: int) -> int:
    offers = [offer(f"o{n}", price=price) for n, price in enumerate(prices)]
    return history.record(SHOP, offers, complete=True, at=START + 60 * minute)


def low(history: History) -> list[int]:
    answer = history.ask(SeriesQuery(since=START, until=START + 6000), PriceTerms())
    return [bucket.low for group in answer.groups for bucket in group.buckets]


def filled(path: Path) -> None:
    history = History(path)
    for minute in range(40):
        record(history, minute, *range(minute + 1, minute + 200))
    history.close()


def scribbled(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096:] = b"\x5a" * (len(data) - 4096)
    path.write_bytes(data)


def no_database(path: Path) -> None:
    path.write_bytes(b"a shopping list\n" * 500)


def somebody_elses(path: Path) -> None:
    path.unlink()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE songs (title TEXT)")
    connection.close()


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def newer(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()


@pytest.mark.parametrize("damage", [scribbled, no_database, somebody_elses, cut, newer])
def test_a_file_that_cannot_be_used_is_set_aside_and_a_new_one_begun(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    path = tmp_path / "prices.sqlite"
    filled(path)
    damage(path)
    left = path.read_bytes()
    history = History(path)
    record(history, 50, 500, 600)
    record(history, 51, 500, 600)
    assert low(history) == [500]
    assert len(history.set_aside) == 1
    assert "begun anew, because it is" in history.set_aside[0]
    assert (tmp_path / "prices.sqlite.damaged").read_bytes() == left
    history.close()


def test_a_file_that_turns_bad_while_it_is_open_is_set_aside_too(tmp_path: Path) -> None:
    path = tmp_path / "prices.sqlite"
    filled(path)
    history = History(path)
    record(history, 41, 1)
    history._open()[0].execute("PRAGMA wal_checkpoint(TRUNCATE)")
    history._open()[0].execute("PRAGMA cache_size = 0")
    scribbled(path)
    for minute in range(42, 60):
        record(history, minute, *range(minute, minute + 200))
    history.step(START + 7 * 86_400)
    assert len(history.set_aside) == 1
    assert low(history)
    history.close()


MONTH = 60 * 24 * 30


def test_a_clock_that_is_days_behind_for_a_while_leaves_the_history_as_it_is(tmp_path: Path) -> None:
    history = History(tmp_path / "prices.sqlite")
    record(history, MONTH, 100)
    for minute in (0, 1, 60 * 23):
        with pytest.raises(HistoryUnavailable, match="of the future"):
            record(history, minute, 200)
    record(history, MONTH + 1, 300)
    assert not history.set_aside
    assert history._open()[0].execute("SELECT price FROM points ORDER BY at").fetchall() == [(100,), (300,)]
    history.close()


def test_prices_of_the_future_are_set_aside_after_a_day(tmp_path: Path) -> None:
    history = History(tmp_path / "prices.sqlite")
    record(history, MONTH, 100)
    with pytest.raises(HistoryUnavailable, match="of the future"):
        record(history, 0, 100)
    record(history, 60 * 24, 100)
    record(history, 60 * 24 + 1, 100)
    assert "future" in history.set_aside[0]
    assert history._open()[0].execute("SELECT count(*) FROM points").fetchone() == (1,)
    history.close()


def test_a_disk_that_is_nearly_full_is_left_to_the_state(tmp_path: Path) -> None:
    free = [10**9]
    history = History(tmp_path / "prices.sqlite", free_bytes=lambda _: free[0])
    record(history, 0, 100)
    free[0] = 40_000_000
    with pytest.raises(HistoryUnavailable, match=r"only 40 MB are free .* left to the state"):
        record(history, 1, 200)
    free[0] = 10**9
    assert record(history, 2, 200) == 1, "what could not be written is made good by the next poll"
    history.close()


def test_a_disk_that_fills_up_while_writing_costs_that_poll_only(tmp_path: Path) -> None:
    path = tmp_path / "prices.sqlite"
    history = History(path)
    record(history, 0, *range(100, 400))
    before = low(history)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (Path(f"{path}-wal").stat().st_size + 1_000, hard))
    try:
        with pytest.raises(HistoryUnavailable, match="cannot be used now"):
            record(history, 1, *range(5_000, 6_500))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert low(history) == before
    assert record(history, 2, *range(5_000, 6_500)) == 1_500
    assert history.set_aside == []
    history.close()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    history = History(tmp_path / "nowhere" / "prices.sqlite", free_bytes=lambda _: 10**9)
    with pytest.raises(HistoryUnavailable, match=r"nowhere/prices\.sqlite cannot be opened: No such file"):
        record(history, 0, 1)


def test_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    history = History(tmp_path / "prices.sqlite", Retained())
    record(history, 0, 1)
    assert {path.stat().st_mode & 0o077 for path in tmp_path.iterdir()} == {0}
    history.close()
