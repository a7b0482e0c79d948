"""A wake-up without a message: whoever waits looks at the world again, whatever the reason for ringing was."""

from __future__ import annotations

import anyio


class WakeEvent:
    """Ringing before anybody waits is remembered; ringing often counts once."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def notify(self) -> None:
        self._event.set()

    async def wait(self, *, seconds: float) -> bool:
        """Returns at the first ring or after so many real seconds, and says whether it rang."""
        with anyio.move_on_after(max(0.0, seconds)):
            await self._event.wait()
        # Read and replaced without an await between: a ring is either seen now or by the next wait.
        rang = self._event.is_set()
        if rang:
            self._event = anyio.Event()
        return rang
