"""Peers without a token: slow, silent, huge and many. The daemon's socket answers all the same."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from spotd.api import app as app_module
from spotd.api import responses
from spotd.client.daemon import Daemon
from spotd.client.transport import ClientError, DaemonRefused, DaemonUnreachable
from spotd.core.domain.policy import Right
from spotd.service import team as team_module
from spotd.service.team import UNPROVEN_MAX, UNPROVEN_PER_PEER_MAX
from tests.integration.team.certificates import Authority
from tests.integration.team.conftest import TOKENS, USERS, Team, user

Client = Callable[..., Daemon]


def plain(team: Team) -> socket.socket:
    return socket.create_connection(("127.0.0.1", team.port), timeout=15)


def encrypted(team: Team, authority: Authority) -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=str(authority.file))
    return context.wrap_socket(plain(team), server_hostname="127.0.0.1")


def until_closed(sock: socket.socket) -> bytes:
    """What is read until the other side ends the connection."""
    read = b""
    try:
        while piece := sock.recv(65_536):
            read += piece
    except TimeoutError:
        raise AssertionError("the connection stays open") from None
    except OSError:
        pass
    return read


@contextmanager
def owner_is_answered(team: Team, *, within_s: float = 2.0) -> Iterator[None]:
    """After the block, too, the socket of the owner answers at once."""
    yield
    begin = time.monotonic()
    Daemon(team.served.socket).jobs()
    assert time.monotonic() - begin < within_s


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits seconds for a peer waits a moment."""
    monkeypatch.setattr(team_module, "HANDSHAKE_S", 0.3)
    monkeypatch.setattr(team_module, "REQUEST_S", 0.3)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\n\r\n", b"\x80" * 400])
def test_a_handshake_that_is_not_made_ends(team: Team, sent: bytes) -> None:
    with owner_is_answered(team), plain(team) as sock:
        sock.sendall(sent)
        until_closed(sock)


