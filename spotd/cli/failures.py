"""Ends of a command that its own code decides on."""

from __future__ import annotations

from collections.abc import Sequence

from spotd.cli import stderr
from spotd.cli.codes import ExitCode


class CommandFailed(Exception):
    """The command ends with this code after saying why. `rows` are several errors with a hint each."""

    def __init__(self, message: str, *, code: ExitCode, hint: str = "", rows: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.hint = hint
        self.rows = tuple(rows)

    def show(self) -> None:
        """Print the reason on stderr."""
        if self.rows:
            stderr.errors(self.rows, hint=self.hint)
        else:
            stderr.error(self.message, hint=self.hint)
