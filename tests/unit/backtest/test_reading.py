"""Histories as people and programs leave them: read right, or refused with cause, place and way out."""

from __future__ import annotations

import gzip
import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from spotd.backtest import recorded
from spotd.backtest.recorded import GONE, UNKNOWN, BacktestRefused
from spotd.backtest.rows import MarketCollector
from spotd.backtest.traces import HistoryRead, TraceDefaults, changes_of, read_history
from spotd.history import History
from spotd.history.file import open_file
from spotd_jobs.spec.model import GpuAlternative
from spotd_providers.contract.values import Market, MicroUsdPerHour, ProviderName
from tests.cases import every
from tests.unit.backtest.builders import offer

HEAD = "at,provider,offer,gpu,count,price,market,available\n"
ROW = "2026-11-01T00:00:00Z,vast,a,RTX 4090,1,0.30,spot,1\n"
LATER = "2026-11-01T06:00:00Z,vast,a,RTX 4090,1,0.35,spot,1\n"
ALL = TraceDefaults()


def read(place: Path, defaults: TraceDefaults = ALL) -> HistoryRead:
    return read_history(place, lambda gpu, count: gpu in {"RTX_4090", "V100_16"} and count == 1, defaults)


def written(folder: Path, text: str | bytes, name: str = "prices.csv") -> Path:
    (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
    return folder


def test_a_csv_becomes_series_and_changes(tmp_path: Path) -> None:
    text = (
        HEAD
        + ROW
        + "2026-11-01T01:00:00+01:00,cloud,b,rtx4090,1,0.5,on-demand,\n"
        + "2026-11-01T01:00:00Z,vast,a,RTX 4090,1,,spot,0\n"
        + "2026-11-01T01:00:00Z,vast,h,H100 SXM,8,9.5,spot,1\n"
        + LATER
    )
    market = read(written(tmp_path, text)).market
    assert [(one.offer_id, one.market, one.pays_bid) for one in market.series] == [
        ("a", Market.SPOT, True),
        ("b", Market.ON_DEMAND, False),
    ]
    assert list(market.prices) == [300_000, 500_000, GONE, 350_000]
    assert market.ends_at - market.begins_at == 6 * 3600


def test_a_machine_without_a_gpu_has_a_count_of_none(tmp_path: Path) -> None:
    text = HEAD + ROW.replace("RTX 4090,1", "CPU,0") + LATER.replace("RTX 4090,1", "CPU,0")
    market = read_history(written(tmp_path, text), lambda gpu, count: count == 0, ALL).market
    assert [(one.gpu, one.gpu_count) for one in market.series] == [("CPU", 0)]


def test_json_lines_and_gzip_read_the_same(tmp_path: Path) -> None:
    names = HEAD.strip().split(",")
    lines = [dict(zip(names, row.strip().split(","), strict=True)) for row in (ROW, LATER)]
    rows = "\n".join(json.dumps({**line, "count": 1, "price": float(line["price"])}) for line in lines)
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one = read(written(tmp_path / "one", gzip.compress(rows.encode()), "x.jsonl.gz")).market
    two = read(written(tmp_path / "two", HEAD + ROW + LATER)).market
    assert (one.series, one.prices, one.instants) == (two.series, two.prices, two.instants)


@every(
    ("text", "place", "cause"),
    [
        pytest.param("", "", "the history is empty", id="empty file"),
        pytest.param(HEAD, "", "the history is empty", id="no rows"),
        pytest.param("a,b\n1,2\n", ":1", "column at is missing", id="other columns"),
        pytest.param(HEAD.replace("offer", "offerr"), ":1", "column offer is missing", id="misspelt"),
        pytest.param(HEAD.replace("available", "availible"), ":1", "did you mean available", id="unknown column"),
        pytest.param(HEAD + ROW + ROW[:40], ":3", "the line is cut off", id="half a line"),
        pytest.param(HEAD + ROW.replace("0.30", "nan"), ":2", "price 'nan'", id="NaN"),
        pytest.param(HEAD + ROW.replace("0.30", "1e308"), ":2", "price '1e308'", id="1e308"),
        pytest.param(HEAD + ROW.replace("0.30", "-1"), ":2", "price '-1'", id="negative"),
        pytest.param(HEAD + ROW.replace("0.30", "0"), ":2", "price '0'", id="nothing"),
        pytest.param(HEAD + ROW.replace("0.30", ""), ":2", "price ''", id="no price"),
        pytest.param(HEAD + ROW.replace("Z", ""), ":2", "has no time zone", id="no zone"),
        pytest.param(HEAD + ROW.replace("2026-11-01", "9999-12-31"), ":2", "not between 1970 and 2100", id="9999"),
        pytest.param(HEAD + ROW.replace("2026-11-01", "yesterday"), ":2", "is no instant", id="no instant"),
        pytest.param(HEAD + LATER + ROW, ":3", "is before that of a line above", id="out of order"),
        pytest.param(HEAD + ROW, "", "one instant only", id="one instant"),
        pytest.param(HEAD + ROW.replace(",1,0", ",0,0"), ":2", "count '0'", id="count 0"),
        pytest.param(HEAD + ROW.replace("spot,1", "spot,-1"), ":2", "available '-1'", id="available -1"),
        pytest.param(HEAD + ROW.replace("spot", "sport"), ":2", "neither spot nor on-demand", id="market"),
        pytest.param(HEAD + ROW.replace("RTX 4090", "L40S") + LATER.replace("RTX 4090", "L40S"), "",
                     "nothing in the history has the GPU", id="another GPU"),
        pytest.param(HEAD.encode() + b"\xff\xfe\n", ":2", "not UTF-8", id="bytes"),
        pytest.param(HEAD + '"' + "x" * 50, ":2", "", id="open quote"),
        pytest.param(HEAD + "x" * (recorded.LINE_MAX + 10), ":2", "longer than", id="endless line"),
    ],
)  # fmt: skip
def test_a_broken_csv_is_refused_with_its_place(tmp_path: Path, text: str | bytes, place: str, cause: str) -> None:
    with pytest.raises(BacktestRefused) as refused:
        read(written(tmp_path, text))
    assert cause in refused.value.message
    assert refused.value.hint
    if place:
        assert f"prices.csv{place}" in refused.value.message


GOOD = json.dumps({"at": "2026-11-01T00:00:00Z", "provider": "p", "offer": "o", "gpu": "RTX 4090", "count": 1,
                   "market": "spot", "price": 0.3})  # fmt: skip


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ('{"at": "2026', "cut off or damaged"),
        ("[" * 100_000, "cut off or damaged"),
        ("[1]", "not a JSON object"),
        ("{}", "at is missing"),
        (GOOD.replace('"p"', "{}"), "dict"),
        (GOOD.replace("0.3", "NaN"), "price 'nan'"),
        (GOOD.replace("offer", "ofer"), "offer is missing"),
    ],
)  # fmt: skip
def test_a_broken_line_of_json_is_refused_with_its_place(tmp_path: Path, line: str, cause: str) -> None:
    with pytest.raises(BacktestRefused, match=r"x\.jsonl:1: ") as refused:
        read(written(tmp_path, line + "\n", "x.jsonl"))
    assert cause in refused.value.message


