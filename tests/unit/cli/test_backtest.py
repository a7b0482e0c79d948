"""`spotctl backtest` on real files."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from spotd.cli.inputs.ranges import parse_range
from spotd.history import History
from spotd_jobs.spec.problems import BadValue
from spotd_providers.contract.values import MicroUsdPerHour, ProviderName
from spotd_providers.kit.boundary import install_command
from tests.cases import every
from tests.unit.api import worlds
from tests.unit.backtest.builders import offer
from tests.unit.cli.conftest import Ctl

JOB = """name = "resnet"
run = "python train.py"
image = "scratch"
[resources]
gpu = "RTX 4090"
[price]
max_price = 0.4
"""
BEGINS = datetime(2026, 10, 1, tzinfo=UTC)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    rows = ["at,provider,offer,gpu,count,price,market,available"]
    for hour in range(60):
        at = (BEGINS + timedelta(hours=hour)).isoformat()
        rows.append(f"{at},vast,a,RTX 4090,1,{0.30 if hour % 7 else 0.45},spot,1")
        rows.append(f"{at},vast,b,RTX 4090,1,0.33,spot,{int(hour % 11 != 3)}")
    (tmp_path / "prices").mkdir()
    (tmp_path / "prices" / "october.csv").write_text("\n".join(rows) + "\n")
    (tmp_path / "train.toml").write_text(JOB)
    return tmp_path


def words(place: Path, *more: str, work: str = "6h") -> tuple[str, ...]:
    base = (
        "backtest",
        str(place / "train.toml"),
        "--history",
        str(place / "prices"),
        "--starts",
        "4",
        "--processes",
        "1",
    )
    return (*base, *(("--work", work) if work else ()), *more)


def test_the_table_the_advice_and_what_they_rest_on(ctl: Ctl, place: Path) -> None:
    result = ctl(*words(place, "--ceiling", "0.2..0.5", "--ceilings", "4"))
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert lines[0].split() == [
        "$/GPU-H", "DONE", "COST", "P90", "FINISH", "P90", "LOST", "STOPPED", "WAITING", "REPEATED", "SAVED",
    ]  # fmt: skip
    assert [line.split()[0] for line in lines[1:5]] == ["0.200", "0.300", "0.400", "0.500"]
    assert lines[1].split()[1:3] == ["0/4", "-"]
    text = result.out
    assert "recommended:" in text
    assert (
        "decided every 1 min; a spot machine whose offer leaves the market is lost; [bids] raise_running: bids follow"
        " the lowest that wins; [bids] hold: an outbid machine is kept for up to 10 min; [moves] most: up to 2 moves to"
        " a cheaper machine; fees vast x1.00; 4 starts, seed 1" in text
    )
    assert "4 of 16 runs were not done when the history ended" in text


def test_a_job_of_several_machines_is_refused_since_no_history_has_their_prices(ctl: Ctl, place: Path) -> None:
    (place / "train.toml").write_text(f'nodes = "2..4"\n{JOB}[checkpoint]\nsaved_by = "first"\n')
    result = ctl(*words(place, "--ceiling", "0.6"))
    assert (result.code, result.out) == (2, "")
    assert "prices of single machines, and the job asks for 2..4 machines\n" in result.err
    assert "hint: without nodes it is played on one machine" in result.err


def test_bids_and_moves_of_the_config_are_played(ctl: Ctl, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = place / "config.toml"
    monkeypatch.setenv("SPOTD_CONFIG", str(config))
    rows = ["at,provider,offer,gpu,count,price,market,available"]
    for hour in range(60):
        at = (BEGINS + timedelta(hours=hour)).isoformat()
        rows.append(f"{at},vast,a,RTX 4090,1,{0.40 + 0.02 * (hour % 6):.2f},spot,1")
        rows.append(f"{at},vast,b,RTX 4090,1,0.20,spot,{(hour // 5) % 2}")
    (place / "prices" / "october.csv").write_text("\n".join(rows) + "\n")
    found = []
    for text in (
        '[bids]\nraise_running = false\nhold = "0s"\n[moves]\nmost = 0\n',
        '[bids]\nraise_running = false\nhold = "0s"\n[moves]\nmost = 5\n',
        '[bids]\nraise_running = false\nhold = "15m"\n[moves]\nmost = 0\n',
        "[moves]\nmost = 0\n",
    ):
        config.write_text(text)
        result = ctl(*words(place, "--ceiling", "0.6", "-o", "json"))
        assert result.code == 0, result.err
        found.append(json.loads(result.out))
    keys = ("raise_running", "hold_s", "moves_most")
    assert [tuple(one["assumptions"][key] for key in keys) for one in found] == [
        (False, 0, 0), (False, 0, 5), (False, 900, 0), (True, 600, 0),
    ]  # fmt: skip
    figures = [tuple(one["rows"][0][key] > 0 for key in ("moves_mean", "bid_changes_mean")) for one in found]
    assert figures == [(False, False), (True, False), (False, False), (False, True)]
    config.write_text("[bids]\nraise_running = 7\n")
    assert "[bids] and [moves] are taken to be the usual ones" in ctl(*words(place, "--ceiling", "0.6")).err


def test_the_longest_span_without_a_price_is_noted(ctl: Ctl, place: Path) -> None:
    history = place / "prices" / "october.csv"
    lines = history.read_text().splitlines()
    kept = [lines[0], *(line for line in lines[1:] if not "2026-10-02T03" <= line[:13] <= "2026-10-02T20")]
    assert "span without a price" not in ctl(*words(place, "--ceiling", "0.4")).err
    history.write_text("\n".join(kept) + "\n")
    assert "the longest span without a price is of" in ctl(*words(place, "--ceiling", "0.4")).err


def test_policies_are_compared_where_there_is_a_deadline(ctl: Ctl, place: Path) -> None:
    more = ("--deadline", "12h", "--policy", "greedy", "--policy", "slack-pacing", "--ceiling", "0.3,0.4")
    result = ctl(*words(place, *more, "--step", "15m", "--starts", "2"))
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    second = [line.replace(" <", "").split()[1] for line in lines[:5]]
    assert second == ["POLICY", "greedy", "greedy", "slack-pacing", "slack-pacing"]
    assert "LATE" in lines[0]
    assert "every run is done within 12.0 h" in result.out
    assert 'market is not "auto"' in result.err


@pytest.mark.process
def test_a_real_process_on_two_cores_prints_the_same_json(ctl: Ctl, place: Path) -> None:
    one = ctl(*words(place, "-o", "json"))
    command = [sys.executable, "-m", "spotd.cli.client", *words(place, "-o", "json", "--processes", "2")]
    two = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (two.returncode, two.stderr) == (0, "")
    assert one.out == two.stdout


@pytest.mark.long
def test_json_holds_the_rows_and_the_one_that_is_recommended(ctl: Ctl, place: Path) -> None:
    one = ctl(*words(place, "-o", "json"))
    assert one.code == 0, one.err
    body = json.loads(one.out)
    assert body["schema"] == 1
    assert [row["ceiling_usd_gpu_h"] for row in body["rows"]] == [0.28, 0.333, 0.387, 0.44, 0.493, 0.547, 0.6]
    assert body["recommended"] in body["rows"]
    assert body["assumptions"]["work_s"] == 6 * 3600
    assert ctl(*words(place, "-o", "json", "--seed", "2")).out != one.out


def test_a_queued_job_is_asked_for_by_name(ctl: Ctl, place: Path) -> None:
    ctl.place.write(worlds.running())
    result = ctl("backtest", "llama-lora", "--history", str(place / "prices"), "--work", "6h", "--ceiling", "1")
    assert result.code == 2
    assert "nothing in the history has the GPU" in result.err
    assert ctl("backtest", "absent", "--history", str(place / "prices"), "--work", "6h").code == 6


@every(
    ("more", "work", "said"),
    [
        ((), "", 'hint: --work 24h, or time = "24h" under [work]'),
        (("--ceiling", "3.0..1.5"), "6h", "goes from high to low; write 1.5..3.0"),
        (("--ceiling", "nan..2"), "6h", "is not a figure of money"),
        (("--ceiling", "0..2"), "6h", "must be above 0"),
        (("--ceiling", "1/h..2"), "6h", "one end is per GPU-hour"),
        ((), "4d", "the history holds 2.5 days, and the job needs 4.0 days"),
        (("--fee", "vast"), "6h", "is no fee multiplier such as vast=1.20"),
        (("--fee", "vast=1e308"), "6h", "is no fee multiplier such as vast=1.20"),
        (("--sells", "H100:0"), "6h", "no GPU with a count"),
        (("--plot", "out.pdf"), "6h", "ends neither in .svg nor in .png"),
        (("--plot", "absent/out.svg"), "6h", "the folder of absent/out.svg does not exist"),
        (("--every", "0s"), "6h", "shorter than 1 s"),
        (("--starts", "0"), "6h", "--starts"),
        (("--starts", "10000"), "6h", "7 ceilings, 1 policies, 10,000 starts: 70,000 runs"),
        (("--step", "1d"), "6h", "longer than 1 h"),
        (("--policy", "greedy"), "6h", "needs --deadline 36h"),
        (("--policy", "hope", "--deadline", "9h"), "6h", "'hope' is not one of"),
        (("--checkpoint-size", "much"), "6h", "is not a size"),
    ],
)
def test_a_wrong_word_is_refused_with_the_way_out(
    ctl: Ctl, place: Path, more: tuple[str, ...], work: str, said: str
) -> None:
    result = ctl(*words(place, *more, work=work))
    assert result.code == 2
    assert said in result.err
    assert "Traceback" not in result.err
    assert result.out == ""


def test_a_broken_history_names_file_and_line(ctl: Ctl, place: Path) -> None:
    file = place / "prices" / "october.csv"
    file.write_text(file.read_text()[:-30])
    result = ctl(*words(place))
    assert result.code == 2
    assert "october.csv:121: 2 columns where the first line has 8: the line is cut off" in result.err
    (place / "train.toml").write_text(JOB.replace("max_price = 0.4", ""))
    file.write_text("")
    assert "no max_price to try ceilings around" in ctl(*words(place)).err
    assert "the history is empty" in ctl(*words(place, "--ceiling", "1")).err


def test_the_daemons_own_history_is_played_with_its_fees(
    ctl: Ctl, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STATE_DIRECTORY", str(place))
    history = History(place / "prices.sqlite", free_bytes=lambda folder: 10**12)
    for half_hour in range(100):
        price = MicroUsdPerHour(300_000 if half_hour % 9 else 350_000)
        one = replace(offer("a", provider=ProviderName("local")), gpu_price=price)
        at = int(BEGINS.timestamp()) + 1800 * half_hour
        history.record(one.provider, [one], complete=True, at=at)
    history.close()
    base = ("backtest", str(place / "train.toml"), "--history", "own", "--work", "6h", "--starts", "2")
    result = ctl(*base, "--processes", "1", "--ceiling", "0.2,0.5")
    assert result.code == 0, result.err
    (fee,) = {row["fee_multiplier"] for row in json.loads(ctl("providers", "-o", "json").out)["providers"]}
    assert f"fees local x{fee:.2f}" in result.out
    assert "recommended: $0.50/GPU-h" in result.out
    given = ctl(*base, "--processes", "1", "--ceiling", "0.5", "--fee", "local=2")
    assert "fees local x2.00" in given.out
    assert "recommended: none" in given.out


def test_a_daemon_without_a_history_is_said(ctl: Ctl, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATE_DIRECTORY", str(place))
    result = ctl("backtest", str(place / "train.toml"), "--history", "own", "--work", "6h")
    assert result.code == 74
    assert "prices.sqlite, does not exist" in result.err


def test_without_matplotlib_the_way_to_it_is_said_at_once(
    ctl: Ctl, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spotd.cli.inputs.options.find_spec", lambda name: None)
    result = ctl(*words(place, "--plot", "out.svg"))
    assert result.code == 2
    assert install_command("plot") in result.err


@pytest.mark.lengthy
@pytest.mark.process  # the first picture ever drawn on a computer asks fc-list for its fonts
@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs the extra plot")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("ending", ["svg", "png"])
def test_the_picture_is_drawn(ctl: Ctl, place: Path, ending: str) -> None:
    pictures = []
    for number in range(2):
        file = place / f"{number}.{ending}"
        result = ctl(*words(place, "--ceiling", "0.3,0.4", "--plot", str(file)))
        assert result.code == 0, result.err
        pictures.append(file.read_bytes())
    assert pictures[0] == pictures[1]
    assert pictures[0].startswith(b"<?xml" if ending == "svg" else b"\x89PNG")


@every(
    ("text", "count", "amounts"),
    [
        ("1.5..3.0", 4, [1_500_000, 2_000_000, 2_500_000, 3_000_000]),
        ("0.0011..0.0012", 5, [1100, 1200]),
        ("2", 7, [2_000_000]),
        ("3,1,1", 7, [1_000_000, 3_000_000]),
        ("2..2", 7, [2_000_000]),
        ("1..2", 1, [2_000_000]),
        ("12/h..24/h", 2, [12_000_000, 24_000_000]),
    ],
)
def test_ranges(text: str, count: int, amounts: list[int]) -> None:
    found = parse_range(text).divided(count).limits
    assert [one.per_gpu_hour or one.machine_hour for one in found] == amounts


def test_a_range_is_bounded() -> None:
    with pytest.raises(BadValue, match="too many"):
        parse_range(",".join(str(one) for one in range(1, 200)))
