"""Corrects what was charged for machines that are gone to what their providers billed.

Best effort: an answer that does not come is asked for again, and what was booked stays until one can be believed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Final, cast

import anyio

from spotd.core.billing.bill import bill_of
from spotd.core.billing.bill_correction import READ_AFTER, compared, is_due
from spotd.core.domain.attempts import Attempt
from spotd.core.domain.world import World
from spotd.core.plans.plan import Plan
from spotd.daemon.clock import real_seconds_at_least
from spotd.daemon.commits import Commits, cycle_points
from spotd.daemon.controllers import Controller, Outage
from spotd.daemon.database import Database
from spotd.store import Reads, StateError
from spotd_providers.contract.errors import ProviderError
from spotd_providers.contract.provider import Bills, Clock, Logger, Provider
from spotd_providers.contract.values import Power, ProviderCharge, ProviderName

EVERY: Final = timedelta(minutes=10)
EVERY_FLOOR_S: Final = 5.0
ENDED_MAX: Final = timedelta(days=16)
"""What ended longer ago is left as it was booked."""
AT_ONCE: Final = 50
DEADLINE_S: Final = 60.0
MARGIN: Final = timedelta(days=1)
"""Providers bill by the hour or by the day: the bills of a whole day around a machine are read."""


class BillCheck:
    """Compares charges with bills. `reconcile_once` compares a few attempts."""

    def __init__(
        self,
        providers: Mapping[ProviderName, Provider],
        *,
        commits: Commits,
        database: Database,
        clock: Clock,
        log: Logger,
    ) -> None:
        self._providers = providers
        self._commits = commits
        self._database = database
        self._clock = clock
        self._log = log
        self.controller = Controller(
            "bills",
            self.reconcile_once,
            interval_s=real_seconds_at_least(clock, EVERY, real_s=EVERY_FLOOR_S),
            expected=(StateError,),
            outage=Outage(log, "bills.held", "bills.back"),
            is_first_run_late=True,
        )

    async def reconcile_once(self) -> None:
        """Ask each provider once for the attempts that are due, and correct what differs.

        Raises:
            StateError: the state cannot be read or written.
        """
        now = self._clock.now()
        policy = self._commits.policy
        for name in sorted(name for name, provider in self._providers.items() if _can_be_asked(provider)):
            rules = policy.providers.get(name)
            if rules is None:
                continue
            until = [now - rules.bill_open_for - after for after in READ_AFTER]
            read = partial(Reads.unread_bills, provider=name, since=now - ENDED_MAX, until=until, limit=AT_ONCE)
            ended = await self._database.read(read)
            due = [item for item in ended if is_due(item, policy, now)]
            charges = await self._ask(name, due, now) if due else None
            for item in due if charges is not None else ():
                await self._compare(item, charges or ())

    async def _ask(
        self, name: ProviderName, items: Sequence[Attempt], now: datetime
    ) -> Sequence[ProviderCharge] | None:
        since = min(item.intended_at for item in items) - MARGIN
        try:
            with anyio.fail_after(DEADLINE_S):
                return await cast(Bills, self._providers[name]).charges(since, now)
        except (ProviderError, TimeoutError) as exc:
            self._log.info("bills.unanswered", provider=name, error=str(exc) or type(exc).__name__)
        return None

    async def _compare(self, item: Attempt, charges: Sequence[ProviderCharge]) -> None:
        bill = None if item.ref is None else bill_of(item.ref.instance_id, charges)

        def decide(reads: Reads, world: World, now: datetime) -> Plan:
            job = reads.job(item.id.job)
            stored = next((one for one in reads.attempts_of(item.id.job) if one.id == item.id), None)
            if job is None or stored is None or not is_due(stored, world.policy, now):
                return Plan()
            return compared(world, job, stored, reads.charges_of(item.id.job), bill, now)

        await self._commits.commit_with(decide, cycle_points)


def _can_be_asked(provider: Provider) -> bool:
    power = provider.capabilities.get(Power.BILLING)
    return power is not None and power.available and isinstance(provider, Bills)
