"""What is offered now, for commands that go on without a daemon."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from spotd.cli import stderr
from spotd.client.daemon import Daemon
from spotd.client.errors import ClientError
from spotd.words import silence_texts

if TYPE_CHECKING:
    from spotd.api.schemas.prices import QuoteResponse

_LIMIT: Final = 100_000


def current_quotes() -> tuple[list[QuoteResponse], str]:
    """Return all quotes of now, or none and why; providers whose prices are missing are named on stderr."""
    try:
        answer = Daemon().prices({"limit": _LIMIT})
    except ClientError as exc:
        return [], exc.message
    for sentence in silence_texts(answer):
        stderr.warning(sentence)
    quotes: list[QuoteResponse] = answer["quotes"]
    return quotes, ""
