"""Only those lines of a log that match, with lines around them; the work for each line is bounded."""

from __future__ import annotations

import re
import signal
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from spotd.cli.entry import CommandFailed
from spotd.words import ControlFilter

if TYPE_CHECKING:
    from spotd.api.schemas.answers import LogResponse

LINE_CHARS_MAX: Final = 65_536
"""A longer line is matched piece by piece: a host may write one without an end."""
MATCH_S: Final = 1.0
BETWEEN: Final = "--\n"
"""What stands between two groups of lines that are not neighbours."""

Matches = Callable[[str], bool]


def plain_text(pattern: str, *, ignore_case: bool) -> Matches:
    """Return whether a line contains the text."""
    if not ignore_case:
        return lambda line: pattern in line
    folded = pattern.casefold()
    return lambda line: folded in line.casefold()


def expression(pattern: str, *, ignore_case: bool) -> Matches:
    """Return whether a line matches the regular expression, given up where that takes too long.

    Raises:
        CommandFailed: it is none; later, that one line took too long.
    """
    try:
        search = re.compile(pattern, re.IGNORECASE if ignore_case else 0).search
    except (re.error, RecursionError, OverflowError) as exc:
        hint = "without -E the text is searched for as it stands"
        raise CommandFailed(f"this is no regular expression: {exc}", hint=hint) from exc

    def matches(line: str) -> bool:
        # Python's matching can take exponential time, but it lets signals in.
        with _time_limit(line):
            return search(line) is not None

    return matches


@contextmanager
def _time_limit(line: str) -> Iterator[None]:
    def give_up(*_: object) -> None:
        raise CommandFailed(
            f"the expression took more than {MATCH_S:.0f} s for a line of {len(line)} characters",
            hint="write it without repeats inside repeats, or leave out -E",
        )

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, MATCH_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class LineFilter:
    """Takes text in pieces and gives the lines that match, each with `context` lines before and behind it."""

    def __init__(self, matches: Matches, *, context: int = 0) -> None:
        self._matches = matches
        self._context = context
        self._rest = ""
        self._before: deque[str] = deque(maxlen=context)
        self._left_behind = 0
        self._has_gap = False
        self._has_shown = False
        self.hits = 0
        """Lines that matched so far."""

    def feed(self, text: str) -> str:
        """Return what of the text is to be shown now; a line without its end waits for it."""
        *lines, self._rest = (self._rest + text).split("\n")
        shown = [self._shown(f"{line}\n") for line in lines]
        while len(self._rest) > LINE_CHARS_MAX:
            shown.append(self._shown(self._rest[:LINE_CHARS_MAX] + "\n"))
            self._rest = self._rest[LINE_CHARS_MAX:]
        return "".join(shown)

    def end(self) -> str:
        """Return what is to be shown of a last line without an end; lines that follow are another machine's."""
        rest, self._rest = self._rest, ""
        shown = self._shown(rest) if rest else ""
        self._before.clear()
        self._left_behind, self._has_gap = 0, self._has_shown
        return shown

    def _shown(self, line: str) -> str:
        if any(self._matches(line[at : at + LINE_CHARS_MAX].removesuffix("\n")) for at in _pieces(line)):
            self.hits += 1
            between = BETWEEN if self._context and self._has_gap and self._has_shown else ""
            shown = between + "".join(self._before) + line
            self._before.clear()
            self._left_behind, self._has_gap, self._has_shown = self._context, False, True
            return shown
        if self._left_behind:
            self._left_behind -= 1
            return line
        self._has_gap = self._has_gap or len(self._before) == self._context
        self._before.append(line)
        return ""


def _pieces(line: str) -> range:
    return range(0, max(1, len(line)), LINE_CHARS_MAX)


class Printer(Protocol):
    """What shows the records of a log."""

    def show(self, record: LogResponse) -> None: ...
    def end(self) -> None: ...


class FilteringPrinter:
    """Passes on only matching lines of a job's output, and everything that is said about it."""

    def __init__(self, inner: Printer, lines: LineFilter, *, raw: bool) -> None:
        self._inner = inner
        self._lines = lines
        self._controls = None if raw else ControlFilter()
        self._latest: LogResponse | None = None

    def show(self, record: LogResponse) -> None:
        if record["kind"] != "log":
            self._flush()
            self._inner.show(record)
            return
        self._latest = record
        text = record["text"] if self._controls is None else self._controls.feed(record["text"])
        self._pass_on(self._lines.feed(text))

    def end(self) -> None:
        self._flush()
        self._inner.end()

    def _flush(self) -> None:
        if self._controls is not None:
            self._pass_on(self._lines.feed(self._controls.end()))
            self._controls = ControlFilter()
        self._pass_on(self._lines.end())

    def _pass_on(self, text: str) -> None:
        if text and self._latest is not None:
            self._inner.show({**self._latest, "text": text})


class LastHitsPrinter:
    """Passes on the last lines of a job's output that match, once all of it was read."""

    def __init__(self, inner: Printer, lines: LineFilter, *, count: int, raw: bool) -> None:
        self._inner = inner
        self._lines = lines
        self._controls = None if raw else ControlFilter()
        self._held: deque[_Hit] = deque(maxlen=count)
        self._heading: LogResponse | None = None
        self._latest: LogResponse | None = None
        self.cursor: str | None = None
        """Where the output goes on behind what was read."""

    def show(self, record: LogResponse) -> None:
        self.cursor = record["cursor"]
        if record["kind"] != "log":
            self._flush()
            self._heading = record
            return
        self._latest = record
        self._take(record["text"] if self._controls is None else self._controls.feed(record["text"]))

    def end(self) -> None:
        self._flush()
        heading: LogResponse | None = None
        for number, hit in enumerate(self._held):
            if hit.heading is not None and hit.heading is not heading:
                self._inner.show(hit.heading)
                heading = hit.heading
            text = hit.text.removeprefix(BETWEEN) if number == 0 else hit.text
            self._inner.show({**hit.record, "text": text})
        if self._heading is not None and self._heading["kind"] == "end" and self._heading is not heading:
            self._inner.show(self._heading)
        self._inner.end()

    def _flush(self) -> None:
        if self._controls is not None:
            self._take(self._controls.end())
            self._controls = ControlFilter()
        self._keep(self._lines.hits, self._lines.end())

    def _take(self, text: str) -> None:
        for line in text.splitlines(keepends=True):
            self._keep(self._lines.hits, self._lines.feed(line))

    def _keep(self, hits: int, text: str) -> None:
        if not text or self._latest is None:
            return
        if self._lines.hits > hits:
            self._held.append(_Hit(record=self._latest, heading=self._heading, text=text))
        elif self._held:
            self._held[-1].text += text


@dataclass(slots=True)
class _Hit:
    """One line that matched, with those around it, and what was said about the job before it."""

    record: LogResponse
    heading: LogResponse | None
    text: str
