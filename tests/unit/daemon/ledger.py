"""A marketplace that keeps its own account of what ran and at which price, and hosts that work, save and obey there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import anyio

from spotd.core.domain.attempts import Attempt
from spotd.core.domain.intents import AttemptId, JobId
from spotd.core.domain.policy import Policy
from spotd.core.domain.states import EndReason
from spotd_jobs.objects.api import ObjectMissing
from spotd_jobs.objects.folder import FolderStore
from spotd_jobs.wire.grant import Grant
from spotd_providers.contract.values import (
    AttemptKey,
    Instance,
    InstanceId,
    InstanceState,
    Launched,
    LaunchRequest,
    Loss,
    MicroUsdPerHour,
    Offer,
    ProviderName,
)
from tests.unit.core.builders import MINUTE, NOW, SHOP, offer, shop_policy
from tests.unit.daemon.clocks import VirtualClock
from tests.unit.daemon.host import Host, text
from tests.unit.daemon.rig import Rig
from tests.unit.daemon.shop import Shop

KEY = AttemptKey("spotd-lab-j1-1")
BID = offer("o1", price=400_000, pays_bid=True)


class Market(Shop):
    """What is bought bills its bid, or the price of its offer, while it runs; nothing while it is paused."""

    def __init__(self, clock: VirtualClock, **more: Any) -> None:
        self.changes: dict[InstanceId, list[tuple[datetime, int]]] = {}
        self.refused: frozenset[str] = frozenset()
        super().__init__(clock, **more)

    async def launch(self, request: LaunchRequest) -> Launched:
        self._price = request.price_max if request.offer.pays_bid else request.offer.gpu_price
        return await super().launch(request)

    def _make(self, key: AttemptKey) -> Instance:
        made = replace(super()._make(key), price=MicroUsdPerHour(getattr(self, "_price", 400_000)))
        self.machines[made.ref.instance_id] = made
        self._note(made)
        return made

    def _end(self, ref: Any) -> None:
        super()._end(ref)
        if ref.instance_id in self.machines:
            self._note(self.machines[ref.instance_id])

    def set_state(self, key: AttemptKey, state: InstanceState, loss: Loss | None = None) -> None:
        super().set_state(key, state, loss)
        self._note(self.machine_of(key))

    def set_price(self, key: AttemptKey, price: int) -> None:
        machine = replace(self.machine_of(key), price=MicroUsdPerHour(price))
        self.machines[machine.ref.instance_id] = machine
        self._note(machine)

    async def change_bid(self, ref: Any, price: MicroUsdPerHour) -> None:
        try:
            await super().change_bid(ref, price)
        finally:
            self._note(self.machines[ref.instance_id])

    def floor(self, price: int, key: AttemptKey = KEY) -> None:
        """The market states so much as the lowest bid that wins for this machine."""
        machine = self.machine_of(key)
        self.machines[machine.ref.instance_id] = replace(machine, bid_floor=MicroUsdPerHour(price))

    def _note(self, machine: Instance) -> None:
        runs = machine.state in {InstanceState.PENDING, InstanceState.RUNNING}
        rate = int(machine.price or 0) if runs else 0
        rows = self.changes.setdefault(machine.ref.instance_id, [])
        if not rows or rows[-1][1] != rate:
            rows.append((self._clock.now(), rate))

    def billed(self, since: datetime | None = None, until: datetime | None = None, *, key: str = "") -> int:
        """Micro-dollars of this time, of all machines or of those whose key begins so."""
        until = until or self._clock.now()
        total = 0.0
        for ident, rows in self.changes.items():
            if not self.machines[ident].key.startswith(key):
                continue
            for (begin, rate), (end, _) in zip(rows, [*rows[1:], (until, 0)], strict=True):
                span = min(end, until) - max(begin, since or begin)
                total += max(span, timedelta(0)).total_seconds() / 3600 * rate
        return round(total)


class Hosts:
    """The runner of each machine of each market; it survives every life of the daemon."""

    def __init__(self, rig: Rig, folder: Path) -> None:
        self.rig = rig
        self.objects = FolderStore(folder / "objects")
        self.every = MINUTE / 3
        self.known: dict[AttemptId, Host] = {}
        self.mute = False
        """They reach the store no more, and go on working."""
        self.clocks_off = timedelta(0)
        self.deaf = False
        """They follow no order."""
        self.resumed: dict[AttemptId, tuple[str, ...]] = {}
        self.saved: list[str] = []
        self._over: set[AttemptId] = set()

    def turn(self, number: int) -> None:
        machines = {m.key: m for shop in self.rig.shops for m in shop.alive()}
        for machine in machines.values():
            _, _, name, attempt = machine.key.split("-")
            identity = AttemptId(job=JobId(name), number=int(attempt))
            host = self.known.setdefault(identity, Host(self.objects, identity))
            if self.mute or identity in self._over:
                continue
            try:
                data = self.objects.get(f"jobs/{name}/attempts/{attempt}/grant.json", bytes_max=1_000_000)
            except ObjectMissing:
                continue
            grant = Grant.model_validate_json(data)
            if host.seq < 0:
                self.resumed[identity] = tuple(one.name for one in grant.restore)
            is_stopped = grant.orders.stop is not None and not self.deaf
            if host.seq < 0 or number % 3 == 0 or is_stopped:
                self.save(host, f"{attempt}-{number:05d}")
            host.beat("run", at=text(self.rig.clock.now() + self.clocks_off))
            if is_stopped:
                host.exit("stopped", code=143)
                self._over.add(identity)

    def save(self, host: Host, name: str) -> None:
        host.checkpoint(name, b"x", created_at=self.rig.clock.now().isoformat())
        self.saved.append(name)

    async def work(self) -> None:
        number = 0
        while True:
            await self.rig.clock.sleep(self.every)
            number += 1
            self.turn(number)


def rig_of(
    folder: Path,
    *,
    at: datetime = NOW,
    offers: list[Offer] | None = None,
    shops: list[Shop] | None = None,
    clock: VirtualClock | None = None,
    every_s: float = 20.0,
    **policy: Any,
) -> Rig:
    clock = clock or VirtualClock()
    clock.offset = at - NOW
    sold = shops or [Market(clock, offers=offers or [BID])]
    rules = shop_policy(**policy)
    known = {shop.name: replace(rules.providers[SHOP], name=shop.name) for shop in sold}
    return Rig(
        folder,
        clock=clock,
        shops=sold,
        policy=replace(rules, providers=known),
        read_every_s=every_s,
        list_every_s=every_s,
    )


def reload(rig: Rig, **changes: Any) -> None:
    """As a reload of the config would."""
    rig.policy.reload(replace(rig.commits.policy, **changes))


def with_fee(policy: Policy, fee_ppm: int, provider: ProviderName = SHOP) -> Policy:
    rules = replace(policy.providers[provider], fee_ppm=fee_ppm)
    return replace(policy, providers={**policy.providers, provider: rules})


@asynccontextmanager
async def at_work(rig: Rig, hosts: Hosts) -> AsyncIterator[None]:
    """The daemon runs, and so do all hosts."""
    hosts.rig = rig
    async with rig.running(), anyio.create_task_group() as group:
        group.start_soon(hosts.work)
        yield
        group.cancel_scope.cancel()


async def first_runs(rig: Rig, name: JobId, number: int = 1) -> Attempt:
    def found() -> list[Attempt]:
        return [a for a in rig.attempts(name) if a.id.number == number and a.running_at is not None]

    await rig.until(lambda: bool(found()) and bool(rig.job(name).checkpoints))
    return found()[0]


def stop_reasons(rig: Rig, name: JobId) -> list[EndReason]:
    return [item.stop.reason for item in rig.attempts(name) if item.stop is not None]
