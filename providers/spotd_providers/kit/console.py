"""The error on a machine's console when a start fails before spotd's own runner can report."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from spotd_providers.kit.text import clean

NO_PYTHON: Final = "spotd: no Python 3.8 or later in this image"
"""What the start script says where it finds no Python; without one, no other report leaves the machine."""
CONSOLE_LINES: Final = 50


def start_complaint(lines: Iterable[str]) -> str:
    """Return the error of the start script if it is the last line of the console; else an empty string."""
    spoken = [line.strip() for line in lines if line.strip()]
    return clean(NO_PYTHON) if spoken and NO_PYTHON in spoken[-1] else ""
