"""A daemon that waits reads on while its config is read again: each database is closed by the last of its readers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from http import HTTPStatus
from pathlib import Path

import anyio
import pytest
from starlette.types import ASGIApp, Message

from spotd.api.handlers import HandlerContext
from spotd.daemon.commits import Database
from spotd.service.waiting import DatabaseReads
from spotd.store import StateUnavailable, Store
from tests.unit.api import worlds

SOON_S = 20


class Opened:
    """The databases that were opened, in files of this folder in place of PostgreSQL."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.all: list[Store] = []
        self.made = 0
        self.on_make: Callable[[], Awaitable[None]] | None = None

    def open(self, _url: str) -> Store:
        self.all.append(Store.open(self._folder / f"{len(self.all)}.sqlite"))
        return self.all[-1]

    async def make(self, store: Store) -> HandlerContext:
        rig = worlds.still_rig(self._folder / f"rig-{self.made}")
        self.made += 1
        await rig.control_loop.adopt()
        if self.on_make is not None:
            await self.on_make()
        context = rig.handlers().context
        context.database = Database(store)
        return context

    def are_open(self) -> list[bool]:
        found = []
        for store in self.all:
            try:
                store.read(lambda reads: reads.jobs())
            except StateUnavailable:
                found.append(False)
            else:
                found.append(True)
        return found


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opened:
    found = Opened(tmp_path)
    monkeypatch.setattr(Store, "open_to_read", found.open)
    return found


async def ask(app: ASGIApp, path: str) -> int:
    said: list[int] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            said.append(message["status"])

    scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [],
    }
    await app(scope, receive, send)
    return said[0]


def reads_of(opened: Opened) -> DatabaseReads:
    def fail(route: str, exc: Exception) -> None:
        raise AssertionError(route) from exc

    return DatabaseReads("postgresql://db/x", opened.make, why=lambda: "it waits", on_failure=fail)


def test_who_reads_while_the_config_is_read_again_is_answered_and_the_last_one_closes(opened: Opened) -> None:
    async def story() -> None:
        reads = reads_of(opened)
        async with reads.app() as first, reads.app() as same:
            assert first is same
            with anyio.fail_after(SOON_S):
                await reads.close()
            assert await ask(first, "/v1/jobs") == HTTPStatus.OK
            async with reads.app() as second:
                assert second is not first
                assert [await ask(one, "/v1/status") for one in (first, second)] == [HTTPStatus.OK] * 2
            assert opened.are_open() == [True, True]
        assert opened.are_open() == [False, True]
        await reads.close()
        assert opened.are_open() == [False, False]

    anyio.run(story)


def test_what_is_being_made_when_the_config_is_read_again_is_made_anew_for_the_next(opened: Opened) -> None:
    async def story() -> None:
        reads = reads_of(opened)
        opened.on_make = reads.close
        async with reads.app() as first:
            opened.on_make = None
            assert await ask(first, "/v1/jobs") == HTTPStatus.OK
            async with reads.app() as second:
                assert second is not first
        assert opened.are_open() == [False, True]
        reads.end()
        with pytest.raises(StateUnavailable):
            async with reads.app():
                raise AssertionError("nothing more is answered")
        await reads.close()
        assert opened.are_open() == [False, False]

    anyio.run(story)


def test_a_reader_that_is_cancelled_leaves_nothing_open(opened: Opened) -> None:
    async def story() -> None:
        reads = reads_of(opened)
        begun = anyio.Event()

        async def read() -> None:
            async with reads.app():
                begun.set()
                await anyio.sleep_forever()

        async with anyio.create_task_group() as group:
            group.start_soon(read)
            await begun.wait()
            await reads.close()
            assert opened.are_open() == [True]
            group.cancel_scope.cancel()
        assert opened.are_open() == [False]

    anyio.run(story)
