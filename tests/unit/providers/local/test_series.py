"""How prices move."""

from __future__ import annotations

import gzip
import json
import math
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotd_providers.local.market.series import BadPriceFile, PriceSource, Replay, Seeded, price_source
from spotd_providers.local.settings import CsvPrice, FixedPrice, HostSpec, SeededPrice, TracePrice
from tests.cases import every

MONDAY = datetime(2026, 3, 2, tzinfo=UTC)
TICK = timedelta(minutes=5)
DECAY = math.exp(-TICK / timedelta(minutes=90))
DEVIATION_MAX = math.sqrt(1 - DECAY**2) * math.sqrt(12) / 2 / (1 - DECAY)
"""All shocks as large as they can be."""
DAY = timedelta(days=1)
CALM: dict[str, Any] = {"spikes": 0, "stock_outs": 0}


def _host(**more: object) -> HostSpec:
    return HostSpec.model_validate({"name": "h", "gpu": "RTX_4090", "spot": {"kind": "fixed", "price": 1}, **more})


def _seeded(seed: int = 1, host: str = "h", utc_offset_h: float = 0, **spec: object) -> Seeded:
    source = price_source(
        SeededPrice.model_validate({"base": 1.0, **spec}),
        seed=seed,
        host=_host(name=host, utc_offset_h=utc_offset_h),
        opened_at=MONDAY,
    )
    assert isinstance(source, Seeded)
    return source


