"""How large a file is that a URL of a job's data serves, as a plan and a price need it before any machine reads it.

The URL is chosen by a client of the API, which may be an agent. So nothing but a public address is asked, also
behind a redirect, and of the answer only the size is used.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Callable
from typing import Final
from urllib.parse import urljoin, urlsplit

from spotd_jobs.wire.client import web

TIMEOUT_S: Final = 8.0
"""Of one answer."""
REDIRECTS_MAX: Final = 5
STORE_HINT: Final = "fetch it once and store it: spotctl data put NAME DIR, then the name as source"
_RANGE: Final = re.compile(r"bytes 0-0/(\d{1,19})")


class UrlRefused(Exception):
    """A URL that machines cannot read data from. The text goes on after the URL; `hint` is a way out."""

    def __init__(self, message: str, *, hint: str = STORE_HINT) -> None:
        super().__init__(message)
        self.hint = hint


def require_public(url: str) -> None:
    """Require that every address of the URL's host is one that any computer reaches, and that its answers are sealed.

    Raises:
        UrlRefused
    """
    parts = urlsplit(url)
    if parts.scheme != "https" or not parts.hostname:
        raise UrlRefused("redirects to another protocol than https")
    try:
        found = socket.getaddrinfo(parts.hostname, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as exc:
        raise UrlRefused("names a host that cannot be found", hint="check its spelling") from exc
    if not all(ipaddress.ip_address(str(place[0]).partition("%")[0]).is_global for *_, place in found):
        raise UrlRefused("leads to a private address, which rented machines do not reach")


def measure_url(url: str, *, require: Callable[[str], None] = require_public) -> int:
    """Return how many bytes the URL serves, to a client that names no user.

    Args:
        require: raises `UrlRefused` where the URL, or one it redirects to, may not be asked.

    Raises:
        UrlRefused: it serves nothing, not to everybody, or not in parts.
    """
    try:
        for _ in range(REDIRECTS_MAX):
            require(url)
            status, headers, _ = web.request("GET", url, {"Range": "bytes=0-0"}, timeout_s=TIMEOUT_S, foreign=True)
            if status not in {301, 302, 303, 307, 308} or "location" not in headers:
                return _size_in(status, headers)
            url = urljoin(url, headers["location"])
    except web.WebError as exc:
        raise UrlRefused(f"cannot be read now: {exc}", hint="try again, or store it: spotctl data put") from exc
    except ValueError as exc:
        raise UrlRefused("redirects to no URL") from exc
    finally:
        web.drop_connections()
    raise UrlRefused("redirects too often")


def _size_in(status: int, headers: dict[str, str]) -> int:
    if status in {401, 403}:
        raise UrlRefused(f"is not served to everybody (HTTP {status})")
    if status in {404, 410}:
        raise UrlRefused(f"is not there (HTTP {status})", hint="check its spelling")
    if status == 200:
        raise UrlRefused("is not served in parts, so that a download that was cut would begin again")
    found = _RANGE.fullmatch(headers.get("content-range", "")) if status == 206 else None
    if found is None or not int(found[1]):
        raise UrlRefused(f"serves no size (HTTP {status})")
    return int(found[1])
