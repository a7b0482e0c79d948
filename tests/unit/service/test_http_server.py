"""The server of the API at its end: requests that are still under way."""

from __future__ import annotations

import contextlib
import logging
import socket
from pathlib import Path

import anyio
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from spotd.service import http_server


async def end_during(app: Starlette, path: Path, arrived: anyio.Event) -> bytes:
    """What a client reads whose request is under way when the server ends."""
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    started, closing = anyio.Event(), anyio.Event()
    read = b""
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: http_server.serve(app, sock, started=started, closing=closing))
        await started.wait()
        async with await anyio.connect_unix(path) as stream:
            await stream.send(b"GET / HTTP/1.1\r\nHost: spotd\r\n\r\n")
            await arrived.wait()
            closing.set()
            with contextlib.suppress(anyio.EndOfStream):
                read = await stream.receive()
    return read


@pytest.mark.parametrize("fails", [False, True], ids=["it is cut short", "it fails by itself meanwhile"])
def test_a_request_that_the_end_cuts_short_is_no_failure_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, fails: bool
) -> None:
    monkeypatch.setattr(http_server, "GRACE_S", 0.01)
    arrived = anyio.Event()

    async def answer(_request: Request) -> Response:
        arrived.set()
        try:
            await anyio.sleep_forever()
        finally:
            if fails:
                raise ZeroDivisionError
        return Response()

    app = Starlette(routes=[Route("/", answer)])
    with caplog.at_level(logging.INFO, "uvicorn.error"):
        anyio.run(end_during, app, tmp_path / "s", arrived)
    found = [record.exc_info[0] for record in caplog.records if record.exc_info]
    assert found == ([ZeroDivisionError] if fails else [])
    assert any("Cancel 1 running task" in record.getMessage() for record in caplog.records)
