"""An SSH server whose exchanges are an ASGI app's, so that the kit's `Faults` strike them like any cloud's.

A command is one request: its operation is the path, what arrives on standard input the body. The true answer is a JSON
text of the lines that the program printed and its exit status; whatever a fault makes of that is printed instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import asyncssh

from spotd_providers.kit.text import write_atomically
from spotd_providers.testkit.serve import (
    AsgiApp,
    Call,
    Canned,
    Faults,
    Message,
    Receive,
    RecordedRequest,
    Scope,
    Send,
    Served,
)

_CALLS = {
    "probe": Call.OFFERS,
    "offers": Call.OFFERS,
    "launch": Call.LAUNCH,
    "list": Call.LIST,
    "find": Call.LIST,
    "show": Call.LIST,
    "end": Call.TERMINATE,
}
START_S = 10.0


def classify(request: RecordedRequest) -> Call:
    return _CALLS.get(request.path.removeprefix("/"), Call.OTHER)


class LoginHost(Protocol):
    """What a command runs on: a home, what its login shell does first, and the file of its clock."""

    home: Path
    profile: str
    clock: Path


class SshFaults(Faults):
    """`Faults` over hosts; a program runs in a shell of the user who logged in."""

    def __init__(self, hosts: Mapping[str, LoginHost], now: Callable[[], float]) -> None:
        super().__init__(self._run, classify=classify)
        self.hosts = hosts
        self._now = now

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]
        host = self.hosts[scope["user"]]
        # In one step: a command beside this one would read an empty date.
        write_atomically(host.clock, f"{int(self._now())}\n", mode=0o644)
        process = await asyncio.create_subprocess_exec(
            "/bin/sh", "-c", f"{host.profile}\n{scope['command']}",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            cwd=host.home, env={"HOME": str(host.home), "PATH": "/usr/bin:/bin", "LOGIN_SHELL_SECRET": "leaked"},
            start_new_session=True,
        )  # fmt: skip
        try:
            text, _ = await process.communicate(body)
        except asyncio.CancelledError:
            await _end(process)
            raise
        content = {"exit": process.returncode, "lines": text.decode(errors="replace").splitlines()}
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(content).encode()})


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a program and what it started, and close its pipes: a transport left open is reported in some later test."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
    if process.stdout is not None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_S):
                while await process.stdout.read(65536):
                    pass


class _Server(asyncssh.SSHServer):
    def __init__(self, owner: _Thread) -> None:
        self._owner = owner

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._owner.connections.append(conn)

    def public_key_auth_supported(self) -> bool:
        return True

    def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        del key
        return username in self._owner.users and not self._owner.refuses_keys


class _Thread:
    """The server with its own loop."""

    def __init__(self, app: AsgiApp, users: frozenset[str], key: asyncssh.SSHKey) -> None:
        self.connections: list[asyncssh.SSHServerConnection] = []
        self.users = users
        self.refuses_keys = False
        self.requests: list[RecordedRequest] = []
        self.talks: list[int] = []
        """Processes of the programs that were spoken with."""
        self._app = app
        self.key = key
        self.ready: Future[int] = Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self.thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True, name="ssh server")

    async def _main(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncssh.create_server(
            lambda: _Server(self), "127.0.0.1", 0,
            server_host_keys=[self.key], process_factory=self._exchange, encoding=None, allow_scp=False,
        )  # fmt: skip
        self.ready.set_result(server.sockets[0].getsockname()[1])
        await self._stopping.wait()
        server.close()
        self._abort()
        await asyncio.sleep(0)

    def _abort(self) -> None:
        for connection in self.connections:
            connection.abort()
        self.connections.clear()

    def call(self, what: Callable[[], None]) -> None:
        """Do this in the server's loop, and wait until it is done."""
        done = threading.Event()

        def now() -> None:
            what()
            done.set()

        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it is closed: stopped before
                self._loop.call_soon_threadsafe(now)
                done.wait(START_S)

    def drop(self) -> None:
        self.call(self._abort)

    def stop(self) -> None:
        if self._stopping is not None:
            self.call(self._stopping.set)
        self.thread.join(START_S)

    async def _talk(self, process: asyncssh.SSHServerProcess[bytes], command: str) -> None:
        host = getattr(self._app, "hosts", {})[process.get_extra_info("username")]
        made = await asyncio.create_subprocess_exec(
            "/bin/sh", "-c", f"{host.profile}\n{command}",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            cwd=host.home, env={"HOME": str(host.home), "PATH": "/usr/bin:/bin"}, start_new_session=True,
        )  # fmt: skip
        self.talks.append(made.pid)
        given, printed = made.stdin, made.stdout
        assert given is not None
        assert printed is not None

        async def give() -> None:
            with contextlib.suppress(OSError, asyncssh.Error):
                while data := await process.stdin.read(65536):
                    given.write(data)
                    await given.drain()
            given.close()

        giving = asyncio.create_task(give())
        try:
            with contextlib.suppress(OSError, asyncssh.Error):
                while data := await printed.read(65536):
                    process.stdout.write(data)
                    await process.stdout.drain()
                process.exit(await made.wait())
        finally:
            giving.cancel()
            await _end(made)

    async def _exchange(self, process: asyncssh.SSHServerProcess[bytes]) -> None:
        command = process.command or ""
        if command.startswith("env PATH="):  # a program that is spoken with, and no script
            await self._talk(process, command)
            return
        body = await process.stdin.read()
        request = RecordedRequest(method="EXEC", path="/" + command.rpartition(" ")[2], query="", headers={}, body=body)
        self.requests.append(request)
        connection = process.channel.get_connection()
        is_cut = False

        def cut() -> None:
            nonlocal is_cut
            is_cut = True
            connection.abort()

        scope: dict[str, Any] = {
            "type": "http", "method": "EXEC", "path": request.path, "raw_path": request.path.encode(),
            "query_string": b"", "headers": [], "client": None, "extensions": {"spotd.testkit.cut": cut},
            "command": command, "user": process.get_extra_info("username"),
        }  # fmt: skip
        given = False

        async def receive() -> Message:
            nonlocal given
            if not given:
                given = True
                return {"type": "http.request", "body": body, "more_body": False}
            await process.channel.wait_closed()
            return {"type": "http.disconnect"}

        answer: dict[str, Any] = {"status": 500, "body": b"", "headers": {}}

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer["status"] = message["status"]
                answer["headers"] = {n.decode().lower(): v.decode() for n, v in message["headers"]}
            else:
                answer["body"] += message.get("body", b"")

        await self._app(scope, receive, send)
        if is_cut:
            return
        request.status = answer["status"]
        with contextlib.suppress(OSError, asyncssh.Error):
            process.stdout.write(_printed(answer["body"]))
            if answer["status"] == 429:
                process.stdout.write(b"spotd: busy, ask again in %s s\n" % answer["headers"]["retry-after"].encode())
            process.exit(_status(answer))


