"""Worlds that deceive: what makes a daemon stop machines that are well, buy above what is allowed, or wait for nothing.

They are short and dense, with many such events in a few hours, and most of them without the faults of other worlds:
what breaks a rule there is found within seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from random import Random
from typing import TYPE_CHECKING, Final

from spotd.core import requests
from spotd.core.domain.jobs import Job
from spotd.core.kernel.outcomes import LaunchFailure
from spotd_jobs.spec.model import PriceLimit
from spotd_providers.contract.values import InstanceState, Interruption, Loss, Market, MicroUsdPerGpuHour
from tests.sim.bills import ALL_STATED_AFTER, BILLS_READ_WITHIN, Manner
from tests.sim.cloud import Cloud
from tests.sim.daemon import CANCEL
from tests.sim.hazards import HARSH, HARSH_LATER, Hazard
from tests.sim.machines import WrongState
from tests.sim.plans import HARMLESS, with_plans
from tests.sim.worlds import Shape

if TYPE_CHECKING:
    from tests.sim.weather import Weather

HARSH_FROM: Final = 1_000_000
"""The first seed of these worlds."""
CEILINGS_FROM: Final = 1_000_321
"""And the first in which jobs may state no price of their own."""
CEILING: Final = 1_000_000
"""What the config of such a world accepts at first, per GPU-hour."""
MINUTE: Final = timedelta(minutes=1)
LEAP: Final = 100
RELOADS_PER_OPENING: Final = 0.3
FEE_ROSE_PPM: Final = 1_200_000
AWAY: Final = 40 * MINUTE
WITH: Final = tuple(
    sorted(HARMLESS | {Hazard.DEADLINES, Hazard.PREEMPT, Hazard.WATCHDOG, Hazard.CHAINS} - {Hazard.MONTH_END})
)
PER_HOUR: Final = 2.0
LISTS_APART: Final = timedelta(minutes=30)
WRONG: Final = (
    WrongState(state=InstanceState.PAUSED, loss=Loss.OUTBID),
    WrongState(state=InstanceState.PAUSED, loss=None),
    WrongState(state=InstanceState.GONE, loss=Loss.PREEMPTED),
    WrongState(state=InstanceState.GONE, loss=None),
)


def harsh(seed: int) -> Shape:
    """The world of this seed."""
    luck = Random(f"harsh world of {seed}")
    is_rough = luck.random() < 0.25
    hazards = frozenset(h for h in sorted(HARSH) if luck.random() < 0.4) or frozenset({luck.choice(sorted(HARSH))})
    hazards |= frozenset(h for h in WITH if luck.random() < 0.2)
    planned = {Hazard.BIDS, Hazard.MOVES} | (hazards & {Hazard.PREEMPT, Hazard.WATCHDOG, Hazard.CHAINS})
    if Hazard.NO_ON_DEMAND in hazards:
        hazards |= {Hazard.ON_DEMAND, Hazard.DEADLINES}
    if Hazard.VANISHING in hazards:
        hazards -= {Hazard.HOURLY}
    shape = Shape(
        jobs=luck.randint(2, 5),
        hosts=luck.randint(5, 6) if Hazard.GPUS in hazards else luck.randint(3, 6),
        storm=timedelta(hours=luck.choice([4, 6, 8])),
        crash_rate=0.01 if is_rough else 0.0,
        kills_per_hour=0.1 if is_rough else 0.0,
        outages_per_hour=0.05 if is_rough else 0.0,
        faults=is_rough,
        user=is_rough,
        reachable=not is_rough and Hazard.AWAY_AT_BARGAINS not in hazards,
        need=luck.choice([(60, 300), (120, 480)]),
        paces=(60,),
        hazards=hazards,
    )
    planned_shape = with_plans(shape, frozenset(planned), seed)
    limits = {**planned_shape.limits, "raise_bids": True, "moves_max": 5}
    limits["hold_max"] = MINUTE * luck.choice([5, 10, 15])
    if seed >= CEILINGS_FROM and Random(f"{Hazard.CEILINGS} in {seed}").random() < 0.4:
        planned |= {Hazard.CEILINGS}
        limits["ceiling_default"] = CEILING
    return replace(
        shape, hazards=shape.hazards | planned, limits=limits, hosts=planned_shape.hosts, floors=planned_shape.floors
    )


class Deceptions:
    """Brings the hazards of `HARSH` over a world until its calm."""

    def __init__(self, weather: Weather) -> None:
        self.weather = weather
        self.hazards = weather.shape.hazards & (HARSH | HARSH_LATER)
        self.luck = Random(f"deceptions of {weather.seed}")
        self.clouds = weather.clouds
        self.daemon = weather.daemon
        self.agenda = weather.agenda
        self.prices = Random(f"ceilings of {weather.seed}")
        self.closed: frozenset[str] = frozenset()
        """Hosts that sell nothing until the calm."""

    def begin(self) -> None:
        actions: Mapping[Hazard, Callable[[], None]] = {
            Hazard.LEAPS: self.leap,
            Hazard.WRONG_STATES: self.wrong_state,
            Hazard.LAPSES: self.lapse,
            Hazard.VANISHING: self.vanish,
            Hazard.AWAY_AT_BARGAINS: self.away_at_bargain,
        }
        for hazard, action in actions.items():
            if hazard in self.hazards:
                rate = 10.0 if hazard is Hazard.VANISHING else PER_HOUR
                self.weather.often(rate, action, self.luck)
        if Hazard.BAIT in self.hazards:
            for cloud in self.clouds:
                self.bait(cloud)
        for cloud in self.clouds:
            if Hazard.NO_ON_DEMAND in self.hazards and cloud.trade.market is Market.ON_DEMAND:
                cloud.closed = {host.name: self.refusal() for host in cloud.hosts}
            if Hazard.HOURLY in self.hazards and cloud.trade.interruption is Interruption.NOTICE:
                cloud.is_hourly = True
                cloud.faults = replace(cloud.faults, notice_per_hour=0.2, preempt_per_hour=0.05)
        self.closed = frozenset(name for cloud in self.clouds for name in cloud.closed)
        if Hazard.BILLS in self.hazards:
            for cloud in self.clouds:
                cloud.manner = self.luck.choice([None, *Manner])
        if Hazard.RELOADS in self.hazards:
            self.daemon.orders.opened = self.maybe_reload
        if Hazard.CEILINGS in self.hazards:
            self.configure(100)
            self.weather.often(PER_HOUR, self.configure_less, self.prices)

    def end(self) -> None:
        """The calm: nothing deceives any more."""
        for cloud in self.clouds:
            cloud.closed, cloud.wrong_states, cloud.leap = {}, {}, 0
            for m in cloud.active.values():
                m.lapses_at = None
        self.daemon.orders.opened = lambda _what: None
        if Hazard.RELOADS in self.hazards:
            self.restore_limits()
            self.restore_ceilings()
        if Hazard.CEILINGS in self.hazards:
            self.agenda.after(MINUTE, lambda: self.configure(100))

    def refusal(self) -> LaunchFailure:
        return self.luck.choice([LaunchFailure.NO_CAPACITY, LaunchFailure.OFFER_GONE, LaunchFailure.PRICE_MOVED])

    def bait(self, cloud: Cloud) -> None:
        for host in self.luck.sample(cloud.hosts, min(len(cloud.hosts), self.luck.choice([0, 1, 1, 2]))):
            cloud.closed[host.name] = self.refusal()
            host.base = host.level = host.price = max(20_000, host.base // 3)

    def leap(self) -> None:
        self.luck.choice(self.clouds).leap = self.luck.choice([-LEAP, -LEAP, LEAP])

    def wrong_state(self) -> None:
        cloud = self.luck.choice(self.clouds)
        alive = [m for m in cloud.active.values() if m.alive and m.alive_at is not None]
        if alive:
            m = self.luck.choice(alive)
            # Two lists in succession that state the same prove it by the contract: no two wrong ones lie that close.
            if m.misstated_at is None or self.agenda.now - m.misstated_at > LISTS_APART:
                cloud.wrong_states[m.ref.instance_id] = self.luck.choice(WRONG)

    def lapse(self) -> None:
        alive = [m for cloud in self.clouds for m in cloud.active.values() if m.alive and m.notice_at is None]
        if alive:
            m = self.luck.choice(alive)
            at = m.lapses_at = self.agenda.now + MINUTE * self.luck.choice([2, 5, 30])
            if self.luck.random() < 0.7:  # else it is stated on and on
                self.agenda.at(at + 2 * MINUTE, lambda: setattr(m, "lapses_at", None))

    def vanish(self) -> None:
        for cloud in self.clouds:
            cloud.advance(self.agenda.now)
            paused = [m for m in cloud.active.values() if m.state is InstanceState.PAUSED]
            if paused:
                cloud.vanish(self.luck.choice(paused))

    def waits_for_bills(self) -> bool:
        """Whether some machine may still be billed."""
        if Hazard.BILLS not in self.hazards:
            return False
        ended = [m.died for cloud in self.clouds for m in cloud.machines.values() if m.died is not None]
        return bool(ended) and self.agenda.now < max(ended) + ALL_STATED_AFTER + BILLS_READ_WITHIN

    # --- something cheap, and nobody to talk to ---

    def away_at_bargain(self) -> None:
        seller = self.luck.choice(self.clouds)
        used = {m.host.name for m in seller.active.values()}
        free = [host for host in seller.hosts if host.name not in used | seller.closed.keys()]
        if not free:
            return
        host = self.luck.choice(free)
        seller.advance(self.agenda.now)
        host.level = host.price = max(20_000, host.base // 4)
        seller.forget_rows()
        others = [cloud for cloud in self.clouds if cloud is not seller and cloud.active]
        if others and self.luck.random() < 0.5:
            other = self.luck.choice(others)
            other.down = True
            self.agenda.after(AWAY, lambda: setattr(other, "down", False))
        else:
            self.weather.store(up=False)
            self.agenda.after(AWAY, lambda: self.weather.store(up=True))

    # --- what its owner changes ---

    def maybe_reload(self, what: str) -> None:
        if self.luck.random() < RELOADS_PER_OPENING:
            span = MINUTE * self.luck.uniform(0, 8) if what == "hold" else timedelta(seconds=self.luck.uniform(0, 3))
            self.agenda.after(span, self.reload)

    def reload(self) -> None:
        if self.weather.is_calm or not self.daemon.open:
            return
        self.luck.choice([self.raise_fee, self.lower_ceilings, self.lower_budget, self.switch_off])()

    def raise_fee(self) -> None:
        """The provider takes more from now on, and the config says so."""
        cloud = self.luck.choice(self.clouds)
        cloud.set_fee(self.agenda.now, FEE_ROSE_PPM)
        self.change(cloud, fee_ppm=FEE_ROSE_PPM)

    def switch_off(self) -> None:
        cloud = self.luck.choice(self.clouds)
        self.change(cloud, unusable=f"{cloud.name} is disabled in the config")
        self.agenda.after(MINUTE * self.luck.choice([5, 60]), lambda: self.change(cloud, unusable=""))

    def change(self, cloud: Cloud, **changes: object) -> None:
        policy = self.daemon.policy._policy
        rules = replace(policy.providers[cloud.name], **changes)  # type: ignore[arg-type]  # by name
        self.daemon.policy.reload(replace(policy, providers={**policy.providers, cloud.name: rules}))
        self.daemon.process.wake_event.notify()

    def lower_budget(self) -> None:
        today = self.daemon.world.spent_by_day.get(self.daemon.now.date(), 0)
        policy = self.daemon.policy._policy
        self.daemon.policy.reload(replace(policy, budget_day=today + self.luck.choice([0, 50_000, 500_000])))  # type: ignore[arg-type]  # micro-dollars
        self.agenda.after(MINUTE * self.luck.choice([10, 60]), self.restore_limits)

    def restore_limits(self) -> None:
        self.daemon.policy.reload(replace(self.daemon.policy._policy, budget_day=None))
        for cloud in self.clouds:
            self.change(cloud, unusable="")

    def lower_ceilings(self) -> None:
        share = self.luck.choice([30, 60, 90])
        self.set_ceilings(share)
        self.agenda.after(MINUTE * self.luck.choice([10, 60]), self.restore_ceilings)

    def restore_ceilings(self) -> None:
        if self.daemon.open:
            self.set_ceilings(100)
        else:
            self.agenda.after(MINUTE, self.restore_ceilings)

    def priced(self, made: Job) -> Job:
        """The job, which may leave to the config what its machines may cost."""
        if Hazard.CEILINGS in self.hazards and self.prices.random() < 0.8:
            return replace(made, spec=replace(made.spec, price=None))
        return made

    def configure_less(self) -> None:
        """The config accepts less while machines run, and again more before long: less than it takes to notice it."""
        self.configure(self.prices.choice([15, 30, 60, 97]))
        self.agenda.after(MINUTE * self.prices.choice([0.05, 1, 30, 60]), lambda: self.configure(100))

    def configure(self, percent: int) -> None:
        accepted = MicroUsdPerGpuHour(CEILING * percent // 100)
        self.daemon.policy.reload(replace(self.daemon.policy._policy, ceiling_default=accepted))
        self.daemon.orders.ceilings.append((self.agenda.now, accepted))
        if self.daemon.up:
            self.daemon.process.wake_event.notify()

    def set_ceilings(self, percent: int) -> None:
        """What its owner asks for with `spotctl`: other ceilings of jobs."""
        daemon = self.daemon
        first = {i: job.spec.price for i, (job, _) in self.weather.submitted.items()}
        for i in sorted(daemon.world.jobs):
            price = first.get(i)
            if price is None or price.per_gpu_hour is None or daemon.world.jobs[i].state.is_final:
                continue
            limit = PriceLimit(per_gpu_hour=price.per_gpu_hour * percent // 100)
            daemon.request(
                lambda world, now, i=i, limit=limit: requests.set_ceiling(world, [world.jobs[i]], limit, now),  # type: ignore[misc]  # mypy cannot infer a lambda with a default
                CANCEL,
            )
