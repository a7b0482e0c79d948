"""The market: sales, prices and interruptions of its hosts.

Theory. Nothing happens between two instants at which something could change: a price moves, a stock-out begins or
ends, a machine becomes ready, a notice runs out, a scripted event is due. `advance` walks through those instants in
order and settles every host that has machines, so that the ledger is the same however seldom it is called: a server
that slept, was killed, or runs ten thousand times as fast as the wall clock bills the same seconds.

Every method is synchronous and not thread-safe; the server calls them from one thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Final

from spotd_providers.contract.values import HOURS_PER_STORAGE_MONTH, InstanceState, Loss, MicroUsdPerHour
from spotd_providers.contract.values import Market as Kind
from spotd_providers.local.hosts import HostClock, HostMachineState, MachineStatus
from spotd_providers.local.market.floor import Disturbance, Floor, Machine, MachineMemory, Sold, load, save, slots_of
from spotd_providers.local.settings import (
    START_SCRIPT_BYTES_MAX,
    EventSpec,
    Flavour,
    Happening,
    HostSpec,
    MarketSpec,
    Refusal,
    event_time,
)


class Refused(Exception):
    """A refusal of the market, which did nothing."""

    def __init__(self, refusal: Refusal, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.refusal = refusal
        self.field = field


_KEEP_GONE_REAL_S: Final = 120.0
"""However fast virtual time runs, a customer must have had the chance to see that a machine is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    at: datetime
    machine: Machine
    loss: Loss
    detail: str