def _ticks(start: datetime, end: datetime, step: timedelta = TICK) -> list[datetime]:
    return [start + step * number for number in range((end - start) // step)]


def _mean_price(source: PriceSource, instants: list[datetime]) -> float:
    return mean(source.at(instant).price for instant in instants)


def test_a_restarted_market_tells_the_same_past_and_future() -> None:
    instants = _ticks(MONDAY, MONDAY + 2 * DAY)
    first, second = _seeded(), _seeded()
    forwards = [first.at(instant) for instant in instants]
    backwards = [second.at(instant) for instant in reversed(instants)]
    assert forwards == backwards[::-1]


@every("other", [{"seed": 2}, {"host": "other"}], ids=["other-seed", "other-host"])
def test_seed_and_host_each_make_another_series(other: dict[str, Any]) -> None:
    instants = _ticks(MONDAY, MONDAY + DAY)
    assert [_seeded().at(i).price for i in instants] != [_seeded(**other).at(i).price for i in instants]


@given(seed=st.integers(0, 2**32), number=st.integers(-(10**6), 10**6))
def test_deviations_and_prices_stay_within_their_bounds(seed: int, number: int) -> None:
    source = _seeded(seed=seed, volatility=0.5, spikes=1, stock_outs=1)
    assert abs(source.deviation(number)) <= DEVIATION_MAX
    price = source.at(datetime(1970, 1, 1, tzinfo=UTC) + number * TICK).price
    assert 300_000 <= price <= 4_000_000


def test_a_deviation_is_followed_by_its_own_decay() -> None:
    source = _seeded()
    now = [source.deviation(number) for number in range(3000)]
    an_hour_later = [source.deviation(number + 12) for number in range(3000)]
    assert abs(mean(now)) < 0.25
    assert 0.6 < mean(value * value for value in now) < 1.4
    high = [(a, b) for a, b in zip(now, an_hour_later, strict=True) if a > 1]
    low = [(a, b) for a, b in zip(now, an_hour_later, strict=True) if a < -1]
    assert mean(b for _, b in high) < 0.75 * mean(a for a, _ in high)
    assert mean(b for _, b in low) > 0.75 * mean(a for a, _ in low)


@every("offset", [-8, 0, 9])
def test_nights_are_cheaper_than_days_where_the_host_is(offset: int) -> None:
    source = _seeded(utc_offset_h=offset, **CALM)
    local_midnights = [MONDAY + number * DAY - timedelta(hours=offset) for number in range(1, 12) if number % 7 < 5]
    nights = [m + timedelta(hours=h) for m in local_midnights for h in (1, 2, 3, 4, 5)]
    days = [m + timedelta(hours=h) for m in local_midnights for h in (13, 14, 15, 16, 17)]
    assert _mean_price(source, nights) < 0.85 * _mean_price(source, days)


def test_weekends_are_cheaper_than_weekdays() -> None:
    source = _seeded(**CALM)
    saturdays = [MONDAY + timedelta(days=7 * week + 5) for week in range(4)]
    tuesdays = [MONDAY + timedelta(days=7 * week + 1) for week in range(4)]
    weekend = [i for day in saturdays for i in _ticks(day, day + 2 * DAY, timedelta(hours=1))]
    weekdays = [i for day in tuesdays for i in _ticks(day, day + 2 * DAY, timedelta(hours=1))]
    assert _mean_price(source, weekend) < 0.93 * _mean_price(source, weekdays)


def test_spikes_and_stock_outs_come_and_go_about_as_often_as_asked() -> None:
    calm, wild = _seeded(**CALM), _seeded(spikes=0.5, stock_outs=0.5)
    instants = _ticks(MONDAY, MONDAY + 30 * DAY, timedelta(minutes=10))
    spikes = [i for i in instants if wild.at(i).price > 1.45 * calm.at(i).price]
    outs = [i for i in instants if wild.at(i).available == 0]
    windows_with_spikes = {(i - MONDAY) // timedelta(hours=6) for i in spikes}
    windows_with_outs = {(i - MONDAY) // timedelta(hours=12) for i in outs}
    assert 35 <= len(windows_with_spikes) <= 85
    assert 15 <= len(windows_with_outs) <= 45
    assert len(spikes) < 0.2 * len(instants)
    assert all(calm.at(i).available > 0 for i in instants)


def test_prices_hold_until_the_change_they_announce() -> None:
    source = _seeded()
    now = MONDAY + timedelta(minutes=7, seconds=3)
    change = source.next_change(now)
    assert change == MONDAY + timedelta(minutes=10)
    assert source.at(change - timedelta(microseconds=1)) == source.at(now)


def test_a_fixed_price_never_changes() -> None:
    source = price_source(FixedPrice.model_validate({"price": "0.25"}), seed=1, host=_host(), opened_at=MONDAY)
    assert source.at(MONDAY - DAY) == source.at(MONDAY + 900 * DAY)
    assert source.at(MONDAY).price == 250_000
    assert source.next_change(MONDAY) is None


def test_a_csv_holds_each_row_until_the_next(tmp_path: Path) -> None:
    file = tmp_path / "prices.csv"
    file.write_text("time,price,available\n0,1.00,\n3600,1.50,0\n2026-03-02T02:00:00Z,0.90,2\n")
    source = price_source(CsvPrice(path=file), seed=1, host=_host(), opened_at=MONDAY)
    hour = timedelta(hours=1)
    assert [source.at(MONDAY + n * hour).price for n in (0, 1, 2, 50)] == [1_000_000, 1_500_000, 900_000, 900_000]
    assert [source.at(MONDAY + n * hour).available for n in (1, 2)] == [0, 2]
    assert source.next_change(MONDAY) == MONDAY + hour
    assert source.next_change(MONDAY + 2 * hour) is None


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("prices.csv", "time,price\n", "no rows"),
        ("prices.csv", "time,price\n0,1\n0,2\n", "do not grow"),
        ("prices.csv", "time,price\n0,nan\n", "not a price"),
        ("prices.csv", "time,price\n2026-03-02,1\n", "no time zone"),
        ("prices.csv", "when,price\n0,1\n", "time"),
        ("trace.json", '{"metadata":{"gap_seconds":60},"data":[1]}', "no prices"),
        ("trace.json", '{"metadata":{"gap_seconds":60},"data":[1,1],"prices":[1]}', "zip"),
        ("trace.json", '{"metadata":{"gap_seconds":60},"data":[],"prices":[]}', "no ticks"),
        ("trace.json", '{"metadata":{"gap_seconds":60},"data":[-1],"prices":[1]}', "negative"),
        ("trace.json", "[]", "TypeError"),
        ("trace.json.gz", "not zipped", "BadGzipFile"),
    ],
)
def test_a_price_file_that_makes_no_sense_is_refused_by_name(
    tmp_path: Path, name: str, content: str, complaint: str
) -> None:
    file = tmp_path / name
    file.write_text(content)
    spec = CsvPrice(path=file) if name.endswith("csv") else TracePrice(path=file)
    with pytest.raises(BadPriceFile, match=complaint) as failure:
        price_source(spec, seed=1, host=_host(), opened_at=MONDAY)
    assert str(file) in str(failure.value)


def test_a_missing_price_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(BadPriceFile, match=r"nowhere\.csv"):
        price_source(CsvPrice(path=tmp_path / "nowhere.csv"), seed=1, host=_host(), opened_at=MONDAY)


def _trace(path: Path, **more: object) -> Replay:
    source = price_source(TracePrice.model_validate({"path": path, **more}), seed=1, host=_host(), opened_at=MONDAY)
    assert isinstance(source, Replay)
    return source


def test_a_trace_is_replayed_tick_by_tick_and_begins_again(tmp_path: Path) -> None:
    file = tmp_path / "trace.json.gz"
    content = {"metadata": {"gap_seconds": 60}, "data": [1, 1, 0, 2], "prices": [1.0, 1.0, 1.0, 2.5]}
    file.write_bytes(gzip.compress(json.dumps(content).encode()))
    source = _trace(file)
    minute = timedelta(minutes=1)
    seen = [(t.available, t.price) for t in (source.at(MONDAY + n * minute) for n in range(5))]
    assert seen == [(1, 1_000_000), (1, 1_000_000), (0, 1_000_000), (2, 2_500_000), (1, 1_000_000)]
    changes = [MONDAY]
    for _ in range(4):
        changes.append(source.next_change(changes[-1]))
    assert [(c - MONDAY) / minute for c in changes] == [0, 2, 3, 4, 6]
    assert _trace(file, first_tick=2).at(MONDAY).available == 0
    assert _trace(file, start=MONDAY - 3 * minute).at(MONDAY).available == 2


def test_a_trace_without_prices_takes_the_configured_or_the_recorded_constant(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"metadata": {"gap_seconds": 60, "spot_price_usd_h": 3.0}, "data": [1]}))
    assert _trace(file).at(MONDAY).price == 3_000_000
    assert _trace(file, price="2.00").at(MONDAY).price == 2_000_000


