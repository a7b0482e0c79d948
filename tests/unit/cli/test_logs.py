from __future__ import annotations

import importlib
import json
import re
import unicodedata
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from functools import cache
from typing import Any

import pytest

from spotd import words
from spotd.api.requests import LogQuery
from spotd.cli import stderr, stdout
from spotd.cli.commands.logs import PATIENCE_S, Waiting, followed
from spotd.client.daemon import Daemon
from spotd.client.transport import DaemonUnreachable
from spotd.core.domain.intents import JobId
from spotd.core.domain.states import AttemptState
from spotd.daemon.market import plugin_fields
from spotd.words import ControlFilter, clean
from spotd_providers.kit import text
from tests.cases import every
from tests.unit.api import worlds
from tests.unit.cli.conftest import Ctl
from tests.unit.store.values import launch_done, plan

JOB = JobId(worlds.RUNNING_ID)
Part = tuple[str, Any]
"""A part of a pattern: its kind, and what it is made of."""


@pytest.fixture
def logged(ctl: Ctl) -> Ctl:
    """A job that was moved once and failed."""
    ctl.monkeypatch.setattr("spotd.api.handlers.logs.FOLLOW_PAUSE_S", 0.01)
    second = worlds.attempt(2, AttemptState.ENDED, host="h4")
    ctl.place.write(worlds.ended(name="llama-lora", ident=JOB, attempts_made=2), plan(second, launch_done(second)))
    ctl.rig.host(JOB, 1).log("step 1\n")
    ctl.rig.host(JOB, 2).log("\x1b[32mstep 2\x1b[0m\n")
    return ctl


def test_output_goes_to_stdout_and_what_is_said_about_it_to_stderr(logged: Ctl) -> None:
    result = logged("logs", "llama-lora")
    assert (result.code, result.out) == (0, "step 1\nstep 2\n")
    assert result.err == ("--- attempt 1 on 1 x H100 at local h3 ---\n--- attempt 2 on 1 x H100 at local h4 ---\n")


def test_following_a_job_that_failed_is_exit_1(logged: Ctl) -> None:
    result = logged("logs", "-f", "llama-lora")
    assert (result.code, result.out) == (1, "step 1\nstep 2\n")


def test_raw_leaves_control_sequences_in(logged: Ctl) -> None:
    assert logged("logs", "llama-lora", "--raw").out == "step 1\n\x1b[32mstep 2\x1b[0m\n"


def test_json_is_one_document_or_when_followed_a_line_each(logged: Ctl) -> None:
    body = json.loads(logged("logs", "llama-lora", "-o", "json").out)
    assert [record["kind"] for record in body["logs"]] == ["attempt", "log", "attempt", "log", "end"]
    lines = logged("logs", "-f", "llama-lora", "-o", "json").out.splitlines()
    assert [json.loads(line)["schema"] for line in lines] == [1] * 5


def test_following_goes_on_where_a_restarted_daemon_left_off(logged: Ctl) -> None:
    real = logged.place.handlers.logs.stream
    uses: list[LogQuery] = []

    async def cut_once(ref: str, query: LogQuery) -> AsyncIterator[Any]:
        uses.append(query)
        async with aclosing(real(ref, query)) as records:
            async for record in records:
                yield record
                if len(uses) == 1 and record["kind"] == "log":
                    return

    logged.place.replace("logs.stream", cut_once)
    assert logged("logs", "-f", "llama-lora").out == "step 1\nstep 2\n"


class _Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def waiting(self) -> Waiting:
        return Waiting(sleep=self.sleep, monotonic=lambda: self.now)


def _follow(stream: Any, clock: _Time) -> list[int]:
    found = followed(
        stream, {"tail": 5}, cursor="n", drop=("tail",), is_last=lambda r: r["n"] == 3, waiting=clock.waiting()
    )
    return [record["n"] for record in found]


def test_a_daemon_that_never_was_there_is_not_waited_for() -> None:
    clock = _Time()

    def stream(query: dict[str, Any]) -> Iterator[dict[str, Any]]:
        raise DaemonUnreachable("no socket")
        yield {}

    with pytest.raises(DaemonUnreachable, match="no socket"):
        _follow(stream, clock)
    assert clock.now == 0


def test_a_daemon_that_does_not_come_back_is_given_up() -> None:
    clock = _Time()
    queries = []

    def stream(query: dict[str, Any]) -> Iterator[dict[str, Any]]:
        queries.append(query)
        if len(queries) > 1:
            raise DaemonUnreachable("gone")
        yield {"n": 1}

    with pytest.raises(DaemonUnreachable, match="has been away for 60 s"):
        _follow(stream, clock)
    assert PATIENCE_S < clock.now < PATIENCE_S + 2
    assert queries[0] == {"tail": 5, "follow": 1}
    assert queries[1] == {"tail": None, "follow": 1, "after": 1}


def test_a_long_quiet_stream_that_breaks_is_taken_up_again() -> None:
    clock = _Time()
    tries = []

    def stream(query: dict[str, Any]) -> Iterator[dict[str, Any]]:
        tries.append(query)
        if len(tries) <= 3:
            clock.sleep(10_000)
            raise DaemonUnreachable("restarted")
        yield {"n": 3}

    assert _follow(stream, clock) == [3]


