"""The live view over the real API, driven key by key."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from spotd.client.daemon import Daemon
from tests.unit.cli.conftest import Ctl, _session_place, ctl  # noqa: F401 - fixtures of this folder too

if TYPE_CHECKING:
    from textual.pilot import Pilot

    from spotd.top.app import Top


class Driver:
    """A view of so many columns and lines, and what stands on it."""

    def __init__(self, app: Top, pilot: Pilot[None]) -> None:
        self.app = app
        self.pilot = pilot

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Threads answer through messages, so a wait is for the next of them."""
        for _ in range(400):
            await self.pilot.pause()
            if holds():
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"it did not happen; on the screen:\n{self.screen()}")

    async def ask(self) -> None:
        """Ask the daemon now, and show what it says."""
        self.app.take(await asyncio.to_thread(self.app.questions.snapshot))
        await self.pilot.pause()

    def screen(self) -> str:
        """The text of the screen, line by line."""
        strips = self.app.screen._compositor.render_strips()
        return "\n".join(strip.text.rstrip() for strip in strips)

    def rows(self, name: str) -> int:
        return self.app.row_count(name)


Play = Callable[[Driver], Awaitable[Any]]


@pytest.fixture
def play(ctl: Ctl, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:  # noqa: F811 - the fixture itself
    """Runs a view, which asks the daemon only where the test does."""
    pytest.importorskip("textual", reason="needs the extra tui")
    from spotd.top.app import Top

    monkeypatch.setattr("spotd.top.screens.Feed.start", lambda self: None)

    def run(course: Play, *, size: tuple[int, int] = (120, 40), socket: Path | None = None) -> None:
        async def work() -> None:
            app = Top(Daemon(socket or ctl.place.socket))
            async with app.run_test(size=size, notifications=True) as pilot:
                await course(Driver(app, pilot))

        asyncio.run(work())

    return run
