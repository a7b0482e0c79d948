"""Own machines of a simulated world: computers with a few places each, a cluster with a queue, and their owner.

What is announced is announced `GRACE` before, a computer in its owner's hours offers nothing, and one that does not
answer makes lists incomplete. A job that waits in a queue does not compute and costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from random import Random
from typing import TYPE_CHECKING, Final

from spotd.core.domain.jobs import Job
from spotd.core.domain.policy import ProviderPolicy
from spotd_jobs.spec.model import MarketChoice
from spotd_providers.contract.values import (
    AttemptKey,
    HostId,
    Instance,
    InstanceRef,
    InstanceState,
    Interruption,
    Listing,
    Loss,
    Market,
    MicroUsdPerGb,
    MicroUsdPerGbMonth,
    MicroUsdPerHour,
    Offer,
    OfferId,
    PoolId,
    ProviderName,
)
from tests.sim.cloud import Cloud, Trade
from tests.sim.hazards import OWN_MACHINES, Hazard
from tests.sim.machines import BOOT, CloudDown, Host, Machine, Row, Task
from tests.sim.nature import MICROSECOND
from tests.sim.worlds import Shape

if TYPE_CHECKING:
    from tests.sim.weather import Weather

OWN_FROM: Final = 5_000_000
"""The first seed of these worlds."""
MINUTE: Final = timedelta(minutes=1)
HOUR: Final = timedelta(hours=1)
GRACE: Final = 10 * MINUTE
"""From the notice to the owner's hours."""
SHORT_STAY: Final = 15 * MINUTE
"""Nothing is offered so soon before the notice."""
SAVING_TAKES: Final = MINUTE
"""From a notice to the end of a command that saves for it."""
COUNTS: Final = (1, 2, 4, 8)
"""Of the places of a computer that one job may have."""
DEAR: Final = 5_000_000
"""Above each ceiling."""
REMOVED_FOR: Final = (10 * MINUTE, HOUR)


@dataclass(kw_only=True)
class Computer:
    """One own computer.

    Attributes:
        others: places that processes of somebody else have.
        is_taken: such a process has all of it from the first moment on, without end.
        wanted_from, wanted_until: when its owner wants it next, or has it now.
        silent_until: until when it does not answer.
    """

    name: str
    places: int
    price: int
    others: int = 0
    is_taken: bool = False
    wanted_from: datetime | None = None
    wanted_until: datetime | None = None
    silent_until: datetime | None = None


