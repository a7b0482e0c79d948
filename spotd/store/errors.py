"""Errors of the state database; each leaf names the next step.

Every message names the file and holds no value of a statement: `hint` is the way out.
"""

from __future__ import annotations


class StateError(Exception):
    """The state database refused or could not do something. Nothing of the transaction was written."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(f"{message}; {hint}")
        self.message = message
        self.hint = hint


class StateUnavailable(StateError):
    """It cannot be read or written now (disk full, locked, I/O error): hold, and try the same transaction again."""


class StoreInUse(StateError):
    """Another process writes this state: there can be only one."""


class StoreTooNew(StateError):
    """A newer spotd wrote this state; it was left as it is."""


class StoreOtherSchema(StateError):
    """The tables are not those of the revision that the file states; it was left as it is."""


class StoreCorrupt(StateError):
    """The file is damaged or no state database at all; it was left as it is."""


class StoreUnsupported(StateError):
    """The place that was asked for is of a kind that this version cannot use."""
