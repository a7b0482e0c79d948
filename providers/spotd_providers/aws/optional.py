"""Answers that improve offers without being needed for them: read seldom, waited for briefly, kept long.

An absent permission is no failure of the market: it is remembered with AWS's sentence, and asked about again
after a while, since somebody may grant it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Final, Generic, TypeVar

import anyio

from spotd_providers.contract.errors import AuthFailed, ProviderError
from spotd_providers.contract.provider import Services

PATIENCE_S: Final = 15.0
"""A poll waits no longer for this; the next one asks again."""
RETRY_AFTER: Final = timedelta(minutes=10)
REFUSED_FOR: Final = timedelta(hours=1)
T = TypeVar("T")


class Optional(Generic[T]):
    """The newest answer to one question, and why there is none.

    Attributes:
        last_error: the sentence of the last failure, empty after a success.
        is_refused: whether that failure is a permission that is absent.
    """

    def __init__(
        self, services: Services, ask: Callable[[], Awaitable[T]], *, without: T, fresh: timedelta, kept: timedelta
    ) -> None:
        self._clock = services.clock
        self._ask = ask
        self._without = without
        self._fresh = fresh
        self._kept = kept
        self._due: datetime | None = None
        self._known: tuple[datetime, T] | None = None
        self.last_error = ""
        self.is_refused = False

    def known(self) -> T:
        """Return the newest answer unless it is too old."""
        if self._known is None or self._clock.now() - self._known[0] >= self._kept:
            return self._without
        return self._known[1]

    async def get(self) -> T:
        """Return the newest answer, read again if it is due; a failure is recorded, not raised."""
        if self._due is None or self._clock.now() >= self._due:
            await self._renew()
        return self.known()

    async def ask_now(self) -> T:
        """Read the answer now.

        Raises:
            ProviderError: there is none.
        """
        answer = await self._ask()
        self._record_answer(answer)
        return answer

    async def _renew(self) -> None:
        try:
            with anyio.fail_after(PATIENCE_S):
                answer = await self._ask()
        except AuthFailed as exc:
            self._record_failure(str(exc), refused=True, again_in=REFUSED_FOR)
        except ProviderError as exc:
            self._record_failure(str(exc), refused=False, again_in=RETRY_AFTER)
        except TimeoutError:
            self._record_failure(f"AWS did not answer within {PATIENCE_S:.0f} s", refused=False, again_in=RETRY_AFTER)
        else:
            self._record_answer(answer)

    def _record_answer(self, answer: T) -> None:
        now = self._clock.now()
        self._known, self._due = (now, answer), now + self._fresh
        self.last_error, self.is_refused = "", False

    def _record_failure(self, sentence: str, *, refused: bool, again_in: timedelta) -> None:
        self._due = self._clock.now() + again_in
        self.last_error, self.is_refused = sentence, refused
