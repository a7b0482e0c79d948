"""What the opened providers bring into the daemon beyond its own modules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def test_http_brings_no_command_line_and_no_colours_with_it() -> None:
    code = (
        "import sys, spotd_providers.kit.http, spotd_providers.local.plugin, spotd_providers.vastai.plugin\n"
        "print([m for m in ('rich', 'pygments', 'click', 'httpx._main', 'boto3') if m in sys.modules])\n"
        "import httpx; print(httpx.AsyncClient.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "AsyncClient"]


@pytest.mark.lengthy
def test_the_daemon_brings_no_optional_library_with_it() -> None:
    code = (
        "import sys, spotd.service.composition, spotd.service.main, spotd.api.app\n"
        "print([m for m in ('prometheus_client', 'apprise', 'nicegui', 'mcp', 'boto3') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_the_server_of_the_api_brings_no_command_line_and_no_reloader_with_it(tmp_path: Path) -> None:
    code = f"""
import socket, sys, anyio
from starlette.applications import Starlette
from spotd.service.http_server import serve
async def main():
    sock = socket.socket(socket.AF_UNIX)
    sock.bind({str(tmp_path / "s")!r})
    started, closing = anyio.Event(), anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: serve(Starlette(), sock, started=started, closing=closing))
        await started.wait()
        closing.set()
anyio.run(main)
print([m for m in ('click', 'multiprocessing', 'uvicorn.supervisors', 'uvicorn.main') if m in sys.modules])
import uvicorn, uvicorn.server, uvicorn.main
print(uvicorn.Server is uvicorn.server.Server, uvicorn.main.run.__module__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "True uvicorn.main"]
