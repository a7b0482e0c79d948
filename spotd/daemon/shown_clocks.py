"""Whether the computer's clock is right, by those of others: each answer of a provider and of a bucket has a date.

Theory. Days of budgets, windows, deadlines and grants are dated by the computer's clock. One that is set is followed
(`clock`); one that is wrong and never set shows only beside those of others. One of these may be wrong itself, and an
answer may be an old one that a proxy has kept: what two of them show in agreement is believed, of several pairs that of
the most. Nothing is changed by it, since no date of an answer is sealed: its owner is notified and sets the clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from spotd.core.pricing import span_words
from spotd.daemon.clock import Computer
from spotd.daemon.controllers import Controller
from spotd_providers.contract.provider import Logger

WRONG_MIN: Final = timedelta(minutes=2)
"""A clock that is off by less is in order: an answer may take as long."""
AGREE: Final = timedelta(minutes=1)
KNOWN_FOR_S: Final = 3600.0
"""A date that was stated longer ago says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How far the clocks of at least two others, who agree, are ahead of the computer's."""

    ahead: timedelta
    whom: tuple[str, ...]

    @property
    def is_wrong(self) -> bool:
        return abs(self.ahead) >= WRONG_MIN

    @property
    def words(self) -> str:
        """Complete "this computer's clock"."""
        way = "behind" if self.ahead > timedelta(0) else "ahead of"
        off = timedelta(minutes=round(abs(self.ahead) / timedelta(minutes=1)))
        off_words = f"is {span_words(off)} {way}" if self.is_wrong else "agrees with"
        return f"{off_words} those of {' and '.join(self.whom)}"


class ShownClocks:
    """The dates that others have stated last; its controller says when the computer's clock is wrong, and right again.

    Args:
        computer: whose wall clock is compared.
        note: writes an event of this kind with these words.
    """

    def __init__(self, computer: Computer, *, note: Callable[[str, str], None], log: Logger) -> None:
        self._computer = computer
        self._note = note
        self._log = log
        self._shown: dict[str, tuple[datetime, float]] = {}
        self._is_wrong = False
        self.controller = Controller("shown-clocks", self.reconcile_once, interval_s=computer.compare_every_s)

    def note(self, who: str, shown: datetime) -> None:
        """Note the date of an answer that has come; safe in any thread."""
        aware = shown.replace(tzinfo=UTC) if shown.tzinfo is None else shown
        self._shown[who] = aware, self._computer.uptime_s()

    def difference(self) -> Difference | None:
        """Return what most of those who agree show; `None` while no two of them do."""
        uptime_s, wall = self._computer.uptime_s(), self._computer.wall()
        known = sorted(
            (shown + timedelta(seconds=uptime_s - at_s) - wall, who)
            for who, (shown, at_s) in tuple(self._shown.items())
            if uptime_s - at_s <= KNOWN_FOR_S
        )
        groups = [[one for one in known[i:] if one[0] - first <= AGREE] for i, (first, _) in enumerate(known)]
        most = max(groups, key=lambda group: (len(group), -abs(group[0][0])), default=[])
        if len(most) < 2:
            return None
        return Difference(ahead=most[len(most) // 2][0], whom=tuple(sorted(who for _, who in most)))

    async def reconcile_once(self) -> None:
        """Say once that the clock is wrong, and once that it is right again."""
        found = self.difference()
        if found is None or found.is_wrong == self._is_wrong:
            return
        self._is_wrong = found.is_wrong
        off_s = round(found.ahead.total_seconds())
        if found.is_wrong:
            self._log.warning("clock.wrong", behind_s=off_s, whom=found.whom)
            follow = "days of budgets, windows, deadlines and grants go by it. Set it: spotd follows"
            self._note("clock.wrong", f"this computer's clock {found.words}; {follow}")
        else:
            self._log.info("clock.right", behind_s=off_s, whom=found.whom)
            self._note("clock.right", f"this computer's clock {found.words}")
