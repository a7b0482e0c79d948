"""Several machines of one attempt, of which some were lost while the others were kept."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from spotd.core.domain.copies import replace
from spotd_providers.contract.values import MicroUsd

_NOTHING: Final = MicroUsd(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """Which of several machines take part, by the ranks that their provider gave, and which are to be replaced.

    Attributes:
        round: it grows whenever other machines take part than before.
        since: by rank, the round in which its machine came, or comes; `None`: it takes no part any more.
        lost: those that are lost, while the others are kept.
        kept_since: since when these wait, until the command runs again; `None` while it runs.
        kept_from: what the attempt had cost then.
        whole_since: since when none of them is missing any more while the command does not run yet.
        shrinks_since: since when the lost ones are left out, and not replaced.
        given_up: why the others do not go on without them either; empty while they may.
        replaced: how many machines were replaced so far.
        kept_for, kept_cost: of all former waits.
        newest: what names the newest checkpoint of the job when the newest wait was over; `None` before the first.
        is_outdated: the first machine is of a later round than this one: which take part is not known any more.
    """

    since: tuple[int | None, ...]
    round: int = 0
    lost: tuple[int, ...] = ()
    kept_since: datetime | None = None
    kept_from: MicroUsd = _NOTHING
    whole_since: datetime | None = None
    shrinks_since: datetime | None = None
    given_up: str = ""
    replaced: int = 0
    kept_for: timedelta = timedelta(0)
    kept_cost: MicroUsd = _NOTHING
    newest: str | None = None
    is_outdated: bool = False

    @property
    def first(self) -> int:
        """The rank of the first one of those that take part."""
        return next(rank for rank, came in enumerate(self.since) if came is not None)

    @property
    def shrinks(self) -> bool:
        """Whether the lost ones are left out, and not replaced."""
        return self.shrinks_since is not None

    @property
    def healthy(self) -> int:
        """How many of them take part and are not lost."""
        return sum(came is not None and rank not in self.lost for rank, came in enumerate(self.since))

    def going_on(self, spent: MicroUsd, now: datetime, begun_at: datetime) -> Members:
        """Return them once nothing is waited for any more.

        Args:
            spent: what the attempt has cost up to now.
            begun_at: when the attempt began; they may wait since the one before, which has that part of the wait.
        """
        if self.kept_since is None:
            return self
        span = max(timedelta(0), now - max(self.kept_since, begun_at))
        return replace(
            self,
            lost=(),
            kept_since=None,
            kept_from=_NOTHING,
            whole_since=None,
            shrinks_since=None,
            given_up="",
            kept_for=self.kept_for + span,
            kept_cost=MicroUsd(self.kept_cost + max(0, spent - self.kept_from)),
        )
