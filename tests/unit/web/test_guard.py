"""Who may speak to the dashboard."""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import uvicorn
from starlette.responses import PlainTextResponse

from spotd.tokens import FAILURES_MAX, FAILURES_S, PEERS_MAX, peer_of
from spotd.web import main as gate_module
from spotd.web.guard import (
    ALL_FAILURES_MAX,
    BODY_BYTES_MAX,
    COOKIE,
    DELAY_S,
    SESSION_S,
    SESSIONS_MAX,
    Guard,
    Place,
    Sessions,
    is_loopback,
    is_other_user,
    peer_uid,
    refusal,
)
from spotd.web.main import OPEN_MAX, OPEN_PER_PEER_MAX, Gate, listen
from tests.cases import every

HERE = Place(host="127.0.0.1")
WIDE = Place(host="192.168.1.7", names=frozenset({"gpu.example"}))
TOKEN = "a-token-that-is-not-guessed"


@every(
    ("place", "host", "allowed"),
    [
        (HERE, "127.0.0.1:8420", True),
        (HERE, "127.0.0.1", True),
        (HERE, "localhost:9999", True),
        (HERE, "[::1]:8420", True),
        (HERE, "evil.example:8420", False),
        (HERE, "127.0.0.1.evil.example", False),
        (HERE, "192.168.1.7:8420", False),
        (HERE, "", False),
        (HERE, "localhost:port", False),
        (HERE, "user@localhost", False),
        (HERE, "localhost/x", False),
        (HERE, "[::1", False),
        (WIDE, "192.168.1.7:8420", True),
        (WIDE, "gpu.example", True),
        (WIDE, "other.example", False),
        (WIDE, "gpu.example.evil.example", False),
    ],
)
def test_only_names_that_were_meant_are_hosts(place: Place, host: str, allowed: bool) -> None:
    assert place.allows(host) is allowed


