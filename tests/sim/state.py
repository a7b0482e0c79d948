"""The state database of the simulator: a dictionary that is written in transactions, on a disk that may be full."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.cooldowns import is_remembered
from spotd.core.domain.copies import replace
from spotd.core.domain.intents import Charge, JobId
from spotd.core.domain.jobs import Job
from spotd.core.domain.plan import Plan
from spotd.core.domain.policy import Policy
from spotd.core.domain.states import AttemptState
from spotd.core.domain.world import World, awaited, past_job
from spotd.store.place import StateUnavailable
from spotd_providers.contract.values import ProviderName

if TYPE_CHECKING:
    from tests.sim.daemon import Daemon

T = TypeVar("T")


class MemoryStore:
    """So much of `Store` as `Database` and `Commits` need."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    def tx(self, work: Callable[[MemoryTx], T]) -> T:
        """Write everything that the work commits, or nothing if it raises."""
        tx = MemoryTx(self._daemon)
        result = work(tx)
        if tx.plan is not None:
            self._daemon.world = tx.loaded
            self._daemon.commit(tx.plan)
        return result

    def read(self, work: Callable[[MemoryTx], T]) -> T:
        tx = MemoryTx(self._daemon)
        if isinstance(work, partial):  # of a query of `Reads`, which holds a connection
            found: T = getattr(tx, work.func.__name__)(*work.args, **work.keywords)
            return found
        return work(tx)


class MemoryTx:
    """So much of `Tx` and `Reads` as `Commits` needs."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self.loaded = daemon.world
        self.plan: Plan | None = None

    def world(self, policy: Policy, now: datetime) -> World:
        known = {(c.provider, c.scope, c.subject): c for c in self.loaded.cooldowns}
        kept = tuple(c for c in known.values() if is_remembered(c, now))
        done = self._daemon.done
        over = {i: past_job(done[i]) for i in awaited(self.loaded.jobs.values()) if i in done}
        self.loaded = replace(self.loaded, policy=policy, cooldowns=kept, past=over)
        return self.loaded

    # --- of `Reads`, for bills ---

    def job(self, job: JobId) -> Job | None:
        return self.loaded.jobs.get(job) or self._daemon.done.get(job)

    def attempts_of(self, job: JobId) -> tuple[Attempt, ...]:
        return tuple(item for item in self._daemon.attempts_of.get(job, {}).values())

    def attempts_on_machine_of(self, item: Attempt) -> tuple[Attempt, ...]:
        key = item.carried_key
        own = [one for one in self._daemon.attempts_ever.values() if key in {one.key, one.machine_key}]
        found = [one for one in own if one.ref == item.ref and one.id != item.id]
        return tuple(sorted([*found, item], key=lambda one: (one.intended_at, one.id.job, one.id.number)))

    def charges_of(self, job: JobId) -> tuple[Charge, ...]:
        return tuple(charge for charge in self._daemon.told.charges if charge.attempt.job == job)

    def unread_bills(
        self, provider: ProviderName, *, since: datetime, until: Sequence[datetime], limit: int
    ) -> tuple[Attempt, ...]:
        found = [
            (item.ended_at, item)
            for item in self._daemon.attempts_ever.values()
            if item.state is AttemptState.ENDED and item.provider == provider and item.ref is not None
            if not item.machine.may_compute and item.ended_at is not None and since <= item.ended_at
            if 0 <= item.bill.tries < len(until) and item.ended_at <= until[item.bill.tries]
        ]
        return tuple(item for _, item in sorted(found, key=lambda row: row[0])[:limit])

    def commit(self, plan: Plan) -> None:
        self._require_space()
        self._daemon.before_commit(plan)
        assert self.plan is None
        self.plan = plan

    def set_meta(self, _key: str, _value: str) -> None:
        self._require_space()

    def _require_space(self) -> None:
        if self._daemon.full_since is not None:
            raise StateUnavailable("the state cannot be written", hint="free some space")
