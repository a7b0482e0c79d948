"""Writes every grant that differs from what its attempt must have now, in worker threads, one attempt at a time.

Level-triggered. The control loop hands over each new world; this controller compares it with what it last wrote for
each attempt and writes what differs. A write that fails is tried again at the next run.

A thread cannot be stopped, so a write that was given up may still land, over a newer one. Writes of an attempt are
therefore numbered; when one ends that is not the newest, whatever came of it, the newest is written once more.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Final, TypeVar

import anyio.from_thread

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.intents import AttemptId
from spotd.core.domain.jobs import FailedRestore, Job
from spotd.core.domain.policy import Policy
from spotd.core.domain.states import AttemptState, EndReason
from spotd.core.domain.world import World
from spotd.daemon.commits import StoreThreads
from spotd.daemon.controllers import Controller, Outage, Pause
from spotd.daemon.grants.builder import WRITE_LIFE, GrantBuilder, order_of
from spotd.daemon.grants.inputs import InputsAway, InputsMissing, SecretsMissing
from spotd_jobs.objects.api import StoreError
from spotd_providers.contract.provider import Clock, Logger
from spotd_providers.contract.values import ProviderName

T = TypeVar("T")

WRITE_DEADLINE_S: Final = 60.0
THREADS: Final = 4
RETRY_S: Final = 2.0
IDLE_PAUSE_S: Final = 60.0
RENEWALS_PER_LEASE: Final = 4
"""One more than the wire's three, so that a slow round is not a lapse."""

