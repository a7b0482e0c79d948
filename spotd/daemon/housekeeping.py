"""Folds what is too old or too much in the state, a piece at a time."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from spotd.daemon.clock import real_seconds_at_least
from spotd.daemon.controllers import Controller, Outage
from spotd.daemon.database import Database
from spotd.store import Folding, StateError
from spotd_providers.contract.provider import Clock, Logger

PACE: Final = timedelta(minutes=5)
PACE_FLOOR_S: Final = 30.0
PIECES_PER_ROUND: Final = 4


class Housekeeping:
    """Bounds the size of the state. `reconcile_once` is one pass."""

    def __init__(self, database: Database, *, clock: Clock, log: Logger, rules: Folding | None = None) -> None:
        self._database = database
        self._clock = clock
        self._log = log
        self._rules = rules or Folding()
        self.controller = Controller(
            "housekeeping",
            self.reconcile_once,
            interval_s=real_seconds_at_least(clock, PACE, real_s=PACE_FLOOR_S),
            expected=(StateError,),
            outage=Outage(log, "housekeeping.held", "housekeeping.back"),
            is_first_run_late=True,
        )

    async def reconcile_once(self) -> None:
        await self.fold()

    async def fold(self) -> int:
        """Fold some pieces, each in a transaction of its own; return how many rows are gone.

        Raises:
            StateError: the state cannot be written.
        """
        gone = 0
        for _ in range(PIECES_PER_ROUND):
            count = await self._database.tx(lambda tx: tx.fold(self._clock.now(), self._rules))
            gone += count
            if count == 0:
                break
        if gone:
            self._log.info("housekeeping.folded", rows=gone)
        return gone
