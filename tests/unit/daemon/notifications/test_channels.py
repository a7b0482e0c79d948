"""Real receivers on loopback: a webhook's server, and a mail server that apprise reaches from a process of its own."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.message import EmailMessage
from email.message import Message as Mail
from email.parser import BytesParser
from email.policy import default
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from aiosmtpd.controller import Controller

from spotd.core.notifications import Message, Severity
from spotd.daemon.notifications import channels
from spotd.daemon.notifications.channels import Apprise, SendFailed, Webhook, sender_of

pytestmark = [pytest.mark.anyio, pytest.mark.process, pytest.mark.enable_socket]
TOKEN = "T0pSecretToken"
MESSAGE = Message(
    ids=(1, 2),
    key="job.failed:j1:7",
    topic="failed",
    severity=Severity.WARNING,
    at=datetime(2026, 3, 2, 12, tzinfo=UTC),
    title='train has failed <b>"&amp;',
    text="exit code 1\n<script>alert(1)</script> *bold*",
    job="j1",
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Received:
    """What a server got, and how it answers."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.status = 204
        self.headers: dict[str, str] = {}
        self.url = ""


@contextmanager
def receiving() -> Iterator[Received]:
    received = Received()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            received.requests.append((self.path, json.loads(body)))
            self.send_response(received.status)
            for name, value in received.headers.items():
                self.send_header(name, value)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    received.url = f"http://127.0.0.1:{server.server_port}/hook/{TOKEN}?key={TOKEN}"
    try:
        yield received
    finally:
        server.shutdown()
        server.server_close()


class Mailbox:
    def __init__(self) -> None:
        self.mails: list[Mail] = []
        self.answer = "250 taken"

    async def handle_DATA(self, _server: object, _session: object, envelope: Any) -> str:  # noqa: N802 - aiosmtpd's name
        self.mails.append(BytesParser(policy=default).parsebytes(envelope.content))
        return self.answer


@contextmanager
def mail_server() -> Iterator[tuple[Mailbox, str]]:
    box = Mailbox()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    controller = Controller(box, hostname="127.0.0.1", port=port)
    controller.start()
    try:
        yield box, f"mailto://127.0.0.1:{port}/?from=spotd@lab.example&to=me@lab.example&mode=insecure"
    finally:
        controller.stop()


async def failure_of(sender: channels.Sender) -> SendFailed:
    with pytest.raises(SendFailed) as caught:
        await sender(MESSAGE)
    assert TOKEN not in f"{caught.value} {sender!r}"
    assert caught.value.__cause__ is None
    return caught.value


async def test_a_webhook_receives_json_with_a_key_that_repeats() -> None:
    with receiving() as received:
        sender = sender_of(received.url)
        assert isinstance(sender, Webhook)
        await sender(MESSAGE)
    ((path, body),) = received.requests
    assert path == f"/hook/{TOKEN}?key={TOKEN}"
    assert body == {
        "schema": 1,
        "key": "job.failed:j1:7",
        "topic": "failed",
        "severity": "warning",
        "at": "2026-03-02T12:00:00+00:00",
        "job": "j1",
        "count": 2,
        "title": MESSAGE.title,
        "text": f"{MESSAGE.title}\n{MESSAGE.text}",
    }


@pytest.mark.parametrize("status", [302, 404, 429, 500])
async def test_an_answer_that_is_no_success_is_a_failure_without_the_address(status: int) -> None:
    with receiving() as received:
        received.status = status
        received.headers = {"location": received.url, "retry-after": "120"}
        failure = await failure_of(Webhook(received.url))
    assert str(failure) == f"its server answered with HTTP {status}"
    assert failure.retry_after is not None
    assert failure.retry_after.total_seconds() == 120
    assert len(received.requests) == 1


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (f"http://127.0.0.1:1/{TOKEN}", "no connection to its server"),
        (f"http://[{TOKEN}/", "it cannot be sent: ValueError"),
        (f"HTTP:///{TOKEN}", "no connection to its server"),
        (f"http://127.0.0.1:x{TOKEN}/", "no connection to its server"),
    ],
)
async def test_an_address_that_leads_nowhere_is_a_failure_without_it(url: str, words: str) -> None:
    assert str(await failure_of(sender_of(url))) == words


async def test_a_mail_arrives_as_plain_text_with_one_line_of_subject() -> None:
    with mail_server() as (box, url):
        sender = sender_of(url)
        assert isinstance(sender, Apprise)
        await sender(MESSAGE)
    (mail,) = box.mails
    assert isinstance(mail, EmailMessage)
    assert mail["subject"] == MESSAGE.title
    body = mail.get_body(("plain", "html"))
    assert body is not None
    text = body.get_content()
    assert "<script>" not in text or body.get_content_type() == "text/plain"
    assert "exit code 1" in text


@pytest.mark.parametrize(
    ("url", "words"),
    [
        (f"nothing://{TOKEN}", "apprise does not understand its url"),
        (f"json://{TOKEN}@127.0.0.1:1/", "its service did not take the message, or did not answer"),
    ],
)
async def test_what_apprise_cannot_do_is_said_without_the_address(url: str, words: str) -> None:
    assert str(await failure_of(Apprise(url))) == words


async def test_the_process_of_a_service_gets_no_keys_and_its_address_by_standard_input(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[list[str], dict[str, Any]]] = []

    async def run_process(command: list[str], **options: Any) -> Any:
        seen.append((command, options))
        return SimpleNamespace(returncode=0)

    monkeypatch.setenv("VAST_API_KEY", "a key")
    monkeypatch.setenv("https_proxy", "http://proxy.example")
    monkeypatch.setattr(anyio, "run_process", run_process)
    await Apprise(f"ntfys://{TOKEN}")(MESSAGE)
    ((command, options),) = seen
    assert TOKEN not in repr(command)
    assert TOKEN in options["input"].decode()
    assert options["env"]["https_proxy"] == "http://proxy.example"
    assert "VAST_API_KEY" not in options["env"]


async def test_a_service_that_hangs_is_ended_with_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "APPRISE_S", 0.05)
    assert str(await failure_of(Apprise("json://127.0.0.1:1/"))) == "it was not sent within 0 s"
