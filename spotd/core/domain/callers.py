"""Who acts through the API, and what each may do there."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from spotd_providers.contract.values import MicroUsd


class Right(IntEnum):
    """What a route asks for. Each right holds those before it."""

    VIEW = 1
    """Read what is no secret."""
    SUBMIT = 2
    """Queue jobs within a budget of the day, and change one's own."""
    OPERATE = 3
    """Everything else."""
    LOCAL = 4
    """What the answer leads to is on the daemon's own computer: only its socket gives it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """One who makes a request.

    Attributes:
        name: of the user, by which a token is known; empty for the owner, who may open the socket.
        budget_per_day: what all of the caller's jobs may hold in a day; `None` where nothing limits that.
    """

    name: str = ""
    right: Right = Right.LOCAL
    budget_per_day: MicroUsd | None = None

    def may_change(self, submitted_by: str) -> bool:
        """Whether the caller may change a job that this one queued."""
        return self.right >= Right.OPERATE or (self.right >= Right.SUBMIT and submitted_by == self.name)


OWNER: Final = Caller()
