"""A cloud for the simulator: hosts with moving prices, machines that train, and every way of losing an answer.

It keeps its own history, which the oracles read; nothing in it knows what the daemon believes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from random import Random

from spotd_providers.contract.money import MicroUsd, MicroUsdPerGbMonth, MicroUsdPerHour, cost
from spotd_providers.contract.values import (
    AttemptKey,
    HostId,
    Instance,
    InstanceId,
    InstanceRef,
    InstanceState,
    Interruption,
    Listing,
    Loss,
    Market,
    Offer,
    OfferId,
    PoolId,
    ProviderName,
)


@dataclass(kw_only=True)
class Faults:
    """Rates per call; all zero in the healing phase."""

    lose_launch_after: float = 0.0
    lose_launch_before: float = 0.0
    refuse_launch: float = 0.0
    fail_listing: float = 0.0
    cut_listing: float = 0.0
    lie_listing: float = 0.0
    """A listing that calls itself complete and lacks half of the machines; never twice in a row."""
    fail_terminate: float = 0.0
    forget_terminate: float = 0.0
    preempt_per_hour: float = 0.0
    silence_per_hour: float = 0.0
    list_lag: timedelta = timedelta(0)
    store_down: float = 0.0


@dataclass(kw_only=True)
class Host:
    name: str
    provider: ProviderName
    price: int
    base: int
    pays_bid: bool


@dataclass(kw_only=True)
class Machine:
    """One machine and what runs on it. `saved` is what its store prefix holds; it outlives the machine."""

    ref: InstanceRef
    key: AttemptKey
    host: Host
    bid: int
    born: datetime
    visible_at: datetime
    start_work: timedelta
    need: timedelta
    state: InstanceState = InstanceState.PENDING
    died: datetime | None = None
    loss: Loss | None = None
    silent: bool = False
    foreign: bool = False
    billed: int = 0
    billed_until: datetime | None = None
    ran_from: datetime | None = None
    work: timedelta = timedelta(0)
    saved: list[tuple[timedelta, datetime]] = field(default_factory=list)
    seq: int = -1
    exited: bool = False
    spans: list[tuple[datetime, datetime]] = field(default_factory=list)
    stop_ordered: bool = False
    stopped: bool = False

    @property
    def alive(self) -> bool:
        return self.state in {InstanceState.PENDING, InstanceState.RUNNING}


BOOT = timedelta(minutes=3)
CHECKPOINT_EVERY = timedelta(minutes=10)
STORAGE = MicroUsdPerHour(2_000)


class LostAnswer(Exception):
    pass


class Refused(Exception):
    pass


class CloudDown(Exception):
    pass


class Cloud:
    """One provider. `machines` is its whole history."""

    def __init__(self, name: str, hosts: int, rng: Random, now: datetime, *, bids: bool) -> None:
        self.name = ProviderName(name)
        self.rng = rng
        self.faults = Faults()
        self.bids = bids
        self.hosts = [
            Host(
                name=f"{name}-{i}",
                provider=self.name,
                price=(p := rng.randint(200_000, 900_000)),
                base=p,
                pays_bid=bids,
            )
            for i in range(hosts)
        ]
        self.machines: dict[str, Machine] = {}
        self.terminated_by_us: list[str] = []
        self.forgot: set[AttemptKey] = set()
        self.launch_calls: list[tuple[AttemptKey, int, int]] = []
        self._count = 0
        self._lied = False
        self._now = now
        self._add_foreign(now)

    def _add_foreign(self, now: datetime) -> None:
        for i in range(3):
            ref = InstanceRef(provider=self.name, instance_id=InstanceId(f"foreign-{i}"))
            self.machines[ref.instance_id] = Machine(
                ref=ref,
                key=AttemptKey(f"spotd-other-zz{i}-1"),
                host=self.hosts[0],
                bid=0,
                born=now,
                visible_at=now,
                start_work=timedelta(0),
                need=timedelta(days=999),
                state=InstanceState.RUNNING,
                foreign=True,
            )

    # --- what the daemon can call ---

    def offers(self) -> tuple[Offer, ...]:
        return tuple(
            Offer(
                provider=self.name,
                offer_id=OfferId(f"o-{h.name}"),
                host_id=HostId(h.name),
                pool=PoolId(h.name),
                market=Market.SPOT,
                interruption=Interruption.SUDDEN,
                gpu="RTX_4090",
                gpu_count=1,
                gpu_price=MicroUsdPerHour(h.price),
                pays_bid=h.pays_bid,
                on_demand_price=MicroUsdPerHour(1_200_000),
                storage_price=MicroUsdPerGbMonth(100_000),
            )
            for h in self.hosts
        )

    def launch(self, key: AttemptKey, offer: Offer, price_max: int, start: timedelta, need: timedelta) -> Instance:
        self.launch_calls.append((key, offer.gpu_price, price_max))
        host = next(h for h in self.hosts if h.name == offer.host_id)
        if self.rng.random() < self.faults.lose_launch_before:
            raise LostAnswer
        busy = any(m.host is host and m.alive for m in self.machines.values() if not m.foreign)
        if busy or self.rng.random() < self.faults.refuse_launch or host.price > price_max:
            raise Refused
        self._count += 1
        ref = InstanceRef(provider=self.name, instance_id=InstanceId(f"{self.name}-m{self._count}"))
        machine = Machine(
            ref=ref,
            key=key,
            host=host,
            bid=price_max,
            born=self._now,
            visible_at=self._now + self.faults.list_lag * self.rng.random(),
            start_work=start,
            need=need,
            billed_until=self._now,
        )
        self.machines[ref.instance_id] = machine
        if self.rng.random() < self.faults.lose_launch_after:
            raise LostAnswer
        return self._shown(machine)

    def listing(self, install: str) -> Listing:
        if self.rng.random() < self.faults.fail_listing:
            raise CloudDown
        shown = [
            self._shown(m)
            for m in self.machines.values()
            if not m.foreign and m.visible_at <= self._now and not self._forgotten(m)
        ]
        if self.rng.random() < self.faults.cut_listing:
            return Listing(instances=tuple(i for i in shown if self.rng.random() < 0.5), complete=False, at=self._now)
        self._lied = not self._lied and self.rng.random() < self.faults.lie_listing
        if self._lied:
            shown = [i for i in shown if self.rng.random() < 0.5]
        return Listing(instances=tuple(shown), complete=True, at=self._now)

    def _forgotten(self, m: Machine) -> bool:
        return m.state is InstanceState.GONE and m.died is not None and self._now - m.died > timedelta(minutes=5)

    def terminate(self, ref: InstanceRef) -> None:
        if self.rng.random() < self.faults.fail_terminate:
            raise CloudDown
        machine = self.machines.get(ref.instance_id)
        if machine is None:
            return
        self.terminated_by_us.append(ref.instance_id)
        if self.rng.random() < self.faults.forget_terminate:
            self.forgot.add(machine.key)
            return
        if machine.state is not InstanceState.GONE:
            self._halt(machine, InstanceState.GONE, None)

    def _shown(self, m: Machine) -> Instance:
        return Instance(
            ref=m.ref,
            key=m.key,
            state=m.state,
            market=Market.SPOT,
            host_id=HostId(m.host.name),
            price=MicroUsdPerHour(m.bid if m.host.pays_bid else min(m.bid, m.host.price)),
            created_at=m.born,
            loss=m.loss,
        )

    # --- what happens by itself ---

    def advance(self, now: datetime) -> None:
        span = now - self._now
        self._now = now
        hours = span / timedelta(hours=1)
        for host in self.hosts:
            drift = (host.base - host.price) * 0.05 + self.rng.gauss(0, 0.03) * host.base
            host.price = max(20_000, int(host.price + drift))
        for m in self.machines.values():
            if m.foreign:
                continue
            self._bill(m, now)
            if m.state is InstanceState.PAUSED and m.bid >= m.host.price and self.rng.random() < 0.2:
                m.state, m.loss, m.born = InstanceState.PENDING, None, now
                m.ran_from = None
            if not m.alive:
                continue
            outbid = m.host.price > m.bid
            if outbid or self.rng.random() < self.faults.preempt_per_hour * hours:
                paused = m.host.pays_bid
                self._halt(
                    m, InstanceState.PAUSED if paused else InstanceState.GONE, Loss.OUTBID if paused else Loss.PREEMPTED
                )
                continue
            if self.rng.random() < self.faults.silence_per_hour * hours:
                m.silent = True
            self._train(m, now, span)

    def _train(self, m: Machine, now: datetime, span: timedelta) -> None:
        if m.state is InstanceState.PENDING and now - m.born >= BOOT:
            m.state, m.ran_from = InstanceState.RUNNING, now
            m.work = m.start_work
            return
        if m.state is not InstanceState.RUNNING or m.exited or m.stopped:
            return
        if not m.silent:
            m.seq += 1
        m.work += span
        last = m.saved[-1][0] if m.saved else m.start_work
        if m.work - last >= CHECKPOINT_EVERY and not m.silent:
            m.saved.append((m.work, now))
        if m.stop_ordered and not m.silent:
            m.saved.append((m.work, now))
            m.stopped = True
        elif m.work >= m.need and not m.silent:
            m.exited = True

    def _bill(self, m: Machine, now: datetime) -> None:
        if m.billed_until is None or m.state in {InstanceState.GONE}:
            return
        rate = (
            STORAGE
            if m.state is InstanceState.PAUSED
            else MicroUsdPerHour((m.bid if m.host.pays_bid else m.host.price) + STORAGE)
        )
        m.billed += cost(rate, now - m.billed_until)
        m.billed_until = now

    def _halt(self, m: Machine, state: InstanceState, loss: Loss | None) -> None:
        self._bill(m, self._now)
        if m.alive:
            m.spans.append((m.born, self._now))
        m.state, m.loss = state, loss
        if state is InstanceState.GONE:
            m.died = self._now

    def live_spans(self) -> list[tuple[AttemptKey, datetime, datetime]]:
        """When each machine could compute."""
        found = []
        for m in self.machines.values():
            if m.foreign:
                continue
            found.extend((m.key, a, b) for a, b in m.spans)
            if m.alive:
                found.append((m.key, m.born, self._now))
        return found

    def total_billed(self) -> MicroUsd:
        return MicroUsd(sum(m.billed for m in self.machines.values()))
