"""What differs from seed to seed: markets, faults, jobs, limits, and how the user behaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from random import Random
from typing import Any

from spotd.core.domain.intents import JobId
from spotd.core.domain.jobs import Job, new_job
from spotd.core.domain.policy import Policy, ProviderPolicy
from spotd_jobs.spec.model import (
    Deadline,
    GpuAlternative,
    JobSpec,
    MarketChoice,
    PolicyName,
    PriceLimit,
    Resources,
    Schedule,
    WatchdogPolicy,
)
from spotd_jobs.spec.model import Work as StatedWork
from spotd_jobs.wire.reports import Outcome
from spotd_providers.contract.values import InstallId, Interruption, Market
from tests.sim.cloud import Cloud, Trade
from tests.sim.daemon import EPOCH, Work
from tests.sim.hazards import Hazard
from tests.sim.machines import Faults

INSTALL = InstallId("lab")
WINDOW = timedelta(minutes=4)
"""More than the slowest launch and the worst lag of a list together, as the contract asks of a plugin."""
GPU_COUNTS = (1, 8, 2, 4)
WITH_CPUS = {(1,): (1, 0), GPU_COUNTS: (*GPU_COUNTS, 0)}
WATCHDOG = WatchdogPolicy(no_progress=timedelta(minutes=30))
CHEAP_STORAGE = 3_000
"""With it a disk for 10 TB stays under every ceiling."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The size and the character of a world; everything else comes from its seed."""

    jobs: int = 6
    hosts: int = 5
    storm: timedelta = timedelta(hours=12)
    crash_rate: float = 0.02
    """At each named point."""
    kills_per_hour: float = 0.1
    outages_per_hour: float = 0.05
    """Of each provider, of the store, and how often a killed daemon stays away for hours instead of seconds."""
    faults: bool = True
    user: bool = True
    whims_per_hour: float = 0.3
    reachable: bool = False
    """Hosts and stores answer, and machines end when told: what budgets can be held to."""
    job_budget: int | None = None
    limits: Mapping[str, object] = field(default_factory=dict)
    hazards: frozenset[Hazard] = frozenset()
    need: tuple[int, int] = (20, 400)
    """Minutes of work in a job, least and most."""
    floors: bool = False
    """Lists of the bid market state what wins, and bids can be changed."""
    watched: bool = False
    """Jobs have a watchdog; they print nothing and save all the time."""
    paces: tuple[int, ...] = (30, 60, 120, 240)
    """Seconds between two polls, one of these."""


QUIET = Shape(faults=False, user=False, crash_rate=0.0, kills_per_hour=0.0, outages_per_hour=0.0)


def policy(clouds: list[Cloud], pace: timedelta, **limits: Any) -> Policy:
    causes_within = limits.pop("causes_within", timedelta(0))
    rules = {
        c.name: ProviderPolicy(
            name=c.name,
            fee_ppm=c.fee_ppm,
            quote_ttl=max(timedelta(minutes=5), 3 * pace),
            reconcile_window=WINDOW,
            provision_timeout=timedelta(minutes=20) + (c.trade.queue_wait or timedelta(0)),
            ends_itself=c.trade.ends_itself,
            is_own=c.trade.owned,
            replaces_first=c.trade.replaces,
            bills_from_running=c.trade.queue_wait is not None,
            causes_within=timedelta(0) if c.trade.owned else causes_within,
        )
        for c in clouds
    }
    base = Policy(
        install=INSTALL,
        providers=rules,
        silence_max=max(timedelta(minutes=2), 3 * pace),
        machines_max=64,
        recheck_every=max(timedelta(minutes=1), 2 * pace),
    )
    return replace(base, **limits)


def job(
    number: int,
    *,
    ceiling: int,
    at: datetime = EPOCH,
    budget: int | None = None,
    priority: int = 0,
    retries: int = 1,
    gpus: int = 1,
    nodes: int = 1,
    nodes_max: int | None = None,
) -> Job:
    spec = JobSpec(
        name=f"job{number}",
        run=("true",),
        image="scratch",
        resources=Resources(gpu=(GpuAlternative(name="RTX_4090", count=gpus),), nodes=nodes, nodes_max=nodes_max),
        price=PriceLimit(per_gpu_hour=ceiling),
        job_budget=budget,
        priority=priority,
        retry_errors=retries,
    )
    return new_job(JobId(f"j{number:03d}"), spec, at)


def stormy(rng: Random) -> Faults:
    return Faults(
        lose_launch_after=rng.choice([0.0, 0.1, 0.3]),
        lose_launch_before=rng.choice([0.0, 0.1]),
        refuse_launch=rng.choice([0.0, 0.2]),
        slow_launch=rng.choice([0.0, 0.1, 0.8]),
        fail_listing=rng.choice([0.0, 0.1, 0.4]),
        cut_listing=rng.choice([0.0, 0.1, 0.3]),
        lie_listing=rng.choice([0.0, 0.05]),
        bad_price=rng.choice([0.0, 0.1]),
        fail_terminate=rng.choice([0.0, 0.2, 0.5, 0.9]),
        forget_terminate=rng.choice([0.0, 0.1]),
        preempt_per_hour=rng.choice([0.0, 0.1, 0.6]),
        silence_per_hour=rng.choice([0.0, 0.1]),
        list_lag=timedelta(seconds=rng.choice([0, 30, 120])),
        store_down=rng.choice([0.0, 0.05]),
        bad_manifest=rng.choice([0.0, 0.05]),
        market_moves=True,
    )


