"""The ways out: a webhook by the project's own HTTP client, everything else by apprise in a process of its own.

The address of a channel holds its secrets. No message that is made here repeats it or anything of an answer.

A library that may block, log addresses or hang is best kept in another process: it gets the address by its standard
input, an environment without our keys, and is killed at its deadline. That process runs this module as a program.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, Protocol
from urllib.parse import urlsplit

import anyio

from spotd.core.notifications import Message
from spotd_providers.contract.errors import Unavailable
from spotd_providers.kit.http import AnswerLost, open_http

REFUSED: Final = 1
NOT_UNDERSTOOD: Final = 2
NOT_INSTALLED: Final = 3
WEBHOOK_S: Final = 10.0
APPRISE_S: Final = 45.0
_WORDS: Final = {
    REFUSED: "its service did not take the message, or did not answer",
    NOT_UNDERSTOOD: "apprise does not understand its url",
    NOT_INSTALLED: "it needs apprise, which is not installed",
}
_PASSED_ON: Final = ("PATH", "LANG", "LC_ALL", "SSL_CERT_FILE", "SSL_CERT_DIR", "http_proxy", "https_proxy", "no_proxy",
                     "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")  # fmt: skip


class SendFailed(Exception):
    """A message was not taken, or it is not known that it was; the text is a sentence without any secret."""

    def __init__(self, sentence: str, *, retry_after: timedelta | None = None) -> None:
        super().__init__(sentence)
        self.retry_after = retry_after


class Sender(Protocol):
    """Sends one message.

    Raises:
        SendFailed
    """

    async def __call__(self, message: Message) -> None: ...


@dataclass(frozen=True, slots=True)
class Webhook:
    """Posts JSON to a URL."""

    url: str = field(repr=False)

    async def __call__(self, message: Message) -> None:
        try:
            url = urlsplit(self.url)
            async with open_http(f"{url.scheme}://{url.netloc}", timeout_s=WEBHOOK_S) as http:
                answer = await http.send("POST", self.url, json_body=payload(message))
        except Unavailable:
            raise SendFailed("no connection to its server") from None
        except AnswerLost:
            raise SendFailed("its server gave no whole answer") from None
        except Exception as exc:  # noqa: BLE001 - the text of any other error may repeat the address
            raise SendFailed(f"it cannot be sent: {type(exc).__name__}") from None
        if not 200 <= answer.status < 300:
            raise SendFailed(f"its server answered with HTTP {answer.status}", retry_after=answer.retry_after)


@dataclass(frozen=True, slots=True)
class Apprise:
    """Sends by apprise."""

    url: str = field(repr=False)

    async def __call__(self, message: Message) -> None:
        given = {"url": self.url, "title": message.title, "text": message.text, "severity": message.severity.value}
        environment = {name: value for name in _PASSED_ON if (value := os.environ.get(name)) is not None}
        command = [sys.executable, "-I", "-m", "spotd.daemon.notifications.channels"]
        try:
            with anyio.fail_after(APPRISE_S):
                done = await anyio.run_process(
                    command,
                    input=json.dumps(given).encode(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    check=False,
                    env=environment,
                )
        except TimeoutError:
            raise SendFailed(f"it was not sent within {APPRISE_S:.0f} s") from None
        except OSError as exc:
            raise SendFailed(f"its process cannot be started: {exc.strerror}") from None
        if done.returncode:
            raise SendFailed(_WORDS.get(done.returncode, _WORDS[REFUSED]))


def sender_of(url: str) -> Sender:
    """Return what sends to this address."""
    return Webhook(url) if url.partition("://")[0].lower() in {"http", "https"} else Apprise(url)


def payload(message: Message) -> dict[str, object]:
    """Return what a webhook receives; `key` is the same when a message is sent twice."""
    return {
        "schema": 1,
        "key": message.key,
        "topic": message.topic,
        "severity": message.severity.value,
        "at": message.at.isoformat(),
        "job": message.job,
        "count": max(1, len(message.ids) + message.uncounted),
        "title": message.title,
        "text": f"{message.title}\n{message.text}".strip(),
    }


def main() -> int:
    """Send what standard input holds; return the exit code."""
    given = json.loads(sys.stdin.buffer.read())
    logging.disable(logging.CRITICAL)  # it logs addresses
    try:
        import apprise
    except ImportError:
        return NOT_INSTALLED
    kinds = {"warning": apprise.NotifyType.WARNING, "urgent": apprise.NotifyType.FAILURE}
    asset = apprise.AppriseAsset(app_id="spotd", app_desc="spotd", app_url="")
    channel = apprise.Apprise(asset=asset)
    if not channel.add(given["url"]):
        return NOT_UNDERSTOOD
    done = channel.notify(
        title=given["title"],
        body=given["text"] or given["title"],
        notify_type=kinds.get(given["severity"], apprise.NotifyType.INFO),
        body_format=apprise.NotifyFormat.TEXT,
        interpret_escapes=False,
    )
    return 0 if done else REFUSED


if __name__ == "__main__":
    sys.exit(main())
