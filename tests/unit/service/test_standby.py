"""A daemon that waits for the lead: a signal ends the wait, also at the moment at which the lead is had."""

from __future__ import annotations

import signal
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import pytest

from spotd.api.handlers import HandlerContext
from spotd.daemon import log as logs
from spotd.service import http_server
from spotd.service.lifecycle import SystemdNotifier
from spotd.service.waiting import DatabaseReads, WaitingApp
from spotd.store import SecretsKeys, Store, StoreInUse

FIRST = StoreInUse("the state is in use by process 1", hint="wait")


@pytest.fixture
def sock(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(tmp_path / "s"))
        made.listen()
        yield made


async def never_made(_store: Store) -> HandlerContext:
    raise NotImplementedError


async def waited(
    sock: socket.socket, store: Store, monkeypatch: pytest.MonkeyPatch, *, ended_while_opening: bool
) -> Store | None:
    opening = anyio.Event()
    begun, may_open = anyio.from_thread, anyio.Event()

    def open_slowly(_url: str) -> Store:
        begun.run_sync(opening.set)
        begun.run(may_open.wait)
        return store

    async def signals() -> AsyncIterator[signal.Signals]:
        await opening.wait()
        if ended_while_opening:
            yield signal.SIGTERM
        may_open.set()
        await anyio.sleep_forever()

    monkeypatch.setattr(Store, "open", open_slowly)
    monkeypatch.setattr(http_server, "ASK_EVERY_S", 0.0)
    received = signals()
    async with anyio.create_task_group() as group:

        async def let_open() -> None:
            await opening.wait()
            await anyio.wait_all_tasks_blocked()
            may_open.set()

        group.start_soon(let_open)
        log, url = logs.get("test"), "postgresql://db/x"
        reads = DatabaseReads(url, never_made, why=lambda: "", on_failure=lambda *_: None)
        app = WaitingApp(FIRST, keys=SecretsKeys, reads=reads, log=log)
        with anyio.fail_after(20):
            return await http_server.wait_to_lead(url, app, sock, received, notify=SystemdNotifier({}), log=log)
    raise AssertionError("no answer")


@pytest.mark.parametrize("ended", [True, False], ids=["a signal came meanwhile", "no signal came"])
def test_a_signal_that_comes_as_the_lead_is_had_ends_the_daemon(
    sock: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, ended: bool
) -> None:
    path = tmp_path / "state.sqlite"
    open_state = Store.open
    store = open_state(path)
    found = anyio.run(lambda: waited(sock, store, monkeypatch, ended_while_opening=ended))
    monkeypatch.undo()
    if ended:
        assert found is None
        open_state(path).close()  # the lead was given back
    else:
        assert found is store
        store.close()
