"""How often the daemon is asked, and for what; and how a table is fitted."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("textual", reason="needs the extra tui")

from spotd.client.daemon import Daemon
from spotd.top.columns import EVENT_COLUMNS, MARKET_COLUMNS, fitted_widths, job_columns, machine_columns
from spotd.top.screens import Questions
from spotd.words import sized
from tests.unit.cli.conftest import Ctl


def test_the_pause_doubles_while_the_daemon_is_away_up_to_a_bound(tmp_path: Path) -> None:
    questions = Questions(Daemon(tmp_path / "none.sock"))
    assert [questions.snapshot().retry_s for _ in range(7)] == [2, 4, 8, 16, 30, 30, 30]


def test_a_daemon_that_answers_slowly_is_asked_seldom(ctl: Ctl) -> None:
    ctl.place.write_three_jobs()
    ticks = count(0.0, 0.7)
    assert Questions(Daemon(ctl.place.socket), ticks=lambda: next(ticks)).snapshot().retry_s == pytest.approx(7.0)
    assert Questions(Daemon(ctl.place.socket), ticks=lambda: 1.0).snapshot().retry_s == 2.0


def test_events_are_asked_for_once_and_prices_only_where_they_are_shown(ctl: Ctl) -> None:
    ctl.place.write_three_jobs()
    at = [0.0]
    questions = Questions(Daemon(ctl.place.socket), ticks=lambda: at[0])
    first = questions.snapshot()
    asked = ctl.place.asked("prices.quotes")
    ctl("cancel", "prep", "-y")
    at[0] = 100.0
    second = questions.snapshot()
    assert asked == []
    assert len(second.events) == len(first.events) + 1
    assert second.events[0]["kind"] == "job.cancelled"
    questions.wants_prices = True
    questions.snapshot()
    at[0] = 110.0
    questions.snapshot()
    assert len(asked) == 1


@given(room=st.integers(1, 300))
def test_no_row_is_wider_than_its_terminal(room: int) -> None:
    for columns in (job_columns(str), machine_columns(str), MARKET_COLUMNS, EVENT_COLUMNS):
        widths = fitted_widths(columns, room)
        assert len(widths) == 1 or sum(widths.values()) + len(widths) - 1 <= max(room, 2 * len(widths) - 1)


@given(text=st.text(max_size=40), room=st.integers(0, 30), right=st.booleans())
def test_a_cell_has_exactly_its_width(text: str, room: int, right: bool) -> None:
    from rich.cells import cell_len

    assert cell_len(sized(text, room, right=right)) == room


def test_a_defect_of_the_feed_is_said_and_not_hidden_behind_an_old_screen(ctl: Ctl) -> None:
    from spotd.top.screens import Feed, Snapshot

    ctl.place.write_three_jobs()
    questions = Questions(Daemon(ctl.place.socket))
    questions.snapshot()
    ctl.place.answers("jobs.page", {"jobs": []})
    seen: list[Snapshot] = []

    def deliver(snapshot: Snapshot) -> None:
        seen.append(snapshot)
        feed.stop()

    feed = Feed(questions, deliver)
    feed._run()
    assert (seen[0].error, len(seen[0].jobs), seen[0].retry_s) == ("a defect of spotd itself: KeyError: 'paused'", 3, 2)