def test_folders_without_a_history_are_refused(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "absent", written(tmp_path, "x", "notes.txt") / "notes.txt"):
        with pytest.raises(BacktestRefused) as refused:
            read(place)
        assert refused.value.hint


def test_more_than_is_read_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "big.csv").open("wb") as file:
        file.truncate(10 * 10**9)
    with pytest.raises(BacktestRefused, match=r"holds 10\.0 GB"):
        read(tmp_path)


def test_a_file_that_unpacks_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "BYTES_MAX", 100_000)
    written(tmp_path, gzip.compress((HEAD + ROW * 5_000).encode()), "x.csv.gz")
    with pytest.raises(BacktestRefused, match="more than is read"):
        read(tmp_path)


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    written(tmp_path, gzip.compress((HEAD + ROW * 100).encode())[:-12], "x.csv.gz")
    with pytest.raises(BacktestRefused, match="damaged or cut off"):
        read(tmp_path)


# --- traces ---------------------------------------------------------------------------------------------------


def trace(**keys: object) -> str:
    metadata = {"gap_seconds": 600, "zone": "west-2a", "accelerator": "V100", "gpus": 1}
    return json.dumps({"metadata": {**metadata, **keys}, "data": [1, 1, 0, 2], "prices": [0.9, 1.0, 1.0, 1.1]})


def test_a_trace_becomes_a_spot_series_and_one_on_demand(tmp_path: Path) -> None:
    text = trace(start_time_utc="2026-01-01T00:00:00Z", on_demand_price_usd_h=3.06)
    found = read(written(tmp_path, text, "a.json"))
    spot, always = found.market.series
    assert (spot.market, spot.gpu, spot.region, always.market) == (Market.SPOT, "V100_16", "west-2a", Market.ON_DEMAND)
    of_spot = [price for number, price in zip(found.market.numbers, found.market.prices, strict=True) if number == 0]
    assert of_spot == [900_000, 1_000_000, GONE, 1_100_000]
    assert found.market.ends_at - found.market.begins_at == 4 * 600
    assert not found.notes


