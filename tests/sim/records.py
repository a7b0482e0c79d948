"""The launch records in the checkpoint store, and what a life of the daemon asks of them at its start."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, cast

from spotd.core.domain.attempts import Attempt, HostStatus
from spotd.core.domain.jobs import Job
from spotd.core.domain.plan import Plan
from spotd.core.recovery import Survey, recover
from spotd.daemon import recovery_survey
from spotd_jobs.objects.api import Conflict, ObjectInfo, ObjectMissing, ObjectStore, StoreUnavailable

if TYPE_CHECKING:
    from tests.sim.daemon import Daemon

LONG_AGO = datetime(2026, 1, 1, tzinfo=UTC)


class Records:
    """So much of an object store as launch records need, in memory: no backup of the state takes anything from it."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[bytes, datetime]] = {}
        self.now: Callable[[], datetime] = lambda: LONG_AGO
        """The store's own clock, which is right."""
        self.can_read: Callable[[], bool] = lambda: True
        self.can_write: Callable[[], bool] = lambda: True

    def put(self, key: str, data: bytes, *, create_only: bool = False) -> ObjectInfo:
        if not self.can_write():
            raise StoreUnavailable("it takes no writes")
        if create_only and key in self._held:
            raise Conflict(key)
        self._held[key] = data, self.now()
        return self._info(key)

    def get(self, key: str, *, bytes_max: int) -> bytes:
        if key not in self._held:
            raise ObjectMissing(key)
        data, _ = self._held[key]
        assert len(data) <= bytes_max
        return data

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._held.pop(key, None)

    def head(self, key: str) -> ObjectInfo | None:
        return self._info(key) if key in self._held else None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        if not self.can_read():
            raise StoreUnavailable("it does not answer")
        return iter([self._info(key) for key in sorted(self._held) if key.startswith(prefix)])

    def _info(self, key: str) -> ObjectInfo:
        return ObjectInfo(key=key, size=len(self._held[key][0]), etag="", modified=self._held[key][1])

    @property
    def store(self) -> ObjectStore:
        return cast("ObjectStore", self)


def surveyed(daemon: Daemon, records: Records) -> Plan:
    """What the shipped survey makes of the records.

    Raises:
        StoreUnavailable: the store does not answer.
    """
    found = recovery_survey.survey_all(records.store, daemon.world, daemon.now, _read(daemon))
    unsent = recovery_survey.unsent_launches(records.store, daemon.world)
    return recover(daemon.world, found, daemon.now, unsent)


def surveyed_one(daemon: Daemon, records: Records, job: Job) -> Survey | None:
    return recovery_survey.survey_one(records.store, daemon.world.policy, job, daemon.now, _read(daemon))


def _read(daemon: Daemon) -> recovery_survey.HostRead:
    """The hosts' part of the store is the machines' own."""

    def read(_objects: ObjectStore, attempt: Attempt, job: Job, _now: datetime) -> HostStatus:
        known = {c.manifest_key for c in job.checkpoints}
        report = daemon.report(attempt)
        return replace(report, checkpoints=tuple(c for c in report.checkpoints if c.manifest_key not in known))

    return read