class OwnCloud(Cloud):
    """The computers of one provider of own machines."""

    def __init__(self, name: str, rng: Random, now: datetime, trade: Trade, computers: list[Computer]) -> None:
        super().__init__(name, 0, rng, now, trade)
        self.computers = {one.name: one for one in computers}
        self._places = {f"{one.name}:{n}": (one, n) for one in computers for n in COUNTS if n <= one.places}
        self.hosts = [self._offered_by(one, count) for one, count in self._places.values()]
        self.hours: list[tuple[str, datetime, datetime]] = []
        """When which computer was its owner's."""

    def _offered_by(self, one: Computer, count: int) -> Host:
        name, price = f"{one.name}:{count}", one.price * count
        is_queue = self.trade.queue_wait is not None
        offer = Offer(
            provider=self.name,
            offer_id=OfferId(name),
            host_id=None if is_queue else HostId(one.name),
            pool=PoolId(one.name),
            market=self.trade.market,
            interruption=self.trade.interruption,
            gpu="RTX_4090",
            gpu_count=count,
            gpu_price=MicroUsdPerHour(price),
            on_demand_price=MicroUsdPerHour(price),
            storage_price=MicroUsdPerGbMonth(0),
            upload_price=MicroUsdPerGb(0),
            download_price=MicroUsdPerGb(0),
        )
        return Host(name=name, provider=self.name, price=price, level=price, base=price, offer=offer)

    # --- computers ---

    def computer_of(self, m: Machine) -> Computer:
        return self._places[m.host.name][0]

    def place_of(self, offer: Offer) -> tuple[Computer, int]:
        return self._places[offer.offer_id]

    def on(self, one: Computer) -> list[Machine]:
        """Which machines compute there, or start."""
        return [m for m in self.active.values() if m.alive and m.queued_since is None and self.computer_of(m) is one]

    def free(self, one: Computer) -> int:
        used = sum(self._places[m.host.name][1] for m in self.on(one))
        return 0 if one.is_taken else max(0, one.places - used - one.others)

    def is_silent(self, one: Computer) -> bool:
        return one.silent_until is not None and self.now < one.silent_until

    def is_wanted(self, one: Computer, before: timedelta = timedelta(0)) -> bool:
        """Whether its owner has it, or will have it so soon."""
        begun, over = one.wanted_from, one.wanted_until
        return begun is not None and over is not None and begun - before <= self.now < over

    def _host_of(self, offer: Offer) -> Host:
        return next(h for h in self.hosts if h.name == offer.offer_id)

    def _is_busy(self, host: Host) -> bool:
        one, count = self._places[host.name]
        if self.is_silent(one) or self.is_wanted(one) or one.is_taken:
            return True
        return self.trade.queue_wait is None and self.free(one) < count

    # --- what the daemon can call ---

    def _answer(self) -> None:
        super()._answer()
        if all(self.is_silent(one) for one in self.computers.values()):
            raise CloudDown

    def rows(self) -> list[Row]:
        self._answer()
        self.leap, self.unleapt = 0, None  # its prices are the config's
        return [Row(offer=host.offer, price=host.price) for host in self.hosts if self._is_offered(host)]

    def _is_offered(self, host: Host) -> bool:
        one, _ = self._places[host.name]
        return not self._is_busy(host) and not self.is_wanted(one, GRACE + SHORT_STAY)

    def _made(self, key: AttemptKey, host: Host, offer: Offer, price_max: int, task: Task, lease: timedelta) -> Machine:
        one, count = self._places[host.name]
        has_room = self.free(one) >= count
        m = super()._made(key, host, offer, price_max, task, lease)
        if not has_room:
            m.queued_since = self.now
            self._note_rate(m)
        return m

    def listing(self) -> Listing:
        found = super().listing()
        hidden = {m.ref.instance_id for m in self.machines.values() if self.is_silent(self.computer_of(m))}
        if not any(self.is_silent(one) for one in self.computers.values()):
            return found
        seen = tuple(row for row in found.instances if row.ref.instance_id not in hidden)
        return replace(found, instances=seen, complete=False)

    def _shown(self, m: Machine) -> Instance:
        shown, waits = super()._shown(m), self.trade.queue_wait
        if m.queued_since is not None and m.alive and waits is not None and self.now - m.queued_since > waits:
            m.is_overdue = True
            return replace(shown, state=InstanceState.PAUSED, loss=Loss.NO_CAPACITY)
        return shown

    def terminate(self, ref: InstanceRef) -> None:
        m = self.machines.get(ref.instance_id)
        if m is not None and self.is_silent(self.computer_of(m)):
            raise CloudDown
        super().terminate(ref)

    # --- what happens by itself ---

    def keep_prices(self) -> None:
        """They are the config's, whatever the market does."""
        for host in self.hosts:
            one, count = self._places[host.name]
            host.base = host.level = host.price = one.price * count

    def move_prices(self, span: timedelta) -> None:
        for host in self.hosts:
            host.price = host.level = host.base
            self.relist(host)
        self._rows = None

    def advance(self, now: datetime) -> None:
        super().advance(now)
        for m in sorted((m for m in self.active.values() if m.queued_since is not None), key=lambda m: m.born):
            one, count = self._places[m.host.name]
            if self.free(one) >= count and not self.is_wanted(one):
                m.queued_since, m.since = None, now

    def _train(self, m: Machine) -> None:
        if m.queued_since is not None:
            m.since = self.now  # a job that waits does not come up
            return
        was_pending, notice, came_up = m.state is InstanceState.PENDING, m.notice_at, m.since + BOOT
        if was_pending and self.trade.queue_wait is not None and came_up < self.now:
            owed = super()._rate(m) * ((self.now - came_up) // MICROSECOND)  # it was billed as one that waits
            m.owed += owed
            m.owed_by_day[self.now.date()] += owed
        if m.noticed_at is not None and self.now < m.noticed_at + SAVING_TAKES:
            m.notice_at = None
        super()._train(m)
        m.notice_at = notice
        if was_pending and m.state is InstanceState.RUNNING:
            self._note_rate(m)

    def _rate(self, m: Machine) -> int:
        starts = m.state is InstanceState.PENDING and self.trade.queue_wait is not None
        return 0 if starts or m.state is InstanceState.PAUSED else super()._rate(m)

    def _take_back(self, m: Machine) -> None:
        if m.queued_since is not None:
            return
        self._end(m, Loss.PREEMPTED)

    def _end(self, m: Machine, loss: Loss) -> None:
        """A host keeps the row of what has ended until its end is ordered; a cluster does not."""
        self._halt(m, InstanceState.GONE if self.trade.queue_wait is not None else InstanceState.PAUSED, loss)

    # --- what its owner does ---

    def announce(self, one: Computer, at: datetime) -> None:
        for m in self.on(one):
            if m.notice_at is None:
                m.notice_at, m.noticed_at = at, self.now

    def clear(self, one: Computer, loss: Loss) -> None:
        for m in self.on(one):
            self._end(m, loss)

    def make_free(self) -> None:
        """In the calm."""
        for one in self.computers.values():
            one.others, one.silent_until, one.wanted_from, one.wanted_until = 0, None, None, None


def own_clouds(seed: int, shape: Shape, now: datetime) -> list[OwnCloud]:
    """The own machines of this world: computers of one's own, and maybe a cluster."""
    if Hazard.OWN not in shape.hazards:
        return []
    luck, most = Random(f"own computers of {seed}"), 8 if Hazard.GPUS in shape.hazards else 2
    places = [n for n in COUNTS if n <= most]

    def some(name: str, dear: bool) -> Computer:
        price = DEAR if dear else luck.choice([0, 0, 50_000, 150_000, 400_000])
        return Computer(name=name, places=luck.choice(places), price=price)

    home = [some(f"home-{n}", n == 2) for n in range(luck.choice([1, 1, 2, 3]))]
    if Hazard.OWNERS_JOBS in shape.hazards:
        home.append(Computer(name="home-taken", places=places[-1], price=0, is_taken=True))
    trade = Trade(
        market=Market.ON_DEMAND, interruption=Interruption.NOTICE, owned=True, ends_itself=True, storage_price=0
    )
    clouds = [OwnCloud("home", Random(luck.random()), now, trade, home)]
    if Hazard.QUEUE in shape.hazards:
        market = luck.choice([Market.SPOT, Market.ON_DEMAND])
        trade = replace(trade, market=market, queue_wait=MINUTE * luck.choice([5, 30]))
        clouds.append(OwnCloud("queue", Random(luck.random()), now, trade, [some("queue-0", dear=False)]))
    return clouds


def with_own(shape: Shape, seed: int) -> Shape:
    """The same world with own machines, and what happens to them."""
    luck = Random(f"own machines of {seed}")
    chances = {Hazard.NODES: 0.3, Hazard.OWN_REMOVED: 0.15}
    hazards = {h for h in sorted(OWN_MACHINES - {Hazard.OWN}) if luck.random() < chances.get(h, 0.5)}
    limits = {**shape.limits, "rent_after": luck.choice([timedelta(0), 10 * MINUTE, 30 * MINUTE, 2 * HOUR, 4 * HOUR])}
    reaches_all = shape.reachable and not hazards & {Hazard.NODES, Hazard.OWN_REMOVED}
    return replace(
        shape,
        hazards=shape.hazards | hazards | {Hazard.OWN},
        limits=limits,
        reachable=reaches_all,
        storm=min(shape.storm, 4 * HOUR),
        need=luck.choice([(20, 90), (60, 150)]),
    )


class Owners:
    """What the owners of own machines do, until the calm."""

    def __init__(self, weather: Weather) -> None:
        self.weather = weather
        self.hazards = weather.shape.hazards & OWN_MACHINES
        self.luck = Random(f"owners of {weather.seed}")
        self.clouds = [cloud for cloud in weather.clouds if isinstance(cloud, OwnCloud)]
        self.agenda = weather.agenda
        self.asks = Random(f"jobs for own machines of {weather.seed}")
        self.rules: Mapping[ProviderName, ProviderPolicy] = {}
        """As the config has them in the calm."""

    def begin(self) -> None:
        if not self.clouds:
            return
        self.rules = {cloud.name: self.weather.daemon.policy._policy.providers[cloud.name] for cloud in self.clouds}
        for cloud in self.clouds:
            cloud.manner, cloud.is_hourly = None, False
            if Hazard.NO_ON_DEMAND in self.weather.shape.hazards:
                cloud.closed = {}  # that is said of rented ones
            cloud.keep_prices()
            cloud.faults = replace(cloud.faults, overcharge_per_hour=0.0, spike_per_hour=0.0, bad_price=0.0)
        actions = {
            Hazard.OWNERS_HOURS: (0.4, self.want),
            Hazard.OWNERS_JOBS: (1.0, self.use),
            Hazard.NODES: (0.4, self.lose_sight),
            Hazard.REBOOTS: (0.2, self.reboot),
            Hazard.OWN_RELOADS: (0.7, self.reload),
            Hazard.OWN_REMOVED: (0.2, self.remove),
        }
        for hazard, (rate, action) in actions.items():
            if hazard in self.hazards:
                self.weather.often(rate, action, self.luck)

    def end(self) -> None:
        for cloud in self.clouds:
            cloud.advance(self.agenda.now)
            cloud.make_free()
        if not self.clouds:
            return
        daemon = self.weather.daemon
        daemon.removed = frozenset()
        if daemon.up and daemon.absent:
            daemon.kill()
        held = {cloud.name: replace(self.rules[cloud.name], fee_ppm=cloud.fee_ppm) for cloud in self.clouds}
        providers = {**daemon.policy._policy.providers, **held}
        self.configure(rent_after=self.weather.shape.limits["rent_after"], providers=providers)

    def asked(self, made: Job) -> Job:
        """The job, which may say itself how long it waits."""
        if not self.clouds:
            return made
        wanted, asks = made.spec.resources, self.asks
        if asks.random() < 0.4:
            span = asks.choice([timedelta(0), 10 * MINUTE, HOUR, 3 * HOUR])
            wanted = replace(wanted, rent_after=span)
        may_pay = made.spec.schedule.deadline is None and wanted.market in {None, MarketChoice.AUTO}
        if may_pay and asks.random() < 0.2:
            wanted = replace(wanted, market=MarketChoice.AUTO, on_demand_after=asks.choice([20 * MINUTE, 2 * HOUR]))
        return replace(made, spec=replace(made.spec, resources=wanted))

    def _one(self) -> tuple[OwnCloud, Computer]:
        cloud = self.luck.choice(self.clouds)
        cloud.advance(self.agenda.now)
        return cloud, self.luck.choice(list(cloud.computers.values()))

    def _soon(self, at: datetime, action: object) -> None:
        self.agenda.at(at, lambda: None if self.weather.is_calm else action())  # type: ignore[operator]  # a callable

    def want(self) -> None:
        """Its owner wants the computer back in a while, for some hours."""
        cloud, one = self._one()
        if one.wanted_until is not None and self.agenda.now < one.wanted_until:
            return
        one.wanted_from = begun = self.agenda.now + GRACE + MINUTE * self.luck.choice([0, 5, 40])
        one.wanted_until = over = begun + HOUR * self.luck.choice([0.2, 1, 3])
        cloud.hours.append((one.name, begun, over))

        def announce() -> None:
            cloud.advance(self.agenda.now)
            cloud.announce(one, begun)

        def take() -> None:
            cloud.advance(self.agenda.now)
            cloud.clear(one, Loss.PREEMPTED)

        self._soon(begun - GRACE, announce)
        self._soon(begun, take)

    def use(self) -> None:
        """A process of somebody else comes, on what is free or in the place of ours, and goes."""
        cloud, one = self._one()
        if self.luck.random() < 0.4 and cloud.on(one):
            m = self.luck.choice(cloud.on(one))
            if self.luck.random() < 0.5 and m.notice_at is None:
                m.notice_at, m.noticed_at = self.agenda.now + 2 * MINUTE, self.agenda.now
                return
            if m.notice_at is None:
                cloud.clear(one, Loss.PREEMPTED)
        if one.others == 0 and cloud.free(one) > 0:
            one.others = self.luck.randint(1, cloud.free(one))
            self._soon(self.agenda.now + MINUTE * self.luck.choice([5, 60, 240]), lambda: setattr(one, "others", 0))

    def lose_sight(self) -> None:
        """It does not answer; its machines compute on, and may be unable to write besides."""
        cloud, one = self._one()
        span = MINUTE * self.luck.choice([3, 20, 90])
        one.silent_until = self.agenda.now + span
        if self.luck.random() < 0.5:
            for m in cloud.on(one):
                cloud.hush(m, span)

    def reboot(self) -> None:
        cloud, one = self._one()
        cloud.clear(one, Loss.HOST_LOST)
        one.silent_until = self.agenda.now + self.luck.choice([0, 1, 1]) * BOOT

    # --- the config ---

    def configure(self, **limits: object) -> None:
        policy = self.weather.daemon.policy
        policy.reload(replace(policy._policy, **limits))  # type: ignore[arg-type]  # by name
        if self.weather.daemon.up:
            self.weather.daemon.process.wake_event.notify()

    def change(self, cloud: OwnCloud, **changes: object) -> None:
        policy = self.weather.daemon.policy._policy
        rules = replace(policy.providers[cloud.name], **changes)  # type: ignore[arg-type]  # by name
        self.configure(providers={**policy.providers, cloud.name: rules})

    def reload(self) -> None:
        cloud, span = self.luck.choice(self.clouds), MINUTE * self.luck.choice([5, 60])
        changed: Mapping[str, object] = self.luck.choice(
            [{"unusable": f"{cloud.name} is disabled in the config"}, {"is_own": False}, {}]
        )
        if not changed:
            self.configure(rent_after=self.luck.choice([timedelta(0), 10 * MINUTE, HOUR, 6 * HOUR]))
            return
        self.change(cloud, **changed)
        self._soon(self.agenda.now + span, lambda: self.change(cloud, unusable="", is_own=True))

    def remove(self) -> None:
        """Its owner takes the provider out of the config and starts the daemon again."""
        daemon = self.weather.daemon
        if daemon.removed or not daemon.open:
            return
        daemon.removed = frozenset({self.luck.choice(self.clouds).name})
        daemon.kill()
        self._soon(self.agenda.now + self.luck.choice(REMOVED_FOR), self.put_back)

    def put_back(self) -> None:
        daemon = self.weather.daemon
        daemon.removed = frozenset()
        if daemon.up and daemon.full_since is None:
            daemon.kill()
