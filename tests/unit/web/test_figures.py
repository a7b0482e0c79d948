"""Whatever a host writes into its log, the dashboard stays bounded and draws only what can be drawn."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotd.web.markup import (
    KEYS_MAX,
    LINE_LENGTH_MAX,
    LINES_MAX,
    POINTS_MAX,
    READ_LENGTH_MAX,
    RECORD_LENGTH_MAX,
    VALUE_MAX,
    Figures,
    LogTail,
)
from tests.cases import every


def taken(*lines: str) -> Figures:
    figures = Figures()
    for line in lines:
        figures.take(line)
    return figures


@every(
    ("line", "series"),
    [
        ('{"step": 10, "loss": 2.5}', {"loss": [(10.0, 2.5)]}),
        ('  {"step": 10, "loss": 2, "lr": 1e-4}  ', {"loss": [(10.0, 2.0)], "lr": [(10.0, 1e-4)]}),
        ("{'loss': 0.5, 'epoch': 1.0}", {"loss": [(1.0, 0.5)]}),
        ('{"loss": NaN}', {}),
        ('{"loss": Infinity}', {}),
        ('{"loss": 1e308}', {}),
        ('{"loss": -1e400}', {}),
        ('{"loss": ' + "9" * 400 + "}", {}),
        ('{"loss": true, "name": "x", "nested": {"a": 1}, "list": [1]}', {}),
        ('{"<img src=x>": 1}', {}),
        ('{"__proto__": 1, "constructor": 2}', {"constructor": [(1.0, 2.0)]}),
        ('{":x": 1}', {}),
        ("{}", {}),
        ("{not json}", {}),
        ("loss 2.5", {}),
        ('["step", 1]', {}),
        ("{" * 3000 + "}" * 900, {}),
        ('{"loss": 1, "pad": "' + "x" * RECORD_LENGTH_MAX + '"}', {}),
    ],
)
def test_figures_are_what_json_lines_hold_and_can_be_drawn(line: str, series: dict[str, Any]) -> None:
    assert taken(line).series == series


def test_what_is_left_out_is_counted() -> None:
    assert taken('{"loss": NaN, "big": 1e308, "<b>": 1}').left_out == 3


def test_a_resumed_job_draws_the_steps_that_it_computed_last() -> None:
    steps = [10, 20, 30, 20, 30, 40]
    figures = taken(*(json.dumps({"step": step, "loss": number}) for number, step in enumerate(steps)))
    assert figures.series["loss"] == [(10.0, 0.0), (20.0, 3.0), (30.0, 4.0), (40.0, 5.0)]


def test_series_and_points_are_bounded_and_keep_both_ends() -> None:
    figures = taken(json.dumps({f"k{number}": 1 for number in range(90)}))
    assert len(figures.series) == KEYS_MAX
    figures = taken(*(f'{{"step": {step}, "loss": 1}}' for step in range(3 * POINTS_MAX)))
    points = figures.series["loss"]
    assert len(points) <= POINTS_MAX
    assert (points[0][0], points[-1][0]) == (0.0, 3 * POINTS_MAX - 1)


def test_losses_come_first() -> None:
    assert taken('{"lr": 1, "acc": 1, "eval_loss": 1}').names() == ["eval_loss", "lr", "acc"]


@given(
    st.lists(st.text(max_size=60) | st.dictionaries(st.text(max_size=8), st.floats() | st.integers()).map(json.dumps))
)
def test_no_line_breaks_the_reader(lines: list[str]) -> None:
    for points in taken(*lines).series.values():
        assert all(math.isfinite(x) and abs(y) <= VALUE_MAX for x, y in points)
        assert [x for x, _ in points] == sorted({x for x, _ in points})


def record(text: str, kind: str = "log") -> dict[str, Any]:
    return {"kind": kind, "text": text, "cursor": "1/x"}


def test_lines_are_joined_over_records_and_cleaned_of_controls() -> None:
    tail = LogTail()
    tail.take(record('\x1b[31mred\x1b[0m\n{"step": 1, "lo'))
    tail.take(record('ss": 2}\nprogress 1\rprogress 2\n<b>not bold</b>'))
    assert [text for _, text in tail.shown()] == [
        "red",
        '{"step": 1, "loss": 2}',
        "progress 1",
        "progress 2",
        "<b>not bold</b>",
    ]
    assert tail.figures.series == {"loss": [(1.0, 2.0)]}


def test_a_log_is_bounded_in_lines_in_their_length_and_in_what_is_kept_of_one() -> None:
    tail = LogTail()
    tail.take(record("x" * 1_000_000))
    tail.take(record("\n" + "y\n" * 5_000))
    assert len(tail.shown()) <= LINES_MAX + 1
    assert max(len(text) for _, text in tail.shown()) <= LINE_LENGTH_MAX
    assert len(tail._rest) <= RECORD_LENGTH_MAX


class Endless:
    """A daemon whose job has written without end."""

    def __init__(self) -> None:
        self.queries: list[Any] = []
        self.sent = 0

    def logs(self, _ref: str, query: Any) -> Any:
        self.queries.append(query)
        while True:
            self.sent += 1
            yield {"kind": "log", "text": "z" * 99_999 + "\n", "cursor": f"1/{self.sent}"}


@pytest.mark.long
def test_one_reading_takes_a_share_and_the_next_goes_on_behind_it() -> None:
    daemon, tail = Endless(), LogTail()
    tail.read(daemon, "j")  # type: ignore[arg-type]  # a stand-in
    assert daemon.sent <= READ_LENGTH_MAX / 100_000 + 1
    last = daemon.sent
    tail.read(daemon, "j")  # type: ignore[arg-type]  # as above
    assert daemon.queries[1] == {"after": f"1/{last}"}
