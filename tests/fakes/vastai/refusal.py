"""vast.ai's ways of saying no."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Refusal(Exception):
    """An answer that is not a yes: a JSON object, or plain text as its rate limiter sends."""

    def __init__(self, status: int, body: Mapping[str, Any] | str, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(f"{status}: {body}")
        self.status = status
        self.body = body
        self.headers = dict(headers or {})


def said(status: int, error: str, msg: str, **more: Any) -> Refusal:
    """The usual error body."""
    return Refusal(status, {"success": False, "error": error, "msg": msg, **more})


def no_such_ask(ask_id: int, status: int) -> Refusal:
    """The ask was rented or withdrawn."""
    if status == 410:
        return said(410, "no_such_ask", f"error 410/3907: offer {ask_id} is no longer available", ask_id=ask_id)
    text = f"error 404/3603: no_such_ask Instance type by id {ask_id} is not available."
    return said(404, "invalid_args", text, ask_id=ask_id)


def no_such_instance(contract_id: int) -> Refusal:
    """The contract does not exist, or is not visible yet."""
    return said(404, "no_such_instance", f"error 404/3580: no_such_instance Instance {contract_id} not found.")
