"""Ports of pods, through an API server that speaks the WebSocket protocol of `portforward`."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

import anyio
import pytest
from websockets.asyncio.server import ServerConnection, serve

from spotd_providers.contract.errors import AuthFailed, Unavailable
from spotd_providers.kubernetes.access import Cluster, open_pod_port
from tests.cases import every

PATH = "/api/v1/namespaces/jobs/pods/spotd-lab-j1-1-abcde/portforward"
ODD = bytes(range(256)) * 300
Behave = Callable[[ServerConnection], Any]


class Api:
    """What the API server is asked, and what it refuses."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.refusals: list[HTTPStatus] = []
        self.tokens: list[bool] = []

    async def token(self, *, refused: bool) -> str:
        self.tokens.append(refused)
        return "new" if refused else "old"


@asynccontextmanager
async def cluster(api: Api, behave: Behave) -> AsyncIterator[Cluster]:
    def judge(connection: ServerConnection, request: Any) -> Any:
        api.asked.append((request.path, request.headers.get("authorization", "")))
        if api.refusals:
            return connection.respond(api.refusals.pop(0), "pods is forbidden\n")
        return None

    async with serve(
        behave, "127.0.0.1", 0, subprotocols=["v4.channel.k8s.io"], process_request=judge, compression=None  # type: ignore[list-item]  # a str is one at run time
    ) as server:  # fmt: skip
        port = next(iter(server.sockets)).getsockname()[1]
        none: Any = None
        yield Cluster(client=none, http=none, address=f"http://127.0.0.1:{port}", tls=None, tokens=api.token)


async def echo(connection: ServerConnection) -> None:
    for channel in (b"\0", b"\1"):
        await connection.send(channel + (6006).to_bytes(2, "little"))
    async for message in connection:
        assert isinstance(message, bytes)
        assert message[:1] == b"\0"
        await connection.send(message)


def test_bytes_go_to_a_pod_and_back_with_the_token_of_now() -> None:
    async def main() -> None:
        api = Api()
        api.refusals = [HTTPStatus.UNAUTHORIZED]
        async with cluster(api, echo) as made:
            one, two = [await open_pod_port(made, PATH, 6006) for _ in range(2)]
            for each in (one, two):
                await each.send(ODD)
                got = b""
                while len(got) < len(ODD):
                    got += await each.receive()
                assert got == ODD
                await each.send_eof()
                await each.aclose()
        assert api.asked[:2] == [(f"{PATH}?ports=6006", "Bearer old"), (f"{PATH}?ports=6006", "Bearer new")]

    anyio.run(main)


def test_a_program_that_closes_its_side_ends_the_connection() -> None:
    async def closes(connection: ServerConnection) -> None:
        await connection.send(b"\0\x76\x17")
        await connection.send(b"\0last")

    async def main() -> None:
        async with cluster(Api(), closes) as made:
            one = await open_pod_port(made, PATH, 6006)
            assert await one.receive() == b"last"
            assert await one.receive() == b""

    anyio.run(main)


def test_what_the_kubelet_complains_of_is_said() -> None:
    async def complains(connection: ServerConnection) -> None:
        await connection.send(b"\1\x76\x17")
        await connection.send(b"\1dial tcp4 127.0.0.1:6006: connect: connection refused\x1b[2J")

    async def main() -> None:
        async with cluster(Api(), complains) as made:
            one = await open_pod_port(made, PATH, 6006)
            with pytest.raises(Unavailable, match="connection refused") as raised:
                await one.receive()
            assert "\x1b" not in str(raised.value)

    anyio.run(main)


@every(
    ("refusals", "kind", "words"),
    [
        ([HTTPStatus.UNAUTHORIZED, HTTPStatus.UNAUTHORIZED], AuthFailed, "does not take the token"),
        ([HTTPStatus.FORBIDDEN], AuthFailed, "create pods/portforward"),
        ([HTTPStatus.NOT_FOUND], Unavailable, "HTTP 404"),
        ([HTTPStatus.BAD_GATEWAY], Unavailable, "HTTP 502"),
    ],
    ids=["a token that is refused twice", "a right that is missing", "no pod", "a node that is away"],
)
def test_a_refusal_has_its_reason(refusals: list[HTTPStatus], kind: type[Exception], words: str) -> None:
    async def main() -> None:
        api = Api()
        api.refusals = refusals
        async with cluster(api, echo) as made:
            with pytest.raises(kind, match=words):
                await open_pod_port(made, PATH, 6006)
        assert not api.refusals

    anyio.run(main)


def test_a_server_that_is_away_is_unavailable() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        none: Any = None
        made = Cluster(client=none, http=none, address=f"http://127.0.0.1:{port}", tls=None, tokens=Api().token)
        with pytest.raises(Unavailable, match="gives no way to port 6006"):
            await open_pod_port(made, PATH, 6006)

    anyio.run(main)