def reachable(faults: Faults) -> Faults:
    return replace(
        faults,
        fail_terminate=0.0,
        forget_terminate=0.0,
        store_down=0.0,
        silence_per_hour=0.0,
        fail_listing=0.0,
        lie_listing=0.0,
    )


def some_job(rng: Random, luck: Random, number: int, shape: Shape, at: datetime) -> tuple[Job, Work]:
    """A job and what it really does; `luck` is the hazards' source of chance."""
    errors = rng.choice([0, 0, 0, 1, 2]) if shape.faults else 0
    gpus = luck.choice(GPU_COUNTS) if Hazard.GPUS in shape.hazards else 1
    nodes = luck.choice((1, 2, 4)) if Hazard.GANGS in shape.hazards else 1
    most = luck.choice((None, nodes + 1, 4, 4)) if Hazard.RANGES in shape.hazards and nodes == 2 else None
    made = job(
        number,
        ceiling=rng.randint(500_000, 1_500_000),
        at=at,
        budget=None if shape.job_budget is None else shape.job_budget * gpus * nodes,
        priority=rng.choice([-1, 0, 0, 5]),
        retries=rng.choice([1, 2]),
        gpus=gpus,
        nodes=nodes,
        nodes_max=most,
    )
    if Hazard.REPLACE in shape.hazards and nodes > 1:
        within = timedelta(minutes=luck.choice((0, 1, 10, 10, 60)))
        made = replace(made, spec=replace(made.spec, replace_within=within))
    if shape.watched:
        made = replace(made, spec=replace(made.spec, watchdog=WATCHDOG))
    need = timedelta(minutes=rng.randint(*shape.need))
    if Hazard.DEADLINES in shape.hazards:
        made = due(made, need, luck)
    never: Outcome | None = None
    if Hazard.NEVER_STARTS in shape.hazards and luck.random() < 0.3:
        never = luck.choice([Outcome.SETUP_FAILED, Outcome.RUNNER_ERROR])
    return made, Work(
        need=need,
        errors=errors,
        bytes=int(10 ** luck.uniform(3, 13)) if Hazard.SIZES in shape.hazards else 1000,
        never=never,
        no_secrets=Hazard.SECRETS in shape.hazards and never is None and luck.random() < 0.3,
    )


def may_share(made: Job, luck: Random) -> Job:
    """The job with what decides whose machine it may take over."""
    image = luck.choice(["scratch", "scratch", "scratch", "other"])
    spec = replace(made.spec, image=image, reuse=luck.random() < 0.85)
    return replace(made, spec=spec, submitted_by="agent" if luck.random() < 0.15 else made.submitted_by)


def due(made: Job, need: timedelta, luck: Random) -> Job:
    """The job with a deadline that may be tight, an estimate that may be wrong, and a policy."""
    schedule = Schedule(
        deadline=Deadline(span=timedelta(minutes=10) + need * luck.uniform(0.5, 6)),
        max_duration=need * luck.uniform(1, 4) + timedelta(minutes=5) if luck.random() < 0.2 else None,
        policy=luck.choice([None, *PolicyName]),
    )
    work = StatedWork(time=need * luck.choice([0.5, 1, 1, 1, 2])) if luck.random() < 0.9 else StatedWork()
    market = luck.choice([MarketChoice.AUTO, MarketChoice.AUTO, MarketChoice.AUTO, None])
    resources = replace(made.spec.resources, market=market)
    return replace(made, spec=replace(made.spec, schedule=schedule, work=work, resources=resources))


def trades(rng: Random, luck: Random, shape: Shape) -> dict[str, Trade]:
    """Who sells what in this world."""
    fee = rng.choice([1_000_000, 1_200_000])
    hazards = shape.hazards
    upload = luck.choice([0, 1_000, 10_000, 90_000]) if Hazard.TRAFFIC in hazards else 0
    bidders = Trade(
        bids=True,
        fee_ppm=fee,
        gpus=GPU_COUNTS if Hazard.GPUS in hazards else (1,),
        upload_price=upload,
        download_price=upload // 2,
        states_floor=shape.floors,
    )
    if Hazard.BORN_LONG_AGO in hazards:
        bidders = replace(bidders, born_long_ago=True)
    if Hazard.SIZES in hazards:
        bidders = replace(bidders, storage_price=CHEAP_STORAGE)
    zones = Trade(
        storage_price=bidders.storage_price,
        gpus=GPU_COUNTS if Hazard.GPUS in hazards else (1,),
        interruption=Interruption.NOTICE if hazards & {Hazard.NOTICES, Hazard.HOURLY} else Interruption.SUDDEN,
        ends_itself=Hazard.REVOKED in hazards,
    )
    if Hazard.CPUS in hazards:
        bidders, zones = (replace(t, gpus=WITH_CPUS[tuple(t.gpus)]) for t in (bidders, zones))
    if Hazard.GANGS in hazards:
        bidders, zones = replace(bidders, gangs=True), replace(zones, gangs=True)
    if Hazard.REPLACE in hazards:
        bidders, zones = replace(bidders, replaces=True), replace(zones, replaces=luck.random() < 0.8)
    found = {"bidders": bidders, "zones": zones}
    if Hazard.ON_DEMAND in hazards:
        found["fixed"] = replace(zones, market=Market.ON_DEMAND, interruption=Interruption.NEVER)
    return found
