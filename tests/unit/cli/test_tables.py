from __future__ import annotations

import re

from spotd.cli.commands.jobs import ls_columns
from spotd.cli.commands.prices import EXPLAIN_COLUMNS
from spotd.cli.views.table import Cell, Column, fitted, plain, rows_of, state_cell, widths_for
from spotd.words import STATE_COLOURS
from tests.cases import every
from tests.unit.api import made_responses

JOBS = [
    made_responses.job(),
    made_responses.waiting_job(),
    made_responses.job(
        id="6k0a3xyz12", name="gpt-neo-with-a-long-name-that-goes-on", state="RECOVERING", provider=None, host=None,
        gpu="A100-80GB", gpu_count=8, gpu_wanted="A100-80GB:8",
        effective_usd_h=None, spent_usd=212.42, saved_usd=112.1, recoveries=12,
        checkpoint=made_responses.checkpoint(step=None, name="checkpoint-120000"),
    ),
]  # fmt: skip
LS_COLUMNS = ls_columns(made_responses.NOW)
ROWS = rows_of(LS_COLUMNS, JOBS)


def drawn(width: int) -> tuple[list[str], tuple[str, ...]]:
    text, left_out = fitted(LS_COLUMNS, ROWS, width=width, colour=False)
    return [line.rstrip() for line in re.sub("\x1b\\[[0-9;]*m", "", text).splitlines()], left_out


LS_120 = """\
ID         NAME                      STATE         GPU         WHERE     $/H  SPENT  SAVED PREEMPT CKPT              AGE
6k0a1b2c3d llama-lora                RUNNING       H100:1      local/h3 2.31   4.62   3.18       0 1200               3h
6k0a9zzzzz prep                      WAITING_PRICE H100:1      -           -   0.00   0.00       0 -                  3h
6k0a3xyz12 gpt-neo-with-a-long-name… RECOVERING    A100-80GB:8 -           - 212.42 112.10      12 checkpoint-120000  3h
"""


def test_ls_at_120_columns_is_whole_but_for_a_long_name() -> None:
    assert drawn(120) == (LS_120.splitlines(), ())


def test_ls_at_80_columns_keeps_every_column() -> None:
    assert drawn(80) == (
        [
            "ID         NAME     STATE      GPU   WHERE  $/H  SPENT  SAVED PREEMPT CKPT   AGE",
            "6k0a1b2c3d llama-l… RUNNING    H100… loca… 2.31   4.62   3.18       0 1200    3h",
            "6k0a9zzzzz prep     WAITING_P… H100… -        -   0.00   0.00       0 -       3h",
            "6k0a3xyz12 gpt-neo… RECOVERING A100… -        - 212.42 112.10      12 check…  3h",
        ],
        (),
    )


def test_on_a_narrower_terminal_the_least_important_columns_go() -> None:
    lines, left_out = drawn(70)
    assert left_out == ("SAVED", "PREEMPT")
    assert max(map(len, lines)) <= 70
    assert lines[0].endswith("AGE")


@every("width", [40, 60, 79, 80, 81, 100, 119, 120, 200])
def test_no_line_is_ever_wider_than_the_terminal(width: int) -> None:
    text, _ = fitted(EXPLAIN_COLUMNS, rows_of(EXPLAIN_COLUMNS, [made_responses.quote()]), width=width, colour=True)
    assert max(len(re.sub("\x1b\\[[0-9;]*m", "", line)) for line in text.splitlines()) <= width
    assert len(text.splitlines()) == 2


def test_columns_shrink_from_the_widest() -> None:
    columns = [Column("A", str, least=3), Column("B", str, least=3), Column("C", str)]
    assert dict(widths_for(columns, [10, 6, 5], room=20)) == {0: 7, 1: 6, 2: 5}


def test_a_column_is_dropped_only_when_shrinking_does_not_do() -> None:
    columns = [Column("A", str, least=3), Column("B", str, drop=1), Column("C", str, drop=2)]
    assert dict(widths_for(columns, [10, 6, 6], room=12)) == {0: 5, 1: 6}


def test_colour_is_only_where_it_is_wanted() -> None:
    rows = [(Cell("RUNNING", "green"),)]
    assert "\x1b[32m" in fitted([Column("S", str)], rows, width=80, colour=True)[0]
    assert "32m" not in fitted([Column("S", str)], rows, width=80, colour=False)[0]


def test_nothing_but_text_goes_to_a_terminal_that_wants_no_colour() -> None:
    assert "\x1b" not in fitted(LS_COLUMNS, ROWS, width=100, colour=False)[0]


def test_wide_characters_take_the_two_columns_that_a_terminal_gives_them() -> None:
    columns = [Column("NAME", str, least=4), Column("B", str)]
    wide, plain_row = fitted(columns, [("実験番号", "x"), ("abc", "y")], width=80, colour=False)[0].splitlines()[1:]
    assert wide == "実験番号  x"
    assert plain_row == "abc       y"
    cut = fitted(columns, [("実験番号", "x")], width=8, colour=False)[0].splitlines()[1]
    assert cut == "実験 … x"


def test_every_style_of_a_state_can_be_drawn() -> None:
    rows = [(state_cell(state),) for state in (*STATE_COLOURS, "CANCELLED", "CANCELLING")]
    text, _ = fitted([Column("S", str)], rows, width=80, colour=True)
    assert text.count("\x1b[0m") == len(rows) + 1


def test_markup_in_a_name_is_text() -> None:
    text, _ = fitted([Column("S", str)], [("[red]x[/red]",)], width=80, colour=True)
    assert "[red]x[/red]" in text


def test_plain_tables_are_never_cut() -> None:
    assert "gpt-neo-with-a-long-name-that-goes-on" in plain(LS_COLUMNS, ROWS)
