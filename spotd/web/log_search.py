"""Lines of a job's log that hold a text."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

from spotd.client.daemon import Daemon
from spotd.words import ControlFilter

SEARCHED_MAX: Final = 100_000
"""Lines from the end of the log."""
READ_MAX: Final = 64_000_000
"""Characters; a log of longer lines is searched no further."""
HITS_MAX: Final = 200
LINE_MAX: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class LogHits:
    """The newest hits, oldest first, each with the number of its attempt.

    Attributes:
        total: how many there are in what was read.
        lines: how many lines were read.
        is_cut: the log is longer than what was read.
    """

    hits: tuple[tuple[int, str], ...]
    total: int
    lines: int
    is_cut: bool


def search_log(daemon: Daemon, ref: str, text: str) -> LogHits:
    """Search the last lines of the log; capital letters are the same as small ones.

    Raises:
        ClientError
    """
    wanted = text.casefold()
    hits: deque[tuple[int, str]] = deque(maxlen=HITS_MAX)
    total = lines = read = attempt = 0
    rest = ""
    filtering = ControlFilter()

    def take(found: list[str]) -> None:
        nonlocal total, lines
        for line in found:
            lines += 1
            if wanted in line.casefold():
                total += 1
                hits.append((attempt, line[:LINE_MAX]))

    for record in daemon.logs(ref, {"tail": SEARCHED_MAX}):
        if record["kind"] != "log":
            continue
        if record["attempt"] != attempt and rest:
            take([rest])
            rest = ""
        attempt = record["attempt"]
        read += len(record["text"])
        *whole, rest = (rest + filtering.feed(record["text"])).split("\n")
        take(whole)
        rest = rest[-READ_MAX // 100 :]
        if read >= READ_MAX:
            break
    if rest := rest + filtering.end():
        take([rest])
    return LogHits(hits=tuple(hits), total=total, lines=lines, is_cut=lines >= SEARCHED_MAX or read >= READ_MAX)
