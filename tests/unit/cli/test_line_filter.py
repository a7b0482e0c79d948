from __future__ import annotations

import json
import re
import signal
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotd.cli.entry import CommandFailed
from spotd.cli.inputs import line_filter
from spotd.cli.inputs.line_filter import LineFilter, expression, plain_text
from spotd.core.domain.intents import JobId
from tests.cases import every
from tests.unit.api import worlds
from tests.unit.cli.conftest import Ctl


def kept(text: str, pattern: str, *, context: int = 0) -> str:
    lines = LineFilter(plain_text(pattern, ignore_case=False), context=context)
    return lines.feed(text) + lines.end()


TEXT = "".join(f"step {n}\n" for n in range(10))


@every(
    ("pattern", "context", "shown"),
    [
        pytest.param("step 3", 0, [3], id="one"),
        pytest.param("nothing", 3, [], id="none"),
        pytest.param("step 3", 1, [2, 3, 4], id="around"),
        pytest.param("step 0", 2, [0, 1, 2], id="at the beginning"),
        pytest.param("step 9", 2, [7, 8, 9], id="at the end"),
        pytest.param("", 1, list(range(10)), id="every line"),
    ],
)
def test_lines_that_match_are_shown_with_those_around_them(pattern: str, context: int, shown: list[int]) -> None:
    assert kept(TEXT, pattern, context=context) == "".join(f"step {n}\n" for n in shown)


def test_groups_that_are_not_neighbours_are_set_apart() -> None:
    text = "a\nx\nb\nc\nx\nd\ne\nf\nx\n"
    assert kept(text, "x", context=1) == "a\nx\nb\nc\nx\nd\n--\nf\nx\n"
    assert kept(text, "x") == "x\nx\nx\n"


def grepped(text: str, pattern: str, context: int) -> str:
    """What grep -C prints, written in the slowest way."""
    lines = text.split("\n")[:-1]
    wanted = [any(pattern in line for line in lines[max(0, n - context) : n + context + 1]) for n in range(len(lines))]
    shown, latest = [], None
    for n, line in enumerate(lines):
        if wanted[n]:
            if context and latest is not None and latest != n - 1:
                shown.append("--\n")
            shown.append(f"{line}\n")
            latest = n
    return "".join(shown)


@given(
    text=st.lists(st.sampled_from(["x", "y", "xy", ""]), max_size=30).map(
        lambda lines: "".join(f"{n}\n" for n in lines)
    ),
    context=st.integers(0, 4),
    cuts=st.lists(st.integers(0, 60)),
)
def test_whatever_the_pieces_it_is_what_grep_shows(text: str, context: int, cuts: list[int]) -> None:
    lines = LineFilter(plain_text("x", ignore_case=False), context=context)
    places = [0, *sorted(cuts), len(text)]
    shown = "".join(lines.feed(text[a:b]) for a, b in pairwise(places))
    assert shown + lines.end() == grepped(text, "x", context)


def test_a_line_without_an_end_is_held_to_a_bound() -> None:
    lines = LineFilter(plain_text("needle", ignore_case=True))
    for _ in range(50):
        assert lines.feed("x" * 100_000) == ""
        assert len(lines._rest) <= line_filter.LINE_CHARS_MAX
    assert "Needle" in lines.feed("Needle\n")


@pytest.mark.parametrize("pattern", [r"(a+)+$", r"(a|a)*b", r"(.*)*\1x", r"a*a*a*a*a*a*a*a*a*b"])
def test_a_catastrophic_expression_is_given_up(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_filter, "MATCH_S", 0.05)
    matches = expression(pattern, ignore_case=False)
    begun = time.process_time()
    with pytest.raises(CommandFailed, match="took more than"):
        matches("a" * 5000 + "!")
    assert time.process_time() - begun < 1.0
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert matches("") is (re.search(pattern, "") is not None), "and the next line is matched as ever"