def test_a_trace_that_says_little_needs_the_users_word(tmp_path: Path) -> None:
    text = json.dumps({"metadata": {"gap_seconds": 600}, "data": [1, 0, 1]})
    written(tmp_path, text, "somewhere.json")
    with pytest.raises(BacktestRefused, match="which GPU") as refused:
        read(tmp_path)
    assert "--sells" in refused.value.hint
    with pytest.raises(BacktestRefused, match="holds no prices") as refused:
        read(tmp_path, TraceDefaults(sells=GpuAlternative(name="V100", count=1)))
    assert "--spot-price" in refused.value.hint
    found = read(tmp_path, TraceDefaults(sells=GpuAlternative(name="V100", count=1), spot_price=970_000))
    assert list(found.market.prices) == [970_000, GONE, 970_000]
    assert "does not say when it began" in found.notes[0]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("{", "not JSON"),
        ("[]", "no metadata"),
        (trace(gap_seconds=0), "gap_seconds 0"),
        (trace(gap_seconds=float("nan")), "gap_seconds nan"),
        (trace(start_time_utc="2026-01-01"), "no time zone"),
        (trace().replace("[1, 1, 0, 2]", "[1, 1, 0]"), "prices has 4 ticks, data has 3"),
        (trace().replace("[1, 1, 0, 2]", "[1, 1, 0, -2]"), "data[3] -2"),
        (trace().replace("0.9", "NaN"), "prices[0] 'nan'"),
        (trace().replace("[1, 1, 0, 2]", "{}"), "data is no list"),
    ],
)
def test_a_broken_trace_is_refused_with_its_place(tmp_path: Path, text: str, cause: str) -> None:
    with pytest.raises(BacktestRefused, match=r"a\.json") as refused:
        read(written(tmp_path, text, "a.json"))
    assert cause in refused.value.message
    assert refused.value.hint


# --- the daemon's own -----------------------------------------------------------------------------------------


def test_the_daemons_own_history_is_read_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "prices.sqlite"
    vast, begins = ProviderName("vast"), 1_790_000_000
    history = History(path, free_bytes=lambda folder: 10**12)
    for minute, price in ((0, 300_000), (5, 350_000), (30, None), (45, 320_000)):
        offers = [] if price is None else [replace(offer("a"), gpu_price=MicroUsdPerHour(price))]
        history.record(vast, offers, complete=True, at=begins + 60 * minute)
    market = read(path).market
    assert [(one.provider, one.pays_bid) for one in market.series] == [(vast, True)]
    assert list(market.prices) == [300_000, 350_000, GONE, 320_000, UNKNOWN]
    assert [at - begins for at in market.instants] == [0, 300, 1800, 2700, 2701]
    history.close()


def test_the_rolled_up_past_is_coarser_and_says_so(tmp_path: Path) -> None:
    """Three weeks: of the first two, one price for each offer and quarter of a day is left."""
    path, vast, begins, day = tmp_path / "prices.sqlite", ProviderName("vast"), 1_790_000_000 // 86_400 * 86_400, 86_400
    history = History(path, free_bytes=lambda folder: 10**12)
    for half_hour in range(21 * 48):
        at = begins + 1800 * half_hour
        offers = [replace(offer("a"), gpu_price=MicroUsdPerHour(300_000 + 1000 * half_hour))]
        if half_hour % 12 == 11:
            offers = []  # the last half an hour of each quarter
        history.record(vast, offers, complete=True, at=at)
        while half_hour % 48 == 0 and history.step(at):
            pass
    found = read(path)
    history.close()
    (note,) = found.notes
    assert "holds one price for each offer and quarter of a day" in note
    pairs = [*zip(found.market.instants, found.market.prices, strict=True)]
    early = [(at - begins, price) for at, price in pairs if at < begins + day]
    assert [at for at, _ in early] == [0, 19_800, 21_600, 41_400, 43_200, 63_000, 64_800, 84_600]
    assert [price for _, price in early][:3] == [305_000, GONE, 317_000]
    late = [price for at, price in pairs if at >= begins + 20 * day]
    assert len(late) > 40
    assert [*found.market.instants] == sorted(found.market.instants)


