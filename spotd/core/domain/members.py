"""Several machines of one attempt, of which some were lost while the others were kept."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final

from spotd_providers.contract.values import MicroUsd, MicroUsdPerHour, cost

_NOTHING: Final = MicroUsd(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """Which of several machines take part, by the ranks that their provider gave, and which are to be replaced.

    Attributes:
        round: it grows whenever other machines take part than before.
        since: by rank, the round in which its machine came, or comes; `None`: it takes no part any more.
        lost: those that the first machine lost, while the others are kept.
        kept_since: since when these wait, until the command runs again; `None` while it runs.
        shrinks: the lost ones are left out, and not replaced.
        given_up: why the others do not go on without them either; empty while they may.
        replaced: how many machines were replaced so far.
        kept_for, kept_cost: of all former waits.
    """

    since: tuple[int | None, ...]
    round: int = 0
    lost: tuple[int, ...] = ()
    kept_since: datetime | None = None
    shrinks: bool = False
    given_up: str = ""
    replaced: int = 0
    kept_for: timedelta = timedelta(0)
    kept_cost: MicroUsd = _NOTHING

    @property
    def healthy(self) -> int:
        """How many of them take part and are not lost."""
        return sum(came is not None and rank not in self.lost for rank, came in enumerate(self.since))

    def going_on(self, rate: MicroUsdPerHour, now: datetime) -> Members:
        """Return them once nothing is waited for any more, at what all of them cost meanwhile."""
        if self.kept_since is None:
            return self
        span = max(timedelta(0), now - self.kept_since)
        return replace(
            self,
            lost=(),
            kept_since=None,
            shrinks=False,
            given_up="",
            kept_for=self.kept_for + span,
            kept_cost=MicroUsd(self.kept_cost + cost(rate, span)),
        )
