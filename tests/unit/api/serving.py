"""The real application over a real unix socket, in a thread of its own."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn

from spotd.api.app import make_app
from tests.unit.api.fake import FakeBackend

_STOP_S = 10.0


@dataclass
class Served:
    """A backend that can be reached at a socket; `failures` is what the application logged."""

    backend: FakeBackend
    socket: Path
    failures: list[tuple[str, Exception]] = field(default_factory=list)


@contextmanager
def served(backend: FakeBackend, *, code_bytes_max: int = 1_000_000) -> Iterator[Served]:
    """The backend answers at the socket until the block ends."""
    # pytest's own temporary folders are too deep for the path of a socket.
    folder = Path(tempfile.mkdtemp(prefix="spotd-"))
    path = folder / "spotd.sock"
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(os.fspath(path))
    listening.listen(32)
    place = Served(backend, path)
    app = make_app(
        backend.handlers(),
        on_failure=lambda route, exc: place.failures.append((route, exc)),
        code_bytes_max=code_bytes_max,
    )
    config = uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listening],), name="api under test")
    thread.start()
    try:
        yield place
    finally:
        server.should_exit = True
        thread.join(_STOP_S)
        listening.close()
        shutil.rmtree(folder)
        assert not thread.is_alive(), "the API did not stop"
