"""Refusals and statuses that mean the same at every provider."""

from __future__ import annotations

from typing import ClassVar
from urllib.parse import urlsplit

from spotd_providers.contract.errors import RequestRejected, Unavailable
from spotd_providers.kit.http import HttpAnswer


class DefiniteRefusal(Exception):
    """A definite "no" whose meaning depends on what was asked.

    Attributes:
        code: the provider's error word, or an empty string.
        detail: its sentence, clean enough to show.
    """

    who: ClassVar[str]

    def __init__(self, *, status: int, code: str = "", detail: str = "") -> None:
        super().__init__(f"{self.who} answered {status}: {detail or code or 'no reason given'}")
        self.status = status
        self.code = code
        self.detail = detail


def raise_for_status(answer: HttpAnswer, *, who: str, what: str) -> None:
    """Raise for a redirect and for an error of the server.

    Raises:
        Unavailable: the answer is one of these.
    """
    if 300 <= answer.status < 400:
        host = urlsplit(answer.headers.get("location", "")).hostname or "elsewhere"
        raise Unavailable(f"{who} redirects {what} to {host}: check base_url")
    if answer.status >= 500 or answer.status == 408:
        raise Unavailable(f"{who} answered {answer.status} to {what}")


def rejected(who: str, field: str, reason: str) -> RequestRejected:
    """Build the error of a request that cannot be made."""
    return RequestRejected(f"{who}: {field}: {reason}", field=field, reason=reason)
