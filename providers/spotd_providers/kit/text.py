"""Texts of untrusted origin made safe to show: no key, no signed URL, no control characters, bounded length."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from spotd_providers.contract.printable import HIDDEN, without_piles
from spotd_providers.contract.values import AttemptKey, InstallId

TEXT_CHARS_MAX: Final = 240
_URL: Final = re.compile(r"(\bhttps?://[^\s?\"']*)(\?[^\s\"']*)?")
"""Whole, with or without a query: a URL that only matched with one would be searched again from each of its parts."""
_LONG_HEX: Final = re.compile(r"\b[0-9a-fA-F]{32,}\b")
_ASSIGNED_SECRET: Final = re.compile(
    r"(?i)\b(api_key|token|secret|password|authorization)(\"?\s*[=:]\s*)\"?(bearer\s+)?[^\s\"&,]+"
)
_MIXED_TOKEN: Final = re.compile(r"(?=\S*[0-9])(?=\S*[A-Za-z])\S{8,}")
_UNPRINTABLE: Final = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f{HIDDEN}]")


def clean(text: str, *, chars_max: int = TEXT_CHARS_MAX) -> str:
    """Remove control characters, URL queries and anything that resembles a key from the text."""
    text = without_piles(_UNPRINTABLE.sub("", text))
    text = _URL.sub(lambda url: f"{url[1]}?..." if url[2] else url[1], text)
    text = _ASSIGNED_SECRET.sub(r"\1\2***", text)
    return _LONG_HEX.sub("***", text).strip()[:chars_max]


def quote_safely(text: str) -> str:
    """Clean the text of a refusal for an error message: a word with letters and digits may be an echoed secret."""
    return _MIXED_TOKEN.sub("***", clean(text))


# The error on a machine's console when a start fails before spotd's own runner can report.


NO_PYTHON: Final = "spotd: no Python 3.8 or later in this image"
"""What the start script says where it finds no Python; without one, no other report leaves the machine."""
CONSOLE_LINES: Final = 50


CONSOLE_LINE_CHARS: Final = 4096


def last_lines(spoken: Sequence[str], count: int) -> tuple[str, ...]:
    """Return the last lines of a console, without anything that resembles a secret."""
    return tuple(clean(line, chars_max=CONSOLE_LINE_CHARS) for line in spoken[-count:]) if count > 0 else ()


def start_complaint(lines: Iterable[str]) -> str:
    """Return the error of the start script if it is the last line of the console; else an empty string."""
    spoken = [line.strip() for line in lines if line.strip()]
    return clean(NO_PYTHON) if spoken and NO_PYTHON in spoken[-1] else ""


# The attempt keys in the labels of machines.


def key_of(label: Any, install: InstallId) -> AttemptKey | None:
    """Return the attempt key in this label, if it carries this install's label."""
    if not isinstance(label, str):
        return None
    label = label.strip()
    head, _, number = label.rpartition("-")
    owner, _, job = head.rpartition("-")
    # Behind the dot is which of several installs of one label it is: that is for the daemon to judge.
    name, _, _ = owner.partition(".")
    ours = name == f"spotd-{install}" and bool(job) and number.isdecimal()
    return AttemptKey(label) if ours else None


def begins_like_ours(key: str, install: InstallId | str) -> bool:
    """Whether a key carries this label, with or without the identity of an install."""
    return key.startswith((f"spotd-{install}-", f"spotd-{install}."))


# Files that are either whole or absent, whatever is killed while they are written.


def write_atomically(path: Path, content: str, *, mode: int = 0o600) -> None:
    """Replace the file in one step: a reader sees the old content or the new one, never a part."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(content)
        Path(temporary).chmod(mode)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
