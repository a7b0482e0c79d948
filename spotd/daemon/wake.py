"""A wake-up without a message: the waiting loop reads the world again, whatever the reason was."""

from __future__ import annotations

import anyio


class WakeEvent:
    """A wake-up that is remembered until it is awaited; many count once."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def notify(self) -> None:
        self._event.set()

    async def wait(self, *, seconds: float) -> bool:
        """Wait for the first wake-up or so many real seconds; return whether it was a wake-up."""
        with anyio.move_on_after(max(0.0, seconds)):
            await self._event.wait()
        # Read and replaced without an await between: a wake-up is either seen now or by the next wait.
        was_woken = self._event.is_set()
        if was_woken:
            self._event = anyio.Event()
        return was_woken
