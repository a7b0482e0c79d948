"""Which addresses of a store are private: with TLS, or without leaving this computer."""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit


def is_private(url: str) -> bool:
    """Whether what is sent there cannot be read on the way: grants hold the secrets of jobs."""
    parts = urlsplit(url)
    host = (parts.hostname or "").rstrip(".").lower()
    if parts.scheme == "https" or host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
