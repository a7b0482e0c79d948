"""The slots of the market's hosts: which machines hold them at an instant, with the effects on machines and ledger.

Nothing here reads a clock: every change is given the instant at which it happens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter

from spotd_providers.contract.values import InstanceState, Loss, Market, MicroUsdPerHour
from spotd_providers.contract.values import Market as Kind
from spotd_providers.kit.text import begins_like_ours, write_atomically
from spotd_providers.local.hosts import HostClock, Ledger, Machines
from spotd_providers.local.market.series import BUILTIN_HOSTS, PriceSource, Tick, price_source
from spotd_providers.local.settings import Flavour, HostSpec, MarketSpec

# A machine of the market, and the file with the market's state.


@dataclass(slots=True, kw_only=True)
class Machine:
    """One machine.

    Attributes:
        price_max: the bid in a bid market; else the most it may cost.
        price: what an hour costs now while it runs, without its disk.
        ready_at: when its start script runs.
        visible_at: when it shows up in lists.
        doomed_at: when it will be taken away, once that is certain.
        number: which launch of the market this was, from 1.
        host_number: which launch on its host, from 1.
        nodes: how many machines of its host this is, which start together and end together; prices are of all.
        launched_nodes: how many they were at first; 0: as many.
        dropped: the ranks that are no part of it any more.
        vanished: the ranks whose processes vanished; each has left its slot.
        rounds: by rank, in which round its newest machine came, where that is not the first one.
        scripts: by rank, what such a machine runs.
    """

    machine_id: str
    number: int
    key: str
    install: str
    host: str
    market: Market
    image: str
    disk_gb: int
    start_script: str
    price_max: MicroUsdPerHour
    price: MicroUsdPerHour
    storage: MicroUsdPerHour
    created_at: datetime
    ready_at: datetime
    visible_at: datetime
    state: InstanceState = InstanceState.PENDING
    doomed_at: datetime | None = None
    loss: Loss | None = None
    detail: str = ""
    gone_at: datetime | None = None
    host_number: int = 0
    nodes: int = 1
    launched_nodes: int = 0
    dropped: list[int] = field(default_factory=list)
    vanished: list[int] = field(default_factory=list)
    rounds: dict[int, int] = field(default_factory=dict)
    scripts: dict[int, str] = field(default_factory=dict)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.launched_nodes or self.nodes) if rank not in self.dropped)

    def member(self, rank: int) -> str:
        """Return the id of the machine of this rank's processes; that of the first one at first is its own."""
        came = self.rounds.get(rank, 0)
        parts = (str(number) for number in ((rank, came) if came else (rank,) if rank else ()))
        return ".".join((self.machine_id, *parts))

    @property
    def members(self) -> tuple[str, ...]:
        """The ids of its processes' machines, by rank."""
        return tuple(map(self.member, self.ranks))

    @property
    def first(self) -> str:
        """The id of the first one of them, whose end is the end of all."""
        return self.member(self.ranks[0])

    @property
    def slots(self) -> int:
        """How many of its host's slots it takes."""
        return self.nodes - len(self.vanished)

    @property
    def exists(self) -> bool:
        return self.state is not InstanceState.GONE

    def belongs_to(self, install: str) -> bool:
        """Whether it carries this install's label and a key of its."""
        return self.install == install and begins_like_ours(self.key, install)

    @property
    def occupies(self) -> bool:
        """Whether it takes one of its host's slots."""
        return self.state in (InstanceState.PENDING, InstanceState.RUNNING)


def slots_of(machines: Iterable[Machine]) -> int:
    """Return how many of a host's slots these take."""
    return sum(machine.slots for machine in machines)


@dataclass(slots=True, kw_only=True)
class Disturbance:
    """A temporary change of a host's price or stock.

    Attributes:
        price: what a spot machine costs at least meanwhile; `None`: there are none to be had.
        exact: the price is this and not merely at least this.
    """

    host: str
    start: datetime
    end: datetime
    price: MicroUsdPerHour | None = None
    exact: bool = False

    def is_on(self, now: datetime) -> bool:
        return self.start <= now < self.end


