"""Corrects why attempts ended, where a provider's list names the cause after the attempt was over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Final

from spotd.core.domain.plan import Plan
from spotd.core.domain.policy import key_parts
from spotd.core.domain.states import AttemptState, InvariantBroken
from spotd.core.domain.world import World
from spotd.core.late_causes import correct_end
from spotd.core.metering import STOPPED
from spotd.daemon.commits import Commits, cycle_points
from spotd.daemon.controllers import Controller, Outage
from spotd.store import Reads, StateError
from spotd_providers.contract.provider import Clock, Logger
from spotd_providers.contract.values import Instance, InstanceRef, Listing, Loss, ProviderName

EVERY: Final = timedelta(seconds=15)


class CauseCheck:
    """Compares attempts that ended as lost with what lists state since. `reconcile_once` reads each list once."""

    def __init__(
        self, listings: Callable[[], Mapping[ProviderName, Listing]], *, commits: Commits, clock: Clock, log: Logger
    ) -> None:
        self._listings = listings
        self._commits = commits
        self._log = log
        self._read: dict[ProviderName, datetime] = {}
        self._settled: frozenset[InstanceRef] = frozenset()
        """Machines on the newest lists whose attempts are over for good, as the state knows them."""
        self.controller = Controller(
            "late-causes",
            self.reconcile_once,
            interval_s=clock.real_seconds(EVERY),
            expected=(StateError,),
            outage=Outage(log, "causes.held", "causes.back"),
        )

    async def reconcile_once(self) -> None:
        """Correct what the lists that came since the last run say of machines that were taken back.

        A correction that would break a rule is not made, and the others are.

        Raises:
            StateError: the state cannot be read or written; the same lists are read again.
        """
        listings = self._listings()
        taken = {
            name: [row for row in listing.instances if row.loss is Loss.PREEMPTED and row.state in STOPPED]
            for name, listing in listings.items()
        }
        self._settled &= {row.ref for rows in taken.values() for row in rows}
        for name, rows in taken.items():
            if self._read.get(name) == listings[name].at:
                continue
            for row in rows:
                if row.ref not in self._settled:
                    await self._compare(row)
            self._read[name] = listings[name].at

    async def _compare(self, row: Instance) -> None:
        is_over = True

        def decide(reads: Reads, world: World, now: datetime) -> Plan:
            nonlocal is_over
            parts = key_parts(world.policy.install, row.key)
            first = () if parts is None else reads.attempts_of(parts.job)
            stored = next((one for one in first if one.key == row.key), None)
            if stored is None or stored.ref != row.ref:
                # The answer to its launch may not be recorded yet.
                is_over = stored is None or stored.ref is not None or stored.state is AttemptState.ENDED
                return Plan()
            item = reads.attempts_on_machine_of(stored)[-1]
            job = reads.job(item.id.job)
            is_over = not item.state.counts
            return Plan() if job is None else correct_end(world, job, reads.attempts_of(job.id), item, row, now)

        try:
            await self._commits.commit_with(decide, cycle_points)
        except InvariantBroken as exc:
            is_over = True  # it would break the same rule with each list
            self._log.error("causes.refused", machine=row.ref.instance_id, detail=str(exc))
        if is_over:
            self._settled |= {row.ref}