def test_what_is_no_http_is_written_nowhere(team: Team, authority: Authority, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("", "uvicorn.error"):
        caplog.set_level(logging.INFO, name)
    with encrypted(team, authority) as sock:
        sock.sendall(b"\0\0 nothing of HTTP\r\n\r\n")
        assert b" 400 " in until_closed(sock).partition(b"\r\n")[0]
    assert caplog.records == []


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("sent", [b"", b"GET /v1/st", b"GET /v1/status HTTP/1.1\r\nHost: a\r\n"])
def test_a_request_that_does_not_arrive_ends(team: Team, authority: Authority, sent: bytes) -> None:
    with owner_is_answered(team), encrypted(team, authority) as sock:
        sock.sendall(sent)
        assert until_closed(sock) == b""


def test_a_head_of_ten_megabytes_is_refused_long_before_its_end(team: Team, authority: Authority) -> None:
    with owner_is_answered(team), encrypted(team, authority) as sock:
        sock.sendall(b"GET /v1/status HTTP/1.1\r\nHost: a\r\n")
        sent = 0
        with suppress(OSError):
            while sent < 10_000:
                sock.sendall(b"X-Fill: " + b"a" * 1000 + b"\r\n")
                sent += 1
        assert sent < 5_000, "megabytes were taken"


def test_a_body_without_a_token_is_not_read(team: Team, authority: Authority) -> None:
    with owner_is_answered(team), encrypted(team, authority) as sock:
        sock.sendall(b"PUT /v1/code/" + b"0" * 64 + b" HTTP/1.1\r\nHost: a\r\nContent-Length: 8000000000\r\n\r\n")
        assert b"401" in until_closed(sock).partition(b"\r\n")[0]


@pytest.mark.parametrize(
    "authorization",
    ["", "Basic YTpi", "Bearer", "Bearer ", "bearer \xff", "Bearer a b", "Bearer " + "x" * 9000],
)
def test_what_is_no_token_is_refused(team: Team, authority: Authority, authorization: str) -> None:
    with encrypted(team, authority) as sock:
        head = f"GET /v1/status HTTP/1.1\r\nHost: a\r\nAuthorization: {authorization}\r\n\r\n"
        sock.sendall(head.encode("latin-1"))
        assert b" 401 " in until_closed(sock).partition(b"\r\n")[0]


def test_two_tokens_in_one_request_are_none(team: Team, authority: Authority) -> None:
    with encrypted(team, authority) as sock:
        line = f"Authorization: Bearer {TOKENS['ole']}\r\n"
        sock.sendall(f"GET /v1/status HTTP/1.1\r\nHost: a\r\n{line}{line}\r\n".encode())
        assert b" 401 " in until_closed(sock).partition(b"\r\n")[0]


def test_a_thousand_connections_hold_nothing_up(team: Team, as_user: Client) -> None:
    """Of one address a few are open at a time; of the others' share nothing is taken."""
    with ExitStack() as stack:
        for _ in range(1000):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", team.port))
        with owner_is_answered(team):
            pass

        async def counted() -> int:
            return len(team.listener._open)

        assert team.served.call(counted) <= UNPROVEN_PER_PEER_MAX
        with owner_is_answered(team):
            pass
    for _ in range(200):  # connections that were closed are taken off one after another
        try:
            as_user("vic", team).status()
        except DaemonUnreachable:
            continue
        return
    raise AssertionError("no user is let in any more")


def test_silent_connections_of_an_address_keep_out_no_user_there(team: Team, authority: Authority) -> None:
    with ExitStack() as stack:
        silent = [stack.enter_context(plain(team)) for _ in range(UNPROVEN_PER_PEER_MAX)]

        async def counted() -> int:
            return len(team.listener._open)

        while team.served.call(counted) < UNPROVEN_PER_PEER_MAX:
            pass
        with encrypted(team, authority) as sock:
            sock.sendall(b"GET /v1/status HTTP/1.1\r\nHost: a\r\nConnection: close\r\n")
            sock.sendall(f"Authorization: Bearer {TOKENS['vic']}\r\n\r\n".encode())
            assert b" 200 " in until_closed(sock).partition(b"\r\n")[0]
        until_closed(silent[0])


def test_behind_a_proxy_all_come_by_one_address(team: Team) -> None:
    listener = team.listener

    async def opened() -> int:
        listener._is_encrypted = False
        for _ in range(UNPROVEN_MAX):
            assert listener._make_room("127.0.0.1")
            listener._open[team_module._Connection("127.0.0.1")] = None
        found = len(listener._open)
        listener._open.clear()
        return found

    assert team.served.call(opened) == UNPROVEN_MAX


def test_over_tls_no_header_says_whose_wrong_tokens_they_are(team: Team, authority: Authority) -> None:
    wrong = f"Authorization: Bearer {'x' * 43}\r\nX-Forwarded-For: 192.0.2.7\r\n\r\n"
    for _ in range(8):
        with encrypted(team, authority) as sock:
            sock.sendall(f"GET /v1/status HTTP/1.1\r\nHost: a\r\n{wrong}".encode())
            assert b" 401 " in until_closed(sock).partition(b"\r\n")[0]

    async def waits() -> list[bool]:
        return [team.listener.gate._wrong.wait_s(peer) > 0 for peer in ("127.0.0.1", "192.0.2.7")]

    assert team.served.call(waits) == [True, False]


def test_a_body_that_comes_too_slowly_is_given_up(
    team: Team, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "BODY_GRACE_S", 0.05)
    with owner_is_answered(team), encrypted(team, authority) as sock:
        head = f"PUT /v1/code/{'0' * 64} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {TOKENS['ada']}\r\n"
        sock.sendall(f"{head}Content-Length: 90\r\nConnection: close\r\n\r\nabc".encode())
        answer = until_closed(sock)
        assert b" 503 " in answer.partition(b"\r\n")[0]
        assert b"too slowly" in answer


def test_of_many_addresses_the_oldest_that_is_unproven_makes_room(team: Team) -> None:
    listener = team.listener

    async def opened() -> tuple[int, bool, int]:
        for number in range(UNPROVEN_MAX + 10):
            peer = f"192.0.2.{number}"
            assert listener._make_room(peer)
            listener._open[team_module._Connection(peer)] = None
        proven = team_module._Connection("198.51.100.1")
        proven.user = "vic"
        listener._open[proven] = None
        for number in range(UNPROVEN_MAX):
            assert listener._make_room(f"203.0.113.{number}")
            listener._open[team_module._Connection(f"203.0.113.{number}")] = None
        found = (len(listener._open), proven in listener._open, sum(not one.user for one in listener._open))
        listener._open.clear()
        return found

    assert team.served.call(opened) == (UNPROVEN_MAX + 1, True, UNPROVEN_MAX)


def test_one_user_takes_no_more_than_a_share(
    team: Team, authority: Authority, monkeypatch: pytest.MonkeyPatch, as_user: Client
) -> None:
    monkeypatch.setattr(team_module, "PER_USER_MAX", 3)
    with ExitStack() as stack:
        streams = []
        for _ in range(3):
            context = ssl.create_default_context(cafile=str(authority.file))
            connection = http.client.HTTPSConnection("127.0.0.1", team.port, timeout=30, context=context)
            stack.callback(connection.close)
            headers = {"Authorization": f"Bearer {TOKENS['vic']}"}
            connection.request("GET", "/v1/events?follow=1", headers=headers)
            streams.append(connection.getresponse())
        assert [one.status for one in streams] == [200] * 3
        with pytest.raises(DaemonRefused, match="vic has 3 connections already"):
            as_user("vic", team).status()
        assert as_user("ole", team).status()


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param([one for one in USERS if one.caller.name != "vic"], id="removed"),
        pytest.param([*USERS[:2], user("vic", Right.SUBMIT, 5), USERS[3]], id="another role"),
    ],
)
def test_streams_of_a_user_who_was_removed_or_changed_end(
    team: Team, as_user: Client, changed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "IDLE_LINE_S", 0.2)
    stream = as_user("vic", team)._transport.lines("/v1/events", query={"follow": 1})
    other = as_user("ole", team)
    begun_at = time.monotonic()
    begun = other._transport._exchange("GET", "/v1/events", query={"follow": 1}, timeout_s=30)
    # The request is made at the first step; the daemon has no event, so that step waits for a line.
    with begun as kept:
        failures: list[ClientError] = []

        def follow() -> None:
            try:
                next(stream, None)
            except ClientError as exc:
                failures.append(exc)

        reader = threading.Thread(target=follow)
        reader.start()

        async def proven() -> set[str]:
            return set(team.listener.gate._proven)

        while team.served.call(proven) != {"ole", "vic"}:
            pass
        team.set_users(*changed)
        reader.join(20)
        assert not reader.is_alive()
        while "vic" in team.served.call(proven):
            pass
        lines_until_now = int((time.monotonic() - begun_at) / responses.IDLE_LINE_S)
        for _ in range(lines_until_now + 1):
            assert kept.readline() == b"\n", "the stream of another user goes on"
        assert team.served.call(proven) == {"ole"}
    if len(changed) < len(USERS):
        with pytest.raises(DaemonRefused, match="none of a user here") as refused:
            as_user("vic", team).status()
        assert refused.value.code == "unauthorized"


def test_a_certificate_that_cannot_be_used_leaves_the_former_one(team: Team, as_user: Client, tmp_path: Path) -> None:
    async def reload() -> str:
        assert team.settings.api_files is not None
        team.settings.api_files[0].write_text("no certificate")
        team.listener.reload(team.settings)
        return team.listener.last_error

    assert "no certificate and its key" in team.served.call(reload)
    assert as_user("vic", team).status()
    assert json.loads(json.dumps(team.listener.findings()))[0]["ok"] is False


def test_a_key_that_others_can_read_is_not_used(team: Team) -> None:
    async def reload() -> str:
        assert team.settings.api_files is not None
        team.settings.api_files[1].chmod(0o644)
        team.listener.reload(team.settings)
        return team.listener.last_error

    assert "other users can read" in team.served.call(reload)
