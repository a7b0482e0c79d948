"""What is printed on a terminal that is too narrow, or where there is nothing to print."""

from __future__ import annotations

import pytest

from spotd.cli import stderr, stdout
from spotd.cli.commands import logs as events_command
from tests.unit.api import made_responses, worlds
from tests.unit.cli.conftest import Ctl


@pytest.fixture
def terminal(ctl: Ctl, monkeypatch: pytest.MonkeyPatch) -> Ctl:
    """A terminal of 50 columns."""
    monkeypatch.setattr(stdout, "is_terminal", lambda: True)
    monkeypatch.setattr(stdout, "width", lambda: 50)
    monkeypatch.setenv("NO_COLOR", "1")
    return ctl


@pytest.mark.parametrize("command", ["show", "why"])
def test_long_sentences_are_folded_between_words_below_their_own_column(terminal: Ctl, command: str) -> None:
    terminal.place.write_three_jobs()
    terminal.place.cycle()
    lines = terminal(command, "prep").out.splitlines()
    assert max(map(len, lines)) <= 50
    assert "            " in next(line for line in lines if line.startswith(" " * 12))


def test_a_pipe_gets_each_sentence_on_one_line(ctl: Ctl) -> None:
    ctl.place.write_three_jobs()
    assert any(len(line) > 100 for line in ctl("why", "prep").out.splitlines())


def test_a_screen_gets_the_newest_events_and_a_pipe_all(ctl: Ctl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_command, "SCREEN_MAX", 2)
    ctl.place.write_three_jobs()
    everything = ctl("events").out.splitlines()
    assert len(everything) > 2
    monkeypatch.setattr(stdout, "is_terminal", lambda: True)
    monkeypatch.setattr(stdout, "width", lambda: 300)
    shown = ctl("events")
    assert shown.out.splitlines() == everything[-2:]
    assert "the newest 2 events" in shown.err


def test_a_log_without_a_line_is_said_to_be_empty(ctl: Ctl) -> None:
    ctl.place.write_three_jobs()
    result = ctl("logs", "prep")
    assert (result.code, result.out) == (0, "")
    assert "prep has written nothing yet; spotctl why prep" in result.err


@pytest.mark.parametrize("command", [("cancel", "nobody"), ("ceiling", "nobody", "2")], ids=" ".join)
def test_no_question_is_asked_about_a_job_that_is_not_there(
    ctl: Ctl, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setattr(stderr, "can_ask", lambda: True)
    result = ctl(*command)
    assert (result.code, result.err) == (6, "error: there is no job 'nobody'\nhint: spotctl ls\n")


def test_the_question_about_a_ceiling_names_the_old_one(ctl: Ctl, monkeypatch: pytest.MonkeyPatch) -> None:
    ctl.place.write(worlds.running())
    monkeypatch.setattr(stderr, "can_ask", lambda: True)
    asked: list[str] = []

    def ask(question: str) -> bool:
        asked.append(question)
        return False

    monkeypatch.setattr(stderr, "ask", ask)
    result = ctl("ceiling", "llama-lora", "2.60")
    assert (result.code, result.err) == (130, "nothing was changed\n")
    assert asked == ["change the ceiling of llama-lora from $2.400 per GPU-hour to 2.60?"]


def test_that_no_ceiling_applies_is_said_once(ctl: Ctl) -> None:
    quotes = [
        made_responses.quote(gpu=f"G{number}", ceiling_usd_gpu_h=None, verdict="no ceiling applies to this GPU")
        for number in range(7)
    ]
    ctl.place.answers("prices.quotes", {"quotes": quotes, "offers": [], "more": False})
    result = ctl("prices")
    assert "ceiling applies" not in result.out
    assert result.err == (
        "no ceiling applies to G0, G1, G2, G3, G4 and 2 other GPUs: set [ceilings] in the configuration,"
        " or give a job a max_price\n"
    )
