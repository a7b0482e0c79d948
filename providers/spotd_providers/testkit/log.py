"""Recorders of the adapter's log and of Python's own logging, in which secrets are searched for."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One event with its fields."""

    level: str
    event: str
    fields: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.level} {self.event} {self.fields!r}"


class RecordingLog:
    """The adapter's own logger.

    Attributes:
        lines: everything that was logged, in order.
    """

    def __init__(self) -> None:
        self.lines: list[LogLine] = []

    def debug(self, event: str, **fields: Any) -> None:
        self.lines.append(LogLine(level="debug", event=event, fields=fields))

    def info(self, event: str, **fields: Any) -> None:
        self.lines.append(LogLine(level="info", event=event, fields=fields))

    def warning(self, event: str, **fields: Any) -> None:
        self.lines.append(LogLine(level="warning", event=event, fields=fields))

    def error(self, event: str, **fields: Any) -> None:
        self.lines.append(LogLine(level="error", event=event, fields=fields))

    def __str__(self) -> str:
        return "\n".join(str(line) for line in self.lines)


class _Net(logging.Handler):
    def __init__(self) -> None:
        super().__init__(level=logging.INFO)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        formatter = logging.Formatter("%(name)s %(levelname)s %(message)s")
        self.texts.append(formatter.format(record))


@contextmanager
def caught_logging() -> Iterator[list[str]]:
    """Record every line that any library logs at INFO or above inside the block, tracebacks included."""
    root = logging.getLogger()
    net = _Net()
    level = root.level
    root.addHandler(net)
    root.setLevel(logging.INFO)
    try:
        yield net.texts
    finally:
        root.setLevel(level)
        root.removeHandler(net)