def _content(body: bytes) -> dict[str, Any] | None:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return None
    fits = isinstance(content, dict) and isinstance(content.get("lines"), list) and "exit" in content
    return content if fits else None


def _printed(body: bytes) -> bytes:
    content = _content(body)
    if content is None:
        return body
    return "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in content["lines"]).encode()


def _status(answer: dict[str, Any]) -> int:
    content = _content(answer["body"])
    if answer["status"] == 429:
        return 75
    return int(content["exit"]) & 255 if content is not None else (0 if answer["status"] == 200 else 1)


class SshServed(Served):
    """A served host with the knobs of its server."""

    server: _Thread
    known_hosts: str


def busy(retry_after_s: int | None) -> Canned:
    """What a host says whose lock is held."""
    return Canned(status=429, headers={"retry-after": str(15 if retry_after_s is None else retry_after_s)})


@contextmanager
def ssh_serving(
    app: AsgiApp, users: frozenset[str], *, key: asyncssh.SSHKey | None = None
) -> Iterator[tuple[Served, _Thread]]:
    """Serve `app` over SSH on a free port of 127.0.0.1 until the block ends."""
    server = _Thread(app, users, key or asyncssh.generate_private_key("ssh-ed25519"))
    server.thread.start()
    port = server.ready.result(timeout=START_S)
    try:
        yield Served(url=f"ssh://127.0.0.1:{port}", port=port, requests=server.requests, _stop=server.stop), server
    finally:
        server.stop()


def pin(path: Path, port: int, key: asyncssh.SSHKey) -> None:
    """Write the file of pinned keys, as OpenSSH writes it."""
    words = key.export_public_key().decode().split()[:2]
    path.write_text(f"[127.0.0.1]:{port} {' '.join(words)}\n")
