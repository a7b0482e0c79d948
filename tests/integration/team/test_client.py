"""`spotctl` over TLS: what can be wrong is said with its cause and a way out, and the daemon that leads is found."""

from __future__ import annotations

import hashlib
import http.server
import io
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from spotd.cli.client import spotctl
from spotd.cli.entry import run
from spotd.client.daemon import Daemon
from spotd.client.remote import RemoteRefused, parse_url
from spotd.client.transport import ClientError, DaemonNotice, DaemonRefused, DaemonUnreachable
from tests.cases import every
from tests.integration.team.certificates import Authority
from tests.integration.team.conftest import TOKENS, Team, free_port, team_of
from tests.integration.team.test_rights import draft

Client = Callable[..., Daemon]


@contextmanager
def listening(answer: bytes) -> Iterator[int]:
    """A port at which each connection gets these bytes and is closed."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    with server.accept()[0] as taken:
                        taken.recv(65_536)  # unread bytes at the close could take the answer with them
                        taken.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield int(server.getsockname()[1])
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    ("issued", "words", "way_out"),
    [
        ({"days": -1}, "has expired", "renewed"),
        ({"by_itself": True}, "is signed by itself", "--ca FILE"),
        ({"name": "other.example"}, "is not for 127.0.0.1", "--url"),
    ],
)
def test_a_certificate_that_is_wrong_is_named(
    tmp_path: Path, authority: Authority, as_user: Client, issued: dict[str, object], words: str, way_out: str
) -> None:
    host = str(issued.pop("name", "127.0.0.1"))
    files = authority.issue(f"wrong-{words[:5]}", host, **issued)  # type: ignore[arg-type]  # of the table above
    with team_of(tmp_path, files) as team, pytest.raises(DaemonUnreachable, match=words) as failed:
        as_user("vic", team).status()
    assert way_out in failed.value.hint


def test_an_authority_that_is_not_known_is_named(team: Team, as_user: Client) -> None:
    with pytest.raises(DaemonUnreachable, match="authority that this computer does not know") as failed:
        as_user("vic", team, ca=None).status()
    assert "--ca" in failed.value.hint


def test_a_refused_token_is_named_and_not_shown(team: Team, as_user: Client) -> None:
    wrong = "spotd_" + "y" * 43
    with pytest.raises(DaemonRefused, match="none of a user") as failed:
        as_user("vic", team, token=wrong).status()
    assert wrong not in str(failed.value)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        pytest.param(b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 20_000, "is not spotd", id="nested"),
        pytest.param(
            b"HTTP/1.1 302 Found\r\nLocation: https://login.example/\r\nContent-Length: 0\r\n\r\n",
            "redirects to 'https://login.example/', which spotctl does not follow",
            id="redirect",
        ),
    ],
)
def test_what_a_proxy_may_answer_is_named(
    as_user: Client, monkeypatch: pytest.MonkeyPatch, team: Team, answer: bytes, words: str
) -> None:
    client = as_user("vic", team)
    with listening(answer) as port:
        monkeypatch.setenv("SPOTCTL_URL", f"http://127.0.0.1:{port}")
        with pytest.raises(DaemonUnreachable, match=words):
            Daemon().status()
    assert client.status()


def test_what_is_no_spotd_is_named(team: Team, as_user: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    client = as_user("vic", team)
    team.listener.gate.app = http_404
    with pytest.raises(DaemonUnreachable, match="is not spotd"):
        client.status()
    with listening(b"SSH-2.0-OpenSSH\r\n") as port:
        monkeypatch.setenv("SPOTCTL_URL", f"https://127.0.0.1:{port}")
        with pytest.raises(DaemonUnreachable, match="speaks no TLS"):
            Daemon().status()
    with listening(b"") as port:
        monkeypatch.setenv("SPOTCTL_URL", f"http://127.0.0.1:{port}")
        with pytest.raises(DaemonUnreachable, match="closed the connection"):
            Daemon().status()
    monkeypatch.setenv("SPOTCTL_URL", f"https://127.0.0.1:{free_port()}")
    with pytest.raises(DaemonUnreachable, match="nothing listens"):
        Daemon().status()
    monkeypatch.setenv("SPOTCTL_URL", "https://spotd.invalid:7443")
    with pytest.raises(DaemonUnreachable, match="no computer is known"):
        Daemon().status()


async def http_404(scope: object, receive: object, send: Callable[..., Awaitable[object]]) -> None:
    await send({"type": "http.response.start", "status": 404, "headers": []})
    await send({"type": "http.response.body", "body": b"<html>nothing here</html>"})


@every(
    ("url", "words"),
    [
        ("gpu.example.org:7443", "is not https"),
        ("ftp://gpu.example.org", "is not https"),
        ("https://", "is not https"),
        ("https://gpu.example.org/v1", "is not https"),
        ("https://gpu.example.org?token=a", "is not https"),
        ("https://secret@gpu.example.org", "holds no token"),
        ("https://gpu.example.org:port", "is none"),
        ("http://gpu.example.org:7443", "in the clear"),
    ],
)
def test_a_url_that_is_wrong_is_refused_without_what_it_may_hold(url: str, words: str) -> None:
    with pytest.raises(RemoteRefused, match=words) as refused:
        parse_url(url)
    assert "secret" not in refused.value.message + refused.value.hint


@pytest.mark.parametrize(
    ("mode", "text", "words"),
    [
        (0o644, "t" * 43, "others may read"),
        (0o600, "", "one token"),
        (0o600, "a\nb", "one token"),
        (0o600, "é", "text"),
    ],
)
def test_a_token_file_that_cannot_be_used_is_named(
    team: Team, as_user: Client, mode: int, text: str, words: str
) -> None:
    client = as_user("vic", team)
    path = team.token_file("vic")
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(DaemonUnreachable, match=words):
        client.status()
    path.unlink()
    with pytest.raises(DaemonUnreachable, match="cannot be read"):
        client.status()


def test_commands_take_address_and_token_as_options(
    team: Team, authority: Authority, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("SPOTCTL_URL", "SPOTCTL_TOKEN_FILE", "SPOTCTL_CA"):
        monkeypatch.setenv(name, "")
    team.served.write_three_jobs()
    options = ["--url", team.url, "--token-file", str(team.token_file("vic")), "--ca", str(authority.file)]
    assert run(spotctl, "spotctl", [*options, "ls", "-o", "json"]) == 0
    assert "llama-lora" in capsys.readouterr().out
    assert run(spotctl, "spotctl", [*options, "cancel", "prep", "-y"]) == 2
    assert "vic may view only, and this needs the right to submit" in capsys.readouterr().err
    assert run(spotctl, "spotctl", [*options, "hosts", "ls"]) == 2
    assert "on the daemon's computer" in capsys.readouterr().err


def test_the_metrics_are_read_with_a_token(team: Team, authority: Authority) -> None:
    from tests.integration.team.test_rights import ask

    assert ask(team, authority, "GET", "/metrics", TOKENS["vic"])[0] == 404

    async def text() -> bytes | None:
        return b"spotd_up 1\n"

    team.listener.gate.metrics = text
    status, body, headers = ask(team, authority, "GET", "/metrics", TOKENS["vic"])
    assert (status, body) == (200, b"spotd_up 1\n")
    assert headers["content-type"].startswith("text/plain; version=0.0.4")


# Several daemons, of which one leads.


def test_the_daemon_that_leads_is_found_and_a_write_is_made_once(
    team: Team, tmp_path: Path, authority: Authority, as_user: Client
) -> None:
    team.wait_for_lead()
    (folder := tmp_path / "b").mkdir()
    files = authority.issue("second", "127.0.0.1")
    with team_of(folder, files) as leader:
        leader.served.write_three_jobs()
        client = as_user("ole", team, leader)
        assert len(client.jobs()["jobs"]) == 3
        submissions = leader.served.asked("submissions.submit")
        client.submit(draft("mine"))
        assert len(submissions) == 1
        code = b"packed" * 100
        assert client.put_code(hashlib.sha256(code).hexdigest(), io.BytesIO(code), len(code))["code"]["bytes"] == 600
        fresh = as_user("ole", team, leader)
        fresh.put_code(hashlib.sha256(code).hexdigest(), io.BytesIO(code), len(code))
        assert client.place == leader.url
    # Where none leads, what the one that waits knows is better than nothing.
    with pytest.warns(DaemonNotice, match="read from the database"):
        assert as_user("ole", team, leader).jobs()["jobs"] == []
    gone = as_user("ole", leader, team)
    with pytest.raises(DaemonUnreachable, match="none of 2 daemons leads") as failed:
        gone.providers()
    assert "process 7 on other" in failed.value.message
    with pytest.raises(ClientError, match="process 7 on other"):
        as_user("ole", team).providers()


def test_a_request_of_which_nothing_is_known_is_made_nowhere_else(
    team: Team, as_user: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Drops(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.connection.close()

        def log_message(self, *_: object) -> None:
            """Write nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Drops) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        as_user("ole", team)
        monkeypatch.setenv("SPOTCTL_URL", f"http://127.0.0.1:{server.server_port},{team.url}")
        team.served.write_three_jobs()
        with pytest.raises(DaemonUnreachable):
            Daemon().submit(draft("mine"))
        thread.join(10)
    assert len(Daemon(team.served.socket).jobs()["jobs"]) == 3
