"""Names of jobs: short, sortable by submission, unambiguous when read aloud.

Lower-case Crockford base32 (no i, l, o, u), six digits of seconds and four of chance. There is no hyphen in one,
because the key a machine carries is split at hyphens.
"""

from __future__ import annotations

from datetime import UTC, datetime
from random import Random
from typing import Final

from spotd.core.domain.ids import JobId
from spotd_providers.contract.provider import Clock

ALPHABET: Final = "0123456789abcdefghjkmnpqrstvwxyz"
TIME_DIGITS: Final = 6
CHANCE_DIGITS: Final = 4
_EPOCH: Final = datetime(2020, 1, 1, tzinfo=UTC)
_TIMES: Final = len(ALPHABET) ** TIME_DIGITS
_CHANCES: Final = len(ALPHABET) ** CHANCE_DIGITS


class JobIds:
    """Every id it makes is larger than the one before."""

    def __init__(self, clock: Clock, rng: Random) -> None:
        self._clock = clock
        self._rng = rng
        self._newest = -1

    def new(self) -> JobId:
        seconds = int((self._clock.now() - _EPOCH).total_seconds())
        # A market replayed from before 2020 keeps unique ids and merely loses their order between starts.
        number = max(0, seconds) % _TIMES * _CHANCES + self._rng.randrange(_CHANCES)
        self._newest = max(number, self._newest + 1)
        return JobId(_encode(self._newest))


def _encode(number: int) -> str:
    digits = []
    for _ in range(TIME_DIGITS + CHANCE_DIGITS):
        number, digit = divmod(number, len(ALPHABET))
        digits.append(ALPHABET[digit])
    return "".join(reversed(digits))
