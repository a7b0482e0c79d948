"""Keeps the state small: what is too old or too much is folded, a piece at a time."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from spotd.daemon.clock import virtual_at_least
from spotd.daemon.database import Database
from spotd.store import Folding, StateError
from spotd_providers.contract.provider import Clock, Logger

PACE: Final = timedelta(minutes=5)
PACE_FLOOR_S: Final = 30.0
PIECES_PER_ROUND: Final = 4


class Housekeeping:
    """`run` for the task group; `round` is one pass."""

    def __init__(self, database: Database, *, clock: Clock, log: Logger, rules: Folding | None = None) -> None:
        self._database = database
        self._clock = clock
        self._log = log
        self._rules = rules or Folding()
        self._is_held = False

    async def run(self) -> None:
        """Fold again and again until this is cancelled."""
        pause = virtual_at_least(self._clock, PACE, real_s=PACE_FLOOR_S)
        while True:
            await self._clock.sleep(pause)
            await self.round()

    async def round(self) -> int:
        """Fold some pieces, each in a transaction of its own; return how many rows are gone."""
        gone = 0
        try:
            for _ in range(PIECES_PER_ROUND):
                count = await self._database.tx(lambda tx: tx.fold(self._clock.now(), self._rules))
                gone += count
                if count == 0:
                    break
        except StateError as exc:
            if not self._is_held:
                self._log.warning("housekeeping.held", error=exc.message)
            self._is_held = True
            return gone
        self._is_held = False
        if gone:
            self._log.info("housekeeping.folded", rows=gone)
        return gone
