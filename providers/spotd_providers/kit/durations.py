"""Durations as users write them in settings."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Final

_DURATION: Final = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s)?")


def duration(text: str, *, example: str) -> timedelta:
    """Parse days, hours, minutes and seconds with their units.

    Raises:
        ValueError: it is not written so.
    """
    parts = _DURATION.fullmatch(text.strip())
    if parts is None or not any(parts.groups()):
        raise ValueError(f"write it like {example}")
    days, hours, minutes, seconds = (float(part or 0) for part in parts.groups())
    return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
