"""Where we have, or may have, machines: there the listing is polled; elsewhere a slow sweep is enough.

A provider stays on the list after its last attempt is gone until a complete listing, begun well after that, was
empty: a launch that was answered wrongly or late shows up in exactly that span.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from spotd.core.domain.world import World
from spotd_providers.contract.values import InstanceState, Listing, ProviderName


class WatchedProviders:
    """Remembers when each provider last had a reason to be watched."""

    def __init__(self) -> None:
        self._last: dict[ProviderName, datetime] = {}

    def update(self, world: World, listings: Mapping[ProviderName, Listing], now: datetime) -> frozenset[ProviderName]:
        """Return the providers to be watched now."""
        for attempt in world.attempts.values():
            self._last[attempt.provider] = now
        for intent in world.intents.values():
            self._last[intent.provider] = now
        for name, listing in listings.items():
            if any(machine.state is not InstanceState.GONE for machine in listing.instances):
                self._last[name] = now
        for name, since in list(self._last.items()):
            seen = listings.get(name)
            if since < now and seen is not None and seen.complete and seen.at > since + world.policy.list_lag(name):
                del self._last[name]
        return frozenset(self._last)