def test_a_file_that_is_no_price_history_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"SQLite format 3\0" + b"x" * 5000, b"hello" * 1000):
        path = tmp_path / "prices.sqlite"
        path.write_bytes(content)
        with pytest.raises(BacktestRefused, match=r"prices\.sqlite"):
            read(path)


def test_time_without_polls_is_unknown_and_what_is_not_back_after_it_is_gone() -> None:
    spells = [(0, 100, 7), (150, 200, 8)]
    assert list(changes_of(spells, [(0, 120), (150, 300)])) == [
        (0, 7), (100, GONE), (120, UNKNOWN), (150, 8), (200, GONE), (300, UNKNOWN),
    ]  # fmt: skip
    assert list(changes_of([(0, 50, 7)], [(0, 50), (90, 95)])) == [(0, 7), (50, UNKNOWN), (90, GONE), (95, UNKNOWN)]


def test_too_many_changes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spotd.backtest.rows.CHANGES_MAX", 3)
    found = MarketCollector(lambda gpu, count: True)
    number = found.number_of(offer())
    assert number is not None
    for at in range(3):
        found.add(at, number, 5)
    with pytest.raises(BacktestRefused, match="more than 3 changes"):
        found.add(4, number, 5)


@pytest.mark.parametrize(
    ("name", "line"), [("x.csv.gz", "\n"), ("x.csv", "\r\n"), ("x.jsonl.gz", "\n"), ("x.jsonl", " \t\n")]
)
def test_empty_lines_without_end_are_refused_before_they_are_all_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, line: str
) -> None:
    monkeypatch.setattr(recorded, "EMPTY_LINES_MAX", 1_000)
    reader = recorded.Reader()
    monkeypatch.setattr("spotd.backtest.traces.Reader", lambda: reader)
    data = (HEAD + ROW if "csv" in name else "").encode() + line.encode() * 100_000
    with pytest.raises(BacktestRefused, match="more than 1,000 empty lines"):
        read(written(tmp_path, gzip.compress(data) if name.endswith(".gz") else data, name))
    assert reader.bytes_read < 5_000


def test_a_few_empty_lines_are_nothing(tmp_path: Path) -> None:
    assert len(read(written(tmp_path, HEAD + "\n" * 900 + ROW + "\n\n" + LATER)).market.series) == 1


ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT"
FORGED = {
    "points": "VIEW points AS ENDLESS 1 AS series, x AS at, 1 AS price FROM n",
    "slots": "VIEW slots AS ENDLESS 1 AS series, x AS slot, 1 AS typical, 1 AS offered_s FROM n",
    "series": "VIEW series AS ENDLESS x AS id, 1 AS kind, 'a' AS offer, 'b' AS pool, 1 AS storage FROM n",
    "kinds": "VIEW kinds AS ENDLESS x AS id, 'v' AS provider, 'g' AS gpu, 1 AS gpu_count, 'spot' AS market FROM n",
    "watched": "VIEW watched AS ENDLESS 'v' AS provider, x AS since, x AS until FROM n",
    "kept": "TABLE kept (name TEXT, value INTEGER AS (length(zeroblob(1000000000))))",
}


@pytest.mark.parametrize("table", FORGED)
def test_a_price_history_that_holds_a_view_or_a_computed_column_is_refused(tmp_path: Path, table: str) -> None:
    path = tmp_path / "prices.sqlite"
    open_file(path, bytes_max=10**9).close()
    with closing(sqlite3.connect(path)) as forged:
        forged.execute(f"DROP TABLE {table}")
        forged.execute("CREATE " + FORGED[table].replace("ENDLESS", ENDLESS))
        forged.commit()
    with pytest.raises(BacktestRefused, match="other tables or views than a price history"):
        read(path)


def test_a_link_out_of_the_folder_is_refused_without_a_line_of_what_it_leads_to(tmp_path: Path) -> None:
    folder, secret = tmp_path / "history", tmp_path / "shadow"
    folder.mkdir()
    secret.write_text("hunter2,x\nhunter2\n")
    written(folder, HEAD + ROW + LATER)
    (folder / "same.csv").symlink_to("prices.csv")
    read(folder)
    for name in ("z.csv", "z.jsonl", "z.json", "z.sqlite"):
        (folder / name).symlink_to(secret)
        with pytest.raises(BacktestRefused, match="is a link that leads out of the folder") as refused:
            read(folder)
        assert "hunter2" not in str(refused.value)
        (folder / name).unlink()
