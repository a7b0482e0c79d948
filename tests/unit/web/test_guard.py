"""Who may speak to the dashboard."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import PlainTextResponse

from spotd.web.guard import Guard, Place, is_loopback, refusal
from spotd.web.peers import is_other_user, peer_uid
from spotd.web.sessions import COOKIE, FAILURES_MAX, FAILURES_S, SESSION_S, SESSIONS_MAX, Sessions

HERE = Place(host="127.0.0.1")
WIDE = Place(host="192.168.1.7", names=frozenset({"gpu.example"}))
TOKEN = "a-token-that-is-not-guessed"


@pytest.mark.parametrize(
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


@pytest.mark.parametrize(
    ("host", "loopback"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("lab", False)]
)
def test_a_token_is_needed_where_others_may_connect(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_a_token_is_needed_behind_a_proxy() -> None:
    assert not HERE.needs_token
    assert WIDE.needs_token
    assert Place(host="127.0.0.1", names=frozenset({"gpu.example"})).needs_token


OWN = {"host": "localhost:8420", "origin": "http://localhost:8420"}


@pytest.mark.parametrize(
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


@pytest.mark.parametrize(
    ("method", "path"), [("PUT", "/login"), ("HEAD", "/login"), ("DELETE", "/style.css"), ("POST", "/favicon.svg")]
)
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


def test_after_some_wrong_tokens_none_is_compared_for_a_while() -> None:
    clock = Clock()
    sessions = Sessions(TOKEN, clock=clock)
    for _ in range(FAILURES_MAX):
        assert not sessions.is_token("wrong")
    assert sessions.wait_s() > 0
    assert not sessions.is_token(TOKEN)
    clock.now += FAILURES_S + 1
    assert sessions.is_token(TOKEN)
    assert sessions.wait_s() == 0


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
