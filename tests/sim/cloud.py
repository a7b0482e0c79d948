"""A cloud for the simulator: what the daemon can call, and every way of answering badly or not at all.

It keeps its own history, which the oracles read; nothing in it knows what the daemon believes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from random import Random

from spotd.core.domain.market import gang_of
from spotd.core.kernel.outcomes import LaunchFailure
from spotd_providers.contract.values import (
    NO_GPU,
    AttemptKey,
    HostId,
    Instance,
    InstanceId,
    InstanceRef,
    InstanceState,
    Interruption,
    Listing,
    Market,
    MicroUsdPerGb,
    MicroUsdPerGbMonth,
    MicroUsdPerGpuHour,
    MicroUsdPerHour,
    Offer,
    OfferId,
    PoolId,
    ProviderCharge,
    shares,
    whole_machine,
)
from tests.sim.bills import Manner, charges
from tests.sim.machines import (
    BOOT,
    FOREIGN,
    STORAGE_PER_GB_MONTH,
    AccountDead,
    BidCall,
    CloudDown,
    Host,
    LaunchCall,
    LostAnswer,
    Machine,
    Refused,
    Row,
    Task,
    WrongState,
)
from tests.sim.nature import Nature
from tests.sim.wrong_rows import WrongRows

ON_DEMAND = MicroUsdPerGpuHour(1_200_000)
GANG_LIMIT = timedelta(minutes=5)
"""So long a provider tries to start all of several machines."""
LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)


def owner_of(key: str) -> str:
    """The part of a key that says which install bought the machine."""
    return key.rsplit("-", 2)[0]


def leapt(row: Row, factor: int) -> Row:
    """The row with prices that are wrong by this factor."""

    def wrong(price: int) -> int:
        return price * factor if factor > 0 else max(1, price // -factor)

    offer, stated = row.offer, row.offer.on_demand_price
    odd = replace(
        offer,
        gpu_price=MicroUsdPerHour(wrong(offer.gpu_price)),
        on_demand_price=None if stated is None else MicroUsdPerHour(wrong(stated)),
    )
    return Row(offer=odd, price=odd.gpu_price)


def _one_of(offer: Offer) -> Offer:
    """What one of several equal machines was offered for."""
    nodes = offer.nodes
    return replace(
        offer,
        nodes=1,
        gpu_count=offer.gpu_count // nodes,
        gpu_price=MicroUsdPerHour(offer.gpu_price // nodes),
        on_demand_price=None if offer.on_demand_price is None else MicroUsdPerHour(offer.on_demand_price // nodes),
        storage_price=MicroUsdPerGbMonth(offer.storage_price // nodes),
        storage_fixed=MicroUsdPerHour(offer.storage_fixed // nodes),
        download_price=MicroUsdPerGb(offer.download_price // nodes),
    )


@dataclass(frozen=True, kw_only=True)
class Trade:
    """What one provider sells, and how."""

    bids: bool = False
    fee_ppm: int = 1_000_000
    market: Market = Market.SPOT
    interruption: Interruption = Interruption.SUDDEN
    gpus: Sequence[int] = (1,)
    upload_price: int = 0
    download_price: int = 0
    storage_price: int = STORAGE_PER_GB_MONTH
    born_long_ago: bool = False
    """Each row says that its machine was made in 1970."""
    states_floor: bool = False
    """Lists state the lowest bid that wins, or the echo of our own; bids can be changed."""
    ends_itself: bool = False
    """The runner ends its machine when it has come to its own end."""
    owned: bool = False
    """Its machines are the user's own."""
    gangs: bool = False
    """It starts several machines that reach each other: all of one host, with one key."""
    replaces: bool = False
    """Lost ones of these are replaced, or left out."""
    queue_wait: timedelta | None = None
    """How long a job may wait in its queue; `None` where it has none."""