@every("pattern", ["(", "[z-a]", "*", "(?P<a>x)(?P<a>y)", "x" + "(" * 50, "a{99999999999}"])
def test_what_is_no_expression_is_refused(pattern: str) -> None:
    with pytest.raises(CommandFailed, match="no regular expression"):
        expression(pattern, ignore_case=False)


@pytest.fixture
def logged(ctl: Ctl) -> Ctl:
    ctl.monkeypatch.setattr("spotd.api.handlers.logs.FOLLOW_PAUSE_S", 0.01)
    ctl.place.write(worlds.ended(name="llama-lora", ident=JobId(worlds.RUNNING_ID)))
    ctl.rig.host(JobId(worlds.RUNNING_ID), 1).log("step 1 loss 2.5\n\x1b[32mstep 2\x1b[0m loss 2.4\nSTEP 3 (a+b)\n")
    return ctl


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (("--grep", "step 2"), "step 2 loss 2.4\n"),
        (("--grep", "step 2", "-f"), "step 2 loss 2.4\n"),
        (("--grep", "(a+b)"), "STEP 3 (a+b)\n"),
        (("--grep", "step 3", "-i"), "STEP 3 (a+b)\n"),
        (("--grep", "2", "-C", "1", "--tail", "1"), "step 2 loss 2.4\nSTEP 3 (a+b)\n"),
        (("--grep", "step", "--tail", "1"), "step 2 loss 2.4\n"),
        (("--grep", "step", "-i", "--tail", "2"), "step 2 loss 2.4\nSTEP 3 (a+b)\n"),
        (("--grep", "step", "--tail", "1", "-f"), "step 2 loss 2.4\n"),
        (("--grep", "step", "--tail", "9", "--raw"), "step 1 loss 2.5\n\x1b[32mstep 2\x1b[0m loss 2.4\n"),
        (("--grep", r"loss \d\.5$", "-E"), "step 1 loss 2.5\n"),
        (("--grep", "step 2", "--raw"), "\x1b[32mstep 2\x1b[0m loss 2.4\n"),
        (("--grep", "absent"), ""),
    ],
    ids=[
        "plain",
        "follow",
        "no syntax",
        "any case",
        "context",
        "last",
        "last two",
        "last, follow",
        "few",
        "expression",
        "raw",
        "none",
    ],
)
def test_logs_shows_only_lines_that_match(logged: Ctl, options: tuple[str, ...], shown: str) -> None:
    result = logged("logs", "llama-lora", *options)
    assert result.out == shown
    assert "--- attempt 1" in result.err


def test_json_holds_only_lines_that_match(logged: Ctl) -> None:
    body = json.loads(logged("logs", "llama-lora", "--grep", "step 2", "-o", "json").out)
    assert [(one["kind"], one["text"]) for one in body["logs"]][1] == ("log", "step 2 loss 2.4\n")
    assert [one["kind"] for one in body["logs"]] == ["attempt", "log", "end"]


def test_the_last_lines_that_match_are_found_however_far_back_they_lie(ctl: Ctl) -> None:
    ctl.place.write(worlds.ended(name="llama-lora", ident=JobId(worlds.RUNNING_ID)))
    host = ctl.rig.host(JobId(worlds.RUNNING_ID), 1)
    host.log("".join(f"loss {n}\n" for n in range(5)) + "noise\n" * 2000)
    result = ctl("logs", "llama-lora", "--grep", "loss", "-n", "3")
    assert result.out == "loss 2\nloss 3\nloss 4\n"
    assert ctl("logs", "llama-lora", "--grep", "loss", "-n", "0").out == ""
    body = json.loads(ctl("logs", "llama-lora", "--grep", "loss", "-n", "1", "-o", "json").out)
    assert [(one["kind"], one["text"]) for one in body["logs"] if one["kind"] == "log"] == [("log", "loss 4\n")]
    assert body["logs"][-1]["kind"] == "end"


def test_options_of_grep_without_grep_are_refused(logged: Ctl) -> None:
    assert logged("logs", "llama-lora", "-C", "3").code == 2
    assert logged("logs", "llama-lora", "--grep", "(", "-E").code == 2
