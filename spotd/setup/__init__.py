"""The way from an installed package to a configured service: `spotd install-service` and `spotctl init`."""

from __future__ import annotations


class SetupRefused(Exception):
    """A step cannot be done; nothing was changed. `message` is the reason and `hint` the way out."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
