"""What is remembered of hosts, and forgetting it."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from spotd.api.errors import NotFound
from spotd.api.handlers.context import ContextHandlers
from spotd.api.schemas.health import ForgottenHostResponse, HostResponse, HostsResponse
from spotd.api.timestamps import instant, utc_text
from spotd.core.domain.cooldowns import CooldownScope
from spotd.core.domain.records import ONE
from spotd.core.domain.world import World
from spotd.core.experience.hosts import HostMemory, host_memories, host_of, records_of_host
from spotd.core.plans.learning import forget_host
from spotd.core.plans.plan import Plan
from spotd.store import Reads

HOSTS_MAX: Final = 200
"""So many are shown, the worst first."""


class HostHandlers(ContextHandlers):
    async def hosts(self) -> HostsResponse:
        """Return what is remembered of each host, the worst first."""
        world, now = self._context.world(), self._context.clock.now()
        known = await self._context.read(lambda reads: reads.experience())
        found = host_memories(known, now)
        cooling = {
            (c.provider, c.subject): c.until for c in world.cooldowns if c.scope is CooldownScope.HOST and c.until > now
        }
        shown = [_response(one, cooling.get((one.provider, one.host))) for one in found[:HOSTS_MAX]]
        return HostsResponse(hosts=shown, more=len(found) > HOSTS_MAX)

    async def forget(self, host: str) -> list[ForgottenHostResponse]:
        """Forget the faults and losses of a host, named `HOST` or `PROVIDER/HOST`.

        Raises:
            NotFound: nothing is remembered of such a host.
        """
        names: set[tuple[str, str]] = set()

        def decide(_reads: Reads, world: World, now: datetime) -> Plan:
            names.update((i.provider, host_of(i)) for i in records_of_host(world.experience, host))
            if not names:
                raise NotFound(f"nothing is remembered of a host {host!r}", hint="spotctl providers --hosts")
            return forget_host(world, host, now)

        await self._context.commit(decide)
        self._context.log.info("host.forgotten", host=host)
        return [ForgottenHostResponse(provider=provider, host=name) for provider, name in sorted(names)]


def _response(one: HostMemory, cools_until: datetime | None) -> HostResponse:
    return HostResponse(
        provider=one.provider,
        host=one.host,
        failed_starts=round(one.failed_starts / ONE, 2),
        slow_starts=round(one.slow_starts / ONE, 2),
        early_losses=round(one.early_losses / ONE, 2),
        losses=round(one.losses / ONE, 2),
        machine_h=round(one.hours.total_seconds() / 3600, 2),
        ranks_behind=one.malus_ppm / 1_000_000,
        at=utc_text(one.at),
        cools_until=instant(cools_until),
    )
