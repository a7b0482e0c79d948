"""A marketplace in this process: machines that really exist in a dictionary, and every way of answering badly."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime

import anyio

from spotd_providers.contract.errors import OfferGone, OutcomeUnknown, ProviderError
from spotd_providers.contract.provider import Clock
from spotd_providers.contract.values import (
    AttemptKey,
    Capability,
    CheckLine,
    Instance,
    InstanceId,
    InstanceRef,
    InstanceState,
    Launched,
    LaunchRequest,
    Listing,
    Loss,
    MicroUsdPerHour,
    Offer,
    OfferPage,
    OfferQuery,
    Power,
    ProviderName,
)
from tests.unit.core.builders import SHOP, offer


class Hang(Exception):
    """As a fault: the call takes effect or not, and never answers."""

    def __init__(self, *, acts: bool = False) -> None:
        self.acts = acts


class Garbage(Exception):
    """As a fault: the plugin breaks its contract by raising something of its own."""


Fault = ProviderError | Hang | Garbage


class Shop:
    """Implements `Provider`. `faults[method]` is used up call by call."""

    def __init__(self, clock: Clock, *, name: ProviderName = SHOP, offers: Sequence[Offer] | None = None) -> None:
        self.name = name
        self._clock = clock
        self.offer_index = list(offers) if offers is not None else [offer("o1"), offer("o2", price=450_000)]
        self.machines: dict[InstanceId, Instance] = {}
        self.scripts: dict[AttemptKey, str] = {}
        self.requests: list[LaunchRequest] = []
        self.ended_at: dict[InstanceId, datetime] = {}
        self.born_at: dict[InstanceId, datetime] = {}
        self.faults: defaultdict[str, deque[Fault]] = defaultdict(deque)
        self.counts: defaultdict[str, int] = defaultdict(int)
        self.always: dict[str, Fault] = {}
        self.complete = True
        self.sells_spot = True
        self.sells_once = False
        """Like a marketplace of physical machines: what was sold is refused, though the shelf still shows it."""
        self.sold: set[str] = set()
        self.bids: list[MicroUsdPerHour] = []
        self.most_alive: defaultdict[str, int] = defaultdict(int)

    @property
    def capabilities(self) -> Mapping[Power, Capability]:
        spot = Capability(available=self.sells_spot, reason="" if self.sells_spot else "the shop has no spot market")
        bids = Capability(available=True)
        return {
            Power.SPOT: spot,
            Power.BID_CHANGE: bids,
            Power.LOGS: Capability(available=False, reason="the shop keeps no logs"),
        }

    def alive(self) -> list[Instance]:
        return [m for m in self.machines.values() if m.state in {InstanceState.PENDING, InstanceState.RUNNING}]

    def not_gone(self) -> list[Instance]:
        return [m for m in self.machines.values() if m.state is not InstanceState.GONE]

    def machine_of(self, key: AttemptKey) -> Instance:
        return next(m for m in self.machines.values() if m.key == key)

    def set_state(self, key: AttemptKey, state: InstanceState, loss: Loss | None = None) -> None:
        machine = self.machine_of(key)
        self.machines[machine.ref.instance_id] = replace(machine, state=state, loss=loss)

    def put_machine(self, key: AttemptKey) -> Instance:
        """A machine that nobody launched in this life."""
        return self._make(key)

    async def offers(self, query: OfferQuery) -> OfferPage:
        await self._enter("offers", lambda: None)
        return OfferPage(offers=tuple(self.offer_index), at=self._clock.now())

    async def launch(self, request: LaunchRequest) -> Launched:
        self.requests.append(request)

        def act() -> Instance:
            self.scripts[request.key] = request.start_script
            return self._make(request.key)

        await self._enter("launch", act)
        if self.sells_once and request.offer.offer_id in self.sold:
            raise OfferGone(f"{request.offer.offer_id} was sold")
        self.sold.add(request.offer.offer_id)
        return Launched(instance=act())

    async def find(self, key: AttemptKey) -> tuple[Instance, ...]:
        await self._enter("find", lambda: None)
        return tuple(m for m in self.not_gone() if m.key == key)

    async def instances(self) -> Listing:
        await self._enter("instances", lambda: None)
        return Listing(instances=tuple(self.machines.values()), complete=self.complete, at=self._clock.now())

    async def terminate(self, ref: InstanceRef) -> None:
        def act() -> None:
            self._end(ref)

        await self._enter("terminate", act)
        self._end(ref)

    async def change_bid(self, ref: InstanceRef, price: MicroUsdPerHour) -> None:
        def act() -> None:
            self.machines[ref.instance_id] = replace(self.machines[ref.instance_id], price=price)

        await self._enter("change_bid", act)
        self.bids.append(price)
        act()

    async def check(self) -> Sequence[CheckLine]:
        return [CheckLine(name="key", ok=True, detail="accepted")]

    def _make(self, key: AttemptKey) -> Instance:
        number = InstanceId(f"m{len(self.machines) + 1}")
        machine = Instance(
            ref=InstanceRef(provider=self.name, instance_id=number),
            key=key,
            state=InstanceState.RUNNING,
            created_at=self._clock.now(),
        )
        self.machines[number] = machine
        self.born_at[number] = self._clock.now()
        job = key.rpartition("-")[0]
        self.most_alive[job] = max(self.most_alive[job], sum(1 for m in self.alive() if m.key.startswith(job + "-")))
        return machine

    def _end(self, ref: InstanceRef) -> None:
        machine = self.machines.get(ref.instance_id)
        if machine is not None and machine.state is not InstanceState.GONE:
            self.machines[ref.instance_id] = replace(machine, state=InstanceState.GONE)
            self.ended_at[ref.instance_id] = self._clock.now()

    async def _enter(self, method: str, act: Callable[[], object]) -> None:
        self.counts[method] += 1
        fault = self.faults[method].popleft() if self.faults[method] else self.always.get(method)
        if fault is None:
            return
        if isinstance(fault, OutcomeUnknown) or (isinstance(fault, Hang) and fault.acts):
            act()
        if isinstance(fault, Hang):
            await anyio.sleep_forever()
        raise fault
