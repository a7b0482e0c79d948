"""A plain market that shows no machine after its end: what is gone without an end of ours is listed for a while."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Final

from spotd_providers.contract.provider import Services
from spotd_providers.contract.values import AttemptKey, Instance, InstanceId, InstanceRef, Listing, Market, Power
from spotd_providers.kit.calls import Rest
from spotd_providers.kit.rest import RestClient
from spotd_providers.kit.template import bound
from spotd_providers.kit.vm_market import VmMarket

LOST_SHOWN_FOR: Final = timedelta(minutes=30)


class ListsLost(VmMarket):
    """Spot machines that the provider took back are `GONE` in lists, with the reason as far as it is known."""

    def __init__(self, client: RestClient, services: Services, missing: Mapping[Power, str]) -> None:
        super().__init__(client, services, missing)
        self._is_spot: dict[InstanceId, bool] = {}
        self._lost: dict[InstanceId, tuple[Rest, Instance]] = {}

    @abstractmethod
    async def _farewell(self, ref: InstanceRef, key: AttemptKey) -> Instance:
        """Return a spot machine that is gone without an end of ours."""

    def _own(self, instance: Instance) -> None:
        super()._own(instance)
        if instance.market is not None:
            self._is_spot[instance.ref.instance_id] = instance.market is Market.SPOT
            bound(self._is_spot)

    async def _listing(self, wanted: AttemptKey | None) -> Listing:
        listing = await super()._listing(wanted)
        shown = {one.ref.instance_id for one in listing.instances}
        self._lost = {
            name: (rest, one)
            for name, (rest, one) in self._lost.items()
            if rest.left() > timedelta(0) and name not in shown
        }
        lost = [one for _, one in self._lost.values() if wanted in (None, one.key)]
        return replace(listing, instances=(*listing.instances, *lost))

    async def _is_absent(self, number: InstanceId) -> bool:
        key = self._alive.get(number)
        is_absent = await super()._is_absent(number)
        if is_absent and key is not None and number not in self._asked_to_end and self._is_spot.get(number):
            rest = Rest(self._services.clock)
            rest.take(LOST_SHOWN_FOR)
            self._lost[number] = (rest, await self._farewell(InstanceRef(provider=self.name, instance_id=number), key))
        return is_absent