def _recorded_traces() -> Path:
    beside = Path(__file__).parents[5] / "shared" / "data"
    folder = Path(os.environ.get("SPOTD_SHARED_DATA", beside)) / "traces"
    if not folder.is_dir():
        pytest.skip(f"no recorded traces in {folder} (set SPOTD_SHARED_DATA)")
    return folder


def test_recorded_traces_are_replayed_as_they_were_recorded() -> None:
    files = [*_recorded_traces().rglob("*_v100_*.json.gz"), *_recorded_traces().rglob("gcp-*/*.json")]
    assert files
    for file in files:
        raw = file.read_bytes()
        content = json.loads(gzip.decompress(raw) if file.suffix == ".gz" else raw)
        gap = timedelta(seconds=content["metadata"]["gap_seconds"])
        source = _trace(file, price=None if "prices" in content else "1.00")
        prices = content.get("prices")
        changed_at = MONDAY
        for number in range(0, len(content["data"]), 7):
            tick = source.at(MONDAY + number * gap + gap / 2)
            assert tick.available == content["data"][number]
            if prices:
                assert tick.price == pytest.approx(prices[number] * 1_000_000, abs=1)
        # Between the changes it announces, nothing changes: the whole recording is covered by its changes.
        for number in range(1, len(content["data"])):
            if source.at(MONDAY + number * gap) != source.at(MONDAY + (number - 1) * gap):
                changed_at = source.next_change(changed_at)
                assert changed_at == MONDAY + number * gap