class LocalMarket:
    """One market with its machines and ledger, below one folder."""

    def __init__(self, spec: MarketSpec, folder: Path, *, clock: HostClock) -> None:
        """Open the market as its last server left it, and let it catch up with the clock.

        Raises:
            BadPriceFile: a host's price file is missing or makes no sense.
        """
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder = folder
        self.clock = clock
        self._memory_file = folder / "market.json"
        now = clock.now()
        self.memory = load(self._memory_file) or MachineMemory(opened_at=now, reached=now)
        self.floor = Floor(spec, self.memory, folder, clock=clock)
        self.hosts = self.floor.hosts
        self.ledger = self.floor.ledger
        self.machines = self.floor.machines
        for machine in list(self.floor.existing()):
            sources: Container[str] = self.floor.sources if machine.market is Kind.SPOT else self.hosts
            if machine.host not in sources:
                self.floor.end(machine, now, Loss.HOST_LOST, "its host is not part of the market any more")
            elif not self.ledger.is_open(machine.machine_id):
                self.floor.open_in_ledger(machine)
        self.advance()

    @property
    def spec(self) -> MarketSpec:
        return self.floor.spec

    def close(self) -> None:
        """Close the ledger; the machines go on."""
        self._save()
        self.ledger.close()

    def sold(self) -> tuple[Sold, ...]:
        """Return everything that can be bought now."""
        self.advance()
        now = self.memory.reached
        return tuple(item for host in self.hosts.values() for item in self.floor.sold_on(host, now))

    def launch(
        self,
        *,
        key: str,
        install: str,
        offer_id: str,
        price_max: MicroUsdPerHour,
        image: str,
        disk_gb: int,
        start_script: str,
        nodes: int = 1,
        expired: Callable[[], bool] = lambda: False,
    ) -> Machine:
        """Make one more machine, even if another one carries the same key; of several `nodes` all or none.

        `expired` says whether the customer has given up waiting: a launch that counts as lost must not happen later.

        Raises:
            Refused: none was made, and why.
        """
        self.advance()
        now = self.memory.reached
        if expired():
            raise Refused(Refusal.REJECTED, "it came too late", field="expires_at")
        host, kind = self._parse_offer(offer_id)
        if len(start_script.encode()) > START_SCRIPT_BYTES_MAX:
            raise Refused(Refusal.REJECTED, f"longer than {START_SCRIPT_BYTES_MAX} bytes", field="start_script")
        if disk_gb > host.disk_gb_max:
            raise Refused(Refusal.REJECTED, f"{host.name} has at most {host.disk_gb_max} GB", field="disk_gb")
        if slots_of(self.floor.existing()) + nodes > self.spec.machines_max:
            raise Refused(Refusal.QUOTA, f"this account may have {self.spec.machines_max} machines")
        offers = {item.kind: item for item in self.floor.sold_on(host, now)}
        if kind not in offers:
            raise Refused(Refusal.NO_CAPACITY, f"{host.name} has no {kind} machine to give now")
        if not self.floor.has_room(host, kind, nodes, now):
            raise Refused(Refusal.NO_CAPACITY, f"{host.name} has no {nodes} {kind} machines to give at once now")
        price = MicroUsdPerHour(offers[kind].price * nodes)
        if price_max < price:
            raise Refused(Refusal.PRICE_MOVED, f"{host.name} costs more than {price_max} micro-dollars per hour now")
        self.memory.launches += 1
        host_number = self.memory.launches_by_host.get(host.name, 0) + 1
        self.memory.launches_by_host[host.name] = host_number
        machine = Machine(
            machine_id=f"m-{self.memory.launches:06d}",
            number=self.memory.launches,
            key=key,
            install=install,
            host=host.name,
            market=kind,
            image=image,
            disk_gb=disk_gb,
            start_script=start_script,
            price_max=price_max,
            price=price_max if kind is Kind.SPOT and host.flavour is Flavour.SUDDEN else price,
            storage=MicroUsdPerHour(-(-host.storage_gb_month * disk_gb * nodes // HOURS_PER_STORAGE_MONTH)),
            created_at=now,
            ready_at=now + self.spec.provisioning,
            visible_at=now + self.spec.list_lag,
            host_number=host_number,
            nodes=nodes,
        )
        self.memory.machines[machine.machine_id] = machine
        try:
            self._save()
            self.floor.open_in_ledger(machine)
        except OSError as exc:
            # What cannot be written down is not sold: a machine that a restart forgets would run for ever.
            del self.memory.machines[machine.machine_id]
            self.floor.dirty = True
            with contextlib.suppress(OSError):
                self._save()
            raise Refused(Refusal.INTERNAL, f"the market cannot write its ledger: {exc.strerror}") from exc
        self.floor.boot_if_ready(machine, now)
        self._save()
        return machine

    def listing(self, *, install: str, key: str | None = None) -> tuple[Machine, ...]:
        """Return the machines of one install that lists show, the recently gone included."""
        self.advance()
        return tuple(
            machine
            for machine in self.memory.machines.values()
            if machine.install == install and key in (None, machine.key) and machine.visible_at <= self.memory.reached
        )

    def terminate(self, machine_id: str, *, install: str) -> None:
        """End the machine; one that does not exist is a success."""
        self.advance()
        machine = self.memory.machines.get(machine_id)
        if machine is not None and machine.exists and machine.belongs_to(install):
            self.floor.end(machine, self.memory.reached, None, "terminated by its owner")
            self._save()

    def replace_members(
        self, machine_id: str, *, install: str, ranks: Sequence[int], number: int, start_script: str
    ) -> None:
        """End these of several machines and start others in their places, all or none; one of this round stays.

        Raises:
            Refused: it does not run, or there is no room.
        """
        machine = self._of_several(machine_id, ranks, install=install)
        if left_out := set(ranks) & set(machine.dropped):
            raise Refused(Refusal.REJECTED, f"ranks {sorted(left_out)} of {machine_id} were left out", field="ranks")
        old = [rank for rank in ranks if machine.rounds.get(rank, 0) < number or rank in machine.vanished]
        for rank in old:
            self.machines.kill(machine.member(rank))
        self._note_absent(machine)
        machine.vanished = sorted({*machine.vanished, *old})
        self.floor.dirty = True
        host = self.hosts[machine.host]
        if not self.floor.has_room(host, machine.market, len(old), self.memory.reached):
            raise Refused(Refusal.NO_CAPACITY, f"{host.name} has no {len(old)} {machine.market} machines to give now")
        for rank in old:
            machine.rounds[rank], machine.scripts[rank] = number, start_script
        machine.vanished = [rank for rank in machine.vanished if rank not in old]
        machine.detail = ""
        self._save()
        try:
            for rank in old:
                self.machines.remove(machine.member(rank))
                self.floor.start_member(machine, rank)
        except OSError as exc:
            self._note_absent(machine)
            self._save()
            raise Refused(Refusal.INTERNAL, f"it could not be started: {exc.strerror}") from exc

    def drop_members(self, machine_id: str, *, install: str, ranks: Sequence[int]) -> None:
        """End these of several machines; the others go on, and cost their part.

        Raises:
            Refused: it does not run.
        """
        machine = self._of_several(machine_id, ranks, install=install)
        before, gone = machine.nodes, [rank for rank in ranks if rank not in machine.dropped]
        for rank in gone:
            self.machines.kill(machine.member(rank))
        machine.launched_nodes = machine.launched_nodes or machine.nodes
        machine.dropped = sorted({*machine.dropped, *gone})
        machine.vanished = [rank for rank in machine.vanished if rank not in gone]
        machine.nodes -= len(gone)
        for name in ("price_max", "price", "storage"):
            setattr(machine, name, MicroUsdPerHour(getattr(machine, name) * machine.nodes // before))
        now = self.memory.reached
        self.ledger.price(machine.machine_id, at=now, compute=machine.price, storage=machine.storage)
        self._save()

    def _of_several(self, machine_id: str, ranks: Sequence[int], *, install: str) -> Machine:
        machine = self.get(machine_id, install=install)
        if machine.state is not InstanceState.RUNNING or machine.doomed_at is not None:
            raise Refused(Refusal.NO_MACHINE, f"machine {machine_id} does not run, or is being taken away")
        nodes = machine.launched_nodes or machine.nodes
        if nodes == 1 or not all(0 <= rank < nodes for rank in ranks):
            raise Refused(Refusal.REJECTED, f"machine {machine_id} has no such ranks", field="ranks")
        if not set(machine.ranks) - set(ranks):
            raise Refused(Refusal.REJECTED, f"no machine of {machine_id} would be left", field="ranks")
        return machine

    def change_bid(self, machine_id: str, *, install: str, price: MicroUsdPerHour) -> None:
        """Set the machine's bid.

        Raises:
            Refused: it does not exist, or there is nothing to bid for.
        """
        machine = self.get(machine_id, install=install)
        if machine.market is not Kind.SPOT or self.hosts[machine.host].flavour is not Flavour.SUDDEN:
            raise Refused(Refusal.REJECTED, "bids exist for spot machines of a bid market only", field="price")
        machine.price_max = machine.price = price
        self.ledger.price(machine_id, at=self.memory.reached, compute=price)
        self.floor.dirty = True
        self.floor.settle(machine.host, self.memory.reached)
        self._save()

    def bid_floor(self, machine: Machine) -> MicroUsdPerHour | None:
        """Return the lowest bid that keeps or gets this machine now; `None` where there are no bids."""
        host = self.hosts.get(machine.host)
        if host is None or machine.market is not Kind.SPOT or host.flavour is not Flavour.SUDDEN or host.spot is None:
            return None
        return MicroUsdPerHour(self.floor.tick(host.name, self.memory.reached).price * machine.nodes)

    def get(self, machine_id: str, *, install: str) -> Machine:
        """Return the machine of this install, in any state but gone.

        Raises:
            Refused: there is none.
        """
        self.advance()
        machine = self.memory.machines.get(machine_id)
        if machine is None or not machine.belongs_to(install) or not machine.exists:
            raise Refused(Refusal.NO_MACHINE, f"there is no machine {machine_id}")
        return machine

    def preempt(self, machine: Machine, *, notice: bool | None, lasting: timedelta, at: datetime | None = None) -> None:
        """Take the machine away as its host's flavour has it; the cause lasts for a while."""
        now = at or self.memory.reached
        host = self.hosts[machine.host]
        cause = Disturbance(host=host.name, start=now, end=now + lasting)
        if host.flavour is Flavour.SUDDEN:
            cause.price = MicroUsdPerHour(machine.price_max // machine.nodes * 5 // 4 + 1)
        with_notice = host.flavour is Flavour.NOTICE if notice is None else notice
        if with_notice:
            # The cause follows the notice, or the host's own rule would take the machine at once.
            cause.start, cause.end = cause.start + self.spec.notice_lead, cause.end + self.spec.notice_lead
            self.floor.give_notice(machine, now)
        else:
            self.floor.take_away(machine, now)
        self.disturb(cause)
        self.floor.settle(host.name, now)
        self._save()

    def crash(self, machine: Machine, *, at: datetime | None = None) -> None:
        """End the machine as if its host had died."""
        self.floor.end(machine, at or self.memory.reached, Loss.HOST_LOST, "the host does not answer")
        self._save()

    def disturb(self, cause: Disturbance) -> None:
        """Change the host's prices or stock until the disturbance ends."""
        self.memory.disturbances.append(cause)
        self.floor.dirty = True

    def shut_down(self) -> None:
        """End every machine."""
        self.advance()
        for machine in list(self.floor.existing()):
            self.floor.end(machine, self.memory.reached, None, "the market was shut down")
        self.machines.kill_all()
        self._save()

    def advance(self) -> datetime | None:
        """Apply everything due by now; return the next instant at which something is due, or `None`."""
        now = max(self.clock.now(), self.memory.reached)
        ends = self._ends_seen(now)
        while True:
            due = self._next_due(self.memory.reached)
            upto = now if due is None else min(due, now)
            while ends and ends[0].at <= upto:
                ended = ends.pop(0)
                self.floor.end(ended.machine, max(ended.at, self.memory.reached), ended.loss, ended.detail)
            self.memory.reached = upto
            self._apply(upto)
            if upto == now:
                break
        self._forget(now)
        if self.floor.dirty:
            self._save()
        return self._next_due(now)

    def running(self) -> bool:
        """Whether any machine has processes to watch."""
        return any(machine.state is InstanceState.RUNNING for machine in self.floor.existing())

    def exists_any(self) -> bool:
        return any(True for _ in self.floor.existing())

    def _next_due(self, now: datetime) -> datetime | None:
        """Return the first instant after `now` at which a machine may change or an event is due."""
        dues = [at for _, at in self._open_events()]
        hosts = set()
        for machine in self.floor.existing():
            dues.extend(at for at in (machine.doomed_at,) if at is not None)
            if machine.state is InstanceState.PENDING:
                dues.append(machine.ready_at)
            if machine.market is Kind.SPOT:
                hosts.add(machine.host)
        for host in hosts:
            change = self.floor.sources[host].next_change(now)
            if change is not None:
                dues.append(change)
            for cause in self.memory.disturbances:
                if cause.host == host:
                    dues.extend((cause.start, cause.end))
        return min((at for at in dues if at > now), default=None)

    def _apply(self, now: datetime) -> None:
        """Apply what is due at this very instant."""
        for index, at in list(self._open_events()):
            if at <= now:
                self.memory.fired.append(index)
                self.floor.dirty = True
                self._happen(self.spec.events[index], now)
        for machine in list(self.floor.existing()):
            if machine.doomed_at is not None and machine.doomed_at <= now:
                self.floor.take_away(machine, machine.doomed_at)
            self.floor.boot_if_ready(machine, now)
        for host in sorted({machine.host for machine in self.floor.existing() if machine.market is Kind.SPOT}):
            self.floor.settle(host, now)

    def _open_events(self) -> Iterator[tuple[int, datetime]]:
        """Yield the scripted events that have not happened, with their instants as far as they are known."""
        for index, event in enumerate(self.spec.events):
            if index in self.memory.fired:
                continue
            at = event_time(event, self.memory.opened_at)
            if (launched := self._launch_of(event)) is not None:
                at = launched.created_at + event.delay
            if at is not None:
                yield index, at

    def _launch_of(self, event: EventSpec) -> Machine | None:
        """Return the machine whose launch an event follows: of its host where one is named, else of the market."""
        if event.after_launch is None:
            return None
        for machine in self.memory.machines.values():
            number = machine.number if event.host is None else machine.host_number
            if number == event.after_launch and event.host in {None, machine.host}:
                return machine
        return None

    def _happen(self, event: EventSpec, now: datetime) -> None:
        launched = self._launch_of(event)
        host = event.host or ("" if launched is None else launched.host)
        victims = [m for m in self.floor.existing() if m.host == host] if launched is None else [launched]
        if event.do is Happening.PRICE and event.price is not None:
            price = MicroUsdPerHour(event.price)
            self.disturb(Disturbance(host=host, start=now, end=now + event.lasting, price=price, exact=True))
        elif event.do is Happening.STOCK_OUT:
            self.disturb(Disturbance(host=host, start=now, end=now + event.lasting))
        for machine in victims:
            if event.do is Happening.CRASH and machine.exists:
                self.crash(machine, at=now)
            elif event.do is Happening.PREEMPT and machine.occupies:
                self.preempt(machine, notice=event.notice, lasting=event.lasting, at=now)

    def _ends_seen(self, now: datetime) -> list[_End]:
        """Return the machines whose processes have ended, in the order of their ends."""
        ends = []
        for machine in self.floor.existing():
            if machine.state is not InstanceState.RUNNING:
                continue
            self._note_absent(machine)
            status = self._status(machine.first)
            if status is not None and status.state is HostMachineState.RUNNING:
                continue
            if (status is None or status.state is HostMachineState.LOST) and self._runs_on(machine):
                continue  # the others end themselves, or their owner replaces the first one
            loss, detail, ended_at = (
                Loss.HOST_LOST,
                "its processes vanished",
                None if status is None else status.ended_at,
            )
            if status is not None and status.state is HostMachineState.ENDED:
                exit_words = f"its start script ended with exit code {status.exit_code}"
                loss, detail = Loss.SELF, "done" if status.done else exit_words
            ends.append(_End(at=min(ended_at or now, now), machine=machine, loss=loss, detail=detail))
        return sorted(ends, key=lambda end: end.at)

    def _note_absent(self, machine: Machine) -> None:
        """Note which of several machines vanished: each leaves its slot, and is replaced if its owner asks for that."""
        for rank in machine.ranks if len(machine.ranks) > 1 else ():
            status = self._status(machine.member(rank))
            if (status is None or status.state is HostMachineState.LOST) and rank not in machine.vanished:
                machine.vanished.append(rank)
                machine.detail = f"machine {rank + 1} of {machine.launched_nodes or machine.nodes} vanished"
                self.floor.dirty = True

    def _status(self, member: str) -> MachineStatus | None:
        return self.machines.status(member) if member in self.machines.ids() else None

    def _runs_on(self, machine: Machine) -> bool:
        """Whether one of several machines still runs."""
        found = [self._status(member) for member in machine.members] if len(machine.ranks) > 1 else []
        return any(one is not None and one.state is HostMachineState.RUNNING for one in found)

    def _forget(self, now: datetime) -> None:
        """Drop disturbances and machines that are long past."""
        if any(cause.end <= now for cause in self.memory.disturbances):
            self.memory.disturbances = [cause for cause in self.memory.disturbances if cause.end > now]
            self.floor.dirty = True
        for machine in list(self.memory.machines.values()):
            if machine.gone_at is None or machine.gone_at + self.spec.keep_gone > now:
                continue
            if self.clock.real_seconds(now - machine.gone_at) < _KEEP_GONE_REAL_S:
                continue
            del self.memory.machines[machine.machine_id]
            if not self.spec.keep_directories:
                for member in machine.members:
                    self.machines.remove(member)
            self.floor.dirty = True

    def _parse_offer(self, offer_id: str) -> tuple[HostSpec, Kind]:
        name, _, kind = offer_id.partition(":")
        host = self.hosts.get(name)
        sold = {Kind.SPOT: host.spot, Kind.ON_DEMAND: host.on_demand} if host else {}
        if host is None or kind not in sold or sold[Kind(kind)] is None:
            raise Refused(Refusal.NO_OFFER, f"there is no offer {offer_id}")
        return host, Kind(kind)

    def _save(self) -> None:
        save(self.memory, self._memory_file)
        self.floor.dirty = False
