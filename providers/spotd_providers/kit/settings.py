"""Values as users write them in settings: durations, and base URLs that keep a key safe."""

from __future__ import annotations

import ipaddress
import re
from datetime import timedelta
from typing import Final
from urllib.parse import urlsplit

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


def is_loopback(url: str) -> bool:
    """Whether this URL names this very computer."""
    host = (urlsplit(url).hostname or "").lower()
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def safe_base_url(value: str, *, example: str) -> str:
    """Check a base URL and return it without a final slash.

    Raises:
        ValueError: it is no base URL, or would carry the key in the clear.
    """
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
        raise ValueError(f'write it like "{example}"')
    if parts.scheme == "http" and not is_loopback(value):
        raise ValueError("plain http would send the API key in the clear; use https")
    return value.rstrip("/")
