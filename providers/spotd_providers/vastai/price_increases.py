"""Price increases that hosts of vast.ai announced for our machines: when each of these machines ends by that.

A host that raises its price above that of a contract asks its client for consent. Until the client gives it the
contract keeps its price and is no longer extended, so that the machine stops at the end of its contract. spotd never
consents: the job saves before that instant and goes on elsewhere. The end counts as a preemption, by the host's will.

Source: `vastai/api/price_increase.py` and `list__machine` of vast.ai's official client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Annotated, Final

from pydantic import Field

from spotd_providers.contract.errors import ProviderError
from spotd_providers.contract.provider import Clock
from spotd_providers.contract.values import Instance, InstanceId, Loss
from spotd_providers.kit.shapes import Lenient, Row, as_model, row_or_none
from spotd_providers.vastai.client import VastClient
from spotd_providers.vastai.wire import INCREASES, WHO, Id, Measure, instant

ASKED_EVERY: Final = timedelta(minutes=5)
AHEAD: Final = timedelta(minutes=5)
"""The notice is given so long before the end: what a machine does after its last save is lost."""
TIMEOUT_S: Final = 5.0
"""It is asked within a list of machines, which must not wait for it."""
KEPT: Final = timedelta(days=1)
"""For so long after its end a contract's stop has this reason, though vast.ai may name the increase no more."""
ROWS_MAX: Final = 10_000
_SECONDS_PER_HOUR: Final = 3600


class _Increase(Row):
    contract_id: Id
    contract_end_date: Measure
    new_gpu_costpersec: Annotated[Measure | None, Lenient] = None
    old_gpu_costpersec: Annotated[Measure | None, Lenient] = None

    @property
    def ends(self) -> datetime | None:
        return instant(self.contract_end_date)

    @property
    def words(self) -> str:
        """What the host asks for, as far as it is stated."""
        old, new = self.old_gpu_costpersec, self.new_gpu_costpersec
        if old is None or new is None or max(old, new) >= 1:
            return "its host asks for a higher price"
        return f"its host asks ${new * _SECONDS_PER_HOUR:.4f}/h in place of ${old * _SECONDS_PER_HOUR:.4f}/h"


class _Envelope(Row):
    pending_price_increases: Annotated[list[object], Field(max_length=ROWS_MAX)]


class PriceIncreases:
    """What is announced for the machines of the account, asked for every `ASKED_EVERY` at most."""

    def __init__(self, client: VastClient, clock: Clock) -> None:
        self._client = client
        self._clock = clock
        self._asked_at: datetime | None = None
        self._known: Mapping[InstanceId, _Increase] = {}

    async def work_in(self, instances: tuple[Instance, ...]) -> tuple[Instance, ...]:
        """Return the machines, those with an announced increase with the end of their contract as a notice."""
        if not instances:
            return instances
        now = self._clock.now()
        if self._asked_at is None or not timedelta(0) <= now - self._asked_at < ASKED_EVERY:
            self._asked_at = now
            await self._ask()
        return tuple(self._with_notice(one, now) for one in instances)

    async def _ask(self) -> None:
        try:
            path = "/api/v0/instances/pending-price-increases/"
            value = await self._client.ask("GET", path, what=INCREASES, attempts=1, timeout_s=TIMEOUT_S)
            envelope = as_model(_Envelope, value, who=WHO, what=INCREASES)
        except ProviderError:
            return  # what was known holds: a machine that goes on in spite of it costs a save too many
        now = self._clock.now()
        over = {i: row for i, row in self._known.items() if row.ends is not None and now - KEPT < row.ends <= now}
        rows = [row for raw in envelope.pending_price_increases if (row := row_or_none(_Increase, raw)) is not None]
        rows.sort(key=lambda row: row.contract_end_date, reverse=True)  # of two that end one contract the first counts
        self._known = over | {InstanceId(str(row.contract_id)): row for row in rows}

    def _with_notice(self, found: Instance, now: datetime) -> Instance:
        row = self._known.get(found.ref.instance_id)
        if row is None or row.ends is None:
            return found
        words = f"{row.words}; spotd does not consent, so its contract ends {row.ends:%Y-%m-%d %H:%M} UTC"
        if found.loss is Loss.EXPIRED:
            return replace(found, loss=Loss.PREEMPTED, detail=words)
        if found.loss is not None or row.ends <= now:
            return found
        return replace(found, notice_at=row.ends if row.ends - now <= AHEAD else None, detail=words)
