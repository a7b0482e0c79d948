"""A market of virtual machines at list price that forgets a machine at its end, and keeps a log of why it went.

A list shows such a machine for an hour more, as gone and with the cause, once its own page says that it does not exist.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Final

import anyio

from spotd_providers.contract.errors import ProviderError
from spotd_providers.contract.provider import Services
from spotd_providers.contract.values import (
    AttemptKey,
    Billing,
    Instance,
    InstanceId,
    InstanceRef,
    InstanceState,
    Listing,
    Loss,
    Market,
    MicroUsdPerHour,
    Offer,
    Power,
)
from spotd_providers.kit.rest import RestClient
from spotd_providers.kit.template import bound
from spotd_providers.kit.vm_market import VmMarket

ASKED_MAX: Final = 5
"""Machines whose log one list asks for, of those that go and of those that are gone; the next one goes on."""
ASKED_WITHIN_S: Final = 8.0
"""Real seconds for each of the two: a list of machines does not wait for a log that does not answer."""
CAUSE_WITHIN: Final = timedelta(minutes=10)
"""How late the log may say what happened."""
CONSOLES_MAX: Final = 3
"""Machines whose console one list reads."""
SHOWN_FOR: Final = timedelta(hours=1)


class CausedEnds(VmMarket):
    """A market that says why a machine went, when it is asked."""

    def __init__(self, client: RestClient, services: Services, missing: Mapping[Power, str]) -> None:
        super().__init__(client, services, missing)
        self._scopes: dict[InstanceId, str] = {}
        self._causes: dict[InstanceId, Loss | None] = {}
        self._asked: Counter[InstanceId] = Counter()
        self._going: dict[InstanceId, None] = {}
        """Machines that went before we asked for their end."""
        self._gone: dict[InstanceId, Instance] = {}
        self._spot_prices: dict[tuple[str, str], MicroUsdPerHour] = {}

    def _note_prices(self, offers: Iterable[Offer], kind: str) -> None:
        """Keep what machines cost on the spot market, by what `extra` calls their type, and their place.

        A list price holds for what runs, too, and no row of a machine states it.
        """
        for offer in offers:
            if offer.market is Market.SPOT:
                self._spot_prices[offer.extra[kind].lower(), offer.region.lower()] = offer.gpu_price

    def _priced(self, instance: Instance, kind: object, place: object) -> Instance:
        """Return a spot machine with its price by the newest list, where that is known."""
        if instance.market is not Market.SPOT or not isinstance(kind, str) or not isinstance(place, str):
            return instance
        return replace(instance, price=self._spot_prices.get((kind.lower(), place.lower().replace(" ", ""))))

    @abstractmethod
    async def _ask_cause(self, ref: InstanceRef) -> Loss | None:
        """Return why a machine went away; `None` where the log does not say, or not yet."""

    async def _console(self, _ref: InstanceRef) -> Sequence[str]:
        """Return what the machine printed, where that is kept."""
        return ()

    def _own(self, instance: Instance) -> None:
        super()._own(instance)
        self._scopes[instance.ref.instance_id] = instance.ref.scope
        bound(self._scopes)

    async def _listing(self, wanted: AttemptKey | None) -> Listing:
        listing = await super()._listing(wanted)
        now = self._services.clock.now()
        for number, one in list(self._gone.items()):
            if now - (one.ended_at or now) > SHOWN_FOR:
                del self._gone[number]
        open_ = [one for one in self._gone.values() if one.loss is None and now - (one.ended_at or now) <= CAUSE_WITHIN]
        for one in await self._with_causes(open_):
            self._gone[one.ref.instance_id] = one
        shown = {one.ref.instance_id for one in listing.instances}
        gone = [one for number, one in self._gone.items() if wanted in (None, one.key) and number not in shown]
        return replace(listing, instances=(*listing.instances, *gone))

    async def _is_absent(self, number: InstanceId) -> bool:
        key, is_absent = self._alive[number], await super()._is_absent(number)
        if is_absent and (number not in self._asked_to_end or number in self._going):
            ref = InstanceRef(provider=self.name, instance_id=number, scope=self._scopes.get(number, ""))
            at, nothing = self._services.clock.now(), Billing.NOTHING
            self._gone[number] = Instance(ref=ref, key=key, state=InstanceState.GONE, billing=nothing, ended_at=at)
            bound(self._gone)
        return is_absent

    async def _explain(self, instances: tuple[Instance, ...]) -> tuple[Instance, ...]:
        """Say of machines that end or stopped, and not by us, why they do."""
        going = []
        for one in instances:
            number = one.ref.instance_id
            if one.state in (InstanceState.ENDING, InstanceState.PAUSED) and one.loss is None:
                if number not in self._asked_to_end:
                    self._going[number] = None
                    bound(self._going)
                if number in self._going:
                    going.append(one)
            else:
                self._going.pop(number, None)
        found = {one.ref: one for one in await self._with_causes(going)}
        return tuple(found.get(one.ref, one) for one in instances)

    async def _with_causes(self, machines: Sequence[Instance]) -> Sequence[Instance]:
        """Return those whose cause is known, or was asked for in time, with it; the ones asked least often first."""
        found, left = [], ASKED_MAX
        with anyio.move_on_after(ASKED_WITHIN_S) as limit:
            for number, one in sorted(
                ((one.ref.instance_id, one) for one in machines),
                key=lambda row: (self._causes.get(row[0]) is None, self._asked[row[0]]),
            ):
                if self._causes.get(number) is None:
                    if not left:
                        break
                    left -= 1
                    self._asked[number] += 1
                found.append(replace(one, loss=await self._cause(one.ref)))
        if limit.cancelled_caught:
            self._services.log.warning(self._event("cause_late"), machines=len(machines) - len(found))
        bound(self._asked)
        return await self._with_complaints(found)

    async def _with_complaints(self, machines: Sequence[Instance]) -> Sequence[Instance]:
        """Read what those printed that stopped by themselves; the next list says so of those beyond the bound."""
        found, left = [], CONSOLES_MAX
        for one in machines:
            said = ""
            if one.loss is Loss.SELF and one.state is InstanceState.PAUSED:
                left -= one.ref.instance_id not in self._complaints
                if left < 0:
                    continue
                said = await self._complaint(one.ref, partial(self._console, one.ref))
            found.append(replace(one, loss=Loss.IMAGE_ERROR, detail=said) if said else one)
        return found

    async def _cause(self, ref: InstanceRef) -> Loss | None:
        number = ref.instance_id
        if self._causes.get(number) is None:
            try:
                self._causes[number] = await self._ask_cause(ref)
            except ProviderError as exc:
                self._services.log.warning(self._event("cause_unknown"), machine=number, detail=str(exc))
                return None
            bound(self._causes)
        return self._causes[number]
