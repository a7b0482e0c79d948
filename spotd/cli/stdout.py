"""The only module that writes to stdout: data, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from typing import Any

from spotd.words import folded, visible


class OutputClosed(Exception):
    """The reader of stdout went away (`spotctl ls | head -1`)."""


class OutputFailed(Exception):
    """Stdout takes no more (a full disk behind it); the message is the system's."""


def is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def size() -> tuple[int, int]:
    """Return how many columns and lines the terminal has."""
    columns, lines = shutil.get_terminal_size((120, 40))
    return max(1, columns), max(1, lines)


def width() -> int:
    """Return how many columns a table may have."""
    return max(size()[0], 40)


def encodes(text: str) -> bool:
    """Whether the encoding of stdout has these characters, on a terminal that may show them."""
    if os.environ.get("TERM") in {"dumb", "linux"}:
        return False
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def colour() -> bool:
    return is_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def write(text: str) -> None:
    """Write the text, without characters that are hidden; those the terminal's encoding lacks are escaped.

    What others wrote has lost its control sequences before: here they may be our own colours.

    Raises:
        OutputClosed, OutputFailed
    """
    encoding = sys.stdout.encoding or "utf-8"
    data = text.encode(encoding, errors="backslashreplace")
    # Half characters stand for bytes of a path, which is shown escaped and whole, so they are taken out of none.
    write_bytes(data if text.isascii() else visible(data.decode(encoding)).encode(encoding))


def write_bytes(data: bytes) -> None:
    """Write the bytes and flush.

    Raises:
        OutputClosed, OutputFailed
    """
    try:
        sys.stdout.flush()
        rest = memoryview(data)
        while rest:  # with PYTHONUNBUFFERED the buffer is the bare file, which may take a part only
            rest = rest[sys.stdout.buffer.write(rest) :]
        sys.stdout.buffer.flush()
    except BrokenPipeError as exc:
        raise OutputClosed from exc
    except OSError as exc:
        raise OutputFailed(exc.strerror or str(exc)) from exc


def line(text: str, *, indent: int | None = None) -> None:
    """Print a line; with an indent it is folded between words where a terminal is too narrow for it."""
    write((text if indent is None or not is_terminal() else folded(text, width(), indent)) + "\n")


def document(body: Mapping[str, Any]) -> None:
    """Print one JSON document: indented for a person, on one line for a program."""
    if is_terminal():
        line(json.dumps(body, indent=2))
    else:
        line(json.dumps(body, separators=(",", ":")))


def record(body: Mapping[str, Any]) -> None:
    line(json.dumps(body, separators=(",", ":")))


def document_bytes(raw: bytes) -> None:
    """Print a JSON document as it came from the daemon, indented only for a person."""
    if is_terminal():
        document(json.loads(raw))
    else:
        write_bytes(raw if raw.endswith(b"\n") else raw + b"\n")


def abandon() -> None:
    """Discard what is still buffered, so that the interpreter's last flush is silent."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
