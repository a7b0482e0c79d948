"""The only module that writes to stderr: errors, hints, notes, questions and progress."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

from spotd.words import clean, folded, size_text, span_text, visible

_RED: Final = "\x1b[1;31m"
_DIM: Final = "\x1b[2m"
_PLAIN: Final = "\x1b[0m"
_PROGRESS_EVERY_S: Final = 0.1


def is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def width() -> int:
    """Return how many columns the terminal has."""
    return max(shutil.get_terminal_size((120, 40)).columns, 40)


def colour() -> bool:
    return is_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def can_ask() -> bool:
    """Whether a person is there to be asked."""
    return is_terminal() and sys.stdin is not None and sys.stdin.isatty()


def _fit(text: str) -> str:
    return folded(text, width(), 2) if is_terminal() else text


def _with_style(text: str, style: str) -> str:
    return f"{style}{text}{_PLAIN}" if colour() else text


def line(text: str = "") -> None:
    """Print the text on stderr, if that is open: a closed stderr must not become an error of its own."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(visible(text) + "\n")
        sys.stderr.flush()


def block(text: str) -> None:
    """Print several lines, made safe by the caller, since their layout and colours must survive."""
    line(text.removesuffix("\n"))


def error(message: str, *, hint: str = "", rows: Sequence[tuple[str, str]] = ()) -> None:
    """`error: ...`, and below it `hint: ...`; rows stand, each with its own hint, in place of the message."""
    if not rows:
        line(_fit(f"error: {clean(message)}").replace("error:", _with_style("error:", _RED), 1))
    for row, own_hint in rows:
        line(f"{_with_style('error:', _RED)} {clean(row)}")
        if own_hint:
            line(f"  hint: {clean(own_hint)}")
    if hint:
        line(f"hint: {clean(hint)}")


def warning(message: str) -> None:
    line(_fit(f"warning: {clean(message)}"))


def note(message: str) -> None:
    """Print a note, dim on a terminal."""
    line(_with_style(_fit(clean(message)), _DIM))


def ask(question: str) -> bool:
    """Ask; only a yes is true. Anything else, the end of input included, means no."""
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    answer = sys.stdin.readline()
    if not answer.endswith("\n"):
        line()
    return answer.strip().lower() in {"y", "yes"}


class ProgressLine:
    """A line of progress that is erased at the end; silent where stderr is no terminal.

    What it counts are bytes, unless `text` writes its figures in another way.
    """

    def __init__(self, verb: str, total: int | None, *, text: Callable[[int], str] = size_text) -> None:
        self._verb = verb
        self._text = text
        self._total = total
        self._done = 0
        self._begun = time.monotonic()
        self._shown_at = 0.0
        self._active = is_terminal()

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._active and self._shown_at:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def add(self, count: int) -> None:
        """Count so many more as done."""
        self._done += count
        now = time.monotonic()
        if self._active and now - self._shown_at >= _PROGRESS_EVERY_S:
            self._shown_at = now
            self._draw(now)

    def _draw(self, now: float) -> None:
        rate = self._done / max(now - self._begun, 0.001)
        parts = [self._verb, self._text(self._done)]
        if self._total:
            parts[1] += f" of {self._text(self._total)}"
            parts.append(f"{100 * self._done // self._total} %")
        parts.append(f"{self._text(int(rate))}/s")
        if self._total and rate > 0 and self._total > self._done:
            parts.append(f"{span_text((self._total - self._done) / rate)} left")
        sys.stderr.write("\r\x1b[K" + "  ".join(parts)[: width() - 1])
        sys.stderr.flush()
