"""A list that is drawn anew as it changes: on a terminal in place, elsewhere one list behind the other."""

from __future__ import annotations

import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any, Final

from spotd.cli import stdout
from spotd.cli.inputs.options import TABLE, show_data
from spotd.cli.views import table
from spotd.client.daemon import Daemon
from spotd.client.transport import ClientError
from spotd.lists import state_rank, with_arrays_as_one
from spotd.words import clean, count, where_text

EVERY_S: Final = 2.0
_ENTER: Final = "\x1b[?1049h\x1b[?25l"
"""The alternate screen, without a cursor."""
_LEAVE: Final = "\x1b[?25h\x1b[?1049l"
_QUIT: Final = ("q", "Q", "\x04")
_KEYS_MAX: Final = 64


ColumnsAt = Callable[[str], table.Columns]
"""The columns of the table at an instant."""


def watch_jobs(daemon: Daemon, query: Mapping[str, Any], output: str, columns: ColumnsAt) -> None:
    """Show the jobs until that is ended.

    Raises:
        ClientError: the daemon did not answer at first, or refused.
    """
    answer: Any = daemon.jobs(query)
    if output == TABLE and stdout.is_terminal():
        _on_screen(daemon, query, answer, columns)
        return
    shown: object = None
    while True:
        if (now := _changing(answer)) != shown:
            shown = now
            if not show_data(answer, output, [job["id"] for job in answer["jobs"]]):
                stdout.write(_drawn(answer, query, None, columns))
        time.sleep(EVERY_S)
        with suppress(ClientError):
            answer = daemon.jobs(query)


def _changing(answer: Mapping[str, Any]) -> object:
    """Return what makes a list another one: ages and sums that only grow do not."""
    return [
        (
            job["id"], job["state"], job["attempt"], where_text(job), job["stage"] and job["stage"]["name"],
            job["checkpoint"] and job["checkpoint"]["name"],
        )
        for job in answer["jobs"]
    ]  # fmt: skip


def _drawn(answer: Any, query: Mapping[str, Any], width: int | None, columns: ColumnsAt) -> str:
    """Return the table; on a screen, which may show only its beginning, jobs with a machine come first."""
    lines = answer["jobs"] if query.get("array") else with_arrays_as_one(answer["jobs"], answer.get("arrays", ()))
    if width is not None and not query.get("array"):
        lines = sorted(lines, key=lambda job: state_rank(job["state"]))
    colour = width is not None and stdout.colour()
    return table.text(columns(answer["now"]), lines, drawn_for=width, colour=colour)


def _on_screen(daemon: Daemon, query: Mapping[str, Any], answer: Any, columns: ColumnsAt) -> None:
    error, seen = "", time.monotonic()
    with _screen() as redraw:
        while True:
            redraw(lambda: _frame(answer, query, error, columns))  # noqa: B023 - drawn at once, and anew before it changes
            if _wants_to_quit(EVERY_S):
                return
            try:
                answer, error, seen = daemon.jobs(query), "", time.monotonic()
            except ClientError as exc:
                error = f"{clean(exc.message)}; below is what it was {time.monotonic() - seen:.0f} s ago"


def _frame(answer: Any, query: Mapping[str, Any], error: str, columns: ColumnsAt) -> str:
    """Return what fits on the screen: a head, the table, and how many lines do not fit."""
    width, height = stdout.size()
    jobs = answer["jobs"]
    at = datetime.fromisoformat(answer["now"]).astimezone()
    head = error or clean(answer.get("paused", "")) or f"{count(len(jobs), 'job')} at {at:%H:%M:%S}; q ends this"
    lines = _drawn(answer, query, width, columns).splitlines() if jobs else ["no job matches"]
    room = max(1, height - 1)
    if len(lines) > room:
        left = len(lines) - room + 1
        lines = [*lines[: room - 1], f"and {count(left, 'more line')}; spotctl ls --active shows fewer"[:width]]
    return "\r\n".join([head[:width], *lines])


@contextmanager
def _screen() -> Iterator[Callable[[Callable[[], str]], None]]:
    """Take the terminal for the block, and give it back as it was, however the block ends."""
    import termios
    import tty

    descriptor = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
    before = None if descriptor is None else termios.tcgetattr(descriptor)
    drawn: list[Callable[[], str]] = []

    def enter() -> None:
        if descriptor is not None:
            tty.setcbreak(descriptor)
        stdout.write(_ENTER)

    def leave() -> None:
        stdout.write(_LEAVE)
        if descriptor is not None and before is not None:
            termios.tcsetattr(descriptor, termios.TCSADRAIN, before)

    def draw(frame: Callable[[], str]) -> None:
        drawn[:] = [frame]
        stdout.write("\x1b[H" + frame().replace("\r\n", "\x1b[K\r\n") + "\x1b[K\x1b[J")

    def end(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    def suspend(_number: int, _frame: object) -> None:
        leave()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, suspend)
        enter()
        resize(0, None)

    def resize(_number: int, _frame: object) -> None:
        if drawn:
            draw(drawn[0])

    handlers = {
        signal.SIGTERM: end, signal.SIGHUP: end, signal.SIGTSTP: suspend, signal.SIGWINCH: resize
    }  # fmt: skip
    former = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        enter()
        yield draw
    finally:
        with suppress(stdout.OutputClosed, stdout.OutputFailed):
            leave()
        for number, handler in former.items():
            signal.signal(number, handler)


def _wants_to_quit(within_s: float) -> bool:
    """Wait so long; return whether a key meanwhile ended it. Other keys mean nothing."""
    until = time.monotonic() + within_s
    while (left := until - time.monotonic()) > 0:
        if sys.stdin is None or not sys.stdin.isatty():
            time.sleep(left)
            return False
        ready, _, _ = select.select([sys.stdin], [], [], left)
        if not ready:
            return False
        import os

        keys = os.read(sys.stdin.fileno(), _KEYS_MAX)
        if not keys or any(key in _QUIT for key in keys.decode("utf-8", "replace")):
            return True
    return False
