"""RunPod's ways of saying no."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any


class Refusal(Exception):
    """An answer that is not a yes: RFC 9457, as v2 sends."""

    def __init__(
        self, status: int, detail: str, *, errors: list[str] | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(f"{status}: {detail}")
        self.status = status
        self.headers = dict(headers or {})
        self.body: dict[str, Any] = {"title": HTTPStatus(status).phrase, "status": status, "detail": detail}
        if errors:
            self.body["errors"] = errors


def no_such_pod() -> Refusal:
    """The pod does not exist, is deleted, or is not visible yet."""
    return Refusal(404, "The requested Pod does not exist.")
