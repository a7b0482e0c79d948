"""A write of a grant that was given up and lands after all replaces no newer one for long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from spotd.core.domain.attempts import Attempt, StopOrder
from spotd.core.domain.jobs import Job
from spotd.core.domain.policy import Policy
from spotd.core.domain.states import AttemptState, EndReason
from spotd.core.domain.world import World
from spotd.daemon.clock import SteadyClock
from spotd.daemon.grants.writer import GrantWriter
from tests.unit.core.builders import NOW, shop_policy, world_with
from tests.unit.daemon.rig import Log

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """Real threads write here, for which no clock may jump."""
    return "asyncio"


class Slow:
    """A store whose write of a running grant is stuck until it is let go, and then lands over what came later."""

    def __init__(self) -> None:
        self.content = ""
        self.writes = 0
        self.begun = threading.Event()
        self.let_go = threading.Event()
        self.landed = threading.Event()

    def _write(self, text: str) -> None:
        self.writes += 1
        if text == "run":
            self.begun.set()
            self.let_go.wait(30)
            self.content = text
            self.landed.set()
        else:
            self.content = text

    def renew(self, attempt: Attempt, _job: Job, _policy: Policy) -> None:
        self._write("stop" if attempt.stop is not None else "run")

    def supersede(self, _attempt: Attempt, _job: Job, _policy: Policy) -> None:
        self._write("superseded")

    def remove(self, _attempt: object) -> None:
        self._write("")


def stopping(world: World) -> World:
    order = StopOrder(reason=EndReason.CANCELLED, detail="", ordered_at=NOW, deadline=NOW + timedelta(minutes=5))
    return replace(world, attempts={i: replace(a, stop=order) for i, a in world.attempts.items()})


def ending(world: World) -> World:
    attempts = {i: replace(a, state=AttemptState.ENDING) for i, a in world.attempts.items()}
    return replace(world, attempts=attempts)


def gone(world: World) -> World:
    return replace(world, attempts={})


@pytest.mark.parametrize(("change", "content"), [(stopping, "stop"), (ending, "superseded"), (gone, "")])
async def test_the_newest_grant_is_the_last_to_be_written(
    change: Callable[[World], World], content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, clock = Slow(), SteadyClock(NOW)
    grant_writer = GrantWriter(
        slow,  # type: ignore[arg-type]  # what it is asked to write, and no more
        policy=shop_policy,
        start_script=lambda _provider, url: url,
        clock=clock,
        wall=clock,
        log=Log(),
    )
    world = world_with(AttemptState.RUNNING)
    grant_writer.update(world)
    with monkeypatch.context() as patched:
        patched.setattr("spotd.daemon.grants.writer.WRITE_DEADLINE_S", 0.2)
        while not slow.begun.is_set():  # a thread that has not begun by its deadline never does
            await grant_writer.controller.run_once()
    assert grant_writer.controller.failures
    grant_writer.update(change(world))
    await grant_writer.controller.run_once()
    assert slow.content == content
    slow.let_go.set()
    await anyio.to_thread.run_sync(slow.landed.wait)
    assert slow.content == "run"
    while not grant_writer._late:
        await anyio.lowlevel.checkpoint()
    await grant_writer.controller.run_once()
    assert slow.content == content
    before = slow.writes
    await grant_writer.controller.run_once()
    assert slow.writes == before
