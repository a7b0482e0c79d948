"""Runners on every machine of the shop: they read their grant, resume, beat, save, and obey, as the real ones do."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from spotd.core.domain.intents import AttemptId, JobId
from spotd.daemon import object_keys
from spotd_jobs.objects.api import ObjectMissing
from spotd_jobs.objects.folder import FolderStore
from spotd_jobs.wire.grant import Grant, NextAttempt
from spotd_providers.contract.values import Instance, InstanceState, Loss
from tests.unit.daemon.clocks import VirtualClock
from tests.unit.daemon.host import Host
from tests.unit.daemon.shop import Shop

UNIT = timedelta(seconds=10)
UNITS = 5


class Crew:
    """Survives every life of the daemon, since hosts do."""

    def __init__(
        self,
        folder: Path,
        clock: VirtualClock,
        shop: Shop,
        *,
        outbid: frozenset[int] = frozenset(),
        lent_by: Callable[[JobId], bool] = lambda _: False,
    ) -> None:
        """The machines of jobs that `lent_by` holds of wait for another one; those are not outbid."""
        self._objects = FolderStore(folder / "objects")
        self._clock = clock
        self._shop = shop
        self._outbid = outbid
        self._lent_by = lent_by
        self._goes_on: dict[AttemptId, AttemptId] = {}
        """Which attempt a machine has now, by the one for which it was made."""
        self.progress: dict[AttemptId, int] = {}
        self.resumed_at: dict[AttemptId, int] = {}
        self.secrets: dict[AttemptId, dict[str, str]] = {}
        self._hosts: dict[AttemptId, Host] = {}
        self._over: set[AttemptId] = set()

    async def work(self) -> None:
        """Every machine that runs does a unit of work, again and again."""
        while True:
            await self._clock.sleep(UNIT)
            for machine in self._shop.alive():
                self._unit(machine)

    def _unit(self, machine: Instance) -> None:
        if not machine.key.startswith("spotd-lab-"):
            return
        _, _, job, number = machine.key.split("-")
        first = AttemptId(job=JobId(job), number=int(number))
        attempt = self._now(first)
        host = self._hosts.setdefault(attempt, Host(self._objects, attempt))
        grant = self._grant(attempt)
        if grant is None or attempt in self._over:
            return
        if attempt not in self.progress:
            self._begin(attempt, host, grant)
        self.progress[attempt] += 1
        done = self.progress[attempt]
        host.beat("run")
        host.checkpoint(f"u{done:03d}", f"{job} {done}".encode())
        host.log(f"unit {done}\n")
        if grant.orders.stop is not None:
            self._over.add(attempt)
            host.exit("stopped", code=143)
        elif done >= UNITS:
            self._over.add(attempt)
            host.outputs("out/result", f"{job} done".encode())
            host.exit("succeeded", waits=self._lent_by(attempt.job))
        elif (
            attempt.number in self._outbid
            and attempt == first
            and not self._lent_by(attempt.job)
            and done - self.resumed_at[attempt] >= 2
        ):
            self._over.add(attempt)
            self._shop.set_state(machine.key, InstanceState.PAUSED, Loss.OUTBID)

    def _now(self, first: AttemptId) -> AttemptId:
        """The attempt of a machine, which asks for its next one once its own is over."""
        attempt = self._goes_on.get(first, first)
        if attempt in self._over and self._lent_by(attempt.job):
            try:
                document = self._objects.get(object_keys.next_key(attempt), bytes_max=1_000_000)
            except ObjectMissing:
                return attempt
            found = NextAttempt.model_validate_json(document)
            attempt = self._goes_on[first] = AttemptId(job=JobId(found.job), number=found.attempt)
        return attempt

    def _begin(self, attempt: AttemptId, host: Host, grant: Grant) -> None:
        newest = grant.restore[0].name if grant.restore else "u000"
        self.progress[attempt] = self.resumed_at[attempt] = int(newest[1:])
        self.secrets[attempt] = dict(grant.secrets)
        if grant.restore:
            host.event("restored", name=newest, step=None, bytes=1, seconds=0.1, key=grant.restore[0].manifest.key)

    def _grant(self, attempt: AttemptId) -> Grant | None:
        try:
            return Grant.model_validate_json(self._objects.get(object_keys.grant_key(attempt), bytes_max=1_000_000))
        except ObjectMissing:
            return None
