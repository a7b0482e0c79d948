"""The token of a dashboard, and the sessions of the browsers that were shown to know it."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Final

COOKIE: Final = "spotd_session"
TOKEN_LENGTH_MIN: Final = 16
SESSION_S: Final = 7 * 86_400
SESSIONS_MAX: Final = 64
"""One more closes the oldest."""
FAILURES_MAX: Final = 8
FAILURES_S: Final = 60.0
"""After so many wrong tokens in so long from one peer, none of its is compared until the first has aged."""
PEERS_MAX: Final = 256
"""Of so many peers wrong tokens are remembered; one more forgets the one that was wrong least lately."""
ALL_FAILURES_MAX: Final = 64
DELAY_S: Final = 1.0
"""How long each comparison waits while so many tokens were wrong in so long, from wherever they came."""


def new_token() -> str:
    return secrets.token_urlsafe(24)


class Sessions:
    """Open sessions. Only hashes are kept: what could open a session is nowhere in memory for long."""

    def __init__(self, token: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._token = _hash(token)
        self._clock = clock
        self._until: OrderedDict[bytes, float] = OrderedDict()
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()
        self._all_failures: deque[float] = deque(maxlen=ALL_FAILURES_MAX)

    def is_token(self, text: str, peer: str) -> bool:
        """Whether this is the token; false without a comparison while too many of this peer were wrong."""
        if self.wait_s(peer):
            return False
        is_right = hmac.compare_digest(_hash(text), self._token)
        if not is_right:
            failures = self._failures.setdefault(peer, deque(maxlen=FAILURES_MAX))
            self._failures.move_to_end(peer)
            if len(self._failures) > PEERS_MAX:
                self._failures.popitem(last=False)
            for known in (failures, self._all_failures):
                known.append(self._clock())
        return is_right

    def wait_s(self, peer: str) -> float:
        """Return the seconds until a token of this peer is compared again."""
        return self._left_s(self._failures.get(peer, ()), FAILURES_MAX)

    def delay_s(self) -> float:
        """Return how long the next comparison is to wait, of any peer: that locks out none."""
        return DELAY_S if self._left_s(self._all_failures, ALL_FAILURES_MAX) else 0.0

    def _left_s(self, failures: Sequence[float], most: int) -> float:
        return max(0.0, failures[0] + FAILURES_S - self._clock()) if len(failures) == most else 0.0

    def open(self) -> str:
        """Return the cookie of a new session."""
        value = secrets.token_urlsafe(32)
        self._until[_hash(value)] = self._clock() + SESSION_S
        while len(self._until) > SESSIONS_MAX:
            self._until.popitem(last=False)
        return value

    def is_open(self, value: str) -> bool:
        """Whether this is the cookie of an open session."""
        return bool(value) and self._until.get(_hash(value), 0.0) > self._clock()

    def close(self, value: str) -> None:
        """End a session, if there is such a one."""
        self._until.pop(_hash(value), None)


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