CORPUS = [
    pytest.param("\x1b[31mred\x1b[0m", "red", id="colour"),
    pytest.param("a\x1b[2Jb\x1b[10;10Hc", "abc", id="cursor"),
    pytest.param("\x1b]0;title\x07x", "x", id="title by BEL"),
    pytest.param("\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\", "link", id="hyperlink"),
    pytest.param("\x1bP1$q\x1b\\x", "x", id="device control"),
    pytest.param("\x1b_app\x1b\\x\x1b^pm\x1b\\y\x1bXsos\x1b\\z", "xyz", id="other strings"),
    pytest.param("\x9b31mred\x9d0;t\x9cx", "redx", id="eight bit controls"),
    pytest.param("\x1bcx\x1b(0y\x1b7z\x1b=", "xyz", id="resets and character sets"),
    pytest.param("\x1b[?1049hx\x1b[>0cy\x1b[6nz", "xyz", id="private modes and queries"),
    pytest.param("a\u202eb\u2066c\u200fd\u061ce", "abcde", id="bidirectional"),
    pytest.param("a\x00\x07\x08\x7f\x85b", "ab", id="plain controls"),
    pytest.param("a\U000e0041b\ufeffc", "abc", id="tags"),
    pytest.param("a\u200bb\u2060c\u00add\u3164e\u115f\uffa0\u034f\u180e\ufe0f", "abcde", id="without ink"),
    pytest.param("o" + "\u0300" * 200 + "k", "o\u0300\u0300\u0300k", id="piled marks"),
    pytest.param("Vie\u0323\u0302t", "Vie\u0323\u0302t", id="marks of a language stay"),
    pytest.param("10%\r20%\r\n30%\n", "10%\n20%\n30%\n", id="carriage returns"),
    pytest.param("tab\there\n", "tab\there\n", id="tabs stay"),
    pytest.param("größe 漢字 🙂\n", "größe 漢字 🙂\n", id="letters stay"),
    pytest.param("\x1b", "", id="lone escape"),
    pytest.param("\x1b[", "[", id="unfinished"),
    pytest.param("\x1b]0;" + "x" * 5000, "]0;" + "x" * 5000, id="endless title"),
]


@every(("raw", "shown"), CORPUS)
def test_control_sequences_are_taken_out(raw: str, shown: str) -> None:
    controls = ControlFilter()
    assert controls.feed(raw) + controls.end() == shown


@every(("raw", "shown"), CORPUS[:-1])
def test_a_sequence_that_is_cut_anywhere_does_not_get_through(raw: str, shown: str) -> None:
    for place in range(len(raw) + 1):
        controls = ControlFilter()
        pieces = controls.feed(raw[:place]) + controls.feed(raw[place:]) + controls.end()
        assert pieces == shown
    controls = ControlFilter()
    assert "".join(controls.feed(char) for char in raw) + controls.end() == shown


def test_nothing_that_is_hidden_leaves_by_stdout_or_stderr_whichever_command_wrote_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One gate behind every table, sentence and log. Colours are ours by then, and layout stays."""
    text = "\x1b[31mo" + "\u0300" * 200 + "\x1b[0m a\u200bb\u2060c\u00add\u3164e\u202ef\n   größe"
    stdout.line(text)
    stderr.line(text)
    shown = "\x1b[31mo\u0300\u0300\u0300\x1b[0m abcdef\n   größe\n"
    assert capsys.readouterr() == (shown, shown)


def test_a_path_with_bytes_that_are_no_text_is_printed_whole(capsys: pytest.CaptureFixture[str]) -> None:
    stdout.line("ü/a\udc80b")
    assert capsys.readouterr().out == "ü/a\\udc80b\n"


VISIBLE_FORMATS = {*range(0x600, 0x606), 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD, *range(0x13430, 0x13460)}
"""Signs of Arabic, Kaithi and Egyptian that are drawn, though Unicode calls them formats."""


def test_no_format_character_is_shown_in_a_name_a_message_or_an_id() -> None:
    hidden = "".join(chr(c) for c in range(0x110000) if unicodedata.category(chr(c)) in ("Cf", "Cs", "Zl", "Zp"))
    shown = set(words.clean(hidden)) | set(plugin_fields.text(hidden, chars_max=10**6)) | set(text.clean(hidden))
    assert {ord(c) for c in shown} <= VISIBLE_FORMATS | {0x20}


@every(
    "piece",
    [
        "\x9d",
        "\x90",
        "\x9b",
        "\x1b]",
        "\x1b[",
        "\x1b",
        "\x1b ",
        "\x9b0",
        "\x9d0;",
        "\x9b0 ",
        "\x1b]0;x",
        "\x9d\x1b",
        " ",
        "0;",
    ],
)
@every("first", ["", "\x9d", "\x9b", "\x1b[", "\x1b "])
def test_eight_times_the_text_costs_about_eight_times_the_work(piece: str, first: str) -> None:
    """A sequence that never ends is looked for once, not again from each of its characters."""

    def cost(size: int) -> int:
        counted = {name: CountedPattern(value) for name, value in vars(words).items() if isinstance(value, re.Pattern)}
        text = first + piece * (size // len(piece))
        with pytest.MonkeyPatch.context() as patch:
            for name, pattern in counted.items():
                patch.setattr(words, name, pattern)
            ControlFilter().feed(text)
            clean(text)
        return sum(pattern.steps for pattern in counted.values())

    assert cost(20) >= 20
    assert cost(160) < 20 * cost(20), "quadratic work is sixty-four times as much"


class CountedPattern:
    """A pattern that counts the characters which a backtracking search with it compares.

    Attributes:
        steps: comparisons so far; those of a class of characters count as one.
    """

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        self._parts = _parts_of(pattern)
        self.steps = 0

    def search(self, text: str, at: int = 0) -> re.Match[str] | None:
        """Find what the pattern itself finds, and count the way there."""
        found = self._pattern.search(text, at)
        for start in range(at, len(text) + 1):
            end = self._end(self._parts, text, start, lambda place: place)
            if end is not None:
                assert found is not None
                assert found.span() == (start, end)
                return found
        assert found is None
        return None

    def sub(self, new: str, text: str) -> str:
        """Replace as the pattern itself does, and count the searches."""
        place = 0
        while (found := self.search(text, place)) is not None:
            place = max(found.end(), place + 1)
        return self._pattern.sub(new, text)

    def _end(self, parts: Sequence[Part], text: str, at: int, then: Callable[[int], int | None]) -> int | None:
        """Return where a match of these parts and of what comes then ends, if they match here."""
        if not parts:
            return then(at)
        kind, value = parts[0]

        def go_on(place: int) -> int | None:
            return self._end(parts[1:], text, place, then)

        if kind == "end":
            self.steps += 1
            return go_on(at) if at == len(text) else None
        if kind == "branches":
            ends = (self._end(branch, text, at, go_on) for branch in value)
        else:
            least, most, characters = value
            last = at
            while last - at < most and self._is_in(characters, text, last):
                last += 1
            ends = (go_on(place) for place in range(last, at + least - 1, -1))
        return next((end for end in ends if end is not None), None)

    def _is_in(self, characters: frozenset[str], text: str, at: int) -> bool:
        self.steps += 1
        return at < len(text) and text[at] in characters


@cache
def _parts_of(pattern: re.Pattern[str]) -> tuple[Part, ...]:
    return _plain(importlib.import_module("re._parser").parse(pattern.pattern))


def _plain(parsed: Any) -> tuple[Part, ...]:
    """The end of the text, branches of parts, and so many of a set of characters, of which there are 256 here."""
    found: list[Part] = []
    for operation, value in parsed:
        match str(operation):
            case "AT":
                assert str(value) == "AT_END_STRING"
                found.append(("end", None))
            case "BRANCH":
                found.append(("branches", [_plain(branch) for branch in value[1]]))
            case "SUBPATTERN":
                found.append(("branches", [_plain(value[-1])]))
            case "MAX_REPEAT":
                least, most, (repeated,) = value
                found.append(("characters", (int(least), int(most), _characters(*repeated))))
            case _:
                found.append(("characters", (1, 1, _characters(operation, value))))
    return tuple(found)


def _characters(operation: Any, value: Any) -> frozenset[str]:
    found: set[int] = set()
    negated = False
    for kind, one in value if str(operation) == "IN" else [(operation, value)]:
        match str(kind):
            case "NEGATE":
                negated = True
            case "LITERAL":
                found.add(one)
            case "RANGE":
                found.update(range(one[0], one[1] + 1))
            case _:
                assert str(one) == "CATEGORY_SPACE"
                found.update(code for code in range(256) if chr(code).isspace())
    return frozenset(chr(code) for code in range(256) if (code in found) is not negated)


def test_a_string_that_another_sequence_breaks_off_hides_nothing_behind_it() -> None:
    assert clean("a\x9d0;title\x9b31mred\x9d1;x\x07b") == "a0;titleredb"


def test_a_single_line_stays_a_single_line() -> None:
    assert clean("  a\n\x1b[1mb\r\nc\td ") == "a b c d"


def test_a_script_follows_a_job_to_its_end(ctl: Ctl) -> None:
    ctl.monkeypatch.setattr("spotd.api.handlers.logs.FOLLOW_PAUSE_S", 0.01)
    ctl.place.write(worlds.ended(name="llama-lora", ident=JobId(worlds.RUNNING_ID)))
    ctl.rig.host(JobId(worlds.RUNNING_ID), 1).log("step 1\n")
    followed_to_end = [record["kind"] for record in Daemon().logs("llama-lora", {"tail": 1}, follow=True)]
    assert followed_to_end[-2:] == ["log", "end"]
    assert [record["text"] for record in Daemon().logs("llama-lora", follow=False) if record["kind"] == "log"] == [
        "step 1\n"
    ]
