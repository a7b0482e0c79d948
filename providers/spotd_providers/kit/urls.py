"""Base URLs that keep a key safe: https, or this very computer."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit


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
