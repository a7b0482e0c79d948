from __future__ import annotations

import importlib.util
import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotd.cli import stdout
from spotd.cli.views.pictures import SERIES_MAX, Canvas, Series, drawn
from spotd_providers.kit.boundary import install_command
from tests.unit.api import made_responses, worlds
from tests.unit.cli.conftest import Ctl

needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs the extra plot")


def chart(*series: Series, width: int = 40, height: int = 6, dots: bool = False, colour: bool = False) -> list[str]:
    canvas = Canvas(width=width, height=height, dots=dots, colour=colour)
    return drawn(
        series, canvas, begin=0.0, end=100.0, value_text=lambda usd: f"{usd:.1f}", time_text=lambda at: f"{at:.0f}"
    )


def bare(line: str) -> str:
    return re.sub("\x1b\\[[0-9;]*m", "", line)


def test_a_rise_is_drawn_as_a_step_with_its_figures_and_times() -> None:
    assert chart(Series(name="a", spans=[(0, 50, 1.0), (50, 100, 3.0)]), width=25) == [
        "3.0 |          **********",
        "    |          *",
        "2.0 |          *",
        "    |          *",
        "1.0 |***********",
        "     0       50       100",
    ]


def test_a_gap_in_the_data_stays_empty() -> None:
    lines = chart(Series(name="a", spans=[(0, 25, 1.0), (75, 100, 1.0)]), width=25)
    (line,) = [line for line in lines if "*" in line]
    assert line.endswith("|*****          *****")
    dots = chart(Series(name="a", spans=[(0, 25, 1.0), (75, 100, 1.0)]), width=25, dots=True)
    (line,) = [line for line in dots if any("\u2800" < char <= "\u28ff" for char in line)]
    assert line[-15:-5] == " " * 10


def test_without_colour_each_of_several_lines_has_its_letter() -> None:
    both = [Series(name="a", spans=[(0, 100, 1.0)]), Series(name="b", spans=[(0, 100, 2.0)])]
    text = "".join(chart(*both, dots=True))
    assert {"*", "o"} <= set(text)
    assert not any("\u2800" <= char <= "\u28ff" for char in text)
    assert any("\u2800" <= char <= "\u28ff" for char in "".join(chart(*both, dots=True, colour=True)))


VALUES = st.one_of(st.floats(allow_nan=True, allow_infinity=True), st.floats(0, 10), st.just(1e308), st.just(0.0))
SPANS = st.lists(
    st.tuples(st.floats(-50, 150), st.floats(-50, 150), VALUES).map(lambda row: (min(row[:2]), max(row[:2]), row[2])),
    max_size=12,
)


@given(
    many=st.lists(SPANS, max_size=SERIES_MAX + 2),
    width=st.integers(1, 300),
    height=st.integers(1, 40),
    dots=st.booleans(),
    colour=st.booleans(),
)
def test_no_chart_is_wider_or_higher_than_its_canvas(
    many: list[Any], width: int, height: int, dots: bool, colour: bool
) -> None:
    lines = chart(
        *(Series(name=str(n), spans=spans) for n, spans in enumerate(many)),
        width=width, height=height, dots=dots, colour=colour,
    )  # fmt: skip
    assert len(lines) <= max(height, 2)
    assert all(len(bare(line)) <= max(width, 1) for line in lines)
    shown = [value for spans in many[:SERIES_MAX] for *_, value in spans if math.isfinite(value) and 0 <= value <= 1e12]
    assert bool(lines) is bool(shown)


@pytest.fixture
def past(ctl: Ctl) -> Ctl:
    """A week in which polling began after three days, and eight series."""
    buckets = [
        made_responses.past_bucket(
            at=f"2026-11-{day}T10:00:00.000Z", begins=f"2026-11-{day}T{'15' if day == 17 else '10'}:30:00.000Z"
        )
        for day in (17, 18, 20)
    ]
    prices = [{"gpu": f"H100_{n}", "market": "spot", "buckets": buckets} for n in range(8)]
    ctl.place.answers("prices.history", made_responses.history(prices=prices, bucket_s=86_400))
    return ctl


def test_the_table_says_when_the_data_begin(past: Ctl) -> None:
    assert past("history", "--gpu", "h100").out.splitlines()[1].startswith("2026-11-17 15:30:00  H100_0")


def test_a_terminal_gets_a_chart_and_a_sentence_on_what_is_left_out(past: Ctl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stdout, "is_terminal", lambda: True)
    monkeypatch.setattr(stdout, "size", lambda: (80, 24))
    monkeypatch.setenv("NO_COLOR", "1")
    result = past("history", "--gpu", "h100")
    lines = result.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1].startswith("@  H100_5  spot    2026-11-17 15:30:00")
    assert "6 of 8 are drawn, not H100_6 spot, H100_7 spot: " in result.err
    assert "FROM" in past("history", "--gpu", "h100", "-o", "table").out.splitlines()[0]
    assert "FROM" in past("history", "--gpu", "h100", "--every", "1d").out.splitlines()[0]


def test_a_pipe_gets_a_chart_only_where_it_asks_for_one(past: Ctl) -> None:
    assert past("history", "-o", "chart").out.splitlines()[-1].startswith("@  H100_5")
    assert json.loads(past("history", "-o", "json").out)["bucket_s"] == 86_400


@pytest.mark.long
@needs_matplotlib
@pytest.mark.process  # the first picture ever drawn on a computer asks fc-list for its fonts
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_prices_are_drawn_into_a_file(past: Ctl, tmp_path: Path) -> None:
    path = tmp_path / "out.png"
    result = past("history", "--gpu", "h100", "--plot", str(path))
    assert (result.code, result.err) == (0, f"drawn into {path}\n")
    assert path.read_bytes().startswith(b"\x89PNG")


@needs_matplotlib
@pytest.mark.process  # the first picture ever drawn on a computer asks fc-list for its fonts
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_timeline_of_a_job_is_drawn_whatever_its_hosts_are_called(ctl: Ctl, tmp_path: Path) -> None:
    ctl.place.write(worlds.running(host="h$_{\\frac3\x1b]0;x"))
    path = tmp_path / "job.svg"
    result = ctl("show", "llama-lora", "--plot", str(path))
    assert (result.code, result.err) == (0, f"drawn into {path}\n")
    assert path.stat().st_size > 5_000


@needs_matplotlib
@pytest.mark.process  # the first picture ever drawn on a computer asks fc-list for its fonts
def test_a_job_without_a_machine_and_with_an_absurd_checkpoint_is_drawn_without_a_warning(
    ctl: Ctl, tmp_path: Path
) -> None:
    ctl.place.write(worlds.running())
    absurd = {**made_responses.checkpoint(), "at": "9999-12-31T23:59:59.000Z", "attempt": 1}
    ctl.place.answers("checkpoints.entries", [absurd])
    path = tmp_path / "job.png"
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert ctl("show", "llama-lora", "--plot", str(path)).code == 0
        ctl.place.write(worlds.waiting())
        assert ctl("show", "prep", "--plot", str(path)).code == 0


def test_what_cannot_be_drawn_is_refused_before_the_daemon_is_asked(ctl: Ctl, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "ends neither in .svg nor in .png" in ctl("show", "llama-lora", "--plot", "out.pdf").err
    monkeypatch.setattr("spotd.cli.inputs.options.find_spec", lambda name: None)
    assert install_command("plot") in ctl("history", "--plot", "out.svg").err
