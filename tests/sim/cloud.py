"""A cloud for the simulator: hosts with moving prices, machines that train, and every way of losing an answer.

It keeps its own history, which the oracles read; nothing in it knows what the daemon believes. Time passes in it only
by `advance`, in steps of any length: what a machine did meanwhile is computed, not stepped through.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from datetime import datetime, timedelta
from math import exp, sqrt
from random import Random

from spotd.core.model import ExitCause
from spotd_providers.contract.money import MicroUsd, MicroUsdPerHour, cost
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
from tests.sim.machines import (
    BOOT,
    CHECKPOINT_EVERY,
    FOREIGN,
    FORGOTTEN_AFTER,
    HEARTBEAT,
    HOUR,
    STORAGE,
    STORAGE_PER_GB_MONTH,
    CloudDown,
    Faults,
    Host,
    LaunchCall,
    LostAnswer,
    Machine,
    Refused,
    Row,
    Save,
    Task,
)


class Cloud:
    """One provider. `machines` is its whole history; `down` is an outage of its interface, machines go on."""

    def __init__(self, name: str, hosts: int, rng: Random, now: datetime, *, bids: bool, fee_ppm: int) -> None:
        self.name = ProviderName(name)
        self.rng = rng
        self.faults = Faults()
        self.fee_ppm = fee_ppm
        self.down = False
        self.store_up = True
        self.hosts = [self._host(i, bids=bids) for i in range(hosts)]
        self.machines: dict[str, Machine] = {}
        self.by_key: defaultdict[AttemptKey, list[Machine]] = defaultdict(list)
        self.active: dict[str, Machine] = {}
        """Ours that are not gone."""
        self.fading: list[Machine] = []
        """Ours that are gone and still listed."""
        self.foreign_touched: list[str] = []
        self.forgot: set[AttemptKey] = set()
        self.launch_calls: list[LaunchCall] = []
        self.lost_answers: list[Machine] = []
        self.highest_price = 0
        self._count = 0
        self._lied = False
        self.now = now
        self._rows: list[Row] | None = None
        self._foreign = [self._foreign_machine(i, now) for i in range(FOREIGN)]

    def _host(self, number: int, *, bids: bool) -> Host:
        name, price = f"{self.name}-{number}", self.rng.randint(200_000, 900_000)
        offer = Offer(
            provider=self.name,
            offer_id=OfferId(f"o-{name}"),
            host_id=HostId(name),
            pool=PoolId(name),
            market=Market.SPOT,
            interruption=Interruption.SUDDEN,
            gpu="RTX_4090",
            gpu_count=1,
            gpu_price=MicroUsdPerHour(price),
            pays_bid=bids,
            on_demand_price=MicroUsdPerHour(1_200_000),
            storage_price=STORAGE_PER_GB_MONTH,
        )
        return Host(name=name, provider=self.name, price=price, base=price, offer=offer)

    def _foreign_machine(self, number: int, now: datetime) -> Instance:
        owner = ("spotd-other-zz", "spotd-lab2-j00", "spotd-la-b-j0", "someone-lab-j00")[number % 4]
        return Instance(
            ref=InstanceRef(provider=self.name, instance_id=InstanceId(f"foreign-{number}")),
            key=AttemptKey(f"{owner}{number}-1"),
            state=InstanceState.RUNNING,
            market=Market.SPOT,
            created_at=now,
        )

    # --- what the daemon can call ---

    def rows(self) -> list[Row]:
        if self.down:
            raise CloudDown
        if self._rows is None:
            self._rows = []
            for host in self.hosts:
                if host.offer.gpu_price != host.price:
                    host.offer = replace(host.offer, gpu_price=MicroUsdPerHour(host.price))
                self._rows.append(Row(offer=host.offer, price=host.price))
        if self.faults.bad_price and self.rng.random() < self.faults.bad_price:
            spoilt = list(self._rows)
            i = self.rng.randrange(len(spoilt))
            bad: object = self.rng.choice([float("nan"), None, -1, True, float("inf"), "free"])
            spoilt[i] = Row(offer=spoilt[i].offer, price=bad)
            return spoilt
        return self._rows

    def launch(self, key: AttemptKey, offer: Offer, price_max: int, task: Task, lease: timedelta) -> Instance:
        """The call takes effect now. LostAnswer: nobody will ever hear what it did."""
        host = next(h for h in self.hosts if h.name == offer.host_id)
        others = sum(1 for m in self.active.values() if m.alive and m.key not in self.forgot)
        self.launch_calls.append(
            LaunchCall(
                key=key,
                at=self.now,
                offered=offer.gpu_price,
                price_max=price_max,
                real_price=host.price,
                alive_before=others,
            )
        )
        if self.rng.random() < self.faults.lose_launch_before:
            raise LostAnswer
        busy = any(m.host is host and m.alive for m in self.active.values())
        if busy or self.rng.random() < self.faults.refuse_launch or host.price > price_max:
            raise Refused
        self._count += 1
        ref = InstanceRef(provider=self.name, instance_id=InstanceId(f"{self.name}-m{self._count}"))
        machine = Machine(
            ref=ref,
            key=key,
            host=host,
            bid=price_max,
            born=self.now,
            since=self.now,
            visible_at=self.now + self.faults.list_lag * self.rng.random(),
            task=task,
            leased_until=self.now + BOOT + lease,
            billed_until=self.now,
        )
        self.machines[ref.instance_id] = self.active[ref.instance_id] = machine
        self.by_key[key].append(machine)
        if self.rng.random() < self.faults.lose_launch_after:
            self.lost_answers.append(machine)
            raise LostAnswer
        return self._shown(machine)

    def listing(self) -> Listing:
        if self.down or self.rng.random() < self.faults.fail_listing:
            raise CloudDown
        self.fading = [m for m in self.fading if m.died is not None and self.now - m.died <= FORGOTTEN_AFTER]
        known = [m for m in (*self.active.values(), *self.fading) if m.visible_at <= self.now]
        if self.rng.random() < self.faults.cut_listing:
            half = [self._shown(m) for m in known if self.rng.random() < 0.5]
            return Listing(instances=(*half, *self._foreign[:3]), complete=False, at=self.now)
        self._lied = not self._lied and self.rng.random() < self.faults.lie_listing
        if self._lied:
            told = [] if self.rng.random() < 0.5 else [m for m in known if self.rng.random() < 0.5]
            for m in known:
                m.omitted = m.omitted or (bool(told) and m not in told)
            known = told
        return Listing(instances=(*map(self._shown, known), *self._foreign), complete=True, at=self.now)

    def terminate(self, ref: InstanceRef) -> None:
        if ref.instance_id.startswith("foreign"):
            self.foreign_touched.append(ref.instance_id)
            return
        if self.down or self.rng.random() < self.faults.fail_terminate:
            raise CloudDown
        machine = self.machines.get(ref.instance_id)
        if machine is None or machine.state is InstanceState.GONE:
            return
        machine.ended_by_us = machine.ended_by_us or self.now
        if self.rng.random() < self.faults.forget_terminate:
            self.forgot.add(machine.key)
            return
        self._halt(machine, InstanceState.GONE, None)

    def _shown(self, m: Machine) -> Instance:
        return Instance(
            ref=m.ref,
            key=m.key,
            state=m.state,
            market=Market.SPOT,
            host_id=m.host.offer.host_id,
            price=MicroUsdPerHour(self._gpu_price(m)),
            created_at=m.since,
            loss=m.loss,
        )

    # --- what happens by itself ---

    def advance(self, now: datetime) -> None:
        """Everything up to now has happened to the machines."""
        if now <= self.now:
            return
        hours = (now - self.now) / HOUR
        self.now = now
        faults = self.faults
        lost = 1 - exp(-faults.preempt_per_hour * hours)
        hushed = 1 - exp(-faults.silence_per_hour * hours)
        for m in list(self.active.values()):
            self._bill(m)
            if not m.alive:
                continue
            self._train(m)
            if lost and self.rng.random() < lost:
                self._take_back(m)
            elif hushed and self.rng.random() < hushed:
                m.silent_until = now + timedelta(minutes=self.rng.choice([1, 10, 90]))
                m.was_silent = True

    def move_prices(self, span: timedelta) -> None:
        """The market after so long; whoever is outbid is told by losing the machine."""
        self._rows = None
        hours = span / HOUR
        stay, shake = exp(-1.5 * hours), 0.2 * sqrt(hours)
        for host in self.hosts:
            if self.faults.market_moves:
                spike = 2 if self.rng.random() < 0.01 else 1
                level = host.base + (host.price - host.base) * stay + self.rng.gauss(0, shake) * host.base
                host.price = max(20_000, int(level * spike))
            else:
                host.price = host.base // 3
            self.highest_price = max(self.highest_price, host.price)
        for m in list(self.active.values()):
            if m.alive and m.host.price > m.bid:
                self._take_back(m)
            elif m.state is InstanceState.PAUSED and m.bid >= m.host.price and self.rng.random() < 0.5:
                self._bill(m)
                m.state, m.loss, m.since, m.ran_from = InstanceState.PENDING, None, self.now, None

    def _take_back(self, m: Machine) -> None:
        if m.host.offer.pays_bid:
            self._halt(m, InstanceState.PAUSED, Loss.OUTBID)
        else:
            self._halt(m, InstanceState.GONE, Loss.PREEMPTED)

    def _train(self, m: Machine) -> None:
        if m.state is InstanceState.PENDING:
            if self.now - m.since < BOOT:
                return
            m.state, m.ran_from = InstanceState.RUNNING, m.since + BOOT
            m.ran_work = m.saved[-1].work if m.saved else m.task.resume_at
        if m.exit_cause is not None or m.ran_from is None:
            return
        if m.leased_until <= m.ran_from:
            m.exit_cause = ExitCause.LEASE  # it woke up too late to do anything
            return
        if m.silent_until is not None and m.silent_until <= self.now:
            m.silent_until = None
        until = min(self.now, m.leased_until)
        work = m.ran_work + (until - m.ran_from)
        if m.silent_until is not None or not self.store_up:
            m.mute_until = self.now
            if until < self.now:
                m.exit_cause = ExitCause.LEASE  # it will be heard of once it can be heard
            return
        m.seq = int((until - m.ran_from) / HEARTBEAT) + int((m.since - m.born) / HEARTBEAT)
        last = m.saved[-1].work if m.saved else m.task.resume_at
        while last + CHECKPOINT_EVERY <= min(work, m.task.need):
            last += CHECKPOINT_EVERY
            at = max(m.mute_until or m.ran_from, m.ran_from + (last - m.ran_work))
            m.saved.append(Save(work=last, at=at, sound=self.rng.random() >= self.faults.bad_manifest))
        if work >= m.task.need:
            m.exit_cause = ExitCause.FINISHED
        elif m.stop_ordered or until < self.now:
            m.saved.append(Save(work=work, at=max(until, m.mute_until or until), sound=True))
            m.exit_cause = ExitCause.STOPPED if m.stop_ordered else ExitCause.LEASE

    def _gpu_price(self, m: Machine) -> int:
        return m.bid if m.host.offer.pays_bid else min(m.bid, m.host.price)

    def _bill(self, m: Machine) -> None:
        if m.billed_until >= self.now:
            return
        net = STORAGE if m.state is InstanceState.PAUSED else self._gpu_price(m) + STORAGE
        amount = cost(MicroUsdPerHour(-(-net * self.fee_ppm // 1_000_000)), self.now - m.billed_until)
        m.billed += amount
        m.billed_by_day[self.now.date()] += amount
        m.billed_until = self.now

    def _halt(self, m: Machine, state: InstanceState, loss: Loss | None) -> None:
        self._bill(m)
        if m.alive:
            m.spans.append((m.since, min(self.now, max(m.since, m.leased_until))))
        m.state, m.loss = state, loss
        if state is InstanceState.GONE:
            m.died = self.now
            self.active.pop(m.ref.instance_id, None)
            self.fading.append(m)

    def live_spans(self) -> list[tuple[AttemptKey, datetime, datetime]]:
        """When each machine could compute."""
        found = []
        for m in self.machines.values():
            found.extend((m.key, a, b) for a, b in m.spans)
            if m.alive:
                found.append((m.key, m.since, min(self.now, m.leased_until)))
        return [span for span in found if span[1] < span[2]]

    def total_billed(self) -> MicroUsd:
        return MicroUsd(sum(m.billed for m in self.machines.values()))
