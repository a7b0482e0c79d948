"""The token of a dashboard, and the sessions of the browsers that were shown to know it."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

COOKIE: Final = "spotd_session"
TOKEN_LENGTH_MIN: Final = 16
SESSION_S: Final = 7 * 86_400
SESSIONS_MAX: Final = 64
"""One more closes the oldest."""
FAILURES_MAX: Final = 8
FAILURES_S: Final = 60.0
"""After so many wrong tokens in so long, from wherever they came, none is compared until the first has aged."""


def new_token() -> str:
    """Return a token that cannot be guessed."""
    return secrets.token_urlsafe(24)


class Sessions:
    """Open sessions. Only hashes are kept: what could open a session is nowhere in memory for long."""

    def __init__(self, token: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._token = _hash(token)
        self._clock = clock
        self._until: OrderedDict[bytes, float] = OrderedDict()
        self._failures: deque[float] = deque(maxlen=FAILURES_MAX)

    def is_token(self, text: str) -> bool:
        """Whether this is the token; false without a comparison while too many were wrong."""
        now = self._clock()
        if len(self._failures) == FAILURES_MAX and now - self._failures[0] < FAILURES_S:
            return False
        is_right = hmac.compare_digest(_hash(text), self._token)
        if not is_right:
            self._failures.append(now)
        return is_right

    def wait_s(self) -> float:
        """Return the seconds until a token is compared again."""
        if len(self._failures) < FAILURES_MAX:
            return 0.0
        return max(0.0, self._failures[0] + FAILURES_S - self._clock())

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
