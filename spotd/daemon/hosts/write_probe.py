"""Whether the checkpoint store takes writes at all, asked while a host is silent that may be unable to write."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Final

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.ids import AttemptId
from spotd.core.domain.world import World
from spotd.daemon.hosts.liveness import STILL_SHARE
from spotd_jobs.objects.api import ObjectStore, StoreError

PROBE_EVERY: Final = timedelta(seconds=30)
PROBE_KEY: Final = "doctor/writes"


class WriteProbe:
    """The newest answer of the store to a write of the daemon's own."""

    def __init__(self, objects: ObjectStore, marker_at: Callable[[AttemptId], datetime | None]) -> None:
        self._objects = objects
        self._marker_at = marker_at
        """When a listing last showed that a host had written its liveness marker again."""
        self._probed_at: datetime | None = None
        self._failed_at: datetime | None = None

    @property
    def has_failed(self) -> bool:
        """Whether the store takes no writes, or took none until a moment ago."""
        return self._failed_at is not None

    def update(self, world: World, *, at: datetime, real: datetime) -> None:
        """Write if a host is silent and it is time for that; forget a failure when none is silent."""
        if not any(item.state.counts and self._is_late(item, world, at) for item in world.attempts.values()):
            self._failed_at = None
            return
        if self._probed_at is not None and real - self._probed_at < PROBE_EVERY:
            return
        self._probed_at = real
        try:
            self._objects.put(PROBE_KEY, b"spotd")
        except StoreError:
            self._failed_at = at
        else:
            # Just after the store takes writes again, no host has had its turn to write a marker.
            if self._failed_at is not None and at - self._failed_at >= world.policy.silence_max:
                self._failed_at = None

    def _is_late(self, item: Attempt, world: World, at: datetime) -> bool:
        """Whether its host gave no sign of life for a while, or none in half of its provider's time for a start."""
        if item.heartbeat_seen_at is not None:
            newest = max(item.heartbeat_seen_at, self._marker_at(item.id) or item.heartbeat_seen_at)
            return newest < at - world.policy.silence_max * STILL_SHARE
        rules = world.policy.providers.get(item.provider)
        return (
            rules is not None and item.launched_at is not None and item.launched_at < at - rules.provision_timeout / 2
        )
