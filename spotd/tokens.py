"""Tokens by which a program proves for whom it asks, and how often a peer may be wrong."""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

TOKEN_BYTES: Final = 32
TOKEN_LENGTH_MIN: Final = 43
"""Of so many random bytes in base64."""
FAILURES_MAX: Final = 8
FAILURES_S: Final = 60.0
"""After so many wrong tokens in so long from one peer, none of its is compared until the first has aged."""
PEERS_MAX: Final = 256
"""Of so many peers wrong tokens are remembered; one more forgets the one that was wrong least lately."""


def new_user_token() -> str:
    return f"spotd_{secrets.token_urlsafe(TOKEN_BYTES)}"


def digest_of(token: str) -> bytes:
    """Return the hash that is kept of a token. It is as random as the token, so that no slow hash is needed."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def peer_of(client: Sequence[Any] | None, headers: Mapping[str, str]) -> str:
    """Return by what a peer is counted: its address, and of IPv6 its network, all addresses of which one host may have.

    On loopback a proxy may say for whom it asks. A program of this computer can claim any address there, and so be
    counted anew: what it gains is bounded by what holds for all together.
    """
    text = "" if client is None else str(client[0])
    address = _address(text)
    if address is not None and address.is_loopback:
        address = _address(headers.get("x-forwarded-for", "").rpartition(",")[2].strip()) or address
    if address is None or address.is_loopback or address.version == 4:
        return str(address or text)
    return str(ipaddress.ip_network((address, 64), strict=False))


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return (address.ipv4_mapped if address.version == 6 else None) or address


class WrongTokens:
    """How often peers stated a wrong token lately."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()

    def note(self, peer: str) -> None:
        failures = self._failures.setdefault(peer, deque(maxlen=FAILURES_MAX))
        self._failures.move_to_end(peer)
        if len(self._failures) > PEERS_MAX:
            self._failures.popitem(last=False)
        failures.append(self._clock())

    def wait_s(self, peer: str) -> float:
        """Return the seconds until a token of this peer is compared again."""
        return left_s(self._failures.get(peer, ()), FAILURES_MAX, self._clock())


def left_s(failures: Sequence[float], most: int, now: float) -> float:
    """Return the seconds until the first of so many failures has aged; 0 while there are fewer."""
    return max(0.0, failures[0] + FAILURES_S - now) if len(failures) == most else 0.0
