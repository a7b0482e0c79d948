"""Why a back-test cannot be made, as a sentence with its place and a way out."""

from __future__ import annotations


class BacktestRefused(Exception):
    """The back-test cannot be made. `hint` is the way out."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