@dataclass(slots=True, kw_only=True)
class MachineMemory:
    """The market's state, kept for the next server.

    Attributes:
        opened_at: when the market was opened first; scripted events and price files count from it.
        reached: up to when everything due has happened.
        fired: scripted events (by index) that have happened, or can no more.
    """

    opened_at: datetime
    reached: datetime
    launches: int = 0
    launches_by_host: dict[str, int] = field(default_factory=dict)
    machines: dict[str, Machine] = field(default_factory=dict)
    disturbances: list[Disturbance] = field(default_factory=list)
    fired: list[int] = field(default_factory=list)


_MEMORY: Final = TypeAdapter(MachineMemory)


def save(memory: MachineMemory, path: Path) -> None:
    write_atomically(path, _MEMORY.dump_json(memory).decode())


def load(path: Path) -> MachineMemory | None:
    try:
        return _MEMORY.validate_json(path.read_bytes())
    except FileNotFoundError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sold:
    """One thing the market sells now."""

    offer_id: str
    host: HostSpec
    kind: Kind
    price: MicroUsdPerHour


class Floor:
    """Hosts, their machines and their ledger.

    Attributes:
        dirty: something changed that the market's memory on disk does not hold yet.
    """

    def __init__(self, spec: MarketSpec, memory: MachineMemory, folder: Path, *, clock: HostClock) -> None:
        self.spec = spec
        self.memory = memory
        self.hosts = {host.name: host for host in spec.hosts or BUILTIN_HOSTS}
        self.sources: dict[str, PriceSource] = {
            host.name: price_source(host.spot, seed=spec.seed, host=host, opened_at=memory.opened_at)
            for host in self.hosts.values()
            if host.spot is not None
        }
        self.ledger = Ledger(folder / "ledger.jsonl")
        self.machines = Machines(folder / "machines", clock=clock)
        self.dirty = True

    def tick(self, host: str, now: datetime) -> Tick:
        """Return price and availability of a host's spot machines, disturbances included."""
        tick = self.sources[host].at(now)
        price, available = tick.price, tick.available
        for cause in self.memory.disturbances:
            if cause.host != host or not cause.is_on(now):
                continue
            if cause.price is None:
                available = 0
            else:
                price = cause.price if cause.exact else MicroUsdPerHour(max(price, cause.price))
        return Tick(price=price, available=available)

    def sold_on(self, host: HostSpec, now: datetime) -> Iterator[Sold]:
        occupied = [m for m in self.existing() if m.host == host.name and m.occupies]
        if slots_of(occupied) >= host.slots:
            return
        if host.spot is not None:
            tick = self.tick(host.name, now)
            if tick.available > slots_of(machine for machine in occupied if machine.market is Kind.SPOT):
                yield Sold(offer_id=f"{host.name}:{Kind.SPOT}", host=host, kind=Kind.SPOT, price=tick.price)
        if host.on_demand is not None:
            price = MicroUsdPerHour(host.on_demand)
            yield Sold(offer_id=f"{host.name}:{Kind.ON_DEMAND}", host=host, kind=Kind.ON_DEMAND, price=price)

    def has_room(self, host: HostSpec, kind: Kind, nodes: int, now: datetime) -> bool:
        """Whether so many machines can be given at once."""
        occupied = [m for m in self.existing() if m.host == host.name and m.occupies]
        free = host.slots - slots_of(occupied)
        if kind is Kind.SPOT:
            taken = slots_of(machine for machine in occupied if machine.market is Kind.SPOT)
            free = min(free, self.tick(host.name, now).available - taken)
        return nodes <= free

    def settle(self, name: str, now: datetime) -> None:
        """Give the host's spot slots at this instant to the highest bids; the others lose theirs."""
        host, tick = self.hosts[name], self.tick(name, now)
        here = [machine for machine in self.existing() if machine.host == name]
        on_demand = slots_of(machine for machine in here if machine.market is Kind.ON_DEMAND and machine.occupies)
        free = min(host.slots - on_demand, tick.available)
        bidders = [machine for machine in here if machine.market is Kind.SPOT and machine.doomed_at is None]
        free -= slots_of(machine for machine in here if machine.doomed_at is not None and machine.occupies)
        bidders.sort(key=lambda machine: (-(machine.price_max // machine.nodes), machine.number))
        for machine in bidders:
            wins = free >= machine.slots and machine.price_max >= tick.price * machine.nodes
            free -= machine.slots if wins else 0
            if wins and machine.state is InstanceState.PAUSED:
                self._wake(machine, now)
            elif not wins and machine.occupies:
                if host.flavour is Flavour.NOTICE:
                    self.give_notice(machine, now)
                else:
                    self.take_away(machine, now)
        if host.flavour is Flavour.NOTICE:
            for machine in here:
                if machine.market is Kind.SPOT and machine.occupies:
                    self._bill_market_price(machine, MicroUsdPerHour(tick.price * machine.nodes), now)

    def _bill_market_price(self, machine: Machine, price: MicroUsdPerHour, now: datetime) -> None:
        """Bill the market's price, never above what the customer agreed to, not even in the last two minutes."""
        price = min(price, machine.price_max)
        if price != machine.price:
            machine.price = price
            self.ledger.price(machine.machine_id, at=now, compute=price)
            self.dirty = True

    def existing(self) -> Iterator[Machine]:
        return (machine for machine in self.memory.machines.values() if machine.exists)

    def open_in_ledger(self, machine: Machine) -> None:
        self.ledger.open(
            machine.machine_id, machine.key, at=machine.created_at, compute=machine.price, storage=machine.storage
        )

    def boot_if_ready(self, machine: Machine, now: datetime) -> None:
        if machine.state is InstanceState.PENDING and machine.ready_at <= now:
            self._run(machine)

    def _run(self, machine: Machine) -> None:
        try:
            for rank in machine.ranks:
                self.start_member(machine, rank)
        except OSError as exc:
            self.end(machine, self.memory.reached, Loss.PROVISION_FAILED, f"could not be started: {exc.strerror}")
            return
        machine.state, machine.loss, machine.detail = InstanceState.RUNNING, None, ""
        self.dirty = True

    def start_member(self, machine: Machine, rank: int) -> None:
        """Start the machine of this rank, unless it runs.

        Raises:
            OSError: it cannot be started.
        """
        member = machine.member(rank)
        known, is_several = member in self.machines.ids(), (machine.launched_nodes or machine.nodes) > 1
        if known and self.machines.alive(member):
            return  # the server was killed between starting it and noting that
        if known:
            self.machines.restart(member)
        else:
            place = {"SPOTD_NODE_RANK": str(rank), "SPOTD_NODE_ADDRESS": "127.0.0.1"} if is_several else {}
            if rank in machine.rounds:
                place["SPOTD_NODE_ROUND"] = str(machine.rounds[rank])
            self.machines.start(member, machine.scripts.get(rank, machine.start_script), place)

    def kill(self, machine: Machine) -> None:
        """Kill every process of the machine, and of all that started with it."""
        for member in machine.members:
            self.machines.kill(member)

    def _wake(self, machine: Machine, now: datetime) -> None:
        self.ledger.resumed(machine.machine_id, at=now, compute=machine.price)
        self._run(machine)

    def give_notice(self, machine: Machine, now: datetime) -> None:
        if machine.doomed_at is not None:
            return  # it has its notice already, and is taken when that said
        machine.doomed_at = now + self.spec.notice_lead
        machine.detail = "will be taken away"
        if machine.state is InstanceState.RUNNING:
            for member in machine.members:
                self.machines.notice(member, machine.doomed_at)
        self.dirty = True

    def take_away(self, machine: Machine, now: datetime) -> None:
        """Stop and keep the machine in a bid market, end it elsewhere."""
        if self.hosts[machine.host].flavour is Flavour.NOTICE or machine.market is Kind.ON_DEMAND:
            self.end(machine, now, Loss.PREEMPTED, "the provider took it away")
            return
        self.kill(machine)
        self.ledger.paused(machine.machine_id, at=now, note="outbid")
        machine.state, machine.loss, machine.detail = InstanceState.PAUSED, Loss.OUTBID, "outbid"
        machine.doomed_at = None
        machine.vanished = []  # all of them wake together
        self.dirty = True

    def end(self, machine: Machine, at: datetime, loss: Loss | None, detail: str) -> None:
        self.kill(machine)
        self.ledger.end(machine.machine_id, at=at, note=detail)
        machine.state, machine.loss, machine.detail, machine.gone_at = InstanceState.GONE, loss, detail, at
        machine.doomed_at = None
        self.dirty = True