@every(
    ("host", "loopback"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("lab", False)]
)
def test_a_token_is_needed_where_others_may_connect(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_a_token_is_needed_behind_a_proxy() -> None:
    assert not HERE.needs_token
    assert WIDE.needs_token
    assert Place(host="127.0.0.1", names=frozenset({"gpu.example"})).needs_token


OWN = {"host": "localhost:8420", "origin": "http://localhost:8420"}


@every(
    ("method", "headers", "is_socket", "passes"),
    [
        ("GET", {"host": "localhost:8420"}, False, True),
        ("GET", OWN, True, True),
        ("POST", OWN, False, True),
        ("POST", {"host": "localhost:8420"}, False, False),
        ("GET", {"host": "localhost:8420"}, True, False),
        ("GET", {**OWN, "origin": "http://evil.example"}, True, False),
        ("GET", {**OWN, "origin": "null"}, True, False),
        ("GET", {**OWN, "origin": "http://localhost:9999"}, True, False),
        ("POST", {**OWN, "origin": "http://evil.example"}, False, False),
        ("GET", {**OWN, "origin": "http://evil.example"}, False, False),
        ("GET", {"host": "localhost", "sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, False, False),
        (
            "GET",
            {
                "host": "localhost",
                "sec-fetch-site": "cross-site",
                "sec-fetch-mode": "navigate",
                "sec-fetch-dest": "document",
            },
            False,
            True,
        ),
        (
            "GET",
            {
                "host": "localhost",
                "sec-fetch-site": "cross-site",
                "sec-fetch-mode": "navigate",
                "sec-fetch-dest": "iframe",
            },
            False,
            False,
        ),
        ("GET", {"host": "evil.example"}, False, False),
        ("GET", {"host": "evil.example", "origin": "http://evil.example"}, True, False),
    ],
)
def test_other_pages_and_other_names_are_refused(
    method: str, headers: dict[str, str], is_socket: bool, passes: bool
) -> None:
    assert (refusal(HERE, method, headers, is_socket=is_socket) == "") is passes


def answer(
    path: str,
    headers: dict[str, str],
    sessions: Sessions | None,
    *,
    kind: str = "http",
    method: str = "GET",
    place: Place = HERE,
) -> list[dict[str, Any]]:
    """What the guard sends, with an application behind it that answers everything."""
    sent: list[dict[str, Any]] = []

    async def behind(scope: Any, receive: Any, send: Any) -> None:
        if kind == "websocket":
            await send({"type": "websocket.accept"})
        else:
            await PlainTextResponse("inside")(scope, receive, send)

    async def receive() -> dict[str, Any]:
        return {"type": f"{kind}.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": kind,
        "method": method,
        "path": path,
        "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
        "client": None,
        "server": None,
        "query_string": b"",
    }
    asyncio.run(Guard(behind, place, sessions)(scope, receive, send))
    return sent


def test_without_a_session_only_the_login_is_served() -> None:
    sessions = Sessions(TOKEN)
    assert answer("/", {"host": "localhost"}, sessions)[0]["status"] == 303
    assert answer("/login", {"host": "localhost"}, sessions)[0]["status"] == 200
    assert answer("/_nicegui/x.js", {"host": "localhost", "sec-fetch-mode": "cors"}, sessions)[0]["status"] == 403
    assert answer("/_nicegui_ws/", OWN, sessions, kind="websocket")[0]["type"] == "websocket.close"
    named = {**OWN, "cookie": f"a=b; {COOKIE}={sessions.open()}"}
    assert answer("/", named, sessions)[0]["status"] == 200
    assert answer("/_nicegui_ws/", named, sessions, kind="websocket")[0]["type"] == "websocket.accept"
    assert answer("/", {**OWN, "authorization": f"Bearer {TOKEN}"}, sessions)[0]["status"] == 200
    assert answer("/", {**OWN, "authorization": "Bearer another"}, sessions)[0]["status"] == 303
    assert answer(f"/?token={TOKEN}", {"host": "localhost"}, sessions)[0]["status"] == 303


@every(("method", "path"), [("PUT", "/login"), ("HEAD", "/login"), ("DELETE", "/style.css"), ("POST", "/favicon.svg")])
def test_without_a_session_no_other_method_reaches_the_pages(method: str, path: str) -> None:
    assert answer(path, OWN, Sessions(TOKEN), method=method)[0]["status"] == 303


def test_another_user_is_refused_unless_that_is_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spotd.web.guard.is_other_user", lambda *_ends: True)
    sessions = Sessions(TOKEN)
    named = {"host": "gpu.example", "cookie": f"{COOKIE}={sessions.open()}"}
    proxied = Place(host="127.0.0.1", names=frozenset({"gpu.example"}))
    assert answer("/", {"host": "localhost"}, None)[0]["status"] == 403
    assert answer("/", named, sessions, place=proxied)[0]["status"] == 200
    assert answer("/", {"host": "gpu.example"}, sessions, place=proxied)[0]["status"] == 303


def test_a_websocket_ends_with_its_session() -> None:
    sessions = Sessions(TOKEN)
    value = sessions.open()
    got: list[str] = []

    async def behind(scope: Any, receive: Any, send: Any) -> None:
        got.append((await receive())["type"])
        sessions.close(value)
        got.append((await receive())["type"])

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.receive", "text": "2"}

    async def send(message: Any) -> None:
        raise AssertionError(message)

    headers = [(k.encode(), v.encode()) for k, v in {**OWN, "cookie": f"{COOKIE}={value}"}.items()]
    scope = {"type": "websocket", "path": "/_nicegui_ws/", "headers": headers, "client": None, "server": None}
    asyncio.run(Guard(behind, HERE, sessions)(scope, receive, send))
    assert got == ["websocket.receive", "websocket.disconnect"]


def test_every_answer_forbids_frames_and_other_places() -> None:
    headers = {name.decode(): value.decode() for name, value in answer("/", {"host": "localhost"}, None)[0]["headers"]}
    assert headers["x-frame-options"] == "DENY"
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "http" not in headers["content-security-policy"]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_sessions_end_by_time_by_logout_and_by_number() -> None:
    clock = Clock()
    sessions = Sessions(TOKEN, clock=clock)
    first = sessions.open()
    assert sessions.is_open(first)
    assert not sessions.is_open("")
    assert not sessions.is_open(first + "x")
    sessions.close(first)
    assert not sessions.is_open(first)
    oldest = sessions.open()
    newest = [sessions.open() for _ in range(SESSIONS_MAX)][-1]
    assert sessions.is_open(newest)
    assert not sessions.is_open(oldest)
    clock.now += SESSION_S + 1
    assert not sessions.is_open(newest)


def test_after_some_wrong_tokens_of_a_peer_none_of_its_is_compared_for_a_while() -> None:
    clock = Clock()
    sessions = Sessions(TOKEN, clock=clock)
    for _ in range(FAILURES_MAX):
        assert not sessions.is_token("wrong", "10.0.0.1")
    assert sessions.wait_s("10.0.0.1") > 0
    assert not sessions.is_token(TOKEN, "10.0.0.1")
    assert sessions.is_token(TOKEN, "10.0.0.2"), "one peer locks out no other"
    clock.now += FAILURES_S + 1
    assert sessions.is_token(TOKEN, "10.0.0.1")
    assert sessions.wait_s("10.0.0.1") == 0


def test_wrong_tokens_of_many_peers_delay_everyone_and_are_remembered_for_so_many() -> None:
    clock = Clock()
    sessions = Sessions(TOKEN, clock=clock)
    for number in range(2 * PEERS_MAX):
        assert sessions.delay_s() == (DELAY_S if number >= ALL_FAILURES_MAX else 0)
        assert not sessions.is_token("wrong", f"peer {number}")
    assert len(sessions._wrong._failures) == PEERS_MAX
    assert sessions.is_token(TOKEN, "the user")
    clock.now += FAILURES_S + 1
    assert sessions.delay_s() == 0


@every(
    ("client", "forwarded", "peer"),
    [
        (("192.0.2.7", 1), "", "192.0.2.7"),
        (("192.0.2.7", 1), "10.0.0.1", "192.0.2.7"),
        (("127.0.0.1", 1), "", "127.0.0.1"),
        (("127.0.0.1", 1), "10.0.0.1, 192.0.2.9", "192.0.2.9"),
        (("127.0.0.1", 1), "<b>", "127.0.0.1"),
        (("::ffff:192.0.2.7", 1), "", "192.0.2.7"),
        (("2001:db8::1", 1), "", "2001:db8::/64"),
        (("::1", 1), "2001:db8::2", "2001:db8::/64"),
        (("::1", 1), "", "::1"),
        (None, "", ""),
        (("", 0), "10.0.0.1", ""),
    ],
)
def test_a_peer_is_an_address_a_network_of_ipv6_or_what_a_proxy_states(
    client: tuple[str, int] | None, forwarded: str, peer: str
) -> None:
    assert peer_of(client, {"x-forwarded-for": forwarded}) == peer


def test_a_peer_with_many_connections_gets_no_more_and_loopback_gets_all_that_there_are() -> None:
    class Transport:
        def __init__(self, address: str) -> None:
            self.address, self.is_closed, self.owes = address, False, False

        def get_extra_info(self, _name: str) -> tuple[str, int]:
            return self.address, 1

        def is_closing(self) -> bool:
            return self.is_closed

        def abort(self) -> None:
            self.is_closed = True

    gate = Gate()

    def opened(address: str, count: int) -> int:
        made.extend(cast("Any", Transport(address)) for _ in range(count))
        return sum(gate.admits(one, partial(getattr, one, "owes")) for one in made[-count:])

    made: list[Any] = []
    assert opened("192.0.2.7", 2 * OPEN_PER_PEER_MAX) == OPEN_PER_PEER_MAX
    assert opened("192.0.2.8", 1) == 1
    assert opened("127.0.0.1", OPEN_MAX) == OPEN_MAX - OPEN_PER_PEER_MAX - 1
    assert opened("192.0.2.9", 1) == 0
    made[0].is_closed = True
    assert opened("192.0.2.7", 2) == 1
    made[5].owes = made[9].owes = True
    assert opened("192.0.2.9", 1) == 1, "who owes a request makes room, the oldest first"
    assert (made[5].is_closed, made[9].is_closed) == (True, False)
    assert opened("192.0.2.7", 2) == 1, "also in what one address may have"
    assert made[9].is_closed


def test_trickled_requests_do_not_lock_the_owner_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "OPEN_MAX", 4)

    async def run() -> None:
        config = uvicorn.Config(
            PlainTextResponse("inside"), http=Gate().protocol(), lifespan="off", log_config=None, ws="none"
        )
        server = uvicorn.Server(config)
        config.load()
        server.lifespan = config.lifespan_class(config)
        with socket.create_server(("127.0.0.1", 0)) as bound:
            await server.startup(sockets=[bound])
            port = bound.getsockname()[1]
            trickled = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
            for _, writer in trickled:
                writer.write(b"POST /login HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nx")
                await writer.drain()
            reader, owner = await asyncio.open_connection("127.0.0.1", port)
            owner.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await asyncio.wait_for(reader.read(64), 5)).startswith(b"HTTP/1.1 200")
            for _, writer in (*trickled, (reader, owner)):
                writer.close()
            await server.shutdown(sockets=[bound])

    asyncio.run(run())


def test_a_silent_connection_and_one_too_many_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "FIRST_REQUEST_WITHIN_S", 0.05)
    monkeypatch.setattr(gate_module, "OPEN_MAX", 2)

    async def ends(reader: asyncio.StreamReader) -> bytes:
        try:
            return await asyncio.wait_for(reader.read(64), 5)
        except ConnectionResetError:
            return b""

    async def run() -> None:
        config = uvicorn.Config(
            PlainTextResponse("inside"), http=Gate().protocol(), lifespan="off", log_config=None, ws="none"
        )
        server = uvicorn.Server(config)
        config.load()
        server.lifespan = config.lifespan_class(config)
        with socket.create_server(("127.0.0.1", 0)) as bound:
            await server.startup(sockets=[bound])
            port = bound.getsockname()[1]
            connections = [await asyncio.open_connection("127.0.0.1", port)]
            connections[0][1].write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await ends(connections[0][0])).startswith(b"HTTP/1.1 200")
            connections += [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            assert [await ends(reader) for reader, _ in connections[1:]] == [b"", b""]
            for _, writer in connections:
                writer.close()
            await server.shutdown(sockets=[bound])

    asyncio.run(run())


def test_the_body_of_an_answer_does_not_wait_until_its_head_has_arrived() -> None:
    async def run() -> int:
        connected: asyncio.Future[asyncio.BaseTransport] = asyncio.get_running_loop().create_future()

        class Connected(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                connected.set_result(transport)

        bound = listen("127.0.0.1", 0)
        async with await asyncio.get_running_loop().create_server(Connected, sock=bound):
            _, writer = await asyncio.open_connection(*bound.getsockname())
            transport = await asyncio.wait_for(connected, 5)
            taken: socket.socket = transport.get_extra_info("socket")
            is_set = taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            transport.close()
            writer.close()
            return is_set

    assert asyncio.run(run())


def test_the_owner_of_an_unknown_connection_is_unknown() -> None:
    assert peer_uid("127.0.0.1", 1, 2) is None
    assert peer_uid("not an address", 1, 2) is None


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="only Linux says whose a connection is")
def test_a_connection_that_its_user_has_closed_is_not_roots() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        client = socket.create_connection(listening.getsockname())
        accepted, peer = listening.accept()
        with accepted:
            assert not is_other_user(peer, listening.getsockname())
            client.close()
            assert is_other_user(peer, listening.getsockname())


@every(
    ("headers", "status"),
    [
        ({"content-length": str(BODY_BYTES_MAX)}, 200),
        ({"content-length": str(BODY_BYTES_MAX + 1)}, 413),
        ({"content-length": "9" * 40}, 413),
        ({"content-length": "-1"}, 413),
        ({"transfer-encoding": "chunked"}, 413),
        ({}, 200),
    ],
)
def test_a_body_is_bounded_before_it_is_read(headers: dict[str, str], status: int) -> None:
    answered: list[int] = []

    async def behind(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("in")(scope, receive, send)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            answered.append(message["status"])

    given = {"host": "localhost", "origin": "http://localhost", **headers}
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/upload",
        "headers": [(name.encode(), text.encode()) for name, text in given.items()],
    }
    asyncio.run(Guard(behind, Place(host="127.0.0.1"), None)(scope, receive, send))
    assert answered == [status]