class Cloud(Nature):
    """One provider. `machines` is its whole history; `down` is an outage of its interface, machines go on."""

    def __init__(self, name: str, hosts: int, rng: Random, now: datetime, trade: Trade) -> None:
        super().__init__(name, rng, now, trade.fee_ppm, ends_itself=trade.ends_itself)
        self.trade = trade
        self.down = False
        self.dead = False
        """The account's key is refused."""
        self.hosts = [self._host(i) for i in range(hosts)]
        self.foreign_touched: list[str] = []
        self.forgot: set[AttemptKey] = set()
        self.launch_calls: list[LaunchCall] = []
        self.bid_calls: list[BidCall] = []
        self.lost_answers: list[Machine] = []
        self.lying_until: datetime | None = None
        """Until then each list calls itself complete and lacks machines."""
        self.lies: set[datetime] = set()
        """When the lists were begun that lied."""
        self.read: list[tuple[datetime, datetime]] = []
        """When complete and true lists were begun, and when the daemon had decided on one with a look at its hosts."""
        self.revoked: datetime | None = None
        """Since when the account is dead for ever."""
        self.refuses: LaunchFailure | None = None
        """Why every launch is refused."""
        self.closed: dict[str, LaunchFailure] = {}
        self.room: dict[str, int] = {}
        """How many machines a host gives at once, where that is fewer than a job may ask for."""
        """Hosts that refuse each launch, and why."""
        self.replaces_seldom = 0.0
        """How often there is no room for a machine in the place of a lost one."""
        self.leap = 0
        """By which factor the prices of the next page are too high, or too low if it is negative."""
        self.unleapt: tuple[Offer, ...] | None = None
        """What the page that was read last would have stated without a leap, if it had one."""
        self.wrong_states: dict[InstanceId, WrongState] = {}
        """What the next complete list states of these machines."""
        self.manner: Manner | None = None
        """How it bills, if it can be asked for that."""
        self.spoil: WrongRows | None = None
        """What a faulty plugin makes of its rows."""
        self.shared: set[InstanceRef] = set()
        """Machines that were handed over."""
        self.lost: Callable[[], None] = lambda: None
        """After an answer was lost."""
        self._count = 0
        self._lied = False
        self._foreign = [self._foreign_machine(i, now) for i in range(FOREIGN)]

    def _host(self, number: int) -> Host:
        name, price = f"{self.name}-{number}", self.rng.randint(200_000, 900_000)
        count = self.trade.gpus[number % len(self.trade.gpus)]
        price = price * count if count else price // 3
        offer = Offer(
            provider=self.name,
            offer_id=OfferId(f"o-{name}"),
            host_id=HostId(name),
            pool=PoolId(name),
            market=self.trade.market,
            interruption=self.trade.interruption,
            gpu="RTX_4090" if count else NO_GPU,
            gpu_count=count,
            gpu_price=MicroUsdPerHour(price),
            pays_bid=self.trade.bids,
            on_demand_price=MicroUsdPerHour(whole_machine(ON_DEMAND, count)),
            storage_price=MicroUsdPerGbMonth(self.trade.storage_price),
            upload_price=MicroUsdPerGb(self.trade.upload_price),
            download_price=MicroUsdPerGb(self.trade.download_price),
        )
        return Host(name=name, provider=self.name, price=price, level=price, base=price, offer=offer)

    def _foreign_machine(self, number: int, now: datetime) -> Instance:
        owner = ("spotd-other-zz", "spotd-lab2-j00", "spotd-la-b-j0", "someone-lab-j00")[number % 4]
        return Instance(
            ref=InstanceRef(provider=self.name, instance_id=InstanceId(f"foreign-{number}")),
            key=AttemptKey(f"{owner}{number}-1"),
            state=InstanceState.RUNNING,
            market=Market.SPOT,
            created_at=now,
        )

    def vanish(self, m: Machine) -> None:
        """A machine that is paused is destroyed, and no list shows it again."""
        self._halt(m, InstanceState.GONE, None)
        self.fading.remove(m)
        m.vanished_at = self.now

    def forget_rows(self) -> None:
        """Some price has changed."""
        self._rows = None

    def set_fee(self, now: datetime, fee_ppm: int) -> None:
        """It takes this from now on, also from machines that run."""
        self.advance(now)
        for m in self.active.values():
            self._bill(m)
        self.fee_ppm = fee_ppm
        for m in self.active.values():
            self._note_rate(m)

    # --- what the daemon can call ---

    def charges(self, since: datetime, until: datetime) -> Sequence[ProviderCharge]:
        self._answer()
        return () if self.manner is None else charges(self, self.manner, since, until)

    def rows(self) -> list[Row]:
        self._answer()
        self.unleapt = None
        if self._rows is None:
            self._rows = []
            for host in self.hosts:
                self.relist(host)
                self._rows.append(Row(offer=host.offer, price=host.price))
        if self.faults.bad_price and self.rng.random() < self.faults.bad_price:
            spoilt = list(self._rows)
            i = self.rng.randrange(len(spoilt))
            bad: object = self.rng.choice([float("nan"), None, -1, True, float("inf"), "free"])
            spoilt[i] = Row(offer=spoilt[i].offer, price=bad)
            return spoilt
        factor, self.leap = self.leap, 0
        if not factor:
            return self._rows
        self.unleapt = tuple(row.offer for row in self._rows)
        return [leapt(row, factor) for row in self._rows]

    def _answer(self) -> None:
        if self.dead:
            raise AccountDead
        if self.down:
            raise CloudDown

    def launch(
        self,
        key: AttemptKey,
        offer: Offer,
        price_max: int,
        task: Task,
        lease: timedelta,
        fee_ppm: int | None = None,
    ) -> Instance:
        """The call takes effect now. LostAnswer: nobody will ever hear what it did.

        Args:
            fee_ppm: what the provider took when the call was made.
        """
        if self.dead:
            raise AccountDead
        host = self._host_of(offer)
        mine = [m for m in self.active.values() if owner_of(m.key) == owner_of(key)]
        others = sum(m.offer.nodes for m in mine if m.alive and m.key not in self.forgot)
        self.launch_calls.append(
            LaunchCall(
                key=key,
                at=self.now,
                offered=offer.gpu_price,
                price_max=price_max,
                gpus=shares(offer.gpu_count),
                disk_gb=task.disk_gb * offer.nodes,
                fee_ppm=self.fee_ppm if fee_ppm is None else fee_ppm,
                real_price=host.price * offer.nodes,
                alive_before=others,
                nodes=offer.nodes,
            )
        )
        if self.rng.random() < self.faults.lose_launch_before:
            self.lost()
            raise LostAnswer
        if self.refuses is not None:
            raise Refused(self.refuses)
        if host.name in self.closed:
            raise Refused(self.closed[host.name])
        if offer.nodes > self.room.get(host.name, offer.nodes):
            raise Refused
        if self._is_busy(host) or self.rng.random() < self.faults.refuse_launch or host.price * offer.nodes > price_max:
            raise Refused
        task = replace(task, disk_gb=task.disk_gb * offer.nodes)
        machine = self._made(key, host, offer, price_max, task, lease)
        if offer.nodes > 1 and self.rng.random() < self.faults.half_started:
            machine.is_half, machine.gives_up_at = True, self.now + GANG_LIMIT
        if self.rng.random() < self.faults.lose_launch_after:
            self.lost_answers.append(machine)
            self.lost()
            raise LostAnswer
        return self._shown(machine)

    def _host_of(self, offer: Offer) -> Host:
        return next(h for h in self.hosts if h.name == offer.host_id)

    def _is_busy(self, host: Host) -> bool:
        return any(m.host is host and m.alive for m in self.active.values())

    def _made(self, key: AttemptKey, host: Host, offer: Offer, price_max: int, task: Task, lease: timedelta) -> Machine:
        self._count += 1
        ref = InstanceRef(provider=self.name, instance_id=InstanceId(f"{self.name}-m{self._count}"))
        machine = Machine(
            ref=ref,
            key=key,
            host=host,
            offer=offer,
            bid=price_max,
            born=self.now,
            since=self.now,
            visible_at=self.now + self.faults.list_lag * self.rng.random(),
            task=task,
            leased_until=self.now + BOOT + lease,
            billed_until=self.now,
            dumb=bool(self.faults.dumb) and self.rng.random() < self.faults.dumb,
        )
        self.machines[ref.instance_id] = self.active[ref.instance_id] = machine
        self.by_key[key].append(machine)
        self._note_rate(machine)
        return machine

    def hand_over(self, ref: InstanceRef, key: AttemptKey) -> None:
        """The machine is another attempt's from now on: for the oracles it is another one, at the same place."""
        old = self.machines[ref.instance_id]
        new = Machine(
            ref=ref,
            key=key,
            label=old.label or old.key,
            host=old.host,
            offer=old.offer,
            bid=old.bid,
            born=self.now,
            visible_at=self.now,
            task=old.task,
            state=old.state,
            since=self.now,
            loss=old.loss,
            died=old.died,
            silent_until=old.silent_until,
            leased_until=old.leased_until,
            billed_until=self.now,
            was_silent=old.was_silent,
            factor=old.factor,
            notice_at=old.notice_at,
            lapses_at=old.lapses_at,
            waits=old.waits,
            waits_until=old.waits_until,
            awaits=True,
            first_bid=old.bid,
            without_first=old.first_lost_at is not None,
            kept_at=self.now if old.first_lost_at is not None else None,
            is_over_unheard=old.is_over_unheard,
            lost=set(old.lost),
            gone=set(old.gone),
            came=dict(old.came),
            dropped=set(old.dropped),
            gives_up_at=old.gives_up_at,
        )
        if old.first_lost_at is not None:
            old.waits_kept.append((old.first_lost_at, self.now))
            old.first_lost_at = None
        self._bill(old)
        self._count += 1
        self.machines[f"{ref.instance_id}~{self._count}"] = old
        self.machines[ref.instance_id] = new
        self.by_key[key].append(new)
        self.shared.add(ref)
        old.handed_on = True
        if old in self.fading:
            self.fading[self.fading.index(old)] = new
        elif ref.instance_id in self.active:
            self.active[ref.instance_id] = new
            if old.alive:
                old.spans.append((old.since, min(self.now, max(old.since, old.leased_until))))
            old.state, old.died, old.waits = InstanceState.GONE, self.now, False
        self._note_rate(old)
        self._note_rate(new)

    def listing(self) -> Listing:
        self._answer()
        if self.rng.random() < self.faults.fail_listing:
            raise CloudDown
        self.forget_faded()
        known = [m for m in (*self.active.values(), *self.fading) if m.visible_at <= self.now]
        if self.rng.random() < self.faults.cut_listing:
            half = [self._shown(m) for m in known if self.rng.random() < 0.5]
            return Listing(instances=(*half, *self._foreign[:3]), complete=False, at=self.now)
        if self.faults.half_listed and self.rng.random() < self.faults.half_listed:
            return self._half_listed(known)
        lies_long = self.lying_until is not None and self.now < self.lying_until
        self._lied = lies_long or (not self._lied and self.rng.random() < self.faults.lie_listing)
        if self._lied:
            known = self._lie(known)
        return Listing(instances=(*map(self._row, known), *self._foreign), complete=True, at=self.now)

    def _half_listed(self, known: list[Machine]) -> Listing:
        """Some of several machines are missing: their adapter shows what it knows of them, or nothing."""
        rows = []
        for m in known:
            if m.offer.nodes == 1 or self.rng.random() < 0.5:
                rows.append(self._shown(m))
            elif self.rng.random() < 0.5:
                rows.append(replace(self._shown(m), state=InstanceState.UNKNOWN, loss=None))
                m.lacking.append(self.now)
        return Listing(instances=(*rows, *self._foreign), complete=False, at=self.now)

    def _lie(self, known: list[Machine]) -> list[Machine]:
        told = [] if self.rng.random() < 0.5 else [m for m in known if self.rng.random() < 0.5]
        self.lies.add(self.now)
        for m in known:
            if m not in told:
                m.omitted = m.omitted or bool(told)
                m.lacking.append(self.now)
        return told

    def _row(self, m: Machine) -> Instance:
        shown = self._shown(m)
        wrong = self.wrong_states.pop(m.ref.instance_id, None)
        if wrong is not None and m.alive:
            m.misstated_at = self.now
            return replace(shown, state=wrong.state, loss=wrong.loss)
        if self.spoil is None:
            return shown
        spoilt = self.spoil.machine(shown)
        if spoilt.state is not shown.state:
            m.lacking.append(self.now)  # a list that does not know its state is as good as one that lacks it
        return spoilt

    def change_bid(self, ref: InstanceRef, price: int, fee_ppm: int | None = None) -> None:
        """The bid is this from now on. LostAnswer: nobody will ever hear that."""
        self._answer()
        if self.rng.random() < self.faults.lose_launch_before:
            raise LostAnswer
        m = self.machines.get(ref.instance_id)
        if m is None or m.state is InstanceState.GONE:
            raise Refused(LaunchFailure.REJECTED)
        offer = m.host.offer if m.offer.nodes == 1 else gang_of(m.host.offer, m.offer.nodes)
        self.bid_calls.append(
            BidCall(
                key=m.key,
                at=self.now,
                price=price,
                gpus=shares(offer.gpu_count),
                disk_gb=m.task.disk_gb,
                fee_ppm=self.fee_ppm if fee_ppm is None else fee_ppm,
                on_demand=offer.on_demand_price or 0,
            )
        )
        self._bill(m)
        m.bid = price
        self._note_rate(m)
        if self.rng.random() < self.faults.lose_launch_after:
            raise LostAnswer

    def replace_members(self, ref: InstanceRef, ranks: Sequence[int], number: int) -> None:
        """Others have the places of these from now on, once for each number. LostAnswer: nobody will ever hear that."""
        m = self._of_several(ref)
        fresh = {rank for rank in ranks if m.came.get(rank, 0) < number or rank in m.gone}
        if m.dropped & set(ranks):
            raise Refused(LaunchFailure.REJECTED)
        room = self.room.get(m.host.name, m.offer.nodes)
        is_scarce = m.offer.nodes > room or self.rng.random() < self.replaces_seldom
        if fresh and (is_scarce or self.rng.random() < self.faults.refuse_launch):
            raise Refused
        if (healthy := fresh - m.gone - m.lost) and m.outcome is None:  # a call that took effect long after it was made
            m.lost |= healthy
            m.member_lost_at, m.member_saves = m.member_lost_at or self.now, False
        for rank in fresh:
            m.came[rank] = number
        m.gone -= fresh
        if self.rng.random() < self.faults.lose_launch_after:
            self.lost()
            raise LostAnswer

    def drop_members(self, ref: InstanceRef, ranks: Sequence[int]) -> None:
        """These are no part any more, and the others cost their own part."""
        m = self._of_several(ref)
        fresh = set(ranks) - m.dropped
        self._bill(m)
        before, left = m.offer.nodes, m.offer.nodes - len(fresh)
        m.dropped |= fresh
        m.gone -= fresh
        m.counts.append((self.now, m.offer.gpu_count))
        m.offer = gang_of(_one_of(m.offer), left)
        m.bid = m.bid * left // before
        m.task = replace(m.task, disk_gb=m.task.disk_gb // before * left)
        self._note_rate(m)
        if self.rng.random() < self.faults.lose_launch_after:
            self.lost()
            raise LostAnswer

    def note_call(self, ref: InstanceRef, ranks: Sequence[int], number: int | None) -> None:
        """Such a call is made: with the number of a round, or to leave them out."""
        m = self.machines.get(ref.instance_id)
        if m is None or not m.alive or m.outcome is not None or m.said is not None or m.is_over_unheard:
            return  # what its owner knows may be from before it was outbid
        fresh = {rank for rank in ranks if number is None or m.came.get(rank, 0) < number} - m.dropped
        is_first = m.first in fresh and not m.without_first
        if (healthy := fresh - m.gone - m.lost) or is_first:
            m.odd_calls.append(f"ranks {sorted(ranks)} were replaced or left out, {sorted(healthy)} of them healthy")

    def _of_several(self, ref: InstanceRef) -> Machine:
        self._answer()
        if self.rng.random() < self.faults.lose_launch_before:
            self.lost()
            raise LostAnswer
        m = self.machines.get(ref.instance_id)
        if m is None or m.state is not InstanceState.RUNNING or m.notice_at is not None:
            raise Refused(LaunchFailure.REJECTED)
        return m

    def terminate(self, ref: InstanceRef) -> None:
        if ref.instance_id.startswith("foreign"):
            self.foreign_touched.append(ref.instance_id)
            return
        self._answer()
        if self.rng.random() < self.faults.fail_terminate:
            raise CloudDown
        machine = self.machines.get(ref.instance_id)
        if machine is not None and machine.end_taken is None:
            machine.end_taken = self.now
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
            key=m.label or m.key,
            state=m.state,
            market=m.host.offer.market,
            host_id=m.host.offer.host_id,
            price=MicroUsdPerHour(self._gpu_price(m)),
            created_at=LONG_AGO if self.trade.born_long_ago else m.since,
            loss=m.loss if self.states_cause(m) else None,
            ended_at=m.died if self.faults.cause_lag else None,
            notice_at=(m.notice_at or m.lapses_at) if m.alive else None,
            bid_floor=self._floor(m) if self.trade.states_floor else None,
        )

    def _floor(self, m: Machine) -> MicroUsdPerHour:
        """What wins on its host, or, as often, what is bid for it."""
        return MicroUsdPerHour(m.bid if self.rng.random() < 0.5 else m.host.price * m.offer.nodes)

    def part_of(self, owner: str, read: list[tuple[datetime, datetime]]) -> Cloud:
        """What one install has had of it, for the oracles."""
        part = copy(self)
        part.read = read
        part.machines = {i: m for i, m in self.machines.items() if owner_of(m.key) == owner}
        part.active = {i: m for i, m in self.active.items() if owner_of(m.key) == owner}
        part.launch_calls = [call for call in self.launch_calls if owner_of(call.key) == owner]
        part.bid_calls = [call for call in self.bid_calls if owner_of(call.key) == owner]
        part.lost_answers = [m for m in self.lost_answers if owner_of(m.key) == owner]
        return part

    def make_traffic_free(self) -> None:
        """In the calm every job must find an offer under its ceiling, however much it uploads."""
        self.trade = replace(self.trade, upload_price=0, download_price=0)
        for host in self.hosts:
            host.offer = replace(host.offer, upload_price=MicroUsdPerGb(0), download_price=MicroUsdPerGb(0))
        self._rows = None
