"""Blocking calls off the loop: few at a time, and a bound for those that never return."""

from __future__ import annotations

import threading

import anyio
import anyio.to_thread
import pytest

from spotd.daemon import commits as database
from spotd.daemon.commits import StoreThreads
from spotd_jobs.objects.api import StoreError


def test_a_store_that_hangs_takes_a_bounded_number_of_threads_and_is_asked_again_when_it_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(database, "LEFT_BEHIND_MAX", 2)
    monkeypatch.setattr(database, "_ROOM_ASKED_EVERY_S", 0.001)
    answers, begun = threading.Event(), threading.Semaphore(0)

    def hangs() -> str:
        begun.release()
        answers.wait(10)
        return "late"

    async def course() -> None:
        calls = StoreThreads()
        for _ in range(3):
            async with anyio.create_task_group() as group:
                group.start_soon(calls.run, hangs)
                await anyio.to_thread.run_sync(begun.acquire)
                group.cancel_scope.cancel()
        with pytest.raises(StoreError, match="did not answer"):
            await calls.run(hangs, deadline_s=0.05)
        assert not begun.acquire(blocking=False), "one more than may hang was begun"
        answers.set()
        assert await calls.run(lambda: "prompt", deadline_s=10) == "prompt"

    anyio.run(course)