StartScript = Callable[[ProviderName, str], str]
"""From the provider and the grant's URL to what the machine runs first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    at: datetime
    orders: tuple[bool, bool, bool, bool, bool, int]
    superseded: bool = False


class GrantWriter:
    """`prepare` is called by the executor, `update` by the control loop."""

    def __init__(
        self,
        grants: GrantBuilder,
        *,
        policy: Callable[[], Policy],
        start_script: StartScript,
        clock: Clock,
        wall: Clock,
        log: Logger,
        inline: bool = False,
        forbidden: Callable[[], str] = lambda: "",
    ) -> None:
        self._forbidden = forbidden
        self._grants = grants
        self._policy = policy
        self._start_script = start_script
        self._clock = clock
        self._wall = wall
        self._log = log
        self._threads = StoreThreads(THREADS, inline=inline)
        self._outage = Outage(log, "grants.not_renewed", "grants.renewed_again")
        self.controller = Controller("grants", self.reconcile_once, interval_s=IDLE_PAUSE_S, outage=self._outage)
        self._world: World | None = None
        self._written: dict[AttemptId, _Written] = {}
        self._numbers: dict[AttemptId, int] = {}
        """How many writes of each attempt were begun."""
        self._late: set[AttemptId] = set()
        """Whose newest grant an older write may have replaced."""
        self.store_error = ""
        """Why the store did not take the newest grant, empty once it took one."""
        self.stored_at: datetime | None = None
        """When it took one for the newest time."""

    async def prepare(self, attempt: Attempt, job: Job) -> str:
        """Write the grant and return the start script that reads it.

        Raises:
            StoreError, SecretsMissing, InputsMissing, InputsAway, ScriptTooLong: nothing may be launched.
        """
        if self._forbidden():
            raise StoreError(self._forbidden())
        policy = self._policy()
        url = await self._call(self._with_number(attempt.id, lambda: self._grants.prepare(attempt, job, policy)))
        self._written[attempt.id] = _Written(at=self._wall.now(), orders=order_of(attempt))
        return self._start_script(attempt.provider, url)

    async def prepare_another(self, attempt: Attempt, job: Job) -> str:
        """Renew the grant and return the start script of one more machine of an attempt of several.

        Raises:
            StoreError, SecretsMissing, InputsMissing, InputsAway, ScriptTooLong: none may be started.
        """
        if self._forbidden():
            raise StoreError(self._forbidden())
        await self._call(self._with_number(attempt.id, partial(self._renew, attempt, job, self._policy())))
        return self._start_script(attempt.provider, self._grants.url_of(attempt.id))

    def passed_over(self, attempt: AttemptId) -> tuple[FailedRestore, ...]:
        """Return once what should have been offered to this attempt and could not be."""
        return self._grants.passed_over(attempt)

    def update(self, world: World) -> None:
        """Take over the newest world; what it changes about grants is written soon."""
        self._world = world
        self.controller.wake_event.notify()

    async def reconcile_once(self) -> Pause:
        """Write every grant that is due."""
        world, policy = self._world, self._policy()
        if world is None or self._forbidden():
            return Pause(seconds=IDLE_PAUSE_S, error=self._outage.error)
        lease_s = min(self._clock.real_seconds(policy.lease), WRITE_LIFE.total_seconds())
        renew_after = timedelta(seconds=max(0.2, lease_s / RENEWALS_PER_LEASE))
        # Taken before the first await: a grant prepared during this round belongs to a newer world than this one.
        late, self._late = self._late, set()
        for attempt_id in late & world.attempts.keys():
            self._written.pop(attempt_id, None)
        gone = [i for i in {*self._written, *self._numbers, *late} if i not in world.attempts]
        last_error = ""
        asked_at = max((p.since for j in world.jobs.values() if (p := j.moves.proposed) is not None), default=None)
        for attempt in sorted(world.attempts.values(), key=lambda a: (a.stop is None, a.id.job, a.id.number)):
            # Before a healthy machine is stopped, one write shows that the order to save would reach it.
            is_tried = asked_at is None or last_error or (self.stored_at is not None and self.stored_at > asked_at)
            span = renew_after if is_tried else timedelta(0)
            work = self._due(attempt, world.jobs.get(attempt.id.job), policy, span)
            if work is not None:
                last_error = await self._try(self._with_number(attempt.id, work)) or last_error
        for ended in gone:
            failed = await self._try(self._with_number(ended, partial(self._remove, ended)))
            if failed:
                self._late.add(ended)
            else:
                self._numbers.pop(ended, None)
            last_error = failed or last_error
        return Pause(seconds=RETRY_S if last_error else renew_after.total_seconds() / 4, error=last_error)

    def _due(
        self, attempt: Attempt, job: Job | None, policy: Policy, renew_after: timedelta
    ) -> Callable[[], None] | None:
        """Return what must be written for this attempt now, if anything."""
        if job is None:
            return None
        last = self._written.get(attempt.id)
        if last is None and attempt.awaits_handover and attempt.state.counts and attempt.ref is not None:
            return partial(self._hand_over, attempt, job, policy)
        if attempt.state is AttemptState.ENDING:
            if last is not None and last.superseded:
                return None
            if attempt.end_reason is EndReason.FLOODED:
                return partial(self._withdraw, attempt)
            return partial(self._supersede, attempt, job, policy)
        if not attempt.state.counts:
            return None
        if attempt.state is AttemptState.INTENDED and attempt.heartbeat_seen_at is None and attempt.stop is None:
            return None  # when its machine must have ended, if there is one, is known by its first grant alone
        if last is not None and last.orders == order_of(attempt):
            age = self._wall.now() - last.at
            if timedelta(0) <= age < renew_after:
                return None
        return partial(self._renew, attempt, job, policy)

    def _with_number(self, attempt: AttemptId, work: Callable[[], T]) -> Callable[[], T]:
        """Return the write, which notes at its end whether a newer one was begun meanwhile."""
        number = self._numbers[attempt] = self._numbers.get(attempt, 0) + 1

        def write() -> T:
            try:
                return work()
            finally:
                if self._numbers.get(attempt) != number:
                    self._late.add(attempt)
                    with suppress(RuntimeError):  # the loop has ended, and with it this daemon's writing
                        anyio.from_thread.run_sync(self.controller.wake_event.notify)

        return write

    def _renew(self, attempt: Attempt, job: Job, policy: Policy) -> None:
        self._grants.renew(attempt, job, policy)
        self._written[attempt.id] = _Written(at=self._wall.now(), orders=order_of(attempt))

    def _hand_over(self, attempt: Attempt, job: Job, policy: Policy) -> None:
        """Prepare its machine for it, as a launch does before it is made; done anew by each process until it speaks."""
        self._grants.hand_over(attempt, job, policy)
        self._written[attempt.id] = _Written(at=self._wall.now(), orders=order_of(attempt))

    def _supersede(self, attempt: Attempt, job: Job, policy: Policy) -> None:
        self._grants.supersede(attempt, job, policy)
        self._written[attempt.id] = _Written(at=self._wall.now(), orders=order_of(attempt), superseded=True)

    def _withdraw(self, attempt: Attempt) -> None:
        """Nothing is left to write with, not even a last report: this host is believed nothing more."""
        self._grants.remove(attempt.id)
        self._written[attempt.id] = _Written(at=self._wall.now(), orders=order_of(attempt), superseded=True)

    def _remove(self, attempt: AttemptId) -> None:
        self._grants.remove(attempt)
        self._written.pop(attempt, None)

    async def _try(self, work: Callable[[], None]) -> str:
        try:
            await self._call(work)
        except StoreError as exc:
            self.store_error = str(exc)
            return str(exc)
        except (SecretsMissing, InputsMissing, InputsAway) as exc:
            return str(exc)
        except Exception as exc:  # noqa: BLE001 - one grant that cannot be written must not keep all others from it
            return f"a grant cannot be written: {type(exc).__name__}: {exc}"
        self.store_error, self.stored_at = "", self._clock.now()
        return ""

    async def _call(self, work: Callable[[], T]) -> T:
        return await self._threads.run(work, deadline_s=WRITE_DEADLINE_S)
